// SPDX-License-Identifier: Apache-2.0
#include "tests/endurance/chaos_roles.h"

#include <dirent.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>

namespace verbena::testing {
namespace {

constexpr int kDeviceError = 1;
constexpr int kFinding = 2;

}  // namespace

bool IsFinding(const std::exception& error) {
  const std::string_view what = error.what();
  for (const char* words :
       {"wrong byte", "outside the message", "differ from the model", "wrong bytes", "too many",
        "original value", "no completion", "leak", "out of order"}) {
    if (what.find(words) != std::string_view::npos) return true;
  }
  return false;
}

int Report(const std::exception& error) {
  printf("%s\n", error.what());
  return IsFinding(error) ? kFinding : kDeviceError;
}

int OpenDescriptors() {
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return -1;
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

void CheckDescriptors(int before) {
  if (OpenDescriptors() <= before) return;
  std::string text = "descriptor leak:";
  for (int fd = 0; fd < 256; ++fd) {
    char target[256];
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t length = readlink(link.c_str(), target, sizeof(target));
    if (length > 0) text += " " + std::string(target, static_cast<size_t>(length));
  }
  throw std::runtime_error(text);
}

Clock::time_point After(const std::string& seconds) {
  return Clock::now() + std::chrono::milliseconds(static_cast<int>(1000 * std::stod(seconds)));
}

}  // namespace verbena::testing
