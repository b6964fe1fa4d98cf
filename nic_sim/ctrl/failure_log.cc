// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/failure_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "nic_sim/trace/explain.h"
#include "nic_sim/trace/failure_signal.h"

namespace verbena::nic {
namespace {

constexpr int kSettleMs = 100;  // until the peer's side of it is in the trace
constexpr int kPauseMs = 1000;  // between two looks
constexpr size_t kMostQps = 8;  // of one look
constexpr size_t kMostEvents = 100'000;

bool IsFailure(const Json& event) {
  if (TextField(event, "event") == "completion") {
    const std::string status = TextField(event, "status");
    return status != "SUCCESS" && status != "WR_FLUSH_ERR";
  }
  const std::string type = TextField(event, "type");
  return TextField(event, "event") == "async_event" &&
         (type == "QP_FATAL" || type == "QP_REQ_ERR" || type == "QP_ACCESS_ERR");
}

std::string WallClock() {
  const time_t now = time(nullptr);
  tm parts;
  char text[32];
  localtime_r(&now, &parts);
  return std::string(text, strftime(text, sizeof(text), "%F %T", &parts));
}

}  // namespace

FailureLog::FailureLog(Hardware* hardware, std::string path)
    : hardware_(hardware), path_(std::move(path)) {
  unlink(path_.c_str());
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0 || stop_fd_ < 0) return;
  thread_ = std::thread([this] { Run(); });
  FailureSignal::Listen(wake_fd_);
}

FailureLog::~FailureLog() {
  FailureSignal::Listen(-1);
  if (thread_.joinable()) {
    eventfd_write(stop_fd_, 1);
    thread_.join();
  }
  // wake_fd_ stays open: an engine thread may have read its number just before.
  if (stop_fd_ >= 0) close(stop_fd_);
  unlink(path_.c_str());
}

void FailureLog::Run() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  pthread_setname_np(pthread_self(), "failures");
  pollfd descriptors[] = {{stop_fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
  while (true) {
    if (poll(descriptors, 2, -1) < 0) continue;
    if (descriptors[0].revents != 0) return;
    if (poll(descriptors, 1, kSettleMs) > 0) return;
    eventfd_t count;
    eventfd_read(wake_fd_, &count);
    Look();
    if (poll(descriptors, 1, kPauseMs) > 0) return;
  }
}

void FailureLog::Look() {
  const Json trace = hardware_->Trace({}, 0, kMostEvents);
  const Json rules = hardware_->ListRules();
  const auto events = trace.find("events");
  if (events == trace.end() || !events->is_array()) return;
  // Of each QP the first failure that is new: what came later followed from it.
  std::vector<std::pair<uint32_t, std::string>> failed;
  int64_t last_ns = seen_ns_;
  for (const Json& event : *events) {
    const int64_t time_ns = IntegerField(event, "time_ns");
    if (time_ns <= seen_ns_ || !IsFailure(event)) continue;
    last_ns = std::max(last_ns, time_ns);
    const auto qpn = static_cast<uint32_t>(IntegerField(event, "qpn"));
    const bool known = std::any_of(failed.begin(), failed.end(),
                                   [&](const auto& one) { return one.first == qpn; });
    if (!known && failed.size() < kMostQps) failed.emplace_back(qpn, TextField(event, "device"));
  }
  seen_ns_ = last_ns;
  for (const auto& [qpn, device] : failed) {
    const Explanation found = Explain(*events, rules, qpn);
    if (found.status.empty()) continue;
    spdlog::warn("QP {:#08x} of {} failed: {}: {}; see {}", qpn, device, found.status, found.what,
                 path_);
    Append(fmt::format("=== {} {}\n{}\n", WallClock(), device, ExplanationText(found, qpn)));
  }
}

void FailureLog::Append(const std::string& text) {
  kept_ += text.substr(0, kMostBytes);
  if (kept_.size() > kMostBytes) {
    const size_t next = kept_.find("\n=== ", kept_.size() - kMostBytes);
    kept_.erase(0, next == std::string::npos ? kept_.size() - kMostBytes : next + 1);
  }
  const std::string fresh = path_ + ".new";
  const int fd = open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return;
  const bool whole = write(fd, kept_.data(), kept_.size()) == static_cast<ssize_t>(kept_.size());
  close(fd);
  if (!whole || rename(fresh.c_str(), path_.c_str()) != 0) unlink(fresh.c_str());
}

}  // namespace verbena::nic
