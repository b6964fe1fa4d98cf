# SPDX-License-Identifier: Apache-2.0
"""NICs on Linux netdevs: veth pairs and taps in network namespaces that the test makes.

Run as root: bazel test //tests/apps:ports_test
"""

import os
import random
import re
import socket
import struct
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from namespaces import Namespace, NamespaceDaemon, Sniffer, join, wait_listening
from verbena_testing import AppTestCase, free_port

UNREACHABLE = "(icmp.type == 3) || (icmpv6.type == 1)"
SIDE_CHANNEL = ("10.99.0.1", "10.99.0.2")


def in_namespace(namespace, function):
    """Runs `function` in a child process inside the namespace; False when it failed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fd = os.open(f"/run/netns/{namespace.name}", os.O_RDONLY)
            import ctypes
            if ctypes.CDLL(None, use_errno=True).setns(fd, 0x40000000) == 0:
                function()
                status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def internet_checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff


class PortTestCase(AppTestCase):
    """Two namespaces, one veth pair for the NICs (na, nb), one for TCP side channels (sa, sb)."""

    mtu = 4200

    @classmethod
    def setUpClass(cls):
        cls.cleanup = []
        cls.folder = tempfile.mkdtemp(prefix="vport.", dir="/tmp")
        try:
            cls.a, cls.b = Namespace(), Namespace()
            cls.cleanup += [cls.a.close, cls.b.close]
            join(cls.a, "na", cls.b, "nb", cls.mtu)
            join(cls.a, "sa", cls.b, "sb", 1500)
            for namespace, netdev, address in ((cls.a, "sa", SIDE_CHANNEL[0]),
                                               (cls.b, "sb", SIDE_CHANNEL[1])):
                namespace.add_address(netdev, address + "/24")
            cls.set_up()
        except BaseException:
            cls.tearDownClass()
            raise

    @classmethod
    def set_up(cls):
        pass

    @classmethod
    def start(cls, namespace, *arguments):
        daemon = NamespaceDaemon(namespace, arguments)
        cls.cleanup.append(daemon.close)
        return daemon

    @classmethod
    def tearDownClass(cls):
        for action in reversed(cls.cleanup):
            action()

    def dumps(self):
        return "\n".join(daemon.dump() for daemon in (getattr(self, "da", None),
                                                      getattr(self, "db", None)) if daemon)

    def pair_over(self, server, client, port, limit=60.0):
        """`server` over daemon b, `client` over daemon a with the server's address appended."""
        first = self.db.program(*server, limit=limit)
        if not wait_listening(self.b, port):
            first.kill()
            first.wait()
            text = first.describe()
            first.close()
            self.fail(f"the server does not listen\n{text}\n{self.dumps()}")
        second = self.da.program(*client, SIDE_CHANNEL[1], limit=limit)
        statuses = [second.wait(), first.wait()]
        texts = [second.describe(), first.describe()]
        first.close()
        second.close()
        if statuses != [0, 0]:
            self.fail("\n".join(texts) + "\n" + self.dumps())
        return texts

    def ping(self, namespace, address, *options):
        status, output = namespace.run("ping", "-c", 3, "-i", "0.2", "-W", 3, *options, address)
        self.assertEqual(status, 0, output + self.dumps())
        self.assertIn("3 received", output)
        self.assertNotIn("DUP", output)


@unittest.skipIf(os.geteuid() != 0, "needs root for network namespaces")
class KernelAndNic(PortTestCase):
    """The kernel at one end of a veth pair, a NIC at the other."""

    @classmethod
    def set_up(cls):
        cls.a.add_address("na", "192.168.77.1/24")
        cls.a.add_address("na", "fd00:77::1/64")
        cls.db = cls.start(cls.b, "--port", "verbena0=af_packet:nb", "--address",
                           "verbena0=192.168.77.2/24", "--address", "verbena0=fd00:77::2/64")

    def gids(self):
        return self.db.json("status")["nics"][0]["gids"]

    def test_status_shows_the_port(self):
        nic = self.db.json("status")["nics"][0]
        self.assertEqual(nic["port"], "af_packet:nb")
        self.assertEqual(nic["active_mtu"], 4096)
        self.assertEqual(nic["state"], "ACTIVE")
        self.assertEqual(nic["gids"][1:3], ["::ffff:192.168.77.2", "fd00:77::2"])

    def test_the_kernel_pings_the_nic_over_ipv4(self):
        self.ping(self.a, "192.168.77.2")
        self.ping(self.a, "192.168.77.2", "-s", 4100, "-M", "do")

    def test_the_kernel_pings_the_nic_over_ipv6(self):
        self.ping(self.a, "fd00:77::2")
        self.ping(self.a, "fd00:77::2", "-s", 4100)
        self.ping(self.a, self.gids()[0] + "%na")

    def test_pings_of_addresses_that_the_nic_does_not_have_are_not_answered(self):
        for address in ("192.168.77.3", "fd00:77::3"):
            status, output = self.a.run("ping", "-c", 1, "-W", 1, address)
            self.assertNotEqual(status, 0, output)

    def test_the_state_and_mtu_follow_the_netdev(self):
        def devinfo():
            status, output = self.db.run("ibv_devinfo", "-d", "verbena0")
            self.assertEqual(status, 0, output)
            return output
        try:
            for mtu, active in ((1500, 1024), (2200, 2048), (1024, 512), (9000, 4096)):
                self.b.ip("link", "set", "nb", "mtu", mtu)
                self.assertRegex(devinfo(), rf"active_mtu:\s+{active} ")
                self.assertEqual(self.db.json("status")["nics"][0]["active_mtu"], active)
            self.a.ip("link", "set", "na", "down")
            self.assertRegex(devinfo(), r"state:\s+PORT_DOWN")
            self.assertEqual(self.db.json("status")["nics"][0]["state"], "DOWN")
        finally:
            self.a.ip("link", "set", "na", "up")
            self.b.ip("link", "set", "nb", "mtu", self.mtu)
            # Addresses of IPv6 go with the link.
            self.a.ip("address", "replace", "fd00:77::1/64", "dev", "na", "nodad")
        self.assertRegex(devinfo(), r"state:\s+PORT_ACTIVE")
        self.ping(self.a, "192.168.77.2")

    def test_hostile_frames_are_counted_and_do_no_harm(self):
        before = self.db.wire()
        mac = bytes.fromhex(self.db.json("status")["nics"][0]["mac"].replace(":", ""))
        source = b"\x02\x99\0\0\0\x01"
        own, peer = socket.inet_aton("192.168.77.2"), socket.inet_aton("192.168.77.1")

        def ipv4(protocol, body, sender=peer):
            header = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 0, 0x4000, 64, protocol,
                                 0, sender, own)
            header = header[:10] + struct.pack("!H", internet_checksum(header)) + header[12:]
            return mac + source + b"\x08\0" + header + body

        bth = struct.pack("!BBHII", 4, 0, 0xffff, 0x123456, 0x80000001)
        roce = struct.pack("!HHHH", 0xc000, 4791, 8 + len(bth) + 8, 0) + bth + b"data" + b"icrc"
        wrong = [
            ipv4(17, roce),                                           # bad ICRC
            ipv4(17, roce[:20]),                                      # too short
            ipv4(17, roce, own),                                      # from itself
            ipv4(17, roce, socket.inet_aton("127.0.0.1")),            # from loopback
            ipv4(17, struct.pack("!HHHH", 1, 53, 8, 0)),              # another port
            mac + source + b"\x08\x06" + b"\xff" * 28,                # no ARP
            mac + source + b"\x86\xdd" + b"\x60" + b"\xff" * 60,      # no IPv6
            mac + source + b"\x08\0" + b"\x4f" + b"\xff" * 60,        # no IPv4
            mac + source + b"\x88\xcc" + b"\0" * 60,
            b"\xff" * 6 + source + b"\x08\0" + b"\0" * 60,
            ipv4(17, roce + b"\0" * 4000)[:4180],                     # longer than the datagram
        ]
        rounds, mutations = 20, 3000

        def send():
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
                raw.bind(("na", 0))
                for frame in wrong * rounds:
                    raw.send(frame)
                generator = random.Random(7)
                good = [ipv4(17, roce), ipv4(1, b"\x08\0" + b"\0" * 20), wrong[5]]
                for i in range(mutations):
                    frame = bytearray(generator.choice(good))
                    for _ in range(generator.randrange(1, 5)):
                        frame[generator.randrange(12, len(frame))] = generator.randrange(256)
                    raw.send(bytes(frame[:generator.randrange(14, len(frame) + 1)]))
                    if i % 100 == 99:
                        time.sleep(0.01)

        self.assertTrue(in_namespace(self.a, send))
        # The kernel itself drops a few of the mutated ones (bad VLAN tags).
        least = rounds * len(wrong) + mutations - 20
        end = time.monotonic() + 20
        while True:
            after = self.db.wire()
            seen = after["rcv_frames"] - before["rcv_frames"]
            if seen >= least or time.monotonic() > end:
                break
            time.sleep(0.1)
        self.assertGreaterEqual(seen, least, self.dumps())
        for name in ("rcv_roce", "rcv_other", "rcv_malformed", "rcv_spoofed"):
            self.assertGreaterEqual(after[name] - before[name], rounds, name)
        drops = self.db.drops()
        self.assertGreaterEqual(drops["bad_icrc"], rounds)
        self.assertGreaterEqual(drops["spoofed"], rounds)
        self.assertGreaterEqual(drops["malformed"], rounds)
        self.assertEqual(self.db.drops()["unknown_qp"], 0, "a wrong ICRC must be seen first")
        self.ping(self.a, "192.168.77.2")


@unittest.skipIf(os.geteuid() != 0, "needs root for network namespaces")
class TwoDaemons(PortTestCase):
    """Stock programs between daemons in two namespaces."""

    @classmethod
    def set_up(cls):
        cls.da = cls.start(cls.a, "--port", "verbena0=af_packet:na", "--address",
                           "verbena0=192.168.77.1/24", "--address", "verbena0=fd00:77::1/64")
        cls.db = cls.start(cls.b, "--port", "verbena0=af_packet:nb", "--address",
                           "verbena0=192.168.77.2/24", "--address", "verbena0=fd00:77::2/64")

    def pingpong(self, gid, size, mtu, *options):
        port = free_port()
        command = ["ibv_rc_pingpong", "-d", "verbena0", "-g", gid, "-p", port, "-c", "-s", size,
                   "-m", mtu, "-n", 50 if size < 100000 else 10, *options]
        for text in self.pair_over(command, command, port):
            self.assertRegex(text, r"\d+ iters in")
            self.assertNotIn("invalid data", text)

    def test_pingpong_over_ipv4_and_ipv6(self):
        before = [daemon.drops() for daemon in (self.da, self.db)]
        with Sniffer(self.b, "nb", self.folder) as sniffer:
            for gid in (1, 2, 0):
                for size, mtu in ((64, 1024), (9000, 4096), (70000, 256), (1 << 20, 4096)):
                    with self.subTest(gid=gid, size=size, mtu=mtu):
                        self.pingpong(gid, size, mtu, *(["-e"] if mtu == 256 else []))
        self.assertEqual(sniffer.frames(UNREACHABLE), 0)
        self.assertGreater(sniffer.frames("ip && infiniband"), 1000)
        self.assertGreater(sniffer.frames("ipv6 && infiniband"), 1000)
        # The same seen from inside: nothing was damaged on the way.
        self.assertEqual([daemon.drops() for daemon in (self.da, self.db)], before)

    def test_perftest_over_ipv4_and_ipv6(self):
        for gid in (1, 2):
            for program in ("ib_send_bw", "ib_send_lat", "ib_write_bw", "ib_write_lat",
                            "ib_read_bw", "ib_read_lat", "ib_atomic_bw", "ib_atomic_lat"):
                with self.subTest(gid=gid, program=program):
                    port = free_port()
                    size = [] if "atomic" in program else ["-s", 32768 if "bw" in program else 64]
                    command = [program, "-F", "-d", "verbena0", "-x", gid, "-p", port, "-n", 200,
                               *size]
                    self.pair_over(command, command, port)

    def test_loss_on_the_way_is_repaired(self):
        for daemon in (self.da, self.db):
            for rule in ("drop dir=tx prob=0.01 seed=5", "drop dir=rx prob=0.01 seed=6",
                         "corrupt dir=rx prob=0.005 seed=7"):
                status, output = daemon.command("fault", "add", rule)
                self.assertEqual(status, 0, output)
        try:
            self.pingpong(1, 70000, 1024)
            hits = [rule["hits"] for daemon in (self.da, self.db)
                    for rule in daemon.json("fault", "list")]
            self.assertGreater(min(hits), 0, hits)
        finally:
            for daemon in (self.da, self.db):
                daemon.command("fault", "clear")

    def test_a_peer_that_is_not_there_ends_with_an_error(self):
        """Nobody answers ARP: packets wait, are dropped and counted; no hang."""
        lonely = NamespaceDaemon(self.b, ("--port", "verbena0=tap:lonely", "--address",
                                          "verbena0=192.168.77.9/24"))
        try:
            self.b.ip("link", "set", "lonely", "up")
            before = self.da.drops()["unresolved"]
            port = free_port()
            command = ["ib_send_lat", "-F", "-d", "verbena0", "-x", 1, "-p", port, "-n", 20, "-s",
                       8, "-u", 12]
            server = lonely.program(*command, limit=60)
            self.assertTrue(wait_listening(self.b, port), server.describe())
            client = self.da.program(*command, SIDE_CHANNEL[1], limit=60)
            status = client.wait()
            text = client.describe()
            client.close()
            server.kill()
            server.wait()
            server.close()
            self.assertIsNotNone(status, text)
            self.assertNotEqual(status, 0, text)
            end = time.monotonic() + 10
            while self.da.drops()["unresolved"] == before and time.monotonic() < end:
                time.sleep(0.1)
            self.assertGreater(self.da.drops()["unresolved"], before)
        finally:
            lonely.close()

    def test_a_path_mtu_over_the_netdevs_is_refused(self):
        self.a.ip("link", "set", "na", "mtu", 1500)
        try:
            status, output = self.da.run("ibv_rc_pingpong", "-d", "verbena0", "-g", 1, "-m", 4096,
                                         "127.0.0.1", limit=20)
            self.assertNotEqual(status, 0, output)
            status = self.da.json("status")["nics"][0]
            self.assertEqual(status["active_mtu"], 1024)
        finally:
            self.a.ip("link", "set", "na", "mtu", self.mtu)


@unittest.skipIf(os.geteuid() != 0, "needs root for network namespaces")
class SharedWithTheKernel(PortTestCase):
    """NIC and kernel have the same MAC and IP addresses, as with a soft driver in the kernel."""

    @classmethod
    def set_up(cls):
        cls.a.add_address("na", "192.168.77.1/24")
        cls.a.add_address("na", "fd00:77::1/64")
        cls.b.add_address("nb", "192.168.77.2/24")
        cls.b.add_address("nb", "fd00:77::2/64")

    def send_to_roce_port(self):
        def send():
            for family, address in ((socket.AF_INET, "192.168.77.2"),
                                    (socket.AF_INET6, "fd00:77::2")):
                with socket.socket(family, socket.SOCK_DGRAM) as datagram:
                    datagram.sendto(b"x" * 40, (address, 4791))
        self.assertTrue(in_namespace(self.a, send))

    def test_no_port_unreachables_and_one_answer_to_each_ping(self):
        with Sniffer(self.b, "nb", self.folder) as sniffer:
            self.send_to_roce_port()
        self.assertEqual(sniffer.frames(UNREACHABLE), 2, "without a daemon the kernel complains")

        self.da = self.start(self.a, "--port", "verbena0=af_packet:na")
        self.db = self.start(self.b, "--port", "verbena0=af_packet:nb")
        nic = self.db.json("status")["nics"][0]
        self.assertEqual(nic["gids"][1:3], ["::ffff:192.168.77.2", "fd00:77::2"])
        link = self.b.ip("link", "show", "nb")
        self.assertIn(nic["mac"], link)
        with Sniffer(self.b, "nb", self.folder) as sniffer:
            self.send_to_roce_port()
            for address in ("192.168.77.2", "fd00:77::2"):
                self.ping(self.a, address)
            for gid in (1, 2):
                port = free_port()
                command = ["ibv_rc_pingpong", "-d", "verbena0", "-g", gid, "-p", port, "-c", "-n",
                           100, "-s", 9000, "-m", 4096]
                self.pair_over(command, command, port)
                command = ["ib_read_bw", "-F", "-d", "verbena0", "-x", gid, "-p", port, "-n", 100]
                self.pair_over(command, command, port)
        self.assertEqual(sniffer.frames(UNREACHABLE), 0)
        self.assertGreater(sniffer.frames("infiniband"), 500)

    def test_an_own_mac_with_the_kernels_address_is_refused(self):
        with self.assertRaises(AssertionError) as problem:
            NamespaceDaemon(self.b, ("--port", "verbena0=af_packet:nb", "--mac",
                                     "verbena0=02:00:00:00:00:99"))
        self.assertIn("must have its MAC address", str(problem.exception))


@unittest.skipIf(os.geteuid() != 0, "needs root for network namespaces")
class TapPort(PortTestCase):
    """The daemon makes the netdev."""

    def test_the_kernel_pings_the_nic_and_the_netdev_goes_with_the_daemon(self):
        daemon = self.start(self.b, "--port", "verbena0=tap:vtap0", "--address",
                            "verbena0=192.168.78.2/24", "--address", "verbena0=fd00:78::2/64")
        self.db = daemon
        self.assertEqual(daemon.json("status")["nics"][0]["active_mtu"], 1024)
        self.b.sysctl("net/ipv6/conf/vtap0/accept_dad", 0)
        self.b.ip("link", "set", "vtap0", "up")
        self.b.add_address("vtap0", "192.168.78.1/24")
        self.b.add_address("vtap0", "fd00:78::1/64")
        self.ping(self.b, "192.168.78.2")
        self.ping(self.b, "192.168.78.2", "-s", 1400, "-M", "do")
        self.ping(self.b, "fd00:78::2")
        daemon.close()
        self.assertNotIn("vtap0", self.b.ip("link", "show"))

    def test_two_daemons_over_taps_on_a_bridge(self):
        self.da = self.start(self.a, "--port", "verbena0=tap:vta", "--address",
                             "verbena0=192.168.78.1/24", "--address", "verbena0=fd00:78::1/64")
        self.db = self.start(self.b, "--port", "verbena0=af_packet:nb", "--address",
                             "verbena0=192.168.78.2/24", "--address", "verbena0=fd00:78::2/64")
        self.a.ip("link", "add", "br0", "type", "bridge")
        self.a.sysctl("net/ipv6/conf/br0/accept_dad", 0)
        self.a.ip("link", "set", "br0", "mtu", 4200, "up")
        for netdev in ("vta", "na"):
            self.a.ip("link", "set", netdev, "master", "br0", "up")
        time.sleep(0.1)
        for gid in (1, 2):
            for size, mtu in ((64, 1024), (1 << 20, 1024), (9000, 256)):
                port = free_port()
                command = ["ibv_rc_pingpong", "-d", "verbena0", "-g", gid, "-p", port, "-c", "-n",
                           20, "-s", size, "-m", mtu]
                self.pair_over(command, command, port)


@unittest.skipIf(os.geteuid() != 0, "needs root for network namespaces")
class WrongOptions(PortTestCase):

    def test_each_gives_a_sentence(self):
        for arguments, sentence in (
                (("--port", "verbena0=af_packet:nope"), "there is no netdev 'nope'"),
                (("--port", "verbena0=tap:nb"), "a netdev of that name exists"),
                (("--port", "verbena1=af_packet:nb"), "DEVICE=VALUE"),
                (("--port", "verbena0=af_xdp:nb"), "is no port"),
                (("--port", "verbena0=af_packet:lo"), "is no Ethernet device"),
                (("--address", "verbena0=224.0.0.1"), "is not an IPv4 or IPv6 address"),
                (("--gateway", "verbena0=10.0.0.1"), "gateway"),
                (("--mac", "verbena0=01:00:00:00:00:00"), "is not a MAC address")):
            with self.assertRaises(AssertionError) as problem:
                NamespaceDaemon(self.b, arguments).close()
            self.assertTrue(re.search(re.escape(sentence), str(problem.exception)),
                            f"{arguments}: {problem.exception}")


if __name__ == "__main__":
    verbena_testing.main()
