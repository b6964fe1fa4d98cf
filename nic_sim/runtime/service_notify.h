// SPDX-License-Identifier: Apache-2.0
//
// What a service manager (systemd, Type=notify) is told: a datagram of NAME=VALUE lines to the
// socket that $NOTIFY_SOCKET names, a path or, with '@' in front, an abstract name.
#pragma once

#include <string>
#include <string_view>

namespace verbena::nic {

class ServiceNotify {
 public:
  // Takes the socket's name out of the environment, so that no child speaks for this process.
  // Call it before threads and children exist.
  ServiceNotify();

  // Sends `state`, for example "READY=1". False when nobody asked for it or it cannot be sent;
  // never blocks for long and never fails the caller.
  bool Send(std::string_view state) const;

 private:
  std::string socket_;
};

}  // namespace verbena::nic
