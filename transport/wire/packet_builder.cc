// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/packet_builder.h"

#include <cassert>
#include <cstring>

namespace verbena::transport {
namespace {

// Largest UDP payload: 16-bit IP total length with the longer IP header.
constexpr size_t kMaxTransportBytes = 0xffff - Ipv6Header::kBytes - UdpHeader::kBytes;

}  // namespace

size_t WriteTransportHeaders(const TransportHeaders& headers, size_t payload_bytes,
                             std::byte* out) {
  const OpcodeTraits& traits = TraitsOf(headers.bth.opcode);
  assert(!traits.is_reserved());
  Bth bth = headers.bth;
  bth.pad = static_cast<uint8_t>(PadBytes(payload_bytes));
  bth.Store(out);
  if (traits.header_bytes == Bth::kBytes) return Bth::kBytes;

  const auto store = [&](ExtHeader which, const auto& header) {
    if (traits.Has(which)) header.Store(out + traits.OffsetOf(which));
  };
  store(ExtHeader::kXrcEth, headers.xrceth);
  store(ExtHeader::kDeth, headers.deth);
  store(ExtHeader::kReth, headers.reth);
  store(ExtHeader::kAtomicEth, headers.atomic_eth);
  store(ExtHeader::kAeth, headers.aeth);
  store(ExtHeader::kAtomicAckEth, headers.atomic_ack_eth);
  store(ExtHeader::kImmDt, headers.imm);
  store(ExtHeader::kIeth, headers.ieth);
  store(ExtHeader::kFeth, headers.feth);
  if (traits.Has(ExtHeader::kCnpReserved)) {
    std::memset(out + traits.OffsetOf(ExtHeader::kCnpReserved), 0,
                ExtHeaderBytes(ExtHeader::kCnpReserved));
  }
  return traits.header_bytes;
}

PacketTemplate::PacketTemplate(const PacketAddress& address) : is_ipv6_(address.is_ipv6) {
  std::byte* out = prefix_.data();
  const uint16_t ip_type = is_ipv6_ ? kEtherTypeIpv6 : kEtherTypeIpv4;
  EthernetHeader{address.destination_mac, address.source_mac,
                 address.has_vlan ? kEtherTypeVlan : ip_type}
      .Store(out);
  l3_offset_ = EthernetHeader::kBytes;
  if (address.has_vlan) {
    VlanTag{address.vlan_tci, ip_type}.Store(out + l3_offset_);
    l3_offset_ = EthernetHeader::kBytes + VlanTag::kBytes;
  }
  size_t l4_offset = l3_offset_;
  if (is_ipv6_) {
    Ipv6Header{
        .traffic_class = address.traffic_class,
        .flow_label = address.flow_label,
        .hop_limit = address.hop_limit,
        .source = address.source_gid,
        .destination = address.destination_gid,
    }
        .Store(out + l3_offset_);
    l4_offset += Ipv6Header::kBytes;
  } else {
    Ipv4Header{
        .tos = address.traffic_class,
        .identification = address.ipv4_id,
        .flags_fragment = address.ipv4_flags_fragment,
        .ttl = address.hop_limit,
        .source = address.source_gid.Ipv4(),
        .destination = address.destination_gid.Ipv4(),
    }
        .Store(out + l3_offset_);
    ipv4_sum_ = InternetSum(out + l3_offset_, Ipv4Header::kBytes);
    l4_offset += Ipv4Header::kBytes;
  }
  UdpHeader{.source_port = address.udp_source_port, .checksum = address.udp_checksum}.Store(
      out + l4_offset);
  prefix_bytes_ = static_cast<uint8_t>(l4_offset + UdpHeader::kBytes);
}

size_t PacketTemplate::WriteHeaders(const TransportHeaders& headers, size_t payload_bytes,
                                    std::byte* out) const {
  const size_t header_bytes = TraitsOf(headers.bth.opcode).header_bytes;
  const size_t transport_bytes =
      header_bytes + payload_bytes + PadBytes(payload_bytes) + kIcrcBytes;
  assert(transport_bytes <= kMaxTransportBytes);
  // A copy of constant length; what it writes too much is written again below,
  // or is room that the contract asks for.
  std::memcpy(out, prefix_.data(), prefix_.size());

  const auto udp_length = static_cast<uint16_t>(UdpHeader::kBytes + transport_bytes);
  std::byte* l3 = out + l3_offset_;
  if (is_ipv6_) {
    StoreBe16(l3 + 4, udp_length);
  } else {
    const auto total_length = static_cast<uint16_t>(Ipv4Header::kBytes + udp_length);
    StoreBe16(l3 + 2, total_length);
    StoreBe16(l3 + 10, static_cast<uint16_t>(~FoldInternetSum(ipv4_sum_ + total_length)));
  }
  std::byte* transport = out + prefix_bytes_;
  StoreBe16(transport - UdpHeader::kBytes + 4, udp_length);
  WriteTransportHeaders(headers, payload_bytes, transport);
  return prefix_bytes_ + header_bytes;
}

size_t WriteHeaders(const PacketAddress& address, const TransportHeaders& headers,
                    size_t payload_bytes, std::byte* out) {
  return PacketTemplate(address).WriteHeaders(headers, payload_bytes, out);
}

size_t WritePadAndIcrc(IcrcAccumulator icrc, size_t payload_bytes, std::byte* out) {
  const size_t pad_bytes = PadBytes(payload_bytes);
  std::memset(out, 0, pad_bytes);
  icrc.Add({out, pad_bytes});
  StoreLe32(out + pad_bytes, icrc.value());
  return pad_bytes + kIcrcBytes;
}

size_t FinishFrame(std::byte* frame, size_t l3_offset, bool is_ipv6, size_t header_bytes,
                   size_t payload_bytes) {
  const size_t payload_end = header_bytes + payload_bytes;
  const IcrcAccumulator icrc({frame + l3_offset, payload_end - l3_offset}, is_ipv6);
  return payload_end + WritePadAndIcrc(icrc, payload_bytes, frame + payload_end);
}

PacketAddress AddressOf(const PacketView& packet) {
  const EthernetHeader ethernet = packet.ethernet();
  const UdpHeader udp = packet.udp();
  PacketAddress address;
  address.source_mac = ethernet.source;
  address.destination_mac = ethernet.destination;
  address.has_vlan = packet.has_vlan();
  address.vlan_tci = packet.vlan_tci();
  address.is_ipv6 = packet.is_ipv6();
  address.source_gid = packet.source_gid();
  address.destination_gid = packet.destination_gid();
  address.traffic_class = packet.traffic_class();
  address.hop_limit = packet.hop_limit();
  address.flow_label = packet.flow_label();
  if (!packet.is_ipv6()) {
    const Ipv4Header ip = packet.ipv4();
    address.ipv4_id = ip.identification;
    address.ipv4_flags_fragment = ip.flags_fragment;
  }
  address.udp_source_port = udp.source_port;
  address.udp_checksum = udp.checksum;
  return address;
}

TransportHeaders HeadersOf(const PacketView& packet) {
  const OpcodeTraits& traits = packet.traits();
  TransportHeaders headers;
  headers.bth = packet.bth();
  if (traits.has_xrceth()) headers.xrceth = packet.xrceth();
  if (traits.has_deth()) headers.deth = packet.deth();
  if (traits.has_reth()) headers.reth = packet.reth();
  if (traits.has_atomic_eth()) headers.atomic_eth = packet.atomic_eth();
  if (traits.has_aeth()) headers.aeth = packet.aeth();
  if (traits.has_atomic_ack_eth()) headers.atomic_ack_eth = packet.atomic_ack_eth();
  if (traits.has_imm()) headers.imm = packet.imm();
  if (traits.has_ieth()) headers.ieth = packet.ieth();
  if (traits.has_feth()) headers.feth = packet.feth();
  return headers;
}

}  // namespace verbena::transport
