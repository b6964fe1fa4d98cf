#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The same provider and preload under libibverbs 56: Debian 13 in a folder made by debootstrap.
# Needs root and the network; tagged. VERBENA_DEBIAN13 names a folder to use or to keep (otherwise
# a new one is made and removed).
#   bazel test //tests/apps:debian13_test
set -uo pipefail
export PATH="$PATH:/usr/sbin"  # debootstrap; Bazel gives tests a short one

[[ $EUID == 0 ]] || { echo "needs root for chroot"; exit 1; }
command -v debootstrap >/dev/null || { echo "needs debootstrap"; exit 1; }
verbena=${VERBENA_BIN:-${TEST_SRCDIR:-}/${TEST_WORKSPACE:-verbena}/tools/verbena}
verbena=$(realpath "$verbena") && [[ -x $verbena ]] || { echo "no verbena command"; exit 1; }
built=$(dirname "$(dirname "$verbena")")

root=${VERBENA_DEBIAN13:-$(mktemp -d /tmp/vdebian13.XXXXXX)}
folder=$(mktemp -d /tmp/vapp.XXXXXX)
export XDG_RUNTIME_DIR=$folder VERBENA_NAME=t
unset VERBENA_SOCKET LD_PRELOAD IBV_DRIVERS

finish() {
  timeout 20 "$verbena" down </dev/null >/dev/null 2>&1
  for at in proc dev "tmp/run" "opt/verbena"; do
    mountpoint -q "$root/$at" && umount "$root/$at"
  done
  # Never remove below a mount that is still there.
  if [[ -z ${VERBENA_DEBIAN13:-} ]] && ! grep -q " $root/" /proc/mounts; then
    rm -rf --one-file-system -- "$root"
  fi
  rm -rf -- "$folder"
}
trap finish EXIT

if [[ ! -x $root/usr/bin/ibv_devinfo ]]; then
  timeout 300 debootstrap --variant=minbase --include=ibverbs-utils,perftest \
    trixie "$root" >"$folder/debootstrap.log" 2>&1 ||
    { tail -n 20 "$folder/debootstrap.log"; echo "debootstrap failed"; exit 1; }
fi
version=$(chroot "$root" dpkg-query -W -f '${Version}' libibverbs1)
echo "libibverbs $version"
[[ $version == 56.* ]] || { echo "expected version 56"; exit 1; }

timeout 60 "$verbena" up --nics 2 </dev/null || exit 1
# The daemon's paths are the same inside: its socket by bind mounts of the run folder.
install -d "$root/opt/verbena" "$root$folder" "$root/tmp/run"
install -m 755 "$built/provider/libverbena-rdmav34.so" "$built/provider/libverbena-preload.so" \
  "$root/opt/verbena/"
mount -t proc proc "$root/proc" && mount --bind /dev "$root/dev" &&
  mount --bind "$folder" "$root/tmp/run" || exit 1

inside() {
  timeout -k 5 60 chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    IBV_DRIVERS=/opt/verbena/libverbena LD_PRELOAD=/opt/verbena/libverbena-preload.so \
    VERBENA_SOCKET=/tmp/run/verbena/t.sock IBV_SHOW_WARNINGS=1 "$@" </dev/null
}

failed=0
check() {  # check NAME STATUS LOG...
  if (($2 == 0)); then
    echo "ok: $1"
  else
    echo "FAILED: $1 (status $2)"
    shift 2
    tail -n 30 "$@"
    failed=1
  fi
}

# pair NAME PORT COMMAND...: server with -d verbena0, client with -d verbena1.
pair() {
  local name=$1 port=$2 pid
  shift 2
  inside "$@" -d verbena0 >"$folder/server.log" 2>&1 &
  pid=$!
  for ((i = 0; i < 150; ++i)); do
    grep -qi ":$(printf %04X "$port") .* 0A " /proc/net/tcp /proc/net/tcp6 && break
    sleep 0.1
  done
  inside "$@" -d verbena1 127.88.0.1 >"$folder/client.log" 2>&1
  local status=$?
  wait "$pid" || status=$?
  check "$name" "$status" "$folder/server.log" "$folder/client.log"
}

inside ibv_devinfo -v >"$folder/devinfo.log" 2>&1
status=$?
grep -q 'hca_id:[[:space:]]*verbena1' "$folder/devinfo.log" &&
  grep -q 'PORT_ACTIVE' "$folder/devinfo.log" || status=1
check ibv_devinfo "$status" "$folder/devinfo.log"
pair "ibv_rc_pingpong, polling" 18601 ibv_rc_pingpong -g 1 -c -n 200 -p 18601
pair "ibv_rc_pingpong, events" 18602 ibv_rc_pingpong -g 0 -e -c -n 200 -s 70000 -p 18602
pair ib_write_bw 18603 ib_write_bw -F -x 1 -n 500 -p 18603
pair ib_send_lat 18604 ib_send_lat -F -x 1 -n 500 -p 18604
pair ib_atomic_bw 18605 ib_atomic_bw -F -x 1 -n 500 -p 18605
# Our own conformance tests; of FLUSH, which earlier libraries have not, all must run.
install -m 755 "$built/tests/verbs/rights_matrix_test" "$root/opt/verbena/"
inside VERBENA_TEST_INSIDE=1 /opt/verbena/rights_matrix_test >"$folder/rights.log" 2>&1
status=$?
grep -q '  SKIPPED ' "$folder/rights.log" && status=1
check "rights of all operations, FLUSH" "$status" "$folder/rights.log"
exit "$failed"
