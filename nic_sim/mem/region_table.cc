// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/mem/region_table.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

namespace verbena::nic {
namespace {

using transport::MemoryAccess;
using transport::MemoryStatus;

constexpr uint32_t kIndexMask = 0xffffff;

constexpr uint32_t kKnownAccess = transport::kAccessLocalWrite | transport::kAccessRemoteWrite |
                                  transport::kAccessRemoteRead | transport::kAccessRemoteAtomic |
                                  transport::kAccessMwBind | transport::kAccessZeroBased;
// IBV_ACCESS_HUGETLB, and IBV_ACCESS_OPTIONAL_RANGE, which a device that does
// not know a bit must ignore.
constexpr uint32_t kHints = 1u << 7 | 0x3ff00000u;

constexpr uint32_t RightFor(MemoryAccess access) {
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
  }
  return ~0u;
}

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

void RegionTable::Unmap::operator()(void* memory) const { munmap(memory, bytes); }

template <typename T>
RegionTable::LazyArray<T> RegionTable::MapArray(uint32_t count) {
  const size_t bytes = std::max<size_t>(count, 1) * sizeof(T);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();  // start-up: no address space for the table
  return LazyArray<T>(static_cast<T*>(memory), Unmap{bytes});
}

RegionTable::RegionTable(uint32_t capacity, uint64_t seed)
    : capacity_(std::min(capacity, kIndexMask + 1)),
      first_index_(static_cast<uint32_t>(Mix(seed)) & kIndexMask),
      first_tag_(static_cast<uint8_t>(Mix(seed) >> 56)),
      slots_(MapArray<Slot>(capacity_)),
      live_(MapArray<uint32_t>(capacity_)),
      free_(MapArray<uint32_t>(capacity_)) {}

RegionTable::~RegionTable() = default;

int RegionTable::Register(const Region& region, uint32_t* key) {
  const uint32_t access = region.access & ~kHints;
  if ((access & ~kKnownAccess) != 0) return EINVAL;
  constexpr uint32_t kNeedLocalWrite =
      transport::kAccessRemoteWrite | transport::kAccessRemoteAtomic;
  if ((access & kNeedLocalWrite) != 0 && (access & transport::kAccessLocalWrite) == 0) {
    return EINVAL;
  }
  const uint64_t iova = (access & transport::kAccessZeroBased) != 0 ? 0 : region.iova;
  if (region.length == 0 || region.address + region.length < region.address ||
      iova + region.length < iova) {
    return EINVAL;
  }
  if (live_count_ == capacity_) return ENOMEM;

  // Slots never used come first, then the one that has been free for longest.
  uint32_t index;
  if (untouched_ < capacity_) {
    index = untouched_++;
    slots_[index].tag = static_cast<uint8_t>(first_tag_ + Mix(index));
  } else {
    index = free_[free_head_];
    free_head_ = (free_head_ + 1) % capacity_;
    --free_count_;
  }
  Slot& slot = slots_[index];
  const uint32_t key_index = (first_index_ + index) & kIndexMask;
  ++slot.tag;
  if (key_index == 0 && slot.tag == 0) slot.tag = 1;  // key 0 means none

  slot.region = region;
  slot.region.access = access;
  slot.region.iova = iova;
  slot.region.key = key_index << 8 | slot.tag;
  slot.live_position = live_count_;
  live_[live_count_++] = index;
  *key = slot.region.key;
  return 0;
}

const RegionTable::Slot* RegionTable::FindSlot(uint32_t key) const {
  const uint32_t index = ((key >> 8) - first_index_) & kIndexMask;
  if (index >= untouched_) return nullptr;
  const Slot& slot = slots_[index];
  return slot.region.key == key && key != 0 ? &slot : nullptr;
}

bool RegionTable::Deregister(uint32_t key) {
  const Slot* found = FindSlot(key);
  if (found == nullptr) return false;
  const auto index = static_cast<uint32_t>(found - slots_.get());
  Slot& slot = slots_[index];
  const uint32_t last = live_[--live_count_];
  live_[slot.live_position] = last;
  slots_[last].live_position = slot.live_position;
  slot.region = Region{};
  free_[(free_head_ + free_count_++) % capacity_] = index;
  return true;
}

const Region* RegionTable::Find(uint32_t key) const {
  const Slot* slot = FindSlot(key);
  return slot == nullptr ? nullptr : &slot->region;
}

MemoryStatus RegionTable::Translate(uint32_t key, PdId pd, uint64_t address, uint64_t length,
                                    MemoryAccess access, Extent* extent) const {
  const Region* region = Find(key);
  if (region == nullptr) return MemoryStatus::kBadKey;
  if (region->pd != pd) return MemoryStatus::kWrongPd;
  const uint32_t right = RightFor(access);
  if ((region->access & right) != right) return MemoryStatus::kNoRight;
  // An address below iova gives a huge offset, so no sum here can wrap.
  const uint64_t offset = address - region->iova;
  if (offset > region->length || length > region->length - offset) {
    return MemoryStatus::kOutOfBounds;
  }
  *extent = {region->space, region->address + offset, FullDmaClaim{this, key, pd, access}};
  return MemoryStatus::kOk;
}

}  // namespace verbena::nic
