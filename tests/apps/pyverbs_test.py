# SPDX-License-Identifier: Apache-2.0
"""The official test suite of rdma-core (package python3-pyverbs), unchanged, over a daemon.

Nothing of it may fail, and it may skip only what is listed below, with the reason. The short form
runs it once; $VERBENA_TEST_LOOPS runs it more often, as root also as a plain user.

By hand: tests/apps/pyverbs_test.py; a part of the suite: VERBENA_PYVERBS='MRTest|test_cq_ex'.
"""

import gzip
import json
import os
import re
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import AppTestCase

SUITE = "/usr/share/doc/rdma-core/tests"
LOOPS = int(os.environ.get("VERBENA_TEST_LOOPS", "1"))

# (class or test, what the suite says, why). The first column is matched against
# module.Class.test, the second against the suite's reason.
MAY_SKIP = [
    (r"test_(mlx5|efa|efadv)", "", "vendor's own interfaces"),
    (r"test_cuda|Cuda", "", "needs a GPU of one vendor"),
    (r"", r"non MLX5|not an MLX5|non EFA|PCI device must be passed", "vendor's own interfaces"),
    (r"Dmabuf|DmaBuf|dmabuf", r"renderD|dmabuf", "no GPU that exports dma-bufs"),
    (r"", r"huge pages", "no huge pages on this machine"),
    (r"test_tag_matching", "", "tag matching: docs/DEVIATIONS.md"),
    (r"", r"by root on Ethernet", "the suite asks for root before it makes raw packet QPs"),
    (r"", r"TSO", "docs/DEVIATIONS.md"),
]

# Runs the suite as its run_tests.py does, and writes what became of each test.
RUNNER = r"""
import importlib.machinery, json, os, re, sys, unittest
out, folder, pattern = sys.argv[1:4]
sys.argv = ["run_tests.py"] + sys.argv[4:]
sys.path.insert(0, folder)
sys.path.insert(0, os.path.join(folder, "tests"))
from args_parser import parser
tests = importlib.machinery.SourceFileLoader(
    "tests", os.path.join(folder, "tests", "__init__.py")).load_module()
parser.parse_args()

class Result(unittest.TextTestResult):
    rows = []
    def note(self, test, kind, text=""):
        self.rows.append([test.id(), kind, text])
    def addSuccess(self, test):
        super().addSuccess(test); self.note(test, "ok")
    def addSkip(self, test, reason):
        super().addSkip(test, reason); self.note(test, "skip", reason)
    def addFailure(self, test, err):
        super().addFailure(test, err); self.note(test, "fail", self._exc_info_to_string(err, test))
    def addError(self, test, err):
        super().addError(test, err); self.note(test, "error", self._exc_info_to_string(err, test))

def flat(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flat(item)
        elif re.search(pattern, item.id()):
            yield item

suite = unittest.TestSuite(flat(unittest.defaultTestLoader.loadTestsFromModule(tests)))
unittest.TextTestRunner(resultclass=Result, verbosity=2).run(suite)
with open(out, "w") as file:
    json.dump(Result.rows, file)
"""


def unpack(folder):
    """The suite as it is, but for the compression of Debian's documentation folder."""
    target = os.path.join(folder, "tests")
    shutil.copytree(SUITE, target)
    for name in os.listdir(target):
        if name.endswith(".gz"):
            path = os.path.join(target, name)
            with gzip.open(path) as packed, open(path[:-3], "wb") as file:
                shutil.copyfileobj(packed, file)
            os.unlink(path)
    for root, _, files in os.walk(folder):
        os.chmod(root, 0o755)
        for name in files:
            os.chmod(os.path.join(root, name), 0o644)


def why_skipped(name, reason):
    for where, text, why in MAY_SKIP:
        if re.search(where, name) and re.search(text, reason):
            return why
    return None


class Suite(AppTestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="vpyverbs.", dir="/tmp")
        unpack(cls.folder)
        super().setUpClass()

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        shutil.rmtree(cls.folder, ignore_errors=True)

    def run_suite(self, daemon, out, pattern=None):
        pattern = pattern or os.environ.get("VERBENA_PYVERBS", "") or \
            r"^(?!tests\.test_(mlx5|efa|efadv|cuda))"
        status, output = daemon.run(
            "/usr/bin/python3", "-B", "-c", RUNNER, out, self.folder, pattern, "--dev", "verbena0",
            limit=300)
        self.assertTrue(os.path.exists(out) and os.path.getsize(out) > 0,
                        f"the suite ended with {status}\n{output}\n{daemon.dump()}")
        with open(out, encoding="utf-8") as file:
            rows = json.load(file)
        os.truncate(out, 0)
        return rows, output

    def judge(self, daemon, out):
        rows, output = self.run_suite(daemon, out)
        self.assertGreater(len(rows), 50, output)
        bad = [f"{kind}: {name}: {text}" for name, kind, text in rows if kind in ("fail", "error")]
        for name, kind, text in rows:
            if kind == "skip" and why_skipped(name, text) is None:
                bad.append(f"skipped without an allowed reason: {name}: {text}")
        passed = sum(1 for _, kind, _ in rows if kind == "ok")
        skipped = sum(1 for _, kind, _ in rows if kind == "skip")
        print(f"pyverbs: {passed} passed, {skipped} skipped, {len(bad)} findings of {len(rows)}")
        self.assertFalse(bad, "\n".join(bad) + "\n" + daemon.dump())
        for what in ("qp", "cq", "mr", "pd", "srq"):
            self.assertEqual(daemon.json("list", what), [], f"a {what} is left")

    def test_the_suite_passes(self):
        out = os.path.join(self.folder, "result")
        for _ in range(LOOPS):
            self.judge(self.daemon, out)

    @unittest.skipUnless(verbena_testing.FULL and os.geteuid() == 0, "long form, as root")
    def test_the_suite_passes_for_a_plain_user(self):
        import users_test  # pylint: disable=import-outside-toplevel
        tree = users_test.stage()
        daemon = users_test.UserDaemon(tree)
        out = os.path.join(tempfile.mkdtemp(prefix="vpyverbs.", dir=self.folder), "result")
        os.chmod(self.folder, 0o755)
        os.chown(os.path.dirname(out), users_test.NOBODY, users_test.NOBODY)
        try:
            for _ in range(LOOPS):
                self.judge(daemon, out)
        finally:
            daemon.close()
            shutil.rmtree(tree, ignore_errors=True)


if __name__ == "__main__":
    verbena_testing.main()
