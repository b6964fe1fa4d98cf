# SPDX-License-Identifier: Apache-2.0
"""Every scenario of the library, each over an instance of its own.

VERBENA_SCENARIO_REPEAT=20: so often, as outside of CI.
"""

import glob
import os
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "apps", "lib"))
import verbena_testing

HERE = os.path.dirname(os.path.abspath(__file__))
FILES = sorted(glob.glob(os.path.join(HERE, "*.toml")))
REPEAT = os.environ.get("VERBENA_SCENARIO_REPEAT", "1")
# How many at a time: most of them wait for timers, not for a CPU.
AT_ONCE = int(os.environ.get("VERBENA_SCENARIO_JOBS", "3"))


def shard(files):
    """Bazel's part of them."""
    total = int(os.environ.get("TEST_TOTAL_SHARDS", "1"))
    index = int(os.environ.get("TEST_SHARD_INDEX", "0"))
    if os.environ.get("TEST_SHARD_STATUS_FILE"):
        with open(os.environ["TEST_SHARD_STATUS_FILE"], "w", encoding="ascii"):
            pass
    return files[index::total]


class Library(unittest.TestCase):

    def test_all_scenarios_come_out_as_expected(self):
        waiting = shard(FILES)
        running = {}
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                path = waiting.pop(0)
                running[path] = verbena_testing.Program(
                    [verbena_testing.verbena_command(), "scenario", "run", path, "--repeat",
                     REPEAT], limit=200 * int(REPEAT))
            path = next(iter(running))
            program = running.pop(path)
            status = program.wait()
            with self.subTest(scenario=os.path.basename(path)):
                self.assertEqual(status, 0, program.describe())
            program.close()

    def test_the_library_covers_what_it_promises(self):
        names = {os.path.basename(path)[:-5] for path in FILES}
        self.assertGreaterEqual(len(names), 20)
        for name in ("lost_ack", "lost_last_packet", "lost_read_response_first",
                     "lost_read_response_middle", "lost_read_response_last", "corrupted_icrc",
                     "ghost_ack", "duplicate_atomic", "peer_killed", "peer_stopped",
                     "one_way_cut", "qp_error", "remote_access_error", "rnr_storm",
                     "retry_exhaustion", "link_flap_cm", "lost_rep", "stale_connection",
                     "cq_overrun", "device_removal", "slow_receiver"):
            self.assertIn(name, names)

    def test_every_scenario_cites_a_source(self):
        for path in FILES:
            with open(path, encoding="utf-8") as file:
                self.assertIn("cites = [\n  \"", file.read(), path)


if __name__ == "__main__":
    verbena_testing.main()
