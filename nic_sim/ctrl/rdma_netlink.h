// SPDX-License-Identifier: Apache-2.0
//
// What Linux' NETLINK_RDMA tells of devices: answers to RDMA_NLDEV_CMD_* as
// iproute2's `rdma` asks them (<rdma/rdma_netlink.h>). Read-only.
//
// Thread: any.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "nic_sim/ctrl/hardware.h"

namespace verbena::nic {

// DEV_INDEX of verbenaN is N + this; Linux counts from 0.
inline constexpr uint32_t kFirstDeviceIndex = 0;

// One request, one message or more of at most abi::kMaxNetlinkReply bytes in
// answer; none if it is no request. `user`: whose objects are shown; none: all.
std::vector<std::vector<std::byte>> AnswerNetlink(std::span<const std::byte> request,
                                                  Hardware* hardware, std::optional<uid_t> user);

}  // namespace verbena::nic
