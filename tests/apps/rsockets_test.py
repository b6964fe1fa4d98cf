# SPDX-License-Identifier: Apache-2.0
"""Stock programs over rsockets (librdmacm), and ordinary TCP programs over librspreload."""

import hashlib
import os
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import AppTestCase

FIRST, SECOND = "127.88.0.1", "127.88.0.2"
PRELOAD = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"


def udp_port_is_open(port):
    with open("/proc/net/udp", encoding="ascii") as table:
        return any(line.split()[1].endswith(f":{port:04X}") for line in list(table)[1:])


class Rsockets(AppTestCase):

    last_port = 7600

    def new_port(self):
        Rsockets.last_port += 1
        return Rsockets.last_port

    def wait_for_listener(self, port, program):
        end = time.monotonic() + 20
        while not any(item["state"] == "listen" and item["source"].endswith(f":{port}")
                      for item in self.daemon.json("list", "cm_id")):
            if not program.running() or time.monotonic() > end:
                self.fail(f"nobody listens\n{program.describe()}\n{self.daemon.dump()}")
            time.sleep(0.02)

    def programs(self, server, client, port, limit=40.0):
        first = self.daemon.program(*server, limit=limit)
        self.wait_for_listener(port, first)
        return self.finish(first, self.daemon.program(*client, limit=limit))

    def over_preload(self, *argv):
        """The command with librspreload behind our own preload."""
        return ["/bin/sh", "-c", f'LD_PRELOAD="$LD_PRELOAD:{PRELOAD}" exec "$@"', "sh", *argv]

    def file_of(self, folder, name, size):
        path = os.path.join(folder, name)
        block = hashlib.sha256(name.encode()).digest()
        with open(path, "wb") as out:
            for i in range(size // 32):
                out.write(hashlib.sha256(block + i.to_bytes(4, "big")).digest())
        return path

    def assert_same(self, one, other):
        with open(one, "rb") as first, open(other, "rb") as second:
            self.assertTrue(first.read() == second.read(), f"{one} and {other} differ")

    def test_rstream_in_every_mode(self):
        # b: blocking, n: not, a: by poll. A client by poll ends with POLLHUP (16) when the
        # server's last message and its end come together.
        for mode, client_mode in (("b", "b"), ("n", "n"), ("a", "b")):
            with self.subTest(mode=mode):
                port = self.new_port()
                options = ["-p", port, "-C", 50, "-I", 2, "-S", 20000, "-T", "v"]
                _, client = self.programs(
                    ["rstream", *options, "-T", mode],
                    ["rstream", "-s", FIRST, *options, "-T", client_mode], port)
                self.assertRegex(client, r"custom .*\d")
                self.assertNotIn("verification failed", client)

    def test_rstream_over_all_sizes(self):
        port = self.new_port()
        options = ["-p", port, "-C", 5, "-I", 2, "-S", "all"]
        self.programs(["rstream", *options], ["rstream", "-s", SECOND, *options], port)

    def test_riostream(self):
        for size in (64, 65536):
            port = self.new_port()
            options = ["-p", port, "-C", 20, "-S", size, "-T", "v"]
            self.programs(["riostream", *options], ["riostream", "-s", FIRST, *options], port)

    def test_udpong(self):
        for options in ([], ["-T", "e"], ["-T", "n"], ["-T", "a"]):
            with self.subTest(options=options):
                port = self.new_port()
                server = self.daemon.program("udpong", "-b", FIRST, "-p", port, *options, limit=40)
                try:
                    # Datagrams find each other by way of a real UDP port.
                    end = time.monotonic() + 20
                    while not udp_port_is_open(port):
                        self.assertLess(time.monotonic(), end, server.describe())
                        time.sleep(0.02)
                    status, output = self.daemon.run("udpong", "-s", FIRST, "-p", port, "-C", 200,
                                                     *options, limit=30)
                    self.assertEqual(status, 0, output + server.describe())
                    self.assertRegex(output, r"custom .*\d")
                finally:
                    server.close()

    def test_rcopy_copies_files(self):
        with tempfile.TemporaryDirectory(prefix="vapp.", dir="/tmp") as folder:
            # The port is rcopy's own, 7427.
            server = self.daemon.program("rcopy", limit=60)
            try:
                self.wait_for_listener(7427, server)
                for size in (32, 1 << 20, 5 << 20):
                    source = self.file_of(folder, f"source{size}", size)
                    target = os.path.join(folder, f"target{size}")
                    status, output = self.daemon.run("rcopy", source, f"{FIRST}:{target}", limit=30)
                    self.assertEqual(status, 0, output)
                    self.assertTrue(server.wait_for(f"{size} bytes.*done"), server.describe())
                    self.assert_same(source, target)
            finally:
                server.close()

    def test_netcat_over_librspreload(self):
        with tempfile.TemporaryDirectory(prefix="vapp.", dir="/tmp") as folder:
            port = self.new_port()
            source = self.file_of(folder, "source", 1 << 20)
            target = os.path.join(folder, "target")
            before = self.daemon.counters()["verbena0"]["port_xmit_data"]
            self.programs(
                self.over_preload("/bin/sh", "-c", 'exec nc.traditional -l -p "$0" -s "$1" > "$2"',
                                  port, FIRST, target),
                self.over_preload("/bin/sh", "-c", 'exec nc.traditional -q 0 "$1" "$0" < "$2"',
                                  port, FIRST, source), port)
            self.assert_same(source, target)
            # It went over the NIC.
            sent = 4 * (self.daemon.counters()["verbena0"]["port_xmit_data"] - before)
            self.assertGreater(sent, 1 << 20)

    def test_iperf_over_librspreload(self):
        port = self.new_port()
        server = self.daemon.program(*self.over_preload("iperf", "-s", "-B", FIRST, "-p", port),
                                     limit=60)
        try:
            self.wait_for_listener(port, server)
            for streams in (1, 3):
                status, output = self.daemon.run(
                    *self.over_preload("iperf", "-c", FIRST, "-p", port, "-n", "4M", "-P", streams),
                    limit=40)
                self.assertEqual(status, 0, output)
                self.assertRegex(output, r"bits/sec")
        finally:
            server.close()


if __name__ == "__main__":
    verbena_testing.main()
