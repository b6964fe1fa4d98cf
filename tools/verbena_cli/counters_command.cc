// SPDX-License-Identifier: Apache-2.0
//
// counters: of ports and QPs, once or again and again.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <thread>

#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {
namespace {

using Clock = std::chrono::steady_clock;

void PrintCounters(const char* title, const Json& counters, bool only_set) {
  size_t width = 0;
  for (const auto& counter : counters.items()) width = std::max(width, counter.key().size());
  bool titled = false;
  for (const auto& counter : counters.items()) {
    const std::string value = Printable(counter.value());
    if (only_set && value == "0") continue;
    if (!titled) Print(stdout, "  {}\n", title);
    titled = true;
    Print(stdout, "    {:<{}}  {:>14}\n", Printable(counter.key()), width, value);
  }
}

// {"qpn", "device", ..., "counters": {...}} of the QP, or null.
Json FindQp(const Json& list, uint32_t qpn) {
  for (const Json& qp : ArrayField(list, "items")) {
    if (IntegerField(qp, "qpn") == qpn) return qp;
  }
  return nullptr;
}

int OfQp(const CountersOptions& options) {
  const Reply reply = Ask(options.instance, {{"op", "list"}, {"what", "qp"}});
  if (!reply.ok()) return 1;
  const Json qp = FindQp(reply.json, *options.qpn);
  if (qp.is_null()) {
    PrintError(fmt::format("there is no QP {:#08x}; see `verbena list qp`", *options.qpn));
    return 1;
  }
  if (options.json) {
    Print(stdout, "{}\n", Dump(ObjectField(qp, "counters"), 2));
    return 0;
  }
  Print(stdout, "QP {:#08x} of {}, pid {} ({})\n", *options.qpn, TextField(qp, "device"),
        TextField(qp, "pid"), TextField(qp, "comm"));
  PrintCounters("counters", ObjectField(qp, "counters"), /*only_set=*/false);
  return 0;
}

// Name with device -> value, of all groups.
std::map<std::string, int64_t> Flat(const CountersOptions& options, const Json& reply) {
  std::map<std::string, int64_t> flat;
  if (options.qpn) {
    const Json qp = FindQp(reply, *options.qpn);
    for (const auto& counter : ObjectField(qp, "counters").items()) {
      if (counter.value().is_number()) flat[counter.key()] = counter.value().get<int64_t>();
    }
    return flat;
  }
  for (const auto& device : ObjectField(reply, "devices").items()) {
    for (const auto& group : device.value().items()) {
      if (!group.value().is_object()) continue;
      const std::string prefix = group.key() == "drops" ? "drops." : "";
      for (const auto& counter : group.value().items()) {
        if (!counter.value().is_number()) continue;
        flat[device.key() + " " + prefix + counter.key()] = counter.value().get<int64_t>();
      }
    }
  }
  return flat;
}

// One block for each interval: what has moved, with the rate.
int Watch(const CountersOptions& options) {
  Json request = {{"op", options.qpn ? "list" : "counters"}};
  if (options.qpn) {
    request["what"] = "qp";
  } else if (!options.device.empty()) {
    request["dev"] = options.device;
  }
  std::map<std::string, int64_t> last;
  Clock::time_point last_time;
  for (uint64_t round = 0; options.rounds == 0 || round <= options.rounds; ++round) {
    const Reply reply = Ask(options.instance, request);
    if (!reply.ok()) return 1;
    const Clock::time_point now = Clock::now();
    const std::map<std::string, int64_t> flat = Flat(options, reply.json);
    if (round > 0) {
      const double seconds = std::chrono::duration<double>(now - last_time).count();
      if (options.json) {
        Json line = {{"seconds", seconds}};
        for (const auto& [name, value] : flat) {
          if (value != last[name]) line[name] = {{"value", value}, {"delta", value - last[name]}};
        }
        Print(stdout, "{}\n", Dump(line));
      } else {
        Table table;
        table.AddRow({"COUNTER", "VALUE", "CHANGE", "PER SECOND"});
        for (const auto& [name, value] : flat) {
          const int64_t delta = value - last[name];
          if (delta == 0) continue;
          table.AddRow({Printable(name), fmt::to_string(value), fmt::format("{:+}", delta),
                        fmt::format("{:.1f}", static_cast<double>(delta) / seconds)});
        }
        Print(stdout, "{}\n", table.Text());
      }
      if (std::fflush(stdout) != 0) return 1;
    }
    last = flat;
    last_time = now;
    if (options.rounds == 0 || round < options.rounds) {
      std::this_thread::sleep_for(std::chrono::duration<double>(options.interval));
    }
  }
  return 0;
}

}  // namespace

int Counters(const CountersOptions& options) {
  if (options.watch) return Watch(options);
  if (options.qpn) return OfQp(options);
  Json request = {{"op", "counters"}};
  if (!options.device.empty()) request["dev"] = options.device;
  const Reply reply = Ask(options.instance, request);
  if (!reply.ok()) return 1;
  if (options.json) {
    Print(stdout, "{}\n", Dump(reply.json, 2));
    return 0;
  }
  for (const auto& entry : ObjectField(reply.json, "devices").items()) {
    Print(stdout, "{}\n", Printable(entry.key()));
    PrintCounters("port counters (port_*_data in units of 4 bytes)",
                  ObjectField(entry.value(), "counters"), /*only_set=*/false);
    PrintCounters("hw_counters", ObjectField(entry.value(), "hw_counters"), /*only_set=*/false);
    PrintCounters("drops (those that happened)", ObjectField(entry.value(), "drops"),
                  /*only_set=*/true);
    PrintCounters("wire (the netdev that the NIC is joined to)", ObjectField(entry.value(), "wire"),
                  /*only_set=*/true);
  }
  return 0;
}

}  // namespace verbena::tools
