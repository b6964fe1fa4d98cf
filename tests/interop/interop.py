# SPDX-License-Identifier: Apache-2.0
"""Runs Verbena against Linux rxe in a virtual machine and prints the result matrix.

    tools/interop [--kernel VERSION] [--only REGEX] [--json FILE] [--vectors FOLDER]

Each case runs twice where that makes sense: with Verbena as requester (v>r) and as responder (r>v).
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "apps/lib")]
import cm_cases
import guest_image
from lab import GUEST_SIDE, VERBENA_SIDE, Lab
from namespaces import wait_listening
from verbena_testing import free_port

MTUS = (256, 512, 1024, 2048, 4096)
NOT_SUPPORTED = 77
GIDS = {"ipv4": 1, "ipv6": 2, "link-local": 0}


class Case:
    """One row of the matrix. `ops`: text, or {"v>r": text, "r>v": text} where the ends differ."""

    def __init__(self, group, name, ops, options="", rules=(), gid="ipv4", capture=None,
                 directions=("v>r", "r>v"), note="", responder="", hits=True):
        self.group, self.name, self.options, self.rules = group, name, options, rules
        self.ops = ops if isinstance(ops, dict) else {"v>r": ops, "r>v": ops}
        self.gid, self.capture, self.directions, self.note = gid, capture, directions, note
        self.responder = responder  # What its output must contain (regular expression).
        self.hits = hits  # Each rule must have hit something.


def sizes(name, mtu):
    """One operation of each interesting length, one at a time."""
    return ",".join(f"{name}:{size}" for size in
                    (0, 1, 3, mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu + 5, 16 * mtu + 7))


def cases():
    result = []

    def add(*arguments, **options):
        result.append(Case(*arguments, **options))

    for mtu in MTUS:
        flag = f"--mtu {mtu}"
        for name in ("send", "sendimm", "write", "writeimm", "read"):
            add(f"data, MTU {mtu}", name, sizes(name, mtu), flag,
                capture=f"{name}_mtu{mtu}" if (name, mtu) in (("send", 256), ("read", 1024)) else None)
        add(f"data, MTU {mtu}", "cas, faa", "cas,faa,cas!miss,faa+cas+faa", flag)
    for gid in ("ipv6", "link-local"):
        mix = "send:100,sendimm:2501,write:2500,writeimm:2500,read:2500,cas,faa"
        add(gid, "all operations, MTU 1024", mix, gid=gid)
        add(gid, "all operations, MTU 4096", mix, "--mtu 4096", gid=gid)

    add("order", "16 SENDs as one chain", "+".join(["send:64"] * 16), capture="pipelined_sends")
    add("order", "12 READs as one chain, 4 outstanding", "+".join(["read:3000"] * 12))
    add("order", "READs with 1 outstanding", "+".join(["read:3000"] * 4), "--rd-atomic 1")
    add("order", "mixed chain with fences",
        "write:2000+read:2000+send:10+faa+send:5!fence+cas+write:70!fence+read:70+sendimm:9")
    # 3907 packets: the emulated CPU needs longer than 67 ms for them.
    add("order", "1 MB WRITE at MTU 256", "write:1000000", "--mtu 256 --timeout 18")
    add("order", "1 MB READ at MTU 256", "read:1000000", "--mtu 256 --timeout 18")
    add("order", "PSN wraps", "send:3000,read:3000,write:3000,faa,send:3000", "--psn 0xfffffe",
        capture="psn_wrap")
    add("invalidate", "SEND with invalidate of a memory window",
        "write:8!mw,sendinv:10,write:8!mw@REM_ACCESS_ERR", capture="send_inv")
    add("invalidate", "SEND with invalidate, two packets", "sendinv:1500",
        capture="send_inv_last")
    add("invalidate", "SEND with invalidate of a region's key",
        {"v>r": "sendinv:10!mr", "r>v": "sendinv:10!mr@RETRY_EXC_ERR"},
        "--timeout 12 --retry 2", directions=("r>v",), responder="receive 0: LOC_ACCESS_ERR",
        note="a region of ibv_reg_mr may not be invalidated: no answer, class J")

    def loss(name, rules, ops, options="", **more):
        add("loss", name, ops, "--timeout 12 " + options, rules=rules, **more)

    loss("first SEND lost", ["drop opcode=send nth=1"], "send:100,send:10", capture="loss_send")
    loss("middle of a SEND lost", ["drop opcode=RC_SEND_MIDDLE nth=1"], "send:4000,send:10",
         capture="loss_middle")
    loss("last of a WRITE lost", ["drop opcode=RC_RDMA_WRITE_LAST nth=1"], "write:4000,send:10")
    loss("ACK lost", ["drop opcode=RC_ACKNOWLEDGE nth=1"], "send:100,send:10",
         capture="loss_ack")
    loss("READ request lost", ["drop opcode=RC_RDMA_READ_REQUEST nth=1"], "read:3000")
    loss("READ response, first lost", ["drop opcode=RC_RDMA_READ_RESPONSE_FIRST nth=1"],
         "read:3000")
    loss("READ response, middle lost", ["drop opcode=RC_RDMA_READ_RESPONSE_MIDDLE nth=2"],
         "read:5000", capture="loss_read_response")
    loss("READ response, last lost", ["drop opcode=RC_RDMA_READ_RESPONSE_LAST nth=1"],
         "read:3000")
    loss("atomic response lost", ["drop opcode=RC_ATOMIC_ACKNOWLEDGE nth=1"], "faa,faa,cas",
         capture="loss_atomic")
    loss("atomic request lost", ["drop opcode=atomic nth=1"], "faa,faa,cas")
    loss("duplicates", ["duplicate every=3"], "send:4000,write:4000,read:4000,faa,cas,send:10")
    loss("reordered", ["reorder every=5 by=2"], "send:9000,write:9000,read:9000,faa,send:10")
    loss("corrupted", ["corrupt every=7 count=6"], "send:9000,write:9000,read:9000,faa,send:10")
    long_mix = ",".join(["send:9000,write:9000,read:9000,faa,cas,writeimm:5000"] * 6)
    loss("2 % both ways", ["drop dir=tx prob=0.02 seed=3", "drop dir=rx prob=0.02 seed=4"],
         long_mix)
    loss("5 % both ways, chains", ["drop dir=tx prob=0.05 seed=5", "drop dir=rx prob=0.05 seed=6"],
         ",".join(["send:3000+write:3000+read:3000+faa+send:3000+cas"] * 8))
    loss("all lost: retries exhausted", ["drop dir=tx", "drop dir=rx"], "send:10@RETRY_EXC_ERR",
         "--retry 2", hits=False)

    add("RNR", "receive 300 ms late", "send:100,send:3000", "--min-rnr-timer 20 --recv-delay 300",
        capture="rnr")
    add("RNR", "WRITE with immediate, receive late", "writeimm:100", "--recv-delay 200")
    add("RNR", "retries exhausted", "send:10@RNR_RETRY_EXC_ERR",
        "--min-rnr-timer 14 --rnr-retry 2 --recv-delay 3000")

    for name in ("write:100", "write:5000", "read:100", "cas", "faa"):
        add("remote errors", f"{name}, wrong key", f"send:5,{name}!badkey@REM_ACCESS_ERR",
            capture="bad_rkey" if name == "write:5000" else None)
    for name in ("write:100", "read:100"):
        add("remote errors", f"{name}, behind the region", f"send:5,{name}!oob@REM_ACCESS_ERR")
        add("remote errors", f"{name}, region lacks the right", f"{name}@REM_ACCESS_ERR",
            "--mr-access l --qp-access lwra")
    add("remote errors", "cas, region lacks the right", "cas@REM_ACCESS_ERR",
        "--mr-access lwr --qp-access lwra")
    for name in ("write:100", "read:100", "faa"):
        add("remote errors", f"{name}, QP lacks the right", f"{name}@REM_INV_REQ_ERR",
            "--mr-access lwra --qp-access l")
    add("remote errors", "zero-length WRITE and READ with a wrong key",
        "write:0!badkey,read:0!badkey,send:5")
    add("remote errors", "SEND longer than the receive",
        {"v>r": "send:100@REM_OP_ERR", "r>v": "send:100@REM_INV_REQ_ERR"}, "--recv-bytes 16",
        responder={"v>r": "receive 0: LOC_QP_OP_ERR", "r>v": "receive 0: LOC_LEN_ERR"},
        capture="send_too_long",
        note="rxe NAKs remote operational error; the specification says invalid request")
    add("remote errors", "atomic, address not divisible by 8", "faa!odd@REM_INV_REQ_ERR",
        directions=("v>r",), note="librxe refuses to post it")
    add("remote errors", "what is behind an error is flushed",
        "send:5,write:10+write:10!badkey@REM_ACCESS_ERR+send:10+read:10",)
    return result


def is_mistake_of_rxe(text):
    """Whether an output of rxe as requester shows one of its two known mistakes, and nothing else.

    It sets its fence flag without a lock: if all completes in between, it sends nothing any more, and no
    timer runs as nothing is outstanding. (Whom Verbena does not answer gives up.) And it takes an ACK
    with the PSN of an atomic whose response was lost for the atomic's success: its buffer then holds
    what rc_peer filled it with, each byte less by 7 than the one behind.
    """
    wrong = re.findall("WRONG: (.*)", text)
    for line in wrong:
        value = re.fullmatch("(?:cas|faa): original value ([0-9a-f]{16}), not [0-9a-f]{16}", line)
        if value:
            data = bytes.fromhex(value.group(1))
            if any((a - b) % 256 != 7 for a, b in zip(data, data[1:])):
                return False
        elif not (line.endswith("!fence: no completion") and "QP state 3" in text):
            return False
    return bool(wrong)


class Runner:
    def __init__(self, lab, vectors=None):
        self.lab = lab
        self.vectors = vectors
        self.peer = None
        self.guest_gids = {}

    def find_gids(self):
        status, text = self.lab.guest.run(
            "cd /sys/class/infiniband/rxe0/ports/1/gids; for i in 0 1 2 3; do "
            "echo $i $(cat $i); done")
        if status != 0:
            raise RuntimeError(f"the guest has no rxe0: {text}\n{self.lab.guest.console()}")
        for line in text.splitlines():
            index, gid = line.split()
            kind = ("ipv4" if gid.startswith("0000:0000:0000:0000:0000:ffff:c0a8") else
                    "ipv6" if gid.startswith("fd00") else
                    "link-local" if gid.startswith("fe80") else None)
            if kind:
                self.guest_gids[kind] = index

    def add_rules(self, rules):
        for rule in rules:
            status, text = self.lab.daemon.command("fault", "add", rule)
            if status != 0:
                raise RuntimeError(f"fault add {rule}: {text}")

    def run_peers(self, case, direction):
        """(result, text): result pass, FAIL or -."""
        lab = self.lab
        port = free_port()
        ops = case.ops[direction]
        roles = ("--requester", "--responder")
        verbena_role, guest_role = roles if direction == "v>r" else roles[::-1]
        common = f"--port {port} --ops '{ops}' {case.options}"
        capture = None
        if case.capture and self.vectors:
            capture = self.start_capture(case, direction)
        self.add_rules(case.rules)
        host = lab.daemon.program(
            "/bin/sh", "-c", f"exec '{self.peer}' {verbena_role} --device verbena0 "
            f"--gid {GIDS[case.gid]} {common}", limit=100)
        job = lab.guest.start(f"rc_peer {guest_role} --device rxe0 --connect {VERBENA_SIDE} "
                              f"--gid {self.guest_gids[case.gid]} {common}")
        host_status = host.wait()
        guest_status, guest_text = lab.guest.wait(job, 100)
        text = (f"--- verbena ({verbena_role}): {host.describe()}\n"
                f"--- rxe ({guest_role}): status {guest_status}\n{guest_text}")
        responder_text = guest_text if direction == "v>r" else host.output
        host.close()
        hits = [rule["hits"] for rule in lab.daemon.json("fault", "list")]
        lab.daemon.command("fault", "clear")
        if capture:
            self.stop_capture(*capture)
        if NOT_SUPPORTED in (host_status, guest_status):
            return "-", text
        good = host_status == 0 and guest_status == 0
        wanted = case.responder.get(direction, "") if isinstance(case.responder, dict) else (
            case.responder)
        if wanted and not re.search(wanted, responder_text):
            good = False
            text += f"\nthe responder's output lacks: {wanted}"
        if case.rules and case.hits and 0 in hits:
            good = False
            text += f"\nrules without a hit: {hits}"
        return ("pass" if good else "FAIL"), text

    def start_capture(self, case, direction):
        way = "req" if direction == "v>r" else "resp"
        path = os.path.join(self.vectors, f"interop_{case.capture}_{way}.pcapng")
        program = self.lab.daemon.namespace.program(
            self.lab.daemon.verbena, "capture", path, "--stage", "after",
            environment=self.lab.daemon.environment, limit=150)
        end = time.monotonic() + 10
        while time.monotonic() < end and not (os.path.exists(path) and os.path.getsize(path)):
            time.sleep(0.05)
        time.sleep(0.2)
        return program, path

    def stop_capture(self, program, path):
        program.signal(2)
        program.wait()
        program.close()
        subprocess.run(["tshark", "-r", path, "-F", "pcap", "-w", path[:-len("ng")]], check=True,
                       capture_output=True)
        os.unlink(path)

    # --- Stock programs: (name, server command, client command) with {port} and {gid}

    def run_stock(self, command, direction, gid):
        """`direction`: who is the client."""
        lab = self.lab
        port = free_port()
        verbena = f"{command} -d verbena0 -p {port} " + command_gid(command, GIDS[gid])
        guest = f"{command} -d rxe0 -p {port} " + command_gid(command, self.guest_gids[gid])
        if direction == "v>r":
            job = lab.guest.start(guest)
            if not lab.guest.wait_listening(port):
                return "FAIL", "the guest's server does not listen\n" + lab.guest.wait(job, 1)[1]
            host = lab.daemon.program(*verbena.split(), GUEST_SIDE, limit=100)
        else:
            host = lab.daemon.program(*verbena.split(), limit=100)
            if not wait_listening(lab.namespace, port):
                return "FAIL", "the server does not listen\n" + host.describe()
            job = lab.guest.start(f"{guest} {VERBENA_SIDE}")
        host_status = host.wait()
        guest_status, guest_text = lab.guest.wait(job, 100)
        text = f"--- verbena: {host.describe()}\n--- rxe: status {guest_status}\n{guest_text}"
        host.close()
        if "invalid data" in text:
            return "FAIL", text
        return ("pass" if host_status == 0 and guest_status == 0 else "FAIL"), text


def command_gid(command, index):
    return f"-g {index}" if command.startswith("ibv_") else f"-x {index}"


def stock_commands():
    result = []
    for size, mtu in ((64, 256), (4097, 1024), (100000, 4096)):
        result.append(f"ibv_rc_pingpong -c -n 100 -s {size} -m {mtu}")
    result.append("ibv_rc_pingpong -c -e -n 100 -s 9000 -m 2048")
    # perftest takes the other end's limit of outstanding READs (rxe: 128) for its own device (16),
    # which refuses it, as any NIC would: -o.
    # -u: an emulated CPU takes longer for a full queue than the default timeout of 67 ms.
    for program in ("ib_send_bw", "ib_write_bw", "ib_read_bw -o 16"):
        result.append(f"{program} -F -u 18 -n 200 -s 32768 -m 4096")
        result.append(f"{program} -F -u 18 -b -n 200 -s 8192 -m 1024")
    for program in ("ib_send_lat", "ib_write_lat", "ib_read_lat -o 16"):
        result.append(f"{program} -F -n 200 -s 64")
    result += ["ib_atomic_bw -o 16 -F -n 200", "ib_atomic_lat -o 16 -F -n 200 -A CMP_AND_SWAP",
               "ib_atomic_lat -o 16 -F -n 200 -A FETCH_AND_ADD"]
    return result


def markdown(results, kernel, seconds):
    """The matrix for docs/INTEROP.md."""
    lines = []
    group = None
    groups = list(dict.fromkeys(row["group"] for row in results))
    for row in sorted(results, key=lambda row: groups.index(row["group"])):
        if row["group"] != group:
            group = row["group"]
            title = re.sub(r"\bip(?=v\d)", "IP", group)
            lines += ["", f"### {title if '_' in title else title[0].upper() + title[1:]}", "",
                      "| case | Verbena requests | rxe requests | |", "|---|---|---|---|"]
        cells = [row.get(direction, "") for direction in ("v>r", "r>v")]
        lines.append(f"| {row['name']} | {cells[0]} | {cells[1]} | {row['note']} |".replace(
            " |  |", " | |"))
    passed = sum(row.get(d) == "pass" for row in results for d in ("v>r", "r>v"))
    failed = sum(row.get(d) == "FAIL" for row in results for d in ("v>r", "r>v"))
    head = [f"Run of {datetime.date.today()}, Linux {kernel}, {passed} passed, {failed} failed, "
            f"{seconds:.0f} s."]
    return "\n".join(head + lines) + "\n"


def run(a, kernel, elf, image, results):
    """All cases; their rows go to `results`."""
    with Lab(elf, image, a.accelerator) as lab:
        print(f"Linux {kernel} guest ready after {lab.guest.boot_seconds:.1f} s", flush=True)
        runner = Runner(lab, os.path.abspath(a.vectors) if a.vectors else None)
        runner.peer = os.path.abspath(a.peer)
        runner.find_gids()

        def record(row, direction, result, text):
            row[direction] = result
            print(f"{result:5} {direction} {row['group']}: {row['name']}", flush=True)
            if result == "FAIL" or a.verbose:
                print(text, flush=True)

        for case in cases():
            if not re.search(a.only, f"{case.group}: {case.name}"):
                continue
            row = {"group": case.group, "name": case.name, "note": case.note}
            results.append(row)
            for direction in case.directions:
                for _ in range(6):
                    result, text = runner.run_peers(case, direction)
                    if result != "FAIL" or direction == "v>r" or \
                            not is_mistake_of_rxe(text[text.index("--- rxe"):]):
                        break
                    print(f"again, a mistake of rxe: {direction} {case.group}: {case.name}", flush=True)
                record(row, direction, result, text)
        for gid in ("ipv4", "ipv6"):
            for command in stock_commands():
                row = {"group": f"stock programs, {gid}", "name": f"`{command}`", "note": ""}
                if not re.search(a.only, f"{row['group']}: {row['name']}"):
                    continue
                results.append(row)
                for direction in ("v>r", "r>v"):
                    record(row, direction, *runner.run_stock(command, direction, gid))
        for row in cm_cases.run_all(lab, a.only, runner.vectors, record):
            results.append(row)
        drops = {name: count for name, count in lab.daemon.drops().items() if count}
        wire = {name: count for name, count in lab.daemon.wire().items() if count}
        print(f"drops of verbena0: {json.dumps(drops)}\nwire: {json.dumps(wire)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernel", help="version of a linux-image package (default: the newest)")
    parser.add_argument("--work", default=os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "verbena-interop"),
        help="folder for packages and images")
    parser.add_argument("--accelerator", default="tcg",
                        help="of QEMU; several: kvm:tcg")
    parser.add_argument("--only", default="", help="regular expression for 'group: case'")
    parser.add_argument("--peer", required=True, help="the rc_peer program")
    parser.add_argument("--markdown", help="write the matrix to this file")
    parser.add_argument("--vectors", help="write captures to this folder")
    parser.add_argument("--verbose", action="store_true", help="show the output of what passed, too")
    a = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the lab is taken down.
    if os.geteuid() != 0:
        sys.exit("interop: needs root for network namespaces and taps")
    kernel = a.kernel or guest_image.newest_kernel()
    elf, image = guest_image.build(a.work, kernel, a.peer)
    start = time.monotonic()
    results = []
    try:
        run(a, kernel, elf, image, results)
    finally:  # Also of a run that was ended before its time.
        if a.markdown:
            with open(a.markdown, "w", encoding="utf-8") as file:
                file.write(markdown(results, kernel, time.monotonic() - start))
    values = [row.get(direction) for row in results for direction in ("v>r", "r>v")]
    print(f"{values.count('pass')} passed, {values.count('FAIL')} failed")
    sys.exit(1 if "FAIL" in values or "pass" not in values else 0)


if __name__ == "__main__":
    main()
