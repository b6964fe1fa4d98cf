# SPDX-License-Identifier: Apache-2.0
"""Stock UCX: ucx_info, ucx_perftest (peers meet over TCP), io_demo (over rdma_cm, checks its data),
and the examples of libucx-dev, compiled as they are.

VERBENA_TEST_FULL: every test of ucx_perftest in several sizes and depths.
"""

import os
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import ADDRESS, FULL, AppTestCase, free_port, listening

EXAMPLES = "/usr/share/doc/libucx-dev/examples"
# `rc` is rc_verbs and, to connect its QPs, ud_verbs.
RC = {"UCX_TLS": "rc,self", "UCX_NET_DEVICES": "verbena0:1"}
UD = {"UCX_TLS": "ud_verbs,self", "UCX_NET_DEVICES": "verbena0:1"}
ITERATIONS = 1000 if FULL else 60

# What ucx_perftest's batch files hold: a name, and options.
UCP_TESTS = """\
tag_lat      -t tag_lat
tag_bw       -t tag_bw -O 16 -s 70000
tag_sync     -t tag_sync_lat
stream       -t stream_bw -s 3000
am           -t ucp_am_lat -s 100
am_bw        -t ucp_am_bw -O 4 -s 20000
put_lat      -t ucp_put_lat
put_bw       -t ucp_put_bw -s 9000
get          -t ucp_get -s 20000
add          -t ucp_add
fadd         -t ucp_fadd -O 4
swap         -t ucp_swap
cswap        -t ucp_cswap
"""
FULL_TESTS = "".join(
    f"{test}_{size}_{depth} -t {test} -s {size} -O {depth}\n"
    for test in ("tag_lat", "tag_bw", "tag_sync_lat", "tag_sync_bw", "ucp_put_lat", "ucp_put_bw",
                 "ucp_get", "stream_bw", "stream_lat", "ucp_am_lat", "ucp_am_bw")
    for size in (8, 3000, 300000) for depth in (1, 16)) + "".join(
        f"{test}_{size}_{depth} -t {test} -s {size} -O {depth}\n"
        for test in ("ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap")
        for size in (4, 8) for depth in (1, 16))
UD_TESTS = "".join(line + "\n" for line in UCP_TESTS.splitlines()
                   if line.split()[0] in ("tag_bw", "stream", "am", "put_bw", "get", "fadd"))
UCT_RC_TESTS = """\
short  -t am_lat -D short
zcopy  -t am_bw -D zcopy -s 2000
put    -t put_lat -D short
putz   -t put_bw -D zcopy -s 100000
get    -t get -D zcopy -s 100000
bget   -t get -D bcopy -s 1000
add    -t add_mr
fadd   -t fadd
cswap  -t cswap
"""
UCT_TESTS = """\
short  -t am_lat -D short
bcopy  -t am_bw -D bcopy -s 1000
zcopy  -t am_bw -D zcopy -s 2000
"""


class Ucx(AppTestCase):

    folder = None

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory(prefix="vucx.", dir="/tmp")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()
        super().tearDownClass()

    def start(self, *argv, environment, limit=120):
        return self.daemon.program(*argv, environment=environment, limit=limit)

    def on_wire(self):
        return sum(device["port_xmit_packets"] for device in self.daemon.counters().values())

    def perftest(self, tests, environment, *options):
        path = os.path.join(self.folder.name, "batch")
        with open(path, "w", encoding="ascii") as batch:
            batch.write(tests)
        port = free_port()
        before = self.on_wire()
        limit = 60 + 2 * len(tests.splitlines())
        server = self.start("ucx_perftest", "-p", port, "-b", path, environment=environment,
                            limit=limit)
        self.assertTrue(server.wait_for("Waiting for connection"), server.describe())
        client = self.start("ucx_perftest", "-p", port, "-b", path, "-f", "-n", ITERATIONS, "-w", 5,
                            *options, ADDRESS, environment=environment, limit=limit)
        outputs = self.finish(server, client)
        for line in tests.splitlines():
            self.assertRegex(outputs[1], rf"(?m)^ *{line.split()[0]} +{ITERATIONS} ")
        for output in outputs:
            self.assertNotRegex(output, "ERROR|WARN")
        # Nothing found a way around the device.
        self.assertGreater(self.on_wire() - before, ITERATIONS * len(tests.splitlines()))

    def test_both_transports_are_found(self):
        status, output = self.daemon.run("ucx_info", "-d", limit=60)
        self.assertEqual(status, 0, output)
        for device in ("verbena0:1", "verbena1:1"):
            for transport in ("rc_verbs", "ud_verbs"):
                self.assertRegex(output, rf"Transport: {transport}\n# +Device: {device}")
        self.assertNotRegex(output, "ERROR|WARN")
        self.assertIn("Connection manager: rdmacm", output)

    def test_rc_verbs(self):
        self.perftest(FULL_TESTS if FULL else UCP_TESTS, RC)

    def test_ud_verbs(self):
        self.perftest(FULL_TESTS if FULL else UD_TESTS, UD)

    def test_operations_of_the_transports_themselves(self):
        self.perftest(UCT_TESTS, UD, "-d", "verbena0:1", "-x", "ud_verbs")
        self.perftest(UCT_RC_TESTS, RC, "-d", "verbena0:1", "-x", "rc_verbs")

    # -q: each side checks what it gets.
    def io_demo(self, environment, *options):
        port = free_port()
        environment = {**environment, "UCX_SOCKADDR_TLS_PRIORITY": "rdmacm"}
        common = ["io_demo", "-q", "-d", "64:65536", "-p", port, *options]
        server = self.start(*common, environment=environment)
        self.assertTrue(server.wait_for("started listener"), server.describe())
        for _ in range(2):  # A client that starts again finds the same server.
            status, output = self.daemon.run(*common, "-i", 2000 if FULL else 60, "-w", 4, "-o",
                                             "read,write", ADDRESS, environment=environment,
                                             limit=60)
            self.assertEqual(status, 0, output + server.describe())
            self.assertIn("Client exit with status 'OK'", output)
        self.assertTrue(server.running(), server.describe())
        # A server that starts again finds its port free.
        server.close()
        server = self.start(*common, environment=environment)
        self.assertTrue(server.wait_for("started listener"), server.describe())
        status, output = self.daemon.run(*common, "-i", 20, ADDRESS, environment=environment,
                                         limit=60)
        self.assertEqual(status, 0, output + server.describe())
        server.close()

    def test_io_demo_by_tags_connects_by_rdma_cm(self):
        self.io_demo(RC)
        if FULL:
            self.io_demo(UD)

    def test_io_demo_by_active_messages_connects_by_rdma_cm(self):
        self.io_demo(UD, "-A")
        if FULL:
            self.io_demo(RC, "-A")

    def example(self, name):
        program = os.path.join(self.folder.name, name)
        if not os.path.exists(program):
            subprocess.run(["gcc", "-O1", "-w", "-o", program, f"{EXAMPLES}/{name}.c", "-lucp",
                            "-luct", "-lucs"], check=True, timeout=60)
        return program

    def test_examples_of_ucx(self):
        for name, server_options, client_options in (
                ("ucp_hello_world", (), ("-n",)),
                ("uct_hello_world", ("-d", "verbena0:1", "-t", "ud_verbs"), ("-n",)),
                ("uct_hello_world", ("-d", "verbena0:1", "-t", "rc_verbs"), ("-n",)),
                ("ucp_client_server", ("-c", "am"), ("-a",)),
                ("ucp_client_server", ("-c", "stream"), ("-a",))):
            with self.subTest(name=name, options=server_options):
                program, port = self.example(name), free_port()
                environment = {**RC, "UCX_SOCKADDR_TLS_PRIORITY": "rdmacm"}
                server = self.start(program, *server_options, "-p", port, environment=environment)
                # Says nothing when it listens, by TCP or by rdma_cm.
                end = time.monotonic() + 60
                while not listening(port) and not any(
                        item["state"] == "listen" and item["source"].endswith(f":{port}")
                        for item in self.daemon.json("list", "cm_id")):
                    self.assertTrue(server.running() and time.monotonic() < end, server.describe())
                    time.sleep(0.05)
                status, output = self.daemon.run(program, *server_options, "-p", port,
                                                 *client_options, ADDRESS,
                                                 environment=environment, limit=60)
                self.assertEqual(status, 0, output + server.describe())
                if name == "ucp_client_server":
                    self.assertTrue(server.running(), server.describe())  # It serves for ever.
                else:
                    self.assertEqual(server.wait(), 0, server.describe())
                server.close()


if __name__ == "__main__":
    verbena_testing.main()
