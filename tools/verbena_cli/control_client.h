// SPDX-License-Identifier: Apache-2.0
//
// ControlClient: one connection to a daemon's control interface (docs/CONTROL.md). Blocking with
// time limits; one thread. Replies are untrusted: whatever arrives gives a Reply, never a crash.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "nic_sim/trace/json_fields.h"

namespace verbena::tools {

using Json = nic::Json;

struct Reply {
  enum class Kind {
    kOk,         // `json` is an object without "error"
    kRefused,    // the daemon answered {"error":…}: `error`
    kTimeout,    // nothing (complete) came in time
    kClosed,     // the daemon closed the connection
    kBadReply,   // not what docs/CONTROL.md says: `error`
    kCancelled,  // the cancel descriptor became readable
  };
  Kind kind = Kind::kClosed;
  Json json;
  std::string error;  // a sentence for every kind but kOk

  bool ok() const { return kind == Kind::kOk; }
};

class ControlClient {
 public:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds kTimeout{10'000};

  ControlClient() = default;
  ~ControlClient();
  ControlClient(ControlClient&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ControlClient& operator=(ControlClient&& other) noexcept;

  // Connects and says that this is a control connection. Refuses a daemon of another user
  // (except root's; root itself may talk to any). Empty = connected, else a sentence.
  std::string Connect(const std::string& path);

  // One request, its complete reply. `descriptor` (or -1) travels with the request; it stays the
  // caller's.
  Reply Request(const Json& request, int descriptor = -1, Milliseconds timeout = kTimeout);

  // The two halves of Request. timeout < 0: wait for ever. cancel_fd: -1 = none; nothing of the
  // reply is lost by a cancel before its first piece.
  Reply Send(const Json& request, int descriptor = -1, Milliseconds timeout = kTimeout);
  Reply Receive(Milliseconds timeout, int cancel_fd = -1);

  // True when the daemon closed the connection within the time.
  bool WaitClosed(Milliseconds timeout);

  // Asks the daemon to end, by a signal to its supervisor if it does not answer, and waits until
  // its supervisor has ended (the engine before it); where that process cannot be seen (another PID
  // namespace), until the connection is closed. Empty = it has ended, else a sentence.
  std::string ShutDown(Milliseconds timeout = kTimeout);

  bool connected() const { return fd_ >= 0; }
  int fd() const { return fd_; }

 private:
  void Close();
  // *silent: the daemon does not answer.
  int OpenSupervisor(bool* silent);

  int fd_ = -1;
};

// Does somebody accept connections at this path? (No word is exchanged.)
bool SomebodyListens(const std::string& path);

// Parent of a process (field 4 of /proc/PID/stat), or 0.
pid_t ParentOf(pid_t pid);

// Fields of a reply: nic_sim/trace/json_fields.h.
using nic::ArrayField;
using nic::Dump;
using nic::IntegerField;
using nic::ObjectField;
using nic::Printable;
using nic::TextField;

}  // namespace verbena::tools
