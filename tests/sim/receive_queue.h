// SPDX-License-Identifier: Apache-2.0
//
// Receives that applications post: the queue of one QP in one connection, or an
// SRQ that several QPs take from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "tests/sim/memory.h"
#include "tests/sim/profile.h"
#include "tests/sim/random.h"

namespace verbena::sim {

// SGEs of `bytes` in all in room of their own, some of them empty.
std::vector<MemorySegment> RandomTargets(uint32_t bytes, uint32_t key, HostMemory& memory,
                                         Random& random);

struct PlannedReceive {
  std::vector<MemorySegment> sges;
  uint32_t bytes = 0;
  bool malformed = false;
  bool bad_key = false;
};

class ReceiveQueue {
 public:
  // `wr_ids`: the upper half of their wr_ids. `srq`: its number, 0: no SRQ.
  void Reset(uint32_t wr_ids, uint32_t srq) {
    receives_.clear();
    posted_ = taken_ = 0;
    wr_ids_ = wr_ids;
    srq_ = srq;
  }
  // What will be posted; it stays where it is.
  PlannedReceive& Plan() { return receives_.emplace_back(); }
  // Plans one that any message of the profile fits into, unless it is bad.
  void PlanAny(const Profile& profile, HostMemory& memory, Random& random);
  void Post() { ++posted_; }
  // The oldest; something must be available.
  const PlannedReceive& next() const { return receives_[taken_]; }
  const PlannedReceive& Take(uint64_t* wr_id) {
    *wr_id = uint64_t{wr_ids_} << 32 | taken_;
    return receives_[taken_++];
  }
  void PutBack() { --taken_; }

  bool is_shared() const { return srq_ != 0; }
  uint32_t srq() const { return srq_; }
  size_t planned() const { return receives_.size(); }
  uint32_t posted() const { return posted_; }
  uint32_t taken() const { return taken_; }
  uint32_t available() const { return posted_ - taken_; }

 private:
  std::deque<PlannedReceive> receives_;
  uint32_t posted_ = 0;
  uint32_t taken_ = 0;
  uint32_t wr_ids_ = 0;
  uint32_t srq_ = 0;
};

}  // namespace verbena::sim
