// SPDX-License-Identifier: Apache-2.0
//
// Engine threads: start, run, sleep and wake. The protocol that loses no
// wake-up is described at abi::WakePage.
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "nic_sim/engine/engine.h"
#include "nic_sim/env/dpdk_env.h"
#include "nic_sim/queues/doorbells.h"

namespace verbena::nic {

using transport::Duration;
using transport::Time;

namespace {

// On scarce CPUs: how long a thread looks for more after a pass that found work
// for several queues or WQEs; single messages let it sleep at once, because
// then the application on this CPU is what should run.
constexpr Duration kShortSpin = Duration::Microseconds(20);
// With a CPU of its own a thread gives it back only after this long.
constexpr Duration kLongSpin = Duration::Milliseconds(2);
// Enough CPUs that one can be the engine's alone.
constexpr size_t kCpusForSpinning = 4;
constexpr uint32_t kPackets = 8192;

Time Now() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return Time::FromNanoseconds(int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec);
}

// Lets a woken engine thread run before the application that woke it and that
// only spins or polls meanwhile. Each part is optional; only the slice needs no
// rights. Measured on two CPUs, Linux 6.18: one way of 64 bytes 20 µs without
// all this, 12 to 15 µs with it (SCHED_FIFO: 10 to 14 µs).
void PreferThisThread() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), -20);
  // With autogroups nice counts only within a session; the daemon's own session
  // (not that of a terminal, in the foreground) gets a nice value, too.
  if (getsid(0) == getppid()) {
    const int fd = open("/proc/self/autogroup", O_WRONLY | O_CLOEXEC);
    if (fd >= 0 && write(fd, "-20", 3) < 0) errno = 0;  // not permitted: without
    if (fd >= 0) close(fd);
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

Engine::Engine(const DeviceOptions& options) : options_(options) {}

std::unique_ptr<Engine> Engine::Start(const DeviceOptions& options, std::string* error) {
  std::unique_ptr<Engine> engine(new Engine(options));
  if (!engine->ChooseThreads(error)) return nullptr;
  if (options.mode == DeviceOptions::Mode::kManual) {
    return engine->Initialise(error) ? std::move(engine) : nullptr;
  }
  // The first thread initialises EAL, which belongs to that thread; the others
  // start when that is done.
  engine->threads_.emplace_back(&Engine::ThreadMain, engine.get(), 0);
  for (uint32_t i = 1;; ++i) {
    engine->start_state_.wait(static_cast<int>(i) - 1);
    if (engine->start_state_.load() < 0) {
      *error = engine->start_error_;
      return nullptr;
    }
    if (i == engine->cpus_.size()) return engine;
    engine->threads_.emplace_back(&Engine::ThreadMain, engine.get(), i);
  }
}

Engine::~Engine() {
  stop_.store(true);
  for (uint32_t i = 0; i < threads_.size(); ++i) Wake(i);
  for (std::thread& thread : threads_) thread.join();
}

bool Engine::ChooseThreads(std::string* error) {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> allowed;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) allowed.push_back(cpu);
    }
  }
  using Mode = DeviceOptions::Mode;
  const bool spin = options_.mode == Mode::kSpinning ||
                    (options_.mode == Mode::kAuto && allowed.size() >= kCpusForSpinning);
  mode_ = spin ? abi::kEngineSpinning : abi::kEngineThreadPerCpu;
  size_t count = spin ? 1 : std::max<size_t>(allowed.size(), 1);
  if (options_.mode == Mode::kManual) count = 1;  // as applications see it
  if (options_.engine_threads != 0) count = options_.engine_threads;
  count = std::min<size_t>(count, abi::kMaxEngineThreads);
  for (size_t i = 0; i < count; ++i) {
    cpus_.push_back(spin || i >= allowed.size() ? -1 : allowed[i]);
  }
  wake_memory_ = SharedMemory::Create("verbena-wake", sizeof(abi::WakePage));
  if (wake_memory_.data() == nullptr) {
    *error = "no memory for the wake page";
    return false;
  }
  wake_ = new (wake_memory_.data()) abi::WakePage{};
  return true;
}

void Engine::Describe(abi::StatusPage* page) const {
  page->mode = mode_;
  page->thread_count = static_cast<uint32_t>(cpus_.size());
  for (size_t i = 0; i < cpus_.size(); ++i) {
    page->cpu[i] = cpus_[i] < 0 ? abi::kAnyCpu : static_cast<uint32_t>(cpus_[i]);
  }
}

bool Engine::Initialise(std::string* error) {
  const DpdkOptions dpdk{.instance = options_.instance,
                         .run_folder = options_.run_folder,
                         .hugepages = options_.hugepages,
                         .pci = options_.pci};
  if (!InitDpdk(dpdk, error)) return false;
  pool_ = CreatePacketPool("verbena-packets", kPackets, error);
  if (pool_ == nullptr) return false;
  fabric_ = std::make_unique<Fabric>(options_.strict);
  dma_ = std::make_unique<DmaQueue>();
  dma_->RequireClaims();
  return true;
}

void Engine::ThreadMain(uint32_t index) {
  const std::string name = "verbena-eng-" + std::to_string(index);
  pthread_setname_np(pthread_self(), name.c_str());
  bool good = true;
  if (index == 0) {
    good = Initialise(&start_error_);
  } else if (!RegisterDpdkThread()) {
    good = false;
    start_error_ = "DPDK takes no engine thread more";
  }
  start_state_.store(good ? static_cast<int>(index) + 1 : -1);
  start_state_.notify_all();
  if (!good) return;
  if (cpus_[index] >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus_[index], &set);
    sched_setaffinity(0, sizeof set, &set);
  }
  PreferThisThread();

  while (!stop_.load(std::memory_order_relaxed)) {
    RunUntilIdle();
    Sleep(index);
  }
}

void Engine::RunUntilIdle() {
  const bool spinning = mode_ == abi::kEngineSpinning;
  Time spin_until;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (!lock_.TryLockForEngine()) {
      // Another engine thread looks at all doorbells again before it sleeps,
      // and so does our work. A control call does not: wait for it.
      if (engine_holds_lock_.load(std::memory_order_seq_cst)) return;
      // Not sched_yield: at nice -20 that would not let the control thread run.
      const timespec pause{.tv_sec = 0, .tv_nsec = 10'000};
      nanosleep(&pause, nullptr);
      continue;
    }
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

void Engine::Sleep(uint32_t index) {
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
      return;
    }
  } else if (!engine_holds_lock_.load(std::memory_order_seq_cst)) {
    Disarm(word);  // a control call: look again
    return;
  }
  Wait(word, limit);
}

void Engine::Wake(uint32_t index) { nic::Wake(wake_->threads[index]); }

void Engine::Kick() {
  abi::FullFence();
  const auto count = static_cast<uint32_t>(cpus_.size());
  for (uint32_t i = 0; i < count; ++i) {
    if (wake_->threads[i].armed.load(std::memory_order_seq_cst) == 0) return;
  }
  Wake(0);
}

}  // namespace verbena::nic
