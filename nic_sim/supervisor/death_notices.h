// SPDX-License-Identifier: Apache-2.0
//
// Whom to tell, and how, that the device is dead: the status page, the async event pipe of each
// context and the completion channels. The supervisor holds one of these for the case that the
// engine process dies; the engine holds one for the case that the supervisor dies.
//
// Thread: one. Never blocks.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "nic_sim/supervisor/link.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

class DeathNotices {
 public:
  // kAddContext, kAddChannel, kRemoveCq, kRemoveContext, kReady (status page); others are ignored.
  // Takes `fd` over.
  void Apply(const LinkMessage& message, UniqueFd fd);

  // Sets device_dead, wakes every completion channel with its CQs' user handles and writes
  // IBV_EVENT_DEVICE_FATAL to every context. Once; later calls do nothing.
  void Announce();
  // The same of one context alone, without the status page.
  void AnnounceRemoval(uint64_t context);

  size_t context_count() const { return contexts_.size(); }
  size_t descriptor_count() const;

 private:
  // The CQs of one channel share its pipe, so that 10 000 CQs need one descriptor.
  using PipeId = std::pair<uint64_t, uint64_t>;  // st_dev, st_ino
  struct Channel {
    UniqueFd fd;
    uint32_t cqs = 0;
  };
  struct Cq {
    PipeId channel;
    uint64_t user_handle = 0;
  };
  struct Context {
    UniqueFd async;
    std::map<PipeId, Channel> channels;
    std::map<uint32_t, Cq> cqs;
  };

  void AddChannel(const LinkMessage& message, UniqueFd fd);
  static void RemoveCq(Context* context, uint32_t handle);

  UniqueFd status_page_;
  std::map<uint64_t, Context> contexts_;
  bool announced_ = false;
};

}  // namespace verbena::nic
