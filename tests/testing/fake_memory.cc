// SPDX-License-Identifier: Apache-2.0
#include "tests/testing/fake_memory.h"

#include <algorithm>
#include <cstring>

namespace verbena::testing {

using transport::MemoryAccess;
using transport::MemorySegment;
using transport::MemoryStatus;
using transport::Ticket;

namespace {

uint32_t RightFor(MemoryAccess access) {
  switch (access) {
    case MemoryAccess::kLocalRead:
      return 0;
    case MemoryAccess::kLocalWrite:
      return transport::kAccessLocalWrite;
    case MemoryAccess::kRemoteRead:
      return transport::kAccessRemoteRead;
    case MemoryAccess::kRemoteWrite:
      return transport::kAccessRemoteWrite;
    case MemoryAccess::kRemoteAtomic:
      return transport::kAccessRemoteAtomic;
    case MemoryAccess::kRemoteFlush:
      return transport::kAccessFlushGlobal;
  }
  return ~0u;
}

}  // namespace

void FakeMemory::AddRegion(uint32_t key, uint64_t address, size_t bytes, uint32_t access) {
  Region region;
  region.address = address;
  region.bytes = bytes;
  region.access = access;
  region.storage.assign(bytes + 2 * kGuardBytes, kGuard);
  std::fill_n(region.storage.begin() + kGuardBytes, bytes, std::byte{0});
  regions_[key] = std::move(region);
}

std::byte* FakeMemory::Pointer(Region& region, uint64_t address) {
  return region.storage.data() + kGuardBytes + (address - region.address);
}

std::span<std::byte> FakeMemory::Bytes(uint32_t key) {
  Region& region = regions_.at(key);
  return {region.storage.data() + kGuardBytes, region.bytes};
}

std::span<std::byte> FakeMemory::At(uint32_t key, uint64_t address, size_t bytes) {
  return Bytes(key).subspan(address - regions_.at(key).address, bytes);
}

uint64_t FakeMemory::Word(uint32_t key, uint64_t address) {
  uint64_t value = 0;
  std::memcpy(&value, At(key, address, sizeof(value)).data(), sizeof(value));
  return value;
}

void FakeMemory::SetWord(uint32_t key, uint64_t address, uint64_t value) {
  std::memcpy(At(key, address, sizeof(value)).data(), &value, sizeof(value));
}

MemoryStatus FakeMemory::Check(uint32_t key, uint64_t address, uint64_t length,
                               MemoryAccess access) {
  ++checks_;
  const auto found = regions_.find(key);
  if (found == regions_.end()) return MemoryStatus::kBadKey;
  const Region& region = found->second;
  if (region.other_pd) return MemoryStatus::kWrongPd;
  if ((region.access & RightFor(access)) != RightFor(access)) return MemoryStatus::kNoRight;
  if (address < region.address || length > region.bytes ||
      address - region.address > region.bytes - length) {
    return MemoryStatus::kOutOfBounds;
  }
  return MemoryStatus::kOk;
}

MemoryStatus FakeMemory::CheckKey(uint32_t key, MemoryAccess access) {
  const auto found = regions_.find(key);
  return found == regions_.end() ? MemoryStatus::kBadKey
                                 : Check(key, found->second.address, 0, access);
}

MemoryStatus FakeMemory::Fetch(std::span<const MemorySegment> segments, MemoryAccess access,
                               std::vector<std::byte>* out) {
  for (const MemorySegment& segment : segments) {
    const MemoryStatus status = Check(segment.key, segment.address, segment.length, access);
    if (status != MemoryStatus::kOk) return status;
    if (regions_.at(segment.key).unmapped) return MemoryStatus::kFault;
    const auto bytes = At(segment.key, segment.address, segment.length);
    out->insert(out->end(), bytes.begin(), bytes.end());
  }
  return MemoryStatus::kOk;
}

MemoryStatus FakeMemory::Place(const MemorySegment& to, std::span<const std::byte> bytes,
                               MemoryAccess access, bool /*last*/, Ticket* ticket) {
  const MemoryStatus status = Check(to.key, to.address, bytes.size(), access);
  if (status != MemoryStatus::kOk) return status;
  Operation operation;
  operation.ticket = next_ticket_++;
  operation.key = to.key;
  operation.address = to.address;
  operation.bytes.assign(bytes.begin(), bytes.end());
  *ticket = operation.ticket;
  pending_.push_back(std::move(operation));
  if (!deferred_ && !regions_.at(to.key).unmapped && pending_.size() == 1) {
    Execute(pending_.front(), false);
    pending_.pop_front();
    *ticket = 0;
  }
  return MemoryStatus::kOk;
}

MemoryStatus FakeMemory::Atomic(uint32_t rkey, uint64_t address,
                                const transport::AtomicOperation& operation, Ticket* ticket) {
  const MemoryStatus status = Check(rkey, address, 8, MemoryAccess::kRemoteAtomic);
  if (status != MemoryStatus::kOk) return status;
  Operation pending;
  pending.ticket = next_ticket_++;
  pending.key = rkey;
  pending.address = address;
  pending.is_atomic = true;
  pending.atomic = operation;
  *ticket = pending.ticket;
  pending_.push_back(std::move(pending));
  return MemoryStatus::kOk;
}

MemoryStatus FakeMemory::Invalidate(uint32_t rkey) {
  const auto found = regions_.find(rkey);
  if (found == regions_.end()) return MemoryStatus::kBadKey;
  if (!found->second.may_invalidate) return MemoryStatus::kNoRight;
  regions_.erase(found);
  return MemoryStatus::kOk;
}

FakeMemory::Committed FakeMemory::Execute(const Operation& operation, bool fail) {
  Committed result;
  result.ticket = operation.ticket;
  result.is_atomic = operation.is_atomic;
  const auto found = regions_.find(operation.key);
  if (found == regions_.end()) {
    result.failure = MemoryStatus::kBadKey;
  } else if (fail || found->second.unmapped) {
    result.failure = MemoryStatus::kFault;
  }
  if (result.failure.has_value()) return result;
  std::byte* at = Pointer(found->second, operation.address);
  if (!operation.is_atomic) {
    if (!operation.bytes.empty()) std::memcpy(at, operation.bytes.data(), operation.bytes.size());
    return result;
  }
  ++atomics_executed_;
  uint64_t value = 0;
  std::memcpy(&value, at, sizeof(value));
  result.original = value;
  if (operation.atomic.kind == transport::AtomicKind::kFetchAdd) {
    value += operation.atomic.swap_or_add;
  } else if (value == operation.atomic.compare) {
    value = operation.atomic.swap_or_add;
  }
  std::memcpy(at, &value, sizeof(value));
  return result;
}

FakeMemory::Committed FakeMemory::CommitNext(bool fail) {
  const Operation operation = std::move(pending_.front());
  pending_.pop_front();
  const Committed result = Execute(operation, fail);
  if (result.failure.has_value()) pending_.clear();
  return result;
}

bool FakeMemory::AreGuardsIntact() const {
  for (const auto& [key, region] : regions_) {
    for (size_t i = 0; i < kGuardBytes; ++i) {
      if (region.storage[i] != kGuard) return false;
      if (region.storage[kGuardBytes + region.bytes + i] != kGuard) return false;
    }
  }
  return true;
}

}  // namespace verbena::testing
