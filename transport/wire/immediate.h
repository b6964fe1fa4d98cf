// SPDX-License-Identifier: Apache-2.0
//
// The four-byte headers behind the others: ImmDt (immediate data), IETH
// (R_Key to invalidate) and FETH (flags of the optional FLUSH operation).
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/base/byteorder.h"
#include "transport/types.h"

namespace verbena::transport {

// Applications see imm_data in network order: `value` is the number that
// ntohl(imm_data) gives.
struct ImmDt {
  static constexpr size_t kBytes = 4;

  uint32_t value = 0;

  static constexpr ImmDt Load(const std::byte* p) { return ImmDt{LoadBe32(p)}; }
  constexpr void Store(std::byte* p) const { StoreBe32(p, value); }
  constexpr bool operator==(const ImmDt&) const = default;
};

struct Ieth {
  static constexpr size_t kBytes = 4;

  Rkey rkey;

  static constexpr Ieth Load(const std::byte* p) { return Ieth{Rkey(LoadBe32(p))}; }
  constexpr void Store(std::byte* p) const { StoreBe32(p, rkey.value()); }
  constexpr bool operator==(const Ieth&) const = default;
};

// How far what was written must have come (placement type, bits 0-3), and of
// which memory (selectivity level, bits 4-5).
struct Feth {
  static constexpr size_t kBytes = 4;
  static constexpr uint32_t kGlobal = 1;       // visible to all
  static constexpr uint32_t kPersistent = 2;   // survives a loss of power
  static constexpr uint32_t kLevelRange = 0;   // the range of the RETH
  static constexpr uint32_t kLevelRegion = 1;  // all of the region

  uint32_t value = 0;

  static constexpr Feth Of(uint32_t type, uint32_t level) {
    return Feth{(type & 0xf) | (level & 3) << 4};
  }
  constexpr uint32_t type() const { return value & 0xf; }
  constexpr uint32_t level() const { return value >> 4 & 3; }

  static constexpr Feth Load(const std::byte* p) { return Feth{LoadBe32(p)}; }
  constexpr void Store(std::byte* p) const { StoreBe32(p, value); }
  constexpr bool operator==(const Feth&) const = default;
};

}  // namespace verbena::transport
