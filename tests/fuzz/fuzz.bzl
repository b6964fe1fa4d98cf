# SPDX-License-Identifier: Apache-2.0
"""fuzz_target: one LLVMFuzzerTestOneInput, as a short seeded test and as a libFuzzer program."""

def fuzz_target(name, srcs, runs, deps = [], copts = []):
    """Makes NAME_test (part of the normal tests) and NAME_libfuzzer (built by tools/fuzz).

    Args:
      name: of the target; its corpus is corpus/NAME, its source defines LLVMFuzzerTestOneInput.
      srcs: sources.
      runs: mutations of the seeded test, so that it takes about a second.
      deps: what the target calls.
      copts: as for cc_library.
    """
    native.cc_library(
        name = name,
        testonly = True,
        srcs = srcs + ["fuzz_target.h"],
        copts = copts,
        alwayslink = True,
        deps = deps,
    )
    native.cc_test(
        name = name + "_test",
        size = "small",
        srcs = [
            "fuzz_target.h",
            "seeded_driver.cc",
        ],
        data = native.glob(["corpus/" + name + "/**"]),
        local_defines = [
            'FUZZ_TARGET_NAME=\\"%s\\"' % name,
            "FUZZ_TARGET_RUNS=%d" % runs,
        ],
        deps = [
            ":" + name,
            "//tools/bazel:sanitizer",
            "@gtest//:gtest_main",
        ],
    )
    native.cc_binary(
        name = name + "_libfuzzer",
        testonly = True,
        linkopts = ["-fsanitize=fuzzer"],  # clang only: it has the main()
        tags = ["manual"],
        deps = [
            ":" + name,
            "//tools/bazel:sanitizer",
        ],
    )
