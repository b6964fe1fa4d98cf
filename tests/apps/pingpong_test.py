# SPDX-License-Identifier: Apache-2.0
"""Stock ibv_rc_, uc_, ud_, srq_ and xsrq_pingpong: sizes, MTUs, polling and events, GIDs, NICs; with
data check (-c) where they have it.

VERBENA_TEST_LOOPS: number of runs in a loop (5). VERBENA_TEST_FULL: the whole matrix.
"""

import itertools
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import ADDRESS, FULL, AppTestCase, free_port

SIZES = (1, 2, 63, 64, 4096, 4097, 65536, 1 << 20, 8 << 20)
MTUS = (256, 512, 1024, 2048, 4096)
TWO, ONE = ("verbena0", "verbena1"), ("verbena0", "verbena0")


def iterations(size):
    return 200 if size <= 4096 else 50 if size <= 65536 else 10


class Pingpong(AppTestCase):

    def commands(self, nics, gid, size, mtu=1024, events=False, count=None):
        port = free_port()
        options = ["-g", gid, "-p", port, "-s", size, "-m", mtu, "-c", "-n",
                   count or iterations(size)] + (["-e"] if events else [])
        return (["ibv_rc_pingpong", "-d", nics[0], *options],
                ["ibv_rc_pingpong", "-d", nics[1], *options, ADDRESS], port)

    def check(self, *arguments, **options):
        with self.subTest(arguments=arguments, **options):
            outputs = self.pair(*self.commands(*arguments, **options))
            for output in outputs:
                self.assertRegex(output, r"\d+ iters in [0-9.]+ seconds")
                self.assertNotIn("invalid data", output)

    def test_every_size_by_polling(self):
        for size in SIZES:
            self.check(TWO, 1, size)

    def test_every_size_by_events(self):
        for size in SIZES:
            self.check(TWO, 1, size, events=True)

    def test_every_mtu_gid_and_pair_of_nics(self):
        for mtu, gid, nics in itertools.product(MTUS, (0, 1), (TWO, ONE)):
            self.check(nics, gid, 4097 + mtu, mtu=mtu, events=mtu == 512, count=30)

    def test_large_messages_at_the_smallest_and_largest_mtu(self):
        for mtu in (256, 4096):
            self.check(ONE, 0, 8 << 20, mtu=mtu, count=4)
            self.check(TWO, 1, 8 << 20, mtu=mtu, count=4, events=True)

    def test_datagrams(self):
        for nics, gid, size, events in itertools.product((TWO, ONE), (0, 1), (1, 2048, 4096),
                                                         (False, True)):
            with self.subTest(nics=nics, gid=gid, size=size, events=events):
                port = free_port()
                options = ["-g", gid, "-p", port, "-s", size, "-n", 50, *(["-e"] if events else [])]
                outputs = self.pair(["ibv_ud_pingpong", "-d", nics[0], *options],
                                    ["ibv_ud_pingpong", "-d", nics[1], *options, ADDRESS], port)
                for output in outputs:
                    self.assertRegex(output, r"\d+ iters in [0-9.]+ seconds")

    def test_unreliable_connections(self):
        """Few iterations with one receive each: nothing is lost on an undisturbed fabric."""
        for nics, options in ((TWO, ["-c"]), (ONE, ["-c", "-e"]), (TWO, ["-s", 65536, "-c"]),
                              (TWO, ["-s", 4097, "-m", 256, "-e"]), (ONE, ["-r", 1, "-s", 1])):
            with self.subTest(nics=nics, options=options):
                port = free_port()
                common = ["-g", 1, "-p", port, "-n", 100, *options]
                outputs = self.pair(["ibv_uc_pingpong", "-d", nics[0], *common],
                                    ["ibv_uc_pingpong", "-d", nics[1], *common, ADDRESS], port)
                for output in outputs:
                    self.assertRegex(output, r"\d+ iters in [0-9.]+ seconds")
                    self.assertNotIn("invalid data", output)

    def test_shared_receive_queue(self):
        """Sixteen QPs on one SRQ at either end, and other numbers, depths, sizes."""
        for nics, options in ((TWO, ["-c"]), (ONE, ["-c", "-e"]), (TWO, ["-q", 1, "-r", 1]),
                              (TWO, ["-q", 64, "-c", "-e", "-r", 128]),
                              (ONE, ["-s", 65536, "-m", 256, "-c", "-n", 20])):
            with self.subTest(nics=nics, options=options):
                port = free_port()
                common = ["-g", 1, "-p", port, "-n", 40, *options]
                outputs = self.pair(["ibv_srq_pingpong", "-d", nics[0], *common],
                                    ["ibv_srq_pingpong", "-d", nics[1], *common, ADDRESS], port)
                for output in outputs:
                    self.assertRegex(output, r"\d+ iters in [0-9.]+ seconds")
                    self.assertNotIn("invalid data", output)

    def test_extended_reliable_connections(self):
        for nics, options in ((TWO, []), (ONE, ["-e"]), (TWO, ["-s", 65536, "-m", 256]),
                              (TWO, ["-n", 50, "-e", "-s", 1])):
            with self.subTest(nics=nics, options=options):
                port = free_port()
                common = ["-g", 1, "-p", port, *options]
                outputs = self.pair(["ibv_xsrq_pingpong", "-d", nics[0], *common],
                                    ["ibv_xsrq_pingpong", "-d", nics[1], *common, ADDRESS], port)
                for output in outputs:
                    self.assertIn("success", output)

    def test_extended_reliable_connections_of_three_clients(self):
        port = free_port()
        common = ["-g", 1, "-p", port]
        server = self.daemon.program("ibv_xsrq_pingpong", "-d", "verbena0", "-c", 3, *common)
        end = 200
        while not verbena_testing.listening(port) and server.running() and end:
            end -= 1
            time.sleep(0.05)
        clients = [self.daemon.program("ibv_xsrq_pingpong", "-d", "verbena1", *common, ADDRESS)
                   for _ in range(3)]
        for program in (*clients, server):
            self.assertEqual(program.wait(), 0, program.describe())

    def test_every_option_together_with_every_other(self):
        """Memory of all kinds, events, timestamps, ibv_wr_*, data check, on demand, service level:
        all combinations, or a third of them."""
        memory = ([], ["-o"], ["-O"], ["-o", "-P"], ["-O", "-P"], ["-j"])
        cases = []
        for kind, *flags in itertools.product(memory, *(([], [flag]) for flag in "-e -t -N -c".split())):
            options = kind + sum(flags, [])
            # With both it ends at an event whose completion it has polled before the event came, as
            # it may on any device (ibv_req_notify_cq(3)).
            if not {"-e", "-t"} <= set(options):
                cases.append(("rc", options))
        for program, options in (("uc", "-e -c -l3"), ("ud", "-e -c -l3"), ("srq", "-e -c -o -l3"),
                                 ("xsrq", "-e -o -l3")):
            for flags in itertools.product(*(([], [flag]) for flag in options.split())):
                cases.append((program, sum(flags, [])))
        for i, (program, options) in enumerate(cases):
            if not FULL and i % 3:
                continue
            with self.subTest(program=program, options=options):
                port = free_port()
                common = [f"ibv_{program}_pingpong", "-g", 1, "-i", 1, "-p", port, *options]
                if program != "xsrq":
                    common += ["-n", 50, "-r", 60]
                nics = TWO if i % 3 else ONE
                outputs = self.pair([*common, "-d", nics[0]], [*common, "-d", nics[1], ADDRESS], port)
                for output in outputs:
                    self.assertRegex(output, r"\d+ iters in [0-9.]+ seconds|success")
                    self.assertNotIn("invalid data", output)

    def test_full_matrix(self):
        if not FULL:
            self.skipTest("VERBENA_TEST_FULL is not set")
        for case in itertools.product((TWO, ONE), (0, 1), SIZES, MTUS, (False, True)):
            self.check(*case)

    def test_twenty_pairs_at_once(self):
        started = []
        for i in range(20):
            server, client, port = self.commands(
                TWO if i % 2 else ONE, i // 2 % 2, (64, 4096, 100000, 1000)[i % 4],
                events=i % 3 == 0, count=100)
            started += self.start_pair(server, client, port, limit=120)
        self.finish(*started)
        status = self.daemon.json("list", "qp")
        items = status["items"] if isinstance(status, dict) else status
        self.assertEqual(items, [])

    def test_one_run_after_another(self):
        for i in range(int(os.environ.get("VERBENA_TEST_LOOPS", "5"))):
            self.check(TWO if i % 2 else ONE, 1, 4096, count=100, events=i % 4 >= 2)


if __name__ == "__main__":
    verbena_testing.main()
