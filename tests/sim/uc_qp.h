// SPDX-License-Identifier: Apache-2.0
//
// UcQp: a QP of an unreliable connection. What its requester does is held
// against the WRs, what its responder does against UcReceiver.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/qp.h"
#include "tests/sim/uc_receiver.h"
#include "transport/uc/requester.h"
#include "transport/uc/responder.h"

namespace verbena::sim {

class UcQp final : public Qp {
 public:
  using Qp::Qp;

  Psn una_psn() const override { return next_psn(); }
  Psn next_psn() const override { return halves_->requester.next_psn(); }
  Psn expected_psn() const override { return halves_->responder.expected_psn(); }
  void CheckAtEnd() override;

 private:
  struct Halves {
    Halves(Port& requester_port, Port& responder_port, Qp& qp)
        : requester(requester_port), responder(responder_port, qp) {}
    transport::UcRequester requester;
    transport::UcResponder responder;
  };
  // WRs that the application may have posted and the requester not taken.
  static constexpr uint32_t kSendQueue = 32;

  void MakeMachines() override;
  void ResetMachines() override;
  void StartResponder() override;
  void StartRequester() override;
  void Drain() override {}
  void ResumeMachines() override { halves_->requester.Resume(); }
  void FlushMachines() override;

  bool CanPost() const override { return posted_ - handed_ < kSendQueue; }
  void Post(uint32_t) override {}
  uint32_t outstanding() const override {
    return halves_->requester.outstanding() + posted_ - handed_;
  }
  bool drained() const override { return halves_->requester.drained(); }
  uint64_t una() const override { return fetched_; }

  void ReceiveRequest(const PacketView& packet, uint64_t sequence) override;
  void ReceiveResponse(const PacketView&, bool) override {}
  void HandleReserved(Psn) override {}
  void HandleCommitted(bool responder, Ticket ticket) override;
  void HandleAtomicCommitted(Ticket, uint64_t) override {}
  void HandlePlacementFailed(bool responder, Ticket ticket, MemoryStatus why) override;
  bool PollPacket(transport::TxPacket* packet, bool* is_response) override;
  void HandleFetched(Psn psn, bool is_response) override;
  void HandleFetchFailed(Psn psn, bool is_response, MemoryStatus why) override;
  bool PollRecvCompletion(Completion* completion) override;
  bool PollSendCompletion(Completion* completion) override;
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
  bool IsWhole(const Taken& taken) const override { return taken.delivered; }
  void CheckAllReceived() override {}

  bool flushes_sends() const { return state_ >= QpState::kSqe; }
  void HandOver();
  // The receive that a dropped message has left, or nullptr.
  Taken* held() { return !taken_.empty() && !taken_.back().delivered ? &taken_.back() : nullptr; }
  void CheckOutcome(transport::UcResponder::Verdict verdict, UcReceiver::Outcome outcome, Wr& wr);
  void CheckWritten(size_t count);

  std::unique_ptr<Halves> halves_;
  uint32_t handed_ = 0;                 // of the WRs posted: those that the requester has got
  uint64_t fetched_ = 0;                // everything before this sequence number was read
  std::vector<std::byte> inline_data_;  // of the message that is being sent

  UcReceiver receiver_;
  bool failed_ = false;         // it has to be
  size_t written_checked_ = 0;  // of receiver_.written()
  const Wr* last_delivered_ = nullptr;
  uint64_t delivered_ = 0;
};

}  // namespace verbena::sim
