// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/env/dpdk_env.h"

#include <pthread.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_lcore.h>
#include <rte_mbuf.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <vector>

#include "nic_sim/fabric/packet.h"

namespace verbena::nic {
namespace {

// Mbufs that a thread keeps for itself: some bursts; what 8 threads hold is a
// small part of a pool of some thousands.
constexpr unsigned kPoolCachePackets = 128;

// What rte_eal_init changes of the calling thread, put back at the end of the
// scope. Signals are blocked meanwhile so that EAL's own threads, which inherit
// the mask, never run a handler of the daemon.
class ThreadStateGuard {
 public:
  ThreadStateGuard() {
    CPU_ZERO(&affinity_);
    has_affinity_ = pthread_getaffinity_np(pthread_self(), sizeof affinity_, &affinity_) == 0;
    pthread_getname_np(pthread_self(), name_, sizeof name_);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &signals_);
  }
  ~ThreadStateGuard() {
    pthread_sigmask(SIG_SETMASK, &signals_, nullptr);
    pthread_setname_np(pthread_self(), name_);
    if (has_affinity_) pthread_setaffinity_np(pthread_self(), sizeof affinity_, &affinity_);
  }
  ThreadStateGuard(const ThreadStateGuard&) = delete;
  ThreadStateGuard& operator=(const ThreadStateGuard&) = delete;

  // The first CPU that the thread may use.
  int first_cpu() const {
    for (int cpu = 0; has_affinity_ && cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &affinity_)) return cpu;
    }
    return 0;
  }

 private:
  cpu_set_t affinity_;
  bool has_affinity_ = false;
  char name_[16] = "";
  sigset_t signals_;
};

// Sets an environment variable for the scope. EAL asks it for the folder of
// its run-time files; the daemon's children must not see it.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const std::string& value) : name_(name) {
    if (const char* old = getenv(name)) old_ = old;
    if (!value.empty()) setenv(name, value.c_str(), 1);
  }
  ~ScopedEnvironment() {
    if (old_) {
      setenv(name_, old_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  const char* name_;
  std::optional<std::string> old_;
};

bool initialised = false;

}  // namespace

bool InitDpdk(const DpdkOptions& options, std::string* error) {
  if (initialised) {
    *error = "DPDK is already initialised in this process";
    return false;
  }
  const ThreadStateGuard guard;
  // EAL takes the first (systemd's) before the second, and /var/run for root.
  const ScopedEnvironment runtime_directory("RUNTIME_DIRECTORY", options.run_folder);
  const ScopedEnvironment xdg_runtime_dir("XDG_RUNTIME_DIR", options.run_folder);

  std::vector<std::string> args = {
      "verbenad",
      "--file-prefix=verbena-" + options.instance,
      // One EAL thread, this one: EAL starts a spinning worker for any other.
      "--lcores=0@" + std::to_string(guard.first_cpu()),
      options.debug_log ? "--log-level=*:debug" : "--log-level=*:error",
      options.telemetry ? "--telemetry" : "--no-telemetry",
  };
  if (options.hugepages) {
    args.push_back("--in-memory");
  } else {
    args.insert(args.end(), {"--no-huge", "--no-shconf", "-m", std::to_string(options.memory_mib)});
  }
  if (!options.pci) args.push_back("--no-pci");

  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  if (rte_eal_init(static_cast<int>(args.size()), argv.data()) < 0) {
    *error = std::string("DPDK does not start: ") + rte_strerror(rte_errno);
    if (access("/sys/devices/system/cpu/cpu0", F_OK) != 0) {
      *error += " (it looks for CPUs in /sys, which is not mounted here)";
    }
    if (options.hugepages) *error += " (are hugepages reserved and may this user use them?)";
    return false;
  }
  initialised = true;
  if (!options.hugepages && !options.telemetry) {
    // Nothing lies in EAL's folder without shared configuration: leave none.
    const std::string folder = options.run_folder + "/dpdk";
    rmdir((folder + "/verbena-" + options.instance).c_str());
    rmdir(folder.c_str());
  }
  return true;
}

bool RegisterDpdkThread() {
  // The thread that called InitDpdk has a number already.
  if (rte_lcore_id() != LCORE_ID_ANY) return true;
  cpu_set_t affinity;
  const bool has_affinity = pthread_getaffinity_np(pthread_self(), sizeof affinity, &affinity) == 0;
  const bool registered = rte_thread_register() == 0;
  if (has_affinity) pthread_setaffinity_np(pthread_self(), sizeof affinity, &affinity);
  return registered;
}

void UnregisterDpdkThread() { rte_thread_unregister(); }

void CleanUpDpdk() {
  if (!initialised) return;
  rte_eal_cleanup();
  initialised = false;
}

rte_mempool* CreatePacketPool(const char* name, uint32_t packets, std::string* error,
                              uint32_t frame_bytes) {
  const auto room = static_cast<uint16_t>(RTE_PKTMBUF_HEADROOM + frame_bytes);
  unsigned cache = kPoolCachePackets;
  // A small pool (tests) has no cache: it would keep packets from other threads.
  if (packets < 16 * kPoolCachePackets) cache = 0;
  rte_mempool* pool =
      rte_pktmbuf_pool_create(name, packets, cache, kPacketPrivateBytes, room, SOCKET_ID_ANY);
  if (pool == nullptr) {
    *error = "no packet pool of " + std::to_string(packets) +
             " packets: " + rte_strerror(rte_errno) + " (more memory for DPDK may help)";
  }
  return pool;
}

}  // namespace verbena::nic
