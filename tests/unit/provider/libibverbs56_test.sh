#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The provider and the preload, built on Debian 12, under libibverbs 56 and
# perftest of Debian 13. Needs root, and debootstrap with a network or, in
# VERBENA_DEBIAN13_ROOT, a folder that it made before:
#   debootstrap --variant=minbase --include=ibverbs-utils,perftest trixie DIR
# Run: bazel test //tests/unit/provider:libibverbs56_test
set -eu
export PATH="$PATH:/usr/sbin"  # debootstrap; Bazel gives tests a short one

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# In the mount namespace: $1 is Debian 13's root, $2 the work folder.
if [ "${1:-}" = --inside ]; then
  root=$2
  work=$3
  mkdir -p "$root/$work"
  mount --bind "$work" "$root/$work"
  mount -t proc proc "$root/proc"
  exec chroot "$root" /bin/sh "$work/commands"
fi

[ "$(id -u)" = 0 ] || fail "needs root"
work=$(mktemp -d /tmp/verbena-v56-XXXXXX)
daemon=
cleanup() {
  [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
  [ -z "$daemon" ] || wait "$daemon" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

root=${VERBENA_DEBIAN13_ROOT:-}
if [ -z "$root" ]; then
  root=$work/root
  timeout 600 debootstrap --variant=minbase --include=ibverbs-utils,perftest trixie "$root" \
    >"$work/debootstrap.log" 2>&1 || fail "debootstrap: $(tail -n 3 "$work/debootstrap.log")"
fi
ls "$root"/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.56.* >/dev/null || fail "not libibverbs 56"

cp provider/libverbena-rdmav34.so provider/libverbena-preload.so "$work/"
XDG_RUNTIME_DIR=$work timeout 280 nic_sim/verbenad --foreground --name v56 --nics 2 \
  >"$work/daemon.log" 2>&1 &
daemon=$!
for _ in $(seq 100); do
  [ -S "$work/verbena/v56.sock" ] && break
  sleep 0.1
done
[ -S "$work/verbena/v56.sock" ] || fail "daemon: $(cat "$work/daemon.log")"

cat >"$work/commands" <<END
set -eu
export XDG_RUNTIME_DIR=$work VERBENA_NAME=v56 PATH=/usr/sbin:/usr/bin:/sbin:/bin
export IBV_DRIVERS=$work/libverbena LD_PRELOAD=$work/libverbena-preload.so
ibv_devinfo -v -d verbena1 | grep -q '127.88.0.2, RoCE v2'
# pair COMMAND...: as server and as client.
port=20560
pair() {
  port=\$((port + 1))
  timeout 60 "\$@" -p \$port >$work/server.log 2>&1 &
  sleep 2
  timeout 60 "\$@" -p \$port 127.0.0.1
  wait \$!
}
pair ibv_rc_pingpong -d verbena0 -g 1 -c
pair ibv_rc_pingpong -d verbena0 -g 1 -c -e -s 65536
pair ib_write_bw -d verbena0 -x 1 -F -n 500
pair ib_send_bw -d verbena1 -x 1 -F -n 500 -e
pair ib_atomic_bw -d verbena0 -x 1 -F -n 200
echo all done
END
timeout 270 unshare -m --propagation private "$0" --inside "$root" "$work" >"$work/log" 2>&1 ||
  fail "$(cat "$work/log" "$work/server.log")"
grep -q '^all done$' "$work/log" || fail "$(cat "$work/log")"
