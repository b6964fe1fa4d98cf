# SPDX-License-Identifier: Apache-2.0
"""tools/package [--out DIR] [--from DIR] [--tar] [--deb]

Makes a relocatable tar and a Debian package of what was built: verbena, verbenad, provider,
preload, man pages, completions of bash, zsh and fish, systemd units, the quickstart. Man pages and
completions are made from the --help of the very programs that are packed.

  --out DIR    where the files go (default: dist)
  --from DIR   bazel-bin or a tree of tools/stage (default: builds first)
  --tar --deb  only that form
"""

import argparse
import glob
import gzip
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

import command_help
import completion
import man_page

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))

PARTS = {  # file -> (folder of the build, folder of the installation)
    "verbena": ("tools", "bin"),
    "verbenad": ("nic_sim", "bin"),
    "libverbena-rdmav34.so": ("provider", "lib/verbena"),
    "libverbena-preload.so": ("provider", "lib/verbena"),
    "verbena-probe": ("tests/scenarios", "lib/verbena"),
    "verbena-lab": ("tools", "bin"),
}
# The transfers of the lab page.
EXAMPLES = ("atomic_lock", "beside_tcp", "events", "kv_store", "rdma_read", "rdma_write", "send_recv")
PARTS.update({name: ("docs/labs/examples", "lib/verbena/labs") for name in EXAMPLES})
DOCUMENTS = ("README.md", "docs/CONTROL.md", "docs/DEVIATIONS.md", "docs/FAULTS.md", "docs/PRM.md",
             "docs/SCENARIOS.md")
# DPDK opens its drivers by name; no linker sees that these are needed.
DPDK_DRIVERS = ("bus_vdev", "mempool_ring", "net_af_packet", "net_tap")
# Compiled in from their headers; their notices go with the binaries.
COMPILED_IN = ("libcli11-dev", "libdpdk-dev", "libfmt-dev", "libisal-dev", "libspdlog-dev",
               "nlohmann-json3-dev")
DESCRIPTION = """\
software RDMA NIC in user space
 Verbena is an RDMA network card that is an ordinary process. A daemon plays
 the hardware, a provider the driver below libibverbs. Applications run
 unmodified, as a plain user, without kernel module, hardware or hugepages:
 for those who write or test RDMA software."""


def fail(sentence):
    sys.exit(f"tools/package: {sentence}")


def run(*argv, **options):
    return subprocess.run(argv, check=True, text=True, stdin=subprocess.DEVNULL, timeout=300,
                          stdout=subprocess.PIPE, **options).stdout


def find(tree, name):
    """A part in the layout of a build, or of a staged tree."""
    built, installed = PARTS[name]
    for folder in (built, installed, installed.split("/")[0]):
        path = os.path.join(tree, folder, name)
        if os.path.isfile(path):
            return path
    return fail(f"{name} is missing in {tree}")


def put(path, text=None, source=None, mode=0o644):
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if source:
        shutil.copyfile(source, path)
    else:
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
    os.chmod(path, mode)


def put_compressed(path, text):
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with open(path + ".gz", "wb") as out:
        out.write(gzip.compress(text.encode(), 9, mtime=0))


def read(name):
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        return file.read()


def source_date():
    """Time of the last commit, so that the same commit gives the same files."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    try:
        return int(run("git", "-C", TREE, "log", "-1", "--format=%ct", stderr=subprocess.DEVNULL))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return int(os.stat(os.path.join(HERE, "package.py")).st_mtime)


class Tree:
    """An installation below a prefix."""

    def __init__(self, parts, version, date):
        self.parts = parts
        self.version = version
        self.date = time.strftime("%Y-%m-%d", time.gmtime(date))
        self.verbena = command_help.read(parts["verbena"], ["verbena"])
        self.verbenad = command_help.read(parts["verbenad"], ["verbenad"])

    def programs(self, root):
        for name, (_, folder) in PARTS.items():
            path = os.path.join(root, folder, name)
            put(path, source=self.parts[name], mode=0o644 if name.endswith(".so") else 0o755)
            run("strip", "--strip-unneeded", "--remove-section=.comment", path)
        put(f"{root}/share/verbena/quickstart", source=f"{TREE}/tools/quickstart", mode=0o755)
        scenarios = sorted(glob.glob(f"{TREE}/tests/scenarios/*.toml"))
        if not scenarios:
            fail("no scenarios in tests/scenarios")
        for path in scenarios:
            put(f"{root}/share/verbena/scenarios/{os.path.basename(path)}", source=path)

    def manuals(self, root, write):
        write(f"{root}/share/man/man1/verbena.1",
              man_page.verbena_page(self.verbena, self.version, self.date))
        write(f"{root}/share/man/man8/verbenad.8",
              man_page.verbenad_page(self.verbenad, self.version, self.date))

    def completions(self, root, zsh):
        bash = f"{root}/share/bash-completion/completions"
        put(f"{bash}/verbena", completion.bash(self.verbena, self.verbenad))
        os.symlink("verbena", f"{bash}/verbenad")
        put(f"{root}/share/zsh/{zsh}/_verbena", completion.zsh(self.verbena, self.verbenad))
        for command in (self.verbena, self.verbenad):
            put(f"{root}/share/fish/vendor_completions.d/{command.words[0]}.fish",
                completion.fish(command))

    def units(self, root, bindir):
        for kind in ("system", "user"):
            put(f"{root}/lib/systemd/{kind}/verbena.service",
                read(f"verbena.service.{kind}").replace("@bindir@", bindir))

    def documents(self, root):
        folder = f"{root}/share/doc/verbena"
        for name in DOCUMENTS:
            put(f"{folder}/{name}", source=os.path.join(TREE, name))
        for package in COMPILED_IN:
            notice = f"/usr/share/doc/{package}/copyright"
            if os.path.exists(notice):
                put(f"{folder}/third-party/{package}", source=notice)


def dependencies(root):
    """Debian packages of the libraries and DPDK drivers that the programs of `root` load."""
    if not shutil.which("dpkg-shlibdeps"):
        return None
    files = [os.path.join(root, folder, name) for name, (_, folder) in PARTS.items()]
    with tempfile.TemporaryDirectory() as work:
        put(f"{work}/debian/control", "Source: verbena\n\nPackage: verbena\nArchitecture: amd64\n")
        words = run("dpkg-shlibdeps", "-O", *files, cwd=work, stderr=subprocess.DEVNULL)
    found = re.match(r"shlibs:Depends=(.*)", words).group(1).split(", ")
    for driver in DPDK_DRIVERS:
        path = run("dpkg-query", "-S", f"*/pmds-*/librte_{driver}.so.*.*")
        package = path.split(":")[0]
        version = run("dpkg-query", "-W", "-f", "${Version}", package)
        found.append(f"{package} (>= {version.split('-')[0]})")
    return sorted(set(found))


def set_times(root, date):
    for folder, folders, files in os.walk(root):
        for name in files + folders + ["."]:
            os.utime(os.path.join(folder, name), (date, date), follow_symlinks=False)
        os.chmod(folder, 0o755)


def make_tar(tree, out, date, depends):
    name = f"verbena-{tree.version}-linux-x86_64"
    with tempfile.TemporaryDirectory() as work:
        root = f"{work}/{name}"
        tree.programs(root)
        tree.manuals(root, put)
        tree.completions(root, "site-functions")
        tree.units(root, "")  # systemd looks in /usr/local/bin and /usr/bin
        tree.documents(root)
        put(f"{root}/LICENSE", source=f"{TREE}/LICENSE")
        if depends:
            put(f"{root}/share/verbena/packages",
                "".join(f"{each.split()[0]}\n" for each in depends))
        put(f"{root}/INSTALL", read("INSTALL").replace("@name@", name))
        set_times(root, date)
        path = os.path.join(out, name + ".tar.gz")
        with open(path, "wb") as file:
            tar = subprocess.Popen(
                ["tar", "-C", work, "--sort=name", "--owner=0", "--group=0", "--numeric-owner",
                 "--format=gnu", "-c", name], stdout=subprocess.PIPE)
            subprocess.run(["gzip", "-n9"], stdin=tar.stdout, stdout=file, check=True, timeout=300)
            if tar.wait() != 0:
                fail("tar failed")
    return path


def make_deb(tree, out, date, depends):
    if depends is None or not shutil.which("dpkg-deb"):
        fail("the Debian package needs dpkg-dev; --tar makes the other form alone")
    version = f"{tree.version}-1"
    with tempfile.TemporaryDirectory() as work:
        usr = f"{work}/usr"
        tree.programs(usr)
        tree.manuals(usr, put_compressed)
        tree.completions(usr, "vendor-completions")
        tree.units(usr, "/usr/bin/")
        os.makedirs(f"{work}/lib")
        os.rename(f"{usr}/lib/systemd", f"{work}/lib/systemd")  # Debian 12 looks there for its own
        tree.documents(usr)
        put(f"{usr}/share/doc/verbena/copyright", read("copyright"))
        when = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(date))
        put_compressed(
            f"{usr}/share/doc/verbena/changelog.Debian",
            f"verbena ({version}) unstable; urgency=medium\n\n  * Packed by tools/package.\n\n"
            f" -- the Verbena authors <verbena@localhost>  {when}\n")
        put(f"{work}/etc/default/verbena", read("default"))
        size = sum(os.lstat(os.path.join(folder, name)).st_size
                   for folder, _, files in os.walk(work) for name in files)
        put(f"{work}/DEBIAN/control", "\n".join([
            "Package: verbena", f"Version: {version}", "Architecture: amd64",
            "Maintainer: the Verbena authors <verbena@localhost>",
            f"Installed-Size: {(size + 1023) // 1024}",
            f"Depends: {', '.join(depends)}",
            "Recommends: ibverbs-providers, ibverbs-utils, perftest",
            "Suggests: bash-completion, rdmacm-utils, tshark",
            "Section: net", "Priority: optional", f"Description: {DESCRIPTION}", ""]))
        put(f"{work}/DEBIAN/conffiles", "/etc/default/verbena\n")
        sums = "".join(
            f"{run('md5sum', os.path.join(folder, name)).split()[0]}  "
            f"{os.path.relpath(os.path.join(folder, name), work)}\n"
            for folder, _, files in sorted(os.walk(work)) for name in sorted(files)
            if "/DEBIAN" not in folder and not os.path.islink(os.path.join(folder, name)))
        put(f"{work}/DEBIAN/md5sums", sums)
        for script in ("postinst", "prerm", "postrm"):
            put(f"{work}/DEBIAN/{script}", read(script), mode=0o755)
        set_times(work, date)
        path = os.path.join(out, f"verbena_{version}_amd64.deb")
        run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", work, path,
            env={**os.environ, "SOURCE_DATE_EPOCH": str(date)})
    return path


def main():
    os.umask(0o022)
    parser = argparse.ArgumentParser(prog="tools/package", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="dist")
    parser.add_argument("--from", dest="built", required=True)
    parser.add_argument("--tar", action="store_true")
    parser.add_argument("--deb", action="store_true")
    options = parser.parse_args()
    if not options.tar and not options.deb:
        options.tar = options.deb = True
    parts = {name: find(options.built, name) for name in PARTS}
    os.makedirs(options.out, exist_ok=True)
    date = source_date()
    tree = Tree(parts, command_help.version(parts["verbena"]), date)
    with tempfile.TemporaryDirectory() as probe:
        tree.programs(probe)
        depends = dependencies(probe)
    if options.tar:
        print(make_tar(tree, options.out, date, depends))
    if options.deb:
        print(make_deb(tree, options.out, date, depends))


if __name__ == "__main__":
    main()
