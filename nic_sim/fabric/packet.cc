// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/packet.h"

#include "transport/base/byteorder.h"
#include "transport/wire/bth.h"
#include "transport/wire/icrc.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

uint32_t L3OffsetOf(std::span<const std::byte> frame) {
  constexpr size_t kBehindIp = UdpHeader::kBytes + Bth::kBytes + kIcrcBytes;
  if (frame.size() < EthernetHeader::kBytes + VlanTag::kBytes) return 0;
  uint32_t l3 = EthernetHeader::kBytes;
  uint16_t ether_type = LoadBe16(&frame[l3 - 2]);
  if (ether_type == kEtherTypeVlan) {
    l3 += VlanTag::kBytes;
    ether_type = LoadBe16(&frame[l3 - 2]);
  }
  size_t ip_bytes = 0;
  if (ether_type == kEtherTypeIpv4) ip_bytes = Ipv4Header::kBytes;
  if (ether_type == kEtherTypeIpv6) ip_bytes = Ipv6Header::kBytes;
  if (ip_bytes == 0 || frame.size() < l3 + ip_bytes + kBehindIp) return 0;
  return l3;
}

bool IsRoce(std::span<const std::byte> frame) {
  const uint32_t l3 = L3OffsetOf(frame);
  if (l3 == 0) return false;
  constexpr uint16_t kRocePort = 4791;
  constexpr std::byte kUdp{17};
  const std::byte* const ip = &frame[l3];
  if (LoadBe16(ip - 2) == kEtherTypeIpv6) {
    return ip[6] == kUdp && LoadBe16(ip + Ipv6Header::kBytes + 2) == kRocePort;
  }
  const bool plain = ip[0] == std::byte{0x45} && (LoadBe16(ip + 6) & 0x3fff) == 0;
  return plain && ip[9] == kUdp && LoadBe16(ip + Ipv4Header::kBytes + 2) == kRocePort;
}

rte_mbuf* CopyPacket(rte_mbuf* packet) {
  rte_mbuf* copy = rte_pktmbuf_copy(packet, packet->pool, 0, UINT32_MAX);
  if (copy != nullptr) MetaOf(copy) = MetaOf(packet);
  return copy;
}

void EnsureIcrc(rte_mbuf* packet) {
  PacketMeta& meta = MetaOf(packet);
  if (meta.icrc_present) return;
  const std::span<std::byte> frame = FrameSpan(packet);
  const uint32_t l3 = L3OffsetOf(frame);
  if (l3 == 0) return;
  const bool is_ipv6 = LoadBe16(&frame[l3 - 2]) == kEtherTypeIpv6;
  const size_t end = frame.size() - kIcrcBytes;
  StoreLe32(&frame[end], Icrc(frame.subspan(l3, end - l3), is_ipv6));
  meta.icrc_present = true;
}

}  // namespace verbena::nic
