// SPDX-License-Identifier: Apache-2.0
//
// Commands of a device connection: from the bytes of a request to a call of the context and back
// to the bytes of the reply. The bytes come from an application and are believed in nothing: size
// and op are checked here, handles and values by the device.
//
// Thread: the control thread, with the shard's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "nic_sim/device/context.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

struct CommandResult {
  std::vector<std::byte> reply;  // always a whole one, zeroed after an error
  std::vector<UniqueFd> fds;     // to go with it
  int error = 0;
  // For the supervisor: a CQ that has a channel was made, or a CQ was destroyed.
  enum class CqChange { kNone, kChannelAdded, kRemoved } cq_change = CqChange::kNone;
  uint32_t cq = 0;
  uint64_t cq_user_handle = 0;
  UniqueFd channel;  // kChannelAdded: a duplicate of its write end
};

// `request` is the whole message, `truncated` if it was longer than its buffer; descriptors that
// the command does not take are closed. Errors: EINVAL wrong size or descriptors, EOPNOTSUPP
// unknown op, else what the context says.
CommandResult DispatchCommand(Context* context, std::span<const std::byte> request, bool truncated,
                              std::vector<UniqueFd> fds);

}  // namespace verbena::nic
