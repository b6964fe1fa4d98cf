// SPDX-License-Identifier: Apache-2.0
//
// The threads of a shard: start, run, sleep and wake. The protocol that loses no
// wake-up is described at abi::WakePage.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rte_mbuf.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "nic_sim/engine/shard.h"
#include "nic_sim/env/dpdk_env.h"
#include "nic_sim/queues/doorbells.h"

namespace verbena::nic {

using transport::Duration;
using transport::Time;

namespace {

// How often idle netdevs are asked for their state, in ms.
constexpr int kLinkInterval = 500;

// On scarce CPUs: how long a thread looks for more after a pass that found work
// for several queues or WQEs; single messages let it sleep at once, because
// then the application on this CPU is what should run.
constexpr Duration kShortSpin = Duration::Microseconds(20);
// After so many wake-ups or doorbells in a row without a WQE or packet somebody
// only plays: the shard's threads look no more often than this for a while.
constexpr uint32_t kMaxVainWakes = 64;
constexpr Duration kVainPause = Duration::Milliseconds(1);
// How long a thread waits before it looks again whether a control call is done.
constexpr long kFirstPauseNs = 10'000;
constexpr long kLongestPauseNs = 500'000;
// With a CPU of its own a thread gives it back only after this long.
constexpr Duration kLongSpin = Duration::Milliseconds(2);

Time Now() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return Time::FromNanoseconds(int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec);
}

// Lets a woken engine thread run before the application that woke it and that
// only spins or polls meanwhile. Each part is optional; only the slice needs no
// rights. Measured on two CPUs, Linux 6.18: one way of 64 bytes 20 µs without
// all this, 12 to 15 µs with it (SCHED_FIFO: 10 to 14 µs).
void PreferThisThread(bool by_nice) {
  if (by_nice) {
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), -20);
    // With autogroups nice counts only within a session; the daemon's own session
    // (not that of a terminal, in the foreground) gets a nice value, too.
    if (getsid(0) == getppid()) {
      const int fd = open("/proc/self/autogroup", O_WRONLY | O_CLOEXEC);
      if (fd >= 0 && write(fd, "-20", 3) < 0) errno = 0;  // not permitted: without
      if (fd >= 0) close(fd);
    }
  }
  // A short slice lets it preempt on wake-up (EEVDF, Linux 6.12). glibc has no
  // wrapper; layout of struct sched_attr, first version.
  struct {
    uint32_t size = 48;
    uint32_t policy = SCHED_OTHER;
    uint64_t flags = 0;
    int32_t nice = 0;
    uint32_t priority = 0;
    uint64_t runtime_ns = 100'000;
    uint64_t deadline = 0;
    uint64_t period = 0;
  } attributes;
  static_assert(sizeof attributes == 48);
  attributes.nice = getpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)));
  syscall(SYS_sched_setattr, 0, &attributes, 0);
  prctl(PR_SET_TIMERSLACK, 1000);  // timers and pauses to the microsecond
}

}  // namespace

Shard::Shard(Config config, Prepare prepare)
    : config_(std::move(config)), prepare_(std::move(prepare)) {}

std::unique_ptr<Shard> Shard::Start(Config config, Prepare prepare, std::string* error) {
  std::unique_ptr<Shard> shard(new Shard(std::move(config), std::move(prepare)));
  shard->wake_memory_ = SharedMemory::Create("verbena-wake", sizeof(abi::WakePage));
  if (shard->wake_memory_.data() == nullptr) {
    *error = "no memory for the wake page";
    return nullptr;
  }
  shard->wake_ = new (shard->wake_memory_.data()) abi::WakePage{};
  std::vector<Nic*> nics;
  nics.swap(shard->config_.nics);
  for (Nic* nic : nics) shard->AddNic(nic);
  if (shard->config_.manual) return shard->Prepared(0, error) ? std::move(shard) : nullptr;
  const size_t count = shard->config_.cpus.size();
  for (uint32_t i = 0; i < count; ++i) {
    try {
      shard->threads_.emplace_back(&Shard::ThreadMain, shard.get(), i);
    } catch (const std::system_error&) {
      *error = "no engine thread can be started";
      return nullptr;
    }
    shard->start_state_.wait(static_cast<int>(i));
    if (shard->start_state_.load() < 0) {
      *error = shard->start_error_;
      return nullptr;
    }
  }
  return shard;
}

Shard::~Shard() {
  stop_.store(true);
  for (uint32_t i = 0; i < threads_.size(); ++i) Wake(i);
  if (watcher_.joinable()) {
    eventfd_write(watcher_stop_, 1);
    watcher_.join();
    close(watcher_stop_);
  }
  for (std::thread& thread : threads_) thread.join();
  if (resources_.fabric != nullptr) resources_.fabric->CloseInbox(config_.id);
  if (spare_ != nullptr) rte_pktmbuf_free(spare_);
}

// What a thread needs before it runs. The first one initialises EAL, which
// belongs to that thread; the others start when that is done.
bool Shard::Prepared(uint32_t index, std::string* error) {
  if (index == 0) {
    if (!prepare_(&resources_, error)) return false;
    dma_ = std::make_unique<DmaQueue>();
    dma_->RequireClaims();
    resources_.fabric->OpenInbox(config_.id, resources_.pool, this);
  }
  if (RegisterDpdkThread()) return true;
  *error = "DPDK takes no engine thread more";
  return false;
}

void Shard::ThreadMain(uint32_t index) {
  std::string name = "verbena-eng-" + std::to_string(index);
  if (config_.id != 0) name += '.' + std::to_string(config_.id);
  pthread_setname_np(pthread_self(), name.c_str());
  const bool good = Prepared(index, &start_error_);
  start_state_.store(good ? static_cast<int>(index) + 1 : -1);
  start_state_.notify_all();
  if (!good) return;
  if (config_.cpus[index] >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(config_.cpus[index], &set);
    sched_setaffinity(0, sizeof set, &set);
  }
  PreferThisThread(config_.before_apps);

  bool woken = false;
  while (!stop_.load(std::memory_order_relaxed)) {
    RunUntilIdle();
    if (IsWokenInVain(woken)) {
      // Not armed: nobody can end this, and it looks at all doorbells afterwards.
      const timespec pause{.tv_sec = 0, .tv_nsec = kVainPause.ns()};
      nanosleep(&pause, nullptr);
    }
    woken = Sleep(index);
  }
  // The thread that initialised EAL keeps its number.
  if (config_.id != 0 || index != 0) UnregisterDpdkThread();
}

void Shard::WatchWires() {
  const std::vector<int> descriptors = resources_.fabric->wake_fds();
  if (descriptors.empty()) return;
  watcher_stop_ = eventfd(0, EFD_CLOEXEC);
  watcher_ = std::thread([this, descriptors] { WatchMain(descriptors); });
}

// One more engine thread; it sleeps at the netdevs instead of at a wake word.
void Shard::WatchMain(const std::vector<int>& descriptors) {
  pthread_setname_np(pthread_self(), "verbena-wire");
  if (!RegisterDpdkThread()) return;
  PreferThisThread(config_.before_apps);
  std::vector<pollfd> files;
  for (const int fd : descriptors) files.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  files.push_back({.fd = watcher_stop_, .events = POLLIN, .revents = 0});
  while (!stop_.load(std::memory_order_relaxed)) {
    const int ready = poll(files.data(), files.size(), kLinkInterval);
    if (ready < 0) continue;
    bool broken = false;
    for (const pollfd& file : files) {
      if ((file.revents & (POLLERR | POLLHUP | POLLNVAL)) == 0) continue;
      // The netdev went down or away; the error is told once it is read.
      broken = true;
      int error = 0;
      socklen_t length = sizeof error;
      getsockopt(file.fd, SOL_SOCKET, SO_ERROR, &error, &length);
    }
    // Nothing wakes for a netdev that is up again.
    if (ready == 0 || broken) resources_.fabric->RefreshLinks();
    RunUntilIdle();
    // Another thread runs passes and finds the frames, or there are none.
    const bool wait = broken || engine_holds_lock_.load(std::memory_order_relaxed);
    const timespec pause{.tv_sec = 0, .tv_nsec = broken ? 50'000'000 : 20'000};
    if (wait) nanosleep(&pause, nullptr);
  }
  UnregisterDpdkThread();
}

void Shard::RunUntilIdle() {
  const bool spinning = config_.mode == abi::kEngineSpinning;
  Time spin_until;
  long pause_ns = kFirstPauseNs;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (!lock_.TryLockForEngine()) {
      // Another engine thread looks at all doorbells again before it sleeps,
      // and so does our work. A control call does not: wait for it.
      if (engine_holds_lock_.load(std::memory_order_seq_cst)) return;
      // Not sched_yield: at nice -20 that would not let the control thread run. A
      // call that takes long (a list of all QPs) is not starved by looking often.
      const timespec pause{.tv_sec = 0, .tv_nsec = pause_ns};
      nanosleep(&pause, nullptr);
      pause_ns = std::min(pause_ns * 2, kLongestPauseNs);
      continue;
    }
    pause_ns = kFirstPauseNs;
    engine_holds_lock_.store(true, std::memory_order_seq_cst);
    const bool more = RunPass();
    const Time now = now_;
    // A single message is answered by sleeping at once, so that the application
    // on this CPU can go on; a stream of them by looking for more.
    if (worked_this_pass_ && (spinning || wqes_this_pass_ > 1)) {
      spin_until = now + (spinning ? kLongSpin : kShortSpin);
    }
    engine_holds_lock_.store(false, std::memory_order_seq_cst);
    lock_.unlock();
    if (more) continue;
    if (now >= spin_until) return;
    __builtin_ia32_pause();
  }
}

bool Shard::IsWokenInVain(bool woken) {
  const bool progress = progress_.exchange(false, std::memory_order_relaxed);
  if (progress) vain_wakes_.store(0, std::memory_order_relaxed);
  if (progress || !woken) return false;
  return vain_wakes_.fetch_add(1, std::memory_order_relaxed) >= kMaxVainWakes;
}

bool Shard::Sleep(uint32_t index) {
  abi::WakeWord& word = wake_->threads[index];
  Arm(word);
  Duration limit = Duration::Milliseconds(abi::kMaxSleepMs);
  if (lock_.TryLockForEngine()) {
    engine_holds_lock_.store(true, std::memory_order_seq_cst);
    const bool work = HasWork();
    planned_wake_ = NextDeadline();
    if (!planned_wake_.IsNever()) {
      limit = std::clamp(planned_wake_ - Now(), Duration::Zero(), limit);
    }
    if (!work) ++counters_.sleeps;
    engine_holds_lock_.store(false, std::memory_order_seq_cst);
    lock_.unlock();
    if (work || stop_.load()) {
      Disarm(word);
      return true;
    }
  } else if (!engine_holds_lock_.load(std::memory_order_seq_cst)) {
    Disarm(word);  // a control call: look again
    return false;
  }
  return Wait(word, limit);
}

void Shard::Wake(uint32_t index) { nic::Wake(wake_->threads[index]); }

void Shard::Kick() {
  abi::FullFence();
  const auto count = static_cast<uint32_t>(config_.cpus.size());
  for (uint32_t i = 0; i < count; ++i) {
    if (wake_->threads[i].armed.load(std::memory_order_seq_cst) == 0) return;
  }
  Wake(0);
}

}  // namespace verbena::nic
