// SPDX-License-Identifier: Apache-2.0
//
// The engine process's end of the socket pair to the supervisor. Messages that do not fit wait
// here, so that a supervisor that was stopped does not stop the device.
//
// Thread: the control thread.
#pragma once

#include <deque>

#include "nic_sim/supervisor/link.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

class EngineLink {
 public:
  explicit EngineLink(UniqueFd socket);

  int fd() const { return socket_.get(); }
  // Sends or queues; `fd` is duplicated if it has to wait (-1: none).
  void Send(const LinkMessage& message, int fd = -1);
  // There are messages that wait for POLLOUT; then call Flush().
  bool has_pending() const { return !pending_.empty(); }
  void Flush();
  // Waits at most `milliseconds` until nothing is pending.
  void Drain(int milliseconds);

  // Looks at the other direction.
  enum class News { kNone, kStop, kSupervisorGone };
  News Poll();

 private:
  struct Pending {
    LinkMessage message;
    UniqueFd fd;
  };
  UniqueFd socket_;
  std::deque<Pending> pending_;
};

}  // namespace verbena::nic
