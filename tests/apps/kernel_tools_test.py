# SPDX-License-Identifier: Apache-2.0
"""Programs that ask the kernel, not verbs: ibstat, iproute2's rdma, files of /sys, interfaces."""

import json
import os
import re
import socket
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import ADDRESS, AppTestCase, Daemon, free_port, run

# A dump of interfaces over a netlink socket that waits with poll, in pieces of at most argv[1]
# bytes: names, number of pieces.
DUMP = """
import select, socket, struct, sys
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
s.bind((0, 0))
s.send(struct.pack('=IHHII', 32, 18, 0x301, 77, 0) + bytes(16))
names, pieces, done = [], 0, False
while not done:
    assert select.select([s], [], [], 5)[0], 'nothing to read'
    data = s.recv(int(sys.argv[1]), socket.MSG_DONTWAIT)
    pieces += 1
    while data:
        length, kind, _, sequence, port = struct.unpack('=IHHII', data[:16])
        assert sequence == 77 and port == s.getsockname()[0], (sequence, port)
        done = done or kind == 3
        at = 32
        while kind == 16 and at < length:
            size, attribute = struct.unpack('=HH', data[at:at + 4])
            if attribute == 3:
                names.append(data[at + 4:at + size - 1].decode())
            at += (size + 3) & ~3
        data = data[(length + 3) & ~3:]
assert not select.select([s], [], [], 0)[0], 'something is left'
print(pieces, *names)
"""

# Not in everybody's PATH.
IBSTAT = "/usr/sbin/ibstat"
PORT_FOLDER = "/sys/class/infiniband/verbena0/ports/1"


class KernelTools(AppTestCase):

    def ok(self, *argv, **options):
        status, output = self.daemon.run(*argv, **options)
        self.assertEqual(status, 0, f"{argv}\n{output}\n")
        return output

    def rdma(self, *argv):
        return json.loads(self.ok("rdma", "-j", *argv))

    def under_load(self, *command):
        """A server that waits with its objects, until it is closed."""
        port = free_port()
        program = self.daemon.program(*(command or ["ibv_rc_pingpong"]), "-d", "verbena0", "-g", 1,
                                      "-p", port)
        end = 200
        while not verbena_testing.listening(port) and program.running() and end:
            end -= 1
            time.sleep(0.05)
        self.assertTrue(program.running(), program.describe())
        return program

    def test_ibstat_shows_both_devices(self):
        output = self.ok(IBSTAT)
        self.assertEqual(re.findall(r"^CA '(.*)'$", output, re.M), ["verbena0", "verbena1"])
        self.assertEqual(output.count("State: Active"), 2, output)
        self.assertEqual(output.count("Physical state: LinkUp"), 2, output)
        self.assertEqual(output.count("Link layer: Ethernet"), 2, output)
        self.assertIn("Rate: 100", output)
        self.assertIn("CA type: VERBENA", output)
        self.assertEqual(self.ok(IBSTAT, "-l").split(), ["verbena0", "verbena1"])
        one = self.ok(IBSTAT, "verbena1", "1")
        self.assertIn("State: Active", one)
        guid = re.search(r"Node GUID: 0x([0-9a-f]{16})", self.ok(IBSTAT, "verbena0")).group(1)
        with_verbs = re.search(r"verbena0\s+([0-9a-f]{16})", self.ok("ibv_devices")).group(1)
        self.assertEqual(guid, with_verbs)

    def test_rdma_dev_shows_the_devices(self):
        devices = self.rdma("dev", "show")
        self.assertEqual([device["ifname"] for device in devices], ["verbena0", "verbena1"])
        self.assertEqual(devices[0]["node_type"], "ca")
        guid = re.search(r"verbena0\s+([0-9a-f]{16})", self.ok("ibv_devices")).group(1)
        self.assertEqual(devices[0]["node_guid"].replace(":", ""), guid)
        self.assertEqual(self.rdma("dev", "show", "verbena1")[0]["ifname"], "verbena1")
        status, output = self.daemon.run("rdma", "dev", "show", "verbena7")
        self.assertNotEqual(status, 0, output)

    def test_rdma_link_shows_state_and_interface(self):
        links = self.rdma("link", "show")
        self.assertEqual([(link["ifname"], link["port"], link["state"], link["physical_state"],
                           link["netdev"]) for link in links],
                         [("verbena0", 1, "ACTIVE", "LINK_UP", "verbena0"),
                          ("verbena1", 1, "ACTIVE", "LINK_UP", "verbena1")])
        self.assertIn("state ACTIVE", self.ok("rdma", "link", "show", "verbena1/1"))

    def test_rdma_resource_shows_the_objects_of_programs(self):
        program = self.under_load()
        try:
            summary = self.rdma("resource", "show", "verbena0")[0]
            self.assertGreaterEqual(summary["qp"], 1)
            self.assertGreaterEqual(summary["cq"], 1)
            self.assertGreaterEqual(summary["mr"], 1)
            self.assertGreaterEqual(summary["pd"], 1)
            qps = self.rdma("resource", "show", "qp")
            ours = [qp for qp in qps if qp["comm"] == "ibv_rc_pingpong"]
            self.assertEqual(len(ours), 1, qps)
            self.assertEqual((ours[0]["ifname"], ours[0]["type"]), ("verbena0", "RC"))
            self.assertEqual(ours[0]["pid"], self.json_list("qp")[0]["pid"])
            self.assertEqual(ours[0]["lqpn"], self.json_list("qp")[0]["qpn"])
            number = ours[0]["lqpn"]
            one = self.rdma("resource", "show", "qp", "lqpn", number)
            self.assertEqual([qp["lqpn"] for qp in one], [number])
            mrs = [mr for mr in self.rdma("resource", "show", "mr") if mr["comm"] == "ibv_rc_pingpong"]
            self.assertEqual(mrs[0]["mrlen"], self.json_list("mr")[0]["length"])
            cqs = [cq for cq in self.rdma("resource", "show", "cq") if cq["comm"] == "ibv_rc_pingpong"]
            self.assertGreaterEqual(cqs[0]["cqe"], 1)
            self.assertTrue(self.rdma("resource", "show", "pd"))
        finally:
            program.close()

    def test_ibv_asyncwatch_shows_events_as_they_happen(self):
        program = self.daemon.program("ibv_asyncwatch", "-d", "verbena0")
        try:
            self.assertTrue(program.wait_for("async event FD"), program.describe())
            for command, event in ((("fault", "add", "down dev=verbena0"), "PORT_ERR"),
                                   (("fault", "clear"), "PORT_ACTIVE")):
                self.daemon.command(*command)
                self.assertTrue(program.wait_for(event, 10), program.describe())
        finally:
            program.close()

    def test_dpdk_telemetry_has_the_counters_if_it_is_asked_for(self):
        self.assertFalse(os.path.exists(os.path.join(self.daemon.folder, "verbena", "dpdk")))
        with Daemon(2, ["--telemetry"]) as daemon:
            port = free_port()
            server = daemon.program("ibv_rc_pingpong", "-d", "verbena0", "-g", 1, "-p", port)
            self.addCleanup(server.close)
            end = time.monotonic() + 20
            while not verbena_testing.listening(port):
                self.assertLess(time.monotonic(), end, server.describe())
                time.sleep(0.02)
            status, output = daemon.run("ibv_rc_pingpong", "-d", "verbena1", "-g", 1, "-p", port,
                                        ADDRESS)
            self.assertEqual((status, server.wait()), (0, 0), output)
            # The protocol of dpdk-telemetry.py (DPDK's how-to, "DPDK Telemetry User Guide").
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.settimeout(20)
                client.connect(os.path.join(daemon.folder, "verbena", "dpdk", "verbena-t",
                                            "dpdk_telemetry.v2"))
                self.assertIn("DPDK", json.loads(client.recv(1024))["version"])

                def ask(command):
                    client.send(command.encode())
                    return json.loads(client.recv(65536))[command.split(",", maxsplit=1)[0]]
                self.assertEqual(ask("/verbena/list"), ["verbena0", "verbena1"])
                self.assertIn("/verbena/counters", ask("/"))
                for device in ("verbena0", "verbena1"):
                    told = ask("/verbena/counters," + device)
                    counters = daemon.json("counters")["devices"][device]
                    self.assertEqual(told, {**counters["counters"], **counters["hw_counters"]})
                    self.assertGreaterEqual(told["port_xmit_packets"], 1000)
                for wrong in ("", ",verbena7", ",../verbena0", ",~", ",verbena0~2", "," + "x" * 500):
                    self.assertFalse(ask("/verbena/counters" + wrong))
            status, output = daemon.command("down")
            self.assertEqual(status, 0, output)
            self.assertFalse(os.path.exists(os.path.join(daemon.folder, "verbena", "dpdk")))

    def test_rdma_resource_shows_shared_receive_queues(self):
        program = self.under_load("ibv_srq_pingpong", "-q", 3)
        try:
            shown = self.rdma("resource", "show", "srq")
            self.assertEqual(len(shown), 1)
            self.assertEqual(shown[0]["type"], "BASIC")
            self.assertEqual(shown[0]["comm"], "ibv_srq_pingpong"[:15])  # as in /proc
            self.assertEqual(len(shown[0]["lqpn"]), 3)
            listed = self.json_list("srq")[0]
            self.assertEqual(listed["srqn"], shown[0]["srqn"])
            self.assertEqual(listed["posted"], 500)
        finally:
            program.close()

    def json_list(self, what):
        listed = self.daemon.json("list", what)
        return listed["items"] if isinstance(listed, dict) else listed

    def traffic(self):
        port = free_port()
        self.pair(["ibv_rc_pingpong", "-d", "verbena0", "-g", 1, "-p", port, "-n", 100],
                  ["ibv_rc_pingpong", "-d", "verbena1", "-g", 1, "-p", port, "-n", 100,
                   "127.88.0.1"], port)

    def test_rdma_statistic_shows_the_counters(self):
        self.traffic()
        shown = self.rdma("statistic", "show", "link", "verbena0/1")[0]
        counters = self.daemon.json("counters")["devices"]["verbena0"]["hw_counters"]
        self.assertEqual(shown["rdma_sends"], counters["rdma_sends"])
        self.assertGreaterEqual(shown["rdma_sends"], 100)
        self.assertTrue(set(counters) <= set(shown))

    def test_counter_files_are_live(self):
        def read(name):
            return int(self.ok("cat", f"{PORT_FOLDER}/{name}"))

        before = read("counters/port_xmit_packets")
        self.traffic()
        after = read("counters/port_xmit_packets")
        self.assertGreaterEqual(after - before, 100)
        counters = self.daemon.json("counters")["devices"]["verbena0"]
        self.assertEqual(after, counters["counters"]["port_xmit_packets"])
        self.assertEqual(read("hw_counters/rdma_sends"), counters["hw_counters"]["rdma_sends"])
        self.assertEqual(read("counters/port_xmit_data"), counters["counters"]["port_xmit_data"])

    def test_shells_walk_through_the_devices_folders(self):
        # ls -l also asks for attributes that only some file systems have.
        listed = self.ok("ls", "-l", "/sys/class/infiniband/", "/sys/class/infiniband/verbena0/device/")
        self.assertRegex(listed, r"verbena1 -> \.\./\.\./devices/")
        self.assertIn("numa_node", listed)
        walked = self.ok("sh", "-c", "cd /sys/class/infiniband/verbena1/ports/1 && cat gids/1 && "
                                     "cd ../.. && cat node_type && stat -f -c %i .. >/dev/null")
        self.assertEqual(walked.split(), ["0000:0000:0000:0000:0000:ffff:7f58:0002", "1:", "CA"])
        self.ok("stat", "-f", "/sys/class/infiniband/verbena1")

    def test_interfaces_are_listed_with_the_kernels(self):
        output = self.ok(sys.executable, "-c", (
            "import socket, fcntl, struct\n"
            "print(sorted(name for _, name in socket.if_nameindex()))\n"
            "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "for name in (b'verbena0', b'verbena1'):\n"
            "    r = fcntl.ioctl(s, 0x8915, struct.pack('256s', name))\n"
            "    print(socket.inet_ntoa(r[20:24]))\n"))
        names, first, second = output.splitlines()
        self.assertIn("'lo'", names)
        self.assertIn("'verbena0', 'verbena1'", names)
        self.assertEqual((first, second), ("127.88.0.1", "127.88.0.2"))

    def ip(self, *argv):
        return json.loads(self.ok("ip", "-j", *argv) or "[]")

    def test_ip_shows_the_interfaces_beside_the_kernels(self):
        _, kernels = run(["ip", "-j", "link"])
        theirs = [link["ifname"] for link in json.loads(kernels)]
        links = self.ip("link")
        self.assertEqual([link["ifname"] for link in links], theirs + ["verbena0", "verbena1"])
        mac = self.daemon.json("status")["nics"][1]["mac"]
        self.assertEqual((links[-1]["address"], links[-1]["mtu"], links[-1]["operstate"]),
                         (mac, 9000, "UP"))
        self.assertEqual([link["ifname"] for link in self.ip("link", "show", "verbena1")],
                         ["verbena1"])
        index = int(self.ok("cat", "/sys/class/net/verbena1/ifindex"))
        self.assertEqual(links[-1]["ifindex"], index)
        status, output = self.daemon.run("ip", "link", "show", "verbena7")
        self.assertNotEqual(status, 0, output)

    def test_ip_shows_the_addresses(self):
        _, kernels = run(["ip", "-j", "addr"])
        shown = self.ip("addr")
        self.assertEqual(shown[:-2], json.loads(kernels))
        for each in (shown[-1], self.ip("addr", "show", "verbena1")[0],
                     self.ip("addr", "show", "dev", "verbena1")[0]):
            self.assertEqual([(a["local"], a["prefixlen"], a["scope"]) for a in each["addr_info"]][0],
                             ("127.88.0.2", 16, "global"))
            self.assertEqual(each["addr_info"][1]["scope"], "link")
        self.assertEqual([each["addr_info"][0]["family"]
                          for each in self.ip("-6", "addr", "show", "dev", "verbena0")], ["inet6"])

    def test_ip_shows_routes_and_neighbours(self):
        _, kernels = run(["ip", "-j", "route"])
        routes = self.ip("route")
        self.assertEqual(routes[:-2], json.loads(kernels or "[]"))
        self.assertEqual([(r["dst"], r["dev"], r["prefsrc"]) for r in routes[-2:]],
                         [("127.88.0.0/16", "verbena0", "127.88.0.1"),
                          ("127.88.0.0/16", "verbena1", "127.88.0.2")])
        way = self.ip("route", "get", "127.88.0.9")[0]
        self.assertEqual((way["dst"], way["dev"], way["prefsrc"]),
                         ("127.88.0.9", "verbena0", "127.88.0.1"))
        self.assertEqual(self.ip("route", "get", "127.88.0.9", "dev", "verbena1")[0]["dev"],
                         "verbena1")
        self.assertEqual(self.ip("route", "get", "127.0.0.1")[0]["dev"], "lo")
        macs = [nic["mac"] for nic in self.daemon.json("status")["nics"]]
        shown = {(n["dst"], n["lladdr"]) for n in self.ip("neigh", "show", "dev", "verbena0")}
        self.assertIn(("127.88.0.2", macs[1]), shown)
        self.assertNotIn("127.88.0.1", [destination for destination, _ in shown])

    def test_a_dump_comes_in_pieces_for_small_buffers(self):
        whole = self.ok(sys.executable, "-c", DUMP, 65536).split()
        with Daemon(32) as daemon:
            pieces = []
            for room in (65536, 4096):
                status, output = daemon.run(sys.executable, "-c", DUMP, room)
                self.assertEqual(status, 0, output)
                count, *names = output.split()
                pieces.append(int(count))
                # Where the kernel ends its dump with names, ours may come before them.
                self.assertEqual(sorted(names),
                                 sorted(whole[1:-2] + [f"verbena{i}" for i in range(32)]))
            self.assertGreater(pieces[1], pieces[0])

    def test_the_folder_of_interfaces_has_them(self):
        kernels = sorted(os.listdir("/sys/class/net"))
        self.assertEqual(sorted(self.ok("ls", "/sys/class/net").split()),
                         sorted(kernels + ["verbena0", "verbena1"]))
        output = self.ok(sys.executable, "-c", (
            "import os\n"
            "print(*[e.name for e in os.scandir('/sys/class/net/') if e.is_symlink()])\n"
            "print(*os.listdir('/sys/class'))\n"))
        first, second = output.splitlines()
        self.assertEqual(sorted(first.split()), sorted(
            [name for name in kernels if os.path.islink("/sys/class/net/" + name)] +
            ["verbena0", "verbena1"]))
        self.assertEqual(sorted(second.split()), sorted(os.listdir("/sys/class")))

    def test_addresses_of_the_nics_decide_which_families_a_host_has(self):
        # The host's own interfaces have IPv4 only, so that libc would take no IPv6 address.
        script = ("ip link set lo up && ip address add 10.1.2.3/32 dev lo && "
                  "exec getent ahosts fd00:77::2")
        alone = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]
        self.assertEqual(run(alone, 20), (2, ""))
        self.assertIn("fd00:77::2", self.ok(*alone))

    def test_gids_belong_to_the_interface(self):
        output = self.ok("ibv_devinfo", "-v", "-d", "verbena0")
        self.assertRegex(output, r"GID\[\s*1\]:\s+::ffff:127\.88\.0\.1, RoCE v2")
        name = self.ok("cat", f"{PORT_FOLDER}/gid_attrs/ndevs/1").strip()
        self.assertEqual(name, "verbena0")


class WithoutDaemon(unittest.TestCase):

    def test_the_tools_find_nothing(self):
        with Daemon(1) as daemon:
            environment = daemon.shell_environment()
        status, output = run(["rdma", "dev"], environment=environment)
        self.assertNotIn("verbena", output)
        status, output = run([IBSTAT, "-l"], environment=environment)
        self.assertNotIn("verbena", output)
        # A clean error, soon.
        status, output = run(["rping", "-c", "-a", "127.88.0.1", "-C", "1"], limit=20,
                             environment=environment)
        self.assertNotIn(status, (0, None), output)


if __name__ == "__main__":
    verbena_testing.main()
