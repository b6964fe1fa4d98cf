// SPDX-License-Identifier: Apache-2.0
//
// Base Transport Header, 12 bytes, in every RoCE packet:
//   0  opcode 8 | SE 1, M 1, Pad 2, TVer 4 | P_Key 16
//   4  FECN 1, BECN 1, resv 6 | DestQP 24
//   8  A 1, resv 7 | PSN 24
// A plain value; Load reads and Store writes all twelve bytes, so a packet is
// reproduced exactly, reserved bits included. The caller guarantees the bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/base/byteorder.h"
#include "transport/psn.h"
#include "transport/types.h"
#include "transport/wire/opcode.h"

namespace verbena::transport {

struct Bth {
  static constexpr size_t kBytes = kBthBytes;

  Opcode opcode = Opcode::kRcSendFirst;  // may be a reserved code after Load
  bool solicited = false;                // SE
  // MigReq. 1 is the value of a QP in its initial path migration state
  // (Migrated); Linux rxe sends 0. Accept both.
  bool mig_req = true;
  uint8_t pad = 0;   // 0..3 zero bytes behind the payload
  uint8_t tver = 0;  // 0..15; only 0 is defined
  Pkey pkey = kDefaultPkey;
  bool fecn = false;
  bool becn = false;
  uint8_t reserved6 = 0;  // low six bits of byte 4; not covered by the ICRC
  Qpn dest_qpn;
  bool ack_req = false;
  uint8_t reserved7 = 0;  // low seven bits of byte 8
  Psn psn;

  static constexpr Bth Load(const std::byte* p) {
    const uint8_t flags = LoadBe8(p + 1);
    const uint8_t congestion = LoadBe8(p + 4);
    const uint8_t ack = LoadBe8(p + 8);
    return Bth{
        .opcode = static_cast<Opcode>(LoadBe8(p)),
        .solicited = (flags & 0x80) != 0,
        .mig_req = (flags & 0x40) != 0,
        .pad = static_cast<uint8_t>((flags >> 4) & 3),
        .tver = static_cast<uint8_t>(flags & 0x0f),
        .pkey = Pkey(LoadBe16(p + 2)),
        .fecn = (congestion & 0x80) != 0,
        .becn = (congestion & 0x40) != 0,
        .reserved6 = static_cast<uint8_t>(congestion & 0x3f),
        .dest_qpn = Qpn(LoadBe24(p + 5)),
        .ack_req = (ack & 0x80) != 0,
        .reserved7 = static_cast<uint8_t>(ack & 0x7f),
        .psn = Psn(LoadBe24(p + 9)),
    };
  }

  constexpr void Store(std::byte* p) const {
    StoreBe8(p, static_cast<uint8_t>(opcode));
    StoreBe8(p + 1, static_cast<uint8_t>((solicited ? 0x80 : 0) | (mig_req ? 0x40 : 0) |
                                         ((pad & 3) << 4) | (tver & 0x0f)));
    StoreBe16(p + 2, pkey.value());
    StoreBe8(p + 4,
             static_cast<uint8_t>((fecn ? 0x80 : 0) | (becn ? 0x40 : 0) | (reserved6 & 0x3f)));
    StoreBe24(p + 5, dest_qpn.value());
    StoreBe8(p + 8, static_cast<uint8_t>((ack_req ? 0x80 : 0) | (reserved7 & 0x7f)));
    StoreBe24(p + 9, psn.value());
  }

  constexpr bool operator==(const Bth&) const = default;
};

}  // namespace verbena::transport
