// SPDX-License-Identifier: Apache-2.0
//
// What a fuzz target is: one function over a byte string, which must come back
// whatever the bytes are. It ends the process when a promise is broken.
//
// Two programs are made of each target (fuzz.bzl): a short, seeded test
// (seeded_driver.cc), and with clang a libFuzzer program (tools/fuzz).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace verbena::fuzz {

// A broken promise: says which and aborts, so that either driver reports the
// input.
#define FUZZ_CHECK(condition)                                                             \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

// Takes an input apart. Past its end everything is zero, so that each prefix of
// an input is an input.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  bool empty() const { return left_ == 0; }
  size_t left() const { return left_; }

  template <typename T>
  T Take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    const size_t bytes = std::min(left_, sizeof(T));
    if (bytes != 0) std::memcpy(static_cast<void*>(&value), data_, bytes);
    Skip(bytes);
    return value;
  }
  uint8_t U8() { return Take<uint8_t>(); }
  uint16_t U16() { return Take<uint16_t>(); }
  uint32_t U32() { return Take<uint32_t>(); }
  uint64_t U64() { return Take<uint64_t>(); }
  // 0 to limit - 1.
  uint32_t Below(uint32_t limit) { return limit <= 256 ? U8() % limit : U16() % limit; }

  std::span<const uint8_t> Bytes(size_t bytes) {
    const std::span<const uint8_t> taken(data_, std::min(bytes, left_));
    Skip(taken.size());
    return taken;
  }
  std::span<const uint8_t> Rest() { return Bytes(left_); }
  std::string_view Text() {
    const auto rest = Rest();
    return {reinterpret_cast<const char*>(rest.data()), rest.size()};
  }

 private:
  void Skip(size_t bytes) {
    data_ += bytes;
    left_ -= bytes;
  }

  const uint8_t* data_;
  size_t left_;
};

}  // namespace verbena::fuzz
