// SPDX-License-Identifier: Apache-2.0
//
// A seeded one-way link in virtual time that loses (single packets and bursts),
// duplicates, delays, reorders and corrupts frames. Frames lie in a pool and are
// named by number; who sends one gives it away.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tests/sim/profile.h"
#include "tests/sim/random.h"

namespace verbena::sim {

struct Frame {
  static constexpr size_t kMaxBytes = 1024 + 128;

  uint32_t bytes = 0;
  uint32_t connection = 0;  // that it belongs to
  bool has_icrc = false;    // it was computed; otherwise the frame is as it was sent
  bool forged = false;
  std::array<std::byte, kMaxBytes> data;

  std::span<std::byte> span() { return {data.data(), bytes}; }
};

class FramePool {
 public:
  uint32_t Take();
  void Give(uint32_t number) { free_.push_back(number); }
  Frame& operator[](uint32_t number) { return *frames_[number]; }

 private:
  std::vector<std::unique_ptr<Frame>> frames_;
  std::vector<uint32_t> free_;
};

class Link {
 public:
  struct Arrival {
    uint32_t frame;
    transport::Time time;
  };

  Link(const NetworkProfile& profile, FramePool& pool, uint64_t seed)
      : profile_(profile), pool_(pool), random_(seed) {}

  // What arrives of it, and when: none, one or two.
  std::span<const Arrival> Send(uint32_t frame, transport::Time now);

 private:
  bool IsLost();
  void Corrupt(Frame& frame);
  void Add(uint32_t frame, transport::Time now);

  const NetworkProfile& profile_;
  FramePool& pool_;
  Random random_;
  bool in_burst_ = false;
  size_t count_ = 0;
  Arrival arrivals_[2];
};

}  // namespace verbena::sim
