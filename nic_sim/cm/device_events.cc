// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: NICs that come, go and change.
#include <algorithm>
#include <utility>
#include <vector>

#include "nic_sim/cm/agent_state.h"

namespace verbena::nic {
namespace {

// enum rdma_cm_event_type.
constexpr uint32_t kDeviceRemoval = 11;
constexpr uint32_t kAddrChange = 14;

// Where the id of a command is; empty: it has none.
std::optional<size_t> IdOffset(uint32_t command) {
  switch (command) {
    case RDMA_USER_CM_CMD_DESTROY_ID:
    case RDMA_USER_CM_CMD_LEAVE_MCAST:
      return offsetof(rdma_ucm_destroy_id, id);
    case RDMA_USER_CM_CMD_BIND_IP:
      return offsetof(rdma_ucm_bind_ip, id);
    case RDMA_USER_CM_CMD_RESOLVE_IP:
      return offsetof(rdma_ucm_resolve_ip, id);
    case RDMA_USER_CM_CMD_RESOLVE_ROUTE:
      return offsetof(rdma_ucm_resolve_route, id);
    case RDMA_USER_CM_CMD_QUERY_ROUTE:
    case RDMA_USER_CM_CMD_QUERY:
      return offsetof(rdma_ucm_query, id);
    case RDMA_USER_CM_CMD_CONNECT:
      return offsetof(rdma_ucm_connect, id);
    case RDMA_USER_CM_CMD_LISTEN:
      return offsetof(rdma_ucm_listen, id);
    case RDMA_USER_CM_CMD_ACCEPT:
      return offsetof(rdma_ucm_accept, id);
    case RDMA_USER_CM_CMD_REJECT:
      return offsetof(rdma_ucm_reject, id);
    case RDMA_USER_CM_CMD_DISCONNECT:
      return offsetof(rdma_ucm_disconnect, id);
    case RDMA_USER_CM_CMD_INIT_QP_ATTR:
      return offsetof(rdma_ucm_init_qp_attr, id);
    case RDMA_USER_CM_CMD_SET_OPTION:
      return offsetof(rdma_ucm_set_option, id);
    case RDMA_USER_CM_CMD_NOTIFY:
      return offsetof(rdma_ucm_notify, id);
    case RDMA_USER_CM_CMD_JOIN_IP_MCAST:
      return offsetof(rdma_ucm_join_ip_mcast, id);
    case RDMA_USER_CM_CMD_MIGRATE_ID:
      return offsetof(rdma_ucm_migrate_id, id);
    case RDMA_USER_CM_CMD_BIND:
      return offsetof(rdma_ucm_bind, id);
    case RDMA_USER_CM_CMD_RESOLVE_ADDR:
      return offsetof(rdma_ucm_resolve_addr, id);
    case RDMA_USER_CM_CMD_JOIN_MCAST:
      return offsetof(rdma_ucm_join_mcast, id);
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<uint32_t> CmAgent::State::NicOf(CmFileId file,
                                              std::span<const std::byte> bytes) const {
  if (bytes.size() < sizeof(rdma_ucm_cmd_hdr)) return std::nullopt;
  const auto header = LoadStruct<rdma_ucm_cmd_hdr>(bytes);
  const auto body = bytes.subspan(sizeof(header));
  const std::optional<size_t> at = IdOffset(header.cmd);
  if (!at || body.size() < *at + sizeof(uint32_t)) return std::nullopt;
  const auto found = ids_.find(LoadStruct<uint32_t>(body.subspan(*at)));
  if (found == ids_.end() || found->second->file != file) return std::nullopt;
  const CmIdRecord& record = *found->second;
  if (record.local) return record.local->nic;
  std::optional<SocketAddress> own;
  std::optional<SocketAddress> peer;
  if (header.cmd == RDMA_USER_CM_CMD_BIND) {
    const auto command = LoadStruct<rdma_ucm_bind>(body);
    own = SocketAddress::Load(ObjectBytes(command.addr));
  } else if (header.cmd == RDMA_USER_CM_CMD_RESOLVE_ADDR) {
    const auto command = LoadStruct<rdma_ucm_resolve_addr>(body);
    own = SocketAddress::Load(ObjectBytes(command.src_addr));
    peer = SocketAddress::Load(ObjectBytes(command.dst_addr));
  } else {
    return std::nullopt;
  }
  if (own && !own->IsAny()) {
    const std::optional<LocalEnd> end = router_.FindLocal(*own);
    return end ? std::optional<uint32_t>(end->nic) : std::nullopt;
  }
  Route route;
  if (!peer || router_.Find(*peer, std::nullopt, {}, &route) != 0) return std::nullopt;
  return route.local.nic;
}

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

void CmAgent::State::SetGids(uint32_t nic, std::vector<CmNic::Address> gids) {
  if (nic >= nics_.size()) return;
  nics_[nic].gids = std::move(gids);
  std::vector<transport::Gid> known;
  for (const CmNic::Address& address : nics_[nic].gids) known.push_back(address.gid);
  protocol_.SetGids(nic, std::move(known));
}

void CmAgent::State::AnnounceAddressChange(uint32_t nic, transport::Time now) {
  if (nic >= nics_.size() || IsRemoved(nic)) return;
  now_ = now;
  for (const uint32_t id : IdsBoundTo(nic)) QueuePlain(*ids_.at(id), kAddrChange, 0);
}

}  // namespace verbena::nic
