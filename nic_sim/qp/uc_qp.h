// SPDX-License-Identifier: Apache-2.0
//
// UcQp: a QP of an unreliable connection.
//
// Thread: under the shard's lock.
#pragma once

#include <cstdint>

#include "nic_sim/mem/dma_queue.h"
#include "nic_sim/qp/qp.h"
#include "nic_sim/queues/work_queue.h"
#include "transport/uc/requester.h"
#include "transport/uc/responder.h"

namespace verbena::nic {

class UcQp final : public Qp {
 public:
  explicit UcQp(const Config& config);
  ~UcQp() override;

  DropReason HandlePacket(const transport::PacketView& packet, transport::Time now) override;
  uint32_t Service(transport::Time now, uint32_t budget) override;
  bool PollTransmit(transport::Time now, transport::TxPacket* packet, bool* response) override;
  void HandleFetched(transport::Psn psn) override;
  void HandleFetchFailed(transport::Psn psn, bool response, transport::MemoryStatus why,
                         transport::Time now) override;
  bool wants_service() const override {
    return !sq_.empty() && requester_.CanPost() &&
           (state_ == transport::QpState::kRts || flushes_sends());
  }
  bool wants_error() const override {
    return ((state_ == transport::QpState::kRts || state_ == transport::QpState::kSqd) &&
            requester_.failed()) ||
           (state_ != transport::QpState::kErr && responder_.failed());
  }
  Progress progress() const override;
  void AddCounters(transport::TransportCounters* sum) const override {
    sum->Add(requester_.counters());
    sum->Add(responder_.counters());
  }

 private:
  // Reports of placements of received messages.
  class ResponderSide final : public DmaOwner {
   public:
    explicit ResponderSide(UcQp& qp) : qp_(qp) {}
    void OnPlaced(transport::Ticket ticket) override;
    void OnAtomic(transport::Ticket, uint64_t) override {}
    void OnPlaceFailed(transport::Ticket ticket) override;

   private:
    UcQp& qp_;
  };

  bool flushes_sends() const {
    return state_ == transport::QpState::kSqe || state_ == transport::QpState::kErr;
  }
  void OnTransition(transport::QpState from, transport::QpState to) override;
  void ResetMachines() override;
  void FlushMachines() override;
  bool drained() const override { return requester_.drained(); }
  bool receives_flushed() const override { return responder_.flushed(); }
  void DrainOutputs(transport::Time now);

  ResponderSide responder_side_;
  QpMemory memory_;
  transport::UcRequester requester_;
  transport::UcResponder responder_;
  FetchedSend current_;   // the message that is being sent
  uint32_t fetched_ = 0;  // WQEs since the last Service
};

}  // namespace verbena::nic
