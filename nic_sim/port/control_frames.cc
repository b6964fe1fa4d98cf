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
  const uint32_t low = LoadBe32(&group.bytes()[12]);
  return MacAddress::FromUint64(group.IsV4Mapped() ? 0x01005e000000u | (low & 0x7fffff)
                                                   : 0x333300000000u | low);
}

namespace {

constexpr uint8_t kIgmpQuery = 0x11;
constexpr uint8_t kIgmpV3Report = 0x22;
constexpr uint8_t kMldQuery = 130;
constexpr uint8_t kMldV2Report = 143;
// Router alert (RFC 2113; RFC 2711 with padding).
constexpr uint32_t kRouterAlertV4 = 0x94040000;
constexpr uint64_t kHopByHopRouterAlert = 0x3a00050200000100;

// One's complement checksum of an ICMPv6 message behind extension headers.
uint16_t ChecksumBehindExtensions(Bytes packet, Bytes message) {
  const uint32_t sum = InternetSum(&packet[8], 32) + static_cast<uint32_t>(message.size()) +
                       kIpProtocolIcmpv6 + Sum(message);
  return static_cast<uint16_t>(~FoldInternetSum(sum));
}

ControlFrame WriteIgmpReport(const MacAddress& source_mac, uint32_t source, uint32_t group,
                             GroupReport report) {
  constexpr uint32_t kRouters = 0xe0000016;  // 224.0.0.22
  constexpr size_t kHeader = Ipv4Header::kBytes + 4;
  constexpr size_t kMessage = 16;
  ControlFrame frame;
  EthernetHeader{GroupMac(Gid::FromIpv4(kRouters)), source_mac, kEtherTypeIpv4}.Store(
      frame.bytes.data());
  std::byte* const packet = frame.bytes.data() + EthernetHeader::kBytes;
  Ipv4Header{.header_words = kHeader / 4,
             .tos = 0xc0,
             .total_length = kHeader + kMessage,
             .ttl = 1,
             .protocol = kIpProtocolIgmp,
             .source = source,
             .destination = kRouters}
      .Store(packet);
  StoreBe32(packet + Ipv4Header::kBytes, kRouterAlertV4);
  StoreBe16(packet + 10, static_cast<uint16_t>(~FoldInternetSum(InternetSum(packet, kHeader))));
  std::byte* const message = packet + kHeader;
  StoreBe8(message, kIgmpV3Report);
  StoreBe16(message + 6, 1);  // records
  StoreBe8(message + 8, static_cast<uint8_t>(report));
  StoreBe32(message + 12, group);
  StoreBe16(message + 2, IcmpChecksum({message, kMessage}));
  frame.size = EthernetHeader::kBytes + kHeader + kMessage;
  return frame;
}

ControlFrame WriteMldReport(const MacAddress& source_mac, const Gid& source, const Gid& group,
                            GroupReport report) {
  Gid::Bytes routers{};  // ff02::16
  routers[0] = std::byte{0xff};
  routers[1] = std::byte{0x02};
  routers[15] = std::byte{0x16};
  constexpr size_t kOptions = 8;
  constexpr size_t kMessage = 28;
  ControlFrame frame;
  EthernetHeader{GroupMac(Gid(routers)), source_mac, kEtherTypeIpv6}.Store(frame.bytes.data());
  std::byte* const packet = frame.bytes.data() + EthernetHeader::kBytes;
  Ipv6Header{.payload_length = kOptions + kMessage,
             .next_header = kIpv6HopByHop,
             .hop_limit = 1,
             .source = source,
             .destination = Gid(routers)}
      .Store(packet);
  StoreBe64(packet + Ipv6Header::kBytes, kHopByHopRouterAlert);
  std::byte* const message = packet + Ipv6Header::kBytes + kOptions;
  StoreBe8(message, kMldV2Report);
  StoreBe16(message + 6, 1);  // records
  StoreBe8(message + 8, static_cast<uint8_t>(report));
  group.Store(message + 12);
  const size_t bytes = Ipv6Header::kBytes + kOptions + kMessage;
  StoreBe16(message + 2, ChecksumBehindExtensions({packet, bytes}, {message, kMessage}));
  frame.size = EthernetHeader::kBytes + bytes;
  return frame;
}

}  // namespace

ControlFrame WriteGroupReport(const MacAddress& source_mac, const Gid& source, const Gid& group,
                              GroupReport report) {
  return group.IsV4Mapped() ? WriteIgmpReport(source_mac, source.Ipv4(), group.Ipv4(), report)
                            : WriteMldReport(source_mac, source, group, report);
}

std::optional<Gid> ParseIgmpQuery(Bytes message) {
  if (message.size() < 8 || LoadBe8(&message[0]) != kIgmpQuery || IcmpChecksum(message) != 0) {
    return std::nullopt;
  }
  const uint32_t group = LoadBe32(&message[4]);
  return group == 0 ? Gid() : Gid::FromIpv4(group);
}

std::optional<Gid> ParseMldQuery(Bytes packet) {
  constexpr size_t kOptions = 8;
  constexpr size_t kMessage = 24;
  if (packet.size() < Ipv6Header::kBytes + kOptions + kMessage) return std::nullopt;
  const std::byte* options = &packet[Ipv6Header::kBytes];
  if (LoadBe8(options) != kIpProtocolIcmpv6 || LoadBe8(options + 1) != 0) return std::nullopt;
  const Bytes message = packet.subspan(Ipv6Header::kBytes + kOptions);
  if (LoadBe8(&message[0]) != kMldQuery || ChecksumBehindExtensions(packet, message) != 0) {
    return std::nullopt;
  }
  return Gid::Load(&message[8]);
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
