// SPDX-License-Identifier: Apache-2.0
//
// Child processes of tests: started in a session of their own, output read through a pseudo
// terminal (stock programs block-buffer into pipes), every one with a time limit after which its
// whole process group is killed. Nothing outlives the object.
//
// Thread: one owner per object; a private thread reads the output.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace verbena::testing {

using Milliseconds = std::chrono::milliseconds;

struct ProcessOptions {
  std::vector<std::string> argv;  // argv[0] is looked up in PATH
  // Added to (or, with nullopt, removed from) this process's environment.
  std::map<std::string, std::optional<std::string>> environment;
  Milliseconds limit{30000};
  bool close_stdin = false;  // else /dev/null
};

class Process {
 public:
  // Throws std::runtime_error when the process cannot be created. A program that cannot be
  // executed ends with status 127.
  explicit Process(ProcessOptions options);
  ~Process();  // kills the process group
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const;
  bool Running();
  // Waits for the end: exit status, 128 + signal, or kTimedOut (its group is killed then).
  static constexpr int kTimedOut = -1;
  int Wait();
  void Signal(int number);  // to the process alone
  void KillGroup();

  // Everything printed so far (both streams).
  std::string Output();
  // Waits until `text` was printed; false at the end of the process or after `limit`.
  bool WaitForOutput(std::string_view text, Milliseconds limit);
  // The rest of the first line that starts with `prefix`, waiting for it as above.
  std::optional<std::string> WaitForLine(std::string_view prefix, Milliseconds limit);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct Finished {
  int status = Process::kTimedOut;
  std::string output;
};

// Start, wait, collect.
Finished RunProcess(ProcessOptions options);

}  // namespace verbena::testing
