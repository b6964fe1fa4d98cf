# SPDX-License-Identifier: Apache-2.0
"""Further Debian programs that link libibverbs or librdmacm, by name only (tag manual): DAPL's
(dapl2-utils), and live migration of QEMU (qemu-system-x86)."""

import json
import os
import socket
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import ADDRESS, AppTestCase

DAT_CONF = """\
cma u2.0 nonthreadsafe default libdaplofa.so.2 dapl.2.0 "127.88.0.1 0" ""
scm u2.0 nonthreadsafe default libdaploscm.so.2 dapl.2.0 "verbena0 1" ""
"""


class Monitor:
    """QEMU's machine protocol."""

    def __init__(self, path):
        self._socket = socket.socket(socket.AF_UNIX)
        end = time.monotonic() + 20
        while True:
            try:
                self._socket.connect(path)
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        self._file = self._socket.makefile("rw")
        self._file.readline()
        self("qmp_capabilities")

    def __call__(self, command, **arguments):
        self._file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self._file.flush()
        while True:
            answer = json.loads(self._file.readline())
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise AssertionError(answer)


class MoreApps(AppTestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="vmore.", dir="/tmp")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_dapl(self):
        conf = os.path.join(self.folder, "dat.conf")
        with open(conf, "w", encoding="ascii") as out:
            out.write(DAT_CONF)
        environment = {"DAT_OVERRIDE": conf}
        for program in ("dtest", "dtestx", "dtestcm"):
            for provider in ("cma", "scm"):
                with self.subTest(program=program, provider=provider):
                    server = self.daemon.program(program, "-P", provider, limit=60,
                                                 environment=environment)
                    self.assertTrue(server.wait_for("(?i)server|waiting", 20), server.describe())
                    time.sleep(1)  # It says so before it listens.
                    client = self.daemon.program(program, "-P", provider, "-h", ADDRESS, limit=60,
                                                 environment=environment)
                    _, output = self.finish(server, client)
                    self.assertRegex(output, "PASSED|ALL 1000 CONNECTED")

    def test_live_migration_of_qemu(self):
        command = ["qemu-system-x86_64", "-nodefaults", "-display", "none", "-m", 64, "-machine",
                   "pc,accel=tcg"]
        sockets = [os.path.join(self.folder, name) for name in ("from", "to")]
        source = self.daemon.program(*command, "-qmp", f"unix:{sockets[0]},server,nowait")
        target = self.daemon.program(*command, "-qmp", f"unix:{sockets[1]},server,nowait",
                                     "-incoming", f"rdma:{ADDRESS}:4444")
        monitors = [Monitor(path) for path in sockets]
        monitors[0]("migrate", uri=f"rdma:{ADDRESS}:4444")
        end = time.monotonic() + 40
        while True:
            state = monitors[0]("query-migrate")
            if state.get("status") in ("completed", "failed") or time.monotonic() > end:
                break
            time.sleep(0.1)
        self.assertEqual(state.get("status"), "completed", source.describe() + target.describe())
        self.assertEqual(monitors[1]("query-status")["status"], "running")
        for monitor in monitors:
            monitor("quit")
        self.finish(source, target)


if __name__ == "__main__":
    verbena_testing.main()
