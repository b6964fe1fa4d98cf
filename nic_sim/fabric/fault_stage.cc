// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/fault_stage.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "transport/base/byteorder.h"
#include "transport/wire/bth.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

// What rules look at.
struct FaultStage::Facts {
  const PacketTransit* transit = nullptr;
  const PacketMeta* meta = nullptr;
  uint32_t l3 = 0;
  uint32_t bth = 0;  // offset; 0: no RoCEv2 packet
  uint8_t opcode = 0;
  uint32_t dest_qpn = 0;

  bool is_tx() const { return transit->direction == Direction::kTx; }
  // The port at whose side the stage sees the packet now.
  PortId port() const { return is_tx() ? transit->source : transit->destination; }

  // The packet was replaced by a copy; rules change nothing that is read above.
  void MovedTo(rte_mbuf* packet) {
    transit = &TransitOf(packet);
    meta = &MetaOf(packet);
  }

  explicit Facts(rte_mbuf* packet) : transit(&TransitOf(packet)), meta(&MetaOf(packet)) {
    const std::span<const std::byte> frame = FrameSpan(packet);
    l3 = L3OffsetOf(frame);
    if (l3 == 0) return;
    const bool is_ipv6 = LoadBe16(&frame[l3 - 2]) == kEtherTypeIpv6;
    bth = l3 + static_cast<uint32_t>((is_ipv6 ? Ipv6Header::kBytes : Ipv4Header::kBytes) +
                                     UdpHeader::kBytes);
    const Bth header = Bth::Load(&frame[bth]);
    opcode = static_cast<uint8_t>(header.opcode);
    dest_qpn = header.dest_qpn.value();
  }
};

namespace {

rte_mbuf* Copy(rte_mbuf* packet) {
  rte_mbuf* copy = rte_pktmbuf_copy(packet, packet->pool, 0, UINT32_MAX);
  if (copy == nullptr) return nullptr;
  MetaOf(copy) = MetaOf(packet);
  TransitOf(copy) = TransitOf(packet);
  return copy;
}

// A packet that may be written to: itself, or a copy that takes its place if
// someone else refers to it. nullptr: no packet is free; it stays as it was.
rte_mbuf* Writable(rte_mbuf* packet) {
  if (rte_mbuf_refcnt_read(packet) == 1 && RTE_MBUF_DIRECT(packet)) return packet;
  rte_mbuf* copy = Copy(packet);
  if (copy != nullptr) rte_pktmbuf_free(packet);
  return copy;
}

// Flips bit `random` of what lies behind the destination QPN: the packet still
// reaches its QP's port and is well formed, but the ICRC is wrong.
void FlipBit(rte_mbuf* packet, uint32_t bth, uint64_t random) {
  EnsureIcrc(packet);
  const uint32_t first = bth + 9;  // PSN
  const uint64_t bits = uint64_t{packet->data_len - first} * 8;
  const uint64_t bit = random % bits;
  FrameOf(packet)[first + bit / 8] ^= std::byte{1} << static_cast<int>(bit % 8);
  MetaOf(packet).trusted = false;
}

// ICRC and its trust stay: it does not cover the ECN bits.
void MarkCongestion(rte_mbuf* packet, uint32_t l3) {
  std::byte* ip = FrameOf(packet) + l3;
  if (LoadBe16(ip - 2) == kEtherTypeIpv6) {
    ip[1] |= std::byte{0x30};
  } else {
    ip[1] |= std::byte{0x03};
    StoreBe16(ip + 10, Ipv4HeaderChecksum(ip));
  }
}

bool SameFlow(const PacketTransit& a, const PacketTransit& b) {
  return a.direction == b.direction && a.source == b.source && a.destination == b.destination &&
         a.flow_qpn == b.flow_qpn;
}

}  // namespace

// SplitMix64.
uint64_t FaultStage::Random(ActiveRule* rule) {
  uint64_t z = rule->generator += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint32_t FaultStage::Add(const FaultRule& rule, PortId port) {
  if (rules_.size() >= kMaxFaultRules) return 0;
  ActiveRule& active = rules_.emplace_back();
  active.rule = rule;
  active.port = port;
  active.id = next_id_++;
  active.generator = rule.seed.value_or(active.id);
  if (rule.action == FaultAction::kDown && !rule.has_trigger()) {
    active.starts_at_once = rule.duration.has_value();
    active.is_down = active.was_down = !rule.duration.has_value();
  }
  return active.id;
}

nlohmann::json FaultStage::List() const {
  nlohmann::json list = nlohmann::json::array();
  for (const ActiveRule& rule : rules_) {
    list.push_back({{"id", rule.id}, {"rule", rule.rule.text}, {"hits", rule.hits}});
  }
  return list;
}

uint32_t FaultStage::Clear(uint32_t id) {
  uint32_t removed = 0;
  for (auto rule = rules_.begin(); rule != rules_.end();) {
    if (id != 0 && rule->id != id) {
      ++rule;
      continue;
    }
    held_ -= rule->held.size();
    released_.Append(&rule->held);
    rule = rules_.erase(rule);
    ++removed;
  }
  return removed;
}

// All keys but nth, every, prob, count.
bool FaultStage::Matches(const ActiveRule& active, const Facts& f) {
  const FaultRule& rule = active.rule;
  bool source_qp = f.is_tx();
  bool dest_qp = !f.is_tx();
  if (rule.direction) {
    if ((*rule.direction == Direction::kTx) != f.is_tx() || !active.HasPort(f.port())) return false;
  } else if (f.is_tx()) {
    if (!active.HasPort(f.transit->source)) return false;
    dest_qp = active.HasPort(f.transit->destination);
  } else {
    // Seen where it was sent, unless that was outside; or not at all.
    const PortId source = f.transit->source;
    if ((source != kOutside && active.HasPort(source)) || !active.HasPort(f.transit->destination)) {
      return false;
    }
  }
  if ((rule.qpn || rule.opcodes) && f.bth == 0) return false;
  if (rule.qpn && !(source_qp && *rule.qpn == f.meta->source_qpn) &&
      !(dest_qp && *rule.qpn == f.dest_qpn)) {
    return false;
  }
  if (rule.opcodes && !rule.opcodes->test(f.opcode)) return false;
  return !rule.psn_offset || *rule.psn_offset == f.meta->psn_offset;
}

bool FaultStage::Selects(ActiveRule* active, const Facts& facts) {
  if (active->exhausted() || !Matches(*active, facts)) return false;
  const uint64_t occurrence = ++active->selected;
  if (active->rule.nth && occurrence != *active->rule.nth) return false;
  if (active->rule.every && occurrence % *active->rule.every != 0) return false;
  if (active->rule.probability) {
    constexpr double kUnit = 0x1p-53;
    const double random = static_cast<double>(Random(active) >> 11) * kUnit;  // [0, 1)
    if (random >= *active->rule.probability) return false;
  }
  return true;
}

void FaultStage::UpdateDown(ActiveRule* active, Time now) {
  if (active->starts_at_once) {
    active->starts_at_once = false;
    active->is_down = active->was_down = true;
    active->up_again = now + *active->rule.duration;
  }
  if (active->is_down && now >= active->up_again) active->is_down = false;
}

bool FaultStage::ApplyDown(ActiveRule* active, const Facts& facts, Time now) {
  UpdateDown(active, now);
  const FaultRule& rule = active->rule;
  if (!active->is_down && rule.has_trigger()) {
    // nth= and a trigger without every= or prob= take the link down once.
    const bool again = rule.every || rule.probability;
    if ((!active->was_down || again) && Selects(active, facts)) {
      active->is_down = active->was_down = true;
      active->up_again = rule.duration ? now + *rule.duration : Time::Never();
    }
  }
  if (!active->is_down) return false;
  if (!active->HasPort(facts.port())) return false;
  if (rule.direction && (*rule.direction == Direction::kTx) != facts.is_tx()) return false;
  ++active->hits;
  if (active->exhausted()) active->is_down = false;
  return true;
}

void FaultStage::Hold(ActiveRule* active, rte_mbuf* packet, Time release) {
  TransitOf(packet).release = release;
  active->held.Push(packet);
  ++held_;
}

void FaultStage::ApplyDelay(ActiveRule* active, rte_mbuf* packet, Time now, PacketQueue* out) {
  if (held_ >= kMaxHeldPackets) {
    if (active->held.empty()) {
      Pass(packet, out);
      return;
    }
    --held_;
    Pass(active->held.Pop(), out);
  }
  Hold(active, packet, now + *active->rule.duration);
}

// One packet of a flow at a time: if each that follows waited too, none would
// overtake.
bool FaultStage::CanReorder(const ActiveRule& active, const Facts& facts) const {
  if (held_ >= kMaxHeldPackets) return false;
  for (rte_mbuf* held = active.held.front(); held != nullptr; held = TransitOf(held).next) {
    if (SameFlow(TransitOf(held), *facts.transit)) return false;
  }
  return true;
}

// The packet leaves the stage; held ones that waited for it follow.
void FaultStage::Pass(rte_mbuf* packet, PacketQueue* out) {
  const PacketTransit passing = TransitOf(packet);
  out->Push(packet);
  for (ActiveRule& active : rules_) {
    if (active.rule.action != FaultAction::kReorder || active.held.empty()) continue;
    const size_t before = active.held.size();
    active.held.Extract(
        [&](rte_mbuf* held) {
          PacketTransit& transit = TransitOf(held);
          return SameFlow(transit, passing) && --transit.passes_left == 0;
        },
        out);
    held_ -= before - active.held.size();
  }
}

// Out of the stage, or into the queue of the rule that makes it wait.
void FaultStage::Leave(rte_mbuf* packet, ActiveRule* holder, Time now, PacketQueue* out) {
  if (holder == nullptr) {
    Pass(packet, out);
  } else if (holder->rule.action == FaultAction::kDelay) {
    ApplyDelay(holder, packet, now, out);
  } else {
    TransitOf(packet).passes_left = holder->rule.distance;
    Hold(holder, packet, now + kReorderLimit);
  }
}

FaultStage::Verdict FaultStage::Apply(rte_mbuf* packet, Time now, PacketQueue* out) {
  Facts facts(packet);
  TransitOf(packet).flow_qpn = facts.dest_qpn;
  Verdict verdict = Verdict::kGoesOn;
  ActiveRule* holder = nullptr;
  PacketQueue copies;
  for (ActiveRule& active : rules_) {
    if (active.rule.action == FaultAction::kDown) {
      if (!ApplyDown(&active, facts, now)) continue;
      verdict = Verdict::kLinkDown;
      break;
    }
    if (!Selects(&active, facts)) continue;
    bool hit = true;
    rte_mbuf* changed = nullptr;
    switch (active.rule.action) {
      case FaultAction::kDrop:
        verdict = Verdict::kDropped;
        break;
      case FaultAction::kDuplicate:
        changed = Copy(packet);
        hit = changed != nullptr;
        if (hit) copies.Push(changed);
        break;
      case FaultAction::kCorrupt:
        hit = facts.bth != 0 && (changed = Writable(packet)) != nullptr;
        if (!hit) break;
        FlipBit(changed, facts.bth, Random(&active));
        packet = changed;
        facts.MovedTo(packet);
        break;
      case FaultAction::kMark:
        hit = facts.l3 != 0 && (changed = Writable(packet)) != nullptr;
        if (!hit) break;
        MarkCongestion(changed, facts.l3);
        packet = changed;
        facts.MovedTo(packet);
        break;
      case FaultAction::kReorder:
        hit = holder == nullptr && CanReorder(active, facts);
        if (hit) holder = &active;
        break;
      case FaultAction::kDelay:
        hit = holder == nullptr;
        if (hit) holder = &active;
        break;
      case FaultAction::kDown:
        break;
    }
    if (hit) ++active.hits;
    if (verdict != Verdict::kGoesOn) break;
  }
  if (verdict == Verdict::kGoesOn) {
    Leave(packet, holder, now, out);
  } else {
    rte_pktmbuf_free(packet);
  }
  while (rte_mbuf* copy = copies.Pop()) Pass(copy, out);
  return verdict;
}

void FaultStage::Expire(Time now, PacketQueue* out) {
  out->Append(&released_);
  for (ActiveRule& active : rules_) {
    if (active.rule.action == FaultAction::kDown) UpdateDown(&active, now);
  }
  while (held_ > 0) {
    ActiveRule* first = nullptr;  // the rule whose packet is due first
    for (ActiveRule& active : rules_) {
      if (active.held.empty()) continue;
      const Time release = TransitOf(active.held.front()).release;
      if (release > now) continue;
      if (first == nullptr || release < TransitOf(first->held.front()).release) first = &active;
    }
    if (first == nullptr) return;
    --held_;
    Pass(first->held.Pop(), out);
  }
}

Time FaultStage::next_deadline() const {
  if (!released_.empty()) return Time::Zero();
  Time deadline = Time::Never();
  for (const ActiveRule& active : rules_) {
    if (active.starts_at_once) return Time::Zero();
    if (active.is_down) deadline = std::min(deadline, active.up_again);
    if (!active.held.empty()) {
      deadline = std::min(deadline, TransitOf(active.held.front()).release);
    }
  }
  return deadline;
}

bool FaultStage::link_up(PortId port) const {
  return std::none_of(rules_.begin(), rules_.end(), [port](const ActiveRule& active) {
    return active.is_down && active.HasPort(port);
  });
}

}  // namespace verbena::nic
