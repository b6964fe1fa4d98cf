// SPDX-License-Identifier: Apache-2.0
#include "transport/rc/replay_queue.h"

#include <algorithm>

namespace verbena::transport {

void ReplayQueue::Reset(uint32_t records) {
  next_ = count_ = 0;
  limit_ = std::min(records, kMaxRecords);
}

void ReplayQueue::Resize(uint32_t records) {
  limit_ = std::min(records, kMaxRecords);
  count_ = std::min(count_, limit_);
}

void ReplayQueue::Add(Psn psn, AtomicKind kind, uint32_t rkey, uint64_t address, Ticket ticket) {
  records_[next_++ % kMaxRecords] =
      AtomicRecord{.psn = psn, .kind = kind, .rkey = rkey, .address = address, .ticket = ticket};
  count_ = std::min(count_ + 1, limit_);
}

AtomicRecord* ReplayQueue::Find(Psn psn, AtomicKind kind, uint32_t rkey, uint64_t address) {
  AtomicRecord* record = FindByPsn(psn);
  if (record == nullptr || record->kind != kind || record->rkey != rkey ||
      record->address != address) {
    return nullptr;
  }
  return record;
}

AtomicRecord* ReplayQueue::FindByPsn(Psn psn) {
  for (uint32_t age = 0; age < count_; ++age) {
    if (Newest(age).psn == psn) return &Newest(age);
  }
  return nullptr;
}

AtomicRecord* ReplayQueue::FindByTicket(Ticket ticket) {
  for (uint32_t age = 0; age < count_; ++age) {
    if (Newest(age).ticket == ticket) return &Newest(age);
  }
  return nullptr;
}

}  // namespace verbena::transport
