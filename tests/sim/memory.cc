// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/memory.h"

#include <algorithm>
#include <cstring>

#include "tests/sim/random.h"

namespace verbena::sim {
namespace {

std::vector<std::byte> MakePattern() {
  std::vector<std::byte> pattern(kPatternBytes);
  Random random(1);
  for (size_t i = 0; i < pattern.size(); i += 8) {
    const uint64_t value = random.Next();
    std::memcpy(&pattern[i], &value, sizeof(value));
  }
  return pattern;
}

const std::vector<std::byte>& PatternBytes() {
  static const std::vector<std::byte> pattern = MakePattern();
  return pattern;
}

bool Contains(uint64_t base, uint64_t size, uint64_t address, uint64_t length) {
  return address >= base && address - base <= size && length <= size - (address - base);
}

}  // namespace

std::span<const std::byte> Pattern(uint64_t offset, uint64_t bytes) {
  return std::span(PatternBytes()).subspan(offset, bytes);
}

HostMemory::HostMemory() : targets_(1 << 16) {}

uint64_t HostMemory::Allocate(uint32_t bytes) {
  const uint64_t at = (used_ + 15) / 8 * 8;
  used_ = at + bytes;
  if (targets_.size() < used_) targets_.resize(std::max<size_t>(2 * targets_.size(), used_));
  return kTargetBase + at;
}

uint32_t HostMemory::AddWindow(bool over_targets) {
  if ((windows_.size() % 2 != 0) != over_targets) windows_.push_back(false);
  windows_.push_back(true);
  return kFirstWindow + static_cast<uint32_t>(windows_.size() - 1);
}

MemoryStatus HostMemory::Check(uint32_t key, uint64_t address, uint64_t length,
                               MemoryAccess access) const {
  if (key == kForeignKey) return MemoryStatus::kWrongPd;
  const bool is_window = IsWindow(key);
  if (is_window ? !windows_[key - kFirstWindow]
                : key != kPatternKey && key != kTargetKey && key != kLocalKey) {
    return MemoryStatus::kBadKey;
  }
  const bool is_pattern = is_window ? key % 2 == 0 : key == kPatternKey;
  const bool is_read = access == MemoryAccess::kLocalRead || access == MemoryAccess::kRemoteRead;
  const bool is_local = access == MemoryAccess::kLocalRead || access == MemoryAccess::kLocalWrite;
  if (is_pattern ? !is_read : key != kTargetKey && !is_local) return MemoryStatus::kNoRight;
  const bool inside = is_pattern ? Contains(kPatternBase, kPatternBytes, address, length)
                                 : Contains(kTargetBase, used_, address, length);
  return inside ? MemoryStatus::kOk : MemoryStatus::kOutOfBounds;
}

MemoryStatus HostMemory::Invalidate(uint32_t key) {
  if (IsWindow(key) && windows_[key - kFirstWindow]) {
    RemoveWindow(key);
    return MemoryStatus::kOk;
  }
  const bool is_region = key == kPatternKey || key == kTargetKey || key == kLocalKey;
  return is_region ? MemoryStatus::kNoRight : MemoryStatus::kBadKey;
}

MemoryStatus HostMemory::Bind(const transport::WindowBind& bind) {
  if (!IsWindow(bind.new_key) || bind.region_key != kPatternKey) return MemoryStatus::kBadKey;
  windows_[bind.new_key - kFirstWindow] = true;
  return MemoryStatus::kOk;
}

std::span<const std::byte> HostMemory::Read(uint64_t address, uint64_t bytes) const {
  if (address < kTargetBase) return Pattern(address - kPatternBase, bytes);
  return std::span(targets_).subspan(address - kTargetBase, bytes);
}

void HostMemory::Write(uint64_t address, std::span<const std::byte> bytes) {
  if (!bytes.empty()) {
    std::memcpy(&targets_[address - kTargetBase], bytes.data(), bytes.size());
  }
}

uint64_t HostMemory::Word(uint64_t address) const {
  uint64_t word;
  std::memcpy(&word, &targets_[address - kTargetBase], sizeof(word));
  return word;
}

Port::Operation& Port::Append(uint64_t address) {
  Operation& operation = operations_.emplace_back();
  operation.ticket = next_ticket_++;
  operation.address = address;
  operation.sequence = watcher_.CurrentSequence();
  operation.offset = static_cast<uint32_t>(bytes_.size());
  operation.length = 0;
  operation.is_atomic = false;
  return operation;
}

MemoryStatus Port::Place(const MemorySegment& to, std::span<const std::byte> bytes,
                         MemoryAccess access, bool /*last*/, Ticket* ticket) {
  const MemoryStatus status = Check(to.key, to.address, bytes.size(), access);
  if (status != MemoryStatus::kOk) return status;
  watcher_.OnPlace(responder_, to, bytes, access);
  Operation& operation = Append(to.address);
  operation.length = static_cast<uint32_t>(bytes.size());
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  *ticket = operation.ticket;
  return MemoryStatus::kOk;
}

MemoryStatus Port::Atomic(uint32_t rkey, uint64_t address,
                          const transport::AtomicOperation& operation, Ticket* ticket) {
  const MemoryStatus status = Check(rkey, address, 8, MemoryAccess::kRemoteAtomic);
  if (status != MemoryStatus::kOk) return status;
  Operation& queued = Append(address);
  queued.is_atomic = true;
  queued.atomic = operation;
  queued.name = watcher_.OnAtomic(address, operation);
  *ticket = queued.ticket;
  return MemoryStatus::kOk;
}

MemoryStatus Port::Invalidate(uint32_t rkey) {
  const MemoryStatus status = memory_.Invalidate(rkey);
  watcher_.OnInvalidate(responder_, rkey, status == MemoryStatus::kOk);
  return status;
}

MemoryStatus Port::Bind(const transport::WindowBind& bind) {
  const MemoryStatus status = memory_.Bind(bind);
  if (status == MemoryStatus::kOk) watcher_.OnBind(bind);
  return status;
}

Port::Committed Port::CommitOldest() {
  const Operation& operation = operations_[first_];
  Committed result{operation.ticket, operation.is_atomic, 0};
  if (operation.is_atomic) {
    uint64_t value = memory_.Word(operation.address);
    result.original = value;
    if (operation.atomic.kind == transport::AtomicKind::kFetchAdd) {
      value += operation.atomic.swap_or_add;
    } else if (value == operation.atomic.compare) {
      value = operation.atomic.swap_or_add;
    }
    memory_.Write(operation.address, std::as_bytes(std::span(&value, 1)));
    watcher_.OnAtomicExecuted(operation.name, result.original);
  } else {
    memory_.Write(operation.address, std::span(bytes_).subspan(operation.offset, operation.length));
  }
  if (++first_ == operations_.size()) Clear();
  return result;
}

void Port::Clear() {
  operations_.clear();
  bytes_.clear();
  first_ = 0;
}

}  // namespace verbena::sim
