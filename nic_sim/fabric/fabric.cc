// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/fabric.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cstring>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "nic_sim/fabric/capture.h"
#include "nic_sim/fabric/fault_rule.h"
#include "nic_sim/fabric/fault_stage.h"
#include "nic_sim/fabric/packet_queue.h"
#include "nic_sim/port/wire.h"
#include "transport/base/byteorder.h"
#include "transport/wire/bth.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

namespace {

constexpr PortId kNoPort = 0xffff;
// No vector of ports moves: threads already look at the first when the next is added.
constexpr size_t kMaxPorts = 64;
constexpr size_t kMaxCaptures = 16;
constexpr size_t kInboxes = kManagementInbox + 1;

// Received packets of a port for one shard.
struct PortQueue {
  PacketQueue packets;
  std::atomic<bool> has_some{false};  // as the engine looks at it, without the lock
};

struct Port {
  PortConfig config;
  PortCounters counters;
  std::array<PortQueue, kInboxes> received;  // by shard
  std::unique_ptr<Wire> wire;                // null: not joined to a netdev
  FlowTable flows;
  bool was_up = true;                // when NoteLinks looked last
  std::atomic<bool> stalled{false};  // by a rule, as NoteStalls found it
};

struct Inbox {
  bool open = false;
  const rte_mempool* pool = nullptr;
  bool all_foreign = false;
  InboxOwner* owner = nullptr;
  size_t foreign = 0;  // packets in it that came from other pools
  bool news = false;   // for the owner, at the end of the call

  bool IsForeign(const rte_mbuf* packet) const {
    return all_foreign || (pool != nullptr && packet->pool != pool);
  }
};

struct Capture {
  uint32_t id = 0;
  PortId port = Fabric::kAllPorts;
  CaptureStage stage = CaptureStage::kAfter;
  uint32_t qpn = 0;  // 0: all
  std::unique_ptr<CaptureFile> file;
};

// 0: no RoCEv2 packet.
uint32_t DestinationQpn(rte_mbuf* packet) {
  const std::span<const std::byte> frame = FrameSpan(packet);
  const uint32_t l3 = L3OffsetOf(frame);
  if (l3 == 0) return 0;
  const bool is_ipv6 = LoadBe16(&frame[l3 - 2]) == transport::kEtherTypeIpv6;
  const size_t bth = l3 +
                     (is_ipv6 ? transport::Ipv6Header::kBytes : transport::Ipv4Header::kBytes) +
                     transport::UdpHeader::kBytes;
  return frame.size() < bth + transport::Bth::kBytes
             ? 0
             : transport::Bth::Load(&frame[bth]).dest_qpn.value();
}

// The addresses of an IP packet.
Gid SourceGid(rte_mbuf* packet, uint32_t l3) {
  const std::byte* const ip = FrameOf(packet) + l3;
  const bool ipv4 = LoadBe16(ip - 2) == kEtherTypeIpv4;
  return ipv4 ? Gid::FromIpv4(LoadBe32(ip + 12)) : Gid::Load(ip + 8);
}
Gid DestinationGid(rte_mbuf* packet, uint32_t l3) {
  const std::byte* const ip = FrameOf(packet) + l3;
  const bool ipv4 = LoadBe16(ip - 2) == kEtherTypeIpv4;
  return ipv4 ? Gid::FromIpv4(LoadBe32(ip + 16)) : Gid::Load(ip + 24);
}

// Where the switch sends a packet.
struct Destination {
  PortId port = kNoPort;
  uint32_t l3 = 0;  // 0: no IP packet
};

}  // namespace

struct Fabric::State {
  explicit State(bool strict_icrc) : strict(strict_icrc) { inboxes[0].open = true; }

  Destination FindDestination(rte_mbuf* packet);
  bool FindWayOut(PortId port, rte_mbuf* packet, uint32_t l3, Time now);
  PortId FindPort(const Gid& gid) const {
    const auto found = ports_by_gid.find(gid);
    return found == ports_by_gid.end() ? kNoPort : found->second;
  }
  PortId FindPortOrGroup(const Gid& gid) const {
    return gid.IsMulticast() ? kGroup : FindPort(gid);
  }

  // The stations of a packet on its way, in this order.
  void Send(PortId port, rte_mbuf* packet, Time now);
  void RunFaults(rte_mbuf* packet, Time now);
  void Continue(rte_mbuf* packet, Time now);
  void CountSent(PortId port, rte_mbuf* packet, uint32_t l3);
  void SendToGroup(PortId port, rte_mbuf* packet, uint32_t l3, Time now);
  void Deliver(PortId port, rte_mbuf* packet, uint32_t l3);
  void DeliverToMembers(PortId port, rte_mbuf* packet, uint32_t l3);
  void SendRaw(PortId port, rte_mbuf* packet, Time now);
  void SendToEveryone(PortId port, rte_mbuf* packet, Time now);
  void SendRawOut(PortId port, rte_mbuf* packet);
  bool DeliverRaw(PortId port, rte_mbuf* packet);
  void EnqueueForTargets(PortId port, rte_mbuf* packet);
  void ShowSniffers(PortId port, rte_mbuf* packet);
  void Enqueue(PortId port, ShardId shard, rte_mbuf* packet);
  ShardId OwnerOf(PortId port, rte_mbuf* packet, uint32_t l3) const;
  void Announce();
  void NoteLinks();
  void NoteStalls(Time now);
  void SendOut(PortId port, rte_mbuf* packet);

  void TakeIn(PortId port, rte_mbuf* packet, Time now);
  void ServeWaiting(PortId port, Time now);
  void FlushWires(Time now);

  void ReleaseHeld(Time now);
  void Discard(PortId port, Direction direction, DropReason reason);
  void Record(CaptureStage stage, rte_mbuf* packet, Time now);
  // Nothing but the switch is between the ports.
  // Shards read the clock one by one; what is held wants ascending times.
  Time Monotonic(Time now) { return latest = std::max(latest, now); }
  void UpdatePlain() { plain = faults.idle() && captures.empty(); }

  const bool strict;
  mutable std::mutex mutex;  // everything below
  std::atomic<bool> plain{true};
  std::atomic<uint32_t> link_changes{0};
  const PacketSteering* steering = nullptr;
  std::array<Inbox, kInboxes> inboxes;
  bool news = false;  // in one of them
  Time latest;
  std::vector<std::unique_ptr<Port>> ports;
  std::vector<PortId> wired;  // ports with a wire; constant after the first packet
  std::atomic<bool> has_wires{false};
  std::atomic<bool> may_wait{false};  // there is a wire, or a port is stalled
  std::unordered_map<Gid, PortId> ports_by_gid;
  // Last answers, since neighbours in a burst mostly have one destination.
  // As on the wire; 0 never is a destination.
  uint32_t last_ipv4 = 0;
  PortId last_ipv4_port = kNoPort;
  Gid last_ipv6;
  PortId last_ipv6_port = kNoPort;

  GroupTable groups;
  uint32_t next_flow_id = 1;
  std::vector<FlowTable::Target> targets;  // of the frame at hand; capacity is kept
  FaultStage faults;
  std::vector<Capture> captures;
  uint32_t next_capture_id = 1;
};

Destination Fabric::State::FindDestination(rte_mbuf* packet) {
  const std::span<const std::byte> frame = FrameSpan(packet);
  const uint32_t l3 = L3OffsetOf(frame);
  if (l3 == 0) return {};
  if (LoadBe16(&frame[l3 - 2]) == kEtherTypeIpv4) {
    uint32_t address;
    std::memcpy(&address, &frame[l3 + 16], sizeof address);
    if (address != last_ipv4) {
      last_ipv4_port = FindPortOrGroup(Gid::FromIpv4(LoadBe32(&frame[l3 + 16])));
      last_ipv4 = address;
    }
    return {last_ipv4_port, l3};
  }
  const Gid gid = Gid::Load(&frame[l3 + 24]);
  if (gid != last_ipv6) {
    last_ipv6_port = FindPortOrGroup(gid);
    last_ipv6 = gid;
  }
  return {last_ipv6_port, l3};
}

void Fabric::State::Discard(PortId port, Direction direction, DropReason reason) {
  PortCounters& counters = ports[port]->counters;
  counters.Drop(reason);
  ++(direction == Direction::kTx ? counters.port_xmit_discards : counters.port_rcv_errors);
}

void Fabric::State::CountSent(PortId port, rte_mbuf* packet, uint32_t l3) {
  PortCounters& counters = ports[port]->counters;
  ++counters.port_xmit_packets;
  ++(IsToGroup(packet) ? counters.multicast_xmit_packets : counters.unicast_xmit_packets);
  counters.port_xmit_data += (packet->data_len - l3) / 4;
  if (ports[port]->flows.has_sniffers()) [[unlikely]]
    ShowSniffers(port, packet);
}

void Fabric::State::Deliver(PortId port, rte_mbuf* packet, uint32_t l3) {
  Port& receiver = *ports[port];
  ++receiver.counters.port_rcv_packets;
  receiver.counters.port_rcv_data += (packet->data_len - l3) / 4;
  if (receiver.flows.has_sniffers()) [[unlikely]]
    ShowSniffers(port, packet);
  if (MetaOf(packet).raw) [[unlikely]] {
    if (DeliverRaw(port, packet)) return;
    l3 = L3OffsetOf(FrameSpan(packet));
  }
  if (IsToGroup(packet)) [[unlikely]] {
    ++receiver.counters.multicast_rcv_packets;
    DeliverToMembers(port, packet, l3);
    return;
  }
  ++receiver.counters.unicast_rcv_packets;
  Enqueue(port, OwnerOf(port, packet, l3), packet);
}

// One for each QP in `targets`.
void Fabric::State::EnqueueForTargets(PortId port, rte_mbuf* packet) {
  for (size_t i = 0; i < targets.size(); ++i) {
    const bool last = i + 1 == targets.size();
    rte_mbuf* copy = last ? std::exchange(packet, nullptr) : CopyPacket(packet);
    if (copy == nullptr) {
      Discard(port, Direction::kRx, DropReason::queue_full);
      continue;
    }
    MetaOf(copy).raw = true;
    MetaOf(copy).to_qpn = targets[i].qpn;
    MetaOf(copy).flow_tag = targets[i].tag;
    Enqueue(port, targets[i].shard, copy);
  }
  if (packet != nullptr) rte_pktmbuf_free(packet);
}

void Fabric::State::ShowSniffers(PortId port, rte_mbuf* packet) {
  targets.clear();
  ports[port]->flows.MatchSniffers(FrameSpan(packet), &targets);
  rte_mbuf* copy = CopyPacket(packet);
  if (copy == nullptr) return Discard(port, Direction::kRx, DropReason::queue_full);
  EnsureIcrc(copy);
  EnqueueForTargets(port, copy);
}

// False: it is the business of the port's transport, like any packet.
bool Fabric::State::DeliverRaw(PortId port, rte_mbuf* packet) {
  Port& receiver = *ports[port];
  PacketMeta& meta = MetaOf(packet);
  const bool is_mine =
      IsToGroup(packet) || MacAddress::Load(FrameOf(packet)) == receiver.config.mac;
  if (is_mine && IsRoce(FrameSpan(packet))) {
    meta.raw = meta.trusted = false;
    return false;
  }
  ++(IsToGroup(packet) ? receiver.counters.multicast_rcv_packets
                       : receiver.counters.unicast_rcv_packets);
  targets.clear();
  receiver.flows.Match(FrameSpan(packet), &targets);
  if (targets.empty()) receiver.counters.Drop(DropReason::no_flow);
  EnqueueForTargets(port, packet);
  return true;
}

// To the shards of the port that have QPs in the group.
void Fabric::State::DeliverToMembers(PortId port, rte_mbuf* packet, uint32_t l3) {
  const GroupTable::Member* member =
      l3 == 0 ? nullptr : groups.Find(DestinationGid(packet, l3), port);
  uint32_t left = member == nullptr ? 0 : member->attached;
  if (left == 0) Discard(port, Direction::kRx, DropReason::unknown_qp);
  for (ShardId shard = 0; left != 0; ++shard) {
    const uint32_t here = member->of_shard[shard];
    if (here == 0) continue;
    left -= here;
    rte_mbuf* copy = left == 0 ? std::exchange(packet, nullptr) : CopyPacket(packet);
    if (copy == nullptr) {
      Discard(port, Direction::kRx, DropReason::queue_full);
    } else {
      Enqueue(port, shard, copy);
    }
  }
  if (packet != nullptr) rte_pktmbuf_free(packet);
}

void Fabric::State::Enqueue(PortId port, ShardId shard, rte_mbuf* packet) {
  Inbox& inbox = inboxes[shard];
  if (!inbox.open) [[unlikely]] {
    Discard(port, Direction::kRx, DropReason::unknown_qp);
    rte_pktmbuf_free(packet);
    return;
  }
  if (inbox.IsForeign(packet)) {
    if (inbox.foreign >= kMaxForeignPackets) {
      Discard(port, Direction::kRx, DropReason::queue_full);
      rte_pktmbuf_free(packet);
      return;
    }
    ++inbox.foreign;
    inbox.news = news = true;
  }
  PortQueue& queue = ports[port]->received[shard];
  if (ports[port]->stalled && queue.packets.size() >= kMaxForeignPackets) [[unlikely]] {
    Discard(port, Direction::kRx, DropReason::queue_full);
    rte_pktmbuf_free(packet);
    return;
  }
  queue.packets.Push(packet);
  queue.has_some.store(true, std::memory_order_release);
}

ShardId Fabric::State::OwnerOf(PortId port, rte_mbuf* packet, uint32_t l3) const {
  if (l3 == 0) return 0;
  const std::byte* frame = FrameOf(packet);
  const size_t ip =
      LoadBe16(&frame[l3 - 2]) == kEtherTypeIpv4 ? Ipv4Header::kBytes : Ipv6Header::kBytes;
  const std::byte* bth = &frame[l3 + ip + UdpHeader::kBytes];
  const uint32_t qpn = LoadBe32(bth + 4) & 0xffffff;
  if (qpn == kManagementQpn.value() && inboxes[kManagementInbox].open) return kManagementInbox;
  return steering == nullptr ? ShardId{0} : steering->OwnerOf(port, qpn);
}

// Once for all packets of a call.
void Fabric::State::Announce() {
  if (!news) [[likely]]
    return;
  news = false;
  for (Inbox& inbox : inboxes) {
    if (std::exchange(inbox.news, false) && inbox.owner != nullptr) {
      inbox.owner->OnForeignPackets();
    }
  }
}

void Fabric::State::Record(CaptureStage stage, rte_mbuf* packet, Time now) {
  if (captures.empty()) return;
  const PacketTransit& transit = TransitOf(packet);
  const PortId port = transit.direction == Direction::kTx ? transit.source : transit.destination;
  for (Capture& capture : captures) {
    if (capture.stage != stage) continue;
    if (capture.qpn != 0 && MetaOf(packet).source_qpn != capture.qpn &&
        DestinationQpn(packet) != capture.qpn) {
      continue;
    }
    if (capture.port == kAllPorts) {
      capture.file->Add(port, transit.direction, packet, now);
    } else if (capture.port == port) {
      capture.file->Add(0, transit.direction, packet, now);
    }
  }
}

void Fabric::State::Send(PortId port, rte_mbuf* packet, Time now) {
  PacketMeta& meta = MetaOf(packet);
  if (strict) [[unlikely]] {
    EnsureIcrc(packet);
    meta.trusted = false;
  } else if (!meta.icrc_present) {
    meta.trusted = true;
  }
  if (meta.raw) [[unlikely]]
    return SendRaw(port, packet, now);
  Destination destination = FindDestination(packet);
  if (destination.port == kNoPort && ports[port]->wire != nullptr && destination.l3 != 0) {
    if (!FindWayOut(port, packet, destination.l3, now)) return;
    destination.port = kOutside;
  }
  if (destination.port == kNoPort) [[unlikely]] {
    Discard(port, Direction::kTx,
            destination.l3 == 0 ? DropReason::malformed : DropReason::no_route);
    rte_pktmbuf_free(packet);
    return;
  }
  if (plain) [[likely]] {
    CountSent(port, packet, destination.l3);
    if (destination.port == kOutside) {
      SendOut(port, packet);
    } else if (destination.port == kGroup) {
      SendToGroup(port, packet, destination.l3, now);
    } else {
      Deliver(destination.port, packet, destination.l3);
    }
    return;
  }
  PacketTransit& transit = TransitOf(packet);
  transit = PacketTransit();
  transit.source = port;
  transit.destination = destination.port;
  RunFaults(packet, now);
}

void Fabric::State::SendRaw(PortId port, rte_mbuf* packet, Time now) {
  PortId destination = kEveryone;
  if (!IsToGroup(packet)) {
    const MacAddress mac = MacAddress::Load(FrameOf(packet));
    for (PortId id = 0; id < ports.size(); ++id) {
      if (ports[id]->config.mac == mac) destination = id;
    }
  }
  if (!plain) {
    TransitOf(packet) = PacketTransit();
    TransitOf(packet).source = port;
    TransitOf(packet).destination = destination;
    RunFaults(packet, now);
    return;
  }
  CountSent(port, packet, 0);
  if (destination == kEveryone) {
    SendToEveryone(port, packet, now);
  } else {
    Deliver(destination, packet, 0);
  }
}

// Behind the sending side. Ports without flow rules are not bothered, but for what
// their transport may take.
void Fabric::State::SendToEveryone(PortId port, rte_mbuf* packet, Time now) {
  const bool is_roce = IsToGroup(packet) && IsRoce(FrameSpan(packet));
  for (PortId to = 0; to < ports.size(); ++to) {
    if (ports[to]->flows.size() == 0 && !is_roce) continue;
    rte_mbuf* copy = CopyPacket(packet);
    if (copy == nullptr) {
      Discard(to, Direction::kRx, DropReason::queue_full);
    } else if (plain) {
      Deliver(to, copy, 0);
    } else {
      TransitOf(copy) = PacketTransit();
      TransitOf(copy).source = port;
      TransitOf(copy).destination = to;
      TransitOf(copy).direction = Direction::kRx;
      RunFaults(copy, now);
    }
  }
  if (ports[port]->wire != nullptr) {
    SendRawOut(port, packet);
  } else {
    rte_pktmbuf_free(packet);
  }
}

void Fabric::State::RunFaults(rte_mbuf* packet, Time now) {
  Record(CaptureStage::kBefore, packet, now);
  if (faults.idle()) {
    Continue(packet, now);
    return;
  }
  const PacketTransit transit = TransitOf(packet);
  PacketQueue out;
  const FaultStage::Verdict verdict = faults.Apply(packet, now, &out);
  if (verdict != FaultStage::Verdict::kGoesOn) {
    Discard(transit.direction == Direction::kTx ? transit.source : transit.destination,
            transit.direction,
            verdict == FaultStage::Verdict::kDropped ? DropReason::fault : DropReason::port_down);
  }
  while (rte_mbuf* next = out.Pop()) Continue(next, now);
}

// Behind the fault stage of one side.
void Fabric::State::Continue(rte_mbuf* packet, Time now) {
  PacketTransit& transit = TransitOf(packet);
  const uint32_t l3 = L3OffsetOf(FrameSpan(packet));
  Record(CaptureStage::kAfter, packet, now);
  if (transit.direction == Direction::kRx) {
    Deliver(transit.destination, packet, l3);
    return;
  }
  CountSent(transit.source, packet, l3);
  if (transit.destination == kOutside) {
    SendOut(transit.source, packet);
    return;
  }
  if (transit.destination == kEveryone) {
    SendToEveryone(transit.source, packet, now);
    return;
  }
  if (transit.destination == kGroup) {
    SendToGroup(transit.source, packet, l3, now);
    return;
  }
  transit.direction = Direction::kRx;
  RunFaults(packet, now);
}

// Behind the sending side. Ports without members are not bothered: a switch may
// send to them too, but NICs let only their own groups in.
void Fabric::State::SendToGroup(PortId port, rte_mbuf* packet, uint32_t l3, Time now) {
  // A fault may have made it anything.
  if (l3 == 0) {
    rte_pktmbuf_free(packet);
    return;
  }
  const GroupTable::Group* members = groups.Find(DestinationGid(packet, l3));
  const size_t count = members == nullptr ? 0 : members->size();
  const Wire* wire = ports[port]->wire.get();
  const bool goes_out = wire != nullptr && wire->HasAddress(SourceGid(packet, l3));
  for (size_t i = 0; i < count; ++i) {
    const PortId to = (*members)[i].port;
    const bool last = i + 1 == count && !goes_out;
    rte_mbuf* copy = last ? std::exchange(packet, nullptr) : CopyPacket(packet);
    if (copy == nullptr) {
      Discard(to, Direction::kRx, DropReason::queue_full);
    } else if (plain) {
      Deliver(to, copy, l3);
    } else {
      TransitOf(copy) = PacketTransit();
      TransitOf(copy).source = port;
      TransitOf(copy).destination = to;
      TransitOf(copy).direction = Direction::kRx;
      RunFaults(copy, now);
    }
  }
  if (goes_out) {
    SendOut(port, packet);
  } else if (packet != nullptr) {
    rte_pktmbuf_free(packet);
  }
}

// Writes the MAC of the next hop. False: the packet waits for it or is gone.
bool Fabric::State::FindWayOut(PortId port, rte_mbuf* packet, uint32_t l3, Time now) {
  switch (
      ports[port]->wire->FindWay(packet, SourceGid(packet, l3), DestinationGid(packet, l3), now)) {
    case Wire::Way::kReady:
      return true;
    case Wire::Way::kWaits:
      return false;
    case Wire::Way::kFull:
      Discard(port, Direction::kTx, DropReason::unresolved);
      break;
    case Wire::Way::kNoRoute:
      Discard(port, Direction::kTx, DropReason::no_route);
      break;
  }
  rte_pktmbuf_free(packet);
  return false;
}

// Behind the sending side: as it is, to whom its destination MAC says.
void Fabric::State::SendRawOut(PortId port, rte_mbuf* packet) {
  Wire& wire = *ports[port]->wire;
  if (!wire.FitsMtu(packet)) {
    Discard(port, Direction::kTx, DropReason::over_mtu);
    rte_pktmbuf_free(packet);
    return;
  }
  wire.Send(packet);
}

// Behind the sending side.
void Fabric::State::SendOut(PortId port, rte_mbuf* packet) {
  Wire& wire = *ports[port]->wire;
  if (!wire.FitsMtu(packet)) {
    Discard(port, Direction::kTx, DropReason::over_mtu);
    rte_pktmbuf_free(packet);
    return;
  }
  EnsureIcrc(packet);
  wire.Send(packet);
}

void Fabric::State::FlushWires(Time now) {
  for (const PortId port : wired) {
    for (size_t lost = ports[port]->wire->Flush(now); lost != 0; --lost) {
      Discard(port, Direction::kTx, DropReason::queue_full);
    }
  }
}

// Packets whose next hop is known now, or has not answered.
void Fabric::State::ServeWaiting(PortId port, Time now) {
  Wire& wire = *ports[port]->wire;
  while (rte_mbuf* packet = wire.PopResolved()) Send(port, packet, now);
  while (rte_mbuf* packet = wire.PopLost()) {
    Discard(port, Direction::kTx, DropReason::unresolved);
    rte_pktmbuf_free(packet);
  }
}

// A packet for `port` from its netdev.
void Fabric::State::TakeIn(PortId port, rte_mbuf* packet, Time now) {
  const bool raw = MetaOf(packet).raw;
  MetaOf(packet) = {.icrc_present = true, .trusted = false, .raw = raw};
  const std::span<const std::byte> frame = FrameSpan(packet);
  const uint32_t l3 = raw ? 0 : L3OffsetOf(frame);
  if (l3 == 0 && !raw) {
    Discard(port, Direction::kRx, DropReason::malformed);
    rte_pktmbuf_free(packet);
    return;
  }
  if (!raw && FindPort(SourceGid(packet, l3)) != kNoPort) {
    // Of a NIC of ours on the same link: its members here have it already.
    if (!IsToGroup(packet)) Discard(port, Direction::kRx, DropReason::spoofed);
    rte_pktmbuf_free(packet);
    return;
  }
  if (plain) {
    Deliver(port, packet, l3);
    return;
  }
  PacketTransit& transit = TransitOf(packet);
  transit = PacketTransit();
  transit.source = kOutside;
  transit.destination = port;
  transit.direction = Direction::kRx;
  RunFaults(packet, now);
}

void Fabric::State::ReleaseHeld(Time now) {
  PacketQueue out;
  faults.Expire(now, &out);
  UpdatePlain();
  while (rte_mbuf* packet = out.Pop()) Continue(packet, now);
}

Fabric::Fabric(bool strict) : state_(std::make_unique<State>(strict)) {
  state_->ports.reserve(kMaxPorts);
}
Fabric::~Fabric() = default;

PortId Fabric::AddPort(const PortConfig& config) {
  const std::lock_guard guard(state_->mutex);
  State& state = *state_;
  const auto port = static_cast<PortId>(state.ports.size());
  assert(port < kMaxPorts);
  auto added = std::make_unique<Port>();
  added->config = config;
  state.ports.push_back(std::move(added));
  for (const Gid& gid : config.gids) {
    // The first owner of an address keeps it.
    if (!gid.IsZero()) state.ports_by_gid.emplace(gid, port);
  }
  // Answers of the switch may have changed.
  state.last_ipv4 = 0;
  state.last_ipv4_port = kNoPort;
  state.last_ipv6 = Gid();
  state.last_ipv6_port = kNoPort;
  return port;
}

size_t Fabric::port_count() const { return state_->ports.size(); }
const PortConfig& Fabric::config(PortId port) const { return state_->ports[port]->config; }

PortCounters Fabric::counters(PortId port) const {
  const std::lock_guard guard(state_->mutex);
  return state_->ports[port]->counters;
}

void Fabric::CountReceiveDrop(PortId port, DropReason reason) {
  const std::lock_guard guard(state_->mutex);
  state_->Discard(port, Direction::kRx, reason);
}

bool Fabric::link_up(PortId port) const {
  const std::lock_guard guard(state_->mutex);
  const Wire* wire = state_->ports[port]->wire.get();
  return state_->faults.link_up(port) && (wire == nullptr || wire->port().up());
}

uint32_t Fabric::link_changes() const {
  return state_->link_changes.load(std::memory_order_acquire);
}

void Fabric::State::NoteLinks() {
  bool changed = false;
  for (PortId id = 0; id < ports.size(); ++id) {
    Port& port = *ports[id];
    const bool up = faults.link_up(id) && (port.wire == nullptr || port.wire->port().up());
    changed |= up != port.was_up;
    port.was_up = up;
  }
  if (!changed) return;
  link_changes.fetch_add(1, std::memory_order_release);
  for (const Inbox& inbox : inboxes) {
    if (inbox.owner != nullptr) inbox.owner->OnForeignPackets();
  }
}

// NICs that rules hold up, and those that go on.
void Fabric::State::NoteStalls(Time now) {
  bool any = has_wires;
  bool released = false;
  for (PortId id = 0; id < ports.size(); ++id) {
    const bool stalls = faults.has_stalls() && faults.stalled(id, now);
    any |= stalls;
    released |= ports[id]->stalled.exchange(stalls) && !stalls;
  }
  may_wait = any;
  if (!released) return;
  for (const Inbox& inbox : inboxes) {
    if (inbox.owner != nullptr) inbox.owner->OnForeignPackets();
  }
}

void Fabric::AttachWire(PortId port, std::unique_ptr<Wire> wire) {
  const std::lock_guard guard(state_->mutex);
  state_->ports[port]->wire = std::move(wire);
  state_->wired.push_back(port);
  state_->has_wires = state_->may_wait = true;
}

std::optional<WireStatus> Fabric::wire_status(PortId port) const {
  const std::lock_guard guard(state_->mutex);
  const Wire* wire = state_->ports[port]->wire.get();
  if (wire == nullptr) return std::nullopt;
  return wire->status();
}

std::vector<int> Fabric::wake_fds() const {
  const std::lock_guard guard(state_->mutex);
  std::vector<int> fds;
  for (const PortId port : state_->wired)
    fds.push_back(state_->ports[port]->wire->port().wake_fd());
  return fds;
}

bool Fabric::congested(PortId port) const {
  if (!state_->may_wait) [[likely]]
    return false;
  if (state_->ports[port]->stalled) return true;
  if (!state_->has_wires) return false;
  const std::lock_guard guard(state_->mutex);
  const Wire* wire = state_->ports[port]->wire.get();
  return wire != nullptr && wire->congested();
}

Pmtu Fabric::active_mtu(PortId port) const {
  const std::lock_guard guard(state_->mutex);
  const Wire* wire = state_->ports[port]->wire.get();
  if (wire == nullptr) return Pmtu::k4096;
  // As Linux computes it: IPv6, UDP, BTH, XRCETH and AtomicETH, ICRC.
  constexpr uint32_t kHeaders = 40 + 8 + 12 + 4 + 28 + 4;
  Pmtu mtu = Pmtu::k4096;
  while (mtu != Pmtu::k256 && PmtuBytes(mtu) + kHeaders > wire->port().mtu()) {
    mtu = Pmtu{static_cast<uint8_t>(static_cast<uint8_t>(mtu) - 1)};
  }
  return mtu;
}

void Fabric::RefreshLinks() {
  if (!state_->has_wires) return;
  const std::lock_guard guard(state_->mutex);
  for (const PortId port : state_->wired) state_->ports[port]->wire->port().Refresh();
  state_->NoteLinks();
}

bool Fabric::CanReach(PortId port, const Gid& source, const Gid& destination) const {
  const std::lock_guard guard(state_->mutex);
  if (state_->FindPort(destination) != kNoPort) return true;
  const Wire* wire = state_->ports[port]->wire.get();
  return wire != nullptr && wire->CanReach(source, destination);
}

bool Fabric::Prepare(PortId port, const Gid& destination, Time now) {
  if (!state_->has_wires) return true;
  const std::lock_guard guard(state_->mutex);
  Wire* wire = state_->ports[port]->wire.get();
  if (wire == nullptr || state_->FindPort(destination) != kNoPort) return true;
  const bool known = wire->Prepare(destination, now);
  state_->FlushWires(now);
  return known;
}

bool Fabric::PollWires(Time now) {
  State& state = *state_;
  if (!state.has_wires) [[likely]]
    return false;
  const std::lock_guard guard(state.mutex);
  if (!state.plain) {
    now = state.Monotonic(now);
    state.ReleaseHeld(now);
  }
  bool received = false;
  rte_mbuf* burst[Wire::kBurst];
  for (const PortId port : state.wired) {
    size_t count = 0;
    const bool more = state.ports[port]->wire->Receive(burst, &count, now);
    received |= more || count != 0;
    for (size_t i = 0; i < count; ++i) state.TakeIn(port, burst[i], now);
    state.ServeWaiting(port, now);
  }
  state.FlushWires(now);
  state.Announce();
  return received;
}

void Fabric::SetSteering(const PacketSteering* steering) {
  const std::lock_guard guard(state_->mutex);
  state_->steering = steering;
}

void Fabric::OpenInbox(ShardId shard, const rte_mempool* pool, InboxOwner* owner) {
  const std::lock_guard guard(state_->mutex);
  state_->inboxes[shard] = {.open = true, .pool = pool, .owner = owner};
}

void Fabric::OpenManagementInbox(InboxOwner* owner) {
  const std::lock_guard guard(state_->mutex);
  state_->inboxes[kManagementInbox] = {.open = true, .all_foreign = true, .owner = owner};
}

void Fabric::CloseInbox(ShardId shard) {
  const std::lock_guard guard(state_->mutex);
  state_->inboxes[shard] = {};
  for (const auto& port : state_->ports) {
    port->received[shard].packets.Clear();
    port->received[shard].has_some = false;
  }
}

int Fabric::AttachGroup(PortId port, ShardId shard, const Gid& group) {
  const std::lock_guard guard(state_->mutex);
  const bool first = state_->groups.Find(group, port) == nullptr;
  const int error =
      state_->groups.Attach(group, port, shard, state_->ports[port]->config.group_limits);
  Wire* wire = state_->ports[port]->wire.get();
  if (error == 0 && first && wire != nullptr) wire->AcceptGroup(group, true);
  return error;
}

void Fabric::DetachGroup(PortId port, ShardId shard, const Gid& group) {
  const std::lock_guard guard(state_->mutex);
  state_->groups.Detach(group, port, shard);
  Wire* wire = state_->ports[port]->wire.get();
  if (wire != nullptr && state_->groups.Find(group, port) == nullptr) {
    wire->AcceptGroup(group, false);
  }
}

uint32_t Fabric::AddFlow(PortId port, const FlowRule& rule) {
  const std::lock_guard guard(state_->mutex);
  FlowTable& flows = state_->ports[port]->flows;
  if (flows.size() >= kMaxFlows) return 0;
  flows.Add(state_->next_flow_id, rule);
  if (Wire* wire = state_->ports[port]->wire.get(); wire != nullptr) wire->set_takes_all(true);
  state_->targets.reserve(kMaxFlows);
  return state_->next_flow_id++;
}

void Fabric::RemoveFlow(PortId port, uint32_t id) {
  const std::lock_guard guard(state_->mutex);
  FlowTable& flows = state_->ports[port]->flows;
  flows.Remove(id);
  Wire* wire = state_->ports[port]->wire.get();
  if (wire != nullptr) wire->set_takes_all(flows.size() != 0);
}

FlowCounters Fabric::ReadFlowCounters(const FlowCounters& counters) const {
  const std::lock_guard guard(state_->mutex);
  return counters;
}

void Fabric::ReportGroup(PortId port, const Gid& group, bool join, Time now) {
  const std::lock_guard guard(state_->mutex);
  Wire* wire = state_->ports[port]->wire.get();
  if (wire == nullptr) return;
  wire->ReportGroup(group, join);
  state_->FlushWires(now);
}

const MacAddress* Fabric::Resolve(const Gid& gid) const {
  const std::lock_guard guard(state_->mutex);
  const PortId port = state_->FindPort(gid);
  return port == kNoPort ? nullptr : &state_->ports[port]->config.mac;
}

void Fabric::Transmit(PortId port, std::span<rte_mbuf* const> packets, Time now) {
  const std::lock_guard guard(state_->mutex);
  State& state = *state_;
  if (!state.plain) [[unlikely]] {
    now = state.Monotonic(now);
    state.ReleaseHeld(now);  // they were first
  }
  for (rte_mbuf* packet : packets) state.Send(port, packet, now);
  state.FlushWires(now);
  state.Announce();
  if (!state.plain) [[unlikely]] {
    state.NoteLinks();
    state.NoteStalls(now);
  }
}

size_t Fabric::Receive(PortId port, std::span<rte_mbuf*> out, ShardId shard) {
  const std::lock_guard guard(state_->mutex);
  Inbox& inbox = state_->inboxes[shard];
  PortQueue& queue = state_->ports[port]->received[shard];
  size_t count = 0;
  while (count < out.size()) {
    rte_mbuf* packet = queue.packets.Pop();
    if (packet == nullptr) break;
    if (inbox.IsForeign(packet)) --inbox.foreign;
    out[count++] = packet;
  }
  if (queue.packets.empty()) queue.has_some.store(false, std::memory_order_relaxed);
  return count;
}

bool Fabric::has_received(PortId port, ShardId shard) const {
  return state_->ports[port]->received[shard].has_some.load(std::memory_order_acquire) &&
         !state_->ports[port]->stalled.load(std::memory_order_relaxed);
}

bool Fabric::stalled(PortId port) const {
  return state_->ports[port]->stalled.load(std::memory_order_relaxed);
}

Time Fabric::next_deadline() const {
  if (state_->plain && !state_->has_wires) [[likely]]
    return Time::Never();
  const std::lock_guard guard(state_->mutex);
  Time deadline = state_->faults.next_deadline();
  for (const PortId port : state_->wired) {
    deadline = std::min(deadline, state_->ports[port]->wire->next_deadline());
  }
  return deadline;
}

void Fabric::HandleTimeout(Time now) {
  if (state_->plain && !state_->has_wires) [[likely]]
    return;
  const std::lock_guard guard(state_->mutex);
  now = state_->Monotonic(now);
  if (!state_->plain) state_->ReleaseHeld(now);
  for (const PortId port : state_->wired) {
    state_->ports[port]->wire->HandleTimeout(now);
    state_->ServeWaiting(port, now);
  }
  state_->FlushWires(now);
  state_->Announce();
  state_->NoteLinks();
  if (!state_->plain) state_->NoteStalls(now);
}

uint32_t Fabric::AddRule(std::string_view text, std::string* error, std::string* field) {
  const std::lock_guard guard(state_->mutex);
  State& state = *state_;
  FaultRule rule;
  if (!ParseFaultRule(text, &rule, error, field)) return 0;
  PortId port = FaultStage::kAnyPort;
  if (rule.device) {
    const auto found = std::find_if(
        state.ports.begin(), state.ports.end(),
        [&](const std::unique_ptr<Port>& p) { return p->config.device == *rule.device; });
    if (found == state.ports.end()) {
      *error = "bad value in 'dev=" + *rule.device + "': there is no such device";
      if (field != nullptr) *field = "dev";
      return 0;
    }
    port = static_cast<PortId>(found - state.ports.begin());
  }
  const uint32_t id = state.faults.Add(rule, port);
  if (id == 0) *error = "there are " + std::to_string(kMaxFaultRules) + " rules already";
  state.UpdatePlain();
  state.NoteLinks();
  state.NoteStalls(state.latest);
  return id;
}

uint32_t Fabric::TakeRuleId() {
  const std::lock_guard guard(state_->mutex);
  return state_->faults.TakeId();
}

void Fabric::NameQp(PortId port, uint32_t qpn, std::string_view app, uint32_t nth) {
  const std::lock_guard guard(state_->mutex);
  state_->faults.qps().Name(port, qpn, app, nth);
}

void Fabric::ForgetQp(PortId port, uint32_t qpn) {
  const std::lock_guard guard(state_->mutex);
  state_->faults.qps().Forget(port, qpn);
}

nlohmann::json Fabric::ListRules() const {
  const std::lock_guard guard(state_->mutex);
  return state_->faults.List();
}

void Fabric::ForEachHit(const std::function<void(const TraceEvent&)>& visit) const {
  const std::lock_guard guard(state_->mutex);
  state_->faults.trace().ForEach(visit);
}

uint32_t Fabric::ClearRules(uint32_t id) {
  const std::lock_guard guard(state_->mutex);
  const uint32_t removed = state_->faults.Clear(id);
  state_->UpdatePlain();
  state_->NoteLinks();
  state_->NoteStalls(state_->latest);
  return removed;
}

size_t Fabric::ReleaseHeld(uint32_t rule, size_t count) {
  const std::lock_guard guard(state_->mutex);
  return state_->faults.Release(rule, count);
}

nlohmann::json Fabric::ListHeld() const {
  const std::lock_guard guard(state_->mutex);
  nlohmann::json list = state_->faults.Held();
  for (nlohmann::json& packet : list) {
    const auto port = packet["port"].get<PortId>();
    packet.erase("port");
    packet["device"] = state_->ports[port]->config.device;
  }
  return list;
}

uint32_t Fabric::StartCapture(int fd, PortId port, CaptureStage stage, uint64_t count,
                              uint32_t qpn) {
  const std::lock_guard guard(state_->mutex);
  State& state = *state_;
  if (state.captures.size() >= kMaxCaptures || (port != kAllPorts && port >= state.ports.size())) {
    close(fd);
    return 0;
  }
  std::vector<std::string> interfaces;
  for (size_t i = 0; i < state.ports.size(); ++i) {
    if (port == kAllPorts || port == i) interfaces.push_back(state.ports[i]->config.device);
  }
  Capture capture{
      .id = state.next_capture_id, .port = port, .stage = stage, .qpn = qpn, .file = nullptr};
  try {
    capture.file = std::make_unique<CaptureFile>(fd, std::move(interfaces), count);
  } catch (const std::system_error&) {
    return 0;
  }
  ++state.next_capture_id;
  state.captures.push_back(std::move(capture));
  state.UpdatePlain();
  return state.captures.back().id;
}

bool Fabric::CaptureDone(uint32_t id) const {
  const std::lock_guard guard(state_->mutex);
  for (const Capture& capture : state_->captures) {
    if (capture.id == id) return capture.file->done();
  }
  return true;
}

std::unique_ptr<CaptureFile> Fabric::DetachCapture(uint32_t id) {
  const std::lock_guard guard(state_->mutex);
  State& state = *state_;
  std::unique_ptr<CaptureFile> file;
  for (auto capture = state.captures.begin(); capture != state.captures.end(); ++capture) {
    if (capture->id != id) continue;
    file = std::move(capture->file);
    state.captures.erase(capture);
    break;
  }
  state.UpdatePlain();
  return file;
}

}  // namespace verbena::nic
