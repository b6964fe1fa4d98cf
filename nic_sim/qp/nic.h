// SPDX-License-Identifier: Apache-2.0
//
// Nic: what belongs to one simulated NIC: its port, addresses, key table and QP
// table.
//
// Thread: under the shard's lock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/fabric/fabric.h"
#include "nic_sim/mem/region_table.h"
#include "transport/transport_event.h"
#include "transport/types.h"

namespace verbena::nic {

class Qp;

// QPN → QP. A QPN is a table index (14 bits) below a count of uses (10 bits)
// that starts at random, so that a QPN is not reused soon; 0 and 1 are never
// given (they are QP0 and QP1).
class QpTable {
 public:
  explicit QpTable(uint64_t seed);

  // False if the table is full.
  bool Insert(Qp* qp, transport::Qpn* qpn);
  void Remove(transport::Qpn qpn);
  Qp* Find(transport::Qpn qpn) const {
    const Entry& entry = entries_[qpn.value() & kIndexMask];
    return entry.qpn == qpn.value() ? entry.qp : nullptr;
  }
  uint32_t size() const { return size_; }
  template <typename Visitor>
  void ForEach(Visitor visit) const {
    for (const Entry& entry : entries_) {
      if (entry.qp != nullptr) visit(*entry.qp);
    }
  }

 private:
  static constexpr uint32_t kIndexBits = 14;
  static constexpr uint32_t kIndexMask = (1u << kIndexBits) - 1;
  struct Entry {
    Qp* qp = nullptr;
    uint32_t qpn = 0;   // while in use
    uint32_t uses = 0;  // upper bits of the next QPN
  };
  std::vector<Entry> entries_;
  std::vector<uint32_t> free_;  // circular FIFO of indices
  uint32_t free_head_ = 0;
  uint32_t size_ = 0;
};

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
  const std::vector<transport::Gid>& gids() const { return gids_; }
  uint64_t node_guid() const { return node_guid_; }  // host order
  const abi::DeviceAttributes& attributes() const { return attributes_; }
  PortId port() const { return port_; }
  RegionTable& regions() { return regions_; }
  const RegionTable& regions() const { return regions_; }
  QpTable& qps() { return qps_; }
  const QpTable& qps() const { return qps_; }

  // Objects of all contexts, for the limits.
  uint32_t pd_count = 0;
  uint32_t cq_count = 0;
  uint32_t ah_count = 0;
  PdId next_pd = 1;
  // Of QPs that are gone.
  transport::TransportCounters retired_counters;

 private:
  Config config_;
  std::vector<transport::Gid> gids_;
  uint64_t node_guid_ = 0;
  abi::DeviceAttributes attributes_{};
  PortId port_ = 0;
  RegionTable regions_;
  QpTable qps_;
};

}  // namespace verbena::nic
