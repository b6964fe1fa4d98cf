// SPDX-License-Identifier: Apache-2.0
//
// UdQp: a QP of unreliable datagrams.
//
// Thread: under the shard's lock.
#pragma once

#include <cstdint>

#include "nic_sim/mem/dma_queue.h"
#include "nic_sim/qp/qp.h"
#include "nic_sim/queues/work_queue.h"
#include "transport/ud/receiver.h"
#include "transport/ud/sender.h"

namespace verbena::nic {

class UdQp final : public Qp {
 public:
  explicit UdQp(const Config& config);
  ~UdQp() override;

  DropReason HandlePacket(const transport::PacketView& packet, transport::Time now) override;
  uint32_t Service(transport::Time now, uint32_t budget) override;
  bool PollTransmit(transport::Time now, transport::TxPacket* packet, bool* response) override;
  void HandleFetched(transport::Psn psn) override;
  void HandleFetchFailed(transport::Psn psn, bool response, transport::MemoryStatus why,
                         transport::Time now) override;
  bool wants_service() const override {
    return !sq_.empty() && sender_.CanSend() &&
           (state_ == transport::QpState::kRts || flushes_sends());
  }
  bool wants_error() const override {
    return (state_ == transport::QpState::kRts && sender_.failed()) ||
           (state_ != transport::QpState::kErr && receiver_.failed());
  }
  Progress progress() const override;
  void AddCounters(transport::TransportCounters* sum) const override {
    sum->Add(sender_.counters());
    sum->Add(receiver_.counters());
  }

 private:
  // Reports of placements of received datagrams.
  class ReceiverSide final : public DmaOwner {
   public:
    explicit ReceiverSide(UdQp& qp) : qp_(qp) {}
    void OnPlaced(transport::Ticket ticket) override;
    void OnAtomic(transport::Ticket, uint64_t) override {}
    void OnPlaceFailed(transport::Ticket ticket) override;

   private:
    UdQp& qp_;
  };

  bool flushes_sends() const {
    return state_ == transport::QpState::kSqe || state_ == transport::QpState::kErr;
  }
  void OnTransition(transport::QpState from, transport::QpState to) override;
  void ResetMachines() override;
  void FlushMachines() override;
  bool drained() const override { return sender_.drained(); }
  bool receives_flushed() const override { return receiver_.flushed(); }
  void DrainOutputs(transport::Time now);

  ReceiverSide receiver_side_;
  QpMemory memory_;
  transport::UdSender sender_;
  transport::UdReceiver receiver_;
  FetchedSend current_;   // what PollTransmit's packet refers to
  uint32_t fetched_ = 0;  // since the last Service
};

}  // namespace verbena::nic
