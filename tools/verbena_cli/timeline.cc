// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>

#include "tools/verbena_cli/explain.h"

namespace verbena::tools {
namespace {

constexpr uint32_t kMostPsns = 1u << 23;

bool Is(const Json& event, const char* what) { return TextField(event, "event") == what; }
uint32_t Number(const Json& event, const char* key) {
  return static_cast<uint32_t>(IntegerField(event, key));
}
bool Flag(const Json& event, const char* key) {
  const auto field = event.find(key);
  return field != event.end() && field->is_boolean() && field->get<bool>();
}
bool HasSyndrome(const Json& event) { return event.contains("syndrome"); }

bool IsResponse(const Json& event) {
  const std::string opcode = TextField(event, "opcode");
  return HasSyndrome(event) || opcode.find("READ_RESPONSE") != std::string::npos;
}
// Local work requests send nothing.
bool SendsSomething(const std::string& opcode) {
  return opcode != "LOCAL_INV" && opcode != "BIND_MW";
}

bool Begins(const std::string& opcode) {
  return opcode.ends_with("_FIRST") ||
         !(opcode.ends_with("_MIDDLE") || opcode.find("_LAST") != std::string::npos);
}
bool Ends(const std::string& opcode) {
  return !opcode.ends_with("_FIRST") && !opcode.ends_with("_MIDDLE");
}

bool InRange(uint32_t psn, uint32_t first, uint32_t last) {
  const uint32_t length = (last - first) & 0xffffff;
  return length < kMostPsns && ((psn - first) & 0xffffff) <= length;
}

// The state of one QP while its events go by.
struct Sender {
  std::deque<size_t> waiting;      // fetched, nothing sent yet: indices of lives
  std::optional<size_t> sending;   // a message has begun
  std::deque<size_t> outstanding;  // not completed
};

class Builder {
 public:
  Builder(const Json& events, std::optional<uint32_t> qpn) : events_(events), qpn_(qpn) {}

  std::vector<WorkRequestLife> Build() {
    for (size_t i = 0; i < events_.size(); ++i) Take(i);
    for (size_t i = 0; i < events_.size(); ++i) Assign(i);
    for (WorkRequestLife& life : lives_) {
      std::ranges::sort(life.events);
      const auto repeated = std::ranges::unique(life.events);
      life.events.erase(repeated.begin(), repeated.end());
    }
    return std::move(lives_);
  }

 private:
  void Take(size_t index) {
    const Json& event = events_[index];
    const uint32_t qpn = Number(event, "qpn");
    if (qpn_ && qpn != *qpn_) return;
    Sender& sender = senders_[qpn];
    if (Is(event, "state")) {
      const std::string to = TextField(event, "to");
      if (to == "RESET" || to == "INIT") sender = {};
    } else if (Is(event, "posted")) {
      WorkRequestLife life;
      life.qpn = qpn;
      life.device = TextField(event, "device");
      life.wr_id = TextField(event, "wr_id");
      life.opcode = TextField(event, "opcode");
      life.bytes = Number(event, "bytes");
      life.posted_ns = IntegerField(event, "time_ns");
      life.events.push_back(index);
      lives_.push_back(std::move(life));
      if (SendsSomething(lives_.back().opcode)) sender.waiting.push_back(lives_.size() - 1);
      sender.outstanding.push_back(lives_.size() - 1);
    } else if (Is(event, "sent") && !IsResponse(event) && !Flag(event, "retransmission")) {
      TakeFirstTransmission(index, &sender);
    } else if (Is(event, "completion") && TextField(event, "queue") == "send") {
      TakeCompletion(index, &sender);
    }
  }

  void TakeFirstTransmission(size_t index, Sender* sender) {
    const Json& event = events_[index];
    const std::string opcode = TextField(event, "opcode");
    const uint32_t psn = Number(event, "psn");
    if (Begins(opcode)) {
      if (sender->waiting.empty()) return;  // of what the ring no longer has
      sender->sending = sender->waiting.front();
      sender->waiting.pop_front();
      WorkRequestLife& life = lives_[*sender->sending];
      life.has_psn = true;
      life.first_psn = life.last_psn = psn;
      life.peer_qpn = Number(event, "peer_qpn");
    }
    if (!sender->sending) return;
    WorkRequestLife& life = lives_[*sender->sending];
    life.last_psn = psn;
    ranges_[life.qpn].push_back(*sender->sending);
    auto& list = ranges_[life.qpn];
    if (list.size() > 1 && list[list.size() - 2] == list.back()) list.pop_back();
    if (Ends(opcode)) sender->sending.reset();
  }

  void TakeCompletion(size_t index, Sender* sender) {
    const Json& event = events_[index];
    const std::string wr_id = TextField(event, "wr_id");
    const auto found = std::ranges::find_if(
        sender->outstanding, [&](size_t life) { return lives_[life].wr_id == wr_id; });
    if (found == sender->outstanding.end()) return;
    WorkRequestLife& life = lives_[*found];
    life.completed_ns = IntegerField(event, "time_ns");
    life.status = TextField(event, "status");
    life.events.push_back(index);
    // Those before were done without a completion of their own.
    sender->outstanding.erase(sender->outstanding.begin(), found + 1);
  }

  // Packets of the request and answers to it, here and at the peer.
  void Assign(size_t index) {
    const Json& event = events_[index];
    const bool sent = Is(event, "sent"), received = Is(event, "received");
    const bool refused = Is(event, "refused"), fault = Is(event, "fault");
    if (!sent && !received && !refused && !fault) {
      if (Is(event, "timer")) AssignTimer(index);
      return;
    }
    const uint32_t qpn = Number(event, "qpn"), peer = Number(event, "peer_qpn");
    const uint32_t psn = Number(event, "psn");
    const int64_t time = IntegerField(event, "time_ns");
    const std::string opcode = TextField(event, "opcode");
    const bool response = opcode.find("RESPONSE") != std::string::npos ||
                          opcode.find("ACKNOWLEDGE") != std::string::npos;
    const bool ack = HasSyndrome(event) && Number(event, "syndrome") >> 5 == 0 &&
                     opcode.find("ACKNOWLEDGE") != std::string::npos;
    // Whose request: the sender's, of a response the receiver's.
    for (auto& [requester, list] : ranges_) {
      const bool own = qpn == requester;
      const bool of_peer = !own;
      for (size_t i = 0; i < list.size(); ++i) {
        WorkRequestLife& life = lives_[list[i]];
        if (time < life.posted_ns) break;
        const WorkRequestLife* next = i + 1 < list.size() ? &lives_[list[i + 1]] : nullptr;
        const bool here =
            own && ((response && (received || refused)) || (!response && (sent || fault)));
        const bool there = of_peer && qpn == life.peer_qpn &&
                           ((response && (sent || fault)) || (!response && (received || refused)));
        if (!here && !there) continue;
        if ((sent || fault) && here && peer != life.peer_qpn && peer != 0) continue;
        if ((sent || fault) && there && peer != requester && peer != 0) continue;
        bool& acknowledged = here ? life.ack_received : life.ack_sent;
        if (!Covers(life, next, psn, opcode, response) &&
            (acknowledged || !ack || !AcknowledgesToo(life, psn, time))) {
          continue;
        }
        acknowledged = acknowledged || ack;
        if (life.completed_ns != 0 && time > life.completed_ns && !life.status.empty() &&
            !refused && psn != life.last_psn) {
          continue;
        }
        life.events.push_back(index);
        if (sent && here) {
          ++life.sent;
          life.again += Flag(event, "retransmission");
        }
      }
    }
  }

  // The ACK of a later message acknowledges this one as well: shown is the first that does.
  static bool AcknowledgesToo(const WorkRequestLife& life, uint32_t psn, int64_t time) {
    const uint32_t ahead = (psn - life.last_psn) & 0xffffff;
    return ahead < 0x800000 && (life.completed_ns == 0 || time <= life.completed_ns);
  }

  // `next`: the work request behind it, or null.
  static bool Covers(const WorkRequestLife& life, const WorkRequestLife* next, uint32_t psn,
                     const std::string& opcode, bool response) {
    if (life.opcode == "RDMA_READ") {
      // One request takes a PSN for each packet of its response, at least 256 bytes each.
      uint32_t packets = std::max(1U, (life.bytes + 255) / 256);
      if (next != nullptr && next->has_psn) {
        packets = std::min(packets, (next->first_psn - life.first_psn) & 0xffffff);
      }
      return packets != 0 &&
             InRange(psn, life.first_psn, (life.first_psn + packets - 1) & 0xffffff) &&
             (!response || opcode.find("READ") != std::string::npos || psn == life.first_psn);
    }
    return InRange(psn, life.first_psn, life.last_psn);
  }

  void AssignTimer(size_t index) {
    const Json& event = events_[index];
    const auto list = ranges_.find(Number(event, "qpn"));
    if (list == ranges_.end()) return;
    const int64_t time = IntegerField(event, "time_ns");
    for (const size_t number : list->second) {
      WorkRequestLife& life = lives_[number];
      if (life.posted_ns <= time && (life.completed_ns == 0 || time <= life.completed_ns)) {
        life.events.push_back(index);
        return;  // the oldest that is under way
      }
    }
  }

  const Json& events_;
  std::optional<uint32_t> qpn_;
  std::map<uint32_t, Sender> senders_;
  std::map<uint32_t, std::vector<size_t>> ranges_;  // QP -> lives with PSNs, in order
  std::vector<WorkRequestLife> lives_;
};

constexpr size_t kWidth = 46;  // between the two lines of the ladder

std::string Arrow(const std::string& label, bool to_right, bool lost) {
  std::string text = " " + label + " ";
  if (text.size() > kWidth - 6) text.resize(kWidth - 6);
  const size_t dashes = kWidth - text.size() - 1;
  std::string line = std::string(3, '-') + text + std::string(dashes - 3, '-');
  if (lost) {
    // It ends on the way.
    const std::string blank(6, ' ');
    return to_right ? "|" + line.substr(0, kWidth - 8) + "X" +
                          std::string(kWidth - (kWidth - 8) - 1, ' ') + "|"
                    : "|" + std::string(6, ' ') + "X" + line.substr(0, kWidth - 7) + "|";
  }
  return to_right ? "|" + line + ">|" : "|<" + line + "|";
}

std::string Note(const std::string& text, bool right) {
  std::string shown = text.substr(0, kWidth - 2);
  const std::string blank(kWidth - shown.size() - 1, ' ');
  return right ? "|" + blank + shown + " |" : "| " + shown + blank + "|";
}

std::string PacketLabel(const Json& event) {
  std::string opcode = TextField(event, "opcode", "?");
  if (opcode.starts_with("RC_") || opcode.starts_with("UC_") || opcode.starts_with("UD_")) {
    opcode = opcode.substr(3);
  }
  const std::string text = EventText(event);
  const size_t extra = text.find(HasSyndrome(event) ? " bytes, " : "\1");
  std::string label = fmt::format("{} psn {}", opcode, Number(event, "psn"));
  if (HasSyndrome(event) && extra != std::string::npos) {
    const std::string what = text.substr(extra + 8);
    label = opcode == "ACKNOWLEDGE" ? fmt::format("{} psn {}", what, Number(event, "psn"))
                                    : fmt::format("{}, {}", label, what);
  } else if (Flag(event, "retransmission")) {
    label += ", again";
  }
  return label;
}

}  // namespace

std::vector<WorkRequestLife> WorkRequests(const Json& events, std::optional<uint32_t> qpn) {
  return Builder(events, qpn).Build();
}

std::string Ladder(const Json& events, const WorkRequestLife& life) {
  std::string text = fmt::format("QP {:#08x} of {}, wr_id {}: {}, {} bytes", life.qpn, life.device,
                                 life.wr_id, life.opcode, life.bytes);
  if (life.has_psn) {
    text += life.first_psn == life.last_psn
                ? fmt::format(", PSN {}", life.first_psn)
                : fmt::format(", PSN {} to {}", life.first_psn, life.last_psn);
  }
  if (life.completed_ns != 0) {
    text += fmt::format("\n{} after {:.3f} us", life.status,
                        static_cast<double>(life.completed_ns - life.posted_ns) / 1e3);
  } else {
    text += "\nno completion in the trace";
  }
  if (life.again != 0) text += fmt::format("; {} of {} packets sent again", life.again, life.sent);
  text += fmt::format("\n\n{:>14}  {:<{}}{:>{}}\n", "us", fmt::format("{:#08x}", life.qpn),
                      kWidth / 2 + 1, fmt::format("{:#08x}", life.peer_qpn), kWidth / 2 + 1);
  for (const size_t index : life.events) {
    const Json& event = events[index];
    const bool here = Number(event, "qpn") == life.qpn;
    std::string line;
    if (Is(event, "sent")) {
      line = Arrow(PacketLabel(event), here, false);
    } else if (Is(event, "received")) {
      line = Note("arrives: " + PacketLabel(event), !here);
    } else if (Is(event, "refused")) {
      line = Note(fmt::format("refused ({}): {}", TextField(event, "reason"), PacketLabel(event)),
                  !here);
    } else if (Is(event, "fault")) {
      line = Arrow(fmt::format("rule {} hits {}", Number(event, "rule"), PacketLabel(event)), here,
                   true);
    } else {
      line = Note(EventText(event), false);
    }
    text += fmt::format("{:14.3f}  {}\n",
                        static_cast<double>(IntegerField(event, "time_ns") - life.posted_ns) / 1e3,
                        line);
  }
  return text;
}

Json LadderJson(const Json& events, const WorkRequestLife& life) {
  Json json = {{"qpn", life.qpn},
               {"peer_qpn", life.peer_qpn},
               {"device", life.device},
               {"wr_id", life.wr_id},
               {"opcode", life.opcode},
               {"bytes", life.bytes},
               {"posted_ns", life.posted_ns}};
  if (life.completed_ns != 0) {
    json["completed_ns"] = life.completed_ns;
    json["status"] = life.status;
  }
  if (life.has_psn) {
    json["first_psn"] = life.first_psn;
    json["last_psn"] = life.last_psn;
  }
  json["sent"] = life.sent;
  json["retransmissions"] = life.again;
  json["events"] = Json::array();
  for (const size_t index : life.events) json["events"].push_back(events[index]);
  return json;
}

}  // namespace verbena::tools
