// SPDX-License-Identifier: Apache-2.0
//
// Frames that raw packet QPs send, and those that flow rules lead to them.
#include <mutex>
#include <utility>

#include "nic_sim/fabric/fabric_state.h"

namespace verbena::nic {

using transport::MacAddress;
using transport::Time;

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

void Fabric::State::SendRaw(PortId port, rte_mbuf* packet, Time now) {
  PortId destination = kEveryone;
  if (!IsToGroup(packet)) {
    const MacAddress mac = MacAddress::Load(FrameOf(packet));
    for (PortId id = 0; id < ports.size(); ++id) {
      if (ports[id]->config.mac == mac) destination = id;
    }
  }
  if (!plain()) {
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
    } else if (plain()) {
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

}  // namespace verbena::nic
