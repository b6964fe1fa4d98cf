// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/scenario/scenario_program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <regex>
#include <sstream>

extern char** environ;

namespace verbena::tools {
namespace {

constexpr size_t kLongestLine = 4000;

// Both ends; the slave does not turn \n into \r\n.
bool OpenTerminal(int* master, int* slave) {
  *master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (*master < 0) return false;
  char name[PATH_MAX];
  if (grantpt(*master) == 0 && unlockpt(*master) == 0 &&
      ptsname_r(*master, name, sizeof(name)) == 0) {
    *slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    termios settings;
    if (*slave >= 0 && tcgetattr(*slave, &settings) == 0) {
      settings.c_oflag &= ~static_cast<tcflag_t>(OPOST);
      settings.c_lflag &= ~static_cast<tcflag_t>(ECHO);
      tcsetattr(*slave, TCSANOW, &settings);
      fcntl(*master, F_SETFL, O_NONBLOCK);
      return true;
    }
    if (*slave >= 0) close(*slave);
  }
  close(*master);
  *master = -1;
  return false;
}

// In the child: async-signal-safe calls only.
[[noreturn]] void Execute(char* const* argv, char* const* envp, int slave, pid_t parent) {
  setsid();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, STDIN_FILENO);
  dup2(slave, STDOUT_FILENO);
  dup2(slave, STDERR_FILENO);
  close_range(3, UINT_MAX, 0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  execvpe(argv[0], argv, envp);
  dprintf(STDERR_FILENO, "cannot execute %s: %s\n", argv[0], strerror(errno));
  _exit(127);
}

}  // namespace

std::string ScenarioProgram::Missing(const std::vector<std::string>& command) {
  const std::string& name = command.front();
  const auto is_program = [](const std::string& path) {
    struct stat status;
    return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
           access(path.c_str(), X_OK) == 0;
  };
  if (name.find('/') != std::string::npos) {
    return is_program(name) ? "" : fmt::format("{} cannot be executed", name);
  }
  const char* path = getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "/bin:/usr/bin");
  std::string folder;
  while (std::getline(folders, folder, ':')) {
    if (is_program((folder.empty() ? "." : folder) + "/" + name)) return "";
  }
  return fmt::format("{} is not installed: in no folder of PATH", name);
}

ScenarioProgram::~ScenarioProgram() {
  Kill();
  if (terminal_ >= 0) close(terminal_);
}

std::string ScenarioProgram::Start(const std::vector<std::string>& command,
                                   const Variables& environment) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  std::vector<std::string> variables;
  for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string name(*each, std::strcspn(*each, "="));
    bool ours = false;
    for (const auto& [other, value] : environment) ours |= other == name;
    if (!ours) variables.emplace_back(*each);
  }
  std::vector<char*> envp;
  for (std::string& variable : variables) envp.push_back(variable.data());
  envp.push_back(nullptr);

  int slave = -1;
  if (!OpenTerminal(&terminal_, &slave)) {
    return fmt::format("no pseudo terminal: {}", std::strerror(errno));
  }
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) Execute(argv.data(), envp.data(), slave, parent);
  const int error = errno;
  close(slave);
  begin_ = Clock::now();
  return pid_ > 0 ? std::string() : fmt::format("cannot fork: {}", std::strerror(error));
}

void ScenarioProgram::Read() {
  char buffer[8192];
  // Bounded: a program that prints for ever must not keep us here.
  for (int i = 0; i < 64; ++i) {
    const ssize_t length = read(terminal_, buffer, sizeof(buffer));
    if (length <= 0) return;
    const size_t room = kMostOutput - std::min(kMostOutput, output_.size());
    output_.append(buffer, std::min(room, static_cast<size_t>(length)));
  }
}

void ScenarioProgram::Look() {
  if (!running()) return;
  Read();
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return;
  end_ = Clock::now();
  status_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  Read();
  // What it has left behind belongs to the scenario as well.
  kill(-pid_, SIGKILL);
}

void ScenarioProgram::Signal(int number) const {
  // It has no group of its own until it comes to setsid().
  if (running() && kill(-pid_, number) != 0) kill(pid_, number);
}

void ScenarioProgram::Kill() {
  if (!running()) return;
  Signal(SIGKILL);
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  end_ = Clock::now();
  status_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  Read();
}

double ScenarioProgram::seconds() const {
  if (!started()) return 0;
  const Clock::time_point end = status_ ? end_ : Clock::now();
  return std::chrono::duration<double>(end - begin_).count();
}

bool ScenarioProgram::HasLine(const std::string& output, const std::string& pattern) {
  const std::regex expression(pattern);
  for (size_t at = 0; at <= output.size();) {
    const size_t end = std::min(output.find('\n', at), output.size());
    const std::string line = output.substr(at, std::min(end - at, kLongestLine));
    if (std::regex_search(line, expression)) return true;
    at = end + 1;
  }
  return false;
}

}  // namespace verbena::tools
