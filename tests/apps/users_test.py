# SPDX-License-Identifier: Apache-2.0
"""Daemon and applications of a plain user, from a staged tree. Run as root (it changes the user);
tagged: bazel test //tests/apps:users_test"""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import ADDRESS, AppTestCase, Daemon, Program, free_port, run

NOBODY = 65534


class UserDaemon(Daemon):
    """A daemon of user nobody from a staged tree."""

    def __init__(self, tree, user=NOBODY):
        self.become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        super().__init__(verbena=os.path.join(tree, "bin/verbena"), start=False)
        os.chown(self.folder, user, user)
        self.environment["HOME"] = "/nonexistent"
        status, output = self.command("up", "--nics", 2, limit=60)
        if status != 0:
            raise AssertionError(f"verbena up as {user}: {status}\n{output}")

    def command(self, *arguments, limit=20.0):
        return run([*self.become, self.verbena, *arguments], limit, environment=self.environment)

    def program(self, *argv, limit=60.0, environment=None, **options):
        merged = dict(self.environment)
        merged.update(environment or {})
        return Program([*self.become, self.verbena, "run", "--", *argv], limit,
                       environment=merged, **options)


def stage():
    """A tree that other users can run, from bazel-bin or a staged tree."""
    tree = tempfile.mkdtemp(prefix="vstage.", dir="/tmp")
    os.chmod(tree, 0o755)
    base = os.path.dirname(os.path.dirname(os.path.realpath(verbena_testing.verbena_command())))
    for part, folder in (("tools/verbena", "bin"), ("nic_sim/verbenad", "bin"),
                         ("provider/libverbena-rdmav34.so", "lib"),
                         ("provider/libverbena-preload.so", "lib")):
        os.makedirs(os.path.join(tree, folder), exist_ok=True)
        source = os.path.join(base, part)
        if not os.path.exists(source):
            source = os.path.join(base, folder, os.path.basename(part))
        os.chmod(shutil.copy(source, os.path.join(tree, folder)), 0o755)
    for folder in ("bin", "lib"):
        os.chmod(os.path.join(tree, folder), 0o755)
    return tree


@unittest.skipIf(os.geteuid() != 0, "needs root to become another user")
class PlainUser(AppTestCase):

    @classmethod
    def setUpClass(cls):
        cls.tree = stage()
        cls.daemon = UserDaemon(cls.tree)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.close()
        shutil.rmtree(cls.tree, ignore_errors=True)

    def test_the_daemon_runs_as_that_user(self):
        for pid in self.daemon.processes():
            self.assertEqual(os.stat(f"/proc/{pid}").st_uid, NOBODY)
        folder = os.path.join(self.daemon.folder, "verbena")
        self.assertEqual(stat.S_IMODE(os.stat(folder).st_mode), 0o700)

    def test_pingpong_and_perftest(self):
        for gid, events, nics in ((1, False, ("verbena0", "verbena1")),
                                  (0, True, ("verbena0", "verbena0"))):
            port = free_port()
            options = ["-g", gid, "-p", port, "-c", "-n", 100, "-s", 70000] + (
                ["-e"] if events else [])
            self.pair(["ibv_rc_pingpong", "-d", nics[0], *options],
                      ["ibv_rc_pingpong", "-d", nics[1], *options, ADDRESS], port)
        port = free_port()
        common = ["ib_write_bw", "-F", "-x", 1, "-p", port, "-n", 200]
        self.pair([*common, "-d", "verbena0"], [*common, "-d", "verbena1", ADDRESS], port)

    def test_another_user_is_refused(self):
        environment = dict(self.daemon.environment)
        environment["VERBENA_SOCKET"] = os.path.join(self.daemon.folder, "verbena", "t.sock")
        status, output = run(["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups",
                              self.daemon.verbena, "status"], environment=environment)
        self.assertNotEqual(status, 0, output)

    def test_a_file_with_capabilities_is_refused_with_one_line(self):
        """A program that the kernel marks as not dumpable cannot be read by the daemon."""
        if shutil.which("setcap") is None:
            self.skipTest("no setcap")
        program = shutil.copy("/usr/bin/ibv_devinfo", os.path.join(self.tree, "bin/devinfo"))
        os.chmod(program, 0o755)
        if subprocess.run(["setcap", "cap_net_raw+ep", program], check=False).returncode != 0:
            self.skipTest("setcap does not work here")
        program = self.daemon.program(program, limit=20)
        status = program.wait()
        text = program.describe()
        program.close()
        self.assertIsNotNone(status, text)  # No hang; the loader drops LD_PRELOAD for such files.


class SystemDaemon(Daemon):
    """A system-wide daemon of root whose programs run as nobody."""

    def __init__(self, tree, arguments=()):
        super().__init__(verbena=os.path.join(tree, "bin/verbena"), start=False)
        self.environment.update(VERBENA_NAME=f"test{os.getpid()}", HOME="/nonexistent")
        status, output = self.command("up", "--system", "--nics", 2, *arguments, limit=60)
        if status != 0:
            raise AssertionError(f"verbena up --system: {status}\n{output}")

    def program(self, *argv, limit=60.0, environment=None, **options):
        merged = dict(self.environment)
        merged.update(environment or {})
        become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        return Program([*become, self.verbena, "run", "--", *argv], limit, environment=merged,
                       **options)

    def close(self):
        self.command("down", "--system")
        shutil.rmtree(self.folder, ignore_errors=True)


@unittest.skipIf(os.geteuid() != 0, "needs root to start a system-wide daemon")
class PlainUserOfASystemDaemon(AppTestCase):

    @classmethod
    def setUpClass(cls):
        cls.tree = stage()
        cls.daemon = SystemDaemon(cls.tree)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.close()
        shutil.rmtree(cls.tree, ignore_errors=True)

    def test_programs_end_although_they_leave_events_unread(self):
        port = free_port()
        common = ["ib_write_bw", "-F", "-x", 1, "-p", port, "-n", 200]
        self.pair([*common, "-d", "verbena0"], [*common, "-d", "verbena1", ADDRESS], port)
        port = free_port()
        options = ["-g", 1, "-p", port, "-c", "-n", 100, "-e"]
        self.pair(["ibv_rc_pingpong", "-d", "verbena0", *options],
                  ["ibv_rc_pingpong", "-d", "verbena1", *options, ADDRESS], port)


@unittest.skipIf(os.geteuid() != 0, "needs root")
class Root(AppTestCase):

    def test_pingpong_as_root(self):
        port = free_port()
        options = ["-g", 1, "-p", port, "-c", "-n", 100]
        outputs = self.pair(["ibv_rc_pingpong", "-d", "verbena0", *options],
                            ["ibv_rc_pingpong", "-d", "verbena1", *options, ADDRESS], port)
        for output in outputs:
            self.assertTrue(re.search(r"100 iters in", output), output)


if __name__ == "__main__":
    verbena_testing.main()
