#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""cost.py [ROUNDS]: what the lab page costs the message rate of ib_write_bw -s 8 -D 3.

Rounds of: no lab; lab without a page; a page's feed that is read (what the engine pays); a page in
chromium (with what the browser takes of the processors). Interleaved, since other work on the
machine changes; medians and scatter are printed. $VERBENA_BIN: the verbena command.
"""

import http.client
import os
import re
import statistics
import sys
import threading
from urllib.parse import urlsplit

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "apps", "lib")]

import verbena_testing as vt  # noqa: E402
from webdriver import Browser  # noqa: E402


def message_rate(daemon):
    """Millions of messages per second."""
    port = vt.free_port()
    options = ["-x", "1", "-F", "-s", "8", "-D", "3", "-p", port]
    server = daemon.program("ib_write_bw", "-d", "verbena0", *options)
    try:
        assert server.wait_for("Waiting for client", 30), server.describe()
        status, output = daemon.run("ib_write_bw", "-d", "verbena1", *options, vt.ADDRESS)
        assert status == 0, output
        server.wait()
        return float(re.search(r"^\s*8\s+\d+\s+\S+\s+\S+\s+(\S+)\s*$", output, re.MULTILINE).group(1))
    finally:
        server.close()


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
        except (OSError, ValueError, AttributeError):
            pass

    def close(self):
        self._connection.sock.shutdown(2)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rates = {}
    with vt.Daemon() as daemon:
        def measure(name):
            rates.setdefault(name, []).append(message_rate(daemon))
        for _ in range(rounds):
            measure("no lab")
            lab = vt.Program([daemon.verbena, "lab", "--no-open"], 300, environment=daemon.environment)
            try:
                assert lab.wait_for(r"http://\S+/", 60), lab.describe()
                url = re.search(r"http://\S+/", lab.output).group(0)
                measure("no page")
                reader = Reader(url)
                measure("feed read")
                reader.close()
                if "--no-browser" not in sys.argv:
                    with Browser() as browser:
                        browser.open(url)
                        browser.wait("document.querySelector('#status.live')", "the feed")
                        measure("chromium")
            finally:
                lab.signal(2)
                lab.wait()
                lab.close()
    base = statistics.median(rates["no lab"])
    for name, each in rates.items():
        middle = statistics.median(each)
        print(f"{name:10} {middle:.3f} Mpps ({min(each):.3f} to {max(each):.3f})  "
              f"{100 * (middle / base - 1):+.1f} %  {' '.join(f'{r:.3f}' for r in each)}", flush=True)


main()
