// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/fault_stage.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "nic_sim/faults/rule_text.h"
#include "transport/base/byteorder.h"
#include "transport/wire/aeth.h"
#include "transport/wire/bth.h"
#include "transport/wire/deth.h"
#include "transport/wire/icrc.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

// What rules look at.
struct FaultStage::Facts {
  const PacketTransit* transit = nullptr;
  PacketMeta* meta = nullptr;
  uint32_t l3 = 0;
  uint32_t bth = 0;  // offset; 0: no RoCEv2 packet
  uint8_t opcode = 0;
  uint32_t dest_qpn = 0;
  uint16_t mad = 0;  // attribute id of the message that it carries to QP1
  uint32_t psn = 0;

  Time now;
  uint32_t bytes = 0;         // from the IP header to the ICRC
  uint32_t transmission = 0;  // only while a rule asks for it
  uint32_t message = 0;       // likewise
  uint32_t payload_bytes = 0;

  bool is_tx() const { return transit->direction == Direction::kTx; }
  // The port at whose side the stage sees the packet now.
  PortId port() const { return is_tx() ? transit->source : transit->destination; }

  // The packet was replaced by a copy; rules change nothing that is read above.
  void MovedTo(rte_mbuf* packet) {
    transit = &TransitOf(packet);
    meta = &MetaOf(packet);
  }

  // The packet was altered.
  void Renew(rte_mbuf* packet) {
    const uint32_t count = transmission;
    const uint32_t its_message = message;
    *this = Facts(packet, now);
    transmission = count;
    message = its_message;
  }

  Facts(rte_mbuf* packet, Time time)
      : transit(&TransitOf(packet)), meta(&MetaOf(packet)), now(time) {
    const std::span<const std::byte> frame = FrameSpan(packet);
    l3 = meta->raw && !IsRoce(frame) ? 0 : L3OffsetOf(frame);
    bytes = static_cast<uint32_t>(frame.size()) - l3;
    if (l3 == 0) return;
    const bool is_ipv6 = LoadBe16(&frame[l3 - 2]) == kEtherTypeIpv6;
    bth = l3 + static_cast<uint32_t>((is_ipv6 ? Ipv6Header::kBytes : Ipv4Header::kBytes) +
                                     UdpHeader::kBytes);
    const Bth header = Bth::Load(&frame[bth]);
    opcode = static_cast<uint8_t>(header.opcode);
    dest_qpn = header.dest_qpn.value();
    // Management class 7 is communication management (IBTA Vol 1, 16.7).
    constexpr uint32_t kMad = Bth::kBytes + Deth::kBytes;
    if (header.opcode == Opcode::kUdSendOnly && header.dest_qpn == kManagementQpn &&
        frame.size() >= bth + kMad + 24 && frame[bth + kMad + 1] == std::byte{7}) {
      mad = LoadBe16(&frame[bth + kMad + 16]);
    }
    psn = header.psn.value();
    const size_t around = bth + TraitsOf(header.opcode).header_bytes + kIcrcBytes +
                          (static_cast<uint8_t>(frame[bth + 1]) >> 4 & 3);
    if (frame.size() > around) payload_bytes = static_cast<uint32_t>(frame.size() - around);
  }
};

namespace {

rte_mbuf* Copy(rte_mbuf* packet) {
  rte_mbuf* copy = CopyPacket(packet);
  if (copy != nullptr) TransitOf(copy) = TransitOf(packet);
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
// reaches its QP's port and is well formed.
void FlipBit(rte_mbuf* packet, uint32_t bth, uint64_t random) {
  EnsureIcrc(packet);
  const uint32_t first = bth + 9;  // PSN
  const uint64_t bits = uint64_t{packet->data_len - first} * 8;
  const uint64_t bit = random % bits;
  FrameOf(packet)[first + bit / 8] ^= std::byte{1} << static_cast<int>(bit % 8);
}

void SetTrust(rte_mbuf* packet, bool right_icrc) {
  MetaOf(packet).trusted = false;
  if (!right_icrc) return;
  MetaOf(packet).icrc_present = false;
  EnsureIcrc(packet);
}

// False: the packet is too short.
bool FlipBits(rte_mbuf* packet, uint32_t bth, const FaultRule& rule) {
  const uint32_t at = bth + *rule.at;
  if (at >= packet->data_len) return false;
  EnsureIcrc(packet);
  FrameOf(packet)[at] ^= std::byte{rule.flipped};
  SetTrust(packet, rule.right_icrc.value_or(false));
  return true;
}

// False: it has none of the fields.
bool SetFields(rte_mbuf* packet, uint32_t l3, const FaultRule& rule) {
  EnsureIcrc(packet);
  const std::span<std::byte> frame = FrameSpan(packet);
  bool changed = false;
  for (const FieldChange& change : rule.changes) {
    const std::optional<uint64_t> old = ReadHeaderField(frame, l3, *change.field);
    if (!old) continue;
    changed |= WriteHeaderField(frame, l3, *change.field,
                                change.relative ? *old + change.value : change.value);
  }
  if (changed) SetTrust(packet, rule.right_icrc.value_or(true));
  return changed;
}

// The packet keeps what leads it to a QP: headers up to the BTH, and four bytes.
bool Truncate(rte_mbuf* packet, uint32_t bth, uint32_t bytes) {
  const uint32_t least = static_cast<uint32_t>(bth + Bth::kBytes + 4);  // and an ICRC
  if (packet->data_len <= least) return false;
  EnsureIcrc(packet);
  rte_pktmbuf_trim(packet, static_cast<uint16_t>(std::min(bytes, packet->data_len - least)));
  MetaOf(packet).trusted = false;
  return true;
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

uint32_t FaultStage::Add(const FaultRule& rule, PortId port) {
  if (rules_.size() >= kMaxFaultRules) return 0;
  ActiveRule& active = rules_.emplace_back();
  active.rule = rule;
  active.port = port;
  active.id = next_id_++;
  active.generator = rule.seed.value_or(active.id);
  if (rule.transmission && counting_rules_++ == 0) transmissions_.clear();
  if (rule.message && message_rules_++ == 0) qps_.ForgetMessages();
  const bool stalls = rule.action == FaultAction::kStall || rule.action == FaultAction::kSlowDma;
  if (stalls) ++stalling_rules_;
  // What needs no time is down at once.
  active.is_down =
      rule.is_down_like() && !rule.has_trigger() && !rule.duration && !rule.has_times();
  return active.id;
}

nlohmann::json FaultStage::List() const {
  nlohmann::json list = nlohmann::json::array();
  for (const ActiveRule& rule : rules_) {
    list.push_back({{"id", rule.id}, {"rule", rule.rule.text}, {"hits", rule.hits}});
    if (rule.rule.action == FaultAction::kHold) list.back()["held"] = rule.held.size();
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
    if (rule->rule.transmission) --counting_rules_;
    if (rule->rule.message) --message_rules_;
    const FaultAction action = rule->rule.action;
    if (action == FaultAction::kStall || action == FaultAction::kSlowDma) --stalling_rules_;
    held_ -= rule->held.size();
    released_.Append(&rule->held);
    rule = rules_.erase(rule);
    ++removed;
  }
  return removed;
}

FaultStage::ActiveRule* FaultStage::OldestHolder(uint32_t id) {
  ActiveRule* oldest = nullptr;
  uint32_t age = 0;
  for (ActiveRule& active : rules_) {
    if (active.rule.action != FaultAction::kHold || active.held.empty()) continue;
    if (id != 0 && active.id != id) continue;
    const uint32_t its_age = next_held_ - TransitOf(active.held.front()).hold_order;
    if (oldest != nullptr && its_age < age) continue;
    oldest = &active;
    age = its_age;
  }
  return oldest;
}

size_t FaultStage::Release(uint32_t id, size_t count) {
  size_t released = 0;
  while (released < count) {
    ActiveRule* const holder = OldestHolder(id);
    if (holder == nullptr) break;
    released_.Push(holder->held.Pop());
    --held_;
    ++released;
  }
  return released;
}

nlohmann::json FaultStage::Held() const {
  struct Row {
    uint32_t age;
    nlohmann::json packet;
  };
  std::vector<Row> rows;
  for (const ActiveRule& active : rules_) {
    if (active.rule.action != FaultAction::kHold) continue;
    for (rte_mbuf* held = active.held.front(); held != nullptr; held = TransitOf(held).next) {
      const Facts facts(held, Time());
      rows.push_back({next_held_ - TransitOf(held).hold_order,
                      {{"rule", active.id},
                       {"side", facts.is_tx() ? "tx" : "rx"},
                       {"port", facts.port()},
                       {"source_qpn", facts.meta->source_qpn},
                       {"dest_qpn", facts.dest_qpn},
                       {"opcode", facts.bth == 0 ? "?" : OpcodeName(Opcode{facts.opcode})},
                       {"psn", facts.psn},
                       {"psn_offset", facts.meta->psn_offset},
                       {"retransmission", facts.meta->retransmission},
                       {"bytes", facts.bytes}}});
    }
  }
  std::ranges::stable_sort(rows, std::ranges::greater(), &Row::age);
  nlohmann::json list = nlohmann::json::array();
  for (Row& row : rows) list.push_back(std::move(row.packet));
  return list;
}

// Before any rule, where the packet is sent or comes in; behind that it only looks.
uint32_t FaultStage::CountTransmission(const Facts& f) {
  const bool response = TraitsOf(static_cast<Opcode>(f.opcode)).is_response();
  const uint64_t key = uint64_t{f.dest_qpn} << 40 | uint64_t{f.meta->psn_offset & 0xffffff} << 16 |
                       uint64_t{f.transit->destination & 0x7fffu} << 1 | (response ? 1 : 0);
  if (transmissions_.size() >= kMaxCountedPsns) transmissions_.clear();
  uint32_t& count = transmissions_[key];
  if (f.is_tx() || f.transit->source == kOutside) ++count;
  return count;
}

// Which message of which requester the packet belongs to; begins one where it is sent.
void FaultStage::CountMessage(Facts* f) {
  const OpcodeTraits& traits = TraitsOf(static_cast<Opcode>(f->opcode));
  const PacketTransit& transit = *f->transit;
  const uint32_t psn = f->meta->psn_offset;
  if (traits.is_response()) {
    f->message = qps_.MessageOf(transit.destination, f->dest_qpn, psn);
    return;
  }
  if (f->is_tx() && traits.begins_message()) qps_.Begin(transit.source, f->meta->source_qpn, psn);
  f->message = qps_.MessageOf(transit.source, f->meta->source_qpn, psn);
}

bool FaultStage::IsNamed(const FaultRule& rule, PortId port, uint32_t qpn) const {
  const QpNames::Owner* owner = qps_.Find(port, qpn);
  if (owner == nullptr || (rule.app && *rule.app != owner->app)) return false;
  return !rule.nth_qp || *rule.nth_qp == owner->nth;
}

// All keys but nth, every, prob, count.
bool FaultStage::Matches(const ActiveRule& active, const Facts& f) const {
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
  if (!active.InWindow(f.now) || f.bytes < rule.min_size || f.bytes > rule.max_size) return false;
  const bool needs_bth = rule.qpn || rule.source_qpn || rule.dest_qpn || rule.opcodes ||
                         rule.psn_offset || rule.transmission || rule.names_qp() || rule.pair ||
                         rule.message;
  if (needs_bth && f.bth == 0) return false;
  if (rule.source_qpn && *rule.source_qpn != f.meta->source_qpn) return false;
  if (rule.dest_qpn && *rule.dest_qpn != f.dest_qpn) return false;
  if (rule.qpn && !(source_qp && *rule.qpn == f.meta->source_qpn) &&
      !(dest_qp && *rule.qpn == f.dest_qpn)) {
    return false;
  }
  if (rule.names_qp() && !(source_qp && IsNamed(rule, f.transit->source, f.meta->source_qpn)) &&
      !(dest_qp && IsNamed(rule, f.transit->destination, f.dest_qpn))) {
    return false;
  }
  if (rule.pair) {
    const auto [a, b] = *rule.pair;
    const uint32_t from = f.meta->source_qpn;
    if (!(from == a && f.dest_qpn == b) && !(from == b && f.dest_qpn == a)) return false;
  }
  if (rule.message && *rule.message != f.message) return false;
  if (rule.opcodes && !rule.opcodes->test(f.opcode)) return false;
  if (rule.transmission && *rule.transmission != f.transmission) return false;
  if (rule.mad && *rule.mad != f.mad) return false;
  return !rule.psn_offset || *rule.psn_offset == f.meta->psn_offset;
}

bool FaultStage::Selects(ActiveRule* active, const Facts& facts) {
  if (active->exhausted() || !Matches(*active, facts)) return false;
  const uint64_t occurrence = ++active->selected;
  if (active->rule.nth && occurrence != *active->rule.nth) return false;
  if (active->rule.every && occurrence % *active->rule.every != 0) return false;
  if (!active->rule.probability) return true;
  if (!active->in_burst && !Chance(&active->generator, *active->rule.probability)) return false;
  // A burst of N on average ends after each packet with 1/N.
  active->in_burst = active->rule.burst && !Chance(&active->generator, 1.0 / *active->rule.burst);
  return true;
}

void FaultStage::Hit(ActiveRule* active, const Facts& facts) {
  ++active->hits;
  facts.meta->hit_by = active->id;
  trace_.Record({.time_ns = facts.now.ns(),
                 .qpn = facts.meta->source_qpn,
                 .peer_qpn = facts.dest_qpn,
                 .psn = facts.psn,
                 .bytes = facts.bytes,
                 .detail = active->id,
                 .port = facts.port(),
                 .kind = TraceKind::kFault,
                 .opcode = facts.opcode,
                 .code = static_cast<uint8_t>(active->rule.action),
                 .flags = static_cast<uint8_t>(
                     (facts.is_tx() ? 0 : TraceEvent::kReceivingSide) |
                     (facts.meta->retransmission ? TraceEvent::kRetransmission : 0))});
}

void FaultStage::UpdateDown(ActiveRule* active, Time now) {
  const FaultRule& rule = active->rule;
  if (rule.has_trigger()) {
    if (active->is_down && now >= active->up_again) active->is_down = false;
    return;
  }
  if (active->exhausted() && rule.action == FaultAction::kDown) return;
  const Time start = *active->added + rule.after;
  if (rule.period) {
    const int64_t phase = now < start ? 0 : (now - start).ns() % rule.period->ns();
    active->is_down = active->InWindow(now) && phase < rule.duration->ns();
    return;
  }
  const bool over = rule.duration && now >= start + *rule.duration;
  active->is_down = active->InWindow(now) && !over;
  active->was_down |= active->is_down || over;
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
  // A stall holds packets back that are not there yet: what is on its way goes on, and the
  // hit is what began it.
  if (rule.action == FaultAction::kStall) {
    if (active->stall_counted == active->up_again) return false;
    active->stall_counted = active->up_again;
    Hit(active, facts);
    return true;
  }
  Hit(active, facts);
  if (active->exhausted()) active->is_down = false;
  return true;
}

void FaultStage::KeepBack(ActiveRule* active, rte_mbuf* packet, Time release) {
  TransitOf(packet).release = release;
  active->held.Push(packet);
  ++held_;
}

Duration FaultStage::DelayOf(ActiveRule* active) {
  const FaultRule& rule = active->rule;
  if (rule.jitter <= Duration()) return *rule.duration;
  if (rule.distribution == DelayDistribution::kUniform) {
    const auto most = static_cast<uint64_t>(rule.jitter.ns());
    return *rule.duration +
           Duration::Nanoseconds(static_cast<int64_t>(NextRandom(&active->generator) % (most + 1)));
  }
  // In (0, 1].
  const auto unit = [active] {
    return static_cast<double>((NextRandom(&active->generator) >> 11) + 1) * 0x1p-53;
  };
  constexpr double kTwoPi = 6.283185307179586;
  constexpr double kParetoAlpha = 3;
  double factor = 0;
  switch (rule.distribution) {
    case DelayDistribution::kNormal: {
      const double radius = std::sqrt(-2 * std::log(unit()));
      factor = radius * std::cos(kTwoPi * unit());
      break;
    }
    case DelayDistribution::kExponential:
      factor = -std::log(unit());
      break;
    default:
      factor = std::pow(unit(), -1 / kParetoAlpha) - 1;
      break;
  }
  const double ns =
      static_cast<double>(rule.duration->ns()) + factor * static_cast<double>(rule.jitter.ns());
  constexpr double kMost = 3.6e12;  // an hour
  return Duration::Nanoseconds(static_cast<int64_t>(std::clamp(ns, 0.0, kMost)));
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
  const Time release = now + DelayOf(active);
  // In order: one that waits longer keeps those behind it.
  KeepBack(active, packet, std::max(release, active->last_release));
  active->last_release = TransitOf(packet).release;
}

void FaultStage::ApplyHold(ActiveRule* active, rte_mbuf* packet, PacketQueue* out) {
  if (held_ >= kMaxHeldPackets && active->held.empty()) {
    Pass(packet, out);
    return;
  }
  rte_mbuf* oldest = nullptr;
  if (held_ >= kMaxHeldPackets || active->held.size() >= kHoldQueue) {
    oldest = active->held.Pop();
    --held_;
  }
  TransitOf(packet).hold_order = next_held_++;
  KeepBack(active, packet, Time::Never());
  if (oldest != nullptr) Pass(oldest, out);
}

// When the link has sent those before and this one.
void FaultStage::ApplyRate(ActiveRule* active, rte_mbuf* packet, Time now) {
  const auto nanoseconds =
      static_cast<int64_t>(uint64_t{packet->data_len} * 8 * 1000 / *active->rule.mbps);
  active->link_free = std::max(active->link_free, now) + Duration::Nanoseconds(nanoseconds);
  KeepBack(active, packet, active->link_free);
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
  } else if (holder->rule.action == FaultAction::kRate) {
    ApplyRate(holder, packet, now);
  } else if (holder->rule.action == FaultAction::kHold) {
    ApplyHold(holder, packet, out);
  } else {
    TransitOf(packet).passes_left = holder->rule.distance;
    KeepBack(holder, packet, now + kReorderLimit);
  }
}

rte_mbuf* FaultStage::Forge(const FaultRule& rule, rte_mbuf* packet, const Facts& f) {
  const OpcodeTraits& traits = TraitsOf(static_cast<Opcode>(f.opcode));
  const bool reliable = traits.service == Service::kRc || traits.service == Service::kXrc;
  const bool answers = rule.syndrome.has_value();
  // Only a sender of this daemon is known.
  if (f.bth == 0 || f.meta->source_qpn == 0 || f.transit->source == kOutside ||
      f.transit->destination == kGroup || (answers && (!reliable || traits.is_response()))) {
    return nullptr;
  }
  rte_mbuf* const forged = rte_pktmbuf_alloc(packet->pool);
  if (forged == nullptr) return nullptr;
  constexpr uint32_t kCnpReserved = 16;  // RoCEv2 Annex A17 §17.9.2
  const uint32_t behind_bth = answers ? Aeth::kBytes : kCnpReserved;
  const auto size = static_cast<uint16_t>(f.bth + Bth::kBytes + behind_bth + kIcrcBytes);
  std::byte* const to = rte_pktmbuf_mtod(forged, std::byte*);
  const std::byte* const from = FrameOf(packet);
  std::memset(to, 0, size);
  std::memcpy(to, from, f.bth);
  forged->data_len = size;
  forged->pkt_len = size;
  // Back where it came from.
  std::memcpy(to, from + 6, 6);
  std::memcpy(to + 6, from, 6);
  std::byte* const ip = to + f.l3;
  const bool is_ipv6 = LoadBe16(ip - 2) == kEtherTypeIpv6;
  const uint32_t addresses = is_ipv6 ? 8 : 12;
  const uint32_t address_bytes = is_ipv6 ? 16 : 4;
  std::memcpy(ip + addresses, from + f.l3 + addresses + address_bytes, address_bytes);
  std::memcpy(ip + addresses + address_bytes, from + f.l3 + addresses, address_bytes);
  const auto udp_bytes = static_cast<uint16_t>(size - (f.bth - UdpHeader::kBytes));
  if (is_ipv6) {
    StoreBe16(ip + 4, udp_bytes);
  } else {
    StoreBe16(ip + 2, static_cast<uint16_t>(size - f.l3));
    StoreBe16(ip + 10, Ipv4HeaderChecksum(ip));
  }
  std::byte* const udp = to + f.bth - UdpHeader::kBytes;
  StoreBe16(udp + 4, udp_bytes);
  StoreBe16(udp + 6, 0);
  std::byte* const bth = to + f.bth;
  constexpr uint8_t kCnp = 0x81;
  constexpr uint8_t kServiceBits = 0xe0;
  bth[0] = std::byte{answers ? static_cast<uint8_t>((f.opcode & kServiceBits) |
                                                    static_cast<uint8_t>(Opcode::kRcAcknowledge))
                             : kCnp};
  bth[1] = from[f.bth + 1] & std::byte{0x40};                           // MigReq
  std::memcpy(bth + 2, from + f.bth + 2, 2);                            // P_Key
  StoreBe32(bth + 4, f.meta->source_qpn | (answers ? 0 : 0x40000000));  // CNP: BECN
  StoreBe32(bth + 8, answers ? f.psn : 0);
  if (answers) {
    const uint32_t syndrome = *rule.syndrome | rule.rnr_timer.value_or(*rule.syndrome == 0x20);
    StoreBe32(bth + Bth::kBytes, syndrome << 24);
  }
  MetaOf(forged) = PacketMeta();
  MetaOf(forged).source_qpn = f.dest_qpn;
  MetaOf(forged).psn_offset = f.meta->psn_offset;
  EnsureIcrc(forged);
  PacketTransit& transit = TransitOf(forged);
  transit = PacketTransit();
  transit.flow_qpn = f.meta->source_qpn;
  transit.source = f.transit->destination;
  transit.destination = f.transit->source;
  transit.direction = Direction::kRx;
  return forged;
}

// corrupt, truncate and set, of a packet that may be written to. False: it has nothing to alter.
bool FaultStage::Alter(ActiveRule* active, rte_mbuf* packet, const Facts& facts) {
  switch (active->rule.action) {
    case FaultAction::kTruncate:
      return Truncate(packet, facts.bth, *active->rule.bytes);
    case FaultAction::kSet:
      return SetFields(packet, facts.l3, active->rule);
    default:
      if (active->rule.at) return FlipBits(packet, facts.bth, active->rule);
      FlipBit(packet, facts.bth, NextRandom(&active->generator));
      SetTrust(packet, active->rule.right_icrc.value_or(false));
      return true;
  }
}

FaultStage::Verdict FaultStage::Apply(rte_mbuf* packet, Time now, PacketQueue* out) {
  Facts facts(packet, now);
  TransitOf(packet).flow_qpn = facts.dest_qpn;
  if (counting_rules_ > 0 && facts.bth != 0) facts.transmission = CountTransmission(facts);
  if (message_rules_ > 0 && facts.bth != 0) CountMessage(&facts);
  Verdict verdict = Verdict::kGoesOn;
  ActiveRule* holder = nullptr;
  PacketQueue copies;
  for (ActiveRule& active : rules_) {
    if (!active.added) active.added = now;
    if (active.rule.is_down_like()) {
      const bool hit = ApplyDown(&active, facts, now);
      if (!hit || active.rule.action == FaultAction::kStall) continue;
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
      case FaultAction::kTruncate:
      case FaultAction::kSet:
        hit = facts.bth != 0 && (changed = Writable(packet)) != nullptr;
        if (!hit) break;
        packet = changed;
        hit = Alter(&active, packet, facts);
        facts.Renew(packet);
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
      case FaultAction::kHold:
        hit = holder == nullptr;
        if (hit) holder = &active;
        break;
      case FaultAction::kRate:
        hit = holder == nullptr;
        if (!hit) break;
        if (held_ >= kMaxHeldPackets || active.held.size() >= kRateQueue) {
          verdict = Verdict::kDropped;
        } else {
          holder = &active;
        }
        break;
      case FaultAction::kForge:
        changed = Forge(active.rule, packet, facts);
        hit = changed != nullptr;
        if (hit) copies.Push(changed);
        break;
      case FaultAction::kSlowDma: {
        hit = facts.payload_bytes != 0 && active.HasPort(facts.port());
        if (!hit) break;
        Duration busy = active.rule.duration.value_or(Duration());
        if (active.rule.mbps) {
          busy += Duration::Nanoseconds(
              static_cast<int64_t>(uint64_t{facts.payload_bytes} * 8000 / *active.rule.mbps));
        }
        active.link_free = std::max(active.link_free, now) + busy;
        break;
      }
      case FaultAction::kDown:
      case FaultAction::kStall:
        break;
    }
    if (hit) Hit(&active, facts);
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
  latest_ = now;
  out->Append(&released_);
  for (ActiveRule& active : rules_) {
    if (!active.added) active.added = now;
    if (active.rule.is_down_like()) UpdateDown(&active, now);
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

// When a rule `down` takes the link down or lets it up again, once it is due: without packets
// nobody else would see it.
Time FaultStage::NextChange(const ActiveRule& active, Time now) {
  const FaultRule& rule = active.rule;
  if (rule.has_trigger()) return active.is_down ? active.up_again : Time::Never();
  const Time start = *active.added + rule.after;
  if (rule.period) {
    // The next edge behind the last one that was seen.
    const Time over = rule.until ? *active.added + *rule.until : Time::Never();
    if (now < start) return start;
    if (now >= over && !active.is_down) return Time::Never();
    const int64_t period = rule.period->ns();
    const int64_t phase = (now - start).ns() % period;
    const int64_t edge = active.is_down ? rule.duration->ns() : period;
    return std::min(over, now + Duration::Nanoseconds(std::max<int64_t>(edge - phase, 0)));
  }
  Time end = Time::Never();
  if (rule.duration) end = start + *rule.duration;
  if (rule.until) end = std::min(end, *active.added + *rule.until);
  if (active.is_down) return end;
  return active.was_down || active.exhausted() ? Time::Never() : start;
}

Time FaultStage::next_deadline() const {
  if (!released_.empty()) return Time::Zero();
  Time deadline = Time::Never();
  for (const ActiveRule& active : rules_) {
    if (!active.added && active.rule.has_times()) return Time::Zero();
    if (active.added && active.rule.is_down_like()) {
      deadline = std::min(deadline, NextChange(active, latest_));
    }
    if (active.rule.action == FaultAction::kSlowDma && active.link_free > latest_) {
      deadline = std::min(deadline, active.link_free);
    }
    if (!active.held.empty()) {
      deadline = std::min(deadline, TransitOf(active.held.front()).release);
    }
  }
  return deadline;
}

bool FaultStage::link_up(PortId port) const {
  return std::none_of(rules_.begin(), rules_.end(), [port](const ActiveRule& active) {
    return active.is_down && active.rule.action == FaultAction::kDown && active.HasPort(port);
  });
}

bool FaultStage::stalled(PortId port, Time now) const {
  return std::ranges::any_of(rules_, [&](const ActiveRule& active) {
    if (!active.HasPort(port)) return false;
    if (active.rule.action == FaultAction::kStall) return active.is_down;
    return active.rule.action == FaultAction::kSlowDma && active.link_free > now;
  });
}

}  // namespace verbena::nic
