// SPDX-License-Identifier: Apache-2.0
//
// RegionTable: the memory translation and protection table of one NIC: key →
// region → address in an application. Keys are a 24-bit index and an 8-bit tag
// as in IBTA; the index starts at a random number and is not reused soon.
//
// Thread: control commands and the engine under the shard's lock.
#pragma once

#include <cstdint>
#include <memory>

#include "nic_sim/mem/address_space.h"
#include "transport/memory_port.h"

namespace verbena::nic {

// A protection domain of a NIC; unique over all contexts.
using PdId = uint32_t;

struct Region {
  AddressSpace* space = nullptr;
  PdId pd = 0;
  uint32_t access = 0;   // transport::AccessFlag
  uint64_t iova = 0;     // first address that SGEs and peers use
  uint64_t length = 0;   // bytes, > 0
  uint64_t address = 0;  // where that is in the application
  uint32_t key = 0;      // lkey = rkey
  uint64_t owner = 0;    // cookie of the context, for listing
};

// Where a checked range lies.
struct Extent {
  AddressSpace* space = nullptr;
  uint64_t address = 0;
};

class RegionTable {
 public:
  RegionTable(uint32_t capacity, uint64_t seed);
  ~RegionTable();

  // 0 (with *key) or an errno: ENOMEM (table full), EINVAL (length 0, range
  // wraps, REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE, unknown bits).
  // `region.key` is ignored.
  int Register(const Region& region, uint32_t* key);
  // False if there is no such key.
  bool Deregister(uint32_t key);
  // nullptr if unknown.
  const Region* Find(uint32_t key) const;

  transport::MemoryStatus Translate(uint32_t key, PdId pd, uint64_t address,
                                    uint64_t length,
                                    transport::MemoryAccess access,
                                    Extent* extent) const;

  uint32_t size() const;
  // Calls visit(const Region&) for each region.
  template <typename Visitor>
  void ForEach(Visitor visit) const {
    for (uint32_t i = 0; i < capacity_; ++i) {
      if (entries_[i].key != 0) visit(entries_[i]);
    }
  }

 private:
  uint32_t capacity_;
  std::unique_ptr<Region[]> entries_;  // key 0: free
  struct FreeList;
  std::unique_ptr<FreeList> free_;
};

}  // namespace verbena::nic
