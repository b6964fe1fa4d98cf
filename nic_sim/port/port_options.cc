// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/port/port_options.h"

#include <algorithm>
#include <charconv>

namespace verbena::nic {

using transport::Gid;

namespace {

constexpr size_t kMaxInterfaceName = 15;  // IFNAMSIZ - 1

// What Linux takes as a name, without what ends an argument of a DPDK device.
bool IsInterfaceName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxInterfaceName && name != "." && name != ".." &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return c > ' ' && c < 0x7f && c != '/' && c != ',' && c != '=' && c != '[' && c != ']' &&
                  c != '(' && c != ')' && c != '"' && c != ':';
         });
}

}  // namespace

std::optional<PortSpec> ParsePortSpec(std::string_view text, std::string* error) {
  const size_t colon = text.find(':');
  const std::string_view driver = text.substr(0, colon);
  PortSpec spec;
  if (driver == "tap") {
    spec.driver = PortDriver::kTap;
  } else if (driver != "af_packet") {
    *error = "'" + std::string(text) +
             "' is no port; write af_packet:NETDEV (one that exists) or tap:NETDEV (to be made)";
    return std::nullopt;
  }
  if (colon != std::string_view::npos) spec.interface = text.substr(colon + 1);
  if (!IsInterfaceName(spec.interface)) {
    *error = "'" + std::string(text) + "' has no name of a netdev (1 to 15 characters) behind ':'";
    return std::nullopt;
  }
  return spec;
}

std::string ToString(const PortSpec& spec) {
  return (spec.driver == PortDriver::kTap ? "tap:" : "af_packet:") + spec.interface;
}

std::optional<InterfaceAddress> ParseInterfaceAddress(std::string_view text) {
  const size_t slash = text.find('/');
  const auto gid = Gid::Parse(text.substr(0, slash));
  if (!gid || gid->IsMulticast() || gid->IsZero() || *gid == Gid::FromIpv4(0)) return std::nullopt;
  const bool ipv4 = gid->IsV4Mapped();
  unsigned bits = ipv4 ? 24 : 64;
  if (slash != std::string_view::npos) {
    const std::string_view length = text.substr(slash + 1);
    const auto [end, problem] = std::from_chars(length.data(), length.data() + length.size(), bits);
    if (problem != std::errc() || end != length.data() + length.size()) return std::nullopt;
    if (bits == 0 || bits > (ipv4 ? 32u : 128u)) return std::nullopt;
  }
  return InterfaceAddress{*gid, static_cast<uint8_t>(ipv4 ? 96 + bits : bits)};
}

bool SamePrefix(const Gid& a, const Gid& b, unsigned bits) {
  const size_t whole = bits / 8;
  if (!std::equal(a.bytes().begin(), a.bytes().begin() + static_cast<long>(whole),
                  b.bytes().begin())) {
    return false;
  }
  if (bits % 8 == 0) return true;
  const auto differ = std::to_integer<unsigned>(a.bytes()[whole] ^ b.bytes()[whole]);
  return differ >> (8 - bits % 8) == 0;
}

bool IsLoopback(const Gid& gid) {
  if (gid.IsV4Mapped()) return gid.Ipv4() >> 24 == 127;
  return transport::LoadBe64(&gid.bytes()[0]) == 0 && transport::LoadBe64(&gid.bytes()[8]) == 1;
}

}  // namespace verbena::nic
