# SPDX-License-Identifier: Apache-2.0
"""Pairs of stock programs of every transport, server and client, with options that vary from round to
round, and what their output must look like when all went well."""

import random
import re
import threading
import time

from verbena_testing import ADDRESS, listening

PERFTEST = ("ib_send_bw", "ib_send_lat", "ib_write_bw", "ib_write_lat", "ib_read_bw",
            "ib_read_lat", "ib_atomic_bw", "ib_atomic_lat")
PINGPONG = "ibv_rc_pingpong"
SRQ_PINGPONG = "ibv_srq_pingpong"
UC_PINGPONG = "ibv_uc_pingpong"
UD_PINGPONG = "ibv_ud_pingpong"
XRC_PINGPONG = "ibv_xsrq_pingpong"
PINGPONGS = (PINGPONG, SRQ_PINGPONG, UC_PINGPONG, UD_PINGPONG, XRC_PINGPONG)
PROGRAMS = (PINGPONG,) + PERFTEST
# Receives that perftest has from the start: SENDs of UC and UD that find none are lost.
_RECEIVES = 400
UNRELIABLE = ("UC", "UD")

NICS = (("verbena0", "verbena1"), ("verbena0", "verbena0"))
_RESULT = {
    "pingpong": re.compile(r"\d+ iters in [0-9.]+ seconds|success"),
    "bw": re.compile(r"^ *\d+\s+\d+\s+([0-9.]+|inf)\s+([0-9.]+|inf)\s+([0-9.]+|inf)", re.M),
    # "inf": it measures the CPU's frequency first, and was stopped meanwhile.
    "lat": re.compile(r"^ *\d+\s+\d+\s+([0-9.]+|inf)\s+([0-9.]+|inf)", re.M),
}
_WRONG = re.compile(r"(?i)invalid data|completion with error|syndrom|failed status|poll cq failed")
ADDRESS_IN_USE = re.compile(r"(?i)address already in use|couldn't listen|unable to bind")

_port_lock = threading.Lock()
_next_port = random.randint(20000, 31000)


def next_port():
    """A TCP port that nobody listens on; different ones for a long time."""
    global _next_port
    with _port_lock:
        while True:
            _next_port = 20000 + (_next_port + 1 - 20000) % 12000
            if not listening(_next_port):
                return _next_port


def commands(program, rng, large=1.0):
    """(server's argv, client's argv, port): one variation. large: factor on the amount of data."""
    port = next_port()
    nics = rng.choice(NICS)
    mtu = rng.choice((256, 512, 1024, 2048, 4096))
    name = program
    transport = "RC"
    if program == PINGPONG:
        name = rng.choices(PINGPONGS, weights=(9, 5, 2, 2, 2))[0]
    if name == SRQ_PINGPONG:
        # The same over several QPs on one SRQ.
        qps = rng.choice((1, 4, 16))
        options = ["-g", rng.choice((0, 1)), "-s", rng.choice((1, 64, 4097)), "-m", mtu, "-c",
                   "-n", max(4, int(large * 100 / qps)), "-q", qps, "-r", rng.choice((64, 500))]
        if rng.random() < 0.5:
            options.append("-e")
    elif name == XRC_PINGPONG:
        options = ["-g", rng.choice((0, 1)), "-s", rng.choice((1, 64, 65536)), "-m", mtu, "-n",
                   max(4, int(large * 50))]
        if rng.random() < 0.5:
            options.append("-e")
    elif name == UD_PINGPONG:
        options = ["-g", rng.choice((0, 1)), "-s", rng.choice((1, 64, 1024)), "-n",
                   max(4, int(large * 100))]
        if rng.random() < 0.5:
            options.append("-e")
    elif name in (PINGPONG, UC_PINGPONG):
        size = rng.choice((1, 2, 63, 64, 1000, 4096, 4097, 65536, 1 << 20))
        count = max(4, int(large * (100 if size <= 4097 else 30 if size <= 65536 else 6)))
        options = ["-g", rng.choice((0, 1)), "-s", size, "-n", count, "-m", mtu, "-c",
                   "-r", rng.choice((2, 16, 500))]
        if rng.random() < 0.5:
            options.append("-e")
    else:
        size = rng.choice((2, 64, 1024, 4095, 65536))
        transports = ["RC", "RC", "XRC"]
        if "send" in program or "write" in program:
            transports.append("UC")
        if "send" in program:
            transports.append("UD")
        transport = rng.choice(transports)
        if transport == "UD":
            size = min(size, 1024)
        options = ["-F", "-x", rng.choice((0, 1))] + ([] if transport == "UD" else ["-m", mtu])
        if transport != "RC":
            options += ["-c", transport]
        if "atomic" in program:
            options += ["-A", rng.choice(("FETCH_AND_ADD", "CMP_AND_SWAP"))]
        else:
            options += ["-s", size]
        count = max(10, int(large * rng.choice((20, 100, 300))))
        loses = "send" in program and transport in UNRELIABLE
        options += ["-n", min(count, _RECEIVES) if loses else count]
        both = program.endswith("_bw") and rng.random() < 0.4
        if program.endswith("_bw"):
            options += ["-q", 1 if loses else rng.choice((1, 1, 2, 16))] + (["-b"] if both else [])
        # With -b -e perftest takes a batch of completions after each event and waits for the next
        # event although more lie in the CQ: it hangs when that was the last one.
        # ib_send_lat -e has one channel for both CQs and one SQ slot: when an ACK was lost, the event
        # of the next message passes for that of its SEND, and the next post finds the SQ full.
        if "write" not in program and program != "ib_send_lat" and not both and rng.random() < 0.4:
            options.append("-e")
    options += ["-p", port]
    return ([name, "-d", nics[0], *options], [name, "-d", nics[1], *options, ADDRESS], port)


def unreliable(argv):
    """True if a lost packet is for ever: these programs then wait for ever, too."""
    return argv[0] in (UC_PINGPONG, UD_PINGPONG) or any(each in UNRELIABLE for each in argv)


def problem(program, output):
    """Why this output is not that of a good run, or None."""
    kind = "pingpong" if program == PINGPONG else program.rsplit("_", 1)[1]
    wrong = _WRONG.search(output)
    if wrong:
        return f"prints '{wrong.group(0)}'"
    if not _RESULT[kind].search(output):
        return "prints no result"
    return None


class Pair:
    """Server and client of one variation. launch(argv, limit) starts a program."""

    def __init__(self, launch, program, rng, limit, large=1.0):
        self.program = program
        self.limit = limit
        self.start = time.monotonic()
        server, self._client_argv, self.port = commands(program, rng, large)
        self.unreliable = unreliable(server)
        self._launch = launch
        # The programs' own limits only bound what happens when this process fails.
        self.programs = [launch(server, limit + 120)]

    def start_client(self):
        self.programs.append(self._launch(self._client_argv, self.limit + 120))

    def step(self):
        """Starts the client when the server listens. True once all is over."""
        if len(self.programs) == 1:
            if listening(self.port):
                self.start_client()
            return not self.programs[0].running()
        return not any(program.running() for program in self.programs)

    def late(self):
        return time.monotonic() - self.start > self.limit

    def wait(self):
        """True when both have ended by themselves within the limit."""
        while not self.step():
            if self.late():
                return False
            time.sleep(0.01)
        return True

    def problems(self, check_output=True):
        """Sentences about what went wrong; call it after the end of both."""
        found = []
        if len(self.programs) == 1:
            found.append("the server ended before it listened")
        for program in self.programs:
            status = program.wait()
            if status != 0:
                which = "server" if program is self.programs[0] else "client"
                found.append(f"the {which} ends with status {status}")
        # perftest's bandwidth servers print results of their own only with -b.
        if check_output and not found:
            why = problem(self.program, self.programs[-1].output)
            if why:
                found.append(f"the client {why}")
            if self.program == PINGPONG and problem(self.program, self.programs[0].output):
                found.append(f"the server {problem(self.program, self.programs[0].output)}")
        return found

    def was_too_early(self):
        return False

    def port_was_taken(self):
        return any(ADDRESS_IN_USE.search(program.output) for program in self.programs)

    def describe(self):
        return "\n".join(program.describe() for program in self.programs)

    def close(self):
        for program in self.programs:
            program.close()
