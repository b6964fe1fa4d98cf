// SPDX-License-Identifier: Apache-2.0
//
// verbenad. Three roles of one program: the command that was typed (puts the daemon into the
// background and waits until it is ready), the supervisor, and the engine process, which the
// supervisor executes with --engine-link.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "nic_sim/engine_process.h"
#include "nic_sim/runtime/run_folder.h"
#include "nic_sim/runtime/self_clean.h"
#include "nic_sim/runtime/service_notify.h"
#include "nic_sim/supervisor/instance_guard.h"
#include "nic_sim/supervisor/options.h"
#include "nic_sim/supervisor/supervisor.h"

namespace verbena::nic {
namespace {

constexpr char kReady[] = "ready\n";

void WriteAll(int fd, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t written = write(fd, text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    done += static_cast<size_t>(written);
  }
}

// One line for whoever started us: into the pipe if there is one, else to stderr. `fd` is closed.
void Report(int fd, const std::string& error) {
  std::string line = error.empty() ? kReady : error + "\n";
  std::replace(line.begin(), line.end() - 1, '\n', ' ');
  if (fd >= 0) {
    WriteAll(fd, line);
    close(fd);
  } else if (!error.empty()) {
    WriteAll(STDERR_FILENO, "verbenad: " + line);
  }
}

// Everything is logged to stderr, which is NAME.log in the background. What must not happen in
// one process must not in the other: both processes start here.
void SetUpProcess(const DaemonOptions& options, const char* role) {
  auto logger = spdlog::stderr_logger_mt("verbenad");
  logger->set_pattern(fmt::format("%Y-%m-%d %H:%M:%S.%e {} %l: %v", role));
  logger->set_level(spdlog::level::from_str(options.log_level));
  spdlog::set_default_logger(logger);
  signal(SIGPIPE, SIG_IGN);  // readers of event pipes may be gone
  signal(SIGHUP, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  for (const int number : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&signals, number);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
}

// In the supervisor's child.
void ExecuteEngine(const DaemonOptions& options, int guard_fd, UniqueFd link) {
  for (const int fd : {guard_fd, link.get()}) fcntl(fd, F_SETFD, 0);
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
  if (length <= 0) return;
  path[length] = '\0';
  std::vector<std::string> arguments = EngineArguments(options, link.get());
  std::vector<char*> argv = {path};
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(path, argv.data());
  execv("/proc/self/exe", argv.data());  // the file was replaced meanwhile
}

// The process that is the daemon to others. `report_fd` as for Report().
int SupervisorMain(const DaemonOptions& options, const InstancePaths& paths, int report_fd) {
  // In the background a service manager would not take this process for the service's.
  const ServiceNotify service;
  SetUpProcess(options, "supervisor");
  InstanceGuard guard;
  if (std::string problem = guard.Take(paths.pid, options.name); !problem.empty()) {
    Report(report_fd, problem);
    return 1;
  }
  // Only now: the log of a daemon that runs stays as it is.
  if (!options.foreground && ftruncate(STDERR_FILENO, 0) != 0) {
    spdlog::warn("cannot empty the log: {}", std::strerror(errno));
  }
  RemoveInstanceFiles(paths);
  SupervisorOptions supervisor;
  supervisor.paths = paths;
  supervisor.guard = &guard;
  supervisor.run_engine = [&](UniqueFd link) {
    ExecuteEngine(options, guard.fd(), std::move(link));
  };
  supervisor.report = [&](const std::string& error) {
    Report(report_fd, error);
    service.Send(error.empty() ? fmt::format("READY=1\nSTATUS=Serving at {}", paths.socket)
                               : "STATUS=" + error.substr(0, error.find('\n')));
  };
  supervisor.stopping = [&] { service.Send("STOPPING=1"); };
  return RunSupervisor(std::move(supervisor));
}

// In the child that goes into the background: a session of its own, no terminal, no descriptor of
// the caller's, stderr into the log.
std::string Detach(const InstancePaths& paths, int report_fd) {
  setsid();
  umask(0077);
  if (chdir("/") != 0) return "cannot change to /";
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  const int log =
      open(paths.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (null < 0) return "cannot open /dev/null";
  if (log < 0) return fmt::format("cannot open {}: {}", paths.log, std::strerror(errno));
  dup2(null, STDIN_FILENO);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  if (report_fd > 3) close_range(3, static_cast<unsigned>(report_fd) - 1, 0);
  close_range(static_cast<unsigned>(report_fd) + 1, UINT_MAX, 0);
  return {};
}

// What the daemon reports about its start, without the end of the line.
std::string ReadReport(int fd) {
  std::string line;
  char buffer[512];
  while (line.find('\n') == std::string::npos) {
    const ssize_t length = read(fd, buffer, sizeof(buffer));
    if (length < 0 && errno == EINTR) continue;
    if (length <= 0) return "the daemon ended before it was ready";
    line.append(buffer, static_cast<size_t>(length));
  }
  return line.substr(0, line.find('\n'));
}

int BackgroundMain(const DaemonOptions& options, const InstancePaths& paths) {
  // Descriptors 0 to 2 may be closed; what we open must not take their place.
  while (true) {
    const int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (fd < 0 || fd > STDERR_FILENO) {
      close(fd);
      break;
    }
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    Report(options.ready_fd, fmt::format("no pipe: {}", std::strerror(errno)));
    return 1;
  }
  const pid_t child = fork();
  if (child < 0) {
    Report(options.ready_fd, fmt::format("cannot fork: {}", std::strerror(errno)));
    return 1;
  }
  if (child == 0) {
    if (std::string problem = Detach(paths, ends[1]); !problem.empty()) {
      Report(ends[1], problem);
      return 1;
    }
    return SupervisorMain(options, paths, ends[1]);
  }
  close(ends[1]);
  const std::string line = ReadReport(ends[0]);
  const bool ready = line + "\n" == kReady;
  // After a failure nothing of the daemon is left when this process ends.
  if (!ready) waitpid(child, nullptr, 0);
  Report(options.ready_fd, ready ? "" : line);
  return ready ? 0 : 1;
}

int Main(int argc, char** argv) {
  const OptionsResult parsed = ParseOptions(argc, argv);
  const DaemonOptions& options = parsed.options;
  if (parsed.done) {
    WriteAll(STDOUT_FILENO, parsed.text);
    return 0;
  }
  InstancePaths paths;
  std::string problem = parsed.failed ? parsed.text : "";
  // Not for the engine process: its reader waits for the end of the pipe.
  if (options.ready_fd >= 0) fcntl(options.ready_fd, F_SETFD, FD_CLOEXEC);
  if (problem.empty()) {
    const PathResult folder = CreateRunFolder(options.system);
    problem = folder.error;
    if (folder.ok()) paths = MakeInstancePaths(folder.value, options.name, &problem);
  }
  if (!problem.empty()) {
    Report(options.ready_fd, problem);
    return 1;
  }
  if (options.engine_link_fd >= 0) {
    SetUpProcess(options, "engine");
    return RunEngineProcess(options, paths);
  }
  if (options.foreground) return SupervisorMain(options, paths, options.ready_fd);
  return BackgroundMain(options, paths);
}

}  // namespace
}  // namespace verbena::nic

int main(int argc, char** argv) {
  verbena::nic::CleanSelf(argv);
  return verbena::nic::Main(argc, argv);
}
