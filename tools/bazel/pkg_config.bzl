# SPDX-License-Identifier: Apache-2.0
"""External repositories made from the machine's Debian packages; nothing is downloaded."""

def _host_check_impl(ctx):
    cpu = ctx.execute(["uname", "-m"]).stdout.strip()
    if cpu != "x86_64":
        fail("Verbena builds on x86-64 only for now: its shared-memory layouts are checked " +
             "there alone. This machine says %s." % cpu)
    ctx.file("BUILD", "")
    ctx.file("host.bzl", "HOST_CPU = \"%s\"\n" % cpu)

host_check = repository_rule(
    implementation = _host_check_impl,
    local = True,
    doc = "Fails with a sentence on a CPU that Verbena does not support.",
)

_LIBRARY = """
cc_library(
    name = "{name}",
    hdrs = {hdrs},
    defines = {defines},
    includes = {includes},
    linkopts = {linkopts},
    visibility = ["//visibility:public"],
)
"""

def _words(text):
    return [w for w in text.replace("\n", " ").split(" ") if w]

def _pkg_config(ctx, module, option):
    result = ctx.execute(["pkg-config", option, module])
    if result.return_code != 0:
        fail("%s is missing (pkg-config %s failed). Install it: apt-get install %s" %
             (ctx.attr.debian_package, module, ctx.attr.debian_package))
    return _words(result.stdout)

def _pkg_config_impl(ctx):
    if not ctx.which("pkg-config"):
        fail("pkg-config is missing. Install it: apt-get install pkg-config")
    build = ["# Written by tools/bazel/pkg_config.bzl."]
    linked = {}
    for name, module in ctx.attr.targets.items():
        includes = []
        for flag in _pkg_config(ctx, module, "--cflags-only-I"):
            path = ctx.path(flag[2:])

            # /usr/include itself is a folder of the compiler; anything else becomes a
            # system include folder (-isystem), so that our warnings stay out of it.
            if not path.exists or str(path) in linked:
                includes += [linked[str(path)]] if str(path) in linked else []
                continue
            folder = "include%d" % len(linked)
            ctx.symlink(path, folder)
            linked[str(path)] = folder
            includes.append(folder)

        # Other flags (-march, -include) do not travel along dependencies: copts.bzl has them.
        flags = _pkg_config(ctx, module, "--cflags-only-other")
        build.append(_LIBRARY.format(
            name = name,
            hdrs = "glob(%r)" % [folder + "/**/*.h" for folder in includes] if includes else "[]",
            defines = [f[2:] for f in flags if f.startswith("-D")],
            includes = includes,
            linkopts = _pkg_config(ctx, module, "--libs"),
        ))
    ctx.file("BUILD", "\n".join(build))

pkg_config = repository_rule(
    implementation = _pkg_config_impl,
    attrs = {
        "targets": attr.string_dict(mandatory = True, doc = "cc_library name -> pkg-config module"),
        "debian_package": attr.string(mandatory = True, doc = "named when the module is missing"),
    },
    local = True,
    doc = "cc_library targets for installed libraries, found by pkg-config.",
)
