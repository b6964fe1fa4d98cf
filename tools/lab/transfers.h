// SPDX-License-Identifier: Apache-2.0
//
// The built-in transfers of the lab page: an example program of docs/labs at both ends, run with
// the daemon's devices visible. One transfer at a time.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tools/verbena_cli/control_client.h"
#include "tools/verbena_cli/parts.h"

namespace verbena::tools {

struct TransferRequest {
  std::string kind;     // of kTransfers
  uint32_t size = 64;   // bytes of a message
  uint32_t count = 10;  // messages; 0: until it is stopped
  uint32_t pause_ms = 0;
};

// What each kind runs.
struct TransferKind {
  std::string_view kind, program;
};
inline constexpr TransferKind kTransfers[] = {
    {"send", "send_recv"},     {"write", "rdma_write"}, {"read", "rdma_read"},
    {"atomic", "atomic_lock"}, {"kv", "kv_store"},      {"events", "events"},
};

class Transfers {
 public:
  // `folder`: of the example programs.
  Transfers(Parts parts, std::string socket, std::string folder);
  ~Transfers();  // ends what runs
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // Ends what runs and starts these, one after the other; `repeat`: for ever. Empty = accepted,
  // else a sentence. Thread: any.
  std::string Start(std::vector<TransferRequest> requests, bool repeat);
  void Stop();

  // {"running":bool,"kind":…,"pids":[…],"output":…,"status":…}. Thread: any.
  Json Describe() const;

 private:
  struct End {
    pid_t pid = -1;
    int output = -1;
  };

  void Run();
  std::string Begin(const TransferRequest& request);
  void Read(End* end);
  // True: both ends have ended.
  bool Reap();
  void Kill();

  const Parts parts_;
  const std::string socket_;
  const std::string folder_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<TransferRequest> wanted_;
  bool repeat_ = false;
  uint64_t generation_ = 0;
  bool ended_ = false;
  std::string kind_;  // that runs
  std::string output_;
  std::string result_;
  std::array<End, 2> ends_;  // written by the thread, read under the mutex
  std::thread thread_;
};

}  // namespace verbena::tools
