// SPDX-License-Identifier: Apache-2.0
//
// NetworkSimulator: a seeded one-way link in virtual time that loses,
// duplicates, delays, reorders and corrupts frames.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "transport/base/time.h"

namespace verbena::testing {

// splitmix64: small, seeded, the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next();
  // In [0, bound); bound > 0.
  uint64_t Below(uint64_t bound) { return Next() % bound; }
  // In [low, high].
  uint64_t Between(uint64_t low, uint64_t high) { return low + Below(high - low + 1); }
  bool Chance(double probability) {
    return static_cast<double>(Next() >> 11) * 0x1.0p-53 < probability;
  }

 private:
  uint64_t state_;
};

struct NetworkProfile {
  double loss = 0;
  double duplicate = 0;
  double corrupt = 0;  // one bit is flipped
  double delayed = 0;  // arrives after long_delay, others overtake it
  transport::Duration delay = transport::Duration::Microseconds(2);
  transport::Duration jitter = transport::Duration::Zero();  // uniform, reorders
  transport::Duration long_delay = transport::Duration::Milliseconds(10);
};

class NetworkSimulator {
 public:
  NetworkSimulator(const NetworkProfile& profile, uint64_t seed)
      : profile_(profile), random_(seed) {}

  void Send(std::vector<std::byte> frame, transport::Time now);
  // When the next frame arrives; Time::Never() if none is under way.
  transport::Time NextArrival() const;
  // The next frame that has arrived by `now`.
  std::optional<std::vector<std::byte>> Receive(transport::Time now);

  uint64_t lost() const { return lost_; }
  uint64_t duplicated() const { return duplicated_; }
  uint64_t corrupted() const { return corrupted_; }

 private:
  void Enqueue(std::vector<std::byte> frame, transport::Time now);

  NetworkProfile profile_;
  Random random_;
  // Arrival time, then order of sending.
  std::map<std::pair<int64_t, uint64_t>, std::vector<std::byte>> in_flight_;
  uint64_t sequence_ = 0;
  uint64_t lost_ = 0;
  uint64_t duplicated_ = 0;
  uint64_t corrupted_ = 0;
};

}  // namespace verbena::testing
