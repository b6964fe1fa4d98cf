// SPDX-License-Identifier: Apache-2.0
//
// A client on the daemon's socket. Owner and thread: its user's loop.
#pragma once

#include <sys/epoll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <vector>

#include "nic_sim/device/context.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

struct OutgoingMessage {
  std::vector<std::byte> bytes;
  std::vector<UniqueFd> fds;
};

struct Connection {
  enum class Kind {
    kUnknown,
    kDevice,
    kControl,
    kRdmaCm,
    kNetlink,
    kRefresh
  } kind = Kind::kUnknown;
  uint64_t number = 0;  // of the daemon, never used again
  UniqueFd socket;
  UniqueFd pidfd;  // device connections
  ucred peer = {};
  bool privileged = false;  // may look at and change what is not its user's
  std::chrono::steady_clock::time_point born;
  Context* context = nullptr;
  std::deque<OutgoingMessage> out;
  bool close_when_sent = false;
  uint32_t interest = EPOLLIN;   // what epoll looks for
  uint32_t capture = 0;          // id, 0: none
  bool capture_counted = false;  // ends by itself
  bool capture_ending = false;   // requests wait until its last word
};

}  // namespace verbena::nic
