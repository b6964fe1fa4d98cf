// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: multicast groups. On RoCE a group's GID is its IP address, and a
// join is the host's own business (IGMP, MLD): it succeeds at once.
#include <cerrno>

#include "nic_sim/cm/agent_state.h"

namespace verbena::nic {

int CmAgent::State::JoinRecord(const Request& request, CmIdRecord& record,
                               const SocketAddress& group, uint64_t uid, bool send_only) {
  if (!record.local ||
      (record.state != CmIdState::kAddrBound && record.state != CmIdState::kAddrResolved)) {
    return EINVAL;
  }
  if (!group.IsMulticast()) return EINVAL;
  if (groups_.size() >= kMaxCmIds) return ENOMEM;
  const uint32_t id = NewIdNumber();
  groups_[id] = CmGroupRecord{.id = id,
                              .owner = record.id,
                              .uid = uid,
                              .nic = record.local->nic,
                              .mgid = group.ip,
                              .send_only = send_only};
  record.groups.insert(id);
  if (!send_only) platform_.JoinGroup(record.local->nic, group.ip);
  Answer(request, rdma_ucm_create_id_resp{.id = id});

  constexpr uint32_t kMulticastJoin = 12;
  CmQueuedEvent event{};
  event.group = id;
  event.response.uid = uid;
  event.response.id = id;
  event.response.event = kMulticastJoin;
  rdma_ucm_ud_param& param = event.response.param.ud;
  transport::CmPath path;
  path.sgid_index = record.local->sgid_index;
  path.remote_gid = group.ip;
  path.traffic_class = record.tos.value_or(0);
  FillAhAttr(path, &param.ah_attr);
  param.qp_num = transport::kMulticastQpn.value();
  param.qkey = kUdpQkey;
  Queue(record, event);
  return 0;
}

int CmAgent::State::JoinIpMulticast(const Request& request) {
  const auto command = Load<rdma_ucm_join_ip_mcast>(request);
  const auto group = SocketAddress::Load(std::as_bytes(std::span(&command.addr, 1)));
  if (!group) return EINVAL;
  CmIdRecord* record = FindId(request, command.id);
  return record == nullptr ? ENOENT : JoinRecord(request, *record, *group, command.uid, false);
}

int CmAgent::State::JoinMulticast(const Request& request) {
  const auto command = Load<rdma_ucm_join_mcast>(request);
  const auto group = SocketAddress::Load(std::as_bytes(std::span(&command.addr, 1)));
  if (!group || group->size() != command.addr_size ||
      command.join_flags >= RDMA_MC_JOIN_FLAG_RESERVED) {
    return EINVAL;
  }
  CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  return JoinRecord(request, *record, *group, command.uid,
                    command.join_flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER);
}

void CmAgent::State::LeaveGroupRecord(uint32_t group) {
  const auto it = groups_.find(group);
  if (it == groups_.end()) return;
  if (!it->second.send_only) platform_.LeaveGroup(it->second.nic, it->second.mgid);
  ids_.at(it->second.owner)->groups.erase(group);
  groups_.erase(it);
}

int CmAgent::State::LeaveMulticast(const Request& request) {
  const auto command = Load<rdma_ucm_destroy_id>(request);
  const auto it = groups_.find(command.id);
  if (it == groups_.end() || FindId(request, it->second.owner) == nullptr) return ENOENT;
  const uint32_t group = command.id;
  auto& events = request.file->events;
  const auto dropped =
      std::erase_if(events, [group](const CmQueuedEvent& event) { return event.group == group; });
  Notify(request.file_id, -static_cast<int32_t>(dropped));
  Answer(request, rdma_ucm_destroy_id_resp{.events_reported = it->second.events_reported});
  LeaveGroupRecord(group);
  return 0;
}

}  // namespace verbena::nic
