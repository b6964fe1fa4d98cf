// SPDX-License-Identifier: Apache-2.0
//
// How a function of libc is interposed and its original found.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

namespace verbena::provider {

// The name of a function as a template argument.
template <size_t kSize>
struct FunctionName {
  char text[kSize];
  constexpr FunctionName(const char (&name)[kSize]) {  // NOLINT: implicit on purpose
    for (size_t i = 0; i < kSize; ++i) text[i] = name[i];
  }
};

template <FunctionName kName>
struct NextFunction {
  static inline constinit std::atomic<void*> cache{nullptr};

  // The next definition after ours. Found at first use, because constructors
  // of other libraries may call us before our own has run; no allocation.
  static void* Find() {
    void* found = cache.load(std::memory_order_relaxed);
    if (found == nullptr) {
      const int before = errno;
      found = dlsym(RTLD_NEXT, kName.text);
      errno = before;
      cache.store(found, std::memory_order_relaxed);
    }
    return found;
  }
};

}  // namespace verbena::provider

// The original of a declared function.
#define VERBENA_NEXT(name) \
  (reinterpret_cast<decltype(::name)*>(verbena::provider::NextFunction<#name>::Find()))

#define VERBENA_INTERPOSE extern "C" __attribute__((visibility("default")))
