#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""cost.py [ROUNDS]: what the lab page costs the message rate of ib_write_bw -s 8 -D 3.

Rounds of: no lab; lab without a page; a page's feed that is read (what the engine pays); a page in
chromium (with what the browser takes of the processors). Interleaved, since other work on the
machine changes; medians and scatter are printed. On a busy machine the time that the
engine computes per message says more than the rate. $VERBENA_BIN: the verbena command.
"""

import http.client
import os
import re
import statistics
import sys
import threading
import time
from urllib.parse import urlsplit

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "apps", "lib")]

import verbena_testing as vt  # noqa: E402
from webdriver import Browser  # noqa: E402


# Threads of the engine that move no packets: they serve `verbena` and the lab.
CONTROL = ("verbena-user", "verbenad", "failures")


def processor_ns(pid, which=lambda name: True):
    """Of the threads of a process that are called so: what they have computed."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/comm", encoding="ascii") as file:
                name = file.read().strip()
            with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0]) if which(name) else 0
        except FileNotFoundError:
            pass  # It has just ended.
    return total


def measure_once(daemon, lab):
    """What happens in one run of ib_write_bw: see FIGURES."""
    engine = daemon.engine()

    def computed():
        return [processor_ns(engine, lambda name: name not in CONTROL),
                processor_ns(engine, lambda name: name in CONTROL),
                processor_ns(lab.pid) if lab else 0]
    port = vt.free_port()
    options = ["-x", "1", "-F", "-s", "8", "-D", "3", "-p", port]
    server = daemon.program("ib_write_bw", "-d", "verbena0", *options)
    try:
        assert server.wait_for("Waiting for client", 30), server.describe()
        before, began = computed(), time.monotonic()
        status, output = daemon.run("ib_write_bw", "-d", "verbena1", *options, vt.ADDRESS)
        assert status == 0, output
        server.wait()
        seconds = time.monotonic() - began
        packets, control, page = (after - then for after, then in zip(computed(), before))
        count, rate = re.search(r"^\s*8\s+(\d+)\s+\S+\s+\S+\s+(\S+)\s*$", output,
                                re.MULTILINE).groups()
        return (float(rate), packets / int(count), control / seconds / 1e7, page / seconds / 1e7)
    finally:
        server.close()


FIGURES = ("million messages/s", "ns of the engine's packet threads per message",
           "% of a CPU: the engine's control threads", "% of a CPU: verbena lab")


class Reader:
    """Reads a page's events and throws them away."""

    def __init__(self, url):
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port)
        self._connection.request("GET", parts.path + "events")
        self._answer = self._connection.getresponse()
        self.bytes = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            while data := self._answer.read1(65536):
                self.bytes += len(data)
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            pass

    def close(self):
        self._connection.sock.shutdown(2)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rates = {}
    with vt.Daemon() as daemon:
        def measure(name, lab=None):
            rates.setdefault(name, []).append(measure_once(daemon, lab))
        for _ in range(rounds):
            measure("no lab")
            lab = vt.Program([daemon.verbena, "lab", "--no-open"], 300, environment=daemon.environment)
            try:
                assert lab.wait_for(r"http://\S+/", 60), lab.describe()
                url = re.search(r"http://\S+/", lab.output).group(0)
                measure("no page", lab)
                reader = Reader(url)
                measure("feed read", lab)
                reader.close()
                if "--no-browser" not in sys.argv:
                    with Browser() as browser:
                        browser.open(url)
                        browser.wait("document.querySelector('#status.live')", "the feed")
                        measure("chromium", lab)
            finally:
                lab.signal(2)
                lab.wait()
                lab.close()
    for at, what in enumerate(FIGURES):
        base = statistics.median(each[at] for each in rates["no lab"])
        for name, pairs in rates.items():
            each = [pair[at] for pair in pairs]
            middle = statistics.median(each)
            print(f"{name:10} {middle:.4g} {what} ({min(each):.4g} to {max(each):.4g})  "
                  f"{100 * (middle / base - 1) if base else 0:+.1f} %  {' '.join(f'{r:.4g}' for r in each)}", flush=True)


main()
