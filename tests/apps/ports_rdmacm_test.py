# SPDX-License-Identifier: Apache-2.0
"""Connection management and multicast between two daemons on Linux netdevs.

Run as root: bazel test //tests/apps:ports_rdmacm_test
"""

import os
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import ports_test
import verbena_testing
from namespaces import Sniffer

A4, B4 = "192.168.77.1", "192.168.77.2"
A6, B6 = "fd00:77::1", "fd00:77::2"


@unittest.skipIf(os.geteuid() != 0, "needs root for network namespaces")
class RdmaCmOverPorts(ports_test.PortTestCase):

    @classmethod
    def set_up(cls):
        cls.da = cls.start(cls.a, "--port", "verbena0=af_packet:na", "--address",
                           f"verbena0={A4}/24", "--address", f"verbena0={A6}/64")
        cls.db = cls.start(cls.b, "--port", "verbena0=af_packet:nb", "--address",
                           f"verbena0={B4}/24", "--address", f"verbena0={B6}/64")
        cls.daemon = cls.da

    def listening(self, daemon):
        return [item for item in daemon.json("list", "cm_id") if item["state"] == "listen"]

    def pair_cm(self, server, client, limit=50.0):
        """`server` over daemon b, then `client` over daemon a; their outputs."""
        first = self.db.program(*server, limit=limit)
        end = time.monotonic() + 20
        while not self.listening(self.db) and first.running() and time.monotonic() < end:
            time.sleep(0.05)
        second = self.da.program(*client, limit=limit)
        statuses = [second.wait(), first.wait()]
        texts = [second.describe(), first.describe()]
        first.close()
        second.close()
        if statuses != [0, 0]:
            self.fail("\n".join(texts) + "\n" + self.dumps())
        return texts

    def test_rping_ucmatose_and_udaddy(self):
        # A netdev's sniffer sees what comes, not what the daemon there sends.
        with Sniffer(self.b, "nb", self.folder, 400) as there, \
                Sniffer(self.a, "na", self.folder, 400) as here:
            for address in (B4, B6):
                with self.subTest(address=address):
                    self.pair_cm(["rping", "-s", "-a", address, "-C", 10, "-V"],
                                 ["rping", "-c", "-a", address, "-C", 10, "-V"])
                    self.pair_cm(["ucmatose", "-b", address, "-c", 4],
                                 ["ucmatose", "-s", address, "-c", 4])
            self.pair_cm(["udaddy", "-b", B4], ["udaddy", "-s", B4])
        self.assertEqual(there.frames(ports_test.UNREACHABLE), 0)
        self.assertEqual(here.frames(ports_test.UNREACHABLE), 0)
        for sniffer, attribute, least in ((there, "0x0010", 10), (here, "0x0013", 10),  # REQ, REP
                                          (there, "0x0014", 10),                        # RTU
                                          (there, "0x0017", 1), (here, "0x0018", 1)):   # SIDR
            frames = sniffer.frames(f"infiniband.mad.attributeid == {attribute}")
            self.assertGreaterEqual(frames, least, attribute)

    def test_perftest_by_rdma_cm(self):
        for program in ("ib_send_lat", "ib_write_bw"):
            self.pair_cm([program, "-R", "-F", "-n", 100, "-s", 64],
                         [program, "-R", "-F", "-n", 100, "-s", 64, B4])

    def test_a_closed_port_and_an_address_of_nobody(self):
        status, output = self.da.run("rping", "-c", "-a", B4, "-p", 7999, "-C", 1, limit=20)
        self.assertNotIn(status, (0, None), output)
        self.assertIn("RDMA_CM_EVENT_REJECTED", output)
        # rping resolves for two seconds; nobody answers ARP.
        status, output = self.da.run("rping", "-c", "-a", "192.168.77.99", "-C", 1, limit=20)
        self.assertNotIn(status, (0, None), output)
        self.assertIn("RDMA_CM_EVENT_ADDR_ERROR", output)

    def test_a_lost_request_is_sent_again(self):
        status, output = self.db.command("fault", "add", "drop dir=rx mad=req nth=1")
        self.assertEqual(status, 0, output)
        try:
            begin = time.monotonic()
            self.pair_cm(["rping", "-s", "-a", B4, "-C", 2], ["rping", "-c", "-a", B4, "-C", 2])
            self.assertGreater(time.monotonic() - begin, 6.1)
            self.assertEqual(self.db.json("fault", "list")[0]["hits"], 1)
        finally:
            self.db.command("fault", "clear")

    def test_multicast_reaches_both_hosts_and_is_reported(self):
        for group, here, there, reports in (
                ("239.1.2.3", A4, B4, "igmp.type == 0x22 && igmp.maddr == 239.1.2.3"),
                ("ff15::4791", A6, B6, "icmpv6.type == 143")):
            with self.subTest(group=group), Sniffer(self.b, "nb", self.folder) as sniffer:
                receivers = []
                for daemon, address in ((self.da, here), (self.db, there), (self.db, there)):
                    receiver = daemon.program("mckey", "-m", group, "-b", address, limit=40)
                    self.assertTrue(receiver.wait_for("joined dgid"), receiver.describe())
                    receivers.append(receiver)
                self.finish(*receivers, self.da.program("mckey", "-s", "-m", group, "-b", here,
                                                        limit=40))
            self.assertEqual(sniffer.frames("infiniband.bth.destqp == 0xffffff"), 10)
            self.assertEqual(sniffer.frames(reports), 2, group)  # joins, leaves
        self.assertEqual(self.db.drops()["spoofed"], 0)

    def test_groups_that_nobody_has_joined_are_not_let_in(self):
        before = self.db.wire()["rcv_roce"]
        self.finish(self.da.program("mckey", "-s", "-m", "239.5.5.5", "-b", A4, limit=30))
        self.assertEqual(self.db.wire()["rcv_roce"], before)


if __name__ == "__main__":
    verbena_testing.main()
