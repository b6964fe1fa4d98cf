// SPDX-License-Identifier: Apache-2.0
//
// The frames beside RoCEv2 that a NIC on a real link speaks: ARP (RFC 826), IPv6
// neighbour discovery (RFC 4861), membership in multicast groups (IGMPv3, RFC 3376;
// MLDv2, RFC 3810), as plain values. Parse functions check
// everything that the RFCs tell a receiver to check; Write functions give whole
// Ethernet frames.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "transport/types.h"

namespace verbena::nic {

inline constexpr uint8_t kIpProtocolIcmp = 1;
inline constexpr uint8_t kIpProtocolIgmp = 2;
inline constexpr uint8_t kIpv6HopByHop = 0;
inline constexpr uint8_t kIpProtocolIcmpv6 = 58;

// A frame made here; the longest is an MLDv2 report (90 bytes).
struct ControlFrame {
  std::array<std::byte, 96> bytes{};
  size_t size = 0;
};

struct ArpPacket {
  static constexpr size_t kBytes = 28;
  static constexpr uint16_t kRequest = 1;
  static constexpr uint16_t kReply = 2;

  uint16_t operation = 0;
  transport::MacAddress sender_mac;
  uint32_t sender_ip = 0;  // host order; 0 in a probe (RFC 5227)
  transport::MacAddress target_mac;
  uint32_t target_ip = 0;
};

// `payload`: behind the Ethernet header. Empty: not ARP for IPv4 on Ethernet.
std::optional<ArpPacket> ParseArp(std::span<const std::byte> payload);
ControlFrame WriteArp(const transport::MacAddress& destination, const ArpPacket& arp);

// Neighbour solicitation or advertisement.
struct NeighbourMessage {
  bool advertisement = false;
  transport::Gid source{};  // zero: a solicitation of duplicate address detection
  transport::Gid destination{};
  transport::Gid target{};
  bool solicited = false;  // advertisement: an answer
  bool override_entry = false;
  // Source (solicitation) or target (advertisement) link-layer address option.
  std::optional<transport::MacAddress> link_layer{};
};

// `packet`: an IPv6 header whose payload length was checked, next header ICMPv6, and what follows.
// Empty: no such message, or a wrong one.
std::optional<NeighbourMessage> ParseNeighbourMessage(std::span<const std::byte> packet);
ControlFrame WriteNeighbourMessage(const transport::MacAddress& source_mac,
                                   const transport::MacAddress& destination_mac,
                                   const NeighbourMessage& message);

// ff02::1:ffXX:XXXX of an address, and the MAC of a group (RFC 1112, 6.4; RFC 2464, 7).
transport::Gid SolicitedNodeGroup(const transport::Gid& address);
transport::MacAddress GroupMac(const transport::Gid& group);

// What a membership report says of one group.
enum class GroupReport : uint8_t {
  kIsMember = 2,  // in answer to a query: excludes no source
  kLeaves = 3,    // from now on: includes none
  kJoins = 4,     // from now on: excludes none
};
// `source`: an address of the host of the group's family; IPv6: link-local.
ControlFrame WriteGroupReport(const transport::MacAddress& source_mac, const transport::Gid& source,
                              const transport::Gid& group, GroupReport report);
// `message`: behind the IPv4 header and its options; or an IPv6 packet with the
// hop-by-hop header that queries have. Gives the group that is asked for, zero for
// all; empty: no query, or a wrong one.
std::optional<transport::Gid> ParseIgmpQuery(std::span<const std::byte> message);
std::optional<transport::Gid> ParseMldQuery(std::span<const std::byte> packet);

// Checksum of an ICMP message; right when it folds to 0 over one that has it.
uint16_t IcmpChecksum(std::span<const std::byte> message);
// `packet` from the IPv6 header on.
uint16_t Icmpv6Checksum(std::span<const std::byte> packet);

}  // namespace verbena::nic
