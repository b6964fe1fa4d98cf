// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/engine/engine.h"

#include <rte_mbuf.h>
#include <sched.h>

#include <algorithm>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/env/dpdk_env.h"
#include "nic_sim/port/dpdk_port.h"
#include "nic_sim/port/wire.h"

namespace verbena::nic {
namespace {

// Enough CPUs that one can be the engine's alone.
constexpr size_t kCpusForSpinning = 4;
constexpr uint32_t kPackets = 8192;
// Frames from outside: in the ports' hands, and until they are placed.
constexpr uint32_t kPortPackets = 4096;
constexpr uint32_t kPacketsOfOthers = 4096;  // of each shard but the first
constexpr uint32_t kMemoryMib = 256;
constexpr uint32_t kSystemMemoryMib = 1024;  // touched only as it is used
// DPDK knows 128 threads, a few of them its own.
constexpr size_t kMaxThreads = 120;

}  // namespace

std::unique_ptr<Engine> Engine::Start(const DeviceOptions& options, std::string* error) {
  std::unique_ptr<Engine> engine(new Engine(options));
  engine->ChooseThreads();
  engine->shards_[0] = Shard::Start(
      engine->ConfigOf(0),
      [&](Shard::Resources* resources, std::string* why) {
        return engine->Initialise(resources, why);
      },
      error);
  if (engine->shards_[0] == nullptr) return nullptr;
  return engine;
}

Engine::~Engine() {
  // The first one's thread owns EAL: it is the last to end.
  for (size_t i = shards_.size(); i-- > 0;) shards_[i].reset();
}

void Engine::ChooseThreads() {
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
}

Shard::Config Engine::ConfigOf(ShardId id) const {
  return {.id = id,
          .mode = mode_,
          .manual = options_.mode == DeviceOptions::Mode::kManual,
          .cpus = cpus_,
          .before_apps = !options_.system,
          .nics = nics_,
          .max_regions = kMaxMr + kMaxMw,
          .seed = options_.seed != 0 ? options_.seed + (id + 1) * 1000 : 0};
}

void Engine::Describe(abi::StatusPage* page) const {
  page->mode = mode_;
  page->thread_count = thread_count();
  for (size_t i = 0; i < cpus_.size(); ++i) {
    page->cpu[i] = cpus_[i] < 0 ? abi::kAnyCpu : static_cast<uint32_t>(cpus_[i]);
  }
}

bool Engine::Initialise(Shard::Resources* resources, std::string* error) {
  const DpdkOptions dpdk{.instance = options_.instance,
                         .run_folder = options_.run_folder,
                         .hugepages = options_.hugepages,
                         .pci = options_.pci,
                         .telemetry = options_.telemetry,
                         .memory_mib = options_.system ? kSystemMemoryMib : kMemoryMib};
  if (!InitDpdk(dpdk, error) || !TakePool(0, error)) return false;
  fabric_ = std::make_unique<Fabric>(options_.strict);
  *resources = {.pool = pools_[0], .fabric = fabric_.get(), .faults = &faults_};
  return true;
}

bool Engine::TakePool(ShardId id, std::string* error) {
  if (pools_[id] != nullptr) return true;
  const std::string name = "verbena-packets" + (id == 0 ? "" : "-" + std::to_string(id));
  pools_[id] = CreatePacketPool(name.c_str(), id == 0 ? kPackets : kPacketsOfOthers, error);
  return pools_[id] != nullptr;
}

void Engine::AddNic(Nic* nic) {
  nics_.push_back(nic);
  const std::lock_guard guard(main_shard().lock());
  main_shard().AddNic(nic);
  fabric_->SetSteering(this);
}

bool Engine::AttachPort(const Nic& nic, const PortSpec& port, const IpHost::Config& host,
                        std::string* error) {
  if (port_pool_ == nullptr) {
    port_pool_ = CreatePacketPool("verbena-ports", kPortPackets, error, kPortFrameBytes);
    if (port_pool_ == nullptr) return false;
  }
  std::unique_ptr<FramePort> frames = OpenDpdkPort(port, port_count_, port_pool_, error);
  if (frames == nullptr) return false;
  ++port_count_;
  fabric_->AttachWire(nic.port(), std::make_unique<Wire>(host, std::move(frames), pools_[0]));
  return true;
}

Shard* Engine::AddShard(std::string* error) {
  const std::lock_guard guard(mutex_);
  size_t id = 1;
  while (id < kMaxShards && shards_[id] != nullptr) ++id;
  if (id == kMaxShards || (id + 1) * cpus_.size() > kMaxThreads) {
    *error = "too many users have devices open";
    return nullptr;
  }
  const auto shard = static_cast<ShardId>(id);
  shards_[id] = Shard::Start(
      ConfigOf(shard),
      [&](Shard::Resources* resources, std::string* why) {
        if (!TakePool(shard, why)) return false;
        *resources = {.pool = pools_[id], .fabric = fabric_.get(), .faults = &faults_};
        return true;
      },
      error);
  return shards_[id].get();
}

rte_mbuf* Engine::NewPacket() { return rte_pktmbuf_alloc(pools_[0]); }

void Engine::Kick() {
  const std::lock_guard guard(mutex_);
  for (const auto& shard : shards_) {
    if (shard != nullptr) shard->Kick();
  }
}

bool Engine::RunPassAt(transport::Time now) {
  const std::lock_guard guard(mutex_);
  bool more = false;
  for (const auto& shard : shards_) {
    if (shard != nullptr) more |= shard->RunPassAt(now);
  }
  return more;
}

void Engine::RemoveShard(Shard* shard) {
  const std::lock_guard guard(mutex_);
  shards_[shard->id()].reset();
}

ShardId Engine::OwnerOf(PortId port, uint32_t qpn) const {
  return port < nics_.size() ? nics_[port]->qps().OwnerOf(transport::Qpn(qpn)) : ShardId{0};
}

}  // namespace verbena::nic
