// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/uc_qp.h"

#include <algorithm>

namespace verbena::sim {

using transport::TxPacket;
using Outcome = UcReceiver::Outcome;
using Verdict = transport::UcResponder::Verdict;

// --- Control

void UcQp::MakeMachines() {
  halves_ = std::make_unique<Halves>(requester_port_, responder_port_, *this);
}

void UcQp::ResetMachines() {
  halves_->requester.Reset();
  halves_->responder.Reset();
}

void UcQp::StartResponder() {
  const PathOptions& path = connection_->path;
  halves_->responder.Start(
      {.pmtu = path.pmtu, .expected_psn = in().first_psn(), .access_flags = path.access_flags});
  receiver_.Reset();
  failed_ = false;
  written_checked_ = 0;
  last_delivered_ = nullptr;
  delivered_ = 0;
  handed_ = 0;
}

void UcQp::StartRequester() {
  halves_->requester.Start({.pmtu = connection_->path.pmtu, .first_psn = out().first_psn()});
  fetched_ = out().next;
}

void UcQp::FlushMachines() {
  halves_->requester.Flush();
  halves_->responder.Flush();
  out().GiveUp();
}

// A WR that fails stops only what is sent (SQE), until the application resumes.
bool UcQp::TakeFailure() {
  if ((state_ == QpState::kRts || state_ == QpState::kSqd) && halves_->requester.failed()) {
    Note("goes to SQE");
    state_ = QpState::kSqe;
    out().GiveUp();
    fetched_ = out().next;  // what was not read is over too
    return true;
  }
  if (state_ == QpState::kErr || !halves_->responder.failed()) return false;
  Note("goes to ERR");
  ToError();
  return true;
}

// --- What goes out

// The requester takes the next WR from the send queue.
void UcQp::HandOver() {
  transport::SendRequest request = RequestOf(handed_++);
  inline_data_.assign(request.inline_data.begin(), request.inline_data.end());
  request.inline_data = inline_data_;
  halves_->requester.Post(request);
}

bool UcQp::PollPacket(TxPacket* packet, bool* is_response) {
  *is_response = false;
  for (;;) {
    const bool sends = state_ == QpState::kRts || state_ == QpState::kSqd;
    if (!sends || halves_->requester.failed()) return false;
    if (halves_->requester.PollTransmit(packet)) return true;
    // In SQD what was begun is finished, nothing new begins.
    if (state_ != QpState::kRts || !halves_->requester.CanPost() || handed_ == posted_) {
      return false;
    }
    HandOver();
  }
}

void UcQp::HandleFetched(Psn psn, bool) {
  fetched_ = out().ToSequence(psn, out().next) + 1;
  halves_->requester.HandleFetched(psn);
  // A local WR may have waited for that.
  wants_transmit_ |= handed_ != posted_ && halves_->requester.CanPost();
}

void UcQp::HandleFetchFailed(Psn psn, bool, MemoryStatus) {
  halves_->requester.HandleFetchFailed(psn);
}

bool UcQp::PollSendCompletion(Completion* completion) {
  for (;;) {
    if (halves_->requester.PollCompletion(completion)) return true;
    if (!flushes_sends() || !halves_->requester.CanPost() || handed_ == posted_) return false;
    HandOver();
  }
}

void UcQp::CheckPacket(bool, const TxPacket& packet, const std::span<const std::byte>* payload) {
  if (!out_checked()) return;
  const uint64_t reached = out().next;
  if (out().ToSequence(packet.psn, reached) != reached) return Wrong("sends with a wrong PSN");
  Check(out().CheckRequest(packet, payload, una()));
  const Wr* wr = out().Find(reached);
  if (state_ == QpState::kSqd && wr != nullptr && wr->first == reached) {
    Wrong("begins a WR in SQD");
  }
}

// --- What comes in

void UcQp::ReceiveRequest(const PacketView& packet, uint64_t sequence) {
  transport::UcResponder& responder = halves_->responder;
  Wr* wr = in_checked() ? in().Find(sequence) : nullptr;
  if (in_checked() && wr == nullptr) return Wrong("gets a packet that was not sent");
  Outcome outcome = Outcome::kLost;
  if (wr != nullptr) {
    const PlannedReceive* next = queue_->available() != 0 ? &queue_->next() : nullptr;
    outcome = receiver_.Begin(*wr, sequence, connection_->path.mtu(),
                              held() != nullptr ? held()->receive : nullptr, next);
  }
  const uint32_t available = queue_->available();
  const Verdict verdict = responder.HandleRequest(packet);
  if (wr == nullptr) return;
  if (receiver_.needs_receive() != (queue_->available() + 1 == available)) {
    Wrong("does not take the receive that it needs");
  }
  CheckOutcome(verdict, outcome, *wr);
  if (responder.expected_psn() != packet.psn().Next()) Wrong("expects a wrong PSN after a packet");
}

// The responder has handled a packet of `wr`.
void UcQp::CheckOutcome(Verdict verdict, Outcome outcome, Wr& wr) {
  const bool accepted = outcome == Outcome::kTaken || outcome == Outcome::kDelivered;
  if ((verdict == Verdict::kAccepted) != accepted) {
    Wrong(accepted ? "drops a packet that it has to take" : "takes a packet that it has to drop");
  }
  if ((verdict == Verdict::kReceiveTooSmall) != (outcome == Outcome::kTooSmall)) {
    Wrong("drops a packet for the size of its receive, or not");
  }
  Check(receiver_.End());
  if (outcome == Outcome::kBadReceive) failed_ = true;
  if (halves_->responder.failed() != failed_) Wrong("a packet ends the connection, or does not");
  if (outcome != Outcome::kDelivered) return;
  if (host_.profile().network.keeps_order()) {
    if (last_delivered_ != nullptr && &wr <= last_delivered_) Wrong("delivers a message twice");
    last_delivered_ = &wr;
  }
  ++delivered_;
  if (!wr.takes_receive()) return;
  Taken* taken = held();
  if (taken == nullptr) return Wrong("delivers a message without a receive");
  taken->wr = &wr;
  taken->delivered = true;
  taken->writes_before = receiver_.written().size();
}

void UcQp::HandleCommitted(bool responder, Ticket ticket) {
  if (responder) halves_->responder.HandleCommitted(ticket);
}

void UcQp::HandlePlacementFailed(bool responder, Ticket ticket, MemoryStatus) {
  if (!responder) return;
  halves_->responder.HandlePlacementFailed(ticket);
  failed_ = true;
}

bool UcQp::PollRecvCompletion(Completion* completion) {
  transport::AsyncEventType event;
  while (halves_->responder.PollEvent(&event)) {
  }
  return halves_->responder.PollCompletion(completion);
}

// --- What must be true

void UcQp::CheckPlacement(const MemorySegment& to, std::span<const std::byte> bytes,
                          MemoryAccess access) {
  Check(receiver_.CheckPlacement(in(), to, bytes, access));
}

void UcQp::CheckTake(Taken&) {
  if (!receiver_.needs_receive()) Wrong("takes a receive that it does not need");
}

void UcQp::CheckInvalidate(uint32_t, bool) { Wrong("UC has no SEND with invalidate"); }

// Whether it arrives nobody knows.
void UcQp::CheckDone(const Wr& wr) {
  if (wr.is_local() ? !wr.executed : wr.first == kNoSequence || wr.end() > fetched_) {
    Wrong("a WR completes before it is out");
  }
}

bool UcQp::MayFail(const Wr&, WcStatus status) const {
  return status == WcStatus::kLocProtErr && connection_->memory_failed;
}

// All WRITEs before a message are visible with it.
void UcQp::CheckWritten(size_t count) {
  for (; written_checked_ < count; ++written_checked_) {
    Check(in().CheckData(*receiver_.written()[written_checked_], peer_memory_, memory_));
  }
}

void UcQp::CheckReceived(const Completion& completion, const Taken& taken, const std::string& who) {
  if (completion.status == WcStatus::kLocProtErr) {
    const PlannedReceive& receive = *taken.receive;
    const Wr* message = taken.delivered ? taken.wr : receiver_.message();
    const bool is_fault = message != nullptr && message == fault_ && message->is_send();
    if (!is_fault && !receive.malformed && !receive.bad_key) {
      Wrong(who + ": nothing is wrong with the receive");
    }
    return;
  }
  if (completion.status != WcStatus::kSuccess) return Wrong(who + ": failed without a reason");
  if (!taken.delivered) return Wrong(who + ": no whole message for it");
  CheckMessageFields(completion, *taken.wr, who);
  Check(in().CheckReceived(*taken.wr, *taken.receive, memory_));
  CheckWritten(taken.writes_before);
}

void UcQp::CheckAtEnd() {
  if (!in_checked() || state_ == QpState::kErr || state_ < QpState::kRtr) return;
  for (const Taken& taken : taken_) {
    if (taken.delivered) Wrong("a message without its completion");
  }
  CheckWritten(receiver_.written().size());
  if (!host_.profile().network.is_perfect() || !host_.profile().expect_success) return;
  uint64_t sent = 0;
  for (const Wr& wr : in().wrs) sent += wr.first != kNoSequence ? 1 : 0;
  if (delivered_ != sent) Wrong("something is lost though the network loses nothing");
}

}  // namespace verbena::sim
