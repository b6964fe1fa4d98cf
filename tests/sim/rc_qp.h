// SPDX-License-Identifier: Apache-2.0
//
// RcQp: a QP of a reliable connection, or both halves of an XRC one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tests/sim/qp.h"
#include "transport/rc/requester.h"
#include "transport/rc/responder.h"

namespace verbena::sim {

class RcQp final : public Qp {
 public:
  using Qp::Qp;

  Time next_timeout() const override { return halves_->requester.next_timeout(); }
  void ShiftDeadlines(Duration gap) override {
    if (state_ >= QpState::kRts) halves_->requester.ShiftDeadlines(gap);
  }
  Psn una_psn() const override { return halves_->requester.una_psn(); }
  Psn next_psn() const override { return halves_->requester.next_psn(); }
  Psn expected_psn() const override { return halves_->responder.expected_psn(); }

 private:
  struct Halves {
    Halves(const transport::RcRequester::Capacity& capacity, Port& requester_port,
           Port& responder_port, Qp& qp)
        : requester(capacity, requester_port), responder(responder_port, qp) {}
    transport::RcRequester requester;
    transport::RcResponder responder;
  };

  void MakeMachines() override;
  void ResetMachines() override;
  void StartResponder() override;
  void StartRequester() override;
  void Drain() override;
  void ResumeMachines() override { halves_->requester.Resume(); }
  void FlushMachines() override;

  bool CanPost() const override { return halves_->requester.CanPost(); }
  void Post(uint32_t index) override;
  uint32_t outstanding() const override { return halves_->requester.outstanding(); }
  bool drained() const override { return halves_->requester.drained(); }
  uint64_t una() const override { return out().ToSequence(una_psn(), out().next); }

  void ReceiveRequest(const PacketView& packet, uint64_t sequence) override;
  void ReceiveResponse(const PacketView& packet, bool is_old) override;
  void HandleReserved(Psn psn) override {
    halves_->responder.HandleReservedOpcode(psn, host_.now());
  }
  void HandleTimeout() override;
  void HandleCommitted(bool responder, Ticket ticket) override;
  void HandleAtomicCommitted(Ticket ticket, uint64_t original) override {
    halves_->responder.HandleAtomicCommitted(ticket, original, host_.now());
  }
  void HandlePlacementFailed(bool responder, Ticket ticket, MemoryStatus why) override;
  bool PollPacket(transport::TxPacket* packet, bool* is_response) override;
  void HandleFetchFailed(Psn psn, bool is_response, MemoryStatus why) override;
  bool PollRecvCompletion(Completion* completion) override;
  bool PollSendCompletion(Completion* completion) override {
    return halves_->requester.PollCompletion(completion);
  }
  bool TakeFailure() override;

  void CheckPacket(bool is_response, const transport::TxPacket& packet,
                   const std::span<const std::byte>* payload) override;
  void CheckPlacement(const MemorySegment& to, std::span<const std::byte> bytes,
                      MemoryAccess access) override;
  void CheckTake(Taken& taken) override;
  void CheckInvalidate(uint32_t key, bool done) override;
  void CheckDone(const Wr& wr) override;
  bool MayFail(const Wr& wr, WcStatus status) const override;
  void CheckReceived(const Completion& completion, const Taken& taken,
                     const std::string& who) override;
  bool IsWhole(const Taken& taken) const override;
  void CheckAllReceived() override;

  transport::RcRequesterConfig RequesterConfig() const;
  transport::RcResponderConfig ResponderConfig() const;
  void CheckResponse(const transport::TxPacket& packet, const std::span<const std::byte>* payload);
  void NoteRnrNak(const PacketView& packet, uint64_t rnr_naks_before);
  void CheckRetries(const transport::TransportCounters& before);

  std::unique_ptr<Halves> halves_;

  // The requester's counters at the last progress.
  uint64_t progress_rounds_ = 0;
  uint64_t progress_rnr_ = 0;
  bool retries_exceeded_ = false;
  Time rnr_until_ = Time::Zero();  // nothing is sent before, unless una moves
  uint64_t rnr_una_ = kNoSequence;
};

}  // namespace verbena::sim
