// SPDX-License-Identifier: Apache-2.0
//
// trace and explain: what the engine did last, and why it went wrong.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/explain.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {
namespace {

constexpr std::chrono::milliseconds kFollowPause(200);

Json Request(const TraceOptions& options, int64_t after_ns) {
  Json request = {{"op", "trace"}, {"after_ns", after_ns}};
  if (options.qpn) request["qpn"] = *options.qpn;
  // Later rounds of --follow show all that is new.
  if (after_ns == 0) request["limit"] = options.last;
  return request;
}

bool Shows(const TraceOptions& options, const Json& event) {
  return options.device.empty() || TextField(event, "device") == options.device;
}

int64_t TimeOf(const Json& event) { return IntegerField(event, "time_ns"); }

}  // namespace

int Trace(const TraceOptions& options) {
  int64_t start_ns = 0;
  int64_t last_ns = 0;
  do {
    const Reply reply = Ask(options.instance, Request(options, last_ns));
    if (!reply.ok()) return 1;
    const Json& events = ArrayField(reply.json, "events");
    if (options.json && !options.follow) {
      Json shown = Json::array();
      for (const Json& event : events) {
        if (Shows(options, event)) shown.push_back(event);
      }
      Print(stdout, "{}\n", Dump(shown, 2));
      return 0;
    }
    if (start_ns == 0 && !events.empty()) start_ns = TimeOf(events.front());
    for (const Json& event : events) {
      last_ns = TimeOf(event);
      if (!Shows(options, event)) continue;
      Print(stdout, "{}\n", options.json ? Dump(event) : EventLine(event, start_ns));
    }
    if (!options.follow) return 0;
    if (std::fflush(stdout) != 0) return 1;
    std::this_thread::sleep_for(kFollowPause);
  } while (true);
}

int Explain(const InstanceOptions& options, std::optional<uint32_t> qpn, bool json) {
  const Reply trace = Ask(options, {{"op", "trace"}});
  if (!trace.ok()) return 1;
  const Reply rules = Ask(options, {{"op", "fault_list"}});
  if (!rules.ok()) return 1;
  const Explanation found =
      Explain(ArrayField(trace.json, "events"), ArrayField(rules.json, "rules"), qpn);
  if (json) {
    const Json answer = {{"qpn", found.qpn},         {"status", found.status},
                         {"what", found.what},       {"because", found.because},
                         {"look_at", found.look_at}, {"events", found.events}};
    Print(stdout, "{}\n", Dump(answer, 2));
    return 0;
  }
  Print(stdout, "{}", ExplanationText(found, qpn));
  return 0;
}

}  // namespace verbena::tools
