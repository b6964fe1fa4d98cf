# SPDX-License-Identifier: Apache-2.0
"""Connection management with Linux: stock programs of rdma_cm on both ends.

v>r: Verbena is the client, r>v: the guest is. Everything on QP1 is captured; what each side sent is
compared, message by message, with the captures of two Linux hosts in tests/vectors: ids, addresses
and numbers that are drawn are masked, all other bytes must be the same.
"""

import os
import re
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE) + "/apps", os.path.dirname(HERE) + "/apps/lib"]
import pcapng
import rdmacm_wire_test as wire
from lab import GUEST_IP, GUEST_IP6, PATIENCE, VERBENA_IP, VERBENA_IP6

REQ, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP = (0x10, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18)
ADDRESSES = {"ipv4": {"verbena": VERBENA_IP, "guest": GUEST_IP},
             "ipv6": {"verbena": VERBENA_IP6, "guest": GUEST_IP6}}
# Besides what rdmacm_wire_test masks: depths that a program takes from its device's limits.
DEPTHS = {REQ: [(35, 1), (39, 1)], REP: [(24, 2)]}


class CmCase:
    """`server`, `client`: commands, {a}: the server's address; no server: nobody listens.

    `messages`: what must have been sent, {attribute: least number}. `vector`: beside which capture.
    `says`: patterns that the outputs must have, (server's, client's). `ends`: exit statuses
    (server's, client's); None: any. `kill`: "server" or "client" is killed in the middle.
    """

    def __init__(self, name, server, client, messages=None, vector=None, says=("", ""),
                 ends=(0, 0), kill=None, rules=(), families=("ipv4", "ipv6"), note="", check=()):
        self.name, self.server, self.client, self.messages = name, server, client, messages or {}
        self.vector, self.says, self.ends, self.kill = vector, says, ends, kill
        self.rules, self.families, self.note, self.check = rules, families, note, check


def cases():
    connection = {REQ: 1, REP: 1, RTU: 1, DREQ: 1, DREP: 1}
    result = [
        CmCase("rping", "rping -s -a {a} -C 10 -V", "rping -c -a {a} -C 10 -V", connection,
               vector="cm_rping_{f}", check=(REQ, REP, RTU, DREQ)),
        CmCase("ucmatose, four connections", "ucmatose -b {a} -c 4", "ucmatose -s {a} -c 4",
               {REQ: 4, REP: 4, RTU: 4, DREQ: 4, DREP: 4}, vector="cm_ucmatose_{f}",
               check=(REQ, REP, RTU, DREQ, DREP)),
        CmCase("udaddy", "udaddy -b {a}", "udaddy -s {a}", {SIDR_REQ: 1, SIDR_REP: 1},
               vector="cm_udaddy_{f}", check=(SIDR_REQ, SIDR_REP)),
        CmCase("rejected: nobody listens", None, "rping -c -a {a} -p 7999 -C 1",
               {REQ: 1, REJ: 1}, vector="cm_reject_closed_port{f6}", check=(REJ,),
               says=("", "RDMA_CM_EVENT_REJECTED, error 8"), ends=(None, None)),
        CmCase("rejected: no such datagram service", None, "udaddy -s {a}",
               {SIDR_REQ: 1, SIDR_REP: 1}, vector="cm_sidr_closed_port", check=(SIDR_REP,),
               ends=(None, None), says=("", "RDMA_CM_EVENT_UNREACHABLE, error: 1"),
               families=("ipv4",)),
        # The server wants one connection, refuses the other and ends at once, which rejects the first
        # too if its RTU is not there yet: the client has to have seen the REP before any REJ.
        CmCase("rejected by the server's program", "ucmatose -b {a} -c 1",
               "ucmatose -s {a} -c 2", {REQ: 2, REJ: 1}, rules=("delay mad=rej us=500000",),
               says=("failing connection request", "RDMA_CM_EVENT_REJECTED, error: 28"),
               ends=(None, None)),
        CmCase("server killed", "rping -s -a {a} -C 1000000", "rping -c -a {a} -C 1000000",
               {REQ: 1, REP: 1, RTU: 1, DREQ: 1}, says=("", "DISCONNECT EVENT"),
               ends=(None, None), kill="server"),
        CmCase("client killed", "rping -s -a {a} -C 1000000", "rping -c -a {a} -C 1000000",
               {REQ: 1, REP: 1, RTU: 1, DREQ: 1}, says=("DISCONNECT EVENT", ""),
               ends=(None, None), kill="client"),
    ]
    # Linux joins IPv6 groups by no protocol: ENOTSUPP.
    result.append(CmCase("mckey", "mckey -m 239.1.2.3 -b {a}", "mckey -s -m 239.1.2.3 -b {c}",
                         families=("ipv4",)))
    # rping's client destroys its id without waiting for the DREP; its DREQ is sent once, on Linux too
    # (cm_loss_dreq in tests/vectors).
    rping = ("rping -s -a {a} -C 3", "rping -c -a {a} -C 3")
    ucmatose = ("ucmatose -b {a} -c 1", "ucmatose -s {a} -c 1")
    for what, attribute, programs in (("req", REQ, rping), ("rep", REP, rping), ("rtu", RTU, rping),
                                      ("dreq", DREQ, ucmatose)):
        result.append(CmCase(f"first {what.upper()} lost", *programs, {attribute: 1},
                             rules=(f"drop mad={what} nth=1",), families=("ipv4",)))
    # The client connects a second time without knowing whether its server listens again, and crashes if
    # not: on any NIC, if the server is the slower one, as an emulated guest is.
    for program, request in (("ib_send_lat -n 100 -s 64", "req"),
                             ("ib_write_bw -n 100 -s 4096 -t 16", "req"),
                             ("ib_send_bw -c UD -n 100 -s 1024 -t 16 -r 200", "sidr_req")):
        result.append(CmCase(program + " -R", program + " -R -F -d {d}",
                             program + " -R -F -d {d} {a}", {}, families=("ipv4",),
                             rules=(f"delay mad={request} us=1000000",),
                             note="perftest 6.06 asks getaddrinfo for AF_INET only"))
    return result


# The local ACK timeout in a REQ: code 19 in Linux 6.1, of which the captures are, 17 in 6.12.
TIMEOUT = {REQ: [(95, 1)]}


def differences(one, other, attribute, ignored=()):
    """Bytes of two messages of one kind that should be the same, as text."""
    def fields(packet):
        data = bytearray(wire.masked(packet, attribute))
        for first, count in (*DEPTHS.get(attribute, ()), *ignored):
            start = 8 + wire.HEADER + first
            data[start:start + count] = bytes(count)
        return bytes(data)

    mine, theirs = fields(one), fields(other)
    found = [f"byte {i - 8 - wire.HEADER} behind the MAD header: {a:02x}, Linux {b:02x}"
             for i, (a, b) in enumerate(zip(mine, theirs)) if a != b]
    if len(mine) != len(theirs):
        found.append(f"{len(mine)} bytes, Linux {len(theirs)}")
    for name in ("opcode", "ack_request", "pad"):
        if getattr(one, name) != getattr(other, name):
            found.append(f"{name} {getattr(one, name)}, Linux {getattr(other, name)}")
    if one.icrc != one.expected_icrc():
        found.append("wrong ICRC")
    # Type of service and flags (IPv6: all before the addresses); the UDP ports and length.
    ranges = [(0, 8)] if one.ipv6 else [(0, 4), (6, 10)]
    ranges.append((one.ip_header, one.ip_header + 8))
    for first, last in ranges:
        if one.ip[first:last] != other.ip[first:last]:
            found.append(f"IP bytes {first}-{last - 1}: {one.ip[first:last].hex()}, "
                         f"Linux {other.ip[first:last].hex()}")
    return found


def attribute_of(packet):
    return int.from_bytes(packet.after_bth[8 + 16:8 + 18], "big")


class Runner:
    """Runs the cases in a lab."""

    def __init__(self, lab, vectors=None):
        self.lab = lab
        self.vectors = vectors
        self.compared = {}  # (message, whose): number of messages without a difference

    def guest_listens(self, job):
        script = ("i=0; while ! rdma resource show cm_id | grep -q LISTEN; do i=$((i+1)); "
                  "[ $i -gt 60 ] && exit 1; sleep 0.5; done")
        return self.lab.guest.run(script, 60)[0] == 0 or self.lab.guest.wait(job, 0.1)[0] is not None

    def verbena_listens(self, program):
        end = time.monotonic() + 30
        while time.monotonic() < end and program.running():
            if any(i["state"] == "listen" for i in self.lab.daemon.json("list", "cm_id")):
                return True
            time.sleep(0.1)
        return "joined dgid" in program.output

    def let_go(self):
        """Waits until nothing of the case before is under way: a rule would hit it."""
        end = time.monotonic() + 20 * PATIENCE
        while self.lab.daemon.json("list", "cm_id") and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(0.5 * PATIENCE)

    def start_capture(self):
        folder = self.vectors or tempfile.mkdtemp(prefix="vcm.", dir="/tmp")
        path = os.path.join(folder, f"cm-{time.monotonic_ns()}.pcapng")
        program = self.lab.daemon.namespace.program(
            self.lab.daemon.verbena, "capture", path, environment=self.lab.daemon.environment,
            limit=400 * PATIENCE)
        end = time.monotonic() + 15
        while time.monotonic() < end and not (os.path.exists(path) and os.path.getsize(path)):
            time.sleep(0.05)
        time.sleep(0.3)
        return program, path

    def run(self, case, direction, family):
        """(result, text); result pass or FAIL."""
        lab = self.lab
        server_on, client_on = (("guest", "verbena") if direction == "v>r" else
                                ("verbena", "guest"))
        addresses = ADDRESSES[family]
        devices = {"guest": "rxe0", "verbena": "verbena0"}

        def command(text, place):
            return text.format(a=addresses[server_on], c=addresses[client_on], d=devices[place])

        problems, text = [], ""
        self.let_go()
        recorder, path = self.start_capture()
        for rule in case.rules:
            status, output = lab.daemon.command("fault", "add", rule)
            if status != 0:
                problems.append(output)
        outputs, statuses = {"server": "", "client": ""}, {"server": None, "client": None}
        running = {}
        for role, place in (("server", server_on), ("client", client_on)):
            words = case.server if role == "server" else case.client
            if words is None:
                continue
            words = command(words, place)
            if place == "guest":
                running[role] = lab.guest.start(
                    f"{words} & P=$!; echo $P > /tmp/{role}.pid; wait $P")
                if role == "server" and not ("mckey" in words or self.guest_listens(running[role])):
                    problems.append("the guest's server does not listen")
            else:
                running[role] = lab.daemon.program(*words.split(), limit=90 * PATIENCE)
                if role == "server" and "mckey" not in words and \
                        not self.verbena_listens(running[role]):
                    problems.append("the server does not listen")
            if role == "server" and "mckey" in words:
                time.sleep(4 * PATIENCE)
        if case.kill:
            time.sleep(5 * PATIENCE)
            if isinstance(running[case.kill], str):
                lab.guest.run(f"kill -9 $(cat /tmp/{case.kill}.pid)", 30)
            else:
                # The program itself, below ip and verbena.
                for item in lab.daemon.json("list", "cm_id"):
                    os.kill(item["pid"], 9)
                    break
        for role in ("client", "server"):
            program = running.get(role)
            if program is None:
                continue
            if isinstance(program, str):
                statuses[role], outputs[role] = lab.guest.wait(program, 90)
                if statuses[role] is None:
                    lab.guest.run(f"kill -9 $(cat /tmp/{role}.pid)", 30)
            else:
                statuses[role] = program.wait()
                outputs[role] = program.output
                program.close()
            text += f"--- {role}: status {statuses[role]}\n{outputs[role]}\n"
        hits = [rule["hits"] for rule in lab.daemon.json("fault", "list")]
        lab.daemon.command("fault", "clear")
        time.sleep(0.5)
        recorder.signal(2)
        recorder.wait()
        recorder.close()
        for role, wanted, pattern in (("server", case.ends[0], case.says[0]),
                                      ("client", case.ends[1], case.says[1])):
            if running.get(role) is None:
                continue
            if statuses[role] is None and case.kill != role:
                problems.append(f"the {role} hangs")
            elif wanted is not None and statuses[role] != wanted:
                problems.append(f"the {role} ends with {statuses[role]}")
            if pattern and not re.search(pattern, outputs[role]):
                problems.append(f"the {role} does not say '{pattern}'")
        if len(hits) != len(case.rules) or 0 in hits:
            problems.append("the rule hit nothing")
        problems += self.check_capture(case, family, path)
        if not self.vectors:
            os.unlink(path)
        else:
            os.rename(path, os.path.join(self.vectors, "cm_" + re.sub(r"\W+", "_", case.name) +
                                         f"_{family}_{direction.replace('>', '')}.pcapng"))
        return ("FAIL" if problems else "pass"), "\n".join(problems) + "\n" + text

    def check_capture(self, case, family, path):
        """What the capture has that it should not, and the other way round."""
        sent = {}  # (attribute, whose): packets
        for packet in pcapng.read(path):
            if packet.dest_qp == 1:
                whose = "verbena" if packet.outbound else "guest"
                sent.setdefault((attribute_of(packet), whose), []).append(packet)
        problems = []
        for attribute, least in case.messages.items():
            count = len(sent.get((attribute, "verbena"), [])) + len(
                sent.get((attribute, "guest"), []))
            if count < least:
                problems.append(f"{count} {wire.NAMES[attribute]}, not {least}")
        if case.vector is None:
            return problems
        name = case.vector.format(f="v4" if family == "ipv4" else "v6",
                                  f6="" if family == "ipv4" else "_v6")
        reference = wire.management(wire.linux(name + ".pcap"))
        for attribute in case.check:
            if attribute not in reference:
                continue
            for whose in ("verbena", "guest"):
                for packet in sent.get((attribute, whose), []):
                    found = differences(packet, reference[attribute], attribute,
                                        TIMEOUT.get(attribute, ()) if whose == "guest" else ())
                    if found:
                        problems += [f"{wire.NAMES[attribute]} of {whose}: {each}"
                                     for each in found]
                        break
                    key = (wire.NAMES[attribute], whose)
                    self.compared[key] = self.compared.get(key, 0) + 1
        return problems


def run_all(lab, only, vectors, record):
    """Runs what matches; `record(row, direction, result, text)` for each."""
    runner = Runner(lab, vectors)
    # Those of perftest last: an emulated CPU takes its time for them.
    for family, slow in (("ipv4", False), ("ipv6", False), ("ipv4", True)):
        for case in cases():
            row = {"group": f"rdma_cm, {family}", "name": case.name, "note": case.note}
            if family not in case.families or slow != case.name.startswith("ib_") or \
                    not re.search(only, f"{row['group']}: {row['name']}"):
                continue
            yield row
            for direction in ("v>r", "r>v"):
                record(row, direction, *runner.run(case, direction, family))
    if runner.compared:
        print("messages that are those of Linux: " + ", ".join(
            f"{count} {name} of {whose}" for (name, whose), count in sorted(
                runner.compared.items())), flush=True)
