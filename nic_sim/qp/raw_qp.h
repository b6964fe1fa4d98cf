// SPDX-License-Identifier: Apache-2.0
//
// RawQp: a QP that sends and receives whole Ethernet frames. Each SEND is one
// frame, sent once; what it receives is decided by the flow rules of its port
// (nic_sim/fabric/flow_table.h).
//
// Thread: under the shard's lock.
#pragma once

#include <cstdint>
#include <span>

#include "nic_sim/mem/dma_queue.h"
#include "nic_sim/qp/qp.h"
#include "nic_sim/queues/work_queue.h"
#include "transport/ud/receiver.h"
#include "transport/ud/sender.h"

namespace verbena::nic {

class RawQp final : public Qp {
 public:
  explicit RawQp(const Config& config);
  ~RawQp() override;

  bool is_raw() const override { return true; }
  DropReason HandlePacket(const transport::PacketView&, transport::Time) override {
    return DropReason::wrong_transport;
  }
  DropReason HandleFrame(std::span<const std::byte> frame, uint32_t flow_tag) override;
  int LimitRate(uint32_t kbps, uint32_t burst_bytes) override;
  transport::Time next_timeout() const override {
    return sq_.empty() || rate_kbps_ == 0 || due_ ? transport::Time::Never() : next_send_;
  }
  void HandleTimeout(transport::Time) override { due_ = true; }
  uint32_t Service(transport::Time now, uint32_t budget) override;
  bool PollTransmit(transport::Time now, transport::TxPacket* packet, bool* response) override;
  void HandleFetched(transport::Psn psn) override;
  void HandleFetchFailed(transport::Psn psn, bool response, transport::MemoryStatus why,
                         transport::Time now) override;
  bool wants_service() const override {
    return !sq_.empty() && sender_.CanSend() &&
           (state_ == transport::QpState::kErr ||
            (state_ == transport::QpState::kRts && rate_kbps_ == 0));
  }
  // As on NICs a send that fails ends the QP: there is no SQE.
  bool wants_error() const override {
    return (state_ == transport::QpState::kRts || state_ == transport::QpState::kSqd)
               ? sender_.failed() || receiver_.failed()
               : state_ != transport::QpState::kErr && receiver_.failed();
  }
  Progress progress() const override { return {}; }
  void AddCounters(transport::TransportCounters* sum) const override {
    sum->Add(sender_.counters());
    sum->Add(receiver_.counters());
  }

 private:
  class ReceiverSide final : public DmaOwner {
   public:
    explicit ReceiverSide(RawQp& qp) : qp_(qp) {}
    void OnPlaced(transport::Ticket ticket) override;
    void OnAtomic(transport::Ticket, uint64_t) override {}
    void OnPlaceFailed(transport::Ticket ticket) override;

   private:
    RawQp& qp_;
  };

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
  // Pacing: a frame may go out when the clock has reached next_send_, which the
  // frames before have moved, and which lags behind the clock by a burst at most.
  uint32_t rate_kbps_ = 0;  // 0: none
  transport::Duration burst_;
  transport::Time next_send_;
  bool due_ = false;  // its time has come; PollTransmit looks
};

}  // namespace verbena::nic
