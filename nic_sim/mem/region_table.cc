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
                                  transport::kAccessMwBind | transport::kAccessZeroBased |
                                  transport::kAccessOnDemand | transport::kAccessFlushGlobal;
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
    case MemoryAccess::kRemoteFlush:
      return transport::kAccessFlushGlobal;
  }
  return ~0u;
}

// What a remote access is to the owner of the memory.
constexpr MemoryAccess LocalAccess(MemoryAccess access) {
  return access == MemoryAccess::kRemoteRead ? MemoryAccess::kLocalRead : MemoryAccess::kLocalWrite;
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

namespace {

// Makes the rights and first address of `region` what they will be. 0 or EINVAL.
int Normalise(Region* region) {
  const uint32_t access = region->access & ~kHints;
  if ((access & ~kKnownAccess) != 0) return EINVAL;
  constexpr uint32_t kNeedLocalWrite =
      transport::kAccessRemoteWrite | transport::kAccessRemoteAtomic;
  if ((access & kNeedLocalWrite) != 0 && (access & transport::kAccessLocalWrite) == 0) {
    return EINVAL;
  }
  const uint64_t iova = (access & transport::kAccessZeroBased) != 0 ? 0 : region->iova;
  // Nothing at all may be registered of memory that has no addresses of its own.
  const bool empty = region->length == 0 && (access & transport::kAccessZeroBased) == 0;
  if (empty || region->address + region->length < region->address || iova + region->length < iova) {
    return EINVAL;
  }
  region->access = access;
  region->iova = iova;
  return 0;
}

}  // namespace

int RegionTable::Register(const Region& region, uint32_t* key) {
  Region wanted = region;
  if (const int error = Normalise(&wanted); error != 0) return error;
  if (live_count_ == capacity_) return ENOMEM;
  *key = Add(TakeSlot(), wanted);
  return 0;
}

int RegionTable::Change(const Region& region) {
  Slot* slot = const_cast<Slot*>(FindSlot(region.key));
  if (slot == nullptr || slot->region.kind != RegionKind::kMemory) return EINVAL;
  if (slot->region.windows != 0) return EBUSY;
  Region wanted = region;
  if (const int error = Normalise(&wanted); error != 0) return error;
  slot->region = wanted;
  return 0;
}

// Slots never used come first, then the one that has been free for longest.
uint32_t RegionTable::TakeSlot() {
  if (untouched_ < capacity_) {
    const uint32_t index = untouched_++;
    slots_[index].tag = static_cast<uint8_t>(first_tag_ + Mix(index));
    return index;
  }
  const uint32_t index = free_[free_head_];
  free_head_ = (free_head_ + 1) % capacity_;
  --free_count_;
  return index;
}

uint32_t RegionTable::Add(uint32_t index, const Region& region) {
  Slot& slot = slots_[index];
  const uint32_t key_index = (first_index_ + index) & kIndexMask;
  ++slot.tag;
  if (key_index == 0 && slot.tag == 0) slot.tag = 1;  // key 0 means none
  slot.region = region;
  slot.region.key = key_index << 8 | slot.tag;
  slot.live_position = live_count_;
  live_[live_count_++] = index;
  return slot.region.key;
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
  if (slot.region.is_window()) {
    Unbind(slot.region);
    --window_count_;
    slot.tag = static_cast<uint8_t>(slot.region.key);  // was chosen by others
  }
  for (uint32_t i = 0; i < live_count_ && slot.region.windows != 0; ++i) {
    Region& other = slots_[live_[i]].region;
    if (other.is_window() && other.parent == key) Unbind(other);
  }
  const uint32_t last = live_[--live_count_];
  live_[slot.live_position] = last;
  slots_[last].live_position = slot.live_position;
  slot.region = Region{};
  free_[(free_head_ + free_count_++) % capacity_] = index;
  return true;
}

int RegionTable::AllocateWindow(RegionKind kind, PdId pd, uint64_t owner, uint32_t* key) {
  if (live_count_ == capacity_) return ENOMEM;
  Region window;
  window.kind = kind;
  window.pd = pd;
  window.owner = owner;
  *key = Add(TakeSlot(), window);
  ++window_count_;
  return 0;
}

const Region* RegionTable::FindWindow(uint32_t key) const {
  const uint32_t index = ((key >> 8) - first_index_) & kIndexMask;
  if (index >= untouched_) return nullptr;
  const Region& region = slots_[index].region;
  return region.key != 0 && region.is_window() ? &region : nullptr;
}

void RegionTable::Unbind(Region& window) {
  if (window.parent == 0) return;
  if (const Slot* parent = FindSlot(window.parent)) --const_cast<Slot*>(parent)->region.windows;
  if (window.kind == RegionKind::kWindow2) --bound_by_qps_;
  window.parent = 0;
  window.qpn = 0;
  window.access = 0;
  window.length = 0;
}

MemoryStatus RegionTable::Bind(const transport::WindowBind& bind, PdId pd, uint32_t qpn) {
  Region* window = const_cast<Region*>(FindWindow(bind.window));
  if (window == nullptr || bind.new_key == 0 || bind.new_key >> 8 != window->key >> 8) {
    return MemoryStatus::kBadKey;
  }
  if (window->pd != pd) return MemoryStatus::kWrongPd;
  const bool by_qp = window->kind == RegionKind::kWindow2;
  if (by_qp && window->parent != 0) return MemoryStatus::kNoRight;
  if (bind.length == 0) {
    if (by_qp) return MemoryStatus::kOutOfBounds;
    Unbind(*window);
    window->key = bind.new_key;
    return MemoryStatus::kOk;
  }
  Slot* slot = const_cast<Slot*>(FindSlot(bind.region_key));
  if (slot == nullptr || slot->region.kind != RegionKind::kMemory) return MemoryStatus::kBadKey;
  Region& region = slot->region;
  if (region.pd != pd) return MemoryStatus::kWrongPd;
  constexpr uint32_t kWindowRights = transport::kAccessLocalWrite | transport::kAccessRemoteWrite |
                                     transport::kAccessRemoteRead | transport::kAccessRemoteAtomic |
                                     transport::kAccessZeroBased;
  constexpr uint32_t kWrites = transport::kAccessRemoteWrite | transport::kAccessRemoteAtomic;
  if ((bind.access & ~kWindowRights) != 0 || (region.access & transport::kAccessMwBind) == 0 ||
      ((bind.access & kWrites) != 0 && (region.access & transport::kAccessLocalWrite) == 0) ||
      ((bind.access & transport::kAccessZeroBased) != 0 && !by_qp)) {
    return MemoryStatus::kNoRight;
  }
  const uint64_t offset = bind.address - region.iova;
  if (offset > region.length || bind.length > region.length - offset) {
    return MemoryStatus::kOutOfBounds;
  }
  Unbind(*window);
  window->key = bind.new_key;
  window->parent = region.key;
  window->qpn = by_qp ? qpn : 0;
  window->space = region.space;
  // For the checks a window that grants writing is like a region that does.
  window->access = bind.access & ~uint32_t{transport::kAccessLocalWrite};
  if ((bind.access & kWrites) != 0) window->access |= transport::kAccessLocalWrite;
  window->iova = (bind.access & transport::kAccessZeroBased) != 0 ? 0 : bind.address;
  window->length = bind.length;
  window->address = region.address + offset;
  ++region.windows;
  if (by_qp) ++bound_by_qps_;
  return MemoryStatus::kOk;
}

MemoryStatus RegionTable::Invalidate(uint32_t key, PdId pd, uint32_t qpn) {
  Slot* slot = const_cast<Slot*>(FindSlot(key));
  if (slot == nullptr) return MemoryStatus::kBadKey;
  Region& window = slot->region;
  if (window.kind != RegionKind::kWindow2) return MemoryStatus::kNoRight;
  if (window.pd != pd) return MemoryStatus::kWrongPd;
  if (window.parent == 0) return MemoryStatus::kBadKey;
  if (window.qpn != qpn) return MemoryStatus::kNoRight;
  Unbind(window);
  return MemoryStatus::kOk;
}

void RegionTable::UnbindWindowsOf(uint32_t qpn) {
  for (uint32_t i = 0; i < live_count_ && bound_by_qps_ != 0; ++i) {
    Region& region = slots_[live_[i]].region;
    if (region.kind == RegionKind::kWindow2 && region.parent != 0 && region.qpn == qpn) {
      Unbind(region);
    }
  }
}

const Region* RegionTable::Find(uint32_t key) const {
  const Slot* slot = FindSlot(key);
  return slot == nullptr ? nullptr : &slot->region;
}

MemoryStatus RegionTable::Translate(uint32_t key, PdId pd, uint64_t address, uint64_t length,
                                    MemoryAccess access, Extent* extent, uint32_t qpn) const {
  const Region* region = Find(key);
  if (region == nullptr) return MemoryStatus::kBadKey;
  if (region->pd != pd) return MemoryStatus::kWrongPd;
  const bool local = access == MemoryAccess::kLocalRead || access == MemoryAccess::kLocalWrite;
  if (region->kind != RegionKind::kMemory) {
    if (local != (region->kind == RegionKind::kNull)) return MemoryStatus::kBadKey;
    if (region->is_window() && region->parent == 0) return MemoryStatus::kBadKey;
    if (region->kind == RegionKind::kWindow2 && region->qpn != qpn) return MemoryStatus::kWrongPd;
  }
  const uint32_t right = RightFor(access);
  if ((region->access & right) != right) return MemoryStatus::kNoRight;
  // An address below iova gives a huge offset, so no sum here can wrap.
  const uint64_t offset = address - region->iova;
  if (offset > region->length || length > region->length - offset) {
    return MemoryStatus::kOutOfBounds;
  }
  // What came through a window stays right though the next packet of the pass invalidates it
  // (SEND with invalidate behind a WRITE), so the region below it must cover it.
  const bool window = region->is_window();
  const FullDmaClaim claim = {this, window ? region->parent : key, pd,
                              window ? LocalAccess(access) : access};
  *extent = {region->space, region->address + offset, claim, region->kind == RegionKind::kNull};
  return MemoryStatus::kOk;
}

}  // namespace verbena::nic
