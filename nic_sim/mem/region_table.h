// SPDX-License-Identifier: Apache-2.0
//
// RegionTable: the memory translation and protection table of one NIC: key →
// region → address in an application. Keys are a 24-bit index and an 8-bit tag
// as in IBTA; the index starts at a random number and is not reused soon.
// Memory windows are rows of the same table; the tag of their key is chosen by
// who binds them.
//
// Thread: control commands and the engine under the shard's lock.
#pragma once

#include <cstdint>
#include <memory>

#include "nic_sim/mem/address_space.h"
#include "nic_sim/mem/dma_claim.h"
#include "transport/memory_port.h"

namespace verbena::nic {

// A protection domain of a NIC; unique over all contexts.
using PdId = uint32_t;

enum class RegionKind : uint8_t {
  kMemory,
  kNull,     // what is written is discarded, zeros are read; local access only
  kWindow1,  // memory window; usable by the QPs of its PD
  kWindow2,  // by the QP that bound it
};

struct Region {
  AddressSpace* space = nullptr;
  PdId pd = 0;
  uint32_t access = 0;   // transport::AccessFlag
  uint64_t iova = 0;     // first address that SGEs and peers use
  uint64_t length = 0;   // bytes, > 0
  uint64_t address = 0;  // where that is in the application
  uint32_t key = 0;      // lkey = rkey
  uint64_t owner = 0;    // cookie of the context, for listing
  RegionKind kind = RegionKind::kMemory;
  uint32_t parent = 0;   // window: key of the region that it opens onto; 0: none
  uint32_t qpn = 0;      // window of type 2, bound: by which QP
  uint32_t windows = 0;  // region: bound windows

  bool is_window() const { return kind == RegionKind::kWindow1 || kind == RegionKind::kWindow2; }
};

// Where a checked range lies, and in builds that check again why it may be
// touched.
struct Extent {
  AddressSpace* space = nullptr;
  uint64_t address = 0;
  [[no_unique_address]] DmaClaim claim{};
  bool null = false;  // no memory is behind it, see RegionKind::kNull
};

class RegionTable {
 public:
  RegionTable(uint32_t capacity, uint64_t seed);
  ~RegionTable();

  // 0 (with *key) or an errno: ENOMEM (table full), EINVAL (length 0, range
  // wraps, REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE, unknown bits).
  // `region.key` is ignored, and `region.iova` too with ZERO_BASED: it is 0.
  // Hints (huge pages, the optional bits 20-29) are accepted and dropped.
  int Register(const Region& region, uint32_t* key);
  // False if there is no such key. Windows that open onto the region are unbound.
  bool Deregister(uint32_t key);
  // Changes range, PD or rights of a region (`region.key`) that no window opens
  // onto; the key stays. 0, EINVAL as at Register, EBUSY.
  int Change(const Region& region);

  // A window, not bound. 0 (with *key) or ENOMEM.
  int AllocateWindow(RegionKind kind, PdId pd, uint64_t owner, uint32_t* key);
  // `bind.window` may be any key of the window's index. kOk, or why not (IBTA
  // Vol 1 §10.6.7.2, §11.2.7): the window is of another PD; its type is 2 and it is bound; the
  // region lacks MW_BIND or, for remote writes and atomics, LOCAL_WRITE.
  transport::MemoryStatus Bind(const transport::WindowBind& bind, PdId pd, uint32_t qpn);
  // A window of type 2 that this QP has bound.
  transport::MemoryStatus Invalidate(uint32_t key, PdId pd, uint32_t qpn);
  // The QP is going away: its windows of type 2 are unbound.
  void UnbindWindowsOf(uint32_t qpn);
  // The window whose key has this index, or nullptr.
  const Region* FindWindow(uint32_t key) const;
  // nullptr if unknown. Valid until the region is deregistered.
  const Region* Find(uint32_t key) const;

  // `qpn`: who asks; matters for windows of type 2.
  transport::MemoryStatus Translate(uint32_t key, PdId pd, uint64_t address, uint64_t length,
                                    transport::MemoryAccess access, Extent* extent,
                                    uint32_t qpn = 0) const;

  uint32_t size() const { return live_count_; }
  uint32_t window_count() const { return window_count_; }  // of those
  // Calls visit(const Region&) for each region, in no particular order, in time
  // proportional to size(). The visitor may deregister the region it is given.
  template <typename Visitor>
  void ForEach(Visitor visit) const {
    for (uint32_t i = live_count_; i-- > 0;) visit(slots_[live_[i]].region);
  }

 private:
  struct Slot {
    Region region;           // key 0: free
    uint32_t live_position;  // in live_
    uint8_t tag;             // of the last key of this slot
  };
  // Pages that were never written cost nothing.
  struct Unmap {
    size_t bytes = 0;
    void operator()(void* memory) const;
  };
  template <typename T>
  using LazyArray = std::unique_ptr<T[], Unmap>;
  template <typename T>
  static LazyArray<T> MapArray(uint32_t count);

  const Slot* FindSlot(uint32_t key) const;
  uint32_t TakeSlot();
  uint32_t Add(uint32_t index, const Region& region);
  void Unbind(Region& window);

  uint32_t capacity_;
  uint32_t first_index_;  // key index of slot 0
  uint8_t first_tag_;
  LazyArray<Slot> slots_;
  LazyArray<uint32_t> live_;  // slots in use, live_count_ of them
  LazyArray<uint32_t> free_;  // ring of freed slots, oldest first
  uint32_t live_count_ = 0;
  uint32_t window_count_ = 0;
  uint32_t bound_by_qps_ = 0;  // windows of type 2
  uint32_t untouched_ = 0;     // slots from here on were never used
  uint32_t free_head_ = 0;
  uint32_t free_count_ = 0;
};

}  // namespace verbena::nic
