# SPDX-License-Identifier: Apache-2.0
"""Compiler flags that single targets need. Flags for all of our code are in .bazelrc."""

# Every target that includes an rte_* header needs these (besides @dpdk//:dpdk), as pkg-config
# says: DPDK's inline functions assume its configuration and at least SSE4.2.
DPDK_COPTS = [
    "-include",
    "rte_config.h",
    "-march=corei7",
]

# For what is loaded into foreign processes (provider, preload): never a sanitizer runtime, no
# C++ runtime. The two cc_binary targets and the libraries in them need it.
LOADABLE_COPTS = [
    "-fno-sanitize=all",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fvisibility=hidden",
    "-fPIC",
]

# --as-needed first: linkshared otherwise adds NEEDED entries for libstdc++ and libm.
LOADABLE_LINKOPTS = [
    "-Wl,--as-needed",
    "-Wl,-z,defs",
]
