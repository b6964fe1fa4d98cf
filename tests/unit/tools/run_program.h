// SPDX-License-Identifier: Apache-2.0
//
// Test helpers: a folder that goes away, and a program with its outputs within a time limit.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

namespace verbena::tools {

// Under /tmp, because socket paths must be short.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& file) const { return path_ + "/" + file; }

 private:
  std::string path_;
};

struct ProgramResult {
  int status = -1;    // exit status, or -1
  int signal = 0;     // that ended it, or 0
  bool late = false;  // it was ended because of the time limit
  std::string out;
  std::string err;
};

// Environment: exactly `environment`.
class RunningProgram {
 public:
  RunningProgram(const std::vector<std::string>& command,
                 const std::map<std::string, std::string>& environment);
  pid_t pid() const { return pid_; }
  ProgramResult Wait(int seconds = 20);

 private:
  pid_t pid_;
  int out_;
  int err_;
};

std::string ReadWholeFile(const std::string& path);

}  // namespace verbena::tools
