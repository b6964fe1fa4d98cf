// SPDX-License-Identifier: Apache-2.0
//
// splitmix64: small, seeded, the same everywhere.
#pragma once

#include <cstdint>

#include "transport/base/time.h"

namespace verbena::sim {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  // In [0, bound); bound > 0.
  uint64_t Below(uint64_t bound) { return Next() % bound; }
  uint32_t Below32(uint64_t bound) { return static_cast<uint32_t>(Below(bound)); }
  // In [low, high].
  uint64_t Between(uint64_t low, uint64_t high) { return low + Below(high - low + 1); }
  bool Chance(double probability) {
    return static_cast<double>(Next() >> 11) * 0x1.0p-53 < probability;
  }
  // Up to and including `most`.
  transport::Duration UpTo(transport::Duration most) {
    return transport::Duration::Nanoseconds(
        static_cast<int64_t>(Below(static_cast<uint64_t>(most.ns()) + 1)));
  }

 private:
  uint64_t state_;
};

}  // namespace verbena::sim
