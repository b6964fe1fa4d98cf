// SPDX-License-Identifier: Apache-2.0
//
// The fabric's packets are rte_mbufs (one segment each) that hold a whole
// Ethernet frame. PacketMeta lies in the mbuf's private area and goes with it.
#pragma once

#include <rte_mbuf.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace verbena::nic {

using PortId = uint16_t;
// Instead of a port: what is behind the netdev that a port is joined to; the
// members of a multicast group.
inline constexpr PortId kOutside = 0xfffe;
inline constexpr PortId kGroup = 0xfffd;
// Raw frames: all ports.
inline constexpr PortId kEveryone = 0xfffc;

// A set of QPs with an engine of its own; 0 is always there.
using ShardId = uint8_t;
inline constexpr size_t kMaxShards = 16;
// Not of a shard: what is for QP1.
inline constexpr ShardId kManagementInbox = kMaxShards;

struct PacketMeta {
  // Set by the sender; 0 for packets that came in from outside.
  uint32_t source_qpn = 0;
  // PSN minus the first PSN of the stream that it numbers (requests, and the
  // responses to them): a stable coordinate for fault rules.
  uint32_t psn_offset = 0;
  bool retransmission = false;
  // False: the last 4 bytes of the frame are not computed yet (EnsureIcrc).
  bool icrc_present = false;
  // Made by this daemon and not altered since: needs no check.
  bool trusted = false;
  // For captures: the work request of a request, and the last rule that hit.
  uint64_t wr_id = 0;
  uint32_t hit_by = 0;
  bool has_wr_id = false;
  // A frame that a raw packet QP made, which may be anything. Delivered to such a
  // QP: which one, and the tag of the rule.
  bool raw = false;
  uint32_t to_qpn = 0;
  uint32_t flow_tag = 0;
  // When it came into the receive queue of its port (the engine's clock).
  int64_t queued_ns = 0;
};
// PacketMeta, and behind it what the fabric keeps (packet_queue.h).
inline constexpr uint16_t kPacketPrivateBytes = 96;
static_assert(sizeof(PacketMeta) <= kPacketPrivateBytes);

// Bytes of the largest frame: 14 + 4 (VLAN) + 40 + 8 + 12 + 28 + 4096 + 3 + 4.
inline constexpr uint32_t kMaxFrameBytes = 4224;

// Of a raw packet QP: what fits into a frame of the port's largest path MTU.
inline constexpr uint32_t kMaxRawFrameBytes = 4200;
static_assert(kMaxRawFrameBytes <= kMaxFrameBytes);

inline PacketMeta& MetaOf(rte_mbuf* packet) {
  return *static_cast<PacketMeta*>(rte_mbuf_to_priv(packet));
}
inline std::byte* FrameOf(rte_mbuf* packet) { return rte_pktmbuf_mtod(packet, std::byte*); }
inline std::span<std::byte> FrameSpan(rte_mbuf* packet) {
  return {FrameOf(packet), packet->data_len};
}

// Where the IP header begins: 14, or 18 behind a VLAN tag. 0: the frame is
// neither IPv4 nor IPv6, or too short for IP, UDP, BTH and ICRC.
uint32_t L3OffsetOf(std::span<const std::byte> frame);

// An UDP datagram for port 4791, whole as far as its headers go.
bool IsRoce(std::span<const std::byte> frame);

// To a multicast group, as its MAC address says: senders here write what belongs
// to the IP address, and the ports let no other in.
inline bool IsToGroup(rte_mbuf* packet) {
  return (*FrameOf(packet) & std::byte{1}) != std::byte{0};
}

// A packet of its own with the same bytes and PacketMeta. nullptr: the pool that
// it is from has none.
rte_mbuf* CopyPacket(rte_mbuf* packet);

// Computes the ICRC if that was put off. A frame without IP stays as it is.
void EnsureIcrc(rte_mbuf* packet);

}  // namespace verbena::nic
