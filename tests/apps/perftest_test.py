# SPDX-License-Identifier: Apache-2.0
"""Stock perftest over RC, UC, XRC and UD: every tool with every option that it takes.

VERBENA_TEST_DURATION: seconds for -D (1; the accepted version uses 5). perftest refuses -e with -D.
"""

import os
import re
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import ADDRESS, FULL, AppTestCase, free_port

DURATION = int(os.environ.get("VERBENA_TEST_DURATION", "5" if FULL else "1"))
MTUS = (256, 512, 1024, 2048, 4096) if FULL else (256, 1024, 4096)
BANDWIDTH_LINE = re.compile(r"^ *(\d+)\s+(\d+)\s+([0-9.]+|inf)\s+([0-9.]+|inf)\s+([0-9.]+|inf)", re.M)
LATENCY_LINE = re.compile(r"^ *(\d+)\s+(\d+)\s+([0-9.]+|inf)", re.M)  # inf: it did not find the clock


class Perftest(AppTestCase):

    def run_tool(self, tool, *options):
        with self.subTest(tool=tool, options=options):
            port = free_port()
            common = [tool, "-F", "-x", 1, "-p", port, *options]
            server, client = self.pair([*common, "-d", "verbena0"],
                                       [*common, "-d", "verbena1", ADDRESS], port, limit=90)
            pattern = BANDWIDTH_LINE if tool.endswith("_bw") else LATENCY_LINE
            lines = pattern.findall(client)
            self.assertTrue(lines, f"no result line\n{client}\n{server}")
            for text in (client, server):
                self.assertNotRegex(text, r"(?i)Completion with error|syndrom|Failed status")
            return lines

    def all_sizes(self, tool):
        lines = self.run_tool(tool, "-a", "-n", 100 if FULL else 8)
        if lines:  # Not in a failed subtest.
            self.assertEqual([int(line[0]) for line in lines], [2 << i for i in range(23)])

    def mtus(self, tool, *options):
        for mtu in MTUS:
            self.run_tool(tool, "-m", mtu, *options)

    def bandwidth(self, tool, events, sizes=True):
        if sizes:
            self.all_sizes(tool)
        few = ("-n", 300)
        self.run_tool(tool, "-b", *few)
        self.run_tool(tool, "-q", 16, *few)
        self.run_tool(tool, "-q", 16, "-b", *few)
        if events:
            self.run_tool(tool, "-e", *few)
            self.run_tool(tool, "-e", "-b", *few)
        self.run_tool(tool, "-D", DURATION)
        self.mtus(tool, "-n", 50)

    def latency(self, tool, events, sizes=True):
        if sizes:
            self.all_sizes(tool)
        if events:
            self.run_tool(tool, "-e", "-n", 300)
        self.run_tool(tool, "-D", DURATION)
        self.mtus(tool, "-n", 50, *(("-s", 5000) if sizes else ()))

    def test_ib_send_bw(self):
        self.bandwidth("ib_send_bw", events=True)

    def test_ib_read_bw(self):
        self.bandwidth("ib_read_bw", events=True)

    def test_ib_write_bw(self):
        self.bandwidth("ib_write_bw", events=False)

    def test_ib_atomic_bw(self):
        self.bandwidth("ib_atomic_bw", events=True, sizes=False)
        self.run_tool("ib_atomic_bw", "-A", "CMP_AND_SWAP", "-n", 300)

    def test_unreliable_connections(self):
        for tool in ("ib_send_bw", "ib_write_bw"):
            for options in ((), ("-b",), ("-q", 4), ("-m", 256, "-s", 5000)):
                self.run_tool(tool, "-c", "UC", "-n", 300, *options)
        self.run_tool("ib_send_bw", "-c", "UC", "-e", "-n", 300)
        self.run_tool("ib_send_lat", "-c", "UC", "-n", 300)
        self.run_tool("ib_write_lat", "-c", "UC", "-n", 300)

    def test_extended_reliable_connections(self):
        for tool in ("ib_send_bw", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"):
            self.run_tool(tool, "-c", "XRC", "-n", 300)
        self.run_tool("ib_send_bw", "-c", "XRC", "-q", 4, "-b", "-n", 300)
        for tool in ("ib_send_lat", "ib_write_lat", "ib_read_lat", "ib_atomic_lat"):
            self.run_tool(tool, "-c", "XRC", "-n", 300)

    def test_shared_receive_queue(self):
        for options in (("-q", 4), ("-q", 4, "-e"), ("-r", 16), ("-q", 2, "-b")):
            self.run_tool("ib_send_bw", "--use-srq", "-n", 300, *options)
        self.run_tool("ib_send_bw", "--use-srq", "-c", "UD", "-n", 300)
        self.run_tool("ib_send_lat", "--use-srq", "-n", 300)
        self.run_tool("ib_send_bw", "--use-srq", "-c", "XRC", "-q", 4, "-n", 300)
        # One QP: perftest posts no more receives than one QP has messages, and UC loses what finds none.
        self.run_tool("ib_send_bw", "--use-srq", "-c", "UC", "-n", 300)

    # perftest refuses --odp with ib_atomic_bw, and over UC and UD, on any device.
    def test_on_demand_paging(self):
        for tool in ("ib_send_bw", "ib_write_bw", "ib_read_bw", "ib_send_lat"):
            self.run_tool(tool, "--odp", "-n", 300)
        self.run_tool("ib_send_bw", "--odp", "--use-srq", "-n", 300)
        self.run_tool("ib_send_bw", "--odp", "-c", "XRC", "-n", 300)
        for tool in ("ib_write_lat", "ib_read_lat"):
            self.run_tool(tool, "--odp", "-n", 300)

    def test_ib_send_lat(self):
        self.latency("ib_send_lat", events=True)

    def test_ib_read_lat(self):
        self.latency("ib_read_lat", events=True)

    def test_ib_write_lat(self):
        self.latency("ib_write_lat", events=False)

    def test_ib_atomic_lat(self):
        self.latency("ib_atomic_lat", events=True, sizes=False)

    def test_datagrams(self):
        for tool in ("ib_send_bw", "ib_send_lat"):
            for options in ((), ("-e",), ("-m", 256, "-s", 256), ("-D", DURATION)):
                count = () if "-D" in options else ("-n", 300)
                self.run_tool(tool, "-c", "UD", *options, *count)
        self.run_tool("ib_send_bw", "-c", "UD", "-q", 16, "-n", 100)

    # Its groups are IPv6 ones, and it wants GIDs of the same kind.
    def test_multicast(self):
        for tool in ("ib_send_bw", "ib_send_lat"):
            for options in (("-x", 0), ("-x", 0, "-e"), ("-x", 0, "-m", 1024, "-s", 1024)):
                self.run_tool(tool, "-c", "UD", "-g", "-n", 300, *options)

    # There is no side channel: the server ends when it has received as many frames.
    def test_raw_ethernet(self):
        macs = {nic["device"]: nic["mac"] for nic in self.daemon.json("status")["nics"]}
        server_mac, client_mac = macs["verbena0"], macs["verbena1"]
        ip = ("-J", "10.0.0.1", "-j", "10.0.0.2")
        udp = ("-K", 2000, "-k", 1000)
        for tool in ("raw_ethernet_bw", "raw_ethernet_lat"):
            for options in ((), ip, (*ip, *udp), (*ip, *udp, "--tcp")):
                with self.subTest(tool=tool, options=options):
                    common = [tool, "-F", "-n", 100, "-s", 256, *options]
                    server = self.daemon.program(*common, "-d", "verbena0", "--server", "-E",
                                                 client_mac, "-B", server_mac, limit=60)
                    # Its rule is made last.
                    end = time.monotonic() + 20
                    while not self.daemon.json("list", "flow") and time.monotonic() < end:
                        time.sleep(0.05)
                    client = self.daemon.program(*common, "-d", "verbena1", "--client", "-E",
                                                 server_mac, "-B", client_mac, limit=60)
                    texts = self.finish(server, client)
                    pattern = BANDWIDTH_LINE if tool.endswith("_bw") else LATENCY_LINE
                    for text in texts:
                        self.assertTrue(pattern.findall(text), text)

    def test_the_gid_is_found_without_being_named(self):
        port = free_port()
        self.pair(["ib_write_bw", "-F", "-n", 100, "-p", port],
                  ["ib_write_bw", "-F", "-n", 100, "-p", port, ADDRESS], port)


if __name__ == "__main__":
    verbena_testing.main()
