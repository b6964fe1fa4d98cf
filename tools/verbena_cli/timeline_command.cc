// SPDX-License-Identifier: Apache-2.0
//
// timeline, and trace --perfetto.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/text_output.h"
#include "tools/verbena_cli/timeline.h"

namespace verbena::tools {

// Without a QP: of the QP that posted last. Without --wr: the last that failed,
// was sent again, or the last at all.
int Timeline(const TimelineOptions& options) {
  const Reply reply = Ask(options.instance, {{"op", "trace"}, {"limit", 100'000}});
  if (!reply.ok()) return 1;
  const Json& events = ArrayField(reply.json, "events");
  std::optional<uint32_t> qpn = options.qpn;
  std::vector<WorkRequestLife> lives = WorkRequests(events, qpn);
  if (!qpn && !lives.empty()) {
    const auto failed = std::find_if(lives.rbegin(), lives.rend(), [](const auto& life) {
      return !life.status.empty() && life.status != "SUCCESS" && life.status != "WR_FLUSH_ERR";
    });
    qpn = failed != lives.rend() ? failed->qpn : lives.back().qpn;
    std::erase_if(lives, [&](const WorkRequestLife& life) { return life.qpn != *qpn; });
  }
  if (lives.empty()) {
    PrintError("no work request is in the trace");
    return 1;
  }
  const WorkRequestLife* shown = nullptr;
  if (options.wr_id) {
    for (const WorkRequestLife& life : lives) {
      if (life.wr_id == fmt::to_string(*options.wr_id)) shown = &life;
    }
    if (shown == nullptr) {
      PrintError(fmt::format("QP {:#08x} has posted no wr_id {} that is still in the trace", *qpn,
                             *options.wr_id));
      return 1;
    }
  } else {
    // The worst there is, of several the first: what comes after it only followed.
    int worst = 0;
    for (const WorkRequestLife& life : lives) {
      const bool failed =
          !life.status.empty() && life.status != "SUCCESS" && life.status != "WR_FLUSH_ERR";
      const bool hit = std::ranges::any_of(
          life.events, [&](size_t index) { return TextField(events[index], "event") == "fault"; });
      const int trouble = failed ? 3 : hit ? 2 : life.again != 0 ? 1 : 0;
      if (trouble <= worst) continue;
      worst = trouble;
      shown = &life;
    }
    if (shown == nullptr) shown = &lives.back();
  }
  if (options.json) {
    Print(stdout, "{}\n", Dump(LadderJson(events, *shown), 2));
  } else {
    Print(stdout, "{}", Ladder(events, *shown));
  }
  return 0;
}

int TraceToPerfetto(const InstanceOptions& options, const std::string& path) {
  const Reply reply = Ask(options, {{"op", "trace"}, {"limit", 100'000}});
  if (!reply.ok()) return 1;
  const Json& events = ArrayField(reply.json, "events");
  const std::string text = Dump(PerfettoTrace(events));
  if (path == "-") {
    Print(stdout, "{}\n", text);
    return 0;
  }
  std::ofstream file(path);
  file << text << "\n";
  if (!file.flush()) {
    PrintError(fmt::format("cannot write {}", path));
    return 1;
  }
  Print(stderr, "{} events; open {} in ui.perfetto.dev or chrome://tracing\n", events.size(), path);
  return 0;
}

}  // namespace verbena::tools
