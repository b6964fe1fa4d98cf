// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <deque>
#include <map>
#include <set>
#include <tuple>

#include "tools/verbena_cli/explain.h"
#include "tools/verbena_cli/timeline.h"

namespace verbena::tools {
namespace {

// Wide enough to be seen and to bind a flow to.
constexpr double kPacketUs = 0.1;
constexpr uint32_t kPortTrack = 0;  // no QP has this number

uint32_t Number(const Json& event, const char* key) {
  return static_cast<uint32_t>(IntegerField(event, key));
}

class Exporter {
 public:
  explicit Exporter(const Json& events) : events_(events) {}

  Json Export() {
    if (!events_.empty()) start_ns_ = IntegerField(events_[0], "time_ns");
    AddWorkRequests();
    for (const Json& event : events_) Add(event);
    AddNames();
    return {{"displayTimeUnit", "ns"},
            {"otherData", {{"source", "verbena trace --perfetto"}}},
            {"traceEvents", std::move(out_)}};
  }

 private:
  double Us(int64_t time_ns) const { return static_cast<double>(time_ns - start_ns_) / 1e3; }

  int Process(const std::string& device) {
    return processes_.try_emplace(device, static_cast<int>(processes_.size()) + 1).first->second;
  }

  Json Base(const char* phase, std::string name, const char* category, const Json& event,
            uint32_t track) {
    const std::string device = TextField(event, "device", "?");
    tracks_.emplace(device, track);
    return {{"ph", phase},
            {"name", std::move(name)},
            {"cat", category},
            {"ts", Us(IntegerField(event, "time_ns"))},
            {"pid", Process(device)},
            {"tid", track}};
  }

  void AddWorkRequests() {
    size_t id = 0;
    for (const WorkRequestLife& life : WorkRequests(events_, {})) {
      const Json& posted = events_[life.events.front()];
      Json begin = Base("b", fmt::format("{} {}", life.opcode, life.wr_id), "work request", posted,
                        life.qpn);
      begin["id"] = ++id;
      begin["args"] = {{"wr_id", life.wr_id},
                       {"bytes", life.bytes},
                       {"status", life.status},
                       {"packets", life.sent},
                       {"sent again", life.again}};
      Json end = begin;
      end["ph"] = "e";
      // Without a completion it ends with the last that is known of it.
      const int64_t last = life.completed_ns != 0
                               ? life.completed_ns
                               : IntegerField(events_[life.events.back()], "time_ns");
      end["ts"] = Us(last);
      end.erase("args");
      out_.push_back(std::move(begin));
      out_.push_back(std::move(end));
    }
  }

  void Add(const Json& event) {
    const std::string what = TextField(event, "event");
    const uint32_t qpn = Number(event, "qpn");
    if (what == "sent" || what == "received") return AddPacket(event, what == "sent");
    if (what == "posted") return;  // the work request's slice begins there
    Json instant = Base("i", EventText(event), what == "fault" || what == "refused" ? "loss" : "qp",
                        event, what == "fault" || what == "refused" ? kPortTrack : qpn);
    instant["s"] = "t";
    instant["args"] = event;
    out_.push_back(std::move(instant));
  }

  // Sender and receiver see the same packet: QPN of the receiver, opcode, PSN;
  // of several the oldest.
  void AddPacket(const Json& event, bool sent) {
    const uint32_t qpn = Number(event, "qpn");
    const auto key = std::make_tuple(sent ? Number(event, "peer_qpn") : qpn,
                                     TextField(event, "opcode"), Number(event, "psn"));
    Json slice = Base("X", EventText(event), sent ? "sent" : "received", event, qpn);
    slice["dur"] = kPacketUs;
    slice["args"] = event;
    Json flow = Base(sent ? "s" : "f", "packet", "packet", event, qpn);
    Json port = Base("i", EventText(event), sent ? "sent" : "received", event, kPortTrack);
    port["s"] = "t";
    out_.push_back(std::move(slice));
    out_.push_back(std::move(port));
    std::deque<std::pair<int, Json>>& waiting = under_way_[key];
    if (sent) {
      flow["id"] = ++flows_;
      waiting.emplace_back(flows_, std::move(flow));
      return;
    }
    if (waiting.empty()) return;  // from outside, or older than the ring
    // The last transmission is the likeliest; those before were lost.
    flow["id"] = waiting.back().first;
    flow["bp"] = "e";
    out_.push_back(std::move(waiting.back().second));
    out_.push_back(std::move(flow));
    waiting.clear();
  }

  void AddNames() {
    for (const auto& [device, pid] : processes_) {
      out_.push_back({{"ph", "M"},
                      {"name", "process_name"},
                      {"pid", pid},
                      {"tid", 0},
                      {"args", {{"name", device}}}});
    }
    for (const auto& [device, track] : tracks_) {
      out_.push_back(
          {{"ph", "M"},
           {"name", "thread_name"},
           {"pid", Process(device)},
           {"tid", track},
           {"args",
            {{"name", track == kPortTrack ? "port 1" : fmt::format("QP {:#08x}", track)}}}});
    }
  }

  const Json& events_;
  int64_t start_ns_ = 0;
  int flows_ = 0;
  Json out_ = Json::array();
  std::map<std::string, int> processes_;
  std::set<std::pair<std::string, uint32_t>> tracks_;
  std::map<std::tuple<uint32_t, std::string, uint32_t>, std::deque<std::pair<int, Json>>>
      under_way_;
};

}  // namespace

Json PerfettoTrace(const Json& events) { return Exporter(events).Export(); }

}  // namespace verbena::tools
