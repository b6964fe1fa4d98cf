# SPDX-License-Identifier: Apache-2.0
"""Stock programs of libfabric: fi_info and fi_pingpong with each kind of endpoint of its verbs
provider. What the API itself does is tested in tests/libfabric."""

import os
import re
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import ADDRESS, FULL, AppTestCase, free_port


class Libfabric(AppTestCase):

    def test_every_kind_of_endpoint_is_found(self):
        status, output = self.daemon.run("fi_info", "-p", "verbs")
        self.assertEqual(status, 0, output)
        for domain, kind in (("verbena0", "FI_EP_MSG"), ("verbena0-dgram", "FI_EP_DGRAM")):
            self.assertRegex(output, rf"domain: {domain}\n +version: [0-9.]+\n +type: {kind}")
        for provider in ("verbs;ofi_rxm", "verbs;ofi_rxd"):
            self.assertIn(f"provider: {provider}", output)

    def test_an_address_chooses_the_nic(self):
        status, output = self.daemon.run("fi_info", "-p", "verbs", "-t", "FI_EP_MSG", "-s",
                                         "127.88.0.2")
        self.assertEqual(status, 0, output)
        self.assertIn("domain: verbena1", output)
        self.assertNotIn("domain: verbena0", output)

    # When the peer's disconnection is there before a program was scheduled to look at its last
    # completion, ofi_rxm drops the latter: fi_pingpong then waits for ever, or ends with ECANCELED,
    # behind its last result.
    def results_of_rxm(self, pair, row, rows):
        for program in pair:
            end = time.monotonic() + 40
            while len(re.findall(row, program.output)) < rows and time.monotonic() < end:
                time.sleep(0.02)
        end = time.monotonic() + 3
        while any(program.running() for program in pair) and time.monotonic() < end:
            time.sleep(0.02)
        for program in pair:
            if not program.running():
                self.assertIn(program.wait(), (0, 125), program.describe())
            program.close()
        return [program.output for program in pair]

    # -c: each side checks what it receives.
    def pingpong(self, provider, endpoint, rows, *options):
        with self.subTest(provider=provider, endpoint=endpoint, options=options):
            port = free_port()
            iterations = 1000 if FULL else 20
            common = ["fi_pingpong", "-p", provider, "-e", endpoint, "-I", iterations, "-c",
                      *options]
            pair = self.start_pair([*common, "-B", port], [*common, "-P", port, ADDRESS], port, 60)
            if "rxm" in provider:
                outputs = self.results_of_rxm(pair, rf"(?m)^\w+ +{iterations} .*", rows)
            else:
                outputs = self.finish(*pair)
            for output in outputs:
                lines = re.findall(rf"(?m)^\w+ +{iterations} +={iterations} ", output)
                self.assertEqual(len(lines), rows, output)

    def test_messages(self):
        self.pingpong("verbs", "msg", 6)

    def test_reliable_datagrams(self):
        self.pingpong("verbs;ofi_rxm", "rdm", 6)
        self.pingpong("verbs;ofi_rxm", "rdm", 6, "-m", "tagged")

    def test_datagrams(self):
        self.pingpong("verbs", "dgram", 4)

    def test_reliable_datagrams_over_unreliable_ones(self):
        self.pingpong("verbs;ofi_rxd", "rdm", 1, "-S", 64)
        self.pingpong("verbs;ofi_rxd", "rdm", 1, "-S", 65536)


if __name__ == "__main__":
    verbena_testing.main()
