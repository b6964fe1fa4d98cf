# SPDX-License-Identifier: Apache-2.0
"""Stock fio with its rdma engine. The side that writes (rw=write) connects and chooses the verb;
the side that reads listens. `recv` is what the listening side does for `send`."""

import os
import re
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import ADDRESS, FULL, AppTestCase

SIZES = (("4k", "1m", 256), ("64k", "16m", 256), ("1m", "64m", 64)) if FULL else (("64k", "16m", 256),)
DEPTHS = (1, 4, 32) if FULL else (4,)


class Fio(AppTestCase):

    port = 18600

    def jobs(self, verb, block, size, depth, count):
        with self.subTest(verb=verb, block=block, depth=depth):
            Fio.port += 1
            common = ["fio", "--ioengine=rdma", f"--port={Fio.port}", f"--bs={block}",
                      f"--size={size}"]
            # Messages find a receive posted when the receiving side is the deeper one.
            server_depth = 2 * depth + 16 if verb == "send" else depth
            server_verb = "recv" if verb == "send" else verb
            server = self.daemon.program(*common, "--name=server", f"--verb={server_verb}",
                                         "--rw=read", f"--iodepth={server_depth}", limit=60)
            end = time.monotonic() + 20
            while not any(item["state"] == "listen" for item in self.daemon.json("list", "cm_id")
                          if item["source"].endswith(f":{Fio.port}")):
                if not server.running() or time.monotonic() > end:
                    server.kill()
                    server.wait()
                    self.fail("fio does not listen\n" + server.describe())
                time.sleep(0.02)
            client = self.daemon.program(*common, "--name=client", f"--hostname={ADDRESS}",
                                         f"--verb={verb}", "--rw=write", f"--iodepth={depth}",
                                         limit=60)
            server_output, client_output = self.finish(server, client)
            self.assertIn("err= 0", client_output)
            self.assertRegex(client_output, rf"issued rwts: total=0,{count},0,0")
            if verb == "send":
                received = re.search(r"issued rwts: total=(\d+),0,0,0", server_output)
                self.assertIsNotNone(received, server_output)
                self.assertGreaterEqual(int(received.group(1)), count)

    def test_every_verb(self):
        for verb in ("write", "read", "send"):
            for block, size, count in SIZES:
                for depth in DEPTHS:
                    self.jobs(verb, block, size, depth, count)


if __name__ == "__main__":
    verbena_testing.main()
