// SPDX-License-Identifier: Apache-2.0
//
// How a NIC is joined to a Linux netdev, and its addresses there, as the command
// line and the configuration file say it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/types.h"

namespace verbena::nic {

enum class PortDriver : uint8_t {
  kAfPacket,  // a netdev that exists: one end of a veth pair, a tap, a real NIC
  kTap,       // a tap netdev that the daemon makes; the NIC is at its other end
};

struct PortSpec {
  PortDriver driver = PortDriver::kAfPacket;
  std::string interface;  // 1 to 15 characters

  bool operator==(const PortSpec&) const = default;
};

// "af_packet:veth0" or "tap:vtap0". Empty with a sentence.
std::optional<PortSpec> ParsePortSpec(std::string_view text, std::string* error);
std::string ToString(const PortSpec& spec);

struct InterfaceAddress {
  transport::Gid gid;
  // Addresses with these first bits in common are on the same link. Counted in
  // the 128 bits of the GID: an IPv4 /24 is 120.
  uint8_t prefix_bits = 128;

  bool operator==(const InterfaceAddress&) const = default;
};

// "10.0.0.1/24", "fd00::1/64"; without a length it is 24 or 64. Empty: no
// address of an interface.
std::optional<InterfaceAddress> ParseInterfaceAddress(std::string_view text);

bool SamePrefix(const transport::Gid& a, const transport::Gid& b, unsigned bits);
inline bool IsOnLink(const InterfaceAddress& own, const transport::Gid& other) {
  return own.gid.IsV4Mapped() == other.IsV4Mapped() && SamePrefix(own.gid, other, own.prefix_bits);
}
// 127.0.0.0/8 and ::1 never leave by a port.
bool IsLoopback(const transport::Gid& gid);

// What the configuration says of one NIC.
struct NicOptions {
  std::vector<InterfaceAddress> addresses;  // GIDs 1, 2, …; none: a default
  std::vector<transport::Gid> gateways;     // at most one of each family
  std::optional<transport::MacAddress> mac;
  std::optional<PortSpec> port;
};

}  // namespace verbena::nic
