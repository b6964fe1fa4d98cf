# SPDX-License-Identifier: Apache-2.0
"""Checks of the tree as text: licence lines, layering, format, links, nothing of one machine.

Each check is a function from text to findings ("line N: ..."), tried on bad samples first and
then run over the tree ($VERBENA_TREE, else the one this file lies in).
"""

import os
import re
import shutil
import socket
import subprocess
import unittest

TREE = os.environ.get("VERBENA_TREE") or os.path.realpath(
    os.path.join(os.path.dirname(__file__), "..", ".."))

CPP = (".cc", ".h")
SOURCES = CPP + (".py", ".sh", ".bzl", ".map", ".lds")
BUILD_FILES = ("BUILD", "WORKSPACE")

# The only folders of the device that know DPDK; tests may use it to look at them.
RTE_FOLDERS = ("nic_sim/env/", "nic_sim/port/", "nic_sim/fabric/", "nic_sim/engine/",
               "nic_sim/ctrl/qp1_port.", "tests/")

# Folder -> the folders of this tree whose headers it may include. The longest match counts.
MAY_INCLUDE = {
    "transport/": ("transport/",),
    "nic_sim/abi/": ("nic_sim/abi/",),
    "nic_sim/": ("nic_sim/", "transport/"),
    "provider/": ("provider/", "nic_sim/abi/"),
}

# Split, so that this file does not find itself.
MACHINE_PATHS = re.compile(
    r"(?<![\w.])(/work/" r"(?:main|shared|\.)|/ro" r"ot/|/ho" r"me/\w|\.\./sha" r"red|/tmp/(?:h|ob)" r"/)")


def lines_of(text):
    return enumerate(text.splitlines(), 1)


def check_machine(text, hostname=""):
    """Paths and the name of the machine on which somebody works."""
    found = []
    # A name like "debian" is an English word in our texts; one with a digit is a machine.
    word = (re.compile(r"(?<![\w-])%s(?![\w-])" % re.escape(hostname))
            if len(hostname) >= 5 and re.search(r"\d", hostname) else None)
    for number, line in lines_of(text):
        match = MACHINE_PATHS.search(line) or (word and word.search(line))
        if match:
            found.append(f"line {number}: '{match.group(0)}' belongs to one machine")
    return found


def needs_spdx(path, text):
    name = os.path.basename(path)
    return name.endswith(SOURCES) or name in BUILD_FILES or text.startswith("#!")


def check_spdx(text):
    head = text.splitlines()[:3]
    if any("SPDX-License-Identifier: Apache-2.0" in line for line in head):
        return []
    return ["line 1: no SPDX-License-Identifier in the first three lines"]


def check_includes(path, text):
    """DPDK only where it belongs, and the direction of dependencies."""
    found = []
    folder = max((f for f in MAY_INCLUDE if path.startswith(f)), key=len, default=None)
    for number, line in lines_of(text):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)', line)
        if not match:
            continue
        header = match.group(2)
        if header.startswith("rte_") and not path.startswith(RTE_FOLDERS):
            found.append(f"line {number}: <{header}> outside of {', '.join(RTE_FOLDERS)}")
        ours = header.split("/")[0] in ("transport", "nic_sim", "provider", "tools", "tests")
        if folder and ours and not header.startswith(MAY_INCLUDE[folder]):
            found.append(f"line {number}: {folder} must not include {header}")
    return found


def types_of(text):
    """(namespace, name) of each class and struct that a header defines at its outermost level."""
    namespace = ""
    for line in text.splitlines():
        if match := re.match(r"namespace ([\w:]+) \{", line):
            namespace = match.group(1)
        if match := re.match(r"(?:class|struct) (?:alignas\(\w+\) )?(\w+)\b(?!::|<|[^{]*;)", line):
            yield namespace, match.group(1)


def check_types(headers):
    """Two types of one name in a namespace: a program with both has one of them for the other."""
    where = {}
    for path, text in headers.items():
        for key in types_of(text):
            where.setdefault(key, []).append(path)
    return [f"{'::'.join(key)} is defined in {' and '.join(paths)}"
            for key, paths in where.items() if len(paths) > 1]


def check_ranges(text):
    """What clang-14, which builds the fuzz targets, cannot compile with libstdc++ 12."""
    subrange = re.compile(r"std::(?:views|ranges::(?:views|subrange|rotate|unique|remove(?:_if)?|"
                          r"(?:stable_)?partition|search(?:_n)?|find_end|equal_range))\b")
    return [f"line {number}: '{match.group(0)}' does not compile with clang-14"
            for number, line in lines_of(text) if (match := subrange.search(line))]


def without_code(text):
    """Blanks the fenced blocks, keeping line numbers."""
    out, fence = [], None
    for line in text.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if fence:
            if mark and mark.group(1).startswith(fence):
                fence = None
            out.append("")
        elif mark:
            fence = mark.group(1)
            out.append("")
        else:
            out.append(line)
    return "\n".join(out)


def slugs(text):
    """The anchors that GitHub makes of the headings."""
    result = set()
    for line in without_code(text).splitlines():
        match = re.match(r"#{1,6}\s+(.*?)\s*#*$", line)
        if match:
            result.add(re.sub(r"[^\w\- ]", "", match.group(1).lower()).replace(" ", "-"))
    return result


def links_of(text):
    """Yields (line, label, target) of the inline links."""
    for number, line in lines_of(without_code(text)):
        for match in re.finditer(r"\[((?:`[^`]*`|[^\[\]`])*)\]\(([^()\s]+)\)", line):
            yield number, match.group(1).strip(), match.group(2)


def symbol_of(label):
    """`Class::Function()` -> ["Class", "Function"]; None if the label is no symbol."""
    match = re.fullmatch(r"`([A-Za-z_~][\w:~]*?)(?:\(.*\))?`", label)
    return [part.lstrip("~") for part in match.group(1).split("::") if part] if match else None


def check_links(path, text, read):
    """Relative links lead to a file; with `Symbol` as the label the file has that symbol.

    read(path) gives the text of a file of the tree, "" for a folder, None if there is none.
    """
    found = []
    for number, label, target in links_of(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        where, _, anchor = target.partition("#")
        to = os.path.normpath(os.path.join(os.path.dirname(path), where)) if where else path
        body = read(to)
        if body is None:
            found.append(f"line {number}: link to {target}: no such file")
            continue
        if anchor and to.endswith(".md") and anchor not in slugs(body):
            found.append(f"line {number}: link to {target}: no such heading")
        for part in symbol_of(label) or []:
            if not to.endswith(".md") and not re.search(r"\b%s\b" % re.escape(part), body):
                found.append(f"line {number}: {label} does not occur in {to}")
                break
    return found


def tree_files():
    """Paths of the files under version control, relative to the tree."""
    try:
        listed = subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", TREE, "ls-files", "-z"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=True)
        names = listed.stdout.decode().split("\0")
    except (OSError, subprocess.SubprocessError):  # An exported tree, or no git here.
        names = []
        for folder, folders, files in os.walk(TREE):
            folders[:] = [f for f in folders if f != ".git" and not f.startswith("bazel-")]
            names += [os.path.relpath(os.path.join(folder, f), TREE) for f in files]
    return sorted(n for n in names if n and os.path.isfile(os.path.join(TREE, n)))


def read_text(path):
    """Text of a file of the tree, "" for a folder, None for nothing or for bytes."""
    full = os.path.join(TREE, path)
    if os.path.isdir(full):
        return ""
    try:
        with open(full, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text


class ChecksFindBadSamples(unittest.TestCase):
    def test_machine_paths_and_host_names(self):
        self.assertTrue(check_machine("see /work/" + "main/x"))
        self.assertTrue(check_machine("cd /ro" + "ot/.cache"))
        self.assertTrue(check_machine("../sha" + "red/design"))
        self.assertTrue(check_machine("on box17-a now", "box17-a"))
        self.assertFalse(check_machine("box17-ab, a frame/work/item, /tmp/verbena", "box17-a"))

    def test_missing_licence_line(self):
        self.assertTrue(check_spdx("// hello\nint x;\n"))
        self.assertFalse(check_spdx("#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\n"))
        self.assertTrue(needs_spdx("tools/x", "#!/bin/sh\n"))
        self.assertFalse(needs_spdx("docs/x.md", "# x\n"))

    def test_dpdk_outside_of_its_folders(self):
        self.assertTrue(check_includes("nic_sim/mem/a.cc", "#include <rte_mbuf.h>\n"))
        self.assertFalse(check_includes("nic_sim/port/a.cc", "#include <rte_mbuf.h>\n"))

    def test_wrong_direction(self):
        self.assertTrue(check_includes("transport/a.cc", '#include "nic_sim/abi/wqe.h"\n'))
        self.assertTrue(check_includes("provider/a.cc", '#include "transport/psn.h"\n'))
        self.assertTrue(check_includes("nic_sim/abi/a.h", '#include "nic_sim/mem/mtt.h"\n'))
        self.assertFalse(check_includes("nic_sim/mem/a.cc", '#include "transport/psn.h"\n'))

    def test_two_types_of_one_name(self):
        one = "namespace a::b {\nstruct X {\n  int i;\n};\n}\n"
        self.assertTrue(check_types({"p.h": one, "q.h": one.replace("int", "long")}))
        self.assertFalse(check_types({"p.h": one, "q.h": one.replace("a::b", "a::c")}))
        self.assertFalse(check_types({"p.h": one, "q.h": "namespace a::b {\nstruct X;\n}\n"}))

    def test_ranges_that_clang_14_has_not(self):
        self.assertTrue(check_ranges("  std::ranges::rotate(v, v.begin());\n"))
        self.assertFalse(check_ranges("  std::ranges::sort(v);\n  std::rotate(a, b, c);\n"))

    def test_links(self):
        files = {"a/b.cc": "void Engine::RunOnce() {}", "d/x.md": "# The Life of a SEND\n"}
        check = lambda text: check_links("d/y.md", text, files.get)
        self.assertTrue(check("[gone](z.md)"))
        self.assertTrue(check("[`Engine::RunTwice`](../a/b.cc)"))
        self.assertTrue(check("[`RunTwice()`](../a/b.cc)"))
        self.assertTrue(check("[x](x.md#life)"))
        self.assertFalse(check("[`Engine::RunOnce()`](../a/b.cc) [`a/b.cc`](../a/b.cc)"))
        self.assertFalse(check("[x](x.md#the-life-of-a-send) [web](https://example.org/q)"))
        self.assertFalse(check("```\n[gone](z.md)\n```\n"))


class Tree(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.texts = {p: t for p in tree_files() if (t := read_text(p)) is not None}

    def expect_none(self, findings):
        if findings:
            self.fail("\n" + "\n".join(findings))

    def test_is_found(self):
        self.assertTrue({"README.md", "tests/tidy/tidy_test.py"} <= set(self.texts), TREE)

    def test_names_no_machine(self):
        host = socket.gethostname()
        self.expect_none([f"{p}: {f}" for p, t in self.texts.items() for f in check_machine(t, host)])

    def test_sources_have_a_licence_line(self):
        self.expect_none([f"{p}: {f}" for p, t in self.texts.items() if needs_spdx(p, t)
                          for f in check_spdx(t)])

    def test_layers_are_kept(self):
        self.expect_none([f"{p}: {f}" for p, t in self.texts.items() if p.endswith(CPP)
                          for f in check_includes(p, t)])

    def test_types_have_names_of_their_own(self):
        self.expect_none(check_types({p: t for p, t in self.texts.items()
                                      if p.endswith(".h") and not p.startswith(("tests/", "docs/"))}))

    def test_fuzz_targets_compile_with_clang(self):
        self.expect_none([f"{p}: {f}" for p, t in self.texts.items()
                          if p.endswith(CPP) and p.startswith(("transport/", "nic_sim/", "tests/fuzz/"))
                          for f in check_ranges(t)])

    def test_links_in_documents_lead_somewhere(self):
        self.expect_none([f"{p}: {f}" for p, t in self.texts.items() if p.endswith(".md")
                          for f in check_links(p, t, read_text)])

    def test_architecture_links_functions(self):
        # The life of a SEND and of a READ name a function behind each arrow.
        labels = [label for _, label, to in links_of(self.texts.get("docs/ARCHITECTURE.md", ""))
                  if symbol_of(label) and not to.endswith(".md")]
        self.assertGreaterEqual(len(labels), 10)

    def test_is_clang_formatted(self):
        tool = shutil.which("clang-format")
        if not tool:
            self.skipTest("clang-format is not installed")
        version = subprocess.run([tool, "--version"], stdout=subprocess.PIPE, timeout=20).stdout
        if b"version 14." not in version:
            self.skipTest("another clang-format than Debian 12's decides otherwise")
        files = [p for p in self.texts if p.endswith(CPP)]
        run = subprocess.run([tool, "--style=file", "--dry-run", "-Werror", *files], cwd=TREE,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=180)
        bad = sorted(set(re.findall(r"^(\S+?):\d+:\d+: error", run.stdout.decode(), re.M)))
        self.assertEqual(run.returncode, 0, "clang-format -i " + " ".join(bad))


if __name__ == "__main__":
    unittest.main(verbosity=2)
