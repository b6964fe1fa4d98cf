# SPDX-License-Identifier: Apache-2.0
"""Messages of the connection manager that are lost: what stock programs see, and when.

The times are those of Linux: a REQ or DREQ of the active side waits 6.144 s for its answer, all
else 4.096 s (tests/vectors/cm_loss_*.pcap). All cases run at once, each on a NIC of its own.
"""

import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import AppTestCase

ACTIVE, PASSIVE = 6.144, 4.096
# How late a busy machine may be.
SLACK = 3.5


class Case:

    def __init__(self, message, programs, least, status=0, text=""):
        self.message = message      # lost once; None: none is
        self.programs = programs    # "rping", "ucmatose", "udaddy", "closed port"
        self.least = least          # seconds
        self.status = status        # of the client; None: anything but 0
        self.text = text            # that the client prints


CASES = [
    Case(None, "rping", 0),
    Case("req", "rping", ACTIVE),
    Case("rep", "rping", PASSIVE),
    Case("rtu", "ucmatose", PASSIVE),
    Case("dreq", "ucmatose", PASSIVE),
    Case("drep", "ucmatose", PASSIVE),
    Case("rej", "closed port", ACTIVE, None, "RDMA_CM_EVENT_REJECTED"),
    Case("sidr_req", "udaddy", PASSIVE),
]


class LostMessages(AppTestCase):

    nics = len(CASES)

    def listeners(self):
        return [item["source"] for item in self.daemon.json("list", "cm_id")
                if item["state"] == "listen"]

    def command(self, case, address, port, client):
        if case.programs in ("rping", "closed port"):
            side = ["-c"] if client else ["-s"]
            return ["rping", *side, "-a", address, "-p", port, "-C", 3]
        program = [case.programs, "-p", port] if case.programs == "ucmatose" else [case.programs]
        return program + (["-s", address] if client else ["-b", address])

    def test_each_single_message_lost(self):
        servers, clients, started = {}, {}, time.monotonic()
        for i, case in enumerate(CASES):
            if case.message:
                status, output = self.daemon.command(
                    "fault", "add", f"drop dev=verbena{i} mad={case.message} nth=1")
                self.assertEqual(status, 0, output)
            if case.programs != "closed port":
                servers[i] = self.daemon.program(
                    *self.command(case, f"127.88.0.{i + 1}", 7471, False), limit=60)
        end = time.monotonic() + 20
        while len(self.listeners()) < len(servers):
            self.assertLess(time.monotonic(), end, self.daemon.dump())
            time.sleep(0.05)
        begin, ended = {}, {}
        for i, case in enumerate(CASES):
            begin[i] = time.monotonic()
            clients[i] = self.daemon.program(
                *self.command(case, f"127.88.0.{i + 1}", 7471, True), limit=60)
        waiting = {(kind, i): program for kind, programs in (("server", servers),
                                                             ("client", clients))
                   for i, program in programs.items()}
        while waiting:
            for key in [key for key, program in waiting.items() if not program.running()]:
                ended[key] = time.monotonic()
                del waiting[key]
            if time.monotonic() - started > 60:
                break
            time.sleep(0.02)
        for i, case in enumerate(CASES):
            programs = [clients[i]] + ([servers[i]] if i in servers else [])
            statuses = [program.wait() for program in programs]
            texts = "\n".join(program.describe() for program in programs)
            for program in programs:
                program.close()
            with self.subTest(lost=case.message, programs=case.programs):
                for status in statuses:
                    if case.status is None:
                        self.assertNotIn(status, (0, None), texts)
                    else:
                        self.assertEqual(status, case.status, texts)
                self.assertIn(case.text, texts)
                took = max(when for (_, n), when in ended.items() if n == i) - begin[i]
                self.assertGreaterEqual(took, case.least, texts)
                self.assertLess(took, case.least + SLACK, texts)
        # Each rule has found its message.
        for rule in self.daemon.json("fault", "list"):
            self.assertEqual(rule["hits"], 1, rule)


class DeadDevice(AppTestCase):
    """The engine dies: nobody may wait for ever."""

    def test_programs_end_when_the_device_dies(self):
        server = self.daemon.program("rping", "-s", "-a", "127.88.0.1", "-p", 7471, "-v", limit=60)
        idle = self.daemon.program("ucmatose", "-p", 7472, limit=60)
        end = time.monotonic() + 20
        while len(self.daemon.json("list", "cm_id")) < 2:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)
        client = self.daemon.program("rping", "-c", "-a", "127.88.0.1", "-p", 7471, "-v", limit=60)
        self.assertTrue(client.wait_for("rdma-ping-3"), client.describe())
        os.kill(self.daemon.engine(), 9)
        for program in (client, server, idle):
            program.deadline = min(program.deadline, time.monotonic() + 20)
            self.assertNotIn(program.wait(), (0, None), program.describe())
            program.close()


if __name__ == "__main__":
    verbena_testing.main()
