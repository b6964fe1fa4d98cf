# SPDX-License-Identifier: Apache-2.0
"""Tests with stock programs: a private daemon, child processes with time limits, result files.

Every child runs in a session of its own with its output on a pseudo terminal (stock programs
block-buffer into pipes) and is killed with its whole group at its time limit.

A test file holds unittest cases and ends with `verbena_testing.main()`. The `verbena` command comes
from Bazel's runfiles, from $VERBENA_BIN or from bazel-bin of the current folder. $VERBENA_TEST_FULL
runs the long versions.
"""

import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import unittest
import xml.sax.saxutils

FULL = bool(os.environ.get("VERBENA_TEST_FULL"))
ADDRESS = "127.88.0.1"  # Of verbena0; TCP side channels reach it as well.


def verbena_command():
    for path in (
            os.environ.get("VERBENA_BIN"),
            os.path.join(os.environ.get("TEST_SRCDIR", ""),
                         os.environ.get("TEST_WORKSPACE", "verbena"), "tools/verbena"),
            "bazel-bin/tools/verbena"):
        if path and os.access(path, os.X_OK):
            return os.path.abspath(path)
    raise RuntimeError("no verbena command: run by Bazel or set VERBENA_BIN")


def clean_environment():
    """This process's environment without simulated devices of an outer run."""
    environment = dict(os.environ)
    for name in ("LD_PRELOAD", "IBV_DRIVERS", "VERBENA_SOCKET", "VERBENA_NAME"):
        environment.pop(name, None)
    environment["LC_ALL"] = "C"
    return environment


class Program:
    """A child process. `limit` in seconds, counted from the start."""

    def __init__(self, argv, limit=60.0, environment=None, folder=None, close_stdin=False,
                 pass_fds=()):
        self.argv = [str(argument) for argument in argv]
        self.deadline = time.monotonic() + limit
        self.timed_out = False
        self._chunks = []
        self._lock = threading.Lock()
        self._terminal, slave = pty.openpty()
        settings = termios.tcgetattr(slave)
        settings[1] &= ~termios.OPOST  # No carriage returns.
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", 'exec "$@" <&-', "sh"] + self.argv if close_stdin else self.argv,
                stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, start_new_session=True,
                pass_fds=pass_fds, cwd=folder, env=clean_environment() if environment is None else environment)
        finally:
            os.close(slave)
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while True:
            try:
                chunk = os.read(self._terminal, 65536)
            except OSError:
                return
            if not chunk:
                return
            with self._lock:
                self._chunks.append(chunk)

    @property
    def output(self):
        with self._lock:
            return b"".join(self._chunks).decode(errors="replace")

    def running(self):
        return self._process.poll() is None

    def signal(self, number):
        if self.running():
            os.kill(self.pid, number)

    def kill(self):
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait(self):
        """Exit status, 128 + signal, or None when it was killed at its time limit."""
        try:
            status = self._process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.timed_out = True
            self.kill()
            self._process.wait()
            status = None
        self._drain()
        if status is None:
            return None
        return status if status >= 0 else 128 - status

    def _drain(self):
        """Lets the reader take what is left, on a machine that lets it wait as well. A grandchild
        may hold the terminal open: then only what is there."""
        poll = select.poll()
        poll.register(self._terminal, select.POLLIN)
        end = time.monotonic() + 30
        while self._reader.is_alive() and time.monotonic() < end:
            self._reader.join(0.5)
            if not poll.poll(0):  # At its end it would hang up.
                return

    def wait_for(self, text, limit=20.0):
        """True once `text` (a regular expression) was printed."""
        end = min(self.deadline, time.monotonic() + limit)
        while True:
            ended = not self.running()
            if re.search(text, self.output):
                return True
            if ended or time.monotonic() > end:
                return False
            time.sleep(0.01)

    def close(self):
        self.kill()
        self._process.wait()
        self._reader.join(0.5)
        os.close(self._terminal)

    def describe(self):
        state = "killed at its time limit" if self.timed_out else f"status {self._process.poll()}"
        return f"$ {' '.join(self.argv)}\n[{state}]\n{self.output}"


def run(argv, limit=60.0, **options):
    """(status, output) of a program."""
    program = Program(argv, limit, **options)
    try:
        status = program.wait()
        return status, program.output
    finally:
        program.close()


def listening(port):
    suffix = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                for line in lines:
                    fields = line.split()
                    if len(fields) > 3 and fields[1].endswith(suffix) and fields[3] == "0A":
                        return True
        except OSError:
            pass
    return False


_used_ports = set()


def free_port():
    while True:
        port = random.randint(20000, 31999)
        if port not in _used_ports and not listening(port):
            _used_ports.add(port)
            return port


class Daemon:
    """A daemon of the test's own; use with `with`."""

    def __init__(self, nics=2, arguments=(), verbena=None, start=True):
        self.verbena = verbena or verbena_command()
        self.folder = tempfile.mkdtemp(prefix="vapp.", dir="/tmp")
        self.environment = clean_environment()
        self.environment.update(XDG_RUNTIME_DIR=self.folder, VERBENA_NAME="t")
        self._known = []
        if start:
            status, output = self.command("up", "--nics", nics, *arguments, limit=60)
            if status != 0:
                self.close()
                raise AssertionError(f"verbena up: status {status}\n{output}")
            self._known = self.processes()  # A daemon that hangs must be killed, too.

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            print(self.dump(), file=sys.stderr)
        self.close()

    def command(self, *arguments, limit=60.0):
        return run([self.verbena, *arguments], limit, environment=self.environment)

    def json(self, *arguments):
        status, output = self.command(*arguments, "--json")
        if status != 0:
            raise AssertionError(f"verbena {' '.join(arguments)} --json: {status}\n{output}")
        return json.loads(output)

    def program(self, *argv, limit=60.0, environment=None, **options):
        """`verbena run -- ARGV` as a Program."""
        merged = dict(self.environment)
        merged.update(environment or {})
        return Program([self.verbena, "run", "--", *argv], limit, environment=merged, **options)

    def run(self, *argv, limit=60.0, **options):
        program = self.program(*argv, limit=limit, **options)
        try:
            return program.wait(), program.output
        finally:
            program.close()

    def shell_environment(self):
        """Environment after `eval "$(verbena env)"`."""
        status, output = run(["/bin/sh", "-c", 'eval "$("$0" env)" && /usr/bin/env -0',
                              self.verbena], environment=self.environment)
        if status != 0:
            raise AssertionError(f"verbena env: {output}")
        return dict(entry.split("=", 1) for entry in output.split("\0") if "=" in entry)

    def processes(self):
        """Process ids of the daemon: the supervisor first."""
        pid = self.json("status")["pid"]
        while True:
            parent = _parent(pid)
            if parent is None or not _program(parent).endswith("/verbenad"):
                break
            pid = parent
        found = [pid]
        for known in found:
            for entry in os.listdir("/proc"):
                if entry.isdigit() and _parent(int(entry)) == known:
                    found.append(int(entry))
        return found

    def engine(self):
        processes = self.processes()
        if len(processes) < 2:
            raise AssertionError(f"no supervisor and engine process: {processes}")
        return processes[1]

    def counters(self):
        """{device: {name: value}}: port counters and hw_counters together."""
        answer = self.json("counters")
        result = {}
        for device, groups in answer.get("devices", answer).items():
            result[device] = {**groups.get("counters", {}), **groups.get("hw_counters", {})}
        return result

    def dump(self):
        parts = []
        for arguments in (("status",), ("counters",), ("list", "qp"), ("fault", "list")):
            status, output = self.command(*arguments, "--json", limit=5)
            parts.append(f"--- verbena {' '.join(arguments)} ({status})\n{output[-6000:]}")
        for folder, _, files in os.walk(self.folder):
            for name in files:
                if name.endswith(".log"):
                    with open(os.path.join(folder, name), errors="replace",
                              encoding="utf-8") as log:
                        parts.append(f"--- {name}\n{log.read()[-6000:]}")
        return "\n".join(parts)

    def close(self):
        try:
            processes = self.processes()
        except (AssertionError, ValueError, KeyError):
            processes = self._known
        self.command("down", limit=15)
        for pid in processes:
            if _program(pid).endswith("/verbenad"):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        shutil.rmtree(self.folder, ignore_errors=True)


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else int(fields[1])
    except (OSError, IndexError, ValueError):
        return None


def _program(pid):
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


class AppTestCase(unittest.TestCase):
    """One daemon for all cases of a class (nics: `nics`)."""

    nics = 2
    daemon = None

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(cls.nics)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.close()

    def finish(self, *programs):
        """Waits for all; fails with every output unless all end with 0."""
        statuses = [program.wait() for program in programs]
        texts = [program.describe() for program in programs]
        for program in programs:
            program.close()
        if any(status != 0 for status in statuses):
            self.fail("\n".join(texts) + "\n" + self.daemon.dump())
        return [text.split("\n", 2)[2] for text in texts]

    def start_pair(self, server, client, port, limit=60.0):
        """Starts both; the client when the server listens."""
        first = self.daemon.program(*server, limit=limit)
        end = time.monotonic() + 20
        while not listening(port):
            if not first.running() or time.monotonic() > end:
                first.kill()
                first.wait()
                text = first.describe()
                first.close()
                self.fail(f"the server does not listen on {port}\n{text}\n{self.daemon.dump()}")
            time.sleep(0.01)
        return first, self.daemon.program(*client, limit=limit)

    def pair(self, server, client, port, limit=60.0):
        """Runs server and client; their outputs."""
        return self.finish(*self.start_pair(server, client, port, limit))


class _Result(unittest.TextTestResult):
    """Remembers each case with its time for the XML file that Bazel reads."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.cases = []
        self._start = 0.0

    def startTest(self, test):
        super().startTest(test)
        self._start = time.monotonic()

    def _note(self, test, kind="", text=""):
        self.cases.append((test, time.monotonic() - self._start, kind, text))

    def addSuccess(self, test):
        super().addSuccess(test)
        self._note(test)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._note(test, "failure", self.failures[-1][1])

    def addError(self, test, err):
        super().addError(test, err)
        self._note(test, "error", self.errors[-1][1])

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note(subtest, "failure", self._exc_info_to_string(err, test))


def _write_xml(path, cases):
    def clean(text):
        return re.sub(r"[^\t\n\x20-\ud7ff]", "?", text)

    with open(path, "w", encoding="utf-8") as out:
        bad = sum(kind in ("failure", "error") for _, _, kind, _ in cases)
        out.write('<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n')
        out.write(f'<testsuite name="apps" tests="{len(cases)}" failures="{bad}">\n')
        for test, seconds, kind, text in cases:
            name = xml.sax.saxutils.quoteattr(clean(test.id().split(".", 1)[-1]))
            out.write(f'<testcase name={name} classname="apps" time="{seconds:.3f}">')
            if kind:
                body = xml.sax.saxutils.escape(clean(text[-20000:]))
                out.write(f'<{kind} message="{kind}">{body}</{kind}>')
            out.write("</testcase>\n")
        out.write("</testsuite>\n</testsuites>\n")


def main():
    """Runs the cases of the calling file; arguments select by name (-k)."""
    # Bazel's time limit: the daemons still have to be stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    program = unittest.main(
        module="__main__", exit=False,
        testRunner=unittest.TextTestRunner(verbosity=2, resultclass=_Result))
    path = os.environ.get("XML_OUTPUT_FILE")
    if path:
        _write_xml(path, program.result.cases)
    sys.exit(0 if program.result.wasSuccessful() else 1)
