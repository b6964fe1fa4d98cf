# SPDX-License-Identifier: Apache-2.0
"""tools/package: the tar runs with the source tree out of sight, the Debian package is complete,
man pages and completions say what --help says."""

import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "apps", "lib"))
import verbena_testing
from verbena_testing import clean_environment, run

TREE = os.path.dirname(os.path.dirname(HERE))


def built_tree():
    """Where verbena was built: Bazel's runfiles, or the folder above $VERBENA_BIN's."""
    return os.path.dirname(os.path.dirname(verbena_testing.verbena_command()))


def hidden_folders():
    """The source tree and Bazel's output folder, as far as they can be told."""
    found = {os.path.dirname(os.path.dirname(os.path.realpath(
        os.path.join(TREE, "tools/quickstart"))))}
    built = os.path.realpath(os.path.join(built_tree(), "tools/verbena"))
    if "/execroot/" in built:
        found.add(built.split("/execroot/")[0])
    return sorted(found)


class Packages(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="vpack.", dir="/tmp")
        os.chmod(cls.folder, 0o755)
        out = os.path.join(cls.folder, "out")
        status, output = run(
            ["/usr/bin/python3", "-B", os.path.join(TREE, "tools/packaging/package.py"), "--from",
             built_tree(), "--out", out], limit=240)
        if status != 0:
            raise AssertionError(f"package.py: {status}\n{output}")
        cls.tar, = glob.glob(out + "/*.tar.gz")
        cls.deb, = glob.glob(out + "/*.deb")
        cls.unpacked = os.path.join(cls.folder, "anywhere")
        os.mkdir(cls.unpacked)
        subprocess.run(["tar", "-C", cls.unpacked, "-xf", cls.tar], check=True, timeout=60)
        cls.installed, = glob.glob(cls.unpacked + "/*")
        cls.root = os.path.join(cls.folder, "deb")
        subprocess.run(["dpkg-deb", "-x", cls.deb, cls.root], check=True, timeout=60)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder, ignore_errors=True)

    def commands(self):
        """Yields (words, help text) of every command and sub-command of the installed copy."""
        waiting = [["verbena"], ["verbenad"]]
        while waiting:
            words = waiting.pop()
            program = os.path.join(self.installed, "bin", words[0])
            done = subprocess.run([program, *words[1:], "--help"], check=True, timeout=30,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            yield words, done.stdout
            section = re.search(r"^Subcommands:\n((?:  .*\n)+)", done.stdout, re.M)
            if section:
                waiting += [words + [line.split()[0]] for line in section.group(1).splitlines()]

    def test_the_tar_passes_the_quickstart_with_the_tree_out_of_sight(self):
        quickstart = os.path.join(self.installed, "share/verbena/quickstart")
        environment = {name: value for name, value in clean_environment().items()
                       if name in ("PATH", "LC_ALL")}
        environment.update(HOME="/nonexistent", XDG_RUNTIME_DIR=self.folder)
        os.chmod(self.folder, 0o700)
        hide = ('for folder in "$@"; do mount -t tmpfs none "$folder" || exit 99; done; '
                'cd / && exec "$0"')
        namespace = ["unshare", "--user", "--map-root-user", "--mount"]
        possible = subprocess.run([*namespace, "mount", "-t", "tmpfs", "none", "/mnt"],
                                  stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  timeout=20, check=False).returncode == 0
        argv = ([*namespace, "sh", "-c", hide, quickstart, *hidden_folders()] if possible
                else [quickstart])
        status, output = run(argv, limit=150, environment=environment, folder="/")
        os.chmod(self.folder, 0o755)
        self.assertEqual(status, 0, output)
        self.assertIn("It works", output)
        self.assertIn(f'{self.installed}/bin:$PATH', output)
        if not possible:
            print("note: no user namespaces here, the tree was in sight", file=sys.stderr)

    def test_nothing_in_it_points_to_where_it_was_built(self):
        places = [folder.encode() for folder in hidden_folders() if len(folder) > 4]
        for top in (self.installed, self.root):
            for folder, _, files in os.walk(top):
                for name in files:
                    with open(os.path.join(folder, name), "rb") as file:
                        content = file.read()
                    for place in places + [b"/execroot/"]:
                        self.assertNotIn(place, content, name)
        for path in glob.glob(self.installed + "/bin/*") + glob.glob(
                self.installed + "/lib/verbena/**", recursive=True):
            if os.path.isdir(path):
                continue
            dynamic = subprocess.run(["readelf", "-d", path], check=True, timeout=30, text=True,
                                     stdout=subprocess.PIPE).stdout
            self.assertNotRegex(dynamic, r"R(UN)?PATH")

    def test_manual_pages_name_every_command_and_option(self):
        texts = {}
        for name in ("man1/verbena.1", "man8/verbenad.8"):
            page = os.path.join(self.installed, "share/man", name)
            done = subprocess.run(["groff", "-man", "-ww", "-Tascii", "-P-c", page], check=True,
                                  timeout=30, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE)
            self.assertEqual(done.stderr, "")
            text = re.sub(r".\x08", "", done.stdout)
            texts[name.split("/")[1][:-2]] = text
            for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "FILES", "SEE ALSO"):
                self.assertRegex(text, f"(?m)^{heading}$")
        options = 0
        for words, text in self.commands():
            page = re.sub(r"-\n\s+", "-", texts[words[0]])
            if words != ["verbena"]:
                self.assertIn(" ".join(words), page)
            for option in re.findall(r"^  (?:-\w,)?(--[\w-]+)", text, re.M):
                options += 1
                if option != "--help":
                    self.assertRegex(page, rf"{option}\b", f"{words} {option}")
        self.assertGreater(options, 40)

    def complete(self, *words):
        script = ('source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); '
                  '"_${1}_complete"; printf "%s\\n" "${COMPREPLY[@]}"')
        path = os.path.join(self.installed, "share/bash-completion/completions/verbena")
        done = subprocess.run(["bash", "-c", script, path, *words], check=True, timeout=30,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        return set(done.stdout.split())

    def test_completion_offers_every_command_and_option(self):
        for words, text in self.commands():
            with self.subTest(words=words):
                options = set(re.findall(r"^  (?:-\w,)?(--[\w-]+)", text, re.M))
                self.assertLessEqual(options, self.complete(*words, "--"))
                section = re.search(r"^Subcommands:\n((?:  .*\n)+)", text, re.M)
                if section:
                    names = {line.split()[0] for line in section.group(1).splitlines()}
                    self.assertEqual(names, self.complete(*words, ""))
        self.assertEqual(self.complete("verbena", "list", "--json", "c"), {"cm_id", "context", "cq"})
        self.assertEqual(self.complete("verbena", "up", "--log-level", "w"), {"warn"})
        self.assertIn("ibv_devinfo", self.complete("verbena", "run", "--", "ibv_devi"))
        self.assertIn("ibv_devinfo", self.complete("verbena", "run", "--name", "x", "ibv_devi"))

    def test_completions_are_valid_in_the_shells_that_are_here(self):
        for shell, pattern in (("bash", "share/bash-completion/completions/verbena"),
                               ("zsh", "share/zsh/site-functions/_verbena"),
                               ("fish", "share/fish/vendor_completions.d/*.fish")):
            files = glob.glob(os.path.join(self.installed, pattern))
            self.assertTrue(files, pattern)
            for file in files if shutil.which(shell) else ():
                subprocess.run([shell, "-n", file], check=True, timeout=30)

    def test_the_debian_package_is_complete(self):
        fields = dict(
            line.split(": ", 1) for line in subprocess.run(
                ["dpkg-deb", "-f", self.deb], check=True, timeout=30, text=True,
                stdout=subprocess.PIPE).stdout.splitlines() if not line.startswith(" "))
        self.assertEqual(fields["Architecture"], "amd64")
        version = subprocess.run([f"{self.installed}/bin/verbena", "--version"], check=True,
                                 timeout=30, text=True, stdout=subprocess.PIPE).stdout.split()[1]
        self.assertEqual(fields["Version"], f"{version}-1")
        depends = {each.split()[0] for each in fields["Depends"].split(", ")}
        # DPDK opens its mempool driver by name: no linker knows.
        self.assertLessEqual({"libc6", "libibverbs1", "librte-eal23", "librte-mempool-ring23"},
                             depends)
        for library in ("verbenad", "verbena", "verbena-lab"):
            needed = subprocess.run(["ldd", f"{self.root}/usr/bin/{library}"], check=True,
                                    timeout=30, text=True, stdout=subprocess.PIPE).stdout
            self.assertNotIn("not found", needed)
        control = os.path.join(self.folder, "control")
        subprocess.run(["dpkg-deb", "-e", self.deb, control], check=True, timeout=30)
        with open(control + "/md5sums", encoding="ascii") as sums:
            for line in sums:
                digest, name = line.rstrip("\n").split("  ")
                with open(os.path.join(self.root, name), "rb") as file:
                    self.assertEqual(hashlib.md5(file.read()).hexdigest(), digest, name)
        for name in ("usr/bin/verbena", "usr/bin/verbenad", "usr/share/man/man1/verbena.1.gz",
                     "usr/share/man/man8/verbenad.8.gz", "usr/share/doc/verbena/copyright",
                     "lib/systemd/system/verbena.service", "lib/systemd/user/verbena.service",
                     "usr/lib/verbena/libverbena-rdmav34.so",
                     "usr/lib/verbena/libverbena-preload.so", "usr/bin/verbena-lab",
                     "usr/lib/verbena/labs/send_recv"):
            self.assertTrue(os.path.isfile(os.path.join(self.root, name)), name)
        for script in ("postinst", "prerm", "postrm"):
            subprocess.run(["sh", "-n", f"{control}/{script}"], check=True, timeout=30)

    def test_systemd_takes_the_units(self):
        if shutil.which("systemd-analyze") is None:
            self.skipTest("no systemd-analyze")
        for kind in ("system", "user"):
            with open(f"{self.root}/lib/systemd/{kind}/verbena.service", encoding="utf-8") as file:
                text = file.read()
            self.assertIn("ExecStart=/usr/bin/verbenad ", text)
            folder = os.path.join(self.folder, kind)
            os.makedirs(folder, exist_ok=True)
            with open(f"{folder}/verbena.service", "w", encoding="utf-8") as file:
                file.write(text.replace("/usr/bin/", f"{self.root}/usr/bin/"))
            done = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", f"--{kind}",
                 f"{folder}/verbena.service"], timeout=60, text=True, check=False,
                env={**clean_environment(), "XDG_RUNTIME_DIR": self.folder},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            complaints = [line for line in done.stdout.splitlines() if "verbena" in line]
            self.assertEqual(complaints, [], done.stdout)


if __name__ == "__main__":
    verbena_testing.main()
