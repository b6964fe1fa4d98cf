// SPDX-License-Identifier: Apache-2.0
//
// What the engine process tells the supervisor over their socket pair (SOCK_SEQPACKET). The two
// trust each other: they are one program. The other direction carries one message, kStop.
#pragma once

#include <cstdint>
#include <span>

namespace verbena::nic {

enum class LinkKind : uint32_t {
  // Engine to supervisor.
  kReady = 1,      // + status page, read-write: tree and socket are there
  kFailed,         // `text` says why the engine cannot start
  kAddContext,     // + write end of the async event pipe of `context`
  kAddChannel,     // + write end of the channel of CQ `handle`; `user_handle` wakes it
  kRemoveCq,       // CQ `handle` of `context`
  kRemoveContext,  // with all its CQs
  kStopping,       // a clean end begins: tell the clients now
  kHold,           // + a connection to be closed when all is over
  // Supervisor to engine.
  kStop,
};

struct LinkMessage {
  LinkKind kind = LinkKind::kReady;
  uint32_t handle = 0;
  uint64_t context = 0;  // number of the connection
  uint64_t user_handle = 0;
  char text[488] = {};  // terminated
};
static_assert(sizeof(LinkMessage) == 512);

inline std::span<const std::byte> BytesOf(const LinkMessage& message) {
  return std::as_bytes(std::span(&message, 1));
}

}  // namespace verbena::nic
