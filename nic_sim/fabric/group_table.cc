// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/group_table.h"

#include <algorithm>
#include <cerrno>

namespace verbena::nic {
namespace {

auto MemberAt(GroupTable::Group& group, PortId port) {
  return std::find_if(group.begin(), group.end(),
                      [port](const GroupTable::Member& member) { return member.port == port; });
}

}  // namespace

const GroupTable::Member* GroupTable::Find(const transport::Gid& group, PortId port) const {
  const Group* members = Find(group);
  if (members == nullptr) return nullptr;
  for (const Member& member : *members) {
    if (member.port == port) return &member;
  }
  return nullptr;
}

int GroupTable::Attach(const transport::Gid& group, PortId port, ShardId shard,
                       const GroupLimits& limits) {
  if (usage_.size() <= port) usage_.resize(port + size_t{1});
  Usage& usage = usage_[port];
  const Member* existing = Find(group, port);
  if (usage.attachments >= limits.attachments ||
      (existing == nullptr ? usage.groups >= limits.groups
                           : existing->attached >= limits.qps_of_group)) {
    return ENOMEM;
  }
  Group& members = groups_[group];
  auto member = MemberAt(members, port);
  if (member == members.end()) {
    ++usage.groups;
    member = members.insert(member, Member{.port = port, .attached = 0, .of_shard = {}});
  }
  ++member->attached;
  ++member->of_shard[shard];
  ++usage.attachments;
  return 0;
}

void GroupTable::Detach(const transport::Gid& group, PortId port, ShardId shard) {
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  const auto member = MemberAt(found->second, port);
  if (member == found->second.end() || member->of_shard[shard] == 0) return;
  --member->of_shard[shard];
  --usage_[port].attachments;
  if (--member->attached != 0) return;
  --usage_[port].groups;
  found->second.erase(member);
  if (found->second.empty()) groups_.erase(found);
}

}  // namespace verbena::nic
