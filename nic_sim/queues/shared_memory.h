// SPDX-License-Identifier: Apache-2.0
//
// Memory that the device shares with applications: sealed memfds (no shrink, so
// no SIGBUS by truncation) and rings carved out of few large ones.
//
// Thread: control commands, under the shard's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "nic_sim/abi/commands.h"

namespace verbena::nic {

// One memfd, mapped read-write here. Moves only.
class SharedMemory {
 public:
  // Empty (data() == nullptr, errno set) on failure. Contents are zero.
  static SharedMemory Create(const std::string& name, size_t bytes);
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }
  // Gives the descriptor away; the mapping stays.
  int ReleaseFd();
  // A new read-only descriptor of the same memory, or -1.
  int OpenReadOnly() const;

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int fd_ = -1;
};

// A ring as the device sees it.
struct Ring {
  std::byte* data = nullptr;
  uint64_t bytes = 0;  // of the allocation
  abi::RingLocation location{};
};

// Bytes of shared memory that one user has, over all of their contexts.
struct RingBudget {
  uint64_t used = 0;
  uint64_t limit = UINT64_MAX;
};

// Rings of one context. Buddy allocation in segments.
class RingAllocator {
 public:
  // `budget` (nullptr: none) outlives it.
  explicit RingAllocator(std::string name, RingBudget* budget = nullptr)
      : name_(std::move(name)), budget_(budget) {}
  RingAllocator(const RingAllocator&) = delete;
  RingAllocator& operator=(const RingAllocator&) = delete;
  ~RingAllocator() {
    if (budget_ != nullptr) budget_->used -= total_;
  }

  // Zeroed ring of `slots` (power of two) times `stride`. If a new segment was
  // made, its descriptor is appended to *new_fds and location.new_segment set.
  // 0 or ENOMEM.
  int Allocate(uint32_t slots, uint32_t stride, Ring* ring, std::vector<int>* new_fds);
  void Free(const Ring& ring);
  // A descriptor of a segment, or -1 if there is no such segment.
  int OpenSegment(uint32_t index) const;

  uint64_t allocated_bytes() const { return allocated_; }

 private:
  static constexpr uint64_t kMinBlock = 1024;
  static constexpr uint64_t kMinSegment = uint64_t{4} << 20;
  static constexpr uint64_t kMaxSegment = uint64_t{64} << 20;
  static constexpr uint64_t kMaxTotal = uint64_t{16} << 30;

  struct Segment {
    SharedMemory memory;
    // Free blocks by size class: offsets of blocks of kMinBlock << order.
    std::vector<std::vector<uint64_t>> free;
  };

  bool TakeFrom(Segment& segment, uint64_t block, uint64_t* offset);

  std::string name_;
  RingBudget* budget_;
  std::vector<Segment> segments_;
  uint64_t allocated_ = 0;
  uint64_t total_ = 0;
};

}  // namespace verbena::nic
