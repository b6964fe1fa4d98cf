// SPDX-License-Identifier: Apache-2.0
//
// RDMA Extended Transport Header, 16 bytes: VA 64, R_Key 32, DMA length 32.
// In the first packet of an RDMA WRITE and in every RDMA READ request.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/base/byteorder.h"
#include "transport/types.h"

namespace verbena::transport {

struct Reth {
  static constexpr size_t kBytes = 16;

  uint64_t va = 0;
  Rkey rkey;
  uint32_t dma_length = 0;  // bytes of the whole message; valid up to 2^31

  static constexpr Reth Load(const std::byte* p) {
    return Reth{LoadBe64(p), Rkey(LoadBe32(p + 8)), LoadBe32(p + 12)};
  }
  constexpr void Store(std::byte* p) const {
    StoreBe64(p, va);
    StoreBe32(p + 8, rkey.value());
    StoreBe32(p + 12, dma_length);
  }
  constexpr bool operator==(const Reth&) const = default;
};

}  // namespace verbena::transport
