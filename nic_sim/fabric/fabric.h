// SPDX-License-Identifier: Apache-2.0
//
// Fabric: joins the ports of the simulated NICs through a switch. The way of a
// packet, also on loopback to its own port:
//   address look-up (no owner: no_route, an xmit_discard; nothing else sees it)
//   sending side:    capture "before", rules, capture "after", xmit counters
//   receiving side:  capture "before", rules, capture "after", rcv counters
//   receive queue of the port
// So port_xmit_packets and port_rcv_packets count what a rule let pass, copies
// included, and equal the outbound and inbound packets of a capture "after".
// What rules take away is in no packet counter but in drops (fault, port_down)
// and in port_xmit_discards (sending side) or port_rcv_errors (receiving side);
// a capture "before" has it, and has no copies made on its side.
//
// A port that is joined to a Linux netdev (AttachWire) sends what none of the
// fabric's ports owns to the outside: the sending side of the above, behind a
// look-up of the next hop's MAC for which packets may wait, then the netdev. What
// comes from there passes the receiving side.
//
// A packet to a multicast group passes the sending side once; then a copy for
// each port that has members, the sender's own too, passes the receiving side,
// and each shard of a port that has members gets one. Outside it goes if the port
// is joined to a netdev.
//
// A port's packets go to the inbox of the shard that owns the destination QP
// (steering); what has no owner goes to shard 0. Those for QP1 have an inbox of
// their own once it is open. Receive queues are linked
// through the packets: they cannot overflow. What another shard sent is bounded:
// beyond kMaxForeignPackets it is dropped and counted (queue_full), so that a
// shard that does not run keeps no more of the others' buffers. Rules are
// described in fault_rule.h.
//
// Frames of raw packet QPs go where their destination MAC says; those to nobody's
// and to groups go to all ports, the sender's own too, and outside. What comes in
// and is RoCE for the port's own MAC is taken by its transport, the rest goes to
// the raw packet QPs whose flow rules match (flow_table.h). Sniffers get copies of
// all that a port sends and receives.
//
// Threads: any; calls take a lock of the fabric's own, which is never held while
// memory of an application is touched. It comes after a shard's lock. Nothing
// allocates after AddPort but control calls (rules, capture).
#pragma once

#include <rte_mbuf.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nic_sim/fabric/flow_table.h"
#include "nic_sim/fabric/group_table.h"
#include "nic_sim/fabric/packet.h"
#include "nic_sim/stats/counters.h"
#include "nic_sim/trace/trace_ring.h"
#include "transport/base/time.h"
#include "transport/types.h"

namespace verbena::nic {

class CaptureFile;  // capture.h
class Wire;         // nic_sim/port/wire.h
struct WireStatus;  // nic_sim/port/wire.h

struct PortConfig {
  std::string device;  // "verbena0"
  transport::MacAddress mac;
  std::vector<transport::Gid> gids;  // index = GID index; zero GIDs are free
  GroupLimits group_limits;
};

enum class CaptureStage { kBefore, kAfter };

// Packets of other shards (or from outside) that wait in an inbox.
inline constexpr size_t kMaxForeignPackets = 1024;

// Who runs a QP.
class PacketSteering {
 public:
  virtual ~PacketSteering() = default;
  // Any thread. An unknown QPN is shard 0's.
  virtual ShardId OwnerOf(PortId port, uint32_t qpn) const = 0;
};

// Is told that another shard's packets are in its inbox.
class InboxOwner {
 public:
  virtual ~InboxOwner() = default;
  // From any thread, with the fabric's lock held: calls nothing of the fabric.
  virtual void OnForeignPackets() = 0;
};

class Fabric {
 public:
  // strict: ICRCs are always computed and checked, also inside the daemon.
  explicit Fabric(bool strict);
  ~Fabric();

  PortId AddPort(const PortConfig& config);
  size_t port_count() const;
  const PortConfig& config(PortId port) const;  // with the GIDs that it was added with
  // Its GIDs have changed. No new path leads to one that is gone; packets on old ones still
  // find the port, until another takes the address.
  void SetGids(PortId port, const std::vector<transport::Gid>& gids);
  std::vector<transport::Gid> gids(PortId port) const;
  PortCounters counters(PortId port) const;
  // A received packet that its QP did not take.
  void CountReceiveDrop(PortId port, DropReason reason);
  bool link_up(PortId port) const;  // false while a `down` rule holds
  // Counts changes of any port's link. Owners of inboxes are told of one.
  uint32_t link_changes() const;

  // Joins a port to the outside; before the first packet.
  void AttachWire(PortId port, std::unique_ptr<Wire> wire);
  // Empty: the port is not joined to a netdev.
  std::optional<WireStatus> wire_status(PortId port) const;
  // Descriptors that tell of frames from outside.
  std::vector<int> wake_fds() const;
  // The port's netdev has no room: QPs of the port should wait. Changes in
  // HandleTimeout.
  bool congested(PortId port) const;
  // A rule has brought the port's NIC to a standstill: it sends and takes nothing, and its
  // clocks do not go on.
  bool stalled(PortId port) const;
  // Largest path MTU that packets of the port may have; follows the netdev's MTU
  // as of the last RefreshLinks.
  transport::Pmtu active_mtu(PortId port) const;
  // Looks at the netdevs' MTU and state; from control calls.
  void RefreshLinks();

  // Is there a way from `source`, an address of the port, to `destination`?
  bool CanReach(PortId port, const transport::Gid& source, const transport::Gid& destination) const;
  // MAC of the port that owns `gid`, for the headers; nullptr: none of them does
  // (packets to the outside get theirs in Transmit).
  const transport::MacAddress* Resolve(const transport::Gid& gid) const;
  // A connection to `destination` begins: its next hop outside is looked for.
  // True: it is known, or none is needed.
  bool Prepare(PortId port, const transport::Gid& destination, transport::Time now);

  // A QP of the shard becomes or ceases to be a member of `group`. 0, or ENOMEM:
  // PortConfig::group_limits.
  int AttachGroup(PortId port, ShardId shard, const transport::Gid& group);
  void DetachGroup(PortId port, ShardId shard, const transport::Gid& group);

  // A flow rule of the port, for a raw packet QP that removes it before it goes
  // away. Gives its id, 0: kMaxFlows.
  static constexpr size_t kMaxFlows = 1024;
  uint32_t AddFlow(PortId port, const FlowRule& rule);
  void RemoveFlow(PortId port, uint32_t id);
  FlowCounters ReadFlowCounters(const FlowCounters& counters) const;

  // The host becomes or ceases to be a member of `group` on the port's link: tells
  // routers and switches there. Counted.
  void ReportGroup(PortId port, const transport::Gid& group, bool join, transport::Time now);

  // Without a steering everything is shard 0's. Set before the first packet.
  void SetSteering(const PacketSteering* steering);
  // Shard 0 has an inbox from the start, the others from here on; `pool` is where
  // its own packets come from. nullptr: all packets are its own.
  void OpenInbox(ShardId shard, const rte_mempool* pool, InboxOwner* owner);
  // For packets to QP1. All that it gets counts as of other shards.
  void OpenManagementInbox(InboxOwner* owner);
  // Frees what is in it. Its packets are dropped (unknown_qp) from now on.
  void CloseInbox(ShardId shard);

  // Takes the packets over. Each has Ethernet to pad, plus 4 bytes of room for
  // the ICRC (PacketMeta::icrc_present says if they are filled). A packet
  // without one that is not `strict` becomes trusted.
  void Transmit(PortId port, std::span<rte_mbuf* const> packets, transport::Time now);
  // Takes in frames from outside, at most a burst of each port. True if there
  // were some.
  bool PollWires(transport::Time now);
  // Takes up to out.size() received packets; the caller frees them. ICRC: must
  // be checked by the caller unless PacketMeta::trusted.
  size_t Receive(PortId port, std::span<rte_mbuf*> out, ShardId shard = 0);
  bool has_received(PortId port, ShardId shard = 0) const;

  // Packets that rules hold or that a removed rule held, ends of `down` rules,
  // questions for MAC addresses, netdevs that had no room.
  transport::Time next_deadline() const;
  void HandleTimeout(transport::Time now);

  // Fault rules: 'ACTION [key=value ...]'. Add gives the id (> 0), or 0 with a
  // sentence in *error that names the bad word.
  uint32_t AddRule(std::string_view text, std::string* error, std::string* field = nullptr);
  // An id for a rule that is not one of the fabric's.
  uint32_t TakeRuleId();
  // Whose QP that is, for rules with app= and nth_qp=: the `nth` of application `app`.
  void NameQp(PortId port, uint32_t qpn, std::string_view app, uint32_t nth);
  void ForgetQp(PortId port, uint32_t qpn);
  nlohmann::json ListRules() const;
  // Calls visit(event) for the last hits of rules, oldest first, with the fabric's lock.
  void ForEachHit(const std::function<void(const TraceEvent&)>& visit) const;
  // Removes rule `id`, or all with 0; gives the number removed.
  uint32_t ClearRules(uint32_t id);

  // FaultStage::Release; the packets go on with the next HandleTimeout.
  size_t ReleaseHeld(uint32_t rule, size_t count);
  // FaultStage::Held, with "device".
  nlohmann::json ListHeld() const;

  // Starts writing packets of `port` (or all: kAllPorts) to `fd`, which the
  // capture owns. Gives an id; 0: 16 captures run already, no such port, or no
  // thread (`fd` is closed). `count` 0: no limit. `qpn` not 0: only packets from or
  // to this QP (from: of those that come from outside that is not known).
  static constexpr PortId kAllPorts = 0xffff;
  uint32_t StartCapture(int fd, PortId port, CaptureStage stage, uint64_t count, uint32_t qpn = 0);
  // It has ended by itself: its count is reached or a write failed.
  bool CaptureDone(uint32_t id) const;
  // Ends it. CaptureFile::Finish() then waits until all is written and gives
  // the counts; call it without the shard's lock.
  std::unique_ptr<CaptureFile> DetachCapture(uint32_t id);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace verbena::nic
