// SPDX-License-Identifier: Apache-2.0
//
// Fault stage: applies the fault rules (fault_rule.h) to packets at both ends
// of the switch. Rules see a packet in the order of their ids; each sees what
// the earlier ones left of it. A copy made by `duplicate` is not seen by later
// rules of the same side, and it never waits.
//
// Deterministic: each rule has its own generator that advances only with
// packets that the rule selects; the same packets in the same order at the same
// times give the same faults.
//
// Thread: under the shard's lock. Allocates in Add, and for new PSNs while
// there is a rule with transmission=.
#pragma once

#include <rte_mbuf.h>

#include <cstdint>
#include <list>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <unordered_map>

#include "nic_sim/fabric/fault_rule.h"
#include "nic_sim/fabric/packet_queue.h"
#include "nic_sim/fabric/qp_names.h"
#include "nic_sim/trace/trace_ring.h"
#include "transport/base/time.h"

namespace verbena::nic {

// A packet that `reorder` holds goes on after this, if too few packets follow.
inline constexpr transport::Duration kReorderLimit = transport::Duration::Milliseconds(1);
// Packets that all rules hold together. Beyond it the oldest packet of the rule
// goes on early (delay) or the packet is left alone (reorder): nothing is lost.
inline constexpr size_t kMaxHeldPackets = 4096;
inline constexpr size_t kMaxFaultRules = 1024;
// Packets that wait for one rule `rate`, like the queue of a Linux interface.
inline constexpr size_t kRateQueue = 1000;
// Packets that wait for one rule `hold`: a small part of a pool. Beyond it the oldest
// goes on.
inline constexpr size_t kHoldQueue = 1024;
// PSNs whose transmissions are counted. Beyond it the counts start anew.
inline constexpr size_t kMaxCountedPsns = 65536;

class FaultStage {
 public:
  enum class Verdict { kGoesOn, kDropped, kLinkDown };
  static constexpr PortId kAnyPort = 0xffff;

  FaultStage() = default;
  FaultStage(const FaultStage&) = delete;
  FaultStage& operator=(const FaultStage&) = delete;

  // No rule, and no packet waits: Apply need not be called.
  bool idle() const { return rules_.empty() && released_.empty(); }

  // `port`: the one with rule.device, or kAnyPort. Gives the id, 0 if there are
  // too many rules.
  uint32_t Add(const FaultRule& rule, PortId port);
  uint32_t TakeId() { return next_id_++; }
  QpNames& qps() { return qps_; }
  nlohmann::json List() const;
  // Removes rule `id`, or all with 0. Packets that it holds go on with the next
  // call of Expire.
  uint32_t Clear(uint32_t id);

  // Lets the `count` packets go that rules `hold` (rule `id`, or all with 0) have had
  // longest; with the next call of Expire. Gives their number.
  size_t Release(uint32_t id, size_t count);
  // [{"rule", "side", ...}]: what rules `hold` hold, in the order of Release.
  nlohmann::json Held() const;

  // Takes over a packet whose PacketTransit is filled. kGoesOn: it is in *out,
  // or waits; else it is freed and the caller counts it. In any case *out gets
  // what leaves the stage now, in order; all at this side of the switch.
  Verdict Apply(rte_mbuf* packet, transport::Time now, PacketQueue* out);

  // Gives out the packets whose time has come; they may be of either side.
  void Expire(transport::Time now, PacketQueue* out);
  // When Expire has something to do. Time::Zero(): at once.
  transport::Time next_deadline() const;

  bool link_up(PortId port) const;
  // Rules `stall` and `slow_dma` are there, and one holds the port up at `now`.
  bool has_stalls() const { return stalling_rules_ != 0; }
  bool stalled(PortId port, transport::Time now) const;

  // Hits of rules.
  const TraceRing& trace() const { return trace_; }

 private:
  static constexpr size_t kTraceEvents = 8192;

  struct ActiveRule {
    FaultRule rule;
    uint32_t id = 0;
    PortId port = kAnyPort;
    uint64_t generator = 0;
    uint64_t selected = 0;
    uint64_t hits = 0;
    // Of the first call with a time after Add.
    std::optional<transport::Time> added;
    bool in_burst = false;
    PacketQueue held;                                        // ascending release times
    transport::Time last_release = transport::Time::Zero();  // of `delay`
    transport::Time link_free = transport::Time::Zero();     // of `rate` and `slow_dma`
    // Of `down` and `stall`.
    bool is_down = false;
    bool was_down = false;
    transport::Time up_again = transport::Time::Never();
    transport::Time stall_counted = transport::Time::Zero();

    // Only with `added`.
    bool InWindow(transport::Time now) const {
      return now >= *added + rule.after && (!rule.until || now < *added + *rule.until);
    }
    bool exhausted() const { return rule.count && hits >= *rule.count; }
    bool HasPort(PortId p) const { return port == kAnyPort || port == p; }
  };
  struct Facts;

  bool Matches(const ActiveRule& rule, const Facts& facts) const;
  bool IsNamed(const FaultRule& rule, PortId port, uint32_t qpn) const;
  bool Selects(ActiveRule* rule, const Facts& facts);
  // True: the packet is hit while the rule holds.
  bool ApplyDown(ActiveRule* rule, const Facts& facts, transport::Time now);
  static void UpdateDown(ActiveRule* rule, transport::Time now);
  static transport::Time NextChange(const ActiveRule& rule, transport::Time now);
  // A frame that answers the packet; nullptr: it cannot be answered so.
  static rte_mbuf* Forge(const FaultRule& rule, rte_mbuf* packet, const Facts& facts);
  void CountMessage(Facts* facts);
  static transport::Duration DelayOf(ActiveRule* rule);
  static bool Alter(ActiveRule* rule, rte_mbuf* packet, const Facts& facts);
  void ApplyDelay(ActiveRule* rule, rte_mbuf* packet, transport::Time now, PacketQueue* out);
  void ApplyHold(ActiveRule* rule, rte_mbuf* packet, PacketQueue* out);
  void ApplyRate(ActiveRule* rule, rte_mbuf* packet, transport::Time now);
  ActiveRule* OldestHolder(uint32_t id);
  bool CanReorder(const ActiveRule& rule, const Facts& facts) const;
  void KeepBack(ActiveRule* rule, rte_mbuf* packet, transport::Time release);
  void Pass(rte_mbuf* packet, PacketQueue* out);
  void Leave(rte_mbuf* packet, ActiveRule* holder, transport::Time now, PacketQueue* out);

  // How many times this PSN of this flow has been sent, this one included.
  uint32_t CountTransmission(const Facts& facts);
  void Hit(ActiveRule* rule, const Facts& facts);

  std::list<ActiveRule> rules_;
  size_t counting_rules_ = 0;  // with transmission=
  size_t message_rules_ = 0;   // with msg=
  size_t stalling_rules_ = 0;
  QpNames qps_;
  std::unordered_map<uint64_t, uint32_t> transmissions_;
  PacketQueue released_;  // of removed rules
  TraceRing trace_{kTraceEvents};
  size_t held_ = 0;
  transport::Time latest_;  // of Expire
  uint32_t next_held_ = 0;  // order of those that `hold` holds
  uint32_t next_id_ = 1;
};

}  // namespace verbena::nic
