#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# First process of the interoperability guest: rdma_rxe on eth0, a side channel on eth1, and jobs.
# Kernel arguments: lab.ip=A/B lab.ip6=A/B (eth0), lab.mtu=N (eth0), lab.side=A/B (eth1).
# Jobs: one name per line on ttyS1; script /lab/NAME.sh on the shared folder, its output in
# NAME.out; "DONE NAME STATUS" comes back.
export PATH=/usr/bin:/usr/sbin:/bin:/sbin HOME=/root
# The shell would take busybox's own.
ip() { /usr/bin/ip "$@"; }
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev 2>/dev/null
/bin/busybox mkdir -p /dev/pts /dev/shm
/bin/busybox mount -t devpts pts /dev/pts
/bin/busybox mount -t tmpfs tmp /tmp
arg() { for w in $(cat /proc/cmdline); do case $w in lab.$1=*) echo "${w#lab.$1=}" ;; esac; done; }
ulimit -l unlimited
for m in /mod/*.ko; do insmod "$m" || echo "insmod $m failed"; done
ip link set lo up
ip link set eth0 mtu "$(arg mtu)"
sysctl -qw net.ipv6.conf.eth0.accept_dad=0 net.ipv6.conf.eth0.router_solicitations=0
ip link set eth0 up
ip addr add "$(arg ip)" dev eth0
ip addr add "$(arg ip6)" dev eth0 nodad
sysctl -qw net.ipv6.conf.eth1.disable_ipv6=1
ip addr add "$(arg side)" dev eth1
ip link set eth1 up
rdma link add rxe0 type rxe netdev eth0 || echo "rxe: link add failed"
mount -t 9p -o trans=virtio,version=9p2000.L,msize=65536,cache=none lab /lab || echo "9p failed"
stty -F /dev/ttyS1 raw -echo 2>/dev/null
exec 3<>/dev/ttyS1
echo "READY" >&3
while read -r J <&3; do
  case $J in
    POWEROFF) sync; poweroff -f ;;
    '') ;;
    *) (sh "/lab/$J.sh" >"/lab/$J.out" 2>&1 </dev/null; echo "DONE $J $?" >&3) & ;;
  esac
done
