// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/qp/lid.h"

#include <cstring>
#include <vector>

namespace verbena::nic {
namespace {

using transport::Gid;

// The first IPv4 address, else the link-local one.
size_t PrimaryGid(const std::vector<Gid>& gids, bool ipv4) {
  for (size_t i = 0; ipv4 && i < gids.size(); ++i) {
    if (gids[i].IsV4Mapped()) return i;
  }
  return 0;
}

bool HasIpv4(const std::vector<Gid>& gids) {
  return PrimaryGid(gids, true) != 0;  // entry 0 is always link-local
}

}  // namespace

uint16_t LidOf(const Nic& nic) { return static_cast<uint16_t>(nic.port() + 1); }

abi::AhAttr WithGids(const Nic& nic, const Fabric& fabric, const abi::AhAttr& ah) {
  if (ah.is_global != 0 || ah.dlid == 0 || ah.dlid > fabric.port_count()) return ah;
  const std::vector<Gid> peer = fabric.gids(static_cast<PortId>(ah.dlid - 1));
  const bool ipv4 = HasIpv4(nic.gids()) && HasIpv4(peer);
  abi::AhAttr with = ah;
  with.is_global = 1;
  with.sgid_index = static_cast<uint8_t>(PrimaryGid(nic.gids(), ipv4));
  std::memcpy(with.dgid, peer[PrimaryGid(peer, ipv4)].bytes().data(), sizeof(with.dgid));
  return with;
}

}  // namespace verbena::nic
