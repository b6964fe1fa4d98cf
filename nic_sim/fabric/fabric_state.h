// SPDX-License-Identifier: Apache-2.0
//
// What the fabric keeps. Private to it: fabric.cc (ports, links, rules, captures), switching.cc
// (the way of a packet), raw_frames.cc (frames of raw packet QPs).
//
// Thread: under `mutex`, but for the atomics.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "nic_sim/fabric/capture.h"
#include "nic_sim/fabric/fabric.h"
#include "nic_sim/fabric/fault_stage.h"
#include "nic_sim/fabric/flow_table.h"
#include "nic_sim/fabric/packet_queue.h"
#include "nic_sim/port/wire.h"
#include "nic_sim/trace/measured_parts.h"

namespace verbena::nic {

struct Fabric::State {
  static constexpr PortId kNoPort = 0xffff;
  static constexpr size_t kInboxes = kManagementInbox + 1;

  // Received packets of a port for one shard.
  struct PortQueue {
    PacketQueue packets;
    std::atomic<bool> has_some{false};  // as the engine looks at it, without the lock
  };

  struct Port {
    PortConfig config;
    std::vector<transport::Gid> gids;  // as they are now
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

  // Where the switch sends a packet.
  struct Destination {
    PortId port = kNoPort;
    uint32_t l3 = 0;  // 0: no IP packet
  };

  explicit State(bool strict_icrc) : strict(strict_icrc) { inboxes[0].open = true; }

  Destination FindDestination(rte_mbuf* packet);
  bool FindWayOut(PortId port, rte_mbuf* packet, uint32_t l3, transport::Time now);
  PortId FindPort(const transport::Gid& gid) const {
    const auto found = ports_by_gid.find(gid);
    return found == ports_by_gid.end() ? kNoPort : found->second;
  }
  // The port that has `gid` now; FindPort: or had it.
  PortId FindOwner(const transport::Gid& gid) const {
    const PortId port = FindPort(gid);
    if (port == kNoPort) return kNoPort;
    const auto& gids = ports[port]->gids;
    return std::find(gids.begin(), gids.end(), gid) == gids.end() ? kNoPort : port;
  }
  void ForgetAnswers();  // of the switch: they may have changed
  PortId FindPortOrGroup(const transport::Gid& gid) const {
    return gid.IsMulticast() ? kGroup : FindPort(gid);
  }

  // The stations of a packet on its way, in this order.
  void Send(PortId port, rte_mbuf* packet, transport::Time now);
  void RunFaults(rte_mbuf* packet, transport::Time now);
  void Continue(rte_mbuf* packet, transport::Time now);
  void CountSent(PortId port, rte_mbuf* packet, uint32_t l3);
  void SendToGroup(PortId port, rte_mbuf* packet, uint32_t l3, transport::Time now);
  void Deliver(PortId port, rte_mbuf* packet, uint32_t l3);
  void DeliverToMembers(PortId port, rte_mbuf* packet, uint32_t l3);
  void SendRaw(PortId port, rte_mbuf* packet, transport::Time now);
  void SendToEveryone(PortId port, rte_mbuf* packet, transport::Time now);
  void SendRawOut(PortId port, rte_mbuf* packet);
  bool DeliverRaw(PortId port, rte_mbuf* packet);
  void EnqueueForTargets(PortId port, rte_mbuf* packet);
  void ShowSniffers(PortId port, rte_mbuf* packet);
  void Enqueue(PortId port, ShardId shard, rte_mbuf* packet);
  ShardId OwnerOf(PortId port, rte_mbuf* packet, uint32_t l3) const;
  void Announce();
  void NoteLinks();
  void NoteStalls(transport::Time now);
  void SendOut(PortId port, rte_mbuf* packet);

  void TakeIn(PortId port, rte_mbuf* packet, transport::Time now);
  void ServeWaiting(PortId port, transport::Time now);
  void FlushWires(transport::Time now);

  void ReleaseHeld(transport::Time now);
  void Discard(PortId port, Direction direction, DropReason reason);
  void Record(CaptureStage stage, rte_mbuf* packet, transport::Time now);
  // Shards read the clock one by one; what is held wants ascending times.
  transport::Time Monotonic(transport::Time now) { return latest = std::max(latest, now); }
  // Nothing but the switch is between the ports.
  bool plain() const { return !kHasFaults || is_plain; }
  void UpdatePlain() { is_plain = faults.idle() && captures.empty(); }

  const bool strict;
  mutable std::mutex mutex;  // everything below
  std::atomic<bool> is_plain{true};
  std::atomic<uint32_t> link_changes{0};
  const PacketSteering* steering = nullptr;
  std::array<Inbox, kInboxes> inboxes;
  bool news = false;      // in one of them
  transport::Time clock;  // of the call at hand
  transport::Time latest;
  std::vector<std::unique_ptr<Port>> ports;
  std::vector<PortId> wired;  // ports with a wire; constant after the first packet
  std::atomic<bool> has_wires{false};
  std::atomic<bool> may_wait{false};  // there is a wire, or a port is stalled
  std::unordered_map<transport::Gid, PortId> ports_by_gid;
  // Last answers, since neighbours in a burst mostly have one destination.
  // As on the wire; 0 never is a destination.
  uint32_t last_ipv4 = 0;
  PortId last_ipv4_port = kNoPort;
  transport::Gid last_ipv6;
  PortId last_ipv6_port = kNoPort;

  GroupTable groups;
  uint32_t next_flow_id = 1;
  std::vector<FlowTable::Target> targets;  // of the frame at hand; capacity is kept
  FaultStage faults;
  std::vector<Capture> captures;
  uint32_t next_capture_id = 1;
};

}  // namespace verbena::nic
