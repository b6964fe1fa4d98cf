# SPDX-License-Identifier: Apache-2.0
"""What a daemon holds and does: state for people when something failed, counts to find leaks."""

import glob
import json
import os
import re
import shutil
import socket
import struct
import subprocess

OBJECTS = ("context", "pd", "mr", "mw", "dm", "cq", "qp", "srq", "ah", "xrcd", "flow", "cm_id")


def ask(path, request, limit=5.0):
    """The reply of the daemon at socket `path` (docs/CONTROL.md) as text; raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(limit)
        connection.connect(path)
        connection.send(struct.pack("<II", 0x4E425256, 2))
        connection.send(json.dumps(request).encode())
        text = b""
        while True:
            piece = connection.recv(1 << 20)
            if not piece:
                raise OSError("the daemon closed the connection")
            text += piece[1:]
            if piece[:1] == b"L":
                return text.decode(errors="replace")


def _read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        return f"({error})"


def stacks(pid, limit=30):
    """What each thread of a process does: with gdb its stack, else what the kernel tells."""
    parts = [f"--- process {pid}: {_read(f'/proc/{pid}/cmdline').replace(chr(0), ' ')}"]
    for task in sorted(glob.glob(f"/proc/{pid}/task/*")):
        fields = _read(task + "/stat").rsplit(")", 1)[-1].split()
        parts.append(f"thread {os.path.basename(task)} {_read(task + '/comm').strip()}: state "
                     f"{fields[0] if fields else '?'}, in {_read(task + '/wchan') or '?'}, syscall "
                     f"{_read(task + '/syscall').strip()}")
    if shutil.which("gdb"):
        try:
            done = subprocess.run(
                ["gdb", "-p", str(pid), "-batch", "-nx", "-ex", "set pagination off", "-ex",
                 "thread apply all bt 25"], timeout=limit, text=True, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                errors="replace")
            parts.append(re.sub(r"(?m)^\[New LWP.*\n|^warning:.*\n", "", done.stdout))
        except subprocess.TimeoutExpired:
            parts.append("(gdb did not end)")
    return "\n".join(parts)


def state(daemon, programs=()):
    """Everything about a daemon and the processes of `programs`, for a report."""
    parts = []
    path = os.path.join(daemon.folder, "verbena", "t.sock")
    requests = [("status", {"op": "status"}), ("counters", {"op": "counters"}),
                ("faults", {"op": "fault_list"})]
    requests += [(f"list {what}", {"op": "list", "what": what}) for what in OBJECTS]
    requests.append(("dump", {"op": "dump"}))
    for name, request in requests:
        try:
            text = ask(path, request)
        except OSError as error:
            text = f"no answer: {error}"
        parts.append(f"--- {name}\n{text[:20000]}")
    for log in glob.glob(os.path.join(daemon.folder, "verbena", "*.log")):
        parts.append(f"--- {os.path.basename(log)}\n{_read(log)[-10000:]}")
    for pid in daemon.pids():
        parts.append(stacks(pid))
    for program in programs:
        for pid in group(program.pid):
            parts.append(stacks(pid))
    return "\n".join(parts)


def group(leader):
    """Processes of the session that `leader` leads, with their threads' states readable."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _read(f"/proc/{entry}/stat").rsplit(")", 1)[-1].split()
            if len(fields) > 3 and fields[3] == str(leader) and fields[0] not in "ZX":
                found.append(int(entry))
    return found


def descriptors(pid):
    """{kind: number} of open descriptors: memfds, sockets and pipes by kind, files by path."""
    counts = {}
    for entry in glob.glob(f"/proc/{pid}/fd/*"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        kind = re.sub(r":?\[?\d+\]?", "", target) if not target.startswith("/dev") else target
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def memory_kib(pid):
    """Resident memory that is the process's own (without files)."""
    text = _read(f"/proc/{pid}/status")
    found = dict(re.findall(r"(?m)^(RssAnon|RssShmem):\s+(\d+) kB", text))
    return sum(int(value) for value in found.values())


def anonymous_kib(pid):
    """Resident memory of heap and stacks. Not that of files, memfds (DPDK's packets) and of mappings
    of 32 MiB and more: tables of a fixed size, whose keys are used one after the other, so that
    their pages are touched for the first time long after the start."""
    total = 0
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", _read(f"/proc/{pid}/smaps")):
        size = re.search(r"(?m)^Size:\s+(\d+) kB", part)
        resident = re.search(r"(?m)^Anonymous:\s+(\d+) kB", part)
        if size and resident and int(size.group(1)) < 32768:
            total += int(resident.group(1))
    return total


def mapped_memfds(pid):
    """{name: number} of mapped memfds: rings and pages of applications."""
    counts = {}
    for name in re.findall(r"(?m)/memfd:([\w.-]+)", _read(f"/proc/{pid}/maps")):
        counts[name] = counts.get(name, 0) + 1
    return counts


def daemons(folder):
    """Processes of verbenad whose run folder lies in `folder`."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and "verbenad" in _read(f"/proc/{entry}/comm") and (
                f"XDG_RUNTIME_DIR={folder}\0" in _read(f"/proc/{entry}/environ")):
            found.add(int(entry))
    return found


def shared_files():
    """Files of /dev/shm and of /tmp/dpdk that look like ours or DPDK's."""
    return {path for pattern in ("/dev/shm/*", "/tmp/dpdk/*", "/var/run/dpdk/*")
            for path in glob.glob(pattern) if re.search("verbena|rte|dpdk", path)}


def objects(daemon):
    """{kind: number of objects of all programs}; raises OSError."""
    path = os.path.join(daemon.folder, "verbena", "t.sock")
    return {what: len(json.loads(ask(path, {"op": "list", "what": what}))["items"])
            for what in OBJECTS}
