// SPDX-License-Identifier: Apache-2.0
//
// Packet sequence numbers: 24 bits, arithmetic modulo 2^24. There is no `<`:
// order exists only between two numbers that lie within half the space of each
// other, and is asked with Psn::Distance.
#pragma once

#include <cstdint>

namespace verbena::transport {

class Psn {
 public:
  static constexpr uint32_t kMask = 0xffffff;
  static constexpr int32_t kHalfWindow = 1 << 23;

  constexpr Psn() = default;
  // The low 24 bits of `value`.
  explicit constexpr Psn(uint32_t value) : value_(value & kMask) {}

  constexpr uint32_t value() const { return value_; }
  constexpr Psn Next() const { return Psn(value_ + 1); }
  constexpr Psn Previous() const { return Psn(value_ - 1); }

  constexpr bool operator==(const Psn&) const = default;

  // Steps from `from` to `to`, in [-2^23, 2^23): positive when `to` is ahead.
  // Distance(expected, received) > 0 is a gap, < 0 a duplicate.
  static constexpr int32_t Distance(Psn from, Psn to) {
    const uint32_t forward = (to.value_ - from.value_) & kMask;
    return forward < static_cast<uint32_t>(kHalfWindow) ? static_cast<int32_t>(forward)
                                                        : static_cast<int32_t>(forward) - (1 << 24);
  }

  // True when this PSN is one of the `count` PSNs that start at `first`;
  // count <= 2^23.
  constexpr bool InWindow(Psn first, uint32_t count) const {
    return ((value_ - first.value_) & kMask) < count;
  }

  friend constexpr Psn operator+(Psn p, uint32_t n) { return Psn(p.value_ + n); }
  friend constexpr Psn operator-(Psn p, uint32_t n) { return Psn(p.value_ - n); }
  constexpr Psn& operator+=(uint32_t n) { return *this = *this + n; }

 private:
  uint32_t value_ = 0;
};

}  // namespace verbena::transport
