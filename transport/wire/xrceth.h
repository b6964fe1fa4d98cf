// SPDX-License-Identifier: Apache-2.0
//
// XRC Extended Transport Header, 4 bytes: resv 8, XRCSRQ 24. In every XRC
// request packet, directly behind the BTH.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/base/byteorder.h"
#include "transport/types.h"

namespace verbena::transport {

struct XrcEth {
  static constexpr size_t kBytes = 4;

  uint8_t reserved = 0;
  SrqNumber srq;

  static constexpr XrcEth Load(const std::byte* p) {
    return XrcEth{LoadBe8(p), SrqNumber(LoadBe24(p + 1))};
  }
  constexpr void Store(std::byte* p) const {
    StoreBe8(p, reserved);
    StoreBe24(p + 1, srq.value());
  }
  constexpr bool operator==(const XrcEth&) const = default;
};

}  // namespace verbena::transport
