// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/runtime/read_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace verbena::nic {

std::optional<std::string> ReadFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  std::string text;
  char buffer[16384];
  int error = 0;
  while (true) {
    const ssize_t got = read(fd, buffer, sizeof(buffer));
    if (got == 0) break;
    if (got < 0) {
      if (errno == EINTR) continue;
      error = errno;
      break;
    }
    text.append(buffer, static_cast<size_t>(got));
    if (text.size() > kMostFileBytes) {
      error = EFBIG;
      break;
    }
  }
  close(fd);
  errno = error;
  if (error != 0) return std::nullopt;
  return text;
}

}  // namespace verbena::nic
