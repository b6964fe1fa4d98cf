// SPDX-License-Identifier: Apache-2.0
//
// What a Device is made of; shared by its parts in this folder.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/device/device.h"
#include "nic_sim/device/device_context.h"
#include "nic_sim/engine/engine.h"
#include "nic_sim/qp/nic.h"
#include "nic_sim/queues/shared_memory.h"

namespace verbena::nic {

// A user with devices open, or the owner, who is always there.
struct Tenant {
  uid_t uid = 0;
  const UserLimits& limits;
  Engine& engine;
  Shard* shard = nullptr;
  std::vector<std::unique_ptr<DeviceContext>> contexts;  // under the shard's lock

  Tenant(uid_t user, const UserLimits& user_limits, Engine& of_engine, Shard* its_shard)
      : uid(user), limits(user_limits), engine(of_engine), shard(its_shard) {}
  ~Tenant();
};

// Runs Device::RunTimedFaults while rules with times wait. Not with Mode::kManual.
class FaultTimer {
 public:
  FaultTimer() = default;
  ~FaultTimer();
  void Start(Device* device);

 private:
  void Run(Device* device);
  std::mutex mutex_;
  std::condition_variable news_;
  bool stop_ = false;
  bool looks_again_ = false;
  std::thread thread_;
};

struct Device::State {
  ~State();
  // What listings go through; without the lock while they wait for a shard.
  std::vector<std::shared_ptr<Tenant>> Tenants() const {
    const std::lock_guard guard(mutex);
    return tenants;
  }
  // Makes one if there is none. nullptr with a sentence.
  std::shared_ptr<Tenant> TenantOf(uid_t uid, std::string* why);
  // Ends the shard of a user without contexts.
  void DropIfUnused(const std::shared_ptr<Tenant>& tenant);

  bool present(size_t nic) const { return (absent.load() >> nic & 1) == 0; }
  transport::Time Now();  // takes the first shard's lock

  SharedMemory status;
  int status_readonly = -1;
  std::unique_ptr<Engine> engine;
  std::vector<std::unique_ptr<Nic>> nics;
  std::vector<std::string> ports;              // of the NICs, as NicInfo::port
  std::vector<std::vector<uint8_t>> prefixes;  // of the NICs as configured, see NicInfo
  std::atomic<uint32_t> context_count{0};
  mutable std::mutex mutex;                      // what follows
  std::vector<std::shared_ptr<Tenant>> tenants;  // the owner first
  std::atomic<uint64_t> absent{0};               // NICs that are taken out, by bit
  std::atomic<uint32_t> checked_verbs{0};        // as contexts were told
  std::mutex timed_mutex;                        // one RunTimedFaults at a time
  std::mutex watcher_mutex;
  std::function<void(uint32_t nic, NicChange change)> watcher;
  bool manual = false;
  FaultTimer fault_timer;  // the last: it ends first
};

}  // namespace verbena::nic
