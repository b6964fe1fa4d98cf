// SPDX-License-Identifier: Apache-2.0
//
// What the loops of all users share, besides the device.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "nic_sim/ctrl/hardware.h"
#include "nic_sim/ctrl/rdma_cm_files.h"
#include "nic_sim/ctrl/server.h"
#include "nic_sim/supervisor/death_notices.h"
#include "nic_sim/supervisor/engine_link.h"

namespace verbena::nic {

// Both who are to tell of the device's death, one here and one in the supervisor. Any thread.
class News {
 public:
  // `link` may be null; it outlives this.
  explicit News(EngineLink* link) : link_(link) {}

  // `fd` is duplicated (-1: none). True: Flush has something to do.
  bool Tell(const LinkMessage& message, int fd = -1);
  // Only to the supervisor.
  bool TellSupervisor(const LinkMessage& message, int fd = -1);
  void Announce();
  // The device of a context was taken out. Before kRemoveContext.
  void AnnounceRemoval(uint64_t context);
  // Sends what had to wait; true if something still has to.
  bool Flush();
  void Drain(int milliseconds);

 private:
  std::mutex mutex_;
  EngineLink* link_;
  DeathNotices notices_;
};

struct ServerShared {
  ServerShared(Hardware* device, EngineLink* link, ServerOptions server_options);

  Hardware* const hardware;
  const ServerOptions options;
  News news;
  RdmaCmFiles rdma_cm;
  std::atomic<size_t> connections{0};
  std::atomic<uint32_t> contexts{0};
  std::atomic<bool> contexts_ever{false};
  std::atomic<bool> stop{false};
  std::atomic<bool> nics_changed{false};

  void Tell(const LinkMessage& message, int fd = -1) {
    if (news.Tell(message, fd)) Wake();
  }
  // Lets the server look at all this again. Also from signal handlers.
  void Wake();
  void Stop() {
    stop.store(true, std::memory_order_relaxed);
    Wake();
  }
  int wake_fd() const { return wake_.get(); }

 private:
  UniqueFd wake_;
};

}  // namespace verbena::nic
