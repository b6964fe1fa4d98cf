// SPDX-License-Identifier: Apache-2.0
//
// AtomicETH (28 bytes: VA 64, R_Key 32, swap or add 64, compare 64) of CMP_SWAP
// and FETCH_ADD, and AtomicAckETH (8 bytes: the value before the operation).
// Operands are big-endian on the wire and host order here and in memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/base/byteorder.h"
#include "transport/types.h"

namespace verbena::transport {

struct AtomicEth {
  static constexpr size_t kBytes = 28;

  uint64_t va = 0;
  Rkey rkey;
  uint64_t swap_add = 0;
  uint64_t compare = 0;  // not used by FETCH_ADD

  static constexpr AtomicEth Load(const std::byte* p) {
    return AtomicEth{LoadBe64(p), Rkey(LoadBe32(p + 8)), LoadBe64(p + 12), LoadBe64(p + 20)};
  }
  constexpr void Store(std::byte* p) const {
    StoreBe64(p, va);
    StoreBe32(p + 8, rkey.value());
    StoreBe64(p + 12, swap_add);
    StoreBe64(p + 20, compare);
  }
  constexpr bool operator==(const AtomicEth&) const = default;
};

struct AtomicAckEth {
  static constexpr size_t kBytes = 8;

  uint64_t original = 0;

  static constexpr AtomicAckEth Load(const std::byte* p) { return AtomicAckEth{LoadBe64(p)}; }
  constexpr void Store(std::byte* p) const { StoreBe64(p, original); }
  constexpr bool operator==(const AtomicAckEth&) const = default;
};

}  // namespace verbena::transport
