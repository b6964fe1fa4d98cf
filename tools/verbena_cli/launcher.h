// SPDX-License-Identifier: Apache-2.0
//
// Starts verbenad and waits until it is ready.
//
// Contract with verbenad: it gets --ready-fd N, puts itself into the background, and writes
// "ready\n" to N when its socket accepts connections and its devices are complete, or one line
// that says what is wrong; then it closes N. It inherits no other descriptor; its stdin and
// stdout are /dev/null.
#pragma once

#include <string>
#include <vector>

#include "tools/verbena_cli/parts.h"

namespace verbena::tools {

struct DaemonOptions {
  std::string name;
  int nics = 0;  // 0 = not said
  bool strict = false;
  bool telemetry = false;
  std::string group;  // with system; empty: none
  bool system = false;
  std::string config;     // path, empty = not said
  std::string log_level;  // empty = not said
  int exit_idle_s = 0;    // 0 = stay
  // Passed on as they are: --port verbena0=... and the like.
  std::vector<std::string> nic_arguments;
};

// verbenad's command line without --ready-fd, program name included.
std::vector<std::string> DaemonArguments(const Parts& parts, const DaemonOptions& options);

// Empty when the daemon is ready, else a sentence (or what the daemon said). At most 60 s.
std::string StartDaemon(const Parts& parts, const DaemonOptions& options);

// Holds NAME.lock while a daemon is started, so that of many starters at once one starts it and
// the others find it running. Released by the destructor.
class StartLock {
 public:
  StartLock() = default;
  ~StartLock();
  StartLock(const StartLock&) = delete;
  StartLock& operator=(const StartLock&) = delete;

  // Waits at most 90 s. Empty = taken, else a sentence.
  std::string Take(const std::string& path);

 private:
  int fd_ = -1;
};

}  // namespace verbena::tools
