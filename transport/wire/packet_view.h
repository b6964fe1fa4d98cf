// SPDX-License-Identifier: Apache-2.0
//
// A read-only view of one RoCEv2 frame. Parse() is the only place that checks
// lengths; after it, no accessor can fail or leave the frame. The view does not
// own the bytes and does not copy them except for the decoded BTH; it is
// trivially copyable and never allocates. If the bytes can change meanwhile
// (shared memory), copy the frame first.
//
// Parse() checks the form of a packet, not its meaning: ICRC, QPN, P_Key,
// addresses and PSN are the business of whoever receives it.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "transport/base/byteorder.h"
#include "transport/base/result.h"
#include "transport/types.h"
#include "transport/wire/aeth.h"
#include "transport/wire/atomic_eth.h"
#include "transport/wire/bth.h"
#include "transport/wire/deth.h"
#include "transport/wire/icrc.h"
#include "transport/wire/immediate.h"
#include "transport/wire/ip_udp.h"
#include "transport/wire/opcode.h"
#include "transport/wire/reth.h"
#include "transport/wire/xrceth.h"

namespace verbena::transport {

// Why a frame is not a well-formed RoCEv2 packet. The first three mean
// "something else, not for us", the others a damaged or hostile packet.
#define VERBENA_PARSE_ERRORS(X)                                                                    \
  X(kNotIp, "not_ip", "neither IPv4 nor IPv6")                                                     \
  X(kNotUdp, "not_udp", "IP but not UDP")                                                          \
  X(kNotRoce, "not_roce", "UDP destination port is not 4791")                                      \
  X(kFragment, "fragment", "an IP fragment")                                                       \
  X(kTruncatedEthernet, "truncated_ethernet",                                                      \
    "the frame ends within the Ethernet header or VLAN tag")                                       \
  X(kTruncatedIp, "truncated_ip", "the frame ends before the length that the IP header gives")     \
  X(kBadIpHeader, "bad_ip_header", "IP version, header length (options) or total length is wrong") \
  X(kBadIpChecksum, "bad_ip_checksum", "IPv4 header checksum is wrong")                            \
  X(kTruncatedUdp, "truncated_udp",                                                                \
    "the UDP length is beyond the IP packet or too short for BTH and ICRC")                        \
  X(kTrailingBytes, "trailing_bytes",                                                              \
    "bytes behind the ICRC inside the IP packet, or a payload that the "                           \
    "opcode does not have")                                                                        \
  X(kBadTver, "bad_tver", "transport header version is not 0")                                     \
  X(kReservedOpcode, "reserved_opcode", "the opcode is not defined")                               \
  X(kTruncatedTransport, "truncated_transport",                                                    \
    "too short for the opcode's extended headers and the ICRC")                                    \
  X(kBadPad, "bad_pad",                                                                            \
    "the pad count does not fit the payload, or the packet is no multiple "                        \
    "of four bytes")

enum class ParseError : uint8_t {
#define VERBENA_PARSE_ERROR_ENUMERATOR(enumerator, name, text) enumerator,
  VERBENA_PARSE_ERRORS(VERBENA_PARSE_ERROR_ENUMERATOR)
#undef VERBENA_PARSE_ERROR_ENUMERATOR
};

#define VERBENA_PARSE_ERROR_COUNT(enumerator, name, text) +1
inline constexpr size_t kParseErrorCount = 0 VERBENA_PARSE_ERRORS(VERBENA_PARSE_ERROR_COUNT);
#undef VERBENA_PARSE_ERROR_COUNT

// "reserved_opcode": for counters and JSON.
std::string_view ParseErrorName(ParseError error);

class PacketView {
 public:
  // A view of nothing, only to be assigned to.
  PacketView() = default;

  // `frame` begins with the Ethernet header (one VLAN tag is taken). Bytes
  // behind the IP packet (Ethernet padding) are ignored.
  static Result<PacketView, ParseError> Parse(std::span<const std::byte> frame);

  // A view of a packet for which Parse() gives kReservedOpcode, any error
  // otherwise: addresses, BTH and ICRC; everything behind the BTH is payload. For
  // receivers that answer reserved opcodes.
  static Result<PacketView, ParseError> ParseReserved(std::span<const std::byte> frame);

  // The same when payload, pad and ICRC lie elsewhere: `head` holds at least
  // every header, `frame_bytes` >= head.size() is the length of the whole
  // frame. payload() and the ICRC are not available when
  // !has_contiguous_payload().
  static Result<PacketView, ParseError> ParseHead(std::span<const std::byte> head,
                                                  size_t frame_bytes);

  // Link layer.
  EthernetHeader ethernet() const { return EthernetHeader::Load(frame_); }
  bool has_vlan() const { return l3_offset_ != EthernetHeader::kBytes; }
  // Priority, DEI and VLAN id; 0 without a tag.
  uint16_t vlan_tci() const { return has_vlan() ? LoadBe16(frame_ + 14) : 0; }

  // Network layer.
  bool is_ipv6() const { return is_ipv6_; }
  // The IPv4 header's TOS byte or the IPv6 traffic class.
  uint8_t traffic_class() const {
    return is_ipv6_ ? static_cast<uint8_t>(LoadBe16(l3()) >> 4) : LoadBe8(l3() + 1);
  }
  Ecn ecn() const { return static_cast<Ecn>(traffic_class() & 3); }
  uint8_t dscp() const { return static_cast<uint8_t>(traffic_class() >> 2); }
  // TTL or hop limit.
  uint8_t hop_limit() const { return LoadBe8(l3() + (is_ipv6_ ? 7 : 8)); }
  uint32_t flow_label() const { return is_ipv6_ ? LoadBe32(l3()) & 0xfffff : 0; }
  // v4-mapped for IPv4.
  Gid source_gid() const {
    return is_ipv6_ ? Gid::Load(l3() + 8) : Gid::FromIpv4(LoadBe32(l3() + 12));
  }
  Gid destination_gid() const {
    return is_ipv6_ ? Gid::Load(l3() + 24) : Gid::FromIpv4(LoadBe32(l3() + 16));
  }
  Ipv4Header ipv4() const {
    assert(!is_ipv6_);
    return Ipv4Header::Load(l3());
  }
  Ipv6Header ipv6() const {
    assert(is_ipv6_);
    return Ipv6Header::Load(l3());
  }
  UdpHeader udp() const { return UdpHeader::Load(l4()); }

  // Transport layer.
  const Bth& bth() const { return bth_; }
  Opcode opcode() const { return bth_.opcode; }
  const OpcodeTraits& traits() const { return TraitsOf(bth_.opcode); }
  Psn psn() const { return bth_.psn; }
  Qpn dest_qpn() const { return bth_.dest_qpn; }

  // Only for packets whose traits() have the header.
  Reth reth() const { return Reth::Load(Extended(ExtHeader::kReth)); }
  Aeth aeth() const { return Aeth::Load(Extended(ExtHeader::kAeth)); }
  AtomicEth atomic_eth() const { return AtomicEth::Load(Extended(ExtHeader::kAtomicEth)); }
  AtomicAckEth atomic_ack_eth() const {
    return AtomicAckEth::Load(Extended(ExtHeader::kAtomicAckEth));
  }
  Deth deth() const { return Deth::Load(Extended(ExtHeader::kDeth)); }
  XrcEth xrceth() const { return XrcEth::Load(Extended(ExtHeader::kXrcEth)); }
  ImmDt imm() const { return ImmDt::Load(Extended(ExtHeader::kImmDt)); }
  Ieth ieth() const { return Ieth::Load(Extended(ExtHeader::kIeth)); }
  Feth feth() const { return Feth::Load(Extended(ExtHeader::kFeth)); }

  // Payload without pad and ICRC.
  size_t payload_bytes() const { return payload_bytes_; }
  size_t payload_offset() const { return payload_offset_; }
  uint8_t pad() const { return bth_.pad; }
  bool has_contiguous_payload() const { return has_contiguous_payload_; }
  std::span<const std::byte> payload() const {
    assert(has_contiguous_payload_);
    return {frame_ + payload_offset_, payload_bytes_};
  }

  // As received: 20 bytes of IPv4 or 40 of IPv6.
  std::span<const std::byte> ip_header() const {
    return {l3(), static_cast<size_t>(l4_offset_ - l3_offset_)};
  }
  // The IP packet: header to ICRC. Its size is the unit of port counters.
  size_t l3_offset() const { return l3_offset_; }
  size_t l3_bytes() const {
    return payload_offset_ - l3_offset_ + payload_bytes_ + pad() + kIcrcBytes;
  }
  // Ethernet header to ICRC, without Ethernet padding.
  size_t frame_bytes() const { return l3_offset_ + l3_bytes(); }
  // Ethernet header to the last extended header.
  std::span<const std::byte> headers() const { return {frame_, payload_offset_}; }

  uint32_t icrc() const {
    assert(has_contiguous_payload_);
    return LoadLe32(frame_ + frame_bytes() - kIcrcBytes);
  }
  uint32_t ComputeIcrc() const {
    assert(has_contiguous_payload_);
    return Icrc({l3(), l3_bytes() - kIcrcBytes}, is_ipv6_);
  }
  bool VerifyIcrc() const { return ComputeIcrc() == icrc(); }

 private:
  const std::byte* l3() const { return frame_ + l3_offset_; }
  const std::byte* l4() const { return frame_ + l4_offset_; }
  const std::byte* Extended(ExtHeader header) const {
    assert(traits().Has(header));
    return l4() + UdpHeader::kBytes + traits().OffsetOf(header);
  }

  const std::byte* frame_ = nullptr;
  Bth bth_;
  uint16_t payload_bytes_ = 0;
  uint8_t payload_offset_ = 0;
  uint8_t l3_offset_ = 0;
  uint8_t l4_offset_ = 0;
  bool is_ipv6_ = false;
  bool has_contiguous_payload_ = false;
};

static_assert(std::is_trivially_copyable_v<PacketView>);

// The BTH of a frame whose Parse() gave kBadTver, kReservedOpcode or a later
// error; for counters. Empty if there is none.
std::optional<Bth> PeekBth(std::span<const std::byte> frame);

}  // namespace verbena::transport
