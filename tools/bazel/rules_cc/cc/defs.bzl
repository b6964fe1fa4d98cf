# SPDX-License-Identifier: Apache-2.0
"""Stands in for rules_cc: Bazel's built-in C++ rules under the names its own files load."""

cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_proto_library = native.cc_proto_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
fdo_prefetch_hints = native.fdo_prefetch_hints
fdo_profile = native.fdo_profile
objc_library = native.objc_library

def cc_flags_supplier(**_kwargs):
    """Loaded by Bazel's tools, not used by this build."""

def compiler_flag(**_kwargs):
    """Loaded by Bazel's tools, not used by this build."""
