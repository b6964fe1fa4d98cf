// SPDX-License-Identifier: Apache-2.0
//
// The control server: accepts connections on the daemon's socket and gives each to the thread of
// its user (user_loop.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "nic_sim/ctrl/control_requests.h"
#include "nic_sim/ctrl/hardware.h"
#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/supervisor/engine_link.h"

namespace verbena::nic {

struct ServerOptions {
  DaemonInfo daemon;
  std::string tree;          // whose counters are brought up to date on request; empty: none
  uint32_t exit_idle_s = 0;  // 0: stay
  // Of a daemon with exit_idle_s whose first client does not come; the larger of the two counts.
  uint32_t first_client_s = 30;
  uint32_t hello_ms = 10000;  // a connection that has not said what it is by then is closed
  // Of each user that is not the daemon's or root.
  uint32_t max_contexts_of_others = kOtherUserLimits.contexts;
  int control_group = -1;  // its members may do what the daemon's user may; -1: none
};

class Server {
 public:
  // `link` may be null (no supervisor). Both outlive the server.
  Server(Hardware* hardware, EngineLink* link, ServerOptions options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Creates the listening socket. `signal_fd` (-1: none): readable when the daemon is to end.
  // Empty = clients may come, else a sentence.
  std::string Listen(const std::string& path, int signal_fd);

  // Serves until a signal, a shutdown request, the supervisor's word or end, or idleness. Then the
  // socket is gone, captures are finished, clients are told and their contexts are closed.
  // False: some could not be closed, since their memory does not answer. Threads use the device
  // and this object then: the process must end at once.
  bool Run();

  // Makes Run() return; from any thread, also from a signal handler.
  void Stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace verbena::nic
