// SPDX-License-Identifier: Apache-2.0
//
// A management datagram on its way between a NIC's QP1 and the CM protocol:
// the 256 bytes of payload and the path that its packet takes or took.
// On the wire: UD SEND_ONLY, source and destination QP 1, Q_Key 0x80010000,
// AckReq set as Linux does.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/types.h"

namespace verbena::transport {

inline constexpr size_t kMadBytes = 256;
inline constexpr Qkey kManagementQkey{0x80010000};

struct MadPacket {
  uint32_t nic = 0;        // sent by, or received at, this NIC of the host
  uint8_t sgid_index = 0;  // sent only: index of `source` in the NIC's GID table
  Gid source;              // IP source; when received: as in the IP header
  Gid destination;         // IP destination
  uint32_t flow_label = 0;
  uint8_t traffic_class = 0;
  uint8_t hop_limit = 64;
  Pkey pkey = kDefaultPkey;
  std::array<std::byte, kMadBytes> bytes{};
};

}  // namespace verbena::transport
