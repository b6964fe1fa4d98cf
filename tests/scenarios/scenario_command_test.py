# SPDX-License-Identifier: Apache-2.0
"""`verbena scenario` itself: exit statuses, errors with line and field, limits, nothing left."""

import glob
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "apps", "lib"))
import verbena_testing
from verbena_testing import verbena_command

HEAD = 'title = "t"\ncites = ["a test"]\n'
PROGRAM = '[[program]]\nname = "p"\ncommand = "%s"\n'


class ScenarioCommand(unittest.TestCase):

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="vscn.", dir="/tmp")
        self.addCleanup(shutil.rmtree, self.folder, True)
        # Other scenarios may run at the same time; theirs are not ours.
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = self.folder
        self.addCleanup(lambda: os.environ.pop("TMPDIR") if before is None
                        else os.environ.update(TMPDIR=before))

    def write(self, text):
        path = os.path.join(self.folder, "s.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def scenario(self, text, *arguments, limit=60):
        return verbena_testing.run(
            [verbena_command(), "scenario", "run", self.write(text), *arguments], limit)

    def leftovers(self):
        return set(glob.glob(self.folder + "/verbena-scenario.*"))

    def test_what_is_as_expected_ends_with_0_and_leaves_nothing(self):
        before = self.leftovers()
        junit = os.path.join(self.folder, "out.xml")
        status, output = self.scenario(HEAD + PROGRAM % "ibv_devinfo -d verbena1" +
                                       '[[expect.output]]\nof = "p"\nmatches = "hca_id:.verbena1"\n',
                                       "--junit", junit)
        self.assertEqual(status, 0, output)
        self.assertIn("1 of 1 scenarios as expected", output)
        cases = list(xml.etree.ElementTree.parse(junit).iter("testcase"))
        self.assertEqual([case.get("name") for case in cases], ["s"])
        self.assertFalse(list(cases[0].iter("failure")))
        self.assertLessEqual(self.leftovers(), before)

    def test_what_is_not_as_expected_ends_with_1_and_says_what(self):
        junit = os.path.join(self.folder, "out.xml")
        status, output = self.scenario(HEAD + PROGRAM % "sh -c 'printf \\\"<a>&\\\"; exit 3'" +
                                       '[[expect.output]]\nof = "p"\nmatches = "^good$"\n',
                                       "--junit", junit)
        self.assertEqual(status, 1, output)
        self.assertIn("BAD  p ended with 3", output)
        self.assertIn("BAD  p did not print '^good$'", output)
        failure, = xml.etree.ElementTree.parse(junit).iter("failure")
        self.assertIn("p ended with 3", failure.get("message"))

    def test_errors_of_a_file_name_line_and_field(self):
        program = PROGRAM % "true"
        for text, message in (
                (HEAD + program + "[[rule]]\nfalt = 'drop'\n", "s.toml:7: falt: no such field"),
                (HEAD + program + "[[rule]]\nname = 'x'\n", "fault: is missing"),
                (HEAD + program + "[[action]]\ndo = 'kill'\nprogram = 'q'\n",
                 "program: no program has that name"),
                (HEAD + program + "[[action]]\ndo = 'dance'\n", "do: there are kill, stop"),
                (HEAD + program + "when = { line = 'x' }\n", "line: line and of come together"),
                (HEAD + program + "when = { exit = 'q' }\n", "no program is named 'q'"),
                (HEAD + program + "[expect.exit]\np = 'good'\n", "p: a status, or failure"),
                (HEAD + program + "[[expect.output]]\nof = 'p'\nmatches = '('\n",
                 "matches: not a regular expression"),
                (HEAD + program + "[[expect.counter]]\ndev='d'\nname='n'\nmin = -1\n",
                 "min: -1 is not between"),
                (HEAD + PROGRAM % "{nothing}", "nothing stands for '{nothing}'"),
                (HEAD + "limit_s = 'x'\n" + program, "limit_s: a number"),
                (HEAD, "program: there is none"),
                ("title = 't'\n" + program, "cites: say what this is about"),
                ("title = \n", "s.toml:1:"),
        ):
            status, output = self.scenario(text)
            self.assertEqual(status, 2, output)
            self.assertIn(message, output)

    def test_a_program_that_is_not_there_ends_with_2_before_anything_starts(self):
        for command in ("no_such_program_here", "/no/such/program", self.folder):
            status, output = self.scenario(HEAD + PROGRAM % command)
            self.assertEqual(status, 2, output)
            self.assertIn("program p: " + command, output)
        self.assertFalse(self.leftovers())

    def test_a_program_that_hangs_is_ended_at_the_limit(self):
        start = time.monotonic()
        status, output = self.scenario(HEAD + "limit_s = 1\n" +
                                       PROGRAM % "sh -c 'sleep 61 & setsid sleep 62; sleep 63'")
        self.assertEqual(status, 1, output)
        self.assertIn("p still runs after 1000 ms", output)
        self.assertLess(time.monotonic() - start, 45)
        for pid in os.listdir("/proc"):
            if not pid.isdigit():
                continue
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            self.assertNotIn(words[:2], ([b"sleep", b"61"], [b"sleep", b"62"], [b"sleep", b"63"]))

    def test_ctrl_c_ends_everything(self):
        before = self.leftovers()
        program = verbena_testing.Program(
            [verbena_command(), "scenario", "run",
             self.write(HEAD + PROGRAM % "sh -c 'echo up; sleep 64'")], limit=60)
        end = time.monotonic() + 30
        while not self.leftovers() - before and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.5)
        program.signal(signal.SIGINT)
        self.assertEqual(program.wait(), 2, program.describe())
        program.close()
        self.assertLessEqual(self.leftovers(), before)

    def test_a_rule_that_never_hits_is_a_finding(self):
        status, output = self.scenario(HEAD + PROGRAM % "true" + "[[rule]]\nfault = 'drop'\n")
        self.assertEqual(status, 1, output)
        self.assertIn("has hit 0; right is at least 1", output)

    def test_a_wrong_rule_is_a_finding_with_the_reason(self):
        status, output = self.scenario(HEAD + PROGRAM % "true" + "[[rule]]\nfault = 'drip'\n")
        self.assertEqual(status, 1, output)
        self.assertIn("rule 1: 'drip': ", output)

    def test_the_list_has_names_and_titles(self):
        tree = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        status, output = verbena_testing.run(
            ["/bin/sh", "-c", f"cd '{tree}' && exec '{verbena_command()}' scenario list --json"])
        self.assertEqual(status, 0, output)
        names = {each["name"]: each for each in json.loads(output)}
        self.assertIn("lost_ack", names)
        self.assertTrue(names["lost_ack"]["cites"])


if __name__ == "__main__":
    verbena_testing.main()
