// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/supervisor/instance_guard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "nic_sim/abi/commands.h"

namespace verbena::nic {
namespace {

constexpr int kWaitStepMs = 10;
constexpr int kLongestWaitMs = 5000;

// 0: unknown.
pid_t ReadPid(int fd) {
  char text[32] = {};
  if (pread(fd, text, sizeof(text) - 1, 0) <= 0) return 0;
  const long pid = std::strtol(text, nullptr, 10);
  return pid > 0 ? static_cast<pid_t>(pid) : 0;
}

// A daemon whose first process has ended is on its way out: it gets a moment.
int Lock(int fd) {
  for (int waited_ms = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; waited_ms += kWaitStepMs) {
    if (errno != EWOULDBLOCK) return errno;
    const pid_t pid = ReadPid(fd);
    const bool ending = pid > 0 && kill(pid, 0) != 0 && errno == ESRCH;
    if (!ending || waited_ms >= kLongestWaitMs) return EWOULDBLOCK;
    usleep(kWaitStepMs * 1000);
  }
  return 0;
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
  paths.eal = folder + "/dpdk/verbena-" + std::string(name);
  return paths;
}

std::string InstanceGuard::Take(const std::string& pid_path, std::string_view name) {
  UniqueFd fd(open(pid_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return fmt::format("cannot open {}: {}", pid_path, std::strerror(errno));
  const int error = Lock(fd.get());
  if (error != 0 && error != EWOULDBLOCK) {
    return fmt::format("cannot lock {}: {}", pid_path, std::strerror(error));
  }
  if (error != 0) {
    return fmt::format(
        "a daemon named {} is already running (pid {}); end it with `verbena down{}`, or start "
        "another one with --name",
        name, ReadPid(fd.get()), name == kDefaultInstance ? "" : fmt::format(" --name {}", name));
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
  std::filesystem::remove_all(paths.eal, ignored);
  rmdir((paths.folder + "/dpdk").c_str());  // of the last one
}

}  // namespace verbena::nic
