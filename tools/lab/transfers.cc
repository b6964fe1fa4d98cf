// SPDX-License-Identifier: Apache-2.0
#include "tools/lab/transfers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "tools/verbena_cli/environment.h"

namespace verbena::tools {
namespace {

constexpr std::chrono::milliseconds kPause(50);
constexpr size_t kKeptOutput = 4096;
constexpr uint32_t kMostBytes = 1 << 20;
constexpr uint32_t kMostMessages = 1'000'000;
constexpr uint32_t kLongestPauseMs = 10'000;
// Of a QP: 4.096 us * 2^24 = 69 s.
constexpr char kTimeoutWhenHeld[] = "24";
// Ends that were asked to end are killed after this long.
constexpr std::chrono::milliseconds kPatience(1000);

const TransferKind* Find(std::string_view kind) {
  const auto* found = std::ranges::find(kTransfers, kind, &TransferKind::kind);
  return found == std::end(kTransfers) ? nullptr : found;
}

// A TCP port that is free now; 0: none.
int FreePort(const std::string& address) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return 0;
  sockaddr_in name{};
  name.sin_family = AF_INET;
  inet_pton(AF_INET, address.c_str(), &name.sin_addr);
  socklen_t length = sizeof(name);
  const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&name), length) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) == 0;
  close(fd);
  return bound ? ntohs(name.sin_port) : 0;
}

// `words` in a child whose output is a pipe. -1: errno says why.
pid_t Spawn(const std::vector<std::string>& words, const std::vector<std::string>& environment,
            int* output) {
  int pipe_ends[2];
  if (pipe2(pipe_ends, O_CLOEXEC) != 0) return -1;
  std::vector<char*> argv, envp;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  for (const std::string& entry : environment) envp.push_back(const_cast<char*>(entry.c_str()));
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    // Only what is safe after fork in a process of several threads.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    signal(SIGPIPE, SIG_DFL);
    const int null = open("/dev/null", O_RDONLY);
    dup2(null, 0);
    dup2(pipe_ends[1], 1);
    dup2(pipe_ends[1], 2);
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  const int error = errno;
  close(pipe_ends[1]);
  if (pid < 0) {
    close(pipe_ends[0]);
    errno = error;
    return -1;
  }
  fcntl(pipe_ends[0], F_SETFL, O_NONBLOCK);
  *output = pipe_ends[0];
  return pid;
}

}  // namespace

Transfers::Transfers(Parts parts, std::string socket, std::string folder)
    : parts_(std::move(parts)),
      socket_(std::move(socket)),
      folder_(std::move(folder)),
      thread_([this] { Run(); }) {}

Transfers::~Transfers() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

std::string Transfers::Start(std::vector<TransferRequest> requests, bool repeat) {
  if (requests.empty()) return "no transfer was named";
  for (const TransferRequest& request : requests) {
    const TransferKind* kind = Find(request.kind);
    if (kind == nullptr) return "no such transfer";
    const std::string program = fmt::format("{}/{}", folder_, kind->program);
    if (access(program.c_str(), X_OK) != 0) {
      return fmt::format("{} is missing; build it: bazel build //docs/labs/examples:all", program);
    }
    if (request.size < 1 || request.size > kMostBytes) {
      return fmt::format("a message has 1 to {} bytes", kMostBytes);
    }
    if (request.count > kMostMessages) return fmt::format("at most {} messages", kMostMessages);
    if (request.pause_ms > kLongestPauseMs) {
      return fmt::format("a pause has at most {} ms", kLongestPauseMs);
    }
  }
  const std::lock_guard lock(mutex_);
  wanted_ = std::move(requests);
  repeat_ = repeat;
  ++generation_;
  changed_.notify_all();
  return {};
}

void Transfers::Stop() {
  const std::lock_guard lock(mutex_);
  wanted_.clear();
  ++generation_;
  changed_.notify_all();
}

Json Transfers::Describe() const {
  const std::lock_guard lock(mutex_);
  Json pids = Json::array();
  for (const End& end : ends_) {
    if (end.pid > 0) pids.push_back(end.pid);
  }
  return {{"running", !kind_.empty()},
          {"kind", kind_},
          {"pids", std::move(pids)},
          {"output", output_},
          {"result", result_}};
}

std::string Transfers::Begin(const TransferRequest& request) {
  ControlClient client;
  if (std::string problem = client.Connect(socket_); !problem.empty()) return problem;
  const Reply status = client.Request({{"op", "status"}});
  const Json& nics = ArrayField(status.json, "nics");
  if (nics.empty()) return "the daemon has no NIC";
  const std::string address = TextField(nics[0], "ipv4");
  const int port = FreePort(address);
  // Packets that somebody holds must not be sent again meanwhile.
  const Reply rules = client.Request({{"op", "fault_list"}});
  const bool held = std::ranges::any_of(ArrayField(rules.json, "rules"), [](const Json& rule) {
    return TextField(rule, "rule").starts_with("hold");
  });
  if (port == 0) return fmt::format("no TCP port is free at {}", address);

  std::string problem;
  const Variables variables = ApplicationEnvironment(parts_, socket_, &problem);
  if (!problem.empty()) return problem;
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const bool replaced = std::ranges::any_of(variables, [&](const auto& variable) {
      return text.starts_with(variable.first) && text[variable.first.size()] == '=';
    });
    if (!replaced) environment.emplace_back(text);
  }
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);

  const std::string program = fmt::format("{}/{}", folder_, Find(request.kind)->program);
  for (size_t i = 0; i < ends_.size(); ++i) {
    const std::string device = TextField(nics[std::min(i, nics.size() - 1)], "device");
    std::vector<std::string> words = {program,
                                      "-d",
                                      device,
                                      "-p",
                                      std::to_string(port),
                                      "-s",
                                      std::to_string(request.size),
                                      "-n",
                                      std::to_string(request.count),
                                      "-i",
                                      std::to_string(request.pause_ms)};
    if (held) words.insert(words.end(), {"-t", kTimeoutWhenHeld});
    if (i == 1) words.push_back(address);
    End end;
    end.pid = Spawn(words, environment, &end.output);
    if (end.pid < 0) return fmt::format("cannot start {}: {}", program, std::strerror(errno));
    const std::lock_guard lock(mutex_);
    ends_[i] = end;
  }
  return {};
}

void Transfers::Read(End* end) {
  if (end->output < 0) return;
  char text[1024];
  ssize_t got;
  while ((got = read(end->output, text, sizeof(text))) > 0) {
    output_.append(text, static_cast<size_t>(got));
  }
  if (got == 0) {
    close(end->output);
    end->output = -1;
  }
  if (output_.size() > kKeptOutput) output_.erase(0, output_.size() - kKeptOutput);
}

bool Transfers::Reap() {
  const std::lock_guard lock(mutex_);
  bool running = false;
  for (End& end : ends_) {
    Read(&end);
    if (end.pid < 0) continue;
    int status = 0;
    if (waitpid(end.pid, &status, WNOHANG) == 0) {
      running = true;
      continue;
    }
    end.pid = -1;
    Read(&end);
    if (end.output >= 0) close(end.output);
    end.output = -1;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code != 0 && result_.empty()) result_ = fmt::format("an end has failed (status {})", code);
  }
  return !running;
}

void Transfers::Kill() {
  for (const int signal : {SIGTERM, SIGKILL}) {
    for (const End& end : ends_) {
      if (end.pid > 0) kill(end.pid, signal);
    }
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!Reap() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
}

void Transfers::Run() {
  std::unique_lock lock(mutex_);
  uint64_t seen = 0;
  size_t next = 0;
  bool running = false;
  while (true) {
    if (ended_ || seen != generation_) {
      seen = generation_;
      next = 0;
      lock.unlock();
      if (running) Kill();
      lock.lock();
      running = false;
      kind_.clear();
      result_.clear();
      if (ended_) return;
      continue;  // the generation may have changed meanwhile
    }
    if (!running && next < wanted_.size()) {
      const TransferRequest request = wanted_[next++];
      if (repeat_) next %= wanted_.size();
      kind_ = request.kind;
      output_.clear();
      result_.clear();
      lock.unlock();
      const std::string problem = Begin(request);
      if (!problem.empty()) Kill();
      lock.lock();
      running = problem.empty();
      if (!running) {
        result_ = problem;
        kind_.clear();
        next = wanted_.size();
      }
      continue;
    }
    if (running) {
      lock.unlock();
      const bool over = Reap();
      lock.lock();
      if (over) {
        running = false;
        kind_.clear();
        if (!result_.empty()) {
          // The demo goes on, after a moment; others do not repeat what fails.
          if (!repeat_) next = wanted_.size();
          changed_.wait_for(lock, kPatience);
        }
        continue;
      }
      changed_.wait_for(lock, kPause);
    } else {
      changed_.wait(lock);
    }
  }
}

}  // namespace verbena::tools
