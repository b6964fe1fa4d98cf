// SPDX-License-Identifier: Apache-2.0
//
// Nic: what belongs to one simulated NIC: its port, addresses and table of QPNs.
// NicShare: what the users of one shard have on it, their key table included.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/fabric/fabric.h"
#include "nic_sim/mem/region_table.h"
#include "transport/transport_event.h"
#include "transport/types.h"

namespace verbena::nic {

class DeviceContext;
class Qp;
class XrcDomain;

// QPN → QP. A QPN is a table index (14 bits) below a count of uses (10 bits)
// that starts at random, so that a QPN is not reused soon; 0 and 1 are never
// given (they are QP0 and QP1).
//
// Thread: Insert, Remove and Find under the lock of the shard that they name;
// OwnerOf anywhere.
class QpTable {
 public:
  explicit QpTable(uint64_t seed);

  // False if the table is full.
  bool Insert(Qp* qp, ShardId shard, transport::Qpn* qpn);
  void Remove(transport::Qpn qpn);
  // nullptr also if another shard has it.
  Qp* Find(transport::Qpn qpn, ShardId shard) const {
    const Entry& entry = entries_[qpn.value() & kIndexMask];
    // An entry changes only under its owner's lock.
    if (entry.owner.load(std::memory_order_acquire) != shard) return nullptr;
    return entry.qpn == qpn.value() ? entry.qp : nullptr;
  }
  // Shard of the QPs with this index; 0 if there is none.
  ShardId OwnerOf(transport::Qpn qpn) const {
    const ShardId owner = entries_[qpn.value() & kIndexMask].owner.load(std::memory_order_relaxed);
    return owner == kNobody ? ShardId{0} : owner;
  }

 private:
  static constexpr uint32_t kIndexBits = 14;
  static constexpr uint32_t kIndexMask = (1u << kIndexBits) - 1;
  static constexpr ShardId kNobody = 0xff;
  struct Entry {
    Qp* qp = nullptr;
    uint32_t qpn = 0;   // while in use
    uint32_t uses = 0;  // upper bits of the next QPN
    std::atomic<ShardId> owner{kNobody};
  };
  std::unique_ptr<Entry[]> entries_;
  std::mutex mutex_;            // what follows, and changes of entries
  std::vector<uint32_t> free_;  // circular FIFO of indices
  uint32_t free_head_ = 0;
  uint32_t size_ = 0;
};

// Thread: under the shard's lock.
struct NicShare {
  NicShare(uint32_t max_regions, uint64_t seed);
  ~NicShare();

  RegionTable regions;
  // Objects of all contexts, for the limits.
  uint32_t pd_count = 0;
  uint32_t qp_count = 0;
  uint32_t cq_count = 0;
  uint32_t ah_count = 0;
  uint32_t srq_count = 0;
  uint32_t mcast_count = 0;
  PdId next_pd = 1;
  // QPs that are attached to a multicast group.
  std::unordered_map<transport::Gid, std::vector<Qp*>> groups;
  std::list<XrcDomain> xrc_domains;  // open ones
  uint32_t dm_count = 0;
  uint64_t dm_bytes = 0;                                  // memory of the device
  std::unordered_map<uint64_t, DeviceContext*> contexts;  // by cookie
  // Of QPs that are gone.
  transport::TransportCounters retired_counters;
};

// Constant, but for the table of QPNs and the GIDs, which fault rules change.
class Nic {
 public:
  struct Config {
    uint32_t index = 0;
    std::string device;
    uint32_t host = 0;
    transport::MacAddress mac;
    std::vector<transport::Gid> addresses;  // GIDs from index 1 on, at most 15
    uint64_t seed = 0;
  };
  Nic(const Config& config, Fabric& fabric);

  const Config& config() const { return config_; }
  // By GID index; zero GIDs are free. Any thread; the reference stays valid, and shows the
  // table as it was.
  const std::vector<transport::Gid>& gids() const { return *gids_.load(); }
  // Another GID at `index`, 1 or more; zero: none. QPs and AHs that were made with the old one
  // keep it.
  void SetGid(size_t index, const transport::Gid& gid);
  bool HasAddress(const transport::Gid& gid) const {
    const auto& all = gids();
    return std::find(all.begin(), all.end(), gid) != all.end();
  }
  uint64_t node_guid() const { return node_guid_; }  // host order
  const abi::DeviceAttributes& attributes() const { return attributes_; }
  PortId port() const { return port_; }
  QpTable& qps() { return qps_; }
  const QpTable& qps() const { return qps_; }

 private:
  Config config_;
  std::mutex gids_mutex_;  // one SetGid at a time
  // All tables that there were: others may be looking at them.
  std::list<std::vector<transport::Gid>> gid_tables_;
  std::atomic<const std::vector<transport::Gid>*> gids_;
  uint64_t node_guid_ = 0;
  abi::DeviceAttributes attributes_{};
  PortId port_ = 0;
  QpTable qps_;
};

}  // namespace verbena::nic
