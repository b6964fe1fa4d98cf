// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/packet_view.h"

#include <algorithm>

namespace verbena::transport {
namespace {

// Where the UDP datagram of a RoCEv2 packet stands in its frame. All offsets
// count from the Ethernet header.
struct Datagram {
  size_t l3_offset = 0;
  size_t l4_offset = 0;
  size_t transport_bytes = 0;  // behind the UDP header: BTH to ICRC
  bool is_ipv6 = false;

  size_t bth_offset() const { return l4_offset + UdpHeader::kBytes; }
};

// The IP packet: where its payload begins and how long it is.
struct IpPacket {
  size_t l4_offset = 0;
  size_t l4_bytes = 0;
};

using Bytes = std::span<const std::byte>;

// `head` is what can be read, `frame_bytes` what the frame has.
Result<IpPacket, ParseError> ParseIpv4(Bytes head, size_t frame_bytes, size_t l3_offset) {
  if (head.size() < l3_offset + Ipv4Header::kBytes) return ParseError::kTruncatedIp;
  const std::byte* l3 = head.data() + l3_offset;
  const Ipv4Header ip = Ipv4Header::Load(l3);
  if (ip.version != 4 || ip.header_words < 5) return ParseError::kBadIpHeader;
  if (ip.protocol != kIpProtocolUdp) return ParseError::kNotUdp;
  // Options are legal IP, but no RoCEv2 sender uses them and the ICRC rule does
  // not say how they are covered.
  if (ip.header_words != 5 || ip.total_length < Ipv4Header::kBytes) {
    return ParseError::kBadIpHeader;
  }
  if (!Ipv4HeaderChecksumIsRight(l3)) return ParseError::kBadIpChecksum;
  if (ip.total_length > frame_bytes - l3_offset) return ParseError::kTruncatedIp;
  constexpr uint16_t kFragmentBits = Ipv4Header::kMoreFragments | Ipv4Header::kFragmentOffsetMask;
  if ((ip.flags_fragment & kFragmentBits) != 0) return ParseError::kFragment;
  return IpPacket{l3_offset + Ipv4Header::kBytes, ip.total_length - Ipv4Header::kBytes};
}

Result<IpPacket, ParseError> ParseIpv6(Bytes head, size_t frame_bytes, size_t l3_offset) {
  if (head.size() < l3_offset + Ipv6Header::kBytes) return ParseError::kTruncatedIp;
  const Ipv6Header ip = Ipv6Header::Load(head.data() + l3_offset);
  if (ip.version != 6) return ParseError::kBadIpHeader;
  if (ip.next_header == kIpv6FragmentHeader) return ParseError::kFragment;
  if (ip.next_header != kIpProtocolUdp) return ParseError::kNotUdp;
  if (ip.payload_length > frame_bytes - l3_offset - Ipv6Header::kBytes) {
    return ParseError::kTruncatedIp;
  }
  return IpPacket{l3_offset + Ipv6Header::kBytes, ip.payload_length};
}

Result<Datagram, ParseError> ParseDatagram(Bytes head, size_t frame_bytes) {
  if (head.size() < EthernetHeader::kBytes) return ParseError::kTruncatedEthernet;
  Datagram datagram;
  datagram.l3_offset = EthernetHeader::kBytes;
  uint16_t ether_type = LoadBe16(head.data() + 12);
  if (ether_type == kEtherTypeVlan) {
    datagram.l3_offset += VlanTag::kBytes;
    if (head.size() < datagram.l3_offset) return ParseError::kTruncatedEthernet;
    ether_type = LoadBe16(head.data() + 16);
  }
  if (ether_type != kEtherTypeIpv4 && ether_type != kEtherTypeIpv6) return ParseError::kNotIp;

  datagram.is_ipv6 = ether_type == kEtherTypeIpv6;
  const auto ip = datagram.is_ipv6 ? ParseIpv6(head, frame_bytes, datagram.l3_offset)
                                   : ParseIpv4(head, frame_bytes, datagram.l3_offset);
  if (!ip.ok()) return ip.error();
  datagram.l4_offset = ip->l4_offset;

  if (ip->l4_bytes < UdpHeader::kBytes || head.size() < datagram.bth_offset()) {
    return ParseError::kTruncatedUdp;
  }
  const UdpHeader udp = UdpHeader::Load(head.data() + datagram.l4_offset);
  if (udp.destination_port != kRoceUdpPort) return ParseError::kNotRoce;
  constexpr size_t kLeast = UdpHeader::kBytes + Bth::kBytes + kIcrcBytes;
  if (udp.length > ip->l4_bytes || udp.length < kLeast) return ParseError::kTruncatedUdp;
  if (udp.length < ip->l4_bytes) return ParseError::kTrailingBytes;
  if (head.size() < datagram.bth_offset() + Bth::kBytes) return ParseError::kTruncatedTransport;
  datagram.transport_bytes = udp.length - UdpHeader::kBytes;
  return datagram;
}

// Payload length of a packet of `transport_bytes` from BTH to ICRC.
Result<size_t, ParseError> CheckTransport(const Bth& bth, size_t transport_bytes) {
  if (bth.tver != 0) return ParseError::kBadTver;
  const OpcodeTraits& traits = TraitsOf(bth.opcode);
  if (traits.is_reserved()) return ParseError::kReservedOpcode;
  const size_t fixed_bytes = traits.header_bytes + kIcrcBytes;
  if (transport_bytes < fixed_bytes) return ParseError::kTruncatedTransport;
  const size_t padded_bytes = transport_bytes - fixed_bytes;
  // Headers and ICRC are multiples of four bytes, so payload and pad are too.
  if (bth.pad > padded_bytes || padded_bytes % 4 != 0) return ParseError::kBadPad;
  if (!traits.carries_payload && padded_bytes != 0) return ParseError::kTrailingBytes;
  return padded_bytes - bth.pad;
}

}  // namespace

Result<PacketView, ParseError> PacketView::Parse(std::span<const std::byte> frame) {
  return ParseHead(frame, frame.size());
}

Result<PacketView, ParseError> PacketView::ParseReserved(std::span<const std::byte> frame) {
  const auto datagram = ParseDatagram(frame, frame.size());
  if (!datagram.ok()) return datagram.error();
  const Bth bth = Bth::Load(frame.data() + datagram->bth_offset());
  if (bth.tver != 0) return ParseError::kBadTver;
  if (!TraitsOf(bth.opcode).is_reserved()) return ParseError::kTrailingBytes;
  // ParseDatagram has seen that BTH and ICRC are there.
  const size_t padded_bytes = datagram->transport_bytes - Bth::kBytes - kIcrcBytes;
  if (bth.pad > padded_bytes || padded_bytes % 4 != 0) return ParseError::kBadPad;
  const size_t payload_offset = datagram->bth_offset() + Bth::kBytes;

  PacketView view;
  view.frame_ = frame.data();
  view.bth_ = bth;
  view.payload_bytes_ = static_cast<uint16_t>(padded_bytes - bth.pad);
  view.payload_offset_ = static_cast<uint8_t>(payload_offset);
  view.l3_offset_ = static_cast<uint8_t>(datagram->l3_offset);
  view.l4_offset_ = static_cast<uint8_t>(datagram->l4_offset);
  view.is_ipv6_ = datagram->is_ipv6;
  view.has_contiguous_payload_ = true;
  return view;
}

Result<PacketView, ParseError> PacketView::ParseHead(std::span<const std::byte> head,
                                                     size_t frame_bytes) {
  frame_bytes = std::max(frame_bytes, head.size());
  const auto datagram = ParseDatagram(head, frame_bytes);
  if (!datagram.ok()) return datagram.error();
  const Bth bth = Bth::Load(head.data() + datagram->bth_offset());
  const auto payload_bytes = CheckTransport(bth, datagram->transport_bytes);
  if (!payload_bytes.ok()) return payload_bytes.error();
  const size_t payload_offset = datagram->bth_offset() + TraitsOf(bth.opcode).header_bytes;
  if (head.size() < payload_offset) return ParseError::kTruncatedTransport;

  PacketView view;
  view.frame_ = head.data();
  view.bth_ = bth;
  view.payload_bytes_ = static_cast<uint16_t>(*payload_bytes);
  view.payload_offset_ = static_cast<uint8_t>(payload_offset);
  view.l3_offset_ = static_cast<uint8_t>(datagram->l3_offset);
  view.l4_offset_ = static_cast<uint8_t>(datagram->l4_offset);
  view.is_ipv6_ = datagram->is_ipv6;
  view.has_contiguous_payload_ = head.size() >= view.frame_bytes();
  return view;
}

std::optional<Bth> PeekBth(std::span<const std::byte> frame) {
  const auto datagram = ParseDatagram(frame, frame.size());
  if (!datagram.ok()) return std::nullopt;
  return Bth::Load(frame.data() + datagram->bth_offset());
}

std::string_view ParseErrorName(ParseError error) {
  switch (error) {
#define VERBENA_PARSE_ERROR_NAME(enumerator, name, text) \
  case ParseError::enumerator:                           \
    return name;
    VERBENA_PARSE_ERRORS(VERBENA_PARSE_ERROR_NAME)
#undef VERBENA_PARSE_ERROR_NAME
  }
  return "unknown";
}

}  // namespace verbena::transport
