# SPDX-License-Identifier: Apache-2.0
"""Network namespaces of a test's own, joined by veth pairs; daemons and programs in them. Root."""

import os
import subprocess
import time

from verbena_testing import Daemon, Program, listening, run

_count = 0


def ip(*arguments, check=True):
    result = subprocess.run(["ip", *map(str, arguments)], capture_output=True, text=True,
                            check=False, timeout=20)
    if check and result.returncode != 0:
        raise AssertionError(f"ip {' '.join(map(str, arguments))}: {result.stderr}")
    return result.stdout


class Namespace:
    """An empty network namespace; use with `with` or close()."""

    def __init__(self):
        global _count
        _count += 1
        self.name = f"vt{os.getpid()}x{_count}"
        ip("netns", "add", self.name)
        self.ip("link", "set", "lo", "up")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def ip(self, *arguments, check=True):
        return ip("-n", self.name, *arguments, check=check)

    def wrap(self, *argv):
        return ["ip", "netns", "exec", self.name, *map(str, argv)]

    def run(self, *argv, limit=30.0):
        """(status, output) of a program in here."""
        return run(self.wrap(*argv), limit)

    def program(self, *argv, limit=60.0, **options):
        return Program(self.wrap(*argv), limit, **options)

    def sysctl(self, name, value):
        status, output = self.run("/bin/sh", "-c", f"echo {value} > /proc/sys/{name}")
        if status != 0:
            raise AssertionError(f"sysctl {name}: {output}")

    def add_address(self, netdev, address):
        nodad = ("nodad",) if ":" in address else ()
        self.ip("address", "add", address, "dev", netdev, *nodad)

    def close(self):
        ip("netns", "del", self.name, check=False)


def join(one, netdev_one, other, netdev_other, mtu=4200):
    """A veth pair between two namespaces, up and without addresses."""
    one.ip("link", "add", netdev_one, "type", "veth", "peer", "name", netdev_other, "netns",
           other.name)
    for namespace, netdev in ((one, netdev_one), (other, netdev_other)):
        namespace.sysctl(f"net/ipv6/conf/{netdev}/accept_dad", 0)
        namespace.sysctl(f"net/ipv6/conf/{netdev}/router_solicitations", 0)
        namespace.ip("link", "set", netdev, "mtu", mtu, "up")


class NamespaceDaemon(Daemon):
    """A daemon, and programs over it, in a namespace."""

    def __init__(self, namespace, arguments=(), nics=1):
        self.namespace = namespace
        super().__init__(nics=nics, arguments=arguments)

    def command(self, *arguments, limit=20.0):
        return run(self.namespace.wrap(self.verbena, *arguments), limit,
                   environment=self.environment)

    def program(self, *argv, limit=60.0, environment=None, **options):
        merged = dict(self.environment)
        merged.update(environment or {})
        return Program(self.namespace.wrap(self.verbena, "run", "--", *argv), limit,
                       environment=merged, **options)

    def wire(self, device="verbena0"):
        """Counters of the netdev's side."""
        return self.json("counters")["devices"][device]["wire"]

    def drops(self, device="verbena0"):
        return self.json("counters")["devices"][device]["drops"]


def wait_listening(namespace, port, limit=20.0):
    """True once somebody listens on the TCP port in the namespace."""
    end = time.monotonic() + limit
    command = f"grep -qiE '^ *[0-9]+: [0-9A-F]+:{port:04X} [0-9A-F]+:0000 0A' /proc/net/tcp " \
              "/proc/net/tcp6"
    while time.monotonic() < end:
        if namespace is None:
            if listening(port):
                return True
        elif subprocess.run(namespace.wrap("/bin/sh", "-c", command), check=False).returncode == 0:
            return True
        time.sleep(0.05)
    return False


class Sniffer:
    """tshark on a netdev of a namespace; `with Sniffer(...) as sniffer`, then frames()."""

    def __init__(self, namespace, netdev, folder, most_bytes=160):
        self.namespace = namespace
        self.path = os.path.join(folder, f"{netdev}.pcapng")
        self.program = namespace.program("tshark", "-q", "-s", most_bytes, "-i", netdev, "-w", self.path,
                                         limit=600)

    def __enter__(self):
        if not self.program.wait_for("Capturing on|capture started", 20):
            raise AssertionError(self.program.describe())
        # The line comes before the socket is there.
        end = time.monotonic() + 20
        while not os.path.exists(self.path) or os.path.getsize(self.path) == 0:
            if time.monotonic() > end:
                raise AssertionError("tshark writes no file")
            time.sleep(0.05)
        time.sleep(0.3)
        return self

    def __exit__(self, *_):
        time.sleep(0.5)  # What is on the way.
        self.program.signal(2)
        self.program.wait()
        self.program.close()

    def frames(self, display_filter):
        """Number of frames that match."""
        status, output = run(["tshark", "-r", self.path, "-Y", display_filter, "-T", "fields", "-e",
                              "frame.number"], 240)
        numbers = [line for line in output.splitlines() if line.strip().isdigit()]
        if status != 0:
            raise AssertionError(output)
        return len(numbers)


def stop(program):
    program.kill()
    program.wait()
    program.close()
