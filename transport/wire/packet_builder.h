// SPDX-License-Identifier: Apache-2.0
//
// Builds RoCEv2 frames. Every byte of what is written is written; the caller's
// buffer may hold anything before. A frame is
//   WriteHeaders | payload (the caller's) | WritePadAndIcrc
// or, with everything in one buffer, WriteHeaders, copy, FinishFrame.
// Lengths, pad count and IPv4 checksum follow from the payload length;
// everything else is a field, so that any well-formed packet can be reproduced
// byte for byte.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/types.h"
#include "transport/wire/aeth.h"
#include "transport/wire/atomic_eth.h"
#include "transport/wire/bth.h"
#include "transport/wire/deth.h"
#include "transport/wire/icrc.h"
#include "transport/wire/immediate.h"
#include "transport/wire/ip_udp.h"
#include "transport/wire/opcode.h"
#include "transport/wire/packet_view.h"
#include "transport/wire/reth.h"
#include "transport/wire/xrceth.h"

namespace verbena::transport {

// Ethernet with VLAN, IPv6, UDP, BTH and the longest extended headers.
inline constexpr size_t kMaxHeaderBytes = EthernetHeader::kBytes + VlanTag::kBytes +
                                          Ipv6Header::kBytes + UdpHeader::kBytes +
                                          kMaxTransportHeaderBytes;
// Headers, pad and ICRC around a payload.
inline constexpr size_t kMaxOverheadBytes = kMaxHeaderBytes + 3 + kIcrcBytes;

// Where a packet comes from and goes to: one path of a QP.
struct PacketAddress {
  MacAddress source_mac;
  MacAddress destination_mac;
  bool has_vlan = false;
  uint16_t vlan_tci = 0;
  bool is_ipv6 = false;
  Gid source_gid;  // v4-mapped unless is_ipv6
  Gid destination_gid;
  uint8_t traffic_class = 0;  // IPv4 TOS; ECN in the low two bits
  uint8_t hop_limit = kDefaultHopLimit;
  uint32_t flow_label = 0;  // IPv6 only, 20 bits
  // IPv4 only. An unfragmentable packet needs no identification (RFC 6864).
  uint16_t ipv4_id = 0;
  uint16_t ipv4_flags_fragment = Ipv4Header::kDontFragment;
  uint16_t udp_source_port = 0xc000;
  uint16_t udp_checksum = 0;  // RoCEv2 sends 0; the ICRC protects the packet

  bool operator==(const PacketAddress&) const = default;
};

// BTH and the extended headers; those that the opcode does not have are not
// looked at. bth.pad is computed from the payload length, not taken from here.
struct TransportHeaders {
  Bth bth;
  XrcEth xrceth;
  Deth deth;
  Reth reth;
  AtomicEth atomic_eth;
  Aeth aeth;
  AtomicAckEth atomic_ack_eth;
  ImmDt imm;
  Ieth ieth;
  Feth feth;

  bool operator==(const TransportHeaders&) const = default;
};

// Pad bytes behind a payload: 0..3.
constexpr size_t PadBytes(size_t payload_bytes) { return (~payload_bytes + 1) & 3; }

// Stores BTH and extended headers at `out`; returns TraitsOf(opcode)
// .header_bytes. The opcode must not be reserved.
size_t WriteTransportHeaders(const TransportHeaders& headers, size_t payload_bytes, std::byte* out);

// The headers of one path, built once and copied for each packet: the fast way
// for an engine.
class PacketTemplate {
 public:
  PacketTemplate() = default;
  explicit PacketTemplate(const PacketAddress& address);

  // Writes Ethernet to last extended header for `payload_bytes` (0..65000) of
  // payload to `out`, which has room for kMaxHeaderBytes; bytes behind the
  // returned length may be overwritten up to there.
  size_t WriteHeaders(const TransportHeaders& headers, size_t payload_bytes, std::byte* out) const;

  // For a path that several QPs use.
  void set_udp_source_port(uint16_t port) {
    StoreBe16(prefix_.data() + prefix_bytes_ - UdpHeader::kBytes, port);
  }

  bool is_ipv6() const { return is_ipv6_; }
  // Ethernet header and VLAN tag.
  size_t l3_offset() const { return l3_offset_; }
  // Ethernet to UDP header.
  size_t prefix_bytes() const { return prefix_bytes_; }
  // All headers of a packet with this opcode.
  size_t HeaderBytes(Opcode opcode) const { return prefix_bytes_ + TraitsOf(opcode).header_bytes; }
  // Ethernet header to ICRC.
  size_t FrameBytes(Opcode opcode, size_t payload_bytes) const {
    return HeaderBytes(opcode) + payload_bytes + PadBytes(payload_bytes) + kIcrcBytes;
  }

 private:
  static constexpr size_t kPrefixBytes =
      EthernetHeader::kBytes + VlanTag::kBytes + Ipv6Header::kBytes + UdpHeader::kBytes;

  // Zero behind prefix_bytes_; lengths and checksum are zero.
  alignas(16) std::array<std::byte, kPrefixBytes> prefix_{};
  uint32_t ipv4_sum_ = 0;  // of the IPv4 header as it stands in prefix_
  uint8_t l3_offset_ = 0;
  uint8_t prefix_bytes_ = 0;
  bool is_ipv6_ = false;
};

// One packet without a template. Same contract as PacketTemplate's.
size_t WriteHeaders(const PacketAddress& address, const TransportHeaders& headers,
                    size_t payload_bytes, std::byte* out);

// Ends a packet whose payload is in pieces: `icrc` has seen the headers from
// the IP header on and the whole payload. Writes pad and ICRC to `out` (room
// for 7 bytes) and returns their length.
size_t WritePadAndIcrc(IcrcAccumulator icrc, size_t payload_bytes, std::byte* out);

// Ends a packet that lies in one buffer: `frame` holds `header_bytes` of
// headers from Ethernet on and the payload behind them, with room for pad and
// ICRC. Returns the length of the whole frame.
size_t FinishFrame(std::byte* frame, size_t l3_offset, bool is_ipv6, size_t header_bytes,
                   size_t payload_bytes);

// The fields of a parsed packet, from which WriteHeaders makes it again.
PacketAddress AddressOf(const PacketView& packet);
TransportHeaders HeadersOf(const PacketView& packet);

}  // namespace verbena::transport
