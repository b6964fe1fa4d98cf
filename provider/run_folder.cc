// SPDX-License-Identifier: Apache-2.0
#include "provider/run_folder.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace verbena::provider {
namespace {

bool StatPath(const char* path, int flags, struct stat* status) {
  return syscall(SYS_newfstatat, AT_FDCWD, path, status, flags) == 0;
}

// Appends `part`; false if it does not fit.
bool Append(char* text, size_t size, const char* part) {
  const size_t used = strlen(text);
  const size_t more = strlen(part);
  if (used + more >= size) return false;
  memcpy(text + used, part, more + 1);
  return true;
}

bool AppendNumber(char* text, size_t size, unsigned number) {
  char digits[12];
  char* start = digits + sizeof(digits) - 1;
  *start = '\0';
  do {
    *--start = static_cast<char>('0' + number % 10);
    number /= 10;
  } while (number != 0);
  return Append(text, size, start);
}

const char* InstanceName() {
  const char* name = secure_getenv("VERBENA_NAME");
  if (name == nullptr || *name == '\0') return "default";
  return strchr(name, '/') == nullptr ? name : nullptr;
}

bool SocketIn(const char* folder, const char* name, SocketPath* path) {
  path->text[0] = '\0';
  return Append(path->text, sizeof(path->text), folder) &&
         Append(path->text, sizeof(path->text), "/") &&
         Append(path->text, sizeof(path->text), name) &&
         Append(path->text, sizeof(path->text), ".sock");
}

}  // namespace

bool IsPrivateFolder(const char* path, unsigned uid) {
  struct stat status;
  return StatPath(path, AT_SYMLINK_NOFOLLOW, &status) && S_ISDIR(status.st_mode) &&
         status.st_uid == uid && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

bool OwnRunFolder(char* text, size_t size) {
  text[0] = '\0';
  const char* base = secure_getenv("XDG_RUNTIME_DIR");
  struct stat status;
  if (base != nullptr && *base == '/' && StatPath(base, 0, &status) && S_ISDIR(status.st_mode) &&
      status.st_uid == geteuid()) {
    return Append(text, size, base) && Append(text, size, "/verbena");
  }
  return Append(text, size, "/tmp/verbena-") && AppendNumber(text, size, geteuid());
}

int FindSocketPaths(SocketPath paths[kMaxSocketPaths]) {
  const char* fixed = secure_getenv("VERBENA_SOCKET");
  if (fixed != nullptr && *fixed != '\0') {
    paths[0].text[0] = '\0';
    return Append(paths[0].text, sizeof(paths[0].text), fixed) ? 1 : 0;
  }
  const char* name = InstanceName();
  if (name == nullptr) return 0;
  int count = 0;
  char folder[sizeof(sockaddr_un::sun_path)];
  if (OwnRunFolder(folder, sizeof(folder)) && IsPrivateFolder(folder, geteuid()) &&
      SocketIn(folder, name, &paths[count])) {
    ++count;
  }
  if (IsPrivateFolder("/run/verbena", 0) && SocketIn("/run/verbena", name, &paths[count])) {
    ++count;
  }
  return count;
}

int KeepOffStandardFds(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int moved = static_cast<int>(syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  const int error = errno;
  syscall(SYS_close, fd);
  return moved < 0 ? -error : moved;
}

int ConnectTo(const SocketPath& path) {
  int fd = static_cast<int>(syscall(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  fd = KeepOffStandardFds(fd < 0 ? -errno : fd);
  if (fd < 0) return fd;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.text, sizeof(address.sun_path));
  // A unix socket's connect() waits only for room in the backlog; EINTR leaves
  // it as it was.
  while (syscall(SYS_connect, fd, &address, sizeof(address)) != 0) {
    if (errno == EINTR) continue;
    const int error = errno;
    syscall(SYS_close, fd);
    return -error;
  }
  return fd;
}

}  // namespace verbena::provider
