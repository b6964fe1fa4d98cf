// SPDX-License-Identifier: Apache-2.0
//
// ScenarioProgram: a child process in a session of its own, its output on a
// pseudo terminal (stock programs block-buffer into pipes). It dies with this
// process, and its group with this object. One thread.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "tools/verbena_cli/environment.h"

namespace verbena::tools {

class ScenarioProgram {
 public:
  using Clock = std::chrono::steady_clock;
  // More of an output is not kept.
  static constexpr size_t kMostOutput = 256 * 1024;

  ScenarioProgram() = default;
  ~ScenarioProgram();
  ScenarioProgram(const ScenarioProgram&) = delete;
  ScenarioProgram& operator=(const ScenarioProgram&) = delete;

  // Empty, or why the command's program can surely not be executed.
  static std::string Missing(const std::vector<std::string>& command);
  // Empty, or why it could not be started.
  std::string Start(const std::vector<std::string>& command, const Variables& environment);
  // Takes what it printed and whether it has ended. Cheap.
  void Look();
  // To its process group; nothing if it has ended.
  void Signal(int number) const;
  // SIGKILL and wait.
  void Kill();

  bool started() const { return pid_ > 0; }
  bool running() const { return pid_ > 0 && !status_; }
  // As a shell has it: 128 + signal.
  std::optional<int> status() const { return status_; }
  double seconds() const;  // that it ran, so far
  const std::string& output() const { return output_; }

  // A line of the output that has the pattern. Lines are looked at up to 4000
  // characters: std::regex recurses.
  static bool HasLine(const std::string& output, const std::string& pattern);

 private:
  void Read();

  pid_t pid_ = -1;
  int terminal_ = -1;
  std::string output_;
  std::optional<int> status_;
  Clock::time_point begin_, end_;
};

}  // namespace verbena::tools
