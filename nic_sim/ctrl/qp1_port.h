// SPDX-License-Identifier: Apache-2.0
//
// Qp1Port: QP1 of all NICs of a daemon. MADs of the connection manager become
// packets of the fabric, as Linux sends them, and packets to QP1 become MADs. They
// have an inbox of their own, so that no application's memory holds them up.
//
// Thread: calls under the connection manager's mutex; OnForeignPackets from any,
// under the fabric's lock.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "nic_sim/ctrl/cm_host.h"
#include "nic_sim/device/device.h"
#include "nic_sim/fabric/fabric.h"
#include "nic_sim/supervisor/seqpacket.h"
#include "transport/psn.h"

namespace verbena::nic {

class Qp1Port final : public CmMadPort, public InboxOwner {
 public:
  // `device` outlives it. One of them may be there at a time.
  explicit Qp1Port(Device& device);
  ~Qp1Port() override;
  Qp1Port(const Qp1Port&) = delete;
  Qp1Port& operator=(const Qp1Port&) = delete;

  void SendMad(const transport::MadPacket& mad) override;
  bool PollMad(transport::MadPacket* mad) override;
  int wake_fd() const override { return wake_.get(); }
  CmPlatform::Reach Resolve(uint32_t nic, const transport::Gid& destination) override;
  void JoinGroup(uint32_t nic, const transport::Gid& group) override;
  void LeaveGroup(uint32_t nic, const transport::Gid& group) override;

  void OnForeignPackets() override;

 private:
  // Why the packet is no MAD for us; DropReason::count if it is one.
  DropReason Read(PortId port, rte_mbuf* packet, transport::MadPacket* mad) const;
  bool HasReceived() const;
  void KickEngine();

  Device& device_;
  Fabric& fabric_;
  UniqueFd wake_;
  std::vector<transport::Psn> next_psn_;  // by NIC
  // Somebody is going to poll: no need to wake.
  std::atomic<bool> polled_{false};
};

}  // namespace verbena::nic
