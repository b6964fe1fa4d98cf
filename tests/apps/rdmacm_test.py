# SPDX-License-Identifier: Apache-2.0
"""Stock programs that connect by librdmacm."""

import json
import os
import signal
import socket
import struct
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import AppTestCase

# Of the two NICs; programs on one host reach each over the other.
FIRST, SECOND = "127.88.0.1", "127.88.0.2"


class RdmaCm(AppTestCase):

    last_port = 7300

    def new_port(self):
        # The connection manager's ports are not those of TCP: nobody else has them.
        RdmaCm.last_port += 1
        return RdmaCm.last_port

    def listeners(self):
        listed = self.daemon.json("list", "cm_id")
        items = listed["items"] if isinstance(listed, dict) else listed
        return [item for item in items if item["state"] == "listen"]

    def start(self, server, client, limit=40.0):
        """Starts both; the client when the server listens."""
        before = len(self.listeners())
        first = self.daemon.program(*server, limit=limit)
        end = time.monotonic() + 20
        while len(self.listeners()) <= before:
            if not first.running() or time.monotonic() > end:
                first.kill()
                first.wait()
                text = first.describe()
                first.close()
                self.fail(f"the server does not listen\n{text}\n{self.daemon.dump()}")
            time.sleep(0.02)
        return first, self.daemon.program(*client, limit=limit)

    def programs(self, server, client, limit=40.0):
        return self.finish(*self.start(server, client, limit))

    def assert_nothing_left(self):
        end = time.monotonic() + 10
        while True:
            listed = self.daemon.json("list", "cm_id")
            items = listed["items"] if isinstance(listed, dict) else listed
            if not items:
                return
            self.assertLess(time.monotonic(), end, f"ids are left: {items}")
            time.sleep(0.05)

    def test_rping_on_one_address(self):
        port = self.new_port()
        server, client = self.programs(
            ["rping", "-s", "-a", FIRST, "-p", port, "-v", "-C", 20],
            ["rping", "-c", "-a", FIRST, "-p", port, "-v", "-C", 20])
        self.assertEqual(client.count("ping data: rdma-ping-"), 20, client)
        self.assertIn("rdma-ping-19", client)
        self.assert_nothing_left()

    def test_rping_from_nic_to_nic_of_any_size(self):
        for size in (23, 4096, 65535):
            port = self.new_port()
            _, client = self.programs(
                ["rping", "-s", "-a", SECOND, "-p", port, "-C", 5, "-S", size, "-V"],
                ["rping", "-c", "-a", SECOND, "-I", FIRST, "-p", port, "-C", 5, "-S", size, "-V"])
            self.assertNotIn("mismatch", client)

    def test_rping_on_the_loopback_address(self):
        port = self.new_port()
        self.programs(["rping", "-s", "-p", port, "-C", 3],
                      ["rping", "-c", "-a", "127.0.0.1", "-p", port, "-C", 3])

    def test_a_persistent_rping_server_serves_one_client_after_the_other(self):
        port = self.new_port()
        before = len(self.listeners())
        server = self.daemon.program("rping", "-s", "-P", "-a", FIRST, "-p", port, limit=60)
        end = time.monotonic() + 20
        while len(self.listeners()) <= before and time.monotonic() < end:
            time.sleep(0.02)
        for _ in range(4):
            status, output = self.daemon.run("rping", "-c", "-a", FIRST, "-p", port, "-C", 4,
                                             limit=30)
            self.assertEqual(status, 0, output)
        self.assertTrue(server.running(), server.describe())
        server.close()
        self.assert_nothing_left()

    def test_nobody_listens(self):
        status, output = self.daemon.run("rping", "-c", "-a", FIRST, "-p", self.new_port(), "-C",
                                         1, limit=30)
        self.assertNotIn(status, (0, None), output)
        self.assertIn("RDMA_CM_EVENT_REJECTED", output)

    def test_an_address_of_nobody(self):
        status, output = self.daemon.run("rping", "-c", "-a", "192.0.2.250", "-p",
                                         self.new_port(), "-C", 1, limit=30)
        self.assertNotIn(status, (0, None), output)

    def test_ucmatose_with_many_connections(self):
        port = self.new_port()
        self.programs(["ucmatose", "-p", port, "-c", 20, "-C", 10],
                      ["ucmatose", "-s", FIRST, "-p", port, "-c", 20, "-C", 10])
        self.assert_nothing_left()

    def test_ucmatose_migrates_its_ids(self):
        port = self.new_port()
        self.programs(["ucmatose", "-p", port, "-c", 3, "-C", 5, "-m"],
                      ["ucmatose", "-s", SECOND, "-p", port, "-c", 3, "-C", 5, "-m"])
        self.assert_nothing_left()

    def test_rdma_server_and_client(self):
        port = self.new_port()
        server, client = self.programs(["rdma_server", "-p", port],
                                       ["rdma_client", "-s", FIRST, "-p", port])
        self.assertIn("rdma_server: end 0", server)
        self.assertIn("rdma_client: end 0", client)

    def test_programs_that_make_their_qps_themselves(self):
        port = self.new_port()
        _, client = self.programs(
            ["rping", "-s", "-q", "-a", FIRST, "-p", port, "-C", 5, "-V"],
            ["rping", "-c", "-q", "-a", FIRST, "-p", port, "-C", 5, "-v", "-V"])
        self.assertIn("rdma-ping-4", client)

    def test_rdma_xserver_and_xclient_over_rc_and_xrc(self):
        for kind in "rx":
            with self.subTest(kind=kind):
                port = self.new_port()
                server, client = self.programs(
                    ["rdma_xserver", "-p", port, "-c", kind],
                    ["rdma_xclient", "-s", FIRST, "-p", port, "-c", kind])
                self.assertIn("rdma_xserver: end 0", server)
                self.assertIn("rdma_xclient: end 0", client)

    def test_udaddy(self):
        server, client = self.programs(["udaddy"], ["udaddy", "-s", FIRST])
        for output in (server, client):
            self.assertIn("return status 0", output)
        self.assert_nothing_left()

    def test_cmtime(self):
        server, client = self.start(["cmtime"], ["cmtime", "-s", SECOND, "-c", 20])
        self.assertEqual(client.wait(), 0, client.describe())
        self.assertRegex(client.output, r"(?m)^connect +:")
        self.assertTrue(server.running(), server.describe())  # it serves for ever
        client.close()
        server.close()
        self.assert_nothing_left()

    def test_perftest_connects_by_rdmacm(self):
        port = self.new_port() + 11000
        self.programs(["ib_send_lat", "-R", "-d", "verbena0", "-F", "-p", port, "-n", 50],
                      ["ib_send_lat", "-R", "-d", "verbena0", "-F", "-p", port, "-n", 50, FIRST])

    def test_perftest_over_rdmacm_with_every_kind_of_qp(self):
        for options in (("ib_send_bw", "-q", 4), ("ib_read_lat",), ("ib_atomic_bw",),
                        ("ib_send_lat", "-e"), ("ib_send_lat", "-c", "UD"),
                        ("ib_send_bw", "-c", "UD")):
            with self.subTest(options=options):
                port = self.new_port() + 11000
                common = [*options, "-R", "-F", "-p", port, "-n", 100]
                outputs = self.programs([*common, "-d", "verbena0"],
                                        [*common, "-d", "verbena0", FIRST])
                self.assertNotRegex(outputs[1], "(?i)completion with error|failed")

    def test_type_of_service_reaches_the_packets(self):
        for options in (("ib_write_bw",), ("ib_send_bw", "-c", "UD")):
            with self.subTest(options=options), tempfile.TemporaryDirectory() as folder:
                port = self.new_port() + 11000
                path = os.path.join(folder, "tos.pcapng")
                capture = verbena_testing.Program(
                    [self.daemon.verbena, "capture", path], 40,
                    environment=self.daemon.environment)
                self.assertTrue(capture.wait_for("capturing"), capture.describe())
                common = [*options, "-R", "--tos", 32, "-F", "-d", "verbena0", "-p", port, "-n", 100]
                self.programs(common, [*common, FIRST])
                capture.signal(signal.SIGINT)
                self.assertEqual(capture.wait(), 0, capture.describe())
                capture.close()
                status, output = self.daemon.command("decode", path)
                self.assertEqual(status, 0, output)
                data = [line for line in output.splitlines()
                        if ("RDMA_WRITE" in line or "UD_SEND" in line) and "qp=0x000001" not in line]
                self.assertTrue(data, output)
                for line in data:
                    self.assertIn(" dscp=8 ", line)

    def test_a_killed_client_is_noticed(self):
        port = self.new_port()
        server, client = self.start(["rping", "-s", "-a", FIRST, "-p", port, "-v"],
                                    ["rping", "-c", "-a", FIRST, "-p", port, "-v"])
        self.assertTrue(client.wait_for("rdma-ping-3"), client.describe())
        client.kill()
        client.wait()
        client.close()
        self.assertIsNotNone(server.wait(), server.describe())
        server.close()
        self.assert_nothing_left()

    def announce(self, device, event):
        """What a fault of the device tells the connection manager."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
            control.connect(self.daemon.json("status")["socket"])
            control.send(struct.pack("<II", 0x4e425256, 2))
            control.send(json.dumps({"op": "cm_announce", "dev": device, "event": event}).encode())
            reply = control.recv(65536)
            self.assertEqual(reply[:1], b"L", reply)
            self.assertNotIn(b"error", reply)

    def test_programs_on_a_nic_that_is_removed_end(self):
        port = self.new_port()
        server, client = self.start(
            ["rping", "-s", "-a", SECOND, "-p", port, "-v"],
            ["rping", "-c", "-a", SECOND, "-I", FIRST, "-p", port, "-v"])
        try:
            self.assertTrue(client.wait_for("rdma-ping-3"), client.describe())
            self.announce("verbena1", "device_removal")
            self.assertTrue(server.wait_for("cma detected device removal"), server.describe())
            # Not told of another's NIC, but disconnected.
            self.assertTrue(client.wait_for("DISCONNECT EVENT"), client.describe())
            self.assertNotIn("device removal", client.output)
            self.assertIsNotNone(client.wait(), client.describe())
            self.assertIsNotNone(server.wait(), server.describe())
            self.assert_nothing_left()
            status, output = self.daemon.run("rping", "-s", "-a", SECOND, "-p", port, limit=20)
            self.assertNotIn(status, (0, None), output)
            self.assertIn("No such device", output)
        finally:
            self.announce("verbena1", "device_return")
        client.close()
        server.close()
        self.programs(["rping", "-s", "-a", SECOND, "-p", port, "-C", 3],
                      ["rping", "-c", "-a", SECOND, "-p", port, "-C", 3])

    def test_a_changed_address_is_told(self):
        before = len(self.listeners())
        server = self.daemon.program("rping", "-s", "-P", "-a", FIRST, "-p", self.new_port(),
                                     limit=40)
        end = time.monotonic() + 20
        while len(self.listeners()) <= before and time.monotonic() < end:
            time.sleep(0.02)
        self.announce("verbena0", "addr_change")
        self.assertTrue(server.wait_for("RDMA_CM_EVENT_ADDR_CHANGE"), server.describe())
        server.close()
        self.assert_nothing_left()

    def test_connections_are_listed_by_rdma(self):
        port = self.new_port()
        before = len(self.listeners())
        server = self.daemon.program("rping", "-s", "-a", FIRST, "-p", port, limit=30)
        end = time.monotonic() + 20
        while len(self.listeners()) <= before and time.monotonic() < end:
            time.sleep(0.02)
        status, output = self.daemon.run("rdma", "resource", "show", "cm_id")
        self.assertEqual(status, 0, output)
        self.assertRegex(output, rf"state LISTEN.*ps TCP.*comm rping.*src-addr {FIRST}:{port}")
        server.close()


if __name__ == "__main__":
    verbena_testing.main()
