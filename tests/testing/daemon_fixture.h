// SPDX-License-Identifier: Apache-2.0
//
// A daemon of a test's own: private run folder under /tmp (TEST_TMPDIR is too long for a socket
// path), instance name, environment for children. Stopped and removed by the destructor.
//
// With $VERBENA_TEST_PID_NAMESPACE set, the daemon runs in user and pid namespaces of its own: it
// then sees no pids of its clients, as a daemon beside a container does, and reaches their memory
// through /proc/self/mem only. The tests that look at the daemon's processes do not work then.
//
// The `verbena` command comes from Bazel's runfiles or from $VERBENA_BIN; it finds the other parts
// beside itself.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/testing/process.h"

namespace verbena::testing {

// Path of the `verbena` command under test. Throws std::runtime_error if there is none.
std::string VerbenaCommand();

class PrivateDaemon {
 public:
  // Runs `verbena up --nics N [more...]`. Throws std::runtime_error with its output on failure.
  explicit PrivateDaemon(int nics = 2, const std::vector<std::string>& more = {});
  ~PrivateDaemon();  // `verbena down`, and SIGKILL if that does not help
  PrivateDaemon(const PrivateDaemon&) = delete;
  PrivateDaemon& operator=(const PrivateDaemon&) = delete;

  const std::string& folder() const { return folder_; }
  pid_t pid() const { return pid_; }  // as `verbena status` reports it

  // For ProcessOptions::environment: leads `verbena` and its children to this daemon.
  std::map<std::string, std::optional<std::string>> Environment() const;

  // Runs `verbena ARGUMENTS...` against this daemon.
  Finished Verbena(const std::vector<std::string>& arguments,
                   Milliseconds limit = Milliseconds(20000)) const;

  // `verbena run -- ARGV...`: options with this daemon's environment, to be completed.
  ProcessOptions Run(const std::vector<std::string>& argv) const;

  // The processes of the daemon that live: supervisor, engine and what else they started.
  std::vector<pid_t> Processes() const;
  // The process that plays the hardware (the supervisor's child).
  pid_t EnginePid() const;

  // Everything that helps to understand a failure.
  std::string Dump() const;

 private:
  std::string folder_;
  std::string name_;
  void StartInNamespaces(std::vector<std::string> arguments);

  std::unique_ptr<Process> namespaces_;
  pid_t pid_ = -1;
  pid_t engine_ = -1;
};

// Runs `verbena ARGUMENTS...` with this process's environment (inside `verbena run` or `env`).
Finished VerbenaHere(const std::vector<std::string>& arguments,
                     Milliseconds limit = Milliseconds(20000));

// Hits of the fault rules, in the order of `verbena fault list` (with this process's environment).
std::vector<int64_t> FaultHits();

}  // namespace verbena::testing
