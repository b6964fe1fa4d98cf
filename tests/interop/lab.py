# SPDX-License-Identifier: Apache-2.0
"""A Linux guest with rdma_rxe in QEMU and a Verbena daemon, joined by a tap in a network namespace.

    namespace: tap "rdma" (no address) -- guest's eth0, rxe0     and Verbena's verbena0 (af_packet)
               tap "side" 10.99.0.1    -- guest's eth1 10.99.0.2 for TCP side channels
"""

import os
import socket
import subprocess
import tempfile
import threading
import time

from namespaces import Namespace, NamespaceDaemon

VERBENA_IP, GUEST_IP = "192.168.77.1", "192.168.77.2"
VERBENA_IP6, GUEST_IP6 = "fd00:77::1", "fd00:77::2"
VERBENA_SIDE, GUEST_SIDE = "10.99.0.1", "10.99.0.2"
MTU = 4200
# On a busy machine: how the guest yields to others, and how much longer everything may take.
NICE = os.environ.get("VERBENA_GUEST_NICE", "0")
PATIENCE = float(os.environ.get("VERBENA_GUEST_PATIENCE", "1"))


class Guest:
    """The virtual machine; runs shell scripts in it."""

    def __init__(self, namespace, folder, elf, image, accelerator):
        self.folder = folder
        self._console = os.path.join(folder, "console")
        control = os.path.join(folder, "control")
        command = [
            "nice", "-n", NICE, "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display",
            "none", "-M", "q35",
            *(word for name in accelerator.split(":") for word in ("-accel", name)), "-cpu", "max", "-smp", "1", "-m", "640",
            "-kernel", elf, "-initrd", image, "-append",
            "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr nopti "
            f"random.trust_cpu=on no_timer_check lab.ip={GUEST_IP}/24 lab.ip6={GUEST_IP6}/64 lab.mtu={MTU} "
            f"lab.side={GUEST_SIDE}/24",
            "-serial", f"file:{self._console}", "-serial", f"unix:{control},server=on,wait=off",
            "-virtfs", f"local,path={folder},mount_tag=lab,security_model=none,id=lab",
            "-device", "virtio-rng-pci"]
        for i, tap in enumerate(("rdma", "side")):
            command += ["-netdev", f"tap,id=n{i},ifname={tap},script=no,downscript=no", "-device",
                        f"virtio-net-pci,netdev=n{i},mac=52:54:00:00:00:{i + 2:02x},csum=off,"
                        "guest_csum=off,gso=off,host_tso4=off,host_tso6=off,guest_tso4=off,"
                        "guest_tso6=off,host_ufo=off,guest_ufo=off,romfile="]
        self._started = time.monotonic()
        with open(os.path.join(folder, "qemu.log"), "wb") as log:
            self._process = subprocess.Popen(namespace.wrap(*command), stdin=subprocess.DEVNULL,
                                             stdout=log, stderr=subprocess.STDOUT)
        self._count = 0
        self._done = {}
        self._ready = False
        self._changed = threading.Condition()
        try:
            self._socket = self._connect(control)
            threading.Thread(target=self._read, daemon=True).start()
            with self._changed:
                # A kernel that gives up ends QEMU.
                self._changed.wait_for(lambda: self._ready or self._process.poll() is not None,
                                       180 * PATIENCE)
                if not self._ready:
                    raise RuntimeError("the guest does not come up:\n" + self.console())
        except BaseException:
            self.close()
            raise
        self.boot_seconds = time.monotonic() - self._started

    def _connect(self, path):
        end = time.monotonic() + 20
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(path)
                return connection
            except OSError as error:
                connection.close()
                if self._process.poll() is not None or time.monotonic() > end:
                    with open(os.path.join(self.folder, "qemu.log"), errors="replace",
                              encoding="utf-8") as log:
                        raise RuntimeError("QEMU did not start: " + log.read()) from error
                time.sleep(0.02)

    def _read(self):
        try:
            for line in self._socket.makefile(errors="replace"):
                words = line.split()
                with self._changed:
                    if words[:1] == ["READY"]:
                        self._ready = True
                    elif words[:1] == ["DONE"] and len(words) == 3:
                        self._done[words[1]] = int(words[2])
                    self._changed.notify_all()
        except OSError:  # QEMU ended.
            pass
        self._process.wait()
        with self._changed:
            self._changed.notify_all()

    def console(self):
        with open(self._console, errors="replace", encoding="utf-8") as file:
            return file.read()[-4000:]

    def start(self, script):
        """Starts a job; its name."""
        self._count += 1
        name = f"job{self._count}"
        with open(os.path.join(self.folder, name + ".sh"), "w", encoding="utf-8") as file:
            file.write(script + "\n")
        self._socket.sendall((name + "\n").encode())
        return name

    def wait(self, name, limit=60.0):
        """(status, output); status None: not done in time."""
        with self._changed:
            done = self._changed.wait_for(lambda: name in self._done, limit * PATIENCE)
        path = os.path.join(self.folder, name + ".out")
        text = ""
        if os.path.exists(path):
            with open(path, errors="replace", encoding="utf-8") as file:
                text = file.read()
        return (self._done[name] if done else None), text

    def run(self, script, limit=60.0):
        return self.wait(self.start(script), limit)

    def wait_listening(self, port, limit=30):
        """Waits until somebody in the guest listens on the TCP port."""
        script = (f"i=0; while ! grep -qi ':{port:04X} .*:0000 0A' /proc/net/tcp /proc/net/tcp6; do "
                  f"i=$((i+1)); [ $i -gt {limit * 20} ] && exit 1; sleep 0.05; done")
        return self.run(script, limit + 20)[0] == 0

    def close(self):
        self._process.kill()
        self._process.wait()


class Lab:
    """Namespace, guest and daemon; use with `with`."""

    def __init__(self, elf, image, accelerator="tcg"):
        self._cleanup = []
        try:
            self.namespace = Namespace()
            self._cleanup.append(self.namespace.close)
            for tap, mtu in (("rdma", MTU), ("side", 1500)):
                self.namespace.ip("tuntap", "add", "dev", tap, "mode", "tap")
                self.namespace.sysctl(f"net/ipv6/conf/{tap}/disable_ipv6", 1)
                self.namespace.ip("link", "set", tap, "mtu", mtu, "up")
            self.namespace.add_address("side", VERBENA_SIDE + "/24")
            self.folder = tempfile.mkdtemp(prefix="vinterop.", dir="/tmp")
            self.guest = Guest(self.namespace, self.folder, elf, image, accelerator)
            self._cleanup.append(self.guest.close)
            self.daemon = NamespaceDaemon(
                self.namespace,
                ("--port", "verbena0=af_packet:rdma", "--address", f"verbena0={VERBENA_IP}/24",
                 "--address", f"verbena0={VERBENA_IP6}/64"))
            self._cleanup.append(self.daemon.close)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        while self._cleanup:
            self._cleanup.pop()()
