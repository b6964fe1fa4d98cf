// SPDX-License-Identifier: Apache-2.0
//
// One daemon per instance name: NAME.pid in the run folder holds the pid as text and is locked
// (flock) for as long as one of the daemon's processes lives. The files that a daemon makes.
#pragma once

#include <string>
#include <string_view>

#include "nic_sim/runtime/run_folder.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

// Paths of one instance.
struct InstancePaths {
  std::string folder;
  std::string socket;
  std::string pid;
  std::string tree;  // the fake /sys and /dev
  std::string log;
  std::string eal;  // DPDK's run-time files
};

// For a valid run folder. Empty *error = good.
InstancePaths MakeInstancePaths(const std::string& folder, std::string_view name,
                                std::string* error);

class InstanceGuard {
 public:
  // Takes the lock and writes this process's pid. Empty = taken, else a sentence with the pid of
  // the daemon that has it.
  std::string Take(const std::string& pid_path, std::string_view name);
  // The engine process inherits it, so that a name stays taken until both have ended.
  int fd() const { return fd_.get(); }
  void Release() { fd_.reset(); }

 private:
  UniqueFd fd_;
};

// Removes socket and tree, of this daemon or of a dead one; only while the guard is held.
void RemoveInstanceFiles(const InstancePaths& paths);

}  // namespace verbena::nic
