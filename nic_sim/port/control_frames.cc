// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/port/control_frames.h"

#include <algorithm>

#include "transport/base/byteorder.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

namespace {

using Bytes = std::span<const std::byte>;

constexpr uint8_t kSolicitation = 135;
constexpr uint8_t kAdvertisement = 136;
constexpr size_t kMessageBytes = 24;  // ICMPv6 header, flags, target
constexpr uint8_t kSourceLinkLayer = 1;
constexpr uint8_t kTargetLinkLayer = 2;
// A router sets 64 at most: whoever has 255 is on the link.
constexpr uint8_t kOnLinkHopLimit = 255;

// One's complement sum, of an odd number of bytes as if a zero followed.
uint32_t Sum(Bytes bytes) {
  const size_t even = bytes.size() & ~size_t{1};
  uint32_t sum = InternetSum(bytes.data(), even);
  if (even != bytes.size()) sum += static_cast<uint32_t>(LoadBe8(&bytes[even])) << 8;
  return sum;
}

// The options' only content that matters here. False: an option is malformed.
bool ReadLinkLayer(Bytes options, uint8_t wanted, std::optional<MacAddress>* out) {
  while (!options.empty()) {
    if (options.size() < 2) return false;
    const size_t length = size_t{LoadBe8(&options[1])} * 8;
    if (length == 0 || length > options.size()) return false;
    if (LoadBe8(&options[0]) == wanted && length == 8) *out = MacAddress::Load(&options[2]);
    options = options.subspan(length);
  }
  return true;
}

}  // namespace

std::optional<ArpPacket> ParseArp(Bytes payload) {
  if (payload.size() < ArpPacket::kBytes) return std::nullopt;
  const std::byte* p = payload.data();
  constexpr uint16_t kEthernet = 1;
  if (LoadBe16(p) != kEthernet || LoadBe16(p + 2) != kEtherTypeIpv4) return std::nullopt;
  if (LoadBe8(p + 4) != MacAddress::kBytes || LoadBe8(p + 5) != 4) return std::nullopt;
  ArpPacket arp{.operation = LoadBe16(p + 6),
                .sender_mac = MacAddress::Load(p + 8),
                .sender_ip = LoadBe32(p + 14),
                .target_mac = MacAddress::Load(p + 18),
                .target_ip = LoadBe32(p + 24)};
  if (arp.operation != ArpPacket::kRequest && arp.operation != ArpPacket::kReply) {
    return std::nullopt;
  }
  if (arp.sender_mac.IsGroup()) return std::nullopt;
  return arp;
}

ControlFrame WriteArp(const MacAddress& destination, const ArpPacket& arp) {
  ControlFrame frame;
  EthernetHeader{destination, arp.sender_mac, kEtherTypeArp}.Store(frame.bytes.data());
  std::byte* p = frame.bytes.data() + EthernetHeader::kBytes;
  StoreBe16(p, 1);
  StoreBe16(p + 2, kEtherTypeIpv4);
  StoreBe8(p + 4, MacAddress::kBytes);
  StoreBe8(p + 5, 4);
  StoreBe16(p + 6, arp.operation);
  arp.sender_mac.Store(p + 8);
  StoreBe32(p + 14, arp.sender_ip);
  arp.target_mac.Store(p + 18);
  StoreBe32(p + 24, arp.target_ip);
  frame.size = 60;  // least Ethernet frame; the rest is zero
  return frame;
}

std::optional<NeighbourMessage> ParseNeighbourMessage(Bytes packet) {
  if (packet.size() < Ipv6Header::kBytes + kMessageBytes) return std::nullopt;
  const Ipv6Header ip = Ipv6Header::Load(packet.data());
  const Bytes body = packet.subspan(Ipv6Header::kBytes);
  const uint8_t type = LoadBe8(&body[0]);
  if (type != kSolicitation && type != kAdvertisement) return std::nullopt;
  // RFC 4861, 7.1.1 and 7.1.2.
  if (ip.hop_limit != kOnLinkHopLimit || LoadBe8(&body[1]) != 0) return std::nullopt;
  if (Icmpv6Checksum(packet) != 0) return std::nullopt;
  NeighbourMessage message{.advertisement = type == kAdvertisement,
                           .source = ip.source,
                           .destination = ip.destination,
                           .target = Gid::Load(&body[8])};
  if (message.target.IsMulticast() || message.source.IsMulticast()) return std::nullopt;
  const uint8_t option = message.advertisement ? kTargetLinkLayer : kSourceLinkLayer;
  if (!ReadLinkLayer(body.subspan(kMessageBytes), option, &message.link_layer)) {
    return std::nullopt;
  }
  if (message.link_layer && message.link_layer->IsGroup()) return std::nullopt;
  if (message.advertisement) {
    message.solicited = (LoadBe8(&body[4]) & 0x40) != 0;
    message.override_entry = (LoadBe8(&body[4]) & 0x20) != 0;
    if (message.solicited && message.destination.IsMulticast()) return std::nullopt;
  } else if (message.source.IsZero() &&
             (message.link_layer || message.destination != SolicitedNodeGroup(message.target))) {
    return std::nullopt;
  }
  return message;
}

ControlFrame WriteNeighbourMessage(const MacAddress& source_mac, const MacAddress& destination_mac,
                                   const NeighbourMessage& message) {
  ControlFrame frame;
  EthernetHeader{destination_mac, source_mac, kEtherTypeIpv6}.Store(frame.bytes.data());
  std::byte* const packet = frame.bytes.data() + EthernetHeader::kBytes;
  std::byte* const body = packet + Ipv6Header::kBytes;
  const size_t bytes = kMessageBytes + (message.link_layer ? 8 : 0);
  Ipv6Header{.payload_length = static_cast<uint16_t>(bytes),
             .next_header = kIpProtocolIcmpv6,
             .hop_limit = kOnLinkHopLimit,
             .source = message.source,
             .destination = message.destination}
      .Store(packet);
  StoreBe8(body, message.advertisement ? kAdvertisement : kSolicitation);
  if (message.advertisement) {
    StoreBe8(body + 4, static_cast<uint8_t>((message.solicited ? 0x40 : 0) |
                                            (message.override_entry ? 0x20 : 0)));
  }
  message.target.Store(body + 8);
  if (message.link_layer) {
    StoreBe8(body + kMessageBytes, message.advertisement ? kTargetLinkLayer : kSourceLinkLayer);
    StoreBe8(body + kMessageBytes + 1, 1);
    message.link_layer->Store(body + kMessageBytes + 2);
  }
  const size_t packet_bytes = Ipv6Header::kBytes + bytes;
  StoreBe16(body + 2, Icmpv6Checksum({packet, packet_bytes}));
  frame.size = EthernetHeader::kBytes + packet_bytes;
  return frame;
}

Gid SolicitedNodeGroup(const Gid& address) {
  Gid::Bytes bytes{};
  bytes[0] = std::byte{0xff};
  bytes[1] = std::byte{0x02};
  bytes[11] = std::byte{0x01};
  bytes[12] = std::byte{0xff};
  std::copy_n(address.bytes().begin() + 13, 3, bytes.begin() + 13);
  return Gid(bytes);
}

MacAddress GroupMac(const Gid& group) {
  return MacAddress::FromUint64(uint64_t{0x3333} << 32 | LoadBe32(&group.bytes()[12]));
}

uint16_t IcmpChecksum(Bytes message) {
  return static_cast<uint16_t>(~FoldInternetSum(Sum(message)));
}

uint16_t Icmpv6Checksum(Bytes packet) {
  const Bytes body = packet.subspan(Ipv6Header::kBytes);
  // Pseudo header: both addresses, length, next header.
  const uint32_t sum = InternetSum(&packet[8], 32) + static_cast<uint32_t>(body.size()) +
                       kIpProtocolIcmpv6 + Sum(body);
  return static_cast<uint16_t>(~FoldInternetSum(sum));
}

}  // namespace verbena::nic
