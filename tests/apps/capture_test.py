# SPDX-License-Identifier: Apache-2.0
"""Captures of stock programs: judged by tshark, by the device counters, by independent ICRC code
and by what the application wrote."""

import os
import re
import signal
import shutil
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import pcapng
import verbena_testing
from verbena_testing import ADDRESS, AppTestCase, free_port, run

NO_PROTOCOLS = ["--disable-protocol", "rpcordma", "--disable-protocol", "infiniband.eoib"]
REQUESTS = (*range(0x0d), 0x13, 0x14, 0x16, 0x17)


class Capture(AppTestCase):

    def captured(self, work, *options):
        """Runs work() during a capture: (its result, path, counter differences per device)."""
        path = os.path.join(self.daemon.folder, f"capture-{time.monotonic_ns()}.pcapng")
        recorder = verbena_testing.Program(
            [self.daemon.verbena, "capture", path, *options], 90,
            environment=self.daemon.environment)
        end = time.monotonic() + 10
        while not (os.path.exists(path) and os.path.getsize(path) > 0):
            if not recorder.running() or time.monotonic() > end:
                break  # A file that stays empty until packets come is fine, too.
            time.sleep(0.02)
        time.sleep(0.2)
        before = self.daemon.counters()
        result = work()
        after = self.daemon.counters()
        time.sleep(0.2)
        recorder.signal(signal.SIGINT)
        self.assertEqual(recorder.wait(), 0, recorder.describe())
        recorder.close()
        difference = {device: {name: after[device][name] - before[device].get(name, 0)
                               for name in after[device]} for device in after}
        return result, path, difference

    def judge(self, path, difference):
        """Everything that holds for any capture without faults; its packets."""
        packets = pcapng.read(path)
        self.assertTrue(packets)
        self.assertEqual({packet.interface for packet in packets} - set(difference), set())
        for device, counters in difference.items():
            mine = [packet for packet in packets if packet.interface == device]
            out = [packet for packet in mine if packet.outbound]
            into = [packet for packet in mine if packet.inbound]
            self.assertEqual(len(out) + len(into), len(mine), "a packet without direction")
            self.assertEqual(counters["port_xmit_packets"], len(out), device)
            self.assertEqual(counters["port_rcv_packets"], len(into), device)
            self.assertEqual(counters["port_xmit_data"], sum(p.ip_bytes for p in out) // 4, device)
            self.assertEqual(counters["port_rcv_data"], sum(p.ip_bytes for p in into) // 4, device)
        wrong = [i for i, packet in enumerate(packets, 1)
                 if packet.icrc != packet.expected_icrc()]
        self.assertEqual(wrong, [], "frames with a wrong ICRC")
        self.judge_by_tshark(path, packets)
        status, output = self.daemon.command("decode", path, "--check")
        self.assertEqual(status, 0, output[-3000:])
        return packets

    def judge_by_tshark(self, path, packets):
        tshark = shutil.which("tshark")
        if tshark is None:
            return
        environment = dict(verbena_testing.clean_environment(), HOME=self.daemon.folder)
        status, output = run(
            [tshark, "-r", path, *NO_PROTOCOLS, "-T", "fields", "-E", "separator=,",
             "-e", "frame.number", "-e", "infiniband.bth.opcode", "-e", "infiniband.bth.psn",
             "-e", "infiniband.bth.destqp", "-e", "_ws.malformed", "-e", "_ws.expert.severity"],
            120, environment=environment)
        self.assertEqual(status, 0, output[-2000:])
        rows = [line.split(",") for line in output.splitlines() if re.match(r"\d+,", line)]
        self.assertEqual(len(rows), len(packets))
        for row, packet in zip(rows, packets):
            self.assertEqual(int(row[1], 0), packet.opcode, row)
            self.assertEqual(int(row[2], 0), packet.psn, row)
            self.assertEqual(int(row[3], 0), packet.dest_qp, row)
            self.assertEqual(row[4], "", f"tshark finds frame {row[0]} malformed")

    def check_psns(self, packets, first_psns):
        """Requests of each QP (seen leaving) use consecutive PSNs. first_psns: {dest QP: PSN}."""
        expected = dict(first_psns)
        seen = dict.fromkeys(first_psns, 0)
        for packet in packets:
            if packet.outbound and packet.opcode in REQUESTS:
                self.assertEqual(packet.psn, expected[packet.dest_qp])
                expected[packet.dest_qp] = packet.psn + 1 & 0xffffff
                seen[packet.dest_qp] += 1
        return seen

    def pingpong(self, gid, nics, size, mtu, count):
        port = free_port()
        options = ["-g", gid, "-p", port, "-s", size, "-m", mtu, "-n", count]
        outputs = self.pair(["ibv_rc_pingpong", "-d", nics[0], *options],
                            ["ibv_rc_pingpong", "-d", nics[1], *options, ADDRESS], port)
        ends = []
        for output in outputs:
            local = re.search(r"local address:.*QPN 0x([0-9a-f]+), PSN 0x([0-9a-f]+)", output)
            self.assertTrue(local, output)
            ends.append((int(local[1], 16), int(local[2], 16)))
        return ends

    def judge_pingpong(self, gid, nics, size, mtu, count):
        (server, client), path, difference = self.captured(
            lambda: self.pingpong(gid, nics, size, mtu, count))
        packets = self.judge(path, difference)
        per_message = max(1, -(-size // mtu))
        seen = self.check_psns(packets, {client[0]: server[1], server[0]: client[1]})
        self.assertEqual(set(seen.values()), {count * per_message})
        sent = {client[0]: b"", server[0]: b""}
        for packet in packets:
            if packet.outbound and packet.opcode in REQUESTS:
                self.assertEqual(packet.ipv6, gid == 0)
                self.assertIn(packet.opcode, (0, 1, 2, 4))
                sent[packet.dest_qp] += packet.payload()
        for data in sent.values():  # ibv_rc_pingpong without -c fills its buffer with 0x7b.
            self.assertEqual(len(data), count * size)
            self.assertEqual(data.count(0x7b), len(data))

    def test_pingpong_between_two_nics(self):
        self.judge_pingpong(1, ("verbena0", "verbena1"), 5000, 1024, 40)

    def test_pingpong_over_ipv6(self):
        self.judge_pingpong(0, ("verbena0", "verbena1"), 777, 256, 40)

    def test_pingpong_on_one_nic(self):
        self.judge_pingpong(1, ("verbena0", "verbena0"), 4096, 4096, 40)

    def test_write_bandwidth(self):
        def work():
            port = free_port()
            common = ["ib_write_bw", "-F", "-x", 1, "-p", port, "-n", 200, "-s", 20001]
            return self.pair([*common, "-d", "verbena0"],
                             [*common, "-d", "verbena1", ADDRESS], port)

        (server, client), path, difference = self.captured(work)
        packets = self.judge(path, difference)
        local = re.search(r"local address:.*QPN (?:0x)?([0-9a-f]+) PSN (?:0x)?([0-9a-f]+)"
                          r" RKey 0x([0-9a-f]+) VAddr 0x([0-9a-f]+)", client)
        remote = re.search(r"local address:.*QPN (?:0x)?([0-9a-f]+) PSN (?:0x)?([0-9a-f]+)"
                           r" RKey 0x([0-9a-f]+) VAddr 0x([0-9a-f]+)", server)
        self.assertTrue(local and remote, client + server)
        server_qp = int(remote[1], 16)
        requests = [p for p in packets if p.outbound and p.opcode in REQUESTS]
        self.assertEqual({p.dest_qp for p in requests}, {server_qp})
        self.check_psns(packets, {server_qp: int(local[2], 16)})
        self.assertEqual(len(requests), 200 * 5)  # 20001 bytes are 5 packets of MTU 4096.
        self.assertEqual(sum(len(p.payload()) for p in requests), 200 * 20001)
        firsts = [p for p in requests if p.opcode in (0x06, 0x0a)]
        self.assertEqual(len(firsts), 200)
        base = int(remote[4], 16)
        for packet in firsts:
            reth = packet.after_bth[:16]
            self.assertEqual(reth[8:12].hex(), remote[3].zfill(8))
            self.assertEqual(int.from_bytes(reth[12:16], "big"), 20001)
            address = int.from_bytes(reth[:8], "big")
            self.assertTrue(base <= address < base + (1 << 20), hex(address))

    def test_read_and_atomic_programs(self):
        def work():
            for tool in ("ib_read_bw", "ib_atomic_bw"):
                port = free_port()
                common = [tool, "-F", "-x", 1, "-p", port, "-n", 50]
                self.pair([*common, "-d", "verbena0"],
                          [*common, "-d", "verbena1", ADDRESS], port)

        _, path, difference = self.captured(work)
        packets = self.judge(path, difference)
        for opcode in (0x0c, 0x0d, 0x0f, 0x14, 0x12):
            self.assertTrue(any(packet.opcode == opcode for packet in packets), hex(opcode))

    def test_limits_and_choice_of_device(self):
        path = os.path.join(self.daemon.folder, "limited.pcapng")
        recorder = verbena_testing.Program(
            [self.daemon.verbena, "capture", path, "--dev", "verbena1", "--count", "10"], 60,
            environment=self.daemon.environment)
        time.sleep(1)
        self.pingpong(1, ("verbena0", "verbena1"), 64, 1024, 40)
        self.assertEqual(recorder.wait(), 0, recorder.describe())
        recorder.close()
        packets = pcapng.read(path)
        self.assertEqual(len(packets), 10)
        self.assertEqual({packet.interface for packet in packets}, {"verbena1"})
        path = os.path.join(self.daemon.folder, "short.pcapng")
        start = time.monotonic()
        status, output = self.daemon.command("capture", path, "--for", "1")
        self.assertEqual(status, 0, output)
        self.assertGreater(time.monotonic() - start, 0.9)
        self.assertEqual(pcapng.read(path), [])

    def test_before_and_after_the_fault_stage(self):
        """A dropped packet is in the capture before the stage and missing after it."""
        status, output = self.daemon.command("fault", "add", "drop opcode=send nth=5 count=1")
        self.assertEqual(status, 0, output)
        try:
            def work():
                return self.pingpong(1, ("verbena0", "verbena1"), 64, 1024, 30)

            sends = {}
            for stage in ("before", "after"):
                _, path, _ = self.captured(work, "--stage", stage)
                sends[stage] = sum(p.outbound and p.opcode == 4 for p in pcapng.read(path))
                if stage == "before":  # Once more for the second capture.
                    self.daemon.command("fault", "clear")
                    self.daemon.command("fault", "add", "drop opcode=send nth=5 count=1")
            hits = self.daemon.json("fault", "list")
            hits = hits["rules"] if isinstance(hits, dict) else hits
            self.assertEqual([rule["hits"] for rule in hits], [1])
            self.assertEqual(sends["before"], sends["after"] + 1)
        finally:
            self.daemon.command("fault", "clear")


if __name__ == "__main__":
    verbena_testing.main()
