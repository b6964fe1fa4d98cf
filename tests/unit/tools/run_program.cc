// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/tools/run_program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cassert>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace verbena::tools {

ScratchFolder::ScratchFolder() {
  char name[] = "/tmp/vtest.XXXXXX";
  [[maybe_unused]] const char* made = mkdtemp(name);
  assert(made != nullptr);
  path_ = name;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

RunningProgram::RunningProgram(const std::vector<std::string>& command,
                               const std::map<std::string, std::string>& environment) {
  std::vector<std::string> variables;
  for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
  std::vector<char*> argv;
  std::vector<char*> envp;
  for (const auto& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  for (auto& variable : variables) envp.push_back(variable.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  int out[2];
  int err[2];
  [[maybe_unused]] const bool piped = pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0;
  assert(piped);
  pid_ = fork();
  if (pid_ == 0) {
    const int null = open("/dev/null", O_RDONLY);
    dup2(null, 0);
    dup2(out[1], 1);
    dup2(err[1], 2);
    execvpe(argv[0], argv.data(), envp.data());
    _exit(99);
  }
  close(out[1]);
  close(err[1]);
  out_ = out[0];
  err_ = err[0];
}

ProgramResult RunningProgram::Wait(int seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  ProgramResult result;
  pollfd fds[2] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
  // Until both pipes are closed: a daemon that keeps them open would hang a reader, too.
  while (fds[0].fd >= 0 || fds[1].fd >= 0) {
    if (Clock::now() > end) {
      result.late = true;
      kill(pid_, SIGKILL);
      break;
    }
    poll(fds, 2, 50);
    for (pollfd& descriptor : fds) {
      if (descriptor.fd < 0 || descriptor.revents == 0) continue;
      char buffer[4096];
      const ssize_t length = read(descriptor.fd, buffer, sizeof(buffer));
      if (length > 0) {
        (descriptor.fd == out_ ? result.out : result.err)
            .append(buffer, static_cast<size_t>(length));
      } else {
        descriptor.fd = -1;
      }
    }
  }
  close(out_);
  close(err_);
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    if (Clock::now() > end) {
      result.late = true;
      kill(pid_, SIGKILL);
    }
    usleep(2000);
  }
  if (WIFEXITED(status)) result.status = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  return result;
}

std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace verbena::tools
