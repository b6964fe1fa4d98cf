# SPDX-License-Identifier: Apache-2.0
"""The labs' commands do what the labs say.

Blocks marked `sh lab` of one lab are one bash session in a daemon's environment of its own. The
lines of the `text expect` block that follows must be in the block's output, in any order. Both
languages have the same blocks.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "apps", "lib")]

import verbena_testing as vt  # noqa: E402


def labs_folder():
    for path in (os.environ.get("LABS"),
                 os.path.join(os.environ.get("TEST_SRCDIR", ""),
                              os.environ.get("TEST_WORKSPACE", "verbena"), "docs/labs"),
                 os.path.join(HERE, "..", "..", "docs", "labs")):
        if path and os.path.isdir(os.path.join(path, "en")):
            return os.path.realpath(path) if "TEST_SRCDIR" not in os.environ else path
    raise RuntimeError("no labs")


LABS = labs_folder()
BLOCK = re.compile(r"^```(sh lab|text expect)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Each message is looked for in the output between two of these.
MARK = "=== end of block"


def blocks_of(text):
    """[(commands, [expected lines])]"""
    found = []
    for kind, body in BLOCK.findall(text):
        if kind == "sh lab":
            found.append((body, []))
        else:
            found[-1][1].extend(body.splitlines())
    return found


def read(language, name):
    with open(os.path.join(LABS, language, name), encoding="utf-8") as file:
        return file.read()


def names(language):
    return sorted(name for name in os.listdir(os.path.join(LABS, language)) if name.endswith(".md"))


def programs_folder():
    beside = os.path.join(os.path.dirname(vt.verbena_command()), "..", "docs", "labs", "examples")
    if not os.access(os.path.join(beside, "send_recv"), os.X_OK):
        raise RuntimeError(f"no example programs in {beside}")
    return os.path.realpath(beside)


class Labs(unittest.TestCase):

    def test_languages_have_the_same_labs_and_commands(self):
        self.assertGreaterEqual(len(names("en")), 10)
        self.assertEqual(names("en"), names("zh"))
        for name in names("en"):
            with self.subTest(name):
                self.assertEqual(blocks_of(read("en", name)), blocks_of(read("zh", name)))

    def test_each_lab_has_all_its_parts(self):
        for language, parts in (("en", ("**Goal.**", "**Time.**", "## In a terminal",
                                        "## What to see", "## Questions", "<summary>Answer")),
                                ("zh", ("**目标。**", "**时间。**", "## 在终端里", "## 会看到什么",
                                        "## 问题", "<summary>答案"))):
            for name in names(language):
                text = read(language, name)
                for part in parts:
                    self.assertIn(part, text, f"{language}/{name}")
                self.assertGreaterEqual(text.count("<summary>"), 3, f"{language}/{name}")


    # What the labs tell people to click on is written on the page, in both languages.
    def test_labs_name_the_buttons_as_the_page_does(self):
        page = "".join(open(path, encoding="utf-8").read() for path in web_files())
        table = dict(re.findall(r"^  '(.+?)': '(.+?)',$", page, re.MULTILINE))
        for language, parts in (("en", ("## On the page", "## In a terminal")),
                                ("zh", ("## 在页面上", "## 在终端里"))):
            labels = table if language == "en" else {*table.values(), "中文"}
            seen = 0
            for name in names(language):
                text = read(language, name)
                if parts[0] not in text:
                    continue
                for label in re.findall(r"\*\*(.+?)\*\*", text.split(parts[0])[1].split(parts[1])[0]):
                    self.assertIn(label, labels, f"{language}/{name}")
                    seen += 1
            self.assertGreater(seen, 20, language)


def web_files():
    root = os.path.join(LABS, "..", "..", "tools", "lab", "web")
    return [os.path.join(root, name) for name in sorted(os.listdir(root)) if name.endswith(".js")]


def case(name):

    def test(self):
        blocks = blocks_of(read("en", name))
        self.assertTrue(any(expected for _, expected in blocks), "no expectation")
        script = "set -e\n" + "".join(f"{commands}\necho '{MARK}'\n" for commands, _ in blocks)
        daemon = vt.Daemon(start=False)
        try:
            environment = dict(daemon.environment)
            environment["PATH"] = ":".join([os.path.dirname(daemon.verbena), programs_folder(),
                                            environment.get("PATH", "/usr/bin:/bin")])
            environment["LABS"] = LABS
            with tempfile.TemporaryDirectory(prefix="vlabs.") as folder:
                status, output = vt.run(["/bin/bash", "-c", script], 300, environment=environment,
                                        folder=folder)
            self.assertEqual(status, 0, output)
            outputs = output.split(MARK)
            for (commands, expected), seen in zip(blocks, outputs):
                for line in expected:
                    self.assertIn(line, seen, f"after\n{commands}")
        finally:
            daemon.command("down")
            daemon.close()

    return test


for _name in names("en"):
    setattr(Labs, f"test_{_name[:-3].replace('-', '_')}", case(_name))

if __name__ == "__main__":
    vt.main()
