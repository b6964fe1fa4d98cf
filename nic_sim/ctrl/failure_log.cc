// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/failure_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <system_error>
#include <utility>
#include <vector>

#include "nic_sim/trace/explain.h"
#include "nic_sim/trace/failure_events.h"
#include "nic_sim/trace/failure_signal.h"
#include "nic_sim/trace/trace_json.h"

namespace verbena::nic {
namespace {

constexpr int kSettleMs = 100;  // until the peer's side of it is in the trace
constexpr int kPauseMs = 1000;  // between two looks
constexpr int kNice = 10;

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
  for (size_t i = 0; i < hardware_->nic_count(); ++i) {
    devices_.push_back(hardware_->nic_info(i).device);
  }
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

// The events are copied out fast, as they are locked meanwhile; what takes long has time.
void FailureLog::Look() {
  const std::vector<TraceEvent> events = hardware_->TraceEvents();
  const auto explain = [&] {
    for (const FailedQp& one : CollectFailures(events, &seen_ns_)) Tell(one);
  };
  try {
    // A thread of its own, as none gets its priority back.
    std::thread([&] {
      [[maybe_unused]] const int ignored =
          setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNice);
      explain();
      timespec used = {};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
      spdlog::debug("failures of {} events explained in {} us of CPU", events.size(),
                    used.tv_sec * 1'000'000 + used.tv_nsec / 1000);
    }).join();
  } catch (const std::system_error&) {
    explain();
  }
}

void FailureLog::Tell(const FailedQp& failed) {
  nlohmann::json list = nlohmann::json::array();
  for (const TraceEvent& event : failed.events) {
    list.push_back(
        ToJson(event, event.port < devices_.size() ? devices_[event.port] : std::string()));
  }
  const Json events = list;
  const Json rules = hardware_->ListRules();
  const Explanation found = Explain(events, rules, failed.qpn);
  if (found.status.empty()) return;
  const std::string device = failed.port < devices_.size() ? devices_[failed.port] : std::string();
  spdlog::warn("QP {:#08x} of {} failed: {}: {}; see {}", failed.qpn, device, found.status,
               found.what, path_);
  Append(fmt::format("=== {} {}\n{}\n", WallClock(), device, ExplanationText(found, failed.qpn)));
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
