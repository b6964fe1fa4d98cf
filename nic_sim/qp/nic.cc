// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/qp/nic.h"

#include <bit>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/qp/xrc_domain.h"

namespace verbena::nic {

using transport::Gid;

NicShare::NicShare(uint32_t max_regions, uint64_t seed) : regions(max_regions, seed) {}
NicShare::~NicShare() = default;

QpTable::QpTable(uint64_t seed) : entries_(std::make_unique<Entry[]>(kMaxQp)), free_(kMaxQp) {
  static_assert(kMaxQp == 1u << kIndexBits);
  uint64_t random = seed;
  for (uint32_t i = 0; i < kMaxQp; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    entries_[i].uses = static_cast<uint32_t>(random >> 33) & 0x3ff;
    free_[i] = i;
  }
  free_head_ = static_cast<uint32_t>(seed) & kIndexMask;
}

bool QpTable::Insert(Qp* qp, ShardId shard, transport::Qpn* qpn) {
  const std::lock_guard guard(mutex_);
  if (size_ == kMaxQp) return false;
  const uint32_t index = free_[free_head_];
  free_head_ = (free_head_ + 1) & kIndexMask;
  ++size_;
  Entry& entry = entries_[index];
  entry.uses = (entry.uses + 1) & 0x3ff;
  if (entry.uses == 0) entry.uses = 1;  // keeps QPN 0 and 1 out
  entry.qp = qp;
  entry.qpn = (entry.uses << kIndexBits) | index;
  entry.owner.store(shard, std::memory_order_release);
  *qpn = transport::Qpn(entry.qpn);
  return true;
}

void QpTable::Remove(transport::Qpn qpn) {
  const std::lock_guard guard(mutex_);
  const uint32_t index = qpn.value() & kIndexMask;
  Entry& entry = entries_[index];
  if (entry.qp == nullptr || entry.qpn != qpn.value()) return;
  entry.owner.store(kNobody, std::memory_order_release);
  entry.qp = nullptr;
  entry.qpn = 0;
  free_[(free_head_ + kMaxQp - size_) & kIndexMask] = index;
  --size_;
}

Nic::Nic(const Config& config, Fabric& fabric)
    : config_(config), qps_(config.seed ^ 0x9e3779b97f4a7c15u) {
  std::vector<Gid>& gids = gid_tables_.emplace_back(kGidTableLen);
  gids_ = &gids;
  // EUI-64 of the MAC: ff:fe in the middle, universal/local bit inverted.
  Gid::Bytes link_local{};
  link_local[0] = std::byte{0xfe};
  link_local[1] = std::byte{0x80};
  const auto& mac = config.mac.bytes();
  const std::byte eui64[8] = {mac[0] ^ std::byte{2}, mac[1], mac[2], std::byte{0xff},
                              std::byte{0xfe},       mac[3], mac[4], mac[5]};
  for (size_t i = 0; i < 8; ++i) link_local[8 + i] = eui64[i];
  gids[0] = Gid(link_local);
  for (size_t i = 0; i < config.addresses.size() && i + 1 < gids.size(); ++i) {
    gids[i + 1] = config.addresses[i];
  }
  node_guid_ = transport::LoadBe64(eui64);
  static_assert(std::endian::native == std::endian::little);
  attributes_ = MakeDeviceAttributes(__builtin_bswap64(node_guid_));
  port_ = fabric.AddPort({.device = config.device,
                          .mac = config.mac,
                          .gids = gids,
                          .group_limits = {.groups = kMaxMcastGroups,
                                           .qps_of_group = kMaxMcastQpAttach,
                                           .attachments = kMaxTotalMcastQpAttach}});
}

void Nic::SetGid(size_t index, const Gid& gid) {
  const std::lock_guard guard(gids_mutex_);
  std::vector<Gid> changed = gids();
  if (index == 0 || index >= changed.size()) return;
  changed[index] = gid;
  // One that comes and goes for ever takes no more memory.
  auto table = std::find(gid_tables_.begin(), gid_tables_.end(), changed);
  if (table == gid_tables_.end()) table = gid_tables_.insert(table, std::move(changed));
  gids_ = &*table;
}

}  // namespace verbena::nic
