// SPDX-License-Identifier: Apache-2.0
//
// DmaClaim: by what right a range of an application's memory is touched. In
// builds that check (--config=debug, asan, tsan, fuzz) it goes with each Extent
// to the copy, and right before the system call the range is looked up once
// more in the tables of its owner: a copy that they do not cover ends the
// process with a dump, before the first byte. In other builds it is empty.
//
// The check is independent of RegionTable::Translate, which made the extent:
// it asks for the region of the key, its PD, its process, its bounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/memory_port.h"

namespace verbena::nic {

class AddressSpace;
class RegionTable;

#ifdef VERBENA_CHECK_DMA
inline constexpr bool kCheckDma = true;
#else
inline constexpr bool kCheckDma = false;
#endif

struct FullDmaClaim {
  const RegionTable* table = nullptr;  // nullptr: no claim was made
  uint32_t key = 0;
  uint32_t pd = 0;
  transport::MemoryAccess access = transport::MemoryAccess::kLocalRead;
};

struct NoDmaClaim {
  constexpr NoDmaClaim() = default;
  constexpr NoDmaClaim(const FullDmaClaim&) {}  // NOLINT: stands in for the full one
};

template <bool kChecks>
struct DmaClaimOf {
  using Type = NoDmaClaim;
};
template <>
struct DmaClaimOf<true> {
  using Type = FullDmaClaim;
};
using DmaClaim = DmaClaimOf<kCheckDma>::Type;

inline bool HasClaim(const FullDmaClaim& claim) { return claim.table != nullptr; }
inline bool HasClaim(const NoDmaClaim&) { return false; }

// What is wrong with touching `length` bytes at `address` of `space` by this
// right, in a sentence with all numbers; empty if nothing is.
std::string ViolationOf(const FullDmaClaim& claim, const AddressSpace* space, uint64_t address,
                        uint64_t length);

// Ends the process, with the sentence, if something is.
void CheckClaim(const FullDmaClaim& claim, const AddressSpace* space, uint64_t address,
                uint64_t length);
inline void CheckClaim(const NoDmaClaim&, const AddressSpace*, uint64_t, uint64_t) {}

}  // namespace verbena::nic
