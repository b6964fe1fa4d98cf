// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/supervisor/instance_guard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "nic_sim/abi/commands.h"

namespace verbena::nic {
namespace {

std::string ReadPid(int fd) {
  char text[32] = {};
  const ssize_t length = pread(fd, text, sizeof(text) - 1, 0);
  std::string pid(text, length > 0 ? static_cast<size_t>(length) : 0);
  pid.resize(std::min(pid.find_first_not_of("0123456789"), pid.size()));
  return pid.empty() ? "unknown" : pid;
}

}  // namespace

InstancePaths MakeInstancePaths(const std::string& folder, std::string_view name,
                                std::string* error) {
  error->clear();
  InstancePaths paths;
  paths.folder = folder;
  const PathResult socket = SocketPath(folder, name);
  const PathResult pid = PidPath(folder, name);
  *error = socket.ok() ? pid.error : socket.error;
  paths.socket = socket.value;
  paths.pid = pid.value;
  paths.tree = folder + "/" + std::string(name) + abi::kTreeSuffix;
  paths.log = folder + "/" + std::string(name) + ".log";
  return paths;
}

std::string InstanceGuard::Take(const std::string& pid_path, std::string_view name) {
  UniqueFd fd(open(pid_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return fmt::format("cannot open {}: {}", pid_path, std::strerror(errno));
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      return fmt::format("cannot lock {}: {}", pid_path, std::strerror(errno));
    }
    return fmt::format(
        "a daemon named {} is already running (pid {}); end it with `verbena down`, or start "
        "another one with --name",
        name, ReadPid(fd.get()));
  }
  const std::string text = fmt::format("{}\n", getpid());
  if (ftruncate(fd.get(), 0) != 0 ||
      pwrite(fd.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    return fmt::format("cannot write {}: {}", pid_path, std::strerror(errno));
  }
  fd_ = std::move(fd);
  return {};
}

void RemoveInstanceFiles(const InstancePaths& paths) {
  unlink(paths.socket.c_str());
  std::error_code ignored;
  std::filesystem::remove_all(paths.tree, ignored);
}

}  // namespace verbena::nic
