// SPDX-License-Identifier: Apache-2.0
#include "tests/testing/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

extern char** environ;

namespace verbena::testing {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<std::string> BuildEnvironment(
    const std::map<std::string, std::optional<std::string>>& changes) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    if (!changes.contains(std::string(text.substr(0, text.find('='))))) {
      result.emplace_back(text);
    }
  }
  for (const auto& [name, value] : changes) {
    if (value) result.push_back(name + "=" + *value);
  }
  return result;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

struct Process::State {
  pid_t pid = -1;
  int terminal = -1;
  int stop_pipe[2] = {-1, -1};
  Clock::time_point deadline;
  std::optional<int> status;
  std::mutex mutex;
  std::string output;         // guarded by mutex
  bool output_ended = false;  // guarded by mutex
  std::thread reader;

  // Ends at the end of the terminal's last user or when stop_pipe is closed.
  void ReadAll() {
    char buffer[16384];
    for (;;) {
      pollfd wait[2] = {{terminal, POLLIN, 0}, {stop_pipe[0], POLLIN, 0}};
      if (poll(wait, 2, -1) < 0 && errno != EINTR) break;
      if (wait[0].revents != 0) {
        const ssize_t count = read(terminal, buffer, sizeof(buffer));
        if (count <= 0 && !(count < 0 && errno == EINTR)) break;
        const std::lock_guard lock(mutex);
        if (count > 0) output.append(buffer, static_cast<size_t>(count));
      } else if (wait[1].revents != 0) {
        break;
      }
    }
    const std::lock_guard lock(mutex);
    output_ended = true;
  }

  // Takes the exit status if the process has ended.
  bool Reap() {
    if (status) return true;
    int raw = 0;
    const pid_t got = waitpid(pid, &raw, WNOHANG);
    if (got == 0) return false;
    status = got < 0 ? 127 : WIFEXITED(raw) ? WEXITSTATUS(raw) : 128 + WTERMSIG(raw);
    return true;
  }
};

Process::Process(ProcessOptions options) : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.deadline = Clock::now() + options.limit;
  state.terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (state.terminal < 0 || grantpt(state.terminal) != 0 || unlockpt(state.terminal) != 0) {
    throw std::runtime_error(std::string("no pseudo terminal: ") + strerror(errno));
  }
  char name[128];
  if (ptsname_r(state.terminal, name, sizeof(name)) != 0) {
    throw std::runtime_error("no name of the pseudo terminal");
  }
  const int slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (slave < 0) throw std::runtime_error("cannot open the pseudo terminal");
  termios settings;
  if (tcgetattr(slave, &settings) == 0) {
    settings.c_oflag &= ~static_cast<tcflag_t>(OPOST);  // No carriage returns.
    tcsetattr(slave, TCSANOW, &settings);
  }
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (pipe2(state.stop_pipe, O_CLOEXEC) != 0) throw std::runtime_error("pipe");

  // All that allocates is done before fork: other threads may run.
  std::vector<std::string> environment = BuildEnvironment(options.environment);
  std::vector<char*> environment_pointers = Pointers(environment);
  std::vector<char*> arguments = Pointers(options.argv);
  state.pid = fork();
  if (state.pid < 0) throw std::runtime_error("fork");
  if (state.pid == 0) {
    setsid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    dup2(slave, 1);
    dup2(slave, 2);
    if (options.close_stdin) {
      close(0);
    } else {
      dup2(nothing, 0);
    }
    execvpe(arguments[0], arguments.data(), environment_pointers.data());
    const char text[] = "cannot execute ";
    (void)!write(2, text, sizeof(text) - 1);
    (void)!write(2, arguments[0], strlen(arguments[0]));
    _exit(127);
  }
  close(slave);
  close(nothing);
  state.reader = std::thread([&state] { state.ReadAll(); });
}

Process::~Process() {
  KillGroup();
  State& state = *state_;
  if (!state.status) {
    int raw = 0;
    waitpid(state.pid, &raw, 0);
  }
  close(state.stop_pipe[1]);
  state.reader.join();
  close(state.stop_pipe[0]);
  close(state.terminal);
}

pid_t Process::pid() const { return state_->pid; }

bool Process::Running() { return !state_->Reap(); }

int Process::Wait() {
  State& state = *state_;
  // Polling keeps this free of races between the time limit and the reaping.
  for (Milliseconds pause{1}; !state.Reap();
       pause = std::min(pause + pause / 2 + Milliseconds(1), Milliseconds(20))) {
    if (Clock::now() > state.deadline) {
      KillGroup();
      int raw = 0;
      waitpid(state.pid, &raw, 0);
      state.status = kTimedOut;
      const std::lock_guard lock(state.mutex);
      state.output += "\n[killed at its time limit]\n";
      break;
    }
    std::this_thread::sleep_for(pause);
  }
  // What was printed last may still be in the terminal; a grandchild may hold it open.
  for (int i = 0; i < 100; ++i) {
    {
      const std::lock_guard lock(state.mutex);
      if (state.output_ended) break;
    }
    std::this_thread::sleep_for(Milliseconds(2));
  }
  return *state.status;
}

void Process::Signal(int number) {
  if (!state_->Reap()) kill(state_->pid, number);
}

void Process::KillGroup() {
  // The group may live on without its leader. Its number is not given away while it has a member,
  // and a reaped leader without a group only gives ESRCH.
  if (state_->pid > 1) kill(-state_->pid, SIGKILL);
}

std::string Process::Output() {
  const std::lock_guard lock(state_->mutex);
  return state_->output;
}

bool Process::WaitForOutput(std::string_view text, Milliseconds limit) {
  const auto end = std::min(Clock::now() + limit, state_->deadline);
  for (;;) {
    bool ended = false;
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->output.find(text) != std::string::npos) return true;
      ended = state_->output_ended;
    }
    if (ended || Clock::now() > end) return false;
    std::this_thread::sleep_for(Milliseconds(2));
  }
}

std::optional<std::string> Process::WaitForLine(std::string_view prefix, Milliseconds limit) {
  const auto end = std::min(Clock::now() + limit, state_->deadline);
  for (;;) {
    bool ended = false;
    {
      const std::lock_guard lock(state_->mutex);
      const std::string& output = state_->output;
      for (size_t at = 0; at < output.size();) {
        const size_t newline = output.find('\n', at);
        if (newline == std::string::npos) break;
        if (output.compare(at, prefix.size(), prefix) == 0) {
          return output.substr(at + prefix.size(), newline - at - prefix.size());
        }
        at = newline + 1;
      }
      ended = state_->output_ended;
    }
    if (ended || Clock::now() > end) return std::nullopt;
    std::this_thread::sleep_for(Milliseconds(2));
  }
}

Finished RunProcess(ProcessOptions options) {
  Process process(std::move(options));
  Finished result;
  result.status = process.Wait();
  result.output = process.Output();
  return result;
}

}  // namespace verbena::testing
