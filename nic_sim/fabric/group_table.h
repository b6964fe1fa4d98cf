// SPDX-License-Identifier: Apache-2.0
//
// GroupTable: who is a member of which multicast group: ports, and of each port
// the shards that have QPs in it. Which QPs those are the shards know.
//
// Thread: under the fabric's lock. Look-ups do not allocate.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "nic_sim/fabric/packet.h"
#include "transport/types.h"

namespace verbena::nic {

// What one port may have.
struct GroupLimits {
  uint32_t groups = 0;
  uint32_t qps_of_group = 0;
  uint32_t attachments = 0;  // of all groups together
};

class GroupTable {
 public:
  struct Member {
    PortId port = 0;
    uint32_t attached = 0;                        // QPs
    std::array<uint32_t, kMaxShards> of_shard{};  // of them
  };
  using Group = std::vector<Member>;

  // One QP more. 0, or ENOMEM: a limit is reached.
  int Attach(const transport::Gid& group, PortId port, ShardId shard, const GroupLimits& limits);
  // One less, of those that were attached.
  void Detach(const transport::Gid& group, PortId port, ShardId shard);

  // nullptr: nobody is a member.
  const Group* Find(const transport::Gid& group) const {
    const auto found = groups_.find(group);
    return found == groups_.end() ? nullptr : &found->second;
  }
  // nullptr: the port is no member.
  const Member* Find(const transport::Gid& group, PortId port) const;

 private:
  struct Usage {
    uint32_t groups = 0;
    uint32_t attachments = 0;
  };
  std::unordered_map<transport::Gid, Group> groups_;
  std::vector<Usage> usage_;  // by port
};

}  // namespace verbena::nic
