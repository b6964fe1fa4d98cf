// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/rc_qp.h"

#include <algorithm>

namespace verbena::sim {

using transport::TransportCounters;
using transport::TxPacket;

namespace {

// Of the specification, in units of 10 µs.
constexpr uint32_t kRnrTable[32] = {65536, 1,    2,    3,     4,     6,     8,     12,
                                    16,    24,   32,   48,    64,    96,    128,   192,
                                    256,   384,  512,  768,   1024,  1536,  2048,  3072,
                                    4096,  6144, 8192, 12288, 16384, 24576, 32768, 49152};

}  // namespace

// --- Control

void RcQp::MakeMachines() {
  const transport::RcRequester::Capacity capacity = {
      .max_wr = static_cast<uint32_t>(host_.random().Between(1, 40)),
      .max_sge = 8,
      .max_inline = 128};
  halves_ = std::make_unique<Halves>(capacity, requester_port_, responder_port_, *this);
}

void RcQp::ResetMachines() {
  halves_->requester.Reset();
  halves_->responder.Reset();
}

transport::RcRequesterConfig RcQp::RequesterConfig() const {
  const PathOptions& path = connection_->path;
  return {.pmtu = path.pmtu,
          .first_psn = out().first_psn(),
          .timeout = path.timeout,
          .retry_cnt = path.retry_cnt,
          .rnr_retry = path.rnr_retry,
          .max_rd_atomic = path.max_rd_atomic};
}

transport::RcResponderConfig RcQp::ResponderConfig() const {
  const PathOptions& path = connection_->path;
  return {.pmtu = path.pmtu,
          .expected_psn = in().first_psn(),
          .max_dest_rd_atomic = path.max_rd_atomic,
          .min_rnr_timer = path.min_rnr_timer,
          .access_flags = path.access_flags,
          .service = path.service};
}

void RcQp::StartResponder() { halves_->responder.Start(ResponderConfig()); }

void RcQp::StartRequester() {
  halves_->requester.Start(RequesterConfig());
  halves_->responder.Reconfigure(ResponderConfig());
  retries_exceeded_ = false;
  rnr_until_ = Time::Zero();
  rnr_una_ = kNoSequence;
  const TransportCounters& counters = halves_->requester.counters();
  progress_rounds_ = counters.completer_retry_err;
  progress_rnr_ = counters.rcvd_rnr_err;
}

void RcQp::Drain() {
  halves_->requester.Reconfigure(RequesterConfig());
  halves_->requester.Drain();
}

void RcQp::FlushMachines() {
  halves_->requester.Flush();
  halves_->responder.Flush();
}

bool RcQp::TakeFailure() {
  if (state_ == QpState::kErr) return false;
  if (!halves_->requester.failed() && !halves_->responder.failed()) return false;
  Note("goes to ERR");
  ToError();
  return true;
}

void RcQp::Post(uint32_t index) {
  transport::SendRequest request = RequestOf(index);
  std::vector<std::byte> inline_data(request.inline_data.begin(), request.inline_data.end());
  request.inline_data = inline_data;
  halves_->requester.Post(request, host_.now());
  // It was copied.
  std::fill(inline_data.begin(), inline_data.end(), std::byte{0xee});
}

// --- What comes in

void RcQp::ReceiveRequest(const PacketView& packet, uint64_t sequence) {
  transport::RcResponder& responder = halves_->responder;
  const Psn before = responder.expected_psn();
  const uint64_t rnr_naks = responder.counters().send_rnr_err;
  responder.HandleRequest(packet, host_.now());
  if (!in_checked()) return;
  if (responder.counters().send_rnr_err != rnr_naks && queue_->available() != 0) {
    Wrong("RNR NAK though a receive is posted");
  }
  if (responder.expected_psn() == before) return;
  if (handling_old_) return Wrong("executed a packet of an earlier connection");
  Check(in().CheckExecuted(sequence, in().ToSequence(responder.expected_psn(), sequence)));
  const double vanishing = host_.profile().vanishing_key;
  if (vanishing > 0 && packet.traits().is_read_request() &&
      memory_.IsWindow(packet.reth().rkey.value()) && host_.random().Chance(vanishing)) {
    TakeAway(packet.reth().rkey.value());
  }
}

void RcQp::ReceiveResponse(const PacketView& packet, bool is_old) {
  if (state_ == QpState::kRtr) return;
  transport::RcRequester& requester = halves_->requester;
  const Psn before = requester.una_psn();
  const double vanishing = host_.profile().vanishing_key;
  if (vanishing > 0 && host_.random().Chance(vanishing)) {
    const Wr* wr = out().Find(una());
    if (wr != nullptr && wr->is_read_or_atomic() && memory_.IsWindow(wr->sges[0].key)) {
      TakeAway(wr->sges[0].key);
    }
  }
  const bool failed = requester.failed();
  const TransportCounters counters = requester.counters();
  requester.HandleResponse(packet, host_.now());
  const bool moved = requester.una_psn() != before;
  if (moved) {
    progress_rounds_ = counters.completer_retry_err;
    progress_rnr_ = counters.rcvd_rnr_err;
  }
  NoteRnrNak(packet, counters.rcvd_rnr_err);
  CheckRetries(counters);
  if (!out_checked()) return;
  if (is_old && (moved || requester.failed() != failed)) {
    Wrong("a response of an earlier connection had an effect");
  }
  if (una() > out().expected) Wrong("takes as acknowledged what was not executed");
}

// A new wait begins?
void RcQp::NoteRnrNak(const PacketView& packet, uint64_t rnr_naks_before) {
  if (halves_->requester.counters().rcvd_rnr_err == rnr_naks_before) return;
  rnr_una_ = una();
  rnr_until_ = host_.now() + Duration::Microseconds(10) * kRnrTable[packet.aeth().code()];
}

void RcQp::HandleTimeout() {
  const TransportCounters counters = halves_->requester.counters();
  halves_->requester.HandleTimeout(host_.now());
  CheckRetries(counters);
}

void RcQp::HandleCommitted(bool responder, Ticket ticket) {
  if (responder) {
    halves_->responder.HandleCommitted(ticket, host_.now());
  } else {
    halves_->requester.HandleCommitted(ticket, host_.now());
  }
}

void RcQp::HandlePlacementFailed(bool responder, Ticket ticket, MemoryStatus why) {
  if (responder) {
    halves_->responder.HandlePlacementFailed(ticket, why, host_.now());
  } else {
    halves_->requester.HandlePlacementFailed(ticket, why, host_.now());
  }
}

// --- What goes out

bool RcQp::PollPacket(TxPacket* packet, bool* is_response) {
  *is_response = (receives() || state_ == QpState::kErr) &&
                 halves_->responder.PollTransmit(host_.now(), packet);
  if (*is_response) return true;
  const bool sending = state_ == QpState::kRts || state_ == QpState::kSqd;
  return sending && halves_->requester.PollTransmit(host_.now(), packet);
}

void RcQp::HandleFetchFailed(Psn psn, bool is_response, MemoryStatus why) {
  if (is_response) {
    halves_->responder.HandleFetchFailed(psn, why, host_.now());
  } else {
    halves_->requester.HandleFetchFailed(psn, why, host_.now());
  }
}

bool RcQp::PollRecvCompletion(Completion* completion) {
  transport::AsyncEventType event;
  while (halves_->responder.PollEvent(&event)) {
  }
  return halves_->responder.PollCompletion(completion);
}

// --- What must be true

void RcQp::CheckResponse(const TxPacket& packet, const std::span<const std::byte>* payload) {
  if (!in_checked()) return;
  // A replay may answer an old request.
  if (is_xrc() && !packet.retransmission && transport::TraitsOf(packet.opcode).carries_payload) {
    const Wr* wr = in().Find(in().ToSequence(packet.psn, in().expected));
    if (wr == nullptr || packet.srq.value() != wr->srq) Wrong("answers for another SRQ");
  }
  if (payload == nullptr && packet.payload_bytes != 0) return;
  Check(in().CheckResponse(packet, payload == nullptr ? std::span<const std::byte>() : *payload,
                           responder_port_, connection_->memory_failed));
}

void RcQp::CheckPacket(bool is_response, const TxPacket& packet,
                       const std::span<const std::byte>* payload) {
  if (is_response) return CheckResponse(packet, payload);
  if (host_.now() < rnr_until_ && una() == rnr_una_) Wrong("sends before the RNR timer is over");
  if (!out_checked()) return;
  const uint64_t reached = out().next;
  Check(out().CheckRequest(packet, payload, una()));
  const uint64_t sequence = out().ToSequence(packet.psn, reached);
  const Wr* wr = out().Find(sequence);
  if (wr != nullptr && is_xrc() && packet.srq.value() != wr->srq) Wrong("names another SRQ");
  if (wr == nullptr || sequence != reached || sequence != wr->first) return;
  // The beginning of a WR.
  if (state_ == QpState::kSqd) Wrong("begins a WR in SQD");
  if (!wr->fence) return;
  for (const Wr& earlier : out().wrs) {
    if (&earlier == wr) break;
    if (!earlier.is_answered() || earlier.first == kNoSequence) continue;
    const std::string wrong = out().CheckData(earlier, memory_, peer_memory_);
    if (!wrong.empty() || earlier.end() > una()) Wrong("a fenced WR begins too early: " + wrong);
  }
}

void RcQp::CheckPlacement(const MemorySegment& to, std::span<const std::byte> bytes,
                          MemoryAccess access) {
  if (handling_old_) return Wrong("places a packet of an earlier connection");
  Check(in().CheckRequestPlacement(handling_, to, bytes, access));
}

void RcQp::CheckTake(Taken& taken) {
  Wr* wr = in().Find(handling_);
  if (handling_old_ || handling_ != in().expected || wr == nullptr || !wr->takes_receive()) {
    return Wrong("takes a receive for a packet that is not the next");
  }
  if (is_xrc() && taken.srq != wr->srq) Wrong("takes a receive of another SRQ");
  if (wr->receive != nullptr) Wrong("takes a second receive for a message");
  Flow::TakeReceive(*wr, *taken.receive);
  taken.wr = wr;
}

void RcQp::CheckInvalidate(uint32_t key, bool done) {
  Wr* wr = in().Find(handling_);
  if (handling_old_ || handling_ != in().expected || wr == nullptr ||
      wr->opcode != WrOpcode::kSendInv || wr->imm_or_inv != key || handling_ + 1 != wr->end()) {
    return Wrong("invalidates a key that nobody asked for");
  }
  if (done == (wr->expected == WcStatus::kRetryExcErr)) Wrong("a key is not what was planned");
  wr->executed = done;
}

void RcQp::CheckDone(const Wr& wr) { Check(out().CheckData(wr, memory_, peer_memory_)); }

bool RcQp::MayFail(const Wr&, WcStatus status) const {
  switch (status) {
    case WcStatus::kRetryExcErr:
      return !host_.profile().expect_success || connection_->interfered;
    case WcStatus::kRnrRetryExcErr:
      return connection_->path.rnr_retry < 7;
    case WcStatus::kLocProtErr:
    case WcStatus::kRemOpErr:
    case WcStatus::kRemAccessErr:
      return connection_->memory_failed;
    default:
      return false;
  }
}

// After an event of the requester: has a WR failed for want of retries, and
// rightly so?
void RcQp::CheckRetries(const TransportCounters& before) {
  if (out().tainted || retries_exceeded_) return;
  const TransportCounters& counters = halves_->requester.counters();
  const uint64_t rnr_naks = counters.rcvd_rnr_err - progress_rnr_;
  const bool rnr_exceeded = counters.retry_rnr_exceeded_err != before.retry_rnr_exceeded_err;
  // An RNR NAK is a go-back too, unless it is the last.
  const uint64_t retries =
      counters.completer_retry_err - progress_rounds_ - rnr_naks + (rnr_exceeded ? 1 : 0);
  const PathOptions& path = connection_->path;
  const bool exceeded = counters.retry_exceeded_err != before.retry_exceeded_err;
  if (retries > path.retry_cnt || (exceeded && retries != path.retry_cnt)) {
    Wrong(std::to_string(retries) + " retries with retry_cnt " + std::to_string(path.retry_cnt));
  }
  if (path.rnr_retry == 7
          ? rnr_exceeded
          : rnr_naks > path.rnr_retry + 1u || (rnr_exceeded && rnr_naks != path.rnr_retry + 1u)) {
    Wrong(std::to_string(rnr_naks) + " RNR NAKs with rnr_retry " + std::to_string(path.rnr_retry));
  }
  retries_exceeded_ = exceeded || rnr_exceeded;
}

void RcQp::CheckReceived(const Completion& completion, const Taken& taken, const std::string& who) {
  if (taken.wr == nullptr) return Wrong(who + ": no message for it");
  const Wr& wr = *taken.wr;
  switch (completion.status) {
    case WcStatus::kSuccess:
      break;
    case WcStatus::kLocLenErr:
      if (wr.expected != WcStatus::kRemInvReqErr) Wrong(who + ": the message fits");
      return;
    case WcStatus::kLocProtErr:
      if (wr.expected != WcStatus::kRemOpErr && (&wr != fault_ || !wr.is_send())) {
        Wrong(who + ": nothing is wrong with the receive");
      }
      return;
    case WcStatus::kLocAccessErr:
      if (wr.opcode != WrOpcode::kSendInv || wr.expected != WcStatus::kRetryExcErr) {
        Wrong(who + ": the key may be invalidated");
      }
      return;
    default:
      return Wrong(who + ": failed without a reason");
  }
  CheckMessageFields(completion, wr, who);
  if (wr.expected != WcStatus::kSuccess) Wrong(who + ": success of a message that is wrong");
  if (wr.opcode == WrOpcode::kSendInv && !wr.executed) Wrong(who + ": its key is still valid");
  if (wr.first == kNoSequence || in().expected < wr.end()) Wrong(who + ": before the message");
  Check(in().CheckData(wr, peer_memory_, memory_));
}

bool RcQp::IsWhole(const Taken& taken) const {
  return taken.wr != nullptr && taken.wr->end() <= in().expected;
}

void RcQp::CheckAllReceived() {
  if (!taken_.empty()) Wrong("a receive without its completion");
  for (const Wr& wr : in().wrs) {
    if (wr.takes_receive() && wr.receive == nullptr) Wrong("a message without its completion");
  }
}

}  // namespace verbena::sim
