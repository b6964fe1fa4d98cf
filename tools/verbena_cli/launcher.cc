// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/launcher.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>

namespace verbena::tools {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kStartLimit(60);
constexpr std::chrono::seconds kLockLimit(90);
constexpr int kReadyFd = 3;  // in the daemon
constexpr size_t kMaxMessage = 4096;

int MillisecondsLeft(Clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
  return left.count() < 0 ? 0 : static_cast<int>(left.count());
}

// In the child between fork and exec: async-signal-safe calls only.
[[noreturn]] void ExecuteDaemon(char* const* argv, int ready_fd, int error_fd, int null_fd) {
  // First out of the way of 0..3, whatever the caller had closed.
  ready_fd = fcntl(ready_fd, F_DUPFD, 10);
  error_fd = fcntl(error_fd, F_DUPFD, 10);
  null_fd = fcntl(null_fd, F_DUPFD, 10);
  dup2(null_fd, STDIN_FILENO);
  dup2(null_fd, STDOUT_FILENO);
  dup2(error_fd, STDERR_FILENO);
  dup2(ready_fd, kReadyFd);
  // The daemon must not keep the caller's pipes open: their readers wait for the end.
  close_range(kReadyFd + 1, UINT_MAX, 0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  execv(argv[0], argv);
  dprintf(kReadyFd, "cannot execute %s: %s\n", argv[0], strerror(errno));
  _exit(127);
}

// What the daemon writes until it closes the pipe, bounded in time and size.
std::string ReadAnswer(int fd) {
  const Clock::time_point end = Clock::now() + kStartLimit;
  std::string answer;
  while (answer.size() < kMaxMessage && answer.find('\n') == std::string::npos) {
    pollfd descriptor = {fd, POLLIN, 0};
    const int ready = poll(&descriptor, 1, MillisecondsLeft(end));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return fmt::format("verbenad is not ready after {} s", kStartLimit.count());
    char buffer[512];
    const ssize_t length = read(fd, buffer, sizeof(buffer));
    if (length < 0 && errno == EINTR) continue;
    if (length <= 0) break;
    answer.append(buffer, static_cast<size_t>(length));
  }
  return answer.substr(0, answer.find('\n'));
}

std::string ReadErrors(int fd) {
  char buffer[kMaxMessage];
  const off_t size = lseek(fd, 0, SEEK_END);
  const off_t from = size > off_t{kMaxMessage} ? size - off_t{kMaxMessage} : 0;
  const ssize_t length = pread(fd, buffer, sizeof(buffer), from);
  std::string text(buffer, length > 0 ? static_cast<size_t>(length) : 0);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// The child forks and ends once it is in the background; a foreground child of a failed start
// may have to be ended.
std::string Reap(pid_t child, bool ready) {
  const Clock::time_point end = Clock::now() + std::chrono::seconds(5);
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (Clock::now() >= end) {
      if (ready) return {};  // It stays our child: not as agreed, but it runs.
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      break;
    }
    poll(nullptr, 0, 5);
  }
  if (WIFSIGNALED(status)) return fmt::format("it was ended by signal {}", WTERMSIG(status));
  if (WIFEXITED(status)) return fmt::format("it ended with status {}", WEXITSTATUS(status));
  return {};
}

std::string AbsolutePath(const std::string& path) {
  char* real = realpath(path.c_str(), nullptr);
  if (real == nullptr) return path;  // verbenad says what is wrong with it
  std::string result = real;
  free(real);
  return result;
}

}  // namespace

std::vector<std::string> DaemonArguments(const Parts& parts, const DaemonOptions& options) {
  std::vector<std::string> arguments = {parts.daemon, "--name", options.name};
  if (options.nics > 0) arguments.insert(arguments.end(), {"--nics", fmt::to_string(options.nics)});
  if (options.strict) arguments.emplace_back("--strict");
  if (options.telemetry) arguments.emplace_back("--telemetry");
  if (options.system) arguments.emplace_back("--system");
  if (!options.group.empty()) arguments.insert(arguments.end(), {"--group", options.group});
  // The daemon leaves the working folder.
  if (!options.config.empty()) {
    arguments.insert(arguments.end(), {"--config", AbsolutePath(options.config)});
  }
  if (!options.log_level.empty()) {
    arguments.insert(arguments.end(), {"--log-level", options.log_level});
  }
  arguments.insert(arguments.end(), options.nic_arguments.begin(), options.nic_arguments.end());
  if (options.exit_idle_s > 0) {
    arguments.insert(arguments.end(), {"--exit-idle", fmt::to_string(options.exit_idle_s)});
  }
  return arguments;
}

std::string StartDaemon(const Parts& parts, const DaemonOptions& options) {
  if (!parts.missing_daemon.empty()) return parts.missing_daemon;
  std::vector<std::string> arguments = DaemonArguments(parts, options);
  arguments.insert(arguments.end(), {"--ready-fd", fmt::to_string(kReadyFd)});
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);

  int ready[2];
  if (pipe2(ready, O_CLOEXEC) != 0) return fmt::format("no pipe: {}", std::strerror(errno));
  // A file and not a pipe: the daemon may still write to it when this process is gone.
  const int errors = memfd_create("verbenad-stderr", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  const pid_t child = errors >= 0 && null >= 0 ? fork() : -1;
  if (child == 0) ExecuteDaemon(argv.data(), ready[1], errors, null);
  const int fork_errno = errno;
  close(ready[1]);
  if (null >= 0) close(null);

  std::string problem;
  if (child < 0) {
    problem = fmt::format("cannot start verbenad: {}", std::strerror(fork_errno));
  } else {
    const std::string answer = ReadAnswer(ready[0]);
    const bool is_ready = answer == "ready";
    const std::string ending = Reap(child, is_ready);
    if (!is_ready) {
      const std::string said = ReadErrors(errors);
      problem = !answer.empty() ? answer
                : !said.empty() ? said
                                : "verbenad did not start: " + ending;
      if (!answer.empty() && !said.empty() && said.find(answer) == std::string::npos) {
        problem += "\n" + said;
      }
    }
  }
  close(ready[0]);
  if (errors >= 0) {
    fcntl(errors, F_ADD_SEALS, F_SEAL_GROW);  // no memory for a daemon that keeps writing
    close(errors);
  }
  return problem;
}

StartLock::~StartLock() {
  if (fd_ >= 0) close(fd_);
}

std::string StartLock::Take(const std::string& path) {
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd_ < 0) return fmt::format("cannot open {}: {}", path, std::strerror(errno));
  const Clock::time_point end = Clock::now() + kLockLimit;
  while (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return fmt::format("cannot lock {}: {}", path, std::strerror(errno));
    }
    if (Clock::now() >= end) {
      return fmt::format("somebody else has been starting this daemon for {} s (lock {})",
                         kLockLimit.count(), path);
    }
    poll(nullptr, 0, 10);
  }
  return {};
}

}  // namespace verbena::tools
