// SPDX-License-Identifier: Apache-2.0
#include "provider/preload/daemon_connection.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "provider/preload/daemon_tree.h"

namespace verbena::provider {
namespace {

constexpr size_t kDigits = 16;

socklen_t AddressBytes(size_t prefix_bytes) {
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + prefix_bytes + kDigits);
}

}  // namespace

int BindName(int fd, const char* prefix) {
  const size_t prefix_bytes = strlen(prefix);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path + 1, prefix, prefix_bytes);
  for (int attempt = 0; attempt < 8; ++attempt) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof(number), 0) != sizeof(number)) return EAGAIN;
    for (size_t i = 0; i < kDigits; ++i, number >>= 4) {
      address.sun_path[1 + prefix_bytes + i] = "0123456789abcdef"[number & 15];
    }
    if (syscall(SYS_bind, fd, &address, AddressBytes(prefix_bytes)) == 0) return 0;
    if (errno != EADDRINUSE) return errno;
  }
  return EADDRINUSE;
}

bool HasName(int fd, const char* prefix) {
  const size_t prefix_bytes = strlen(prefix);
  sockaddr_un address;
  socklen_t size = sizeof(address);
  const int before = errno;
  const bool named = syscall(SYS_getsockname, fd, &address, &size) == 0;
  errno = before;
  return named && size == AddressBytes(prefix_bytes) && address.sun_family == AF_UNIX &&
         address.sun_path[0] == '\0' && memcmp(address.sun_path + 1, prefix, prefix_bytes) == 0;
}

int ConnectToDaemon(int fd) {
  SocketPath path;
  if (!FindDaemon(&path)) return ENODEV;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.text, sizeof(address.sun_path));
  while (syscall(SYS_connect, fd, &address, sizeof(address)) != 0) {
    if (errno != EINTR) return ENODEV;
  }
  return 0;
}

}  // namespace verbena::provider
