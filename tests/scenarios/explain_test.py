# SPDX-License-Identifier: Apache-2.0
"""Ten failures of the library, chosen at random: `verbena explain` names the injected cause.

The cause is what the scenario's file says under [[expect.explain]]; the seed is printed, and
VERBENA_TEST_SEED repeats a choice.
"""

import glob
import os
import random
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "apps", "lib"))
import verbena_testing

HERE = os.path.dirname(os.path.abspath(__file__))
CHOSEN = 10


def with_cause():
    found = []
    for path in sorted(glob.glob(os.path.join(HERE, "*.toml"))):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if "[[expect.explain]]" in text and "mentions" in text and "rdma_cm" not in text:
            found.append(path)
    return found


class Explained(unittest.TestCase):

    def test_explain_names_the_cause_of_ten_random_failures(self):
        seed = int(os.environ.get("VERBENA_TEST_SEED", time.time_ns() % 1_000_000))
        print(f"seed {seed}: VERBENA_TEST_SEED={seed} repeats it", file=sys.stderr)
        chosen = random.Random(seed).sample(with_cause(), CHOSEN)
        for path in chosen:
            with self.subTest(scenario=os.path.basename(path), seed=seed):
                status, output = verbena_testing.run(
                    [verbena_testing.verbena_command(), "scenario", "run", "--verbose", path],
                    limit=200)
                self.assertIn("explain says", output)
                self.assertNotIn("explain does not say", output)
                self.assertEqual(status, 0, output)


if __name__ == "__main__":
    verbena_testing.main()
