#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The Debian package in a clean Debian 12 folder (debootstrap): its dependencies suffice, the
# installed copy passes the quickstart as root and as a plain user, and nothing of it is left when
# it is removed. Needs root and the network; tagged. VERBENA_DEBIAN12 names a minimal Debian 12
# folder to copy (otherwise a new one is made).
#   bazel test //tests/package:deb_test
set -uo pipefail
export PATH="$PATH:/usr/sbin"  # debootstrap; Bazel gives tests a short one

[[ $EUID == 0 ]] || { echo "needs root for chroot"; exit 1; }
command -v debootstrap >/dev/null || { echo "needs debootstrap"; exit 1; }
if [[ -n ${TEST_SRCDIR:-} ]]; then
  tree=$TEST_SRCDIR/${TEST_WORKSPACE:-verbena} from=$TEST_SRCDIR/${TEST_WORKSPACE:-verbena}
else
  tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  from=${VERBENA_BIN:+$(dirname "$(dirname "$VERBENA_BIN")")}
  from=${from:-$tree/bazel-bin}
fi

work=$(mktemp -d /tmp/vdeb.XXXXXX)
root=$work/root
unset LD_PRELOAD IBV_DRIVERS VERBENA_SOCKET VERBENA_NAME XDG_RUNTIME_DIR

finish() {
  for at in proc sys dev; do
    mountpoint -q "$root/$at" && umount "$root/$at"
  done
  # Never remove below a mount that is still there.
  grep -q " $root/" /proc/mounts || rm -rf --one-file-system -- "$work"
}
trap finish EXIT

failed=0
check() {  # check NAME STATUS [LOG]
  if (($2 == 0)); then
    echo "ok: $1"
  else
    echo "FAILED: $1 (status $2)"
    [[ -z ${3:-} ]] || tail -n 40 "$3"
    failed=1
  fi
}

/usr/bin/python3 -B "$tree/tools/packaging/package.py" --from "$from" --out "$work" --deb \
  >"$work/package.log" 2>&1
check "the package is made" $? "$work/package.log"
deb=$(echo "$work"/*.deb)

mkdir "$root"
if [[ -n ${VERBENA_DEBIAN12:-} ]]; then
  cp -a "$VERBENA_DEBIAN12/." "$root"
else
  timeout 300 debootstrap --variant=minbase bookworm "$root" >"$work/debootstrap.log" 2>&1 ||
    { check debootstrap 1 "$work/debootstrap.log"; exit 1; }
fi
cp "$deb" "$root/verbena.deb"
mount -t proc proc "$root/proc" && mount -t sysfs -o ro sysfs "$root/sys" &&
  mount --bind /dev "$root/dev" || exit 1

inside() {
  timeout -k 5 300 chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C \
    HOME=/root DEBIAN_FRONTEND=noninteractive "$@" </dev/null
}

# What the system holds, without the package manager's own notes.
listing() {
  (cd "$root" && find . -xdev \( -path ./proc -o -path ./sys -o -path ./dev -o -path ./var/lib/dpkg \
    -o -path ./var/cache -o -path ./var/lib/apt -o -path ./var/log -o -name 'ld.so.cache*' \) \
    -prune -o -print | sort)
}

inside apt-get -q update >"$work/update.log" 2>&1
check "apt-get update" $? "$work/update.log"
inside apt-get -q -y --no-install-recommends install /verbena.deb >"$work/install.log" 2>&1
check "it installs with its dependencies alone" $? "$work/install.log"
inside verbena version >"$work/version.log" 2>&1
check "verbena runs with its dependencies alone" $? "$work/version.log"
inside sh -c 'verbena up --nics 2 && verbena down' >"$work/up.log" 2>&1
check "a daemon runs with its dependencies alone" $? "$work/up.log"
inside apt-get -q -y --no-install-recommends install ibverbs-providers ibverbs-utils perftest \
  >"$work/more.log" 2>&1
check "the recommended packages install" $? "$work/more.log"

inside apt-get -q -y purge verbena >"$work/purge.log" 2>&1
check "it can be purged" $? "$work/purge.log"
inside sh -c 'rm -rf /tmp/verbena-*'
listing >"$work/before"
inside dpkg -i /verbena.deb >"$work/again.log" 2>&1
check "it installs again" $? "$work/again.log"

inside /usr/share/verbena/quickstart >"$work/root.log" 2>&1
check "quickstart as root" $? "$work/root.log"
inside setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=/nonexistent \
  /usr/share/verbena/quickstart >"$work/nobody.log" 2>&1
check "quickstart as a plain user" $? "$work/nobody.log"
inside sh -c 'verbena up --system --nics 1 && verbena status --system' >"$work/system.log" 2>&1
check "a system-wide daemon" $? "$work/system.log"
inside sh -c 'test -s /usr/share/man/man1/verbena.1.gz || dpkg -L verbena | grep -q man1'
check "the manual page" $?

pid=$(inside cat /run/verbena/default.pid)
inside apt-get -q -y remove verbena >"$work/remove.log" 2>&1
check "it can be removed while its daemon runs" $? "$work/remove.log"
[[ -n $pid && ! -e /proc/$pid ]]
check "the system-wide daemon has ended" $?
[[ -f $root/etc/default/verbena ]]
check "removing keeps the configuration" $?
inside apt-get -q -y purge verbena >"$work/purge.log" 2>&1
check "purging" $? "$work/purge.log"
inside sh -c 'rm -rf /tmp/verbena-*'  # Of users, who could not have started daemons otherwise.
listing >"$work/after"
diff "$work/before" "$work/after" >"$work/diff"
check "nothing is left" $? "$work/diff"
exit "$failed"
