// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/runtime/service_notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace verbena::nic {

ServiceNotify::ServiceNotify() {
  if (const char* name = secure_getenv("NOTIFY_SOCKET")) socket_ = name;
  unsetenv("NOTIFY_SOCKET");
}

bool ServiceNotify::Send(std::string_view state) const {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (socket_.size() < 2 || socket_.size() > sizeof(address.sun_path)) return false;
  if (socket_[0] != '/' && socket_[0] != '@') return false;
  // An abstract name is not terminated; a path of full length need not be.
  std::memcpy(address.sun_path, socket_.data(), socket_.size());
  if (socket_[0] == '@') address.sun_path[0] = '\0';
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket_.size());
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  const ssize_t sent = sendto(fd, state.data(), state.size(), MSG_NOSIGNAL,
                              reinterpret_cast<const sockaddr*>(&address), length);
  close(fd);
  return sent == static_cast<ssize_t>(state.size());
}

}  // namespace verbena::nic
