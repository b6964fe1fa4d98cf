// SPDX-License-Identifier: Apache-2.0
//
// The connection manager as the control server sees it: CmAgent with a clock,
// and whatever carries its MADs.
//
// Thread: any, with mutex() held, except for the two descriptors. Nothing else is locked meanwhile
// by whoever holds it.
#pragma once

#include <cstddef>
#include <mutex>
#include <span>
#include <vector>

#include "nic_sim/cm/cm_agent.h"

namespace verbena::nic {

class CmService {
 public:
  virtual ~CmService() = default;

  // See CmAgent.
  virtual CmFileId OpenFile(const CmClient& client) = 0;
  virtual void CloseFile(CmFileId file) = 0;
  virtual CmReply Write(CmFileId file, std::span<const std::byte> bytes) = 0;
  virtual bool PollNotification(CmNotification* notification) = 0;

  // What happens to a NIC, for the applications; see CmAgent. Notifications follow.
  virtual void RemoveNic([[maybe_unused]] uint32_t nic) {}
  virtual void RestoreNic([[maybe_unused]] uint32_t nic) {}
  virtual void AnnounceAddressChange([[maybe_unused]] uint32_t nic) {}
  virtual void SetGids([[maybe_unused]] uint32_t nic,
                       [[maybe_unused]] std::vector<CmNic::Address> gids) {}

  // Non-blocking eventfd, readable when others than these calls (packets,
  // timers) have caused notifications. Constant, owned by the service.
  virtual int notification_fd() const = 0;

  // Non-blocking timerfd, readable when HandleTimer() is due; -1: none.
  // Constant, owned by the service.
  virtual int timer_fd() const { return -1; }
  virtual void HandleTimer() {}

  // Readable when MADs wait for HandlePackets(); -1: there is no such thing.
  // Constant, owned by the service.
  virtual int packet_fd() const { return -1; }
  virtual void HandlePackets() {}

  std::mutex& mutex() const { return mutex_; }

 private:
  mutable std::mutex mutex_;
};

}  // namespace verbena::nic
