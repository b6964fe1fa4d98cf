#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tshark.tsv: what tshark (not our code) reads in each RoCEv2 frame of the captures here.

Numbers, "-" for a field that the packet does not have. icrc_be: the four ICRC bytes read big-endian, as tshark does.
"""
import glob
import os
import subprocess

COLUMNS = [
    ("opcode", "infiniband.bth.opcode"),
    ("se", "infiniband.bth.se"),
    ("m", "infiniband.bth.m"),
    ("pad", "infiniband.bth.padcnt"),
    ("tver", "infiniband.bth.tver"),
    ("pkey", "infiniband.bth.p_key"),
    ("dest_qpn", "infiniband.bth.destqp"),
    ("ack_req", "infiniband.bth.a"),
    ("reserved7", "infiniband.bth.reserved7"),
    ("psn", "infiniband.bth.psn"),
    ("qkey", "infiniband.deth.q_key"),
    ("src_qpn", "infiniband.deth.srcqp"),
    ("va", "infiniband.reth.va"),
    ("rkey", "infiniband.reth.r_key"),
    ("dma_len", "infiniband.reth.dmalen"),
    ("swap_add", "infiniband.atomiceth.swapdt"),
    ("compare", "infiniband.atomiceth.cmpdt"),
    ("syndrome", "infiniband.aeth.syndrome"),
    ("msn", "infiniband.aeth.msn"),
    ("original", "infiniband.atomicacketh.origremdt"),
    ("imm", "infiniband.immdt"),
    ("inv_rkey", "infiniband.ieth"),
    ("icrc_be", "infiniband.invariant.crc"),
    ("udp_len", "udp.length"),
    ("udp_sport", "udp.srcport"),
]
BYTE_STRINGS = ("imm", "inv_rkey")  # printed by tshark as hex digits without 0x


def number(name, text):
    if not text:
        return "-"
    if text in ("True", "False"):
        return str(int(text == "True"))
    value = int(text, 16) if name in BYTE_STRINGS else int(text, 0)
    return str(value) if value < 10 else hex(value)


def rows(path):
    command = ["tshark", "-r", path, "-n", "--disable-protocol", "rpcordma", "--disable-protocol", "infiniband.eoib",
               "-T", "fields", "-E", "occurrence=f", "-E", "separator=/t", "-e", "frame.number"]
    for _, field in COLUMNS:
        command += ["-e", field]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for line in output.splitlines():
        frame, *texts = line.split("\t")
        if texts[0]:
            yield [frame] + [number(name, text) for (name, _), text in zip(COLUMNS, texts)]


def main():
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    with open("tshark.tsv", "w", encoding="ascii") as out:
        print("# capture", "frame", *(name for name, _ in COLUMNS), sep="\t", file=out)
        for path in sorted(glob.glob("*.pcap")):
            for row in rows(path):
                print(os.path.splitext(path)[0], *row, sep="\t", file=out)


if __name__ == "__main__":
    main()
