// SPDX-License-Identifier: Apache-2.0
//
// Ethernet, VLAN, IPv4, IPv6 and UDP headers of a RoCEv2 packet as plain
// values, the IPv4 header checksum, ECN, and the UDP source port rule.
// Load/Store move every byte of the fixed part; the caller guarantees them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/base/byteorder.h"
#include "transport/types.h"

namespace verbena::transport {

inline constexpr uint16_t kEtherTypeIpv4 = 0x0800;
inline constexpr uint16_t kEtherTypeArp = 0x0806;
inline constexpr uint16_t kEtherTypeVlan = 0x8100;
inline constexpr uint16_t kEtherTypeIpv6 = 0x86dd;
inline constexpr uint8_t kIpProtocolUdp = 17;
inline constexpr uint8_t kIpv6FragmentHeader = 44;
inline constexpr uint16_t kRoceUdpPort = 4791;
inline constexpr uint8_t kDefaultHopLimit = 64;

// The low two bits of the IPv4 TOS byte and of the IPv6 traffic class.
enum class Ecn : uint8_t { kNotEct = 0, kEct1 = 1, kEct0 = 2, kCe = 3 };

struct EthernetHeader {
  static constexpr size_t kBytes = 14;

  MacAddress destination;
  MacAddress source;
  uint16_t ether_type = 0;

  static constexpr EthernetHeader Load(const std::byte* p) {
    return EthernetHeader{MacAddress::Load(p), MacAddress::Load(p + 6), LoadBe16(p + 12)};
  }
  constexpr void Store(std::byte* p) const {
    destination.Store(p);
    source.Store(p + 6);
    StoreBe16(p + 12, ether_type);
  }
  constexpr bool operator==(const EthernetHeader&) const = default;
};

// What follows EtherType 0x8100: priority 3, DEI 1, VLAN id 12, EtherType 16.
struct VlanTag {
  static constexpr size_t kBytes = 4;

  uint16_t tci = 0;
  uint16_t ether_type = 0;

  constexpr uint16_t vlan_id() const { return tci & 0x0fff; }
  static constexpr VlanTag Load(const std::byte* p) {
    return VlanTag{LoadBe16(p), LoadBe16(p + 2)};
  }
  constexpr void Store(std::byte* p) const {
    StoreBe16(p, tci);
    StoreBe16(p + 2, ether_type);
  }
  constexpr bool operator==(const VlanTag&) const = default;
};

// IPv4 header without options. Addresses in host order.
struct Ipv4Header {
  static constexpr size_t kBytes = 20;
  static constexpr uint16_t kDontFragment = 0x4000;
  static constexpr uint16_t kMoreFragments = 0x2000;
  static constexpr uint16_t kFragmentOffsetMask = 0x1fff;

  uint8_t version = 4;
  uint8_t header_words = 5;  // IHL, in units of four bytes
  uint8_t tos = 0;
  uint16_t total_length = 0;  // header and everything behind it
  uint16_t identification = 0;
  uint16_t flags_fragment = kDontFragment;  // flags 3, fragment offset 13
  uint8_t ttl = kDefaultHopLimit;
  uint8_t protocol = kIpProtocolUdp;
  uint16_t checksum = 0;
  uint32_t source = 0;
  uint32_t destination = 0;

  static constexpr Ipv4Header Load(const std::byte* p) {
    return Ipv4Header{
        .version = static_cast<uint8_t>(LoadBe8(p) >> 4),
        .header_words = static_cast<uint8_t>(LoadBe8(p) & 0x0f),
        .tos = LoadBe8(p + 1),
        .total_length = LoadBe16(p + 2),
        .identification = LoadBe16(p + 4),
        .flags_fragment = LoadBe16(p + 6),
        .ttl = LoadBe8(p + 8),
        .protocol = LoadBe8(p + 9),
        .checksum = LoadBe16(p + 10),
        .source = LoadBe32(p + 12),
        .destination = LoadBe32(p + 16),
    };
  }
  constexpr void Store(std::byte* p) const {
    StoreBe8(p, static_cast<uint8_t>((version << 4) | (header_words & 0x0f)));
    StoreBe8(p + 1, tos);
    StoreBe16(p + 2, total_length);
    StoreBe16(p + 4, identification);
    StoreBe16(p + 6, flags_fragment);
    StoreBe8(p + 8, ttl);
    StoreBe8(p + 9, protocol);
    StoreBe16(p + 10, checksum);
    StoreBe32(p + 12, source);
    StoreBe32(p + 16, destination);
  }
  constexpr bool operator==(const Ipv4Header&) const = default;
};

struct Ipv6Header {
  static constexpr size_t kBytes = 40;

  uint8_t version = 6;
  uint8_t traffic_class = 0;
  uint32_t flow_label = 0;      // 20 bits
  uint16_t payload_length = 0;  // everything behind this header
  uint8_t next_header = kIpProtocolUdp;
  uint8_t hop_limit = kDefaultHopLimit;
  Gid source;
  Gid destination;

  static constexpr Ipv6Header Load(const std::byte* p) {
    const uint32_t word = LoadBe32(p);
    return Ipv6Header{
        .version = static_cast<uint8_t>(word >> 28),
        .traffic_class = static_cast<uint8_t>(word >> 20),
        .flow_label = word & 0xfffff,
        .payload_length = LoadBe16(p + 4),
        .next_header = LoadBe8(p + 6),
        .hop_limit = LoadBe8(p + 7),
        .source = Gid::Load(p + 8),
        .destination = Gid::Load(p + 24),
    };
  }
  constexpr void Store(std::byte* p) const {
    StoreBe32(p,
              (uint32_t{version} << 28) | (uint32_t{traffic_class} << 20) | (flow_label & 0xfffff));
    StoreBe16(p + 4, payload_length);
    StoreBe8(p + 6, next_header);
    StoreBe8(p + 7, hop_limit);
    source.Store(p + 8);
    destination.Store(p + 24);
  }
  constexpr bool operator==(const Ipv6Header&) const = default;
};

struct UdpHeader {
  static constexpr size_t kBytes = 8;

  uint16_t source_port = 0;
  uint16_t destination_port = kRoceUdpPort;
  uint16_t length = 0;  // this header and everything behind it
  uint16_t checksum = 0;

  static constexpr UdpHeader Load(const std::byte* p) {
    return UdpHeader{LoadBe16(p), LoadBe16(p + 2), LoadBe16(p + 4), LoadBe16(p + 6)};
  }
  constexpr void Store(std::byte* p) const {
    StoreBe16(p, source_port);
    StoreBe16(p + 2, destination_port);
    StoreBe16(p + 4, length);
    StoreBe16(p + 6, checksum);
  }
  constexpr bool operator==(const UdpHeader&) const = default;
};

// One's complement sum of big-endian 16-bit words, not yet folded. `bytes` is
// even.
constexpr uint32_t InternetSum(const std::byte* p, size_t bytes) {
  uint32_t sum = 0;
  for (size_t i = 0; i < bytes; i += 2) sum += LoadBe16(p + i);
  return sum;
}
constexpr uint16_t FoldInternetSum(uint32_t sum) {
  sum = (sum & 0xffff) + (sum >> 16);
  sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<uint16_t>(sum);
}

// The checksum that belongs into a 20-byte IPv4 header, whatever its checksum
// field holds now.
constexpr uint16_t Ipv4HeaderChecksum(const std::byte* header) {
  const uint32_t sum = InternetSum(header, 10) + InternetSum(header + 12, 8);
  return static_cast<uint16_t>(~FoldInternetSum(sum));
}
constexpr bool Ipv4HeaderChecksumIsRight(const std::byte* header) {
  return FoldInternetSum(InternetSum(header, Ipv4Header::kBytes)) == 0xffff;
}

// The flow label that stands for a connection whose path has none (0): both
// ends compute the same. 20 bits.
constexpr uint32_t FlowLabelFromQpns(Qpn local, Qpn remote) {
  uint64_t v = uint64_t{local.value()} * remote.value();
  v ^= v >> 20;
  v ^= v >> 40;
  return static_cast<uint32_t>(v & 0xfffff);
}

// UDP source port (entropy for ECMP) of a 20-bit flow label: 0xc000..0xffff.
constexpr uint16_t UdpSourcePortFromFlowLabel(uint32_t flow_label) {
  const uint32_t folded = (flow_label & 0x3fff) ^ ((flow_label & 0xfc000) >> 14);
  return static_cast<uint16_t>(0xc000 | folded);
}

// RC, UC, XRC: from the path's flow label, or the two QPNs when that is 0.
constexpr uint16_t RoceUdpSourcePort(uint32_t flow_label, Qpn local, Qpn remote) {
  const uint32_t label = flow_label & 0xfffff;
  return UdpSourcePortFromFlowLabel(label != 0 ? label : FlowLabelFromQpns(local, remote));
}

// UD and QP1: from the path's flow label, or, when that is 0, from the sender's
// QPN alone, as Linux does; QP1 gives 55410.
constexpr uint16_t UdUdpSourcePort(Qpn local, uint32_t flow_label = 0) {
  if ((flow_label & 0xfffff) != 0) return UdpSourcePortFromFlowLabel(flow_label & 0xfffff);
  constexpr uint32_t kGoldenRatio = 0x61c88647;
  return static_cast<uint16_t>(0xc000 + ((local.value() * kGoldenRatio) >> 18));
}
static_assert(UdUdpSourcePort(kManagementQpn) == 55410);

}  // namespace verbena::transport
