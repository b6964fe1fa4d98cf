// SPDX-License-Identifier: Apache-2.0
//
// ReplayQueue: results of the last atomics that a responder executed, so that a
// duplicate is answered and never executed again. Holds as many as the peer may
// have outstanding (max_dest_rd_atomic); older ones are forgotten, and their
// duplicates dropped.
#pragma once

#include <array>
#include <cstdint>

#include "transport/memory_port.h"
#include "transport/psn.h"

namespace verbena::transport {

struct AtomicRecord {
  Psn psn;
  AtomicKind kind = AtomicKind::kFetchAdd;
  bool done = false;  // `original` is known
  uint32_t rkey = 0;
  uint64_t address = 0;
  Ticket ticket = 0;
  uint64_t original = 0;
};

class ReplayQueue {
 public:
  static constexpr uint32_t kMaxRecords = 32;

  // Forgets everything; keeps the last `records` (cut to kMaxRecords) from now.
  void Reset(uint32_t records);
  // Changes how many are kept; what is there stays.
  void Resize(uint32_t records);

  // Replaces the oldest. The result is not known yet.
  void Add(Psn psn, AtomicKind kind, uint32_t rkey, uint64_t address, Ticket ticket);

  // The record of the same request, or nullptr.
  AtomicRecord* Find(Psn psn, AtomicKind kind, uint32_t rkey, uint64_t address);
  AtomicRecord* FindByPsn(Psn psn);
  AtomicRecord* FindByTicket(Ticket ticket);

 private:
  AtomicRecord& Newest(uint32_t age) { return records_[(next_ - 1 - age) % kMaxRecords]; }

  std::array<AtomicRecord, kMaxRecords> records_;
  uint32_t next_ = 0;
  uint32_t count_ = 0;
  uint32_t limit_ = 0;
};

}  // namespace verbena::transport
