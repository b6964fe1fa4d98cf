// SPDX-License-Identifier: Apache-2.0
//
// CmHost: the connection manager of one daemon, in its surroundings: CmAgent,
// the clock, this machine's addresses, and the way of its MADs.
//
// Thread: any, with mutex() held.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "nic_sim/cm/cm_agent.h"
#include "nic_sim/ctrl/cm_service.h"
#include "nic_sim/faults/device_faults.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

// What carries MADs: QP1 of the NICs.
class CmMadPort {
 public:
  virtual ~CmMadPort() = default;
  // Sends it as the packet that transport/cm/mad_packet.h describes.
  // The caller polls until there is no more.
  virtual void SendMad(const transport::MadPacket& mad) = 0;
  // One that arrived; ICRC, P_Key and Q_Key are right. False: none.
  virtual bool PollMad(transport::MadPacket* mad) = 0;
  // Readable when some have arrived.
  virtual int wake_fd() const = 0;
  // See CmPlatform.
  virtual CmPlatform::Reach Resolve(uint32_t nic, const transport::Gid& destination) = 0;
  virtual void JoinGroup(uint32_t nic, const transport::Gid& group) = 0;
  virtual void LeaveGroup(uint32_t nic, const transport::Gid& group) = 0;
};

class CmHost final : public CmService, private CmPlatform {
 public:
  // `port` outlives it; nullptr: MADs go straight from NIC to NIC of this
  // daemon, and nowhere else.
  // `faults`: rules for commands and events; outlives it, may be nullptr.
  CmHost(std::vector<CmNic> nics, CmMadPort* port, DeviceFaults* faults = nullptr);
  ~CmHost() override;

  const CmAgent& agent() const { return *agent_; }

  // CmService.
  CmFileId OpenFile(const CmClient& client) override;
  void CloseFile(CmFileId file) override;
  CmReply Write(CmFileId file, std::span<const std::byte> bytes) override;
  bool PollNotification(CmNotification* notification) override;
  void RemoveNic(uint32_t nic) override;
  void RestoreNic(uint32_t nic) override;
  void AnnounceAddressChange(uint32_t nic) override;
  void SetGids(uint32_t nic, std::vector<CmNic::Address> gids) override;
  int notification_fd() const override { return wake_.get(); }
  int timer_fd() const override { return timer_.get(); }
  void HandleTimer() override;
  int packet_fd() const override { return port_ != nullptr ? port_->wake_fd() : -1; }
  void HandlePackets() override;

 private:
  // CmPlatform.
  bool IsHostAddress(const transport::Gid& address) override;
  Reach Resolve(uint32_t nic, const transport::Gid& destination) override;
  uint32_t Random() override;
  std::optional<int32_t> InjectedStatus(uint32_t file, uint8_t event,
                                        std::optional<uint32_t> nic) override;
  void JoinGroup(uint32_t nic, const transport::Gid& group) override;
  void LeaveGroup(uint32_t nic, const transport::Gid& group) override;

  FaultSubject SubjectOf(CmFileId file, std::optional<uint32_t> nic);
  void Drain();
  void Send(const transport::MadPacket& mad);
  void Wake();

  std::vector<CmNic> nics_;
  CmMadPort* const port_;
  DeviceFaults* const faults_;
  std::map<CmFileId, std::string> apps_;  // process names
  UniqueFd wake_;
  UniqueFd timer_;
  transport::Time armed_ = transport::Time::Never();
  std::deque<transport::MadPacket> local_;  // on their way inside
  std::set<std::vector<std::byte>> host_addresses_;
  std::chrono::steady_clock::time_point host_addresses_until_;
  std::unique_ptr<CmAgent> agent_;
};

}  // namespace verbena::nic
