// SPDX-License-Identifier: Apache-2.0
//
// The way of a packet: from the sending port through captures, faults and the switch into the
// receive queue of a shard, or out of a netdev and in.
#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include "nic_sim/fabric/fabric_state.h"
#include "transport/base/byteorder.h"
#include "transport/wire/bth.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

namespace {

// 0: no RoCEv2 packet.
uint32_t DestinationQpn(rte_mbuf* packet) {
  const std::span<const std::byte> frame = FrameSpan(packet);
  const uint32_t l3 = L3OffsetOf(frame);
  if (l3 == 0) return 0;
  const bool is_ipv6 = LoadBe16(&frame[l3 - 2]) == kEtherTypeIpv6;
  const size_t bth = l3 + (is_ipv6 ? Ipv6Header::kBytes : Ipv4Header::kBytes) + UdpHeader::kBytes;
  return frame.size() < bth + Bth::kBytes ? 0 : Bth::Load(&frame[bth]).dest_qpn.value();
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

}  // namespace

Fabric::State::Destination Fabric::State::FindDestination(rte_mbuf* packet) {
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
  MetaOf(packet).queued_ns = clock.ns();
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
  if (plain()) [[likely]] {
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
    } else if (plain()) {
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
  if (plain()) {
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

bool Fabric::PollWires(Time now) {
  State& state = *state_;
  if (!state.has_wires) [[likely]]
    return false;
  const std::lock_guard guard(state.mutex);
  state.clock = now;
  if (!state.plain()) {
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

void Fabric::Transmit(PortId port, std::span<rte_mbuf* const> packets, Time now) {
  const std::lock_guard guard(state_->mutex);
  State& state = *state_;
  state.clock = now;
  if (!state.plain()) [[unlikely]] {
    now = state.Monotonic(now);
    state.ReleaseHeld(now);  // they were first
  }
  for (rte_mbuf* packet : packets) state.Send(port, packet, now);
  state.FlushWires(now);
  state.Announce();
  if (!state.plain()) [[unlikely]] {
    state.NoteLinks();
    state.NoteStalls(now);
  }
}

size_t Fabric::Receive(PortId port, std::span<rte_mbuf*> out, ShardId shard) {
  const std::lock_guard guard(state_->mutex);
  State::Inbox& inbox = state_->inboxes[shard];
  State::PortQueue& queue = state_->ports[port]->received[shard];
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
  if (state_->plain() && !state_->has_wires) [[likely]]
    return Time::Never();
  const std::lock_guard guard(state_->mutex);
  Time deadline = state_->faults.next_deadline();
  for (const PortId port : state_->wired) {
    deadline = std::min(deadline, state_->ports[port]->wire->next_deadline());
  }
  return deadline;
}

void Fabric::HandleTimeout(Time now) {
  if (state_->plain() && !state_->has_wires) [[likely]]
    return;
  const std::lock_guard guard(state_->mutex);
  state_->clock = now;
  now = state_->Monotonic(now);
  if (!state_->plain()) state_->ReleaseHeld(now);
  for (const PortId port : state_->wired) {
    state_->ports[port]->wire->HandleTimeout(now);
    state_->ServeWaiting(port, now);
  }
  state_->FlushWires(now);
  state_->Announce();
  state_->NoteLinks();
  if (!state_->plain()) state_->NoteStalls(now);
}

}  // namespace verbena::nic
