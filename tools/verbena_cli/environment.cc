// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/environment.h"

#include <fmt/format.h>

#include <cstdlib>

#include "nic_sim/runtime/self_clean.h"

namespace verbena::tools {
namespace {

std::string Append(const std::string& others, const std::string& ours) {
  return others.empty() ? ours : others + ":" + ours;
}

std::string Current(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? std::string() : std::string(value);
}

}  // namespace

Variables ApplicationEnvironment(const Parts& parts, const std::string& socket,
                                 std::string* error) {
  error->clear();
  if (!parts.missing_libraries.empty()) {
    *error = parts.missing_libraries;
    return {};
  }
  // ld.so splits LD_PRELOAD at blanks and colons and has no quoting; libibverbs splits its list
  // at colons and semicolons.
  for (const std::string& path : {parts.preload, parts.driver_name}) {
    if (path.find_first_of(" :;\t\n") == std::string::npos) continue;
    *error = fmt::format(
        "{} has a blank, colon or semicolon in its path, which LD_PRELOAD and IBV_DRIVERS cannot "
        "express. Copy the programs elsewhere: tools/stage DIR",
        path);
    return {};
  }
  Variables variables;
  variables.emplace_back("IBV_DRIVERS",
                         Append(nic::WithoutOurDrivers(Current("IBV_DRIVERS")), parts.driver_name));
  if (std::getenv("RDMAV_DRIVERS") != nullptr) {
    variables.emplace_back("RDMAV_DRIVERS", Append(nic::WithoutOurDrivers(Current("RDMAV_DRIVERS")),
                                                   parts.driver_name));
  }
  variables.emplace_back("LD_PRELOAD",
                         Append(nic::WithoutOurPreload(Current("LD_PRELOAD")), parts.preload));
  variables.emplace_back("VERBENA_SOCKET", socket);
  return variables;
}

std::string ShellQuote(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'') {
      quoted += "'\\''";
    } else {
      quoted += c;
    }
  }
  return quoted + "'";
}

}  // namespace verbena::tools
