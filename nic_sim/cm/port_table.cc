// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/cm/port_table.h"

#include <cerrno>

namespace verbena::nic {

int PortTable::Check(const Key& key, const PortOwner& owner, bool reuse_address) const {
  const auto it = ports_.find(key);
  if (it == ports_.end()) return 0;
  for (const PortOwner* other : it->second) {
    if (other == &owner || (reuse_address && other->reuse_address)) continue;
    if (owner.family_only && other->family_only && owner.source.family != other->source.family) {
      continue;
    }
    if (owner.source.IsAny() || other->source.IsAny()) return EADDRNOTAVAIL;
    if (owner.source.SameIp(other->source)) return EADDRINUSE;
  }
  return 0;
}

int PortTable::Bind(uint16_t space, PortOwner& owner) {
  const Key key{space, owner.source.port};
  if (const int error = Check(key, owner, owner.reuse_address)) return error;
  ports_[key].insert(&owner);
  return 0;
}

int PortTable::BindEphemeral(uint16_t space, PortOwner& owner, uint32_t random) {
  constexpr uint32_t kCount = kLastEphemeral - kFirstEphemeral + 1;
  for (uint32_t i = 0; i < kCount; ++i) {
    const auto port = static_cast<uint16_t>(kFirstEphemeral + (random + i) % kCount);
    if (ports_.contains({space, port})) continue;
    owner.source.SetPort(port);
    ports_[{space, port}].insert(&owner);
    return 0;
  }
  return EADDRNOTAVAIL;
}

void PortTable::Release(uint16_t space, PortOwner& owner) {
  const auto it = ports_.find({space, owner.source.port});
  if (it == ports_.end()) return;
  it->second.erase(&owner);
  if (it->second.empty()) ports_.erase(it);
}

int PortTable::CheckListen(uint16_t space, const PortOwner& owner) const {
  return Check({space, owner.source.port}, owner, false);
}

}  // namespace verbena::nic
