// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: NICs that come, go and change.
#include <algorithm>

#include "nic_sim/cm/agent_state.h"

namespace verbena::nic {
namespace {

// enum rdma_cm_event_type.
constexpr uint32_t kDeviceRemoval = 11;
constexpr uint32_t kAddrChange = 14;

}  // namespace

// In the order of their creation.
std::vector<uint32_t> CmAgent::State::IdsBoundTo(uint32_t nic) const {
  std::vector<uint32_t> ids;
  for (const auto& [id, record] : ids_) {
    if (!record->removed && record->local && record->local->nic == nic) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

void CmAgent::State::RemoveNic(uint32_t nic, transport::Time now) {
  if (nic >= nics_.size() || IsRemoved(nic)) return;
  now_ = now;
  // Events stay, also those of connections that nobody has accepted: who takes
  // such a one finds it gone, and has to destroy it.
  for (const uint32_t id : IdsBoundTo(nic)) {
    CmIdRecord& record = *ids_.at(id);
    QueuePlain(record, kDeviceRemoval, 0);
    ReleaseRecord(record, false);
    record.removed = true;
  }
  std::erase_if(held_, [nic](const CmHeldRequest& held) { return held.mad.nic == nic; });
  nics_[nic].removed = true;
  DrainProtocol();
}

void CmAgent::State::RestoreNic(uint32_t nic) {
  if (nic < nics_.size()) nics_[nic].removed = false;
}

void CmAgent::State::AnnounceAddressChange(uint32_t nic, transport::Time now) {
  if (nic >= nics_.size() || IsRemoved(nic)) return;
  now_ = now;
  for (const uint32_t id : IdsBoundTo(nic)) QueuePlain(*ids_.at(id), kAddrChange, 0);
}

}  // namespace verbena::nic
