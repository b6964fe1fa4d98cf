# SPDX-License-Identifier: Apache-2.0
"""Messages of the connection manager as they are on the wire, beside those of Linux.

tests/vectors holds captures of Linux; what has to differ (ids, addresses, numbers that are drawn)
is masked, all other bytes must be the same.
"""

import os
import signal
import struct
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import pcapng
import verbena_testing
from verbena_testing import AppTestCase

VECTORS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../vectors")
NAMES = {0x10: "REQ", 0x13: "REP", 0x14: "RTU", 0x15: "DREQ", 0x16: "DREP", 0x17: "SIDR_REQ",
         0x18: "SIDR_REP", 0x12: "REJ"}
HEADER = 24  # of a MAD
# What differs from connection to connection: (first byte, bytes) behind the MAD's header.
IDS = [(0, 8)]
MASKS = {
    # id, CA GUID, QPN, PSN, GIDs, flow label, and of the private data port and addresses
    0x10: [(0, 4), (16, 8), (32, 3), (44, 3), (56, 35), (142, 34), (176, 56)],
    0x13: IDS + [(12, 3), (20, 3), (28, 8), (36, 196)],  # QPN, PSN, CA GUID, private data
    0x14: IDS,
    0x15: IDS + [(8, 3)],  # remote QPN
    0x16: IDS,
    0x17: [(0, 4), (18, 34), (52, 180)],  # id; port and addresses, private data
    0x18: [(0, 4), (8, 3), (96, 136)],  # id, QPN, private data
    0x12: IDS,
}


def linux(name):
    """Packets of a pcap file."""
    with open(os.path.join(VECTORS, name), "rb") as file:
        data = file.read()
    position, packets = 24, []
    while position < len(data):
        length = struct.unpack_from("<I", data, position + 8)[0]
        frame = data[position + 16:position + 16 + length]
        position += 16 + length
        try:
            packets.append(pcapng.Packet("linux", 2, frame))
        except (ValueError, IndexError, struct.error):
            pass  # ARP and the like
    return packets


def management(packets):
    """{attribute: first packet of QP1 with it}."""
    found = {}
    for packet in packets:
        if packet.dest_qp == 1 and not packet.inbound:
            found.setdefault(int.from_bytes(packet.after_bth[8 + 16:8 + 18], "big"), packet)
    return found


def masked(packet, attribute):
    """Everything behind the BTH."""
    data = bytearray(packet.after_bth)
    mad = 8  # DETH
    data[mad + 8:mad + 16] = bytes(8)  # transaction id
    for first, count in MASKS[attribute]:
        start = mad + HEADER + first
        data[start:start + count] = bytes(count)
    return bytes(data)


class MessagesOfTheConnectionManager(AppTestCase):

    def captured(self, server, client):
        path = os.path.join(self.daemon.folder, f"cm-{time.monotonic_ns()}.pcapng")
        recorder = verbena_testing.Program([self.daemon.verbena, "capture", path], 90,
                                           environment=self.daemon.environment)
        time.sleep(0.5)
        if server:
            first = self.daemon.program(*server, limit=40)
            end = time.monotonic() + 20
            while not any(i["state"] == "listen" for i in self.daemon.json("list", "cm_id")):
                self.assertLess(time.monotonic(), end, first.describe())
                time.sleep(0.02)
            self.finish(first, self.daemon.program(*client, limit=40))
        else:
            self.daemon.run(*client)
        time.sleep(0.3)
        recorder.signal(signal.SIGINT)
        self.assertEqual(recorder.wait(), 0, recorder.describe())
        recorder.close()
        status, output = self.daemon.command("decode", path, "--check")
        self.assertEqual(status, 0, output[-2000:])
        return pcapng.read(path)

    def compare(self, ours, vector, attributes):
        mine, theirs = management(ours), management(linux(vector))
        for attribute in attributes:
            with self.subTest(message=NAMES[attribute], vector=vector):
                one, other = mine[attribute], theirs[attribute]
                self.assertEqual(masked(one, attribute).hex(), masked(other, attribute).hex())
                self.assertEqual(one.opcode, other.opcode)
                self.assertEqual(one.ack_request, other.ack_request)
                self.assertEqual(one.pad, other.pad)
                self.assertEqual(one.icrc, one.expected_icrc())
                udp = one.ip_header
                self.assertEqual(one.ip[udp:udp + 8], other.ip[udp:udp + 8], "UDP header")
                if one.ipv6:
                    self.assertEqual(one.ip[0:8], other.ip[0:8], "class, label, length, limit")
                else:
                    self.assertEqual(one.ip[0:4], other.ip[0:4], "type of service, length")
                    self.assertEqual(one.ip[6:10], other.ip[6:10], "flags, time to live")

    def test_a_connection_of_rping(self):
        ours = self.captured(["rping", "-s", "-a", "127.88.0.1", "-C", 3],
                             ["rping", "-c", "-a", "127.88.0.1", "-C", 3])
        self.compare(ours, "cm_rping_v4.pcap", [0x10, 0x13, 0x14, 0x15])

    def test_a_connection_of_ucmatose_ends_from_both_sides(self):
        ours = self.captured(["ucmatose"], ["ucmatose", "-s", "127.88.0.1"])
        self.compare(ours, "cm_ucmatose_v4.pcap", [0x10, 0x13, 0x14, 0x15, 0x16])

    def test_a_closed_port(self):
        ours = self.captured(None, ["rping", "-c", "-a", "127.88.0.1", "-C", 1])
        self.compare(ours, "cm_reject_closed_port.pcap", [0x12])

    def test_the_look_up_of_a_datagram_service(self):
        ours = self.captured(["udaddy"], ["udaddy", "-s", "127.88.0.1"])
        self.compare(ours, "cm_udaddy_v4.pcap", [0x17, 0x18])

    def test_psns_of_qp1_count_up(self):
        ours = self.captured(["ucmatose"], ["ucmatose", "-s", "127.88.0.1"])
        psns = [packet.psn for packet in ours if packet.dest_qp == 1 and packet.outbound]
        self.assertEqual(psns, list(range(psns[0], psns[0] + len(psns))))


if __name__ == "__main__":
    verbena_testing.main()
