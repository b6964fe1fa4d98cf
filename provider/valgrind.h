// SPDX-License-Identifier: Apache-2.0
//
// Tells memcheck what the device wrote behind its back. Nothing outside
// valgrind; nothing at all if its header was missing at build time.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__has_include)
#if __has_include(<valgrind/memcheck.h>)
#include <valgrind/memcheck.h>
#define VERBENA_HAVE_VALGRIND 1
#endif
#endif

namespace verbena::provider {

#ifdef VERBENA_HAVE_VALGRIND
inline bool RunningOnValgrind() { return RUNNING_ON_VALGRIND != 0; }
inline void MakeDefined(const void* address, size_t bytes) {
  static_cast<void>(VALGRIND_MAKE_MEM_DEFINED(address, bytes));
}
#else
inline bool RunningOnValgrind() { return false; }
inline void MakeDefined(const void*, size_t) {}
#endif

}  // namespace verbena::provider
