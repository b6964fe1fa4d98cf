# SPDX-License-Identifier: Apache-2.0
"""Stock qperf: with rdma_cm (-cm1), and without, where it addresses its peer by LID.

VERBENA_TEST_FULL: every test of qperf over RC, UC and UD in both ways.
"""

import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import ADDRESS, FULL, AppTestCase, free_port, listening

# Each takes a second.
CM_TESTS = ("rc_lat", "rc_bw", "rc_rdma_write_poll_lat", "ver_rc_compare_swap")
LID_TESTS = ("rc_bi_bw", "rc_rdma_read_bw", "rc_rdma_write_lat", "ver_rc_fetch_add", "ud_lat",
             "ud_bw", "uc_lat")
if FULL:
    RC_TESTS = ("rc_bi_bw", "rc_bw", "rc_lat", "rc_rdma_read_bw", "rc_rdma_read_lat",
                "rc_rdma_write_bw", "rc_rdma_write_lat", "rc_rdma_write_poll_lat",
                "rc_compare_swap_mr", "rc_fetch_add_mr", "ver_rc_compare_swap",
                "ver_rc_fetch_add")
    CM_TESTS = RC_TESTS
    LID_TESTS = RC_TESTS + ("ud_bi_bw", "ud_bw", "ud_lat", "uc_bi_bw", "uc_bw", "uc_lat",
                            "uc_rdma_write_bw", "uc_rdma_write_lat", "uc_rdma_write_poll_lat")


class Qperf(AppTestCase):

    def start_server(self):
        port = free_port()
        server = self.daemon.program("qperf", "-lp", port, limit=180)
        while not listening(port) and server.running():
            time.sleep(0.01)
        return server, ["qperf", "-lp", port, "-t", 1]

    def run_tests(self, tests, *options):
        server, command = self.start_server()
        client = self.daemon.program(*command, ADDRESS, *options, *tests, limit=30 + 5 * len(tests))
        self.assertEqual(client.wait(), 0, client.describe() + server.describe())
        for test in tests:
            self.assertRegex(client.output, rf"(?m)^{test}:\n +(bw|send_bw|latency|msg_rate) += +[1-9]")
        self.assertNotRegex(client.output, "(?i)fail|error|unexpected")
        client.close()
        server.close()

    def test_tests_over_rdma_cm(self):
        self.run_tests(CM_TESTS, "-cm1")

    def test_tests_that_know_only_lids(self):
        self.run_tests(LID_TESTS)

    def test_lids_lead_to_another_nic(self):
        self.run_tests(("ver_rc_compare_swap", "ud_lat"), "-li", "verbena1", "-ri", "verbena0")

    # qperf's server tells its port before it listens on it.
    def test_the_server_is_never_too_late_to_listen(self):
        server, command = self.start_server()
        for _ in range(50 if FULL else 3):
            status, output = self.daemon.run(*command, ADDRESS, "-cm1", "-n", 10, "rc_rdma_read_bw",
                                             limit=20)
            self.assertEqual(status, 0, output + server.describe())
        server.close()


if __name__ == "__main__":
    verbena_testing.main()
