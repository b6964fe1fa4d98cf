// SPDX-License-Identifier: Apache-2.0
//
// RcQp: a QP of a reliable connection; XRC_SEND and XRC_RECV are one half of it
// each, with other opcodes.
//
// Thread: under the shard's lock.
#pragma once

#include <cstdint>

#include "nic_sim/mem/dma_queue.h"
#include "nic_sim/qp/qp.h"
#include "transport/rc/requester.h"
#include "transport/rc/responder.h"

namespace verbena::nic {

class RcQp final : public Qp {
 public:
  explicit RcQp(const Config& config);
  ~RcQp() override;

  DropReason HandlePacket(const transport::PacketView& packet, transport::Time now) override;
  void HandleTimeout(transport::Time now) override;
  uint32_t Service(transport::Time now, uint32_t budget) override;
  bool PollTransmit(transport::Time now, transport::TxPacket* packet, bool* response) override;
  void HandleFetchFailed(transport::Psn psn, bool response, transport::MemoryStatus why,
                         transport::Time now) override;
  transport::Time next_timeout() const override { return requester_.next_timeout(); }
  void ShiftDeadlines(transport::Duration gap) override { requester_.ShiftDeadlines(gap); }
  bool wants_service() const override { return sends() && !sq_.empty() && requester_.CanPost(); }
  bool wants_error() const override {
    return state_ != transport::QpState::kErr && state_ != transport::QpState::kReset &&
           (requester_.failed() || responder_.failed());
  }
  PdId PayloadPd(const transport::TxPacket& packet) const override;
  Progress progress() const override;
  void AddCounters(transport::TransportCounters* sum) const override {
    sum->Add(requester_.counters());
    sum->Add(responder_.counters());
  }

 private:
  // XRC_RECV: the SRQ that the packet at hand names.
  class XrcPort final : public transport::ReceiveQueuePort {
   public:
    explicit XrcPort(RcQp& qp) : qp_(qp) {}
    bool Select(transport::SrqNumber number) override;
    bool Take(transport::RecvRequest* request) override;
    void PutBack() override {}

   private:
    RcQp& qp_;
    SharedReceiveQueue* srq_ = nullptr;  // valid while a packet is handled
  };

  // Reports of placements to the two state machines.
  class RequesterSide final : public DmaOwner {
   public:
    explicit RequesterSide(RcQp& qp) : qp_(qp) {}
    void OnPlaced(transport::Ticket ticket) override;
    void OnAtomic(transport::Ticket ticket, uint64_t original) override;
    void OnPlaceFailed(transport::Ticket ticket) override;

   private:
    RcQp& qp_;
  };
  class ResponderSide final : public DmaOwner {
   public:
    explicit ResponderSide(RcQp& qp) : qp_(qp) {}
    void OnPlaced(transport::Ticket ticket) override;
    void OnAtomic(transport::Ticket ticket, uint64_t original) override;
    void OnPlaceFailed(transport::Ticket ticket) override;

   private:
    RcQp& qp_;
  };

  bool sends() const {
    return state_ == transport::QpState::kRts || state_ == transport::QpState::kSqd ||
           state_ == transport::QpState::kErr;
  }
  transport::RcRequesterConfig RequesterConfig() const;
  transport::RcResponderConfig ResponderConfig() const;
  void OnTransition(transport::QpState from, transport::QpState to) override;
  void ResetMachines() override;
  void OnMigration() override;
  void FlushMachines() override;
  bool drained() const override { return requester_.drained(); }
  bool receives_flushed() const override { return responder_.flushed(); }
  void DrainOutputs(transport::Time now);
  void CompleteXrc(const transport::Completion& completion, transport::Time now);
  // Opcodes of XRC are those of RC and this.
  uint8_t OpcodeBase() const { return is_xrc() ? 0xa0 : 0; }
  bool is_xrc() const { return config_.type != transport::QpType::kRc; }

  RequesterSide requester_side_;
  ResponderSide responder_side_;
  QpMemory requester_memory_;
  QpMemory responder_memory_;
  XrcPort xrc_port_;
  transport::RcRequester requester_;
  transport::RcResponder responder_;
};

}  // namespace verbena::nic
