// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/supervisor/supervisor.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "nic_sim/supervisor/death_notices.h"
#include "nic_sim/supervisor/link.h"

namespace verbena::nic {
namespace {

using Clock = std::chrono::steady_clock;

class Supervisor {
 public:
  explicit Supervisor(SupervisorOptions options) : options_(std::move(options)) {}

  int Run() {
    if (std::string problem = Start(); !problem.empty()) {
      Report(problem);
      return 1;
    }
    while (!ended_) Step();
    return Finish();
  }

 private:
  std::string Start() {
    sigset_t signals;
    sigemptyset(&signals);
    for (const int signal : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&signals, signal);
    signals_.reset(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
    int pair[2];
    if (!signals_.valid() || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
      return fmt::format("cannot start the engine process: {}", std::strerror(errno));
    }
    link_.reset(pair[0]);
    UniqueFd child_end(pair[1]);
    engine_ = fork();
    if (engine_ < 0) return fmt::format("cannot fork: {}", std::strerror(errno));
    if (engine_ == 0) {
      link_.reset();
      options_.run_engine(std::move(child_end));
      _exit(127);
    }
    return {};
  }

  void Step() {
    pollfd fds[2] = {{signals_.get(), POLLIN, 0}, {link_.get(), POLLIN, 0}};
    if (poll(fds, 2, MillisecondsToKill()) < 0 && errno != EINTR) {
      spdlog::error("poll: {}", std::strerror(errno));
    }
    if (fds[1].revents != 0) ReadLink();
    if (fds[0].revents != 0) ReadSignals();
    if (stopping_ && !ended_ && !killed_ && Clock::now() >= kill_at_) {
      spdlog::error("the engine process did not end in {} s, killing it", options_.stop_seconds);
      kill(engine_, SIGKILL);
      killed_ = true;
    }
  }

  int MillisecondsToKill() const {
    if (!stopping_ || killed_) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(kill_at_ - Clock::now()).count();
    return left < 0 ? 0 : static_cast<int>(left);
  }

  void ReadLink() {
    for (;;) {
      LinkMessage message;
      ReceivedMessage got =
          ReceiveMessage(link_.get(), std::as_writable_bytes(std::span(&message, 1)));
      if (got.kind == ReceivedMessage::Kind::kNothing) return;
      if (got.kind == ReceivedMessage::Kind::kClosed) {
        link_.reset();  // poll() skips it; the end of the process comes as SIGCHLD
        return;
      }
      if (got.bytes != sizeof(message)) continue;
      message.text[sizeof(message.text) - 1] = '\0';
      Handle(message, got.fds.empty() ? UniqueFd() : std::move(got.fds.front()));
    }
  }

  void Handle(const LinkMessage& message, UniqueFd fd) {
    switch (message.kind) {
      case LinkKind::kReady:
        notices_.Apply(message, std::move(fd));
        Report({});
        return;
      case LinkKind::kFailed:
        failure_ = message.text;
        return;
      case LinkKind::kStopping:
        notices_.Announce();
        return;
      case LinkKind::kHold:
        held_.push_back(std::move(fd));
        return;
      default:
        notices_.Apply(message, std::move(fd));
        return;
    }
  }

  void ReadSignals() {
    signalfd_siginfo info = {};
    while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
      if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT) Stop();
    }
    if (waitpid(engine_, &status_, WNOHANG) == engine_) ended_ = true;
  }

  void Stop() {
    if (std::exchange(stopping_, true)) return;
    spdlog::info("ending");
    if (options_.stopping) options_.stopping();
    kill_at_ = Clock::now() + std::chrono::seconds(options_.stop_seconds);
    LinkMessage message;
    message.kind = LinkKind::kStop;
    if (!link_.valid() || SendMessage(link_.get(), BytesOf(message)) != 0) kill(engine_, SIGTERM);
  }

  std::string HowItEnded() const {
    if (WIFSIGNALED(status_)) {
      return fmt::format("the engine process (pid {}) was ended by signal {} ({})", engine_,
                         WTERMSIG(status_), strsignal(WTERMSIG(status_)));
    }
    return fmt::format("the engine process (pid {}) ended with status {}", engine_,
                       WEXITSTATUS(status_));
  }

  // The engine is gone: what it said last, then what applications must know.
  int Finish() {
    if (link_.valid()) ReadLink();
    notices_.Announce();
    const bool clean = WIFEXITED(status_) && WEXITSTATUS(status_) == 0;
    if (!clean && failure_.empty()) {
      spdlog::error("{}; {} contexts told", HowItEnded(), notices_.context_count());
    }
    RemoveInstanceFiles(options_.paths);
    if (!reported_) Report(!failure_.empty() ? failure_ : HowItEnded());
    if (options_.guard != nullptr) options_.guard->Release();
    held_.clear();
    return clean ? 0 : 1;
  }

  void Report(const std::string& error) {
    if (!std::exchange(reported_, true)) options_.report(error);
  }

  SupervisorOptions options_;
  UniqueFd signals_;
  UniqueFd link_;
  pid_t engine_ = -1;
  int status_ = 0;
  bool ended_ = false;
  bool stopping_ = false;
  bool killed_ = false;
  bool reported_ = false;
  Clock::time_point kill_at_;
  std::string failure_;
  DeathNotices notices_;
  std::vector<UniqueFd> held_;
};

}  // namespace

int RunSupervisor(SupervisorOptions options) { return Supervisor(std::move(options)).Run(); }

}  // namespace verbena::nic
