// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/runtime/self_clean.h"

#include <unistd.h>

#include <climits>
#include <cstdlib>

namespace verbena::nic {
namespace {

template <typename IsOurs>
std::string Filter(std::string_view list, std::string_view separators, IsOurs is_ours) {
  std::string kept;
  while (!list.empty()) {
    const size_t end = list.find_first_of(separators);
    const std::string_view entry = list.substr(0, end);
    list = end == std::string_view::npos ? std::string_view() : list.substr(end + 1);
    if (entry.empty() || is_ours(entry.substr(entry.rfind('/') + 1))) continue;
    if (!kept.empty()) kept += ':';
    kept += entry;
  }
  return kept;
}

// Writes the variable only when something of ours was in it; true if so.
bool CleanVariable(const char* variable, std::string (*without_ours)(std::string_view),
                   std::string_view needle) {
  const char* old_value = std::getenv(variable);
  if (old_value == nullptr || std::string_view(old_value).find(needle) == std::string_view::npos) {
    return false;
  }
  const std::string kept = without_ours(old_value);
  if (kept.empty()) {
    unsetenv(variable);
    return true;
  }
  // Joining may have changed separators although nothing was ours: compare sizes.
  const bool changed = kept.size() < std::string_view(old_value).size();
  if (changed) setenv(variable, kept.c_str(), 1);
  return changed;
}

}  // namespace

std::string WithoutOurPreload(std::string_view list) {
  return Filter(list, " :", [](std::string_view file) { return file == kPreloadFile; });
}

std::string WithoutOurDrivers(std::string_view list) {
  return Filter(list, ":;", [](std::string_view file) {
    return file == kDriverName || file == "verbena" || file.starts_with("libverbena-rdmav");
  });
}

void CleanSelf(char** argv) {
  CleanVariable("IBV_DRIVERS", WithoutOurDrivers, "verbena");
  CleanVariable("RDMAV_DRIVERS", WithoutOurDrivers, "verbena");
  if (!CleanVariable("LD_PRELOAD", WithoutOurPreload, kPreloadFile)) return;
  // By its real path, so that ps and /proc/PID/comm keep the program's name.
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
  if (length > 0) {
    path[length] = '\0';
    execv(path, argv);
  }
  execv("/proc/self/exe", argv);
}

}  // namespace verbena::nic
