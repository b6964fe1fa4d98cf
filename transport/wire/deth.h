// SPDX-License-Identifier: Apache-2.0
//
// Datagram Extended Transport Header, 8 bytes: Q_Key 32, resv 8, SrcQP 24.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/base/byteorder.h"
#include "transport/types.h"

namespace verbena::transport {

struct Deth {
  static constexpr size_t kBytes = 8;

  Qkey qkey;
  uint8_t reserved = 0;
  Qpn source_qpn;

  static constexpr Deth Load(const std::byte* p) {
    return Deth{Qkey(LoadBe32(p)), LoadBe8(p + 4), Qpn(LoadBe24(p + 5))};
  }
  constexpr void Store(std::byte* p) const {
    StoreBe32(p, qkey.value());
    StoreBe8(p + 4, reserved);
    StoreBe24(p + 5, source_qpn.value());
  }
  constexpr bool operator==(const Deth&) const = default;
};

}  // namespace verbena::transport
