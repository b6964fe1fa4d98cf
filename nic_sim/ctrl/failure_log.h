// SPDX-License-Identifier: Apache-2.0
//
// FailureLog: when a work request fails or a QP goes to ERR, writes what
// `verbena explain` says of it into a file, and one line into the daemon's log.
// The file is bounded: it holds the last ones. A thread of its own, which looks
// at most once a second, some time after the failure (what the peer saw of it
// belongs to the explanation), at a bounded number of events (failure_events.h),
// and explains them at low priority: never in the way of packets.
#pragma once

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "nic_sim/ctrl/hardware.h"
#include "nic_sim/trace/failure_events.h"

namespace verbena::nic {

class FailureLog {
 public:
  static constexpr size_t kMostBytes = 64 * 1024;

  // Writes to `path` once something fails. The file is of this daemon only: one
  // that is there goes, and its own at the end.
  FailureLog(Hardware* hardware, std::string path);
  ~FailureLog();
  FailureLog(const FailureLog&) = delete;
  FailureLog& operator=(const FailureLog&) = delete;

 private:
  void Run();
  void Look();
  void Tell(const FailedQp& failed);
  void Append(const std::string& text);

  Hardware* hardware_;
  std::string path_;
  std::vector<std::string> devices_;  // by port
  int wake_fd_ = -1;                  // eventfd of FailureSignal
  int stop_fd_ = -1;                  // eventfd
  int64_t seen_ns_ = 0;
  std::string kept_;  // the file's content
  std::thread thread_;
};

}  // namespace verbena::nic
