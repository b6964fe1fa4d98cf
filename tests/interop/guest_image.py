# SPDX-License-Identifier: Apache-2.0
"""The guest of the interoperability tests: Debian's kernel and an initramfs made of Debian packages.

Packages are fetched with `apt-get download` and unpacked in a work folder; nothing is installed.
Needs apt, dpkg, readelf, and zstd, lz4 or xz by the kernel's compression.
"""

import glob
import lzma
import os
import re
import shutil
import struct
import subprocess
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))

PACKAGES = ["busybox-static", "ibverbs-utils", "rdmacm-utils", "perftest", "iproute2",
            "ibverbs-providers", "libstdc++6"]
PROGRAMS = ["ibv_devinfo", "ibv_rc_pingpong", "rping", "ucmatose", "udaddy", "mckey", "ib_send_bw", "ib_send_lat", "ib_write_bw",
            "ib_write_lat", "ib_read_bw", "ib_read_lat", "ib_atomic_bw", "ib_atomic_lat", "ip",
            "rdma"]
PROVIDER = "librxe-rdmav34.so"
MODULES = ["virtio_pci", "virtio_net", "9p", "9pnet_virtio", "ib_uverbs", "rdma_cm", "rdma_ucm",
           "crc32_generic", "rdma_rxe", "virtio_console"]


def output(*command, **options):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True,
                          **options).stdout


def newest_kernel():
    """Version of the kernel that linux-image-amd64 stands for: 6.1.0-57-amd64."""
    match = re.search(r"Depends: linux-image-(\S+)", output("apt-cache", "depends",
                                                            "linux-image-amd64"))
    if not match:
        raise RuntimeError("apt knows no linux-image-amd64: apt-get update")
    return match.group(1)


def unpack(work, tag, packages):
    """Folder with the packages' files."""
    root, debs = os.path.join(work, f"root-{tag}"), os.path.join(work, f"debs-{tag}")
    if os.path.exists(os.path.join(root, ".complete")):
        return root
    for folder in (root, debs):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    # apt's own user for downloads may not enter the folder.
    subprocess.run(["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *packages],
                   cwd=debs, check=True, stdout=subprocess.DEVNULL)
    for deb in sorted(glob.glob(debs + "/*.deb")):
        subprocess.run(["dpkg", "-x", deb, root], check=True)
    with open(os.path.join(root, ".complete"), "w", encoding="ascii"):
        pass
    return root


def dependencies(packages):
    lines = output("apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests",
                   "--no-conflicts", "--no-breaks", "--no-replaces", "--no-enhances", *packages)
    names = {line.strip() for line in lines.splitlines() if re.match(r"[a-z0-9]", line)}
    skip = ("debconf", "cdebconf", "adduser", "passwd", "libpam", "dpkg", "install-info",
            "libelogind", "libnewt", "libslang", "libtextwrap", "libdebian-installer",
            "libsemanage", "libsepol", "pci.ids", "readline-common", "tar")
    return sorted(name for name in names if not name.startswith(skip))


def kernel_elf(image):
    """The ELF file inside a bzImage, which QEMU boots without unpacking (PVH)."""
    with open(image, "rb") as file:
        data = file.read()
    setup = ((data[0x1f1] or 4) + 1) * 512
    offset, length = struct.unpack_from("<II", data, 0x248)
    packed = data[setup + offset:setup + offset + length]
    if packed.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(packed)
    if packed.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(31).decompress(packed)
    tool = {b"\x28\xb5\x2f\xfd": "zstd", b"\x02\x21\x4c\x18": "lz4"}.get(packed[:4])
    if tool is None:
        raise RuntimeError(f"unknown compression of {image}")
    return subprocess.run([tool, "-dcq"], input=packed, stdout=subprocess.PIPE, check=False).stdout


class Archive:
    """cpio, format newc."""

    def __init__(self, path):
        self._file = open(path, "wb")  # pylint: disable=consider-using-with
        self._inode = 0
        self._names = set()

    def _entry(self, name, mode, data):
        self._inode += 1
        raw = name.encode() + b"\0"
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        record = ("070701" + "".join(f"{field:08X}" for field in fields)).encode() + raw
        record += b"\0" * (-len(record) % 4) + data
        self._file.write(record + b"\0" * (-len(record) % 4))

    def folder(self, name):
        parts = name.strip("/").split("/")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            if path and path not in self._names:
                self._names.add(path)
                self._entry(path, 0o40755, b"")

    def _add(self, name, mode, data):
        name = name.strip("/")
        if name in self._names:
            return
        self.folder(os.path.dirname(name))
        self._names.add(name)
        self._entry(name, mode, data)

    def file(self, name, data, mode=0o755):
        self._add(name, 0o100000 | mode, data)

    def link(self, name, target):
        self._add(name, 0o120777, target.encode())

    def close(self):
        self._entry("TRAILER!!!", 0, b"")
        self._file.write(b"\0" * (-self._file.tell() % 512))
        self._file.close()


def read(path):
    with open(path, "rb") as file:
        data = file.read()
    return lzma.decompress(data) if path.endswith(".xz") else data


def needed(path):
    return re.findall(r"\(NEEDED\).*\[(.*?)\]", output("readelf", "-d", path))


def modules(folder):
    """(name, contents) of MODULES and what they depend on, in loading order."""
    paths = {re.sub(r"\.ko.*", "", os.path.basename(path)).replace("-", "_"): path
             for path in glob.glob(folder + "/kernel/**/*.ko*", recursive=True)}
    loaded, order = set(), []

    def visit(name):
        name = name.replace("-", "_")
        if name in loaded or name not in paths:  # Not there: built in.
            return
        loaded.add(name)
        data = read(paths[name])
        match = re.search(rb"\0depends=([^\0]*)\0", data)
        for other in (match.group(1).decode().split(",") if match else []):
            visit(other)
        order.append((name, data))

    for name in MODULES:
        visit(name)
    if "rdma_rxe" not in loaded:
        raise RuntimeError(f"{folder} has no rdma_rxe (the cloud flavour has none)")
    return order


def build(work, kernel, peer):
    """Makes kernel and initramfs in `work`; gives their paths. `peer`: the rc_peer program."""
    os.makedirs(work, exist_ok=True)
    user = unpack(work, "user", dependencies(PACKAGES))
    root = unpack(work, kernel, ["linux-image-" + kernel])
    elf = os.path.join(work, f"vmlinux-{kernel}")
    if not os.path.exists(elf):
        data = kernel_elf(glob.glob(root + "/boot/vmlinuz-*")[0])
        with open(f"{elf}.{os.getpid()}", "wb") as file:
            file.write(data)
        os.replace(file.name, elf)
    version = os.path.basename(glob.glob(root + "/lib/modules/*")[0])
    files = {}
    for folder, _, names in os.walk(user):
        if "/share/" in folder:
            continue
        for name in names:
            files.setdefault(name, os.path.join(folder, name))

    image = os.path.join(work, f"initrd-{kernel}.cpio")
    new = f"{image}.{os.getpid()}"  # Others may be at it.
    archive = Archive(new)
    for folder in ("proc", "sys", "dev", "tmp", "lab", "run", "root", "sbin", "usr/sbin", "var/run"):
        archive.folder(folder)
    busybox = files["busybox"]
    archive.file("bin/busybox", read(busybox))
    todo = ["libgcc_s.so.1"]  # Loaded by pthread_exit.
    for program in PROGRAMS:
        path = os.path.realpath(files[program])
        archive.file("usr/bin/" + program, read(path))
        todo += needed(path)
    archive.file("usr/bin/rc_peer", read(peer))
    todo += needed(peer)
    archive.file("usr/lib/x86_64-linux-gnu/libibverbs/" + PROVIDER,
                 read(os.path.realpath(files[PROVIDER])))
    todo += needed(files[PROVIDER])
    archive.file("etc/libibverbs.d/rxe.driver", b"driver rxe\n", 0o644)
    done = set()
    while todo:
        library = todo.pop()
        if library in done:
            continue
        done.add(library)
        path = os.path.realpath(files[library])
        folder = "lib64/" if library.startswith("ld-linux") else "lib/x86_64-linux-gnu/"
        archive.file(folder + library, read(path))
        todo += needed(path)
    for applet in output(busybox, "--list").split():
        archive.link("bin/" + applet, "busybox")
    for i, (name, data) in enumerate(modules(f"{root}/lib/modules/{version}")):
        archive.file(f"mod/{i:02d}-{name}.ko", data, 0o644)
    archive.file("init", read(os.path.join(HERE, "guest_init.sh")))
    archive.file("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", 0o644)
    archive.file("etc/group", b"root:x:0:\n", 0o644)
    archive.file("etc/hosts", b"127.0.0.1 localhost\n", 0o644)
    archive.close()
    os.replace(new, image)
    return elf, image
