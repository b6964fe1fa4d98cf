// SPDX-License-Identifier: Apache-2.0
//
// status, list, counters: what the daemon says, as JSON or as a table.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {
namespace {

void PrintJson(const Json& json) { Print(stdout, "{}\n", Dump(json, 2)); }

std::string Plural(const std::string& number, const char* noun) {
  return number + " " + noun + (number == "1" ? "" : "s");
}

// The columns that people look for first; others follow in the daemon's order.
std::vector<std::string> FirstColumns(const std::string& what) {
  if (what == "qp") {
    return {"qpn", "type", "state", "dest_qpn", "sq_psn", "rq_psn", "device", "pid", "comm"};
  }
  return {"device", "pid", "comm"};
}

std::vector<std::string> Columns(const std::string& what, const Json& items) {
  std::vector<std::string> columns = FirstColumns(what);
  const size_t fixed = columns.size();
  for (const Json& item : items) {
    if (!item.is_object()) continue;
    for (const auto& field : item.items()) {
      if (field.value().is_structured()) continue;  // --json shows those
      if (std::find(columns.begin(), columns.end(), field.key()) == columns.end()) {
        columns.push_back(field.key());
      }
    }
  }
  // Handles and sizes of pd, mr, cq and context before who owns them.
  if (what != "qp")
    std::rotate(columns.begin(), columns.begin() + static_cast<long>(fixed), columns.end());
  return columns;
}

}  // namespace

int Status(const InstanceOptions& options, bool json) {
  const Reply reply = Ask(options, {{"op", "status"}});
  if (!reply.ok()) return 1;
  const Json& status = reply.json;
  if (json) {
    PrintJson(status);
    return 0;
  }
  Print(stdout, "instance {}, pid {}, {}, {}, {}\n", TextField(status, "name", "?"),
        TextField(status, "pid", "?"), TextField(status, "mode", "unknown mode"),
        Plural(TextField(status, "threads", "?"), "thread"),
        Plural(TextField(status, "clients", "?"), "client"));
  Print(stdout, "socket   {}\n\n", TextField(status, "socket", "?"));
  Table table;
  table.AddRow({"DEVICE", "HOST", "STATE", "MAC", "IPV4", "GID INDEX"});
  for (const Json& nic : ArrayField(status, "nics")) {
    const Json& gids = ArrayField(nic, "gids");
    const auto gid = [&gids](size_t i) {
      return i < gids.size() ? Printable(gids[i]) : std::string("-");
    };
    table.AddRow({TextField(nic, "device", "?"), TextField(nic, "host", "?"),
                  TextField(nic, "state", "?"), TextField(nic, "mac", "?"),
                  TextField(nic, "ipv4", "-"), "0  " + gid(0)});
    const std::string port = TextField(nic, "port", "");
    table.AddRow({"", "", "", port.empty() || port == "null" ? "" : port,
                  port.empty() || port == "null" ? "" : "MTU " + TextField(nic, "active_mtu", "?"),
                  "1  " + gid(1)});
    // Those of the default are known; others are worth a line each.
    for (size_t i = 2; i < gids.size(); ++i) {
      if (gid(i) != "::") table.AddRow({"", "", "", "", "", fmt::format("{}  {}", i, gid(i))});
    }
  }
  Print(stdout, "{}", table.Text());
  return 0;
}

int List(const InstanceOptions& options, const std::string& what, bool json) {
  const Reply reply = Ask(options, {{"op", "list"}, {"what", what}});
  if (!reply.ok()) return 1;
  const Json& items = ArrayField(reply.json, "items");
  if (const Json& users = ArrayField(reply.json, "held_up"); !users.empty()) {
    Print(stderr, "verbena: not shown, since their memory does not answer: users {}\n",
          users.dump());
  }
  if (json) {
    PrintJson(items);
    return 0;
  }
  const std::vector<std::string> columns = Columns(what, items);
  std::vector<std::string> heading;
  for (const std::string& column : columns) {
    std::string upper = Printable(column);
    std::transform(upper.begin(), upper.end(), upper.begin(),
                   [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    heading.push_back(upper);
  }
  Table table;
  table.AddRow(heading);
  for (const Json& item : items) {
    std::vector<std::string> row;
    for (const std::string& column : columns) row.push_back(TextField(item, column.c_str(), "-"));
    table.AddRow(row);
  }
  Print(stdout, "{}", table.Text());
  return 0;
}

}  // namespace verbena::tools
