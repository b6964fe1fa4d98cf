// SPDX-License-Identifier: Apache-2.0
//
// FakeMemory: a MemoryPort over byte arrays. Regions have guard bytes around
// them; placements can be carried out at once, or queued and committed (or
// failed) later when the test says so. Bytes become visible at the commit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "transport/memory_port.h"

namespace verbena::testing {

class FakeMemory : public transport::MemoryPort {
 public:
  static constexpr uint32_t kAllRights =
      transport::kAccessLocalWrite | transport::kAccessRemoteWrite | transport::kAccessRemoteRead |
      transport::kAccessRemoteAtomic;

  // What a commit did.
  struct Committed {
    transport::Ticket ticket = 0;
    bool is_atomic = false;
    uint64_t original = 0;
    // Set when the placement failed.
    std::optional<transport::MemoryStatus> failure;
  };

  // A region of `bytes` zero bytes at `address` under `key` (both rkey and
  // lkey).
  void AddRegion(uint32_t key, uint64_t address, size_t bytes, uint32_t access = kAllRights);
  void RemoveRegion(uint32_t key) { regions_.erase(key); }
  // The key belongs to another protection domain.
  void MoveToOtherPd(uint32_t key) { regions_.at(key).other_pd = true; }
  // Accesses to the region fail late (placements) or at the fetch.
  void Unmap(uint32_t key) { regions_.at(key).unmapped = true; }
  // The key may be invalidated (a type 2 memory window).
  void AllowInvalidate(uint32_t key) { regions_.at(key).may_invalidate = true; }

  std::span<std::byte> Bytes(uint32_t key);
  std::span<std::byte> At(uint32_t key, uint64_t address, size_t bytes);
  uint64_t Word(uint32_t key, uint64_t address);
  void SetWord(uint32_t key, uint64_t address, uint64_t value);

  // Reads what a TxPacket describes.
  transport::MemoryStatus Fetch(std::span<const transport::MemorySegment> segments,
                                transport::MemoryAccess access, std::vector<std::byte>* out);

  // true: placements wait for CommitNext().
  void set_deferred(bool deferred) { deferred_ = deferred; }
  bool HasPending() const { return !pending_.empty(); }
  size_t pending() const { return pending_.size(); }
  // Carries out the oldest placement. After a failure the later ones are void:
  // they are forgotten.
  Committed CommitNext(bool fail = false);

  bool AreGuardsIntact() const;
  uint64_t atomics_executed() const { return atomics_executed_; }
  uint64_t checks() const { return checks_; }

  // MemoryPort.
  transport::MemoryStatus CheckKey(uint32_t key, transport::MemoryAccess access) override;
  transport::MemoryStatus Check(uint32_t key, uint64_t address, uint64_t length,
                                transport::MemoryAccess access) override;
  transport::MemoryStatus Place(const transport::MemorySegment& to,
                                std::span<const std::byte> bytes, transport::MemoryAccess access,
                                bool last, transport::Ticket* ticket) override;
  transport::MemoryStatus Atomic(uint32_t rkey, uint64_t address,
                                 const transport::AtomicOperation& operation,
                                 transport::Ticket* ticket) override;
  transport::MemoryStatus Invalidate(uint32_t rkey) override;

 private:
  static constexpr size_t kGuardBytes = 64;
  static constexpr std::byte kGuard{0xdb};

  struct Region {
    uint64_t address = 0;
    size_t bytes = 0;
    uint32_t access = 0;
    bool other_pd = false;
    bool unmapped = false;
    bool may_invalidate = false;
    std::vector<std::byte> storage;  // guard, bytes, guard
  };

  struct Operation {
    transport::Ticket ticket = 0;
    uint32_t key = 0;
    uint64_t address = 0;
    std::vector<std::byte> bytes;
    bool is_atomic = false;
    transport::AtomicOperation atomic;
  };

  std::byte* Pointer(Region& region, uint64_t address);
  Committed Execute(const Operation& operation, bool fail);

  std::map<uint32_t, Region> regions_;
  std::deque<Operation> pending_;
  transport::Ticket next_ticket_ = 1;
  bool deferred_ = false;
  uint64_t atomics_executed_ = 0;
  uint64_t checks_ = 0;
};

}  // namespace verbena::testing
