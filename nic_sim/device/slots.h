// SPDX-License-Identifier: Apache-2.0
//
// Slots of a context's tables, and of rings.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace verbena::nic {

// First free slot of a table that may grow to `limit`; `limit` if none.
template <typename Table>
uint32_t FreeSlot(Table& table, uint32_t limit) {
  for (uint32_t i = 0; i < table.size(); ++i) {
    if (table[i] == nullptr) return i;
  }
  if (table.size() >= limit) return limit;
  table.emplace_back();
  return static_cast<uint32_t>(table.size() - 1);
}

// Of a ring for so many entries.
inline uint32_t Slots(uint32_t entries) { return std::bit_ceil(std::max(entries, 1u)); }

}  // namespace verbena::nic
