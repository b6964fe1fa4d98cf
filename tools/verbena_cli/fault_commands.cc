// SPDX-License-Identifier: Apache-2.0
//
// fault add, list, clear, held, step, release. The daemon knows the grammar of rules and names what
// is wrong in one.
#include <fmt/format.h>

#include <cerrno>
#include <cstring>

#include "nic_sim/faults/rule_file.h"
#include "nic_sim/runtime/read_file.h"
#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/control_client.h"
#include "tools/verbena_cli/instance.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {

int FaultAdd(const InstanceOptions& options, const std::vector<std::string>& rule) {
  const Reply reply =
      Ask(options, {{"op", "fault_add"}, {"rule", fmt::format("{}", fmt::join(rule, " "))}});
  if (!reply.ok()) return 1;
  Print(stdout, "{}\n", TextField(reply.json, "id", "?"));
  return 0;
}

int FaultAddFile(const InstanceOptions& options, const std::string& file) {
  const std::optional<std::string> text = nic::ReadFile(file);
  if (!text) {
    PrintError(fmt::format("cannot read {}: {}", file, std::strerror(errno)));
    return 1;
  }
  std::vector<nic::FileRule> rules;
  std::string error = nic::ReadRuleFile(*text, file, &rules);
  if (error.empty() && rules.empty()) error = file + ":1: there is no [[rule]]";
  if (!error.empty()) {
    PrintError(error);
    return 1;
  }
  ControlClient client;
  if (!ConnectTo(Resolve(options), &client)) return 1;
  std::vector<int64_t> ids;
  for (const nic::FileRule& rule : rules) {
    const Reply reply = client.Request({{"op", "fault_add"}, {"rule", rule.text}});
    if (reply.ok()) {
      ids.push_back(IntegerField(reply.json, "id"));
      continue;
    }
    PrintError(rule.Complaint(file, TextField(reply.json, "field"), reply.error));
    for (const int64_t id : ids) client.Request({{"op", "fault_clear"}, {"id", id}});
    return 1;
  }
  for (const int64_t id : ids) Print(stdout, "{}\n", id);
  return 0;
}

int FaultList(const InstanceOptions& options, bool json) {
  const Reply reply = Ask(options, {{"op", "fault_list"}});
  if (!reply.ok()) return 1;
  const Json& rules = ArrayField(reply.json, "rules");
  if (json) {
    Print(stdout, "{}\n", Dump(rules, 2));
    return 0;
  }
  Table table;
  table.AddRow({"ID", "HITS", "RULE"});
  for (const Json& rule : rules) {
    table.AddRow(
        {TextField(rule, "id", "?"), TextField(rule, "hits", "?"), TextField(rule, "rule", "?")});
  }
  Print(stdout, "{}", table.Text());
  return 0;
}

int FaultRelease(const InstanceOptions& options, std::optional<int64_t> count,
                 std::optional<int64_t> id) {
  Json request = {{"op", count ? "fault_step" : "fault_release"}};
  if (count) request["count"] = *count;
  if (id) request["id"] = *id;
  const Reply reply = Ask(options, request);
  if (!reply.ok()) return 1;
  const int64_t released = IntegerField(reply.json, "released");
  Print(stdout, "released {} packet{}\n", released, released == 1 ? "" : "s");
  return 0;
}

int FaultHeld(const InstanceOptions& options, bool json) {
  const Reply reply = Ask(options, {{"op", "fault_held"}});
  if (!reply.ok()) return 1;
  const Json& packets = ArrayField(reply.json, "packets");
  if (json) {
    Print(stdout, "{}\n", Dump(packets, 2));
    return 0;
  }
  Table table;
  table.AddRow({"RULE", "AT", "FROM QP", "TO QP", "PACKET", "PSN", "BYTES"});
  for (const Json& packet : packets) {
    table.AddRow(
        {TextField(packet, "rule", "?"),
         fmt::format("{} {}", TextField(packet, "device", "?"), TextField(packet, "side", "?")),
         TextField(packet, "source_qpn", "?"), TextField(packet, "dest_qpn", "?"),
         TextField(packet, "opcode", "?"), TextField(packet, "psn", "?"),
         TextField(packet, "bytes", "?")});
  }
  Print(stdout, "{}", table.Text());
  return 0;
}

int FaultClear(const InstanceOptions& options, std::optional<int64_t> id) {
  Json request = {{"op", "fault_clear"}};
  if (id) request["id"] = *id;
  const Reply reply = Ask(options, request);
  if (!reply.ok()) return 1;
  const int64_t removed = IntegerField(reply.json, "removed");
  if (id && removed == 0) {
    PrintError(fmt::format("there is no fault rule {}; see `verbena fault list`", *id));
    return 1;
  }
  Print(stdout, "removed {} rule{}\n", removed, removed == 1 ? "" : "s");
  return 0;
}

}  // namespace verbena::tools
