# SPDX-License-Identifier: Apache-2.0
"""Two users of a system-wide daemon: what one may see, and what one can do to the other's rate.

Run as root: bazel test //tests/apps:isolation_test; docs/TESTING.md says how to read the output.
For each attack slots with the attacker and slots with a process that burns as much CPU take turns;
compared is what the other user's pair got done in them. Only ratios count.
"""

import json
import mmap
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import verbena_testing
from users_test import SystemDaemon, stage
from verbena_testing import ADDRESS, AppTestCase, Program, free_port, run

VICTIM = 65534
ATTACKER = 65533
OWN_SHARE = 0.8  # Of the rate beside the burning process.
SLOT_S = 0.4
ROUNDS = 4  # Of four slots; three times as many before a ratio counts as bad.
TICKS = os.sysconf("SC_CLK_TCK")


def become(user, groups=()):
    extra = [f"--groups={','.join(map(str, groups))}"] if groups else ["--clear-groups"]
    return ["setpriv", f"--reuid={user}", f"--regid={user}", *extra]


def find(name):
    tests = os.path.join(os.environ.get("TEST_SRCDIR", ""),
                         os.environ.get("TEST_WORKSPACE", "verbena"), "tests")
    for folder in (os.environ.get("VERBENA_ISOLATION"), os.path.join(tests, "isolation"),
                   os.path.join(tests, "endurance"), "bazel-bin/tests/isolation",
                   "bazel-bin/tests/endurance"):
        if folder and os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    raise RuntimeError(f"no {name}: run by Bazel or set VERBENA_ISOLATION")


def cpu_seconds(pid, thread=None):
    """User and system time of a process or of one of its threads."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        with open(path, encoding="ascii", errors="replace") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    except OSError:
        return 0.0


class Pair:
    """The victim: counts messages in a file."""

    def __init__(self, daemon, program, kind):
        self.file = tempfile.NamedTemporaryFile(prefix="vrate.", dir="/tmp")
        self.file.write(bytes(8))
        self.file.flush()
        os.fchmod(self.file.fileno(), 0o666)
        self.page = mmap.mmap(self.file.fileno(), 8)
        self.program = daemon.program_of(VICTIM, program, kind, self.file.name, limit=600)
        if not self.program.wait_for("ready"):
            raise AssertionError(self.program.describe() + daemon.dump())

    def count(self):
        if not self.program.running():
            raise AssertionError(self.program.describe())
        return struct.unpack("<Q", self.page[:8])[0]

    def rate(self, seconds):
        start, count = time.monotonic(), self.count()
        time.sleep(seconds)
        return (self.count() - count) / (time.monotonic() - start)

    def close(self):
        self.program.close()
        self.page.close()
        self.file.close()


class Daemon(SystemDaemon):

    def program_of(self, user, *argv, limit=60.0, groups=(), **options):
        return Program([*become(user, groups), self.verbena, "run", "--", *argv], limit,
                       environment=self.environment, **options)

    def verbena_of(self, user, *arguments, limit=20.0, groups=()):
        return run([*become(user, groups), self.verbena, *arguments], limit,
                   environment=self.environment)

    def socket(self):
        return f"/run/verbena/{self.environment['VERBENA_NAME']}.sock"


@unittest.skipIf(os.geteuid() != 0, "needs root to start a system-wide daemon")
class TwoUsers(AppTestCase):

    group = 64999

    @classmethod
    def setUpClass(cls):
        cls.tree = stage()
        for name in ("hostile_client", "rate_pair", "chaos_program"):
            os.chmod(shutil.copy(find(name), os.path.join(cls.tree, "bin", name)), 0o755)
        cls.daemon = Daemon(cls.tree, arguments=("--group", cls.group))
        cls.hostile = os.path.join(cls.tree, "bin/hostile_client")
        cls.rate_pair = os.path.join(cls.tree, "bin/rate_pair")
        cls.chaos_program = os.path.join(cls.tree, "bin/chaos_program")

    @classmethod
    def tearDownClass(cls):
        cls.daemon.close()
        shutil.rmtree(cls.tree, ignore_errors=True)

    def attack(self, mode, user=ATTACKER):
        """The attacker, at work."""
        command = [self.hostile, self.daemon.socket(), mode]
        if mode.startswith("hold"):
            command.append(user)  # It becomes that user.
        else:
            command = [*become(user), *command]
        program = Program(command, limit=600, environment=self.daemon.environment)
        self.assertTrue(program.wait_for("ready"), program.describe() + self.daemon.dump())
        return program

    def held_up(self):
        """Users whose memory the daemon waits for (docs/CONTROL.md)."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
            control.settimeout(20)
            control.connect(self.daemon.socket())
            control.send(struct.pack("<II", 0x4e425256, 2))
            control.send(b'{"op":"list","what":"context"}')
            text = b""
            while True:
                piece = control.recv(65536)
                text += piece[1:]
                if piece[:1] != b"M":
                    return json.loads(text).get("held_up", [])

    def burn(self, share):
        """A process that uses this share of a CPU."""
        program = Program([*become(ATTACKER), self.hostile, "-", "burn"], limit=600)
        self.assertTrue(program.wait_for("ready"), program.describe())
        if share < 0.02:
            program.signal(signal.SIGSTOP)
        return program

    def compare(self, mode, kind, **how):
        """Ratio of the pair's counts: beside the attacker to beside the burning process."""
        pair = Pair(self.daemon, self.rate_pair, kind)
        totals = {"attack": 0.0, "burn": 0.0}
        share = 0.0
        try:
            pair.rate(0.3)
            for turn in range(3 * ROUNDS):
                for what in ("attack", "burn", "burn", "attack"):
                    program = self.attack(mode, **how) if what == "attack" else self.burn(share)
                    try:
                        used, start = cpu_seconds(program.pid), time.monotonic()
                        totals[what] += pair.rate(SLOT_S)
                        if what == "attack":
                            share = ((cpu_seconds(program.pid) - used) /
                                     (time.monotonic() - start))
                    finally:
                        program.close()
                ratio = totals["attack"] / max(totals["burn"], 1.0)
                if turn + 1 >= ROUNDS and ratio >= OWN_SHARE:
                    break
        finally:
            pair.close()
        slots = 2 * (turn + 1)
        name = " ".join([mode, *(f"user {user}" for user in how.values()), kind])
        print(f"isolation {name}: {ratio:.2f} of {totals['burn'] / slots:.0f} messages/s; "
              f"the attacker used {share:.2f} CPUs", flush=True)
        return ratio

    def check(self, mode, **how):
        for kind in ("stream", "ping"):
            with self.subTest(kind=kind):
                self.assertGreaterEqual(self.compare(mode, kind, **how), OWN_SHARE)

    def test_the_attack_by_a_page_is_one(self):
        """Else the tests below would show nothing. Only root's page holds the daemon up for sure."""
        for mode in ("hold-fetch", "hold-placement"):
            program = self.attack(mode, user=0)
            self.assertEqual(self.held_up(), [0], mode)
            program.close()
            end = time.monotonic() + 10
            while self.held_up() and time.monotonic() < end:
                time.sleep(0.05)
            self.assertEqual(self.held_up(), [])

    def test_a_payload_in_a_page_that_does_not_answer(self):
        self.check("hold-fetch", user=0)
        self.check("hold-fetch")

    def test_a_target_in_a_page_that_does_not_answer(self):
        self.check("hold-placement", user=0)
        self.check("hold-placement")

    def test_a_guard_page_that_does_not_answer(self):
        self.check("hold-guard", user=0)

    def test_a_flood_of_commands(self):
        self.check("commands")

    def test_a_flood_of_connections(self):
        self.check("connections")

    def test_all_objects_taken(self):
        self.check("quota")

    def test_doorbells_that_never_stop(self):
        self.check("doorbells")

    def test_the_other_user_opens_devices_while_one_is_held_up_and_one_has_taken_all(self):
        programs = [self.attack("hold-fetch", user=0), self.attack("quota")]
        try:
            port = free_port()
            common = ["ib_write_bw", "-F", "-x", 1, "-p", port, "-n", 200, "-q", 4]
            pair = [self.daemon.program_of(VICTIM, *common, "-d", "verbena0")]
            deadline = time.monotonic() + 20
            while not verbena_testing.listening(port) and time.monotonic() < deadline:
                time.sleep(0.01)
            pair.append(self.daemon.program_of(VICTIM, *common, "-d", "verbena1", ADDRESS))
            self.finish(*pair)
            # Objects of every kind, and traffic through them.
            kinds = self.daemon.program_of(VICTIM, self.chaos_program, "--role", "kinds", 1, 2,
                                           "verbena0", "verbena1")
            self.assertEqual(kinds.wait(), 0, kinds.describe())
            self.assertIn("data right", kinds.output)
            kinds.close()
            status, output = self.daemon.command("list", "context", "--json")
            self.assertEqual(status, 0, output)
        finally:
            for program in programs:
                program.close()

    def clients(self):
        return self.daemon.json("status")["clients"]

    def test_a_killed_client_is_gone_within_a_second_although_its_page_does_not_answer(self):
        for user in (0, ATTACKER):
            for mode in ("hold-fetch", "hold-placement"):
                self.assertEqual(self.clients(), 0)
                program = self.attack(mode, user)
                self.assertEqual(self.clients(), 1)
                program.kill()
                start = time.monotonic()
                while self.clients() != 0:
                    self.assertLess(time.monotonic() - start, 5)
                took = time.monotonic() - start
                program.close()
                print(f"isolation {mode} of user {user}: gone {took:.2f} s after SIGKILL", flush=True)
                self.assertLess(took, 1.5)

    def test_a_user_sees_and_touches_only_what_is_their_own(self):
        pair = Pair(self.daemon, self.rate_pair, "ping")
        objects = self.daemon.program_of(VICTIM, self.chaos_program, "--role", "objects",
                                         "verbena1")
        try:
            self.assertTrue(objects.wait_for("ready"), objects.describe())
            for what in ("mw", "dm", "srq", "ah", "xrcd"):
                for user, seen in ((0, 1), (VICTIM, 1), (ATTACKER, 0)):
                    status, output = self.daemon.verbena_of(user, "list", what, "--json")
                    self.assertEqual(status, 0, output)
                    self.assertEqual(output.count("chaos_program"), seen, f"{user} {what}")
            for what in ("context", "pd", "mr", "cq", "qp"):
                status, all_of_it = self.daemon.command("list", what, "--json")
                self.assertEqual(status, 0, all_of_it)
                self.assertIn("rate_pair", all_of_it)
                status, output = self.daemon.verbena_of(VICTIM, "list", what, "--json")
                self.assertEqual(status, 0, output)
                self.assertIn("rate_pair", output)
                status, output = self.daemon.verbena_of(ATTACKER, "list", what, "--json")
                self.assertEqual(status, 0, output)
                self.assertNotIn("rate_pair", output)
            status, output = self.daemon.verbena_of(ATTACKER, "status")
            self.assertEqual(status, 0, output)
        finally:
            objects.close()
            pair.close()

    def test_captures_faults_and_the_end_need_root_or_the_group(self):
        folder = tempfile.mkdtemp(prefix="vcap.", dir="/tmp")
        os.chmod(folder, 0o777)
        file = os.path.join(folder, "out.pcapng")
        try:
            for arguments in (("capture", file, "--for", "0.1"), ("fault", "add", "drop nth=1"),
                              ("fault", "list"), ("fault", "clear"), ("counters",),
                              ("down", "--system")):
                status, output = self.daemon.verbena_of(ATTACKER, *arguments)
                self.assertNotEqual(status, 0, f"{arguments}: {output}")
                self.assertIn("may do that", output, arguments)
            os.path.exists(file) and os.unlink(file)
            for arguments in (("fault", "add", "drop count=1 opcode=atomic"), ("fault", "clear"),
                              ("counters",), ("capture", file, "--for", "0.1")):
                status, output = self.daemon.verbena_of(ATTACKER, *arguments, groups=(self.group,))
                self.assertEqual(status, 0, f"{arguments}: {output}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def test_the_daemon_ends_although_a_page_does_not_answer(self):
        program = self.attack("hold-fetch", user=0)
        try:
            start = time.monotonic()
            status, output = self.daemon.command("down", "--system", limit=30)
            print(f"isolation: the daemon ended {time.monotonic() - start:.1f} s after it was told",
                  flush=True)
            self.assertEqual(status, 0, output)
        finally:
            program.close()
            type(self).daemon.close()
            type(self).daemon = Daemon(self.tree, arguments=("--group", self.group))


if __name__ == "__main__":
    verbena_testing.main()
