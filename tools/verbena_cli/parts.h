// SPDX-License-Identifier: Apache-2.0
//
// Where this program's companions are: the daemon, the provider and the preload, found beside
// the program in the build tree (bazel-bin) and in a staged or installed tree (bin/, lib/).
#pragma once

#include <string>

namespace verbena::tools {

struct Parts {
  std::string program;      // this executable, links resolved
  std::string daemon;       // verbenad
  std::string provider;     // libverbena-rdmav34.so
  std::string preload;      // libverbena-preload.so
  std::string driver_name;  // for IBV_DRIVERS: the provider's path up to "libverbena"

  // The first missing part as a sentence that says where it was looked for; empty = all there.
  std::string missing_daemon;
  std::string missing_libraries;
};

// `program`: path of the executable; empty = this one (/proc/self/exe). Missing parts have empty
// paths.
Parts FindParts(const std::string& program = "");

}  // namespace verbena::tools
