// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/trace/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "transport/wire/aeth.h"

namespace verbena::nic {
namespace {

using transport::Aeth;
using transport::AethKind;
using transport::NakCode;

constexpr size_t kEventsShown = 16;

bool Is(const Json& event, const char* what) { return TextField(event, "event") == what; }
uint32_t Number(const Json& event, const char* key) {
  return static_cast<uint32_t>(IntegerField(event, key));
}
bool Flag(const Json& event, const char* key) {
  const auto field = event.find(key);
  return field != event.end() && field->is_boolean() && field->get<bool>();
}
bool HasSyndrome(const Json& event) { return event.contains("syndrome"); }
Aeth SyndromeOf(const Json& event) {
  return {.syndrome = static_cast<uint8_t>(IntegerField(event, "syndrome")), .msn = {}};
}
bool IsNak(const Json& event) { return HasSyndrome(event) && SyndromeOf(event).is_nak(); }

std::string SyndromeText(const Aeth& aeth) {
  switch (aeth.kind()) {
    case AethKind::kAck:
      return "ACK";
    case AethKind::kRnrNak:
      return fmt::format("RNR NAK, wait {} us", transport::RnrTimerDelay(aeth.code()).us());
    case AethKind::kReserved:
      return "reserved syndrome";
    case AethKind::kNak:
      break;
  }
  switch (aeth.nak_code()) {
    case NakCode::kPsnSequenceError:
      return "NAK, PSN sequence error";
    case NakCode::kInvalidRequest:
      return "NAK, invalid request";
    case NakCode::kRemoteAccessError:
      return "NAK, remote access error";
    case NakCode::kRemoteOperationalError:
      return "NAK, remote operational error";
    default:
      return fmt::format("NAK, code {}", aeth.code());
  }
}

std::string Times(size_t count) { return count == 1 ? "once" : fmt::format("{} times", count); }
std::string Packets(size_t count) {
  return fmt::format("{} packet{}", count, count == 1 ? "" : "s");
}

std::string RefusalText(const std::string& reason) {
  if (reason == "unknown_qp") {
    return "no QP has that number; it was destroyed, or its process has ended";
  }
  if (reason == "qp_not_ready") return "the QP is not in RTR or RTS (it may be in ERR)";
  if (reason == "wrong_source") return "the QP is connected to another address";
  if (reason == "wrong_transport") return "the QP is of another type";
  if (reason == "pkey_mismatch") return "the P_Key is not its own";
  if (reason == "qkey_mismatch") return "the Q_Key is not its own";
  if (reason == "bad_icrc") return "the ICRC was wrong: damaged on the way";
  return reason;
}

std::string RuleText(const Json& rules, uint32_t id) {
  for (const Json& rule : rules) {
    if (IntegerField(rule, "id") == id) {
      return fmt::format("fault rule {} ('{}')", id, TextField(rule, "rule"));
    }
  }
  return fmt::format("fault rule {} (removed since)", id);
}

// What a rule of the device does when it hits `whom`, a QP (empty: none in particular).
std::string DeviceHitText(const std::string& action, const std::string& whom) {
  const std::string of = whom.empty() ? whom : " of " + whom;
  if (action == "complete") return "changed a completion" + of;
  if (action == "lose_completion") return "took a completion away" + of;
  if (action == "duplicate_completion") return "doubled a completion" + of;
  if (action == "delay_completion") return "delayed a completion" + of;
  if (action == "cq_overrun") return "overran the CQ" + of;
  if (action == "qp_error") return fmt::format("sent {} to ERR", whom.empty() ? "a QP" : whom);
  if (action == "event") return "reported an event" + of;
  if (action == "fail") return "made a call fail" + of;
  if (action == "cm_error") return "ended a step of the connection manager";
  if (action == "remove") return "pulled the device out";
  if (action == "gid_change") return "changed the GID table";
  if (action == "addr_change") return "reported a change of the address";
  return action + of;
}

// Once for each rule, QP and device; whom(qpn): the QP, for a reader.
template <typename Whom>
void AddDeviceHits(const std::vector<const Json*>& events, const Json& rules, Whom whom,
                   Explanation* out) {
  std::map<std::string, size_t> counts;
  for (const Json* event : events) {
    if (!Is(*event, "device_fault")) continue;
    const uint32_t qpn = Number(*event, "qpn");
    const std::string device = TextField(*event, "device");
    ++counts[fmt::format("{} {}{}", RuleText(rules, Number(*event, "rule")),
                         DeviceHitText(TextField(*event, "action", "?"),
                                       qpn == 0 ? std::string() : std::string(whom(qpn))),
                         device.empty() ? "" : " (" + device + ")")];
  }
  for (const auto& [text, count] : counts) {
    out->because.push_back(count == 1 ? text : fmt::format("{}, {}", text, Times(count)));
  }
}

// The story of one failure: events of one life of a QP, of its peer, and what
// happened to packets between them, up to the failure.
class Story {
 public:
  Story(const Json& events, const Json& rules, uint32_t qpn, size_t end)
      : rules_(rules), qpn_(qpn) {
    // From the last RESET on: an earlier connection does not matter.
    size_t begin = 0;
    for (size_t i = 0; i < end; ++i) {
      const Json& event = events[i];
      if (Number(event, "qpn") != qpn) continue;
      if (Is(event, "state") && TextField(event, "to") == "RTR") {
        begin = i;
        whole_ = true;
      }
      if (Is(event, "sent") && Number(event, "peer_qpn") != 0) peer_ = Number(event, "peer_qpn");
    }
    for (size_t i = begin; i < end; ++i) {
      const Json& event = events[i];
      if (Concerns(event)) events_.push_back(&event);
    }
  }

  const std::vector<const Json*>& events() const { return events_; }

  void AddHits(Explanation* out) const {
    struct Hits {
      size_t requests = 0, answers = 0;
    };
    std::map<uint32_t, Hits> by_rule;
    for (const Json* event : events_) {
      if (!Is(*event, "fault")) continue;
      Hits& hits = by_rule[Number(*event, "rule")];
      ++(Number(*event, "qpn") == qpn_ ? hits.requests : hits.answers);
    }
    for (const auto& [id, hits] : by_rule) {
      if (hits.requests != 0) {
        out->because.push_back(fmt::format("{} hit {} that this QP sent", RuleText(rules_, id),
                                           Packets(hits.requests)));
      }
      if (hits.answers != 0) {
        out->because.push_back(
            fmt::format("{} hit {} of the peer", RuleText(rules_, id), Packets(hits.answers)));
      }
    }
  }

  // A rule of the device made the completion what it is: nothing else explains it.
  bool TellDeviceFault(Explanation* out) const {
    const Json* last = nullptr;
    for (const Json* event : events_) {
      if (Is(*event, "device_fault") && Number(*event, "qpn") == qpn_) last = event;
    }
    if (last == nullptr || TextField(*last, "action") != "complete") return false;
    out->what = "the device was made to say so; the packets tell nothing of it";
    return true;
  }

  void AddDeviceRules(Explanation* out) const {
    AddDeviceHits(
        events_, rules_, [this](uint32_t qpn) { return qpn == qpn_ ? "this QP" : "the peer's QP"; },
        out);
  }

  void AddRefusals(Explanation* out) const {
    std::map<std::string, std::pair<size_t, size_t>> by_reason;  // at the peer, here
    for (const Json* event : events_) {
      if (!Is(*event, "refused")) continue;
      auto& [there, here] = by_reason[TextField(*event, "reason", "?")];
      ++(Number(*event, "qpn") == qpn_ ? here : there);
    }
    for (const auto& [reason, counts] : by_reason) {
      if (counts.first != 0) {
        out->because.push_back(fmt::format("the peer's NIC refused {}: {}", Packets(counts.first),
                                           RefusalText(reason)));
      }
      if (counts.second != 0) {
        out->because.push_back(fmt::format("this NIC refused {} for this QP: {}",
                                           Packets(counts.second), RefusalText(reason)));
      }
    }
  }

  void TellRetries(Explanation* out) const {
    // What the last round began with.
    const Json* first = nullptr;
    bool new_round = true;
    for (const Json* event : events_) {
      if (Number(*event, "qpn") != qpn_) continue;
      if (Is(*event, "timer")) new_round = true;
      if (!Is(*event, "sent") || HasSyndrome(*event)) continue;
      if (new_round) first = event;
      new_round = false;
    }
    if (first == nullptr) {
      out->what = "the request was repeated as often as retry_cnt allows, without an answer";
      return;
    }
    const uint32_t psn = Number(*first, "psn");
    size_t sent = 0, arrived = 0, answers = 0, came = 0;
    for (const Json* event : events_) {
      const uint32_t qpn = Number(*event, "qpn");
      const bool same = Number(*event, "psn") == psn && !HasSyndrome(*event);
      if (qpn == qpn_ && Is(*event, "sent") && same) ++sent;
      if (qpn == peer_ && Is(*event, "received") && same) ++arrived;
      if (qpn == peer_ && Is(*event, "sent") && HasSyndrome(*event)) ++answers;
      if (qpn == qpn_ && Is(*event, "received") && HasSyndrome(*event)) ++came;
    }
    out->what = fmt::format(
        "{} with PSN {} was sent {}{} and never acknowledged{}",
        TextField(*first, "opcode", "the request"), psn, whole_ ? "" : "at least ", Times(sent),
        whole_ ? "" : " (the trace does not reach back to the connection's beginning)");
    const bool by_device = !out->because.empty();
    AddHits(out);
    AddRefusals(out);
    if (arrived != 0) {
      out->because.push_back(
          fmt::format("the peer took it {} and sent {} with an ACK or NAK, of "
                      "which {} arrived here",
                      Times(arrived), Packets(answers), came));
    } else if (!by_device && out->because.empty()) {
      out->because.push_back(
          "none of its packets was seen at the peer: it is on another machine, or the way there "
          "is broken");
    }
    out->look_at.push_back("timeout and retry_cnt of ibv_modify_qp: the time until this error");
    out->look_at.push_back("verbena list qp: does the peer's QP exist, and in which state");
  }

  void TellNak(Explanation* out, const char* meaning) const {
    const Json* nak = nullptr;
    for (const Json* event : events_) {
      if (Number(*event, "qpn") == qpn_ && Is(*event, "received") && IsNak(*event)) nak = event;
    }
    out->what = fmt::format("the peer answered: {}", meaning);
    if (nak != nullptr) {
      out->what = fmt::format("PSN {} was answered with {}", Number(*nak, "psn"),
                              SyndromeText(SyndromeOf(*nak)));
      const bool was_sent = std::ranges::any_of(events_, [&](const Json* event) {
        return Number(*event, "qpn") == peer_ && Is(*event, "sent") && IsNak(*event) &&
               Number(*event, "psn") == Number(*nak, "psn");
      });
      const bool peer_is_here = std::ranges::any_of(
          events_, [&](const Json* event) { return Number(*event, "qpn") == peer_; });
      if (!was_sent && peer_is_here) {
        out->because.push_back("the peer did not send that NAK: it was forged on the way");
      }
    }
    AddHits(out);
    out->because.push_back(meaning);
  }

  void TellRnr(Explanation* out) const {
    size_t naks = 0;
    for (const Json* event : events_) {
      naks += Number(*event, "qpn") == qpn_ && Is(*event, "received") && HasSyndrome(*event) &&
              SyndromeOf(*event).is_rnr_nak();
    }
    out->what = fmt::format("the peer had no receive posted: RNR NAK {}", Times(naks));
    AddHits(out);
    out->because.push_back(
        "SEND and WRITE with immediate need an ibv_post_recv (or SRQ) at the peer");
    out->look_at.push_back("rnr_retry (7: for ever) and the peer's min_rnr_timer");
    out->look_at.push_back("verbena list qp: rq_posted and rq_taken of the peer's QP");
  }

 private:
  bool Concerns(const Json& event) const {
    const uint32_t qpn = Number(event, "qpn");
    if (Is(event, "fault")) {
      const uint32_t to = Number(event, "peer_qpn");
      return (qpn == qpn_ && (to == peer_ || peer_ == 0)) ||
             (to == qpn_ && (qpn == peer_ || qpn == 0));
    }
    if (Is(event, "device_fault") && qpn == 0) return true;  // of a whole device, or a call
    return qpn == qpn_ || (peer_ != 0 && qpn == peer_);
  }

  const Json& rules_;
  uint32_t qpn_;
  uint32_t peer_ = 0;
  bool whole_ = false;  // the trace reaches back to the connection's beginning
  std::vector<const Json*> events_;
};

// Says nothing to a reader of a failure: what is flushed follows from it, and
// doorbells are in front of all that is posted.
bool IsNoise(const Json& event) {
  return Is(event, "doorbell") ||
         (Is(event, "completion") && TextField(event, "status") == "WR_FLUSH_ERR");
}

bool IsFailure(const Json& event) {
  if (!Is(event, "completion")) return false;
  const std::string status = TextField(event, "status");
  return status != "SUCCESS" && status != "WR_FLUSH_ERR";
}
bool IsDeath(const Json& event) { return Is(event, "state") && TextField(event, "to") == "ERR"; }

// The event to explain, or events.size(): a failed completion, else the way to ERR.
size_t FindFailure(const Json& events, std::optional<uint32_t> qpn) {
  for (const auto wanted : {&IsFailure, &IsDeath}) {
    for (size_t i = events.size(); i-- > 0;) {
      if (wanted(events[i]) && (!qpn || Number(events[i], "qpn") == *qpn)) return i;
    }
  }
  return events.size();
}

void TellDeath(const Json& events, const Json& rules, size_t at, Explanation* out) {
  out->status = "WR_FLUSH_ERR";
  out->what = "the QP was moved to ERR and its work requests were flushed";
  // The end of a CQ by a rule comes after it in time: the QP follows.
  std::vector<const Json*> hits;
  for (size_t i = 0; i < events.size(); ++i) {
    const bool mine = Number(events[i], "qpn") == out->qpn || Number(events[i], "qpn") == 0;
    if (mine && Is(events[i], "device_fault")) hits.push_back(&events[i]);
  }
  AddDeviceHits(
      hits, rules, [](uint32_t) { return "this QP"; }, out);
  for (size_t i = at; i < events.size(); ++i) {
    if (Number(events[i], "qpn") != out->qpn || !Is(events[i], "async_event")) continue;
    const std::string type = TextField(events[i], "type");
    const bool by_rule = i > 0 && (Is(events[i - 1], "device_fault") ||
                                   (i + 1 < events.size() && Is(events[i + 1], "device_fault")));
    if (type == "QP_FATAL" && by_rule) {
      out->because.push_back("event QP_FATAL: a fault rule wanted it");
    } else if (type == "QP_FATAL") {
      out->because.push_back("event QP_FATAL: a CQ of the QP was overrun, or an SRQ failed");
    } else if (type == "QP_ACCESS_ERR" || type == "QP_REQ_ERR") {
      out->because.push_back(fmt::format(
          "event {}: the peer's request was refused with a NAK (keys, bounds, rights, length)",
          type));
    }
  }
  if (out->because.empty()) {
    out->because.push_back("no error came before: ibv_modify_qp or rdma_disconnect did it");
  }
}

void TellStatus(const Story& story, Explanation* out) {
  const std::string& status = out->status;
  story.AddDeviceRules(out);
  if (story.TellDeviceFault(out)) return;
  if (status == "RETRY_EXC_ERR") return story.TellRetries(out);
  if (status == "RNR_RETRY_EXC_ERR") return story.TellRnr(out);
  if (status == "REM_ACCESS_ERR") {
    story.TellNak(out, "remote access error: R_Key, address range or rights of the peer's region");
    out->look_at.push_back(
        "verbena list mr: rkey, address, length and access of the peer's regions");
    return;
  }
  if (status == "REM_INV_REQ_ERR") {
    story.TellNak(out,
                  "invalid request: longer than the receive, or an operation that the QP does not "
                  "allow (qp_access_flags, max_dest_rd_atomic)");
    return;
  }
  if (status == "REM_OP_ERR") {
    story.TellNak(out, "remote operational error: the peer's memory or receive could not be used");
    return;
  }
  story.AddHits(out);
  if (status == "LOC_PROT_ERR") {
    out->what = "a buffer of the work request may not be used";
    out->because.push_back("L_Key, address range, rights or PD of an SGE, or memory that is gone");
    out->look_at.push_back("verbena list mr: lkey, address and length of this process's regions");
  } else if (status == "LOC_LEN_ERR") {
    out->what = "the message is longer than the receive's buffers";
    out->because.push_back("the sum of the SGE lengths of the receive is too small");
  } else if (status == "LOC_QP_OP_ERR") {
    out->what = "the work request itself makes no sense for this QP";
  } else {
    out->what = "the work request failed";
  }
}

bool Exists(const Json& rules, uint32_t id) {
  return std::any_of(rules.begin(), rules.end(),
                     [id](const Json& rule) { return Number(rule, "id") == id; });
}

// Hits of rules on packets that `qpn` has no part in, or (0) on all. Of rules that
// are gone none before `from_ns`: they have nothing to do with it.
void AddHitsElsewhere(const Json& events, const Json& rules, uint32_t qpn, int64_t from_ns,
                      Explanation* out) {
  std::map<uint32_t, std::map<std::string, size_t>> by_rule;
  for (const Json& event : events) {
    if (!Is(event, "fault")) continue;
    if (IntegerField(event, "time_ns") < from_ns && !Exists(rules, Number(event, "rule"))) continue;
    if (qpn != 0 && (Number(event, "qpn") == qpn || Number(event, "peer_qpn") == qpn)) continue;
    const bool is_mad = Number(event, "peer_qpn") == 1;
    ++by_rule[Number(event, "rule")][is_mad ? std::string("messages of the connection manager")
                                            : TextField(event, "opcode", "?")];
  }
  for (const auto& [id, opcodes] : by_rule) {
    std::string what;
    for (const auto& [opcode, count] : opcodes) {
      what += fmt::format("{}{} {}", what.empty() ? "" : ", ", count, opcode);
    }
    out->because.push_back(fmt::format("{} hit {}{}", RuleText(rules, id),
                                       qpn != 0 ? "packets of other QPs: " : "", what));
  }
}

// Nothing has failed: what was repeated, refused or had to wait.
void TellTrouble(const Json& events, const Json& rules, std::optional<uint32_t> qpn,
                 Explanation* out) {
  Json mine = Json::array();
  for (const Json& event : events) {
    if (!qpn || Number(event, "qpn") == *qpn ||
        (Is(event, "fault") && Number(event, "peer_qpn") == *qpn) ||
        (Is(event, "device_fault") && Number(event, "qpn") == 0)) {
      mine.push_back(event);
    }
  }
  std::vector<const Json*> hits;
  for (const Json& event : mine) hits.push_back(&event);
  AddDeviceHits(
      hits, rules, [](uint32_t number) { return fmt::format("QP {:#08x}", number); }, out);
  AddHitsElsewhere(mine, rules, 0, 0, out);
  struct Troubles {
    size_t again = 0, timers = 0, rnr = 0, naks = 0;
  };
  std::map<uint32_t, Troubles> by_qp;
  std::map<std::string, size_t> refused;
  for (const Json& event : mine) {
    const uint32_t number = Number(event, "qpn");
    if (Is(event, "sent") && Flag(event, "retransmission")) ++by_qp[number].again;
    if (Is(event, "timer")) ++by_qp[number].timers;
    if (Is(event, "refused")) ++refused[TextField(event, "reason", "?")];
    if (Is(event, "received") && HasSyndrome(event)) {
      by_qp[number].rnr += SyndromeOf(event).is_rnr_nak();
      by_qp[number].naks += SyndromeOf(event).is_nak();
    }
  }
  for (const auto& [reason, count] : refused) {
    out->because.push_back(fmt::format("{} refused: {}", Packets(count), RefusalText(reason)));
  }
  for (const auto& [number, troubles] : by_qp) {
    std::string text;
    const auto add = [&text](size_t count, const char* what) {
      if (count != 0) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", what, Times(count));
    };
    add(troubles.timers, "its timer ran out");
    add(troubles.naks, "a NAK came");
    add(troubles.rnr, "an RNR NAK came");
    if (troubles.again != 0) {
      text += fmt::format("{}it sent {} again", text.empty() ? "" : ", ", Packets(troubles.again));
    }
    if (!text.empty()) out->because.push_back(fmt::format("QP {:#08x}: {}", number, text));
  }
  out->what = out->because.empty()
                  ? "nothing has failed, as far as the trace goes back"
                  : "nothing has failed, as far as the trace goes back; but not all went smoothly";
}

}  // namespace

std::string EventText(const Json& event) {
  const std::string what = TextField(event, "event", "?");
  std::string packet = fmt::format("{} psn {}, {} bytes", TextField(event, "opcode", "?"),
                                   Number(event, "psn"), Number(event, "bytes"));
  if (HasSyndrome(event)) packet += ", " + SyndromeText(SyndromeOf(event));
  if (Flag(event, "retransmission")) packet += ", again";
  if (what == "sent") return fmt::format("-> {:#08x}  {}", Number(event, "peer_qpn"), packet);
  if (what == "received") return "<- " + packet;
  if (what == "refused") return fmt::format("x- {}: {}", packet, TextField(event, "reason", "?"));
  if (what == "fault") {
    return fmt::format("!! rule {} ({}) hits {}", Number(event, "rule"), TextField(event, "side"),
                       packet);
  }
  if (what == "device_fault") {
    return fmt::format("!! rule {}: {}", Number(event, "rule"), TextField(event, "action", "?"));
  }
  if (what == "posted") {
    return fmt::format("posted {}, wr_id {}, {} bytes", TextField(event, "opcode", "?"),
                       TextField(event, "wr_id", "?"), Number(event, "bytes"));
  }
  if (what == "completion") {
    return fmt::format("completed {} {}, wr_id {}", TextField(event, "opcode", "?"),
                       TextField(event, "status", "?"), TextField(event, "wr_id", "?"));
  }
  if (what == "state") {
    return fmt::format("{} -> {}", TextField(event, "from", "?"), TextField(event, "to", "?"));
  }
  if (what == "async_event") return "event " + TextField(event, "type", "?");
  if (what == "timer") return "timer ran out";
  if (what == "doorbell") return "doorbell";
  if (what == "dma") {
    return fmt::format("copied {} bytes {}", Number(event, "bytes"),
                       TextField(event, "to") == "memory" ? "into applications" : "into packets");
  }
  if (what == "command") {
    const uint32_t error = Number(event, "errno");
    return fmt::format("command {}{}", TextField(event, "command", "?"),
                       error == 0 ? "" : fmt::format(": errno {}", error));
  }
  return what;
}

std::string EventLine(const Json& event, int64_t start_ns) {
  const double seconds = static_cast<double>(IntegerField(event, "time_ns") - start_ns) / 1e9;
  return fmt::format("{:12.6f}  {:<10} {:#08x}  {}", seconds, TextField(event, "device", "?"),
                     Number(event, "qpn"), EventText(event));
}

Explanation Explain(const Json& events, const Json& rules, std::optional<uint32_t> qpn) {
  Explanation out;
  out.qpn = qpn.value_or(0);
  const size_t at = FindFailure(events, qpn);
  if (at == events.size()) {
    TellTrouble(events, rules, qpn, &out);
    return out;
  }
  out.qpn = Number(events[at], "qpn");
  const Story story(events, rules, out.qpn, at + 1);
  if (IsFailure(events[at])) {
    out.status = TextField(events[at], "status");
    TellStatus(story, &out);
  } else {
    TellDeath(events, rules, at, &out);
    story.AddHits(&out);
  }
  std::vector<const Json*> all = story.events();
  if (!all.empty()) {
    AddHitsElsewhere(events, rules, out.qpn, IntegerField(*all.front(), "time_ns"), &out);
  }
  std::erase_if(all, [](const Json* event) { return IsNoise(*event); });
  const size_t shown = std::min(all.size(), kEventsShown);
  for (size_t i = all.size() - shown; i < all.size(); ++i) out.events.push_back(*all[i]);
  return out;
}

std::string ExplanationText(const Explanation& found, std::optional<uint32_t> qpn) {
  std::string text;
  if (found.status.empty()) {
    text = qpn ? fmt::format("QP {:#08x}: {}\n", *qpn, found.what) : found.what + "\n";
  } else {
    text = fmt::format("QP {:#08x} ({}): {}\n{}\n", found.qpn, found.qpn, found.status, found.what);
  }
  if (!found.because.empty()) text += found.status.empty() ? "\nWhat happened\n" : "\nBecause\n";
  for (const std::string& reason : found.because) text += fmt::format("  - {}\n", reason);
  if (!found.look_at.empty()) text += "\nLook at\n";
  for (const std::string& hint : found.look_at) text += fmt::format("  - {}\n", hint);
  if (!found.events.empty()) text += "\nWhat led to it\n";
  for (const Json& event : found.events) {
    text += EventLine(event, IntegerField(found.events.front(), "time_ns")) + "\n";
  }
  return text;
}

}  // namespace verbena::nic
