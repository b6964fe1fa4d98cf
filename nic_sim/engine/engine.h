// SPDX-License-Identifier: Apache-2.0
//
// Engine: what all shards of a device share - DPDK, packet pools, the fabric -
// and the shards themselves. Shard 0 belongs to the daemon's own user; a
// system-wide daemon makes one for each other user who has a device open.
//
// Thread: any; shards come and go under a lock of its own.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nic_sim/device/device.h"
#include "nic_sim/engine/shard.h"
#include "nic_sim/fabric/fabric.h"
#include "nic_sim/faults/device_faults.h"
#include "nic_sim/port/ip_host.h"
#include "nic_sim/port/port_options.h"

struct rte_mempool;

namespace verbena::nic {

class Engine final : public PacketSteering {
 public:
  // Starts EAL (on the first engine thread) and shard 0. nullptr with a sentence.
  static std::unique_ptr<Engine> Start(const DeviceOptions& options, std::string* error);
  ~Engine() override;

  abi::EngineMode mode() const { return mode_; }
  // Of each shard.
  uint32_t thread_count() const { return static_cast<uint32_t>(cpus_.size()); }
  // Fills in what applications must know about the threads.
  void Describe(abi::StatusPage* page) const;

  Fabric& fabric() { return *fabric_; }
  DeviceFaults& faults() { return faults_; }
  // Before the first packet.
  void AddNic(Nic* nic);
  // Joins the NIC to a netdev; before Shard::WatchWires. False with a sentence.
  bool AttachPort(const Nic& nic, const PortSpec& port, const IpHost::Config& host,
                  std::string* error);

  Shard& main_shard() { return *shards_[0]; }
  // nullptr with a sentence: there are too many, or no memory or thread for it.
  Shard* AddShard(std::string* error);
  // Nothing is in it any more.
  void RemoveShard(Shard* shard);

  // With DeviceOptions::Mode::kManual; see Device::RunPass.
  bool RunPassAt(transport::Time now);

  // See Device.
  rte_mbuf* NewPacket();

  // Wakes all shards, as doorbells do.
  void Kick();

  ShardId OwnerOf(PortId port, uint32_t qpn) const override;

 private:
  explicit Engine(const DeviceOptions& options) : options_(options) {}

  void ChooseThreads();
  Shard::Config ConfigOf(ShardId id) const;
  bool Initialise(Shard::Resources* resources, std::string* error);
  // Pools stay for the next shard: others may have packets of them.
  bool TakePool(ShardId id, std::string* error);

  DeviceOptions options_;
  abi::EngineMode mode_ = abi::kEngineThreadPerCpu;
  std::vector<int> cpus_;  // of a shard's threads; -1: any
  std::unique_ptr<Fabric> fabric_;
  DeviceFaults faults_;
  std::vector<Nic*> nics_;            // by PortId; constant after the start
  rte_mempool* port_pool_ = nullptr;  // frames from outside; made with the first port
  uint32_t port_count_ = 0;
  std::mutex mutex_;  // what follows
  std::array<rte_mempool*, kMaxShards> pools_{};
  std::array<std::unique_ptr<Shard>, kMaxShards> shards_;
};

}  // namespace verbena::nic
