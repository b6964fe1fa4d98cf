# SPDX-License-Identifier: Apache-2.0
"""Reads pcapng files and RoCEv2 packets, independently of Verbena's own code.

The ICRC is computed with zlib.crc32 over the packet with the fields masked that routers may change
(RoCEv2, annex A17): 8 bytes of ones for the missing local route header; type of service, time to
live and checksum of IPv4 (traffic class, flow label and hop limit of IPv6); the UDP checksum; the
reserved byte of the BTH that holds FECN and BECN.
"""

import struct
import zlib


class Packet:
    """One RoCEv2 packet of a capture."""

    def __init__(self, interface, flags, data):
        self.interface = interface  # Name of the capture's interface.
        self.inbound = flags & 3 == 1
        self.outbound = flags & 3 == 2
        self.data = data
        kind = struct.unpack_from("!H", data, 12)[0]
        self.ip = data[14:]
        if kind == 0x0800:
            self.ip_header = (self.ip[0] & 15) * 4
            self.ip_bytes = struct.unpack_from("!H", self.ip, 2)[0]
        elif kind == 0x86dd:
            self.ip_header = 40
            self.ip_bytes = 40 + struct.unpack_from("!H", self.ip, 4)[0]
        else:
            raise ValueError(f"ethertype {kind:#x}")
        self.ipv6 = kind == 0x86dd
        if self.ip_bytes != len(self.ip):
            raise ValueError(f"IP length {self.ip_bytes} of {len(self.ip)} bytes")
        udp = self.ip[self.ip_header:]
        if struct.unpack_from("!H", udp, 2)[0] != 4791:
            raise ValueError("not UDP port 4791")
        if struct.unpack_from("!H", udp, 4)[0] != len(udp):
            raise ValueError("UDP length")
        bth = udp[8:]
        self.opcode = bth[0]
        self.pad = bth[1] >> 4 & 3
        self.dest_qp = int.from_bytes(bth[5:8], "big")
        self.ack_request = bth[8] >> 7
        self.psn = int.from_bytes(bth[9:12], "big")
        self.after_bth = bth[12:-4]
        self.icrc = struct.unpack("<I", bth[-4:])[0]

    def expected_icrc(self):
        ip = bytearray(self.ip[:-4])
        if self.ipv6:
            ip[0] |= 0x0f
            ip[1:4] = b"\xff\xff\xff"
            ip[7] = 0xff
        else:
            ip[1] = 0xff
            ip[8] = 0xff
            ip[10:12] = b"\xff\xff"
        udp = self.ip_header
        ip[udp + 6:udp + 8] = b"\xff\xff"
        ip[udp + 8 + 4] = 0xff
        return zlib.crc32(b"\xff" * 8 + bytes(ip))

    def payload(self):
        """The bytes that the application sent, for requests and READ responses of RC."""
        extra = {0x03: 4, 0x05: 4, 0x06: 16, 0x09: 4, 0x0a: 16, 0x0b: 20, 0x0d: 4, 0x0f: 4,
                 0x10: 4, 0x16: 4, 0x17: 4}.get(self.opcode, 0)
        if self.opcode not in (*range(0x0c), 0x0d, 0x0e, 0x0f, 0x10, 0x16, 0x17):
            return b""
        return self.after_bth[extra:len(self.after_bth) - self.pad]


def read(path):
    """All packets of a pcapng file."""
    with open(path, "rb") as file:
        data = file.read()
    interfaces, packets, at, order = [], [], 0, "<"
    while at < len(data):
        kind, = struct.unpack_from(order + "I", data, at)
        if kind == 0x0a0d0d0a:
            order = "<" if data[at + 8:at + 12] == b"\x4d\x3c\x2b\x1a" else ">"
            interfaces = []
        length, = struct.unpack_from(order + "I", data, at + 4)
        if length < 12 or length % 4 or at + length > len(data):
            raise ValueError(f"block of {length} bytes at {at} of {len(data)}")
        if struct.unpack_from(order + "I", data, at + length - 4)[0] != length:
            raise ValueError("the two lengths of a block differ")
        body = data[at + 8:at + length - 4]
        if kind == 1:
            if struct.unpack_from(order + "H", body)[0] != 1:
                raise ValueError("link type is not Ethernet")
            interfaces.append(_options(body[8:], order).get(2, b"?").decode())
        elif kind == 6:
            number, _, _, captured, original = struct.unpack_from(order + "5I", body)
            if captured != original:
                raise ValueError("a cut packet")
            options = _options(body[20 + (captured + 3) // 4 * 4:], order)
            flags = struct.unpack(order + "I", options.get(2, b"\0\0\0\0"))[0]
            packets.append(Packet(interfaces[number], flags, body[20:20 + captured]))
        at += length
    return packets


def _options(body, order):
    result, at = {}, 0
    while at + 4 <= len(body):
        code, length = struct.unpack_from(order + "HH", body, at)
        if code == 0:
            break
        result[code] = body[at + 4:at + 4 + length]
        at += 4 + (length + 3) // 4 * 4
    return result
