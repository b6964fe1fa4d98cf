# SPDX-License-Identifier: Apache-2.0
"""The applications of tools/soak --apps: server and client of each, with options that vary from
round to round, and what they must print when all went well."""

import os
import re
import subprocess
import tempfile
import threading
import time

import pairs
from verbena_testing import listening

FIRST, SECOND = "127.88.0.1", "127.88.0.2"
MPI_SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../apps/mpi/mpi_check.cc")

_lock = threading.Lock()
_next_cm_port = 20000
_mpi_program = None


def _cm_port():
    """A port of the connection manager; the daemon is the soak's own."""
    global _next_cm_port
    with _lock:
        _next_cm_port = 20000 + (_next_cm_port - 19999) % 12000
        return _next_cm_port


class Recipe:
    """Commands of one round.

    `ready`: ("cm", port), ("tcp", port), ("udp", port) or ("says", text) of the server; None: there
    is no server. `serves`: the server goes on for ever and is ended behind its client. `race`: what
    the client says when it was too early for its server, by a mistake of the program itself.
    """

    def __init__(self, server, client, ready, says="", server_says="", serves=False,
                 environment=None, never="", race=""):
        self.server, self.client, self.ready = server, client, ready
        self.says, self.server_says, self.serves = says, server_says, serves
        self.environment, self.never, self.race = environment or {}, never, race


def _rping(rng):
    port, at = _cm_port(), rng.choice((FIRST, SECOND))
    common = ["-a", at, "-p", port, "-C", rng.choice((1, 10, 50)), "-S",
              rng.choice((23, 100, 4096, 65535)), "-v", "-V"]
    if rng.random() < 0.3:
        common.append("-q")  # QPs of the program's own
    return Recipe(["rping", "-s", *common], ["rping", "-c", *common], ("cm", port),
                  says="rdma-ping-0", never="mismatch")


def _persistent_rping(rng):
    port, at = _cm_port(), rng.choice((FIRST, SECOND))
    return Recipe(["rping", "-s", "-P", "-a", at, "-p", port],
                  ["rping", "-c", "-a", at, "-p", port, "-C", 5, "-v", "-V"], ("cm", port),
                  says="rdma-ping-4", serves=True, never="mismatch")


def _ucmatose(rng):
    port, count = _cm_port(), rng.choice((1, 4, 32))
    common = ["-p", port, "-c", count, "-C", rng.choice((0, 1, 20)), "-S", rng.choice((1, 1000))]
    if rng.random() < 0.3:
        common.append("-m")
    return Recipe(["ucmatose", *common], ["ucmatose", "-s", rng.choice((FIRST, SECOND)), *common],
                  ("cm", port), says="return status 0", server_says="return status 0")


def _udaddy(rng):
    # Its port is its own.
    common = ["-c", rng.choice((1, 5)), "-C", rng.choice((1, 10)), "-S",
              rng.choice((4, 100, 1000))]
    return Recipe(["udaddy", *common], ["udaddy", "-s", rng.choice((FIRST, SECOND)), *common],
                  ("cm", 7174), says="return status 0", server_says="return status 0")


def _mckey(rng):
    group = f"239.{rng.randint(1, 250)}.{rng.randint(1, 250)}.{rng.randint(1, 250)}"
    common = ["-m", group, "-C", rng.choice((1, 10)), "-S", rng.choice((4, 1000))]
    return Recipe(["mckey", "-b", rng.choice((FIRST, SECOND)), *common],
                  ["mckey", "-s", "-b", rng.choice((FIRST, SECOND)), *common],
                  ("says", "joined dgid"), says="return status 0", server_says="return status 0")


def _cmtime(rng):
    port = _cm_port()
    return Recipe(["cmtime", "-p", port],
                  ["cmtime", "-s", rng.choice((FIRST, SECOND)), "-p", port, "-c",
                   rng.choice((1, 20, 100))], ("cm", port), says=r"(?m)^disconnect *:", serves=True)


def _rdma_server(rng):
    port = _cm_port()
    return Recipe(["rdma_server", "-p", port],
                  ["rdma_client", "-s", rng.choice((FIRST, SECOND)), "-p", port], ("cm", port),
                  says="rdma_client: end 0", server_says="rdma_server: end 0")


def _rstream(rng):
    port = _cm_port()
    common = ["-p", port, "-C", rng.choice((5, 50)), "-I", 2, "-S", rng.choice((64, 5000, 65536)),
              "-T", "v"]
    return Recipe(["rstream", *common, "-T", rng.choice("bna")],
                  ["rstream", "-s", rng.choice((FIRST, SECOND)), *common], ("cm", port),
                  says=r"custom .*\d", never="verification failed")


def _riostream(rng):
    port = _cm_port()
    common = ["-p", port, "-C", 20, "-S", rng.choice((64, 65536)), "-T", "v"]
    return Recipe(["riostream", *common],
                  ["riostream", "-s", rng.choice((FIRST, SECOND)), *common], ("cm", port),
                  says=r"custom .*\d", never="verification failed")


def _qperf(rng):
    port = pairs.next_port()
    tests = rng.choice((["-cm1", "rc_lat", "rc_bw"], ["-cm1", "ver_rc_compare_swap"],
                        ["rc_rdma_read_bw"], ["ud_lat"], ["uc_bw"]))
    return Recipe(["qperf", "-lp", port],
                  ["qperf", "-lp", port, "-t", 1, FIRST, *tests], ("tcp", port),
                  says=r"(bw|latency|msg_rate) += +[1-9]", serves=True,
                  never="(?i)fail|error|unexpected")


def _fio(rng):
    port, verb = _cm_port(), rng.choice(("write", "read", "send"))
    depth = rng.choice((1, 4, 16))
    kib = rng.choice((4, 64, 256))
    # fio connects without RNR retries and posts up to 512 receives: one for each message, or a server
    # that gets no CPU for a while ends the connection, and fio waits for ever.
    mib = 1 if verb == "send" and kib == 4 else 8
    common = ["fio", "--ioengine=rdma", f"--port={port}", f"--bs={kib}k", f"--size={mib}m"]
    return Recipe([*common, "--name=server", "--rw=read",
                   f"--verb={'recv' if verb == 'send' else verb}",
                   f"--iodepth={mib * 1024 // kib + 16 if verb == 'send' else depth}"],
                  [*common, "--name=client", f"--hostname={FIRST}", f"--verb={verb}", "--rw=write",
                   f"--iodepth={depth}"], ("cm", port), says="err= 0")


def _ucx_perftest(rng):
    port = pairs.next_port()
    test = rng.choice(("tag_lat", "tag_bw", "stream_bw", "ucp_am_bw", "ucp_put_bw", "ucp_get",
                       "ucp_fadd"))
    environment = {"UCX_TLS": rng.choice(("rc,self", "ud_verbs,self")),
                   "UCX_NET_DEVICES": "verbena0:1"}
    size = 8 if test == "ucp_fadd" else rng.choice((8, 3000, 100000))
    return Recipe(["ucx_perftest", "-p", port],
                  ["ucx_perftest", FIRST, "-p", port, "-t", test, "-s", size, "-n", 200, "-w", 10],
                  ("tcp", port), says="Final:", environment=environment, never="(?i) error ")


def _fi_pingpong(_rng):
    port = pairs.next_port()
    common = ["fi_pingpong", "-p", "verbs", "-e", "msg", "-I", 20, "-c"]
    return Recipe([*common, "-B", port], [*common, "-P", port, FIRST], ("tcp", port),
                  says=r"(?m)^1m +20 ", server_says=r"(?m)^1m +20 ")


def _open_mpi(rng):
    return Recipe(None, ["mpirun.openmpi", "-n", 2, "--allow-run-as-root", "--oversubscribe",
                         "--mca", "pml", "ucx", "--mca", "osc", "ucx", "--mca", "btl",
                         "^vader,tcp,openib,uct", "-x", "UCX_NET_DEVICES=verbena0:1", "-x",
                         f"UCX_TLS={rng.choice(('rc,self', 'ud_verbs,self'))}", _mpi_check()],
                  None, says="onesided: ok")


def _perftest(rng):
    port = _cm_port()
    program = rng.choice((["ib_send_lat"], ["ib_write_bw"], ["ib_read_bw"], ["ib_send_bw", "-c", "UD"]))
    common = [*program, "-R", "-F", "-d", "verbena0", "-p", port, "-n", 100]
    # The client connects twice, the second time without knowing whether its server listens again.
    return Recipe(common, [*common, FIRST], ("cm", port),
                  never="(?i)completion with error|failed status",
                  race="RDMA_CM_EVENT_(REJECTED; error: 8|UNREACHABLE; error: 1)\\.")


RECIPES = {
    "rping": _rping,
    "rping -P": _persistent_rping,
    "ucmatose": _ucmatose,
    "udaddy": _udaddy,
    "mckey": _mckey,
    "cmtime": _cmtime,
    "rdma_server": _rdma_server,
    "rstream": _rstream,
    "riostream": _riostream,
    "qperf": _qperf,
    "fio": _fio,
    "ucx_perftest": _ucx_perftest,
    "fi_pingpong": _fi_pingpong,
    "open_mpi": _open_mpi,
    "perftest -R": _perftest,
}
PROGRAMS = tuple(RECIPES)


def _mpi_check():
    """The program of tests/apps/mpi, compiled once."""
    global _mpi_program
    with _lock:
        if _mpi_program is None:
            folder = tempfile.mkdtemp(prefix="vsoak.", dir="/tmp")
            path = os.path.join(folder, "mpi_check")
            subprocess.run(["mpicxx.openmpi", "-std=c++20", "-O1", "-w", "-o", path, MPI_SOURCE],
                           check=True, timeout=600)
            _mpi_program = path
        return _mpi_program


class Application:
    """One round; used like pairs.Pair. launch(argv, limit, environment) starts a program."""

    def __init__(self, launch, listeners, name, rng, limit):
        self.name = name
        self.limit = limit
        self.recipe = RECIPES[name](rng)
        self.start = time.monotonic()
        self._launch = lambda argv: launch(argv, limit + 120, self.recipe.environment)
        self._listeners = listeners
        self._server = None
        self.client = None
        self.programs = []
        if self.recipe.server:
            self._server = self._launch(self.recipe.server)
            self.programs.append(self._server)

    def _ready(self):
        kind, value = self.recipe.ready
        if kind == "says":
            return value in self._server.output
        if kind == "tcp":
            return listening(value)
        return any(item["state"] == "listen" and item["source"].endswith(f":{value}")
                   for item in self._listeners())

    def _late(self):
        return time.monotonic() - self.start > self.limit

    def wait(self):
        """True when all has ended within the limit."""
        while self._server and not self._ready():
            if not self._server.running():
                return True
            if self._late():
                return False
            time.sleep(0.03)
        self.client = self._launch(self.recipe.client)
        self.programs.append(self.client)
        while any(program.running() for program in self.programs
                  if program is self.client or not self.recipe.serves):
            if self.was_too_early():
                return True
            if self._late():
                return False
            time.sleep(0.02)
        return True

    def problems(self):
        if self.client is None:
            return ["the server ended before it listened"]
        if self.was_too_early():
            return ["the client did not find its server"]
        found = []
        if self.recipe.serves:
            if not self._server.running():
                found.append("the server, which serves for ever, has ended")
        elif self._server and self._server.wait() != 0:
            found.append(f"the server ends with status {self._server.wait()}")
        if self.client.wait() != 0:
            found.append(f"the client ends with status {self.client.wait()}")
        for role, program, says in (("client", self.client, self.recipe.says),
                                    ("server", self._server, self.recipe.server_says)):
            if program is None:
                continue
            if says and not re.search(says, program.output):
                found.append(f"the {role} does not print '{says}'")
            never = self.recipe.never and re.search(self.recipe.never, program.output)
            if never:
                found.append(f"the {role} prints '{never.group(0)}'")
        return found

    def was_too_early(self):
        return bool(self.recipe.race and self.client and not self.client.running() and
                    re.search(self.recipe.race, self.client.output))

    def port_was_taken(self):
        return any(pairs.ADDRESS_IN_USE.search(program.output) for program in self.programs)

    def describe(self):
        return f"{self.recipe.environment}\n" + "\n".join(
            program.describe() for program in self.programs)

    def close(self):
        for program in self.programs:
            program.close()
