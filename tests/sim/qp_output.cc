// SPDX-License-Identifier: Apache-2.0
//
// Qp: packets and completions that come out.
#include <algorithm>
#include <cstring>

#include "tests/sim/qp.h"
#include "transport/wire/describe.h"

namespace verbena::sim {

using transport::Opcode;
using transport::OpcodeTraits;
using transport::TransportHeaders;
using transport::TxPacket;
using transport::WcOpcode;

namespace {

constexpr uint32_t kBurst = 32;

constexpr uint8_t kXrcOpcodes = 0xa0;  // from here on they are those of RC

TransportHeaders HeadersFor(const TxPacket& packet, Opcode opcode, uint32_t dest_qpn) {
  const OpcodeTraits& traits = transport::TraitsOf(opcode);
  TransportHeaders headers;
  headers.bth.opcode = opcode;
  headers.bth.psn = packet.psn;
  headers.bth.ack_req = packet.ack_request;
  headers.bth.solicited = packet.solicited;
  headers.bth.dest_qpn = transport::Qpn(dest_qpn);
  if (traits.has_xrceth()) headers.xrceth.srq = packet.srq;
  if (traits.has_reth()) {
    headers.reth = {packet.remote_address, transport::Rkey(packet.rkey), packet.dma_length};
  }
  if (traits.has_atomic_eth()) {
    headers.atomic_eth = {packet.remote_address, transport::Rkey(packet.rkey), packet.swap_or_add,
                          packet.compare};
  }
  if (traits.has_aeth()) headers.aeth = {packet.syndrome, packet.msn};
  if (traits.has_atomic_ack_eth()) headers.atomic_ack_eth = {packet.original};
  if (traits.has_imm()) {
    headers.imm = {transport::LoadBe32(reinterpret_cast<const std::byte*>(&packet.imm_or_inv))};
  }
  if (traits.has_feth()) headers.feth = {packet.imm_or_inv};
  if (traits.has_ieth()) headers.ieth = {transport::Rkey(packet.imm_or_inv)};
  return headers;
}

std::string Text(const Completion& c) {
  return "wr_id " + std::to_string(c.wr_id & 0xffffffff) + " status " +
         std::to_string(static_cast<int>(c.status)) + " bytes " + std::to_string(c.byte_len);
}

}  // namespace

// --- Packets

void Qp::CheckTransmit(bool is_response, const TxPacket& packet,
                       const std::span<const std::byte>* payload) {
  if (is_response) {
    // A replay may answer an old request.
    if (in_checked() && is_xrc() && !packet.retransmission &&
        transport::TraitsOf(packet.opcode).carries_payload) {
      const Wr* wr = in().Find(in().ToSequence(packet.psn, in().expected));
      if (wr == nullptr || packet.srq.value() != wr->srq) Wrong("answers for another SRQ");
    }
    if (in_checked() && (payload != nullptr || packet.payload_bytes == 0)) {
      Check(in().CheckResponse(packet, payload == nullptr ? std::span<const std::byte>() : *payload,
                               halves_->responder_port, connection_->memory_failed));
    }
    return;
  }
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

void Qp::FetchFailed(Psn psn, bool is_response, MemoryStatus why) {
  if (is_response) {
    halves_->responder.HandleFetchFailed(psn, why, host_.now());
  } else {
    halves_->requester.HandleFetchFailed(psn, why, host_.now());
  }
  wants_transmit_ = true;
}

void Qp::Build(const TxPacket& packet, bool is_response) {
  const uint32_t number = host_.frames().Take();
  Frame& frame = host_.frames()[number];
  const auto opcode = static_cast<Opcode>(static_cast<uint8_t>(packet.opcode) |
                                          (is_xrc() ? kXrcOpcodes : uint8_t{0}));
  const size_t headers = path_.WriteHeaders(HeadersFor(packet, opcode, peer_qpn_),
                                            packet.payload_bytes, frame.data.data());
  std::byte* const payload = frame.data.data() + headers;
  std::byte* to = payload;
  MemoryStatus status = MemoryStatus::kOk;
  if (packet.payload_bytes != 0 && packet.inline_payload != nullptr) {
    to = std::copy_n(packet.inline_payload, packet.payload_bytes, to);
  } else {
    for (uint32_t i = 0; i < packet.segment_count && status == MemoryStatus::kOk; ++i) {
      const MemorySegment& segment = packet.segments[i];
      status = memory_.Check(segment.key, segment.address, segment.length, packet.payload_access);
      if (status != MemoryStatus::kOk) break;
      const auto bytes = memory_.Read(segment.address, segment.length);
      to = std::copy(bytes.begin(), bytes.end(), to);
    }
  }
  if (status != MemoryStatus::kOk) {
    host_.frames().Give(number);
    FlushBurst();
    CheckTransmit(is_response, packet, nullptr);
    FetchFailed(packet.psn, is_response, status);
    return;
  }
  const std::span<const std::byte> bytes(payload, to);
  if (bytes.size() != packet.payload_bytes) return Wrong("segments and payload_bytes differ");
  const double fault = host_.profile().fetch_fault;
  const bool failed = fault > 0 && packet.segment_count != 0 && host_.random().Chance(fault);
  CheckTransmit(is_response, packet, failed ? nullptr : &bytes);
  std::memset(to, 0, 3 + transport::kIcrcBytes);
  frame.bytes = static_cast<uint32_t>(path_.FrameBytes(opcode, packet.payload_bytes));
  frame.connection = connection_->number;
  frame.has_icrc = frame.forged = false;
  burst_.push_back({number, packet.psn, is_response, failed});
}

void Qp::FlushBurst() {
  bool stopped[2] = {false, false};
  for (const Outgoing& out : burst_) {
    if (stopped[out.is_response]) {
      host_.frames().Give(out.frame);
    } else if (out.failed) {
      // What follows on the same stream was built on this packet.
      stopped[out.is_response] = true;
      connection_->memory_failed = true;
      host_.frames().Give(out.frame);
      FetchFailed(out.psn, out.is_response, MemoryStatus::kFault);
    } else {
      ++packets_;
      if (host_.keeps_ladder()) {
        const auto view = PacketView::Parse(host_.frames()[out.frame].span());
        host_.Note(Name() + "> " + transport::Describe(*view));
      }
      host_.Send(side_, out.frame);
    }
  }
  burst_.clear();
}

void Qp::Transmit() {
  wants_transmit_ = false;
  if (connection_ == nullptr) return;
  Random& random = host_.random();
  const double shortage = host_.profile().short_of_buffers;
  const uint32_t limit = random.Chance(shortage) ? random.Below32(3) : kBurst;
  for (uint32_t sent = 0;; ++sent) {
    if (sent == limit) {
      wants_transmit_ = true;
      break;
    }
    TxPacket packet;
    std::memset(static_cast<void*>(&packet), 0xa5, offsetof(TxPacket, segments));
    const bool is_response = (receives() || state_ == QpState::kErr) &&
                             halves_->responder.PollTransmit(host_.now(), &packet);
    if (!is_response) {
      const bool sending = state_ == QpState::kRts || state_ == QpState::kSqd;
      if (!sending || !halves_->requester.PollTransmit(host_.now(), &packet)) break;
    }
    Build(packet, is_response);
  }
  FlushBurst();
}

// --- Completions

void Qp::Poll() {
  Completion completion;
  while (halves_->responder.PollCompletion(&completion)) OnRecvCompletion(completion);
  while (halves_->requester.PollCompletion(&completion)) OnSendCompletion(completion);
  transport::AsyncEventType event;
  while (halves_->responder.PollEvent(&event)) {
  }
}

void Qp::Service() {
  if (connection_ == nullptr) return;
  do {
    Poll();
    if (state_ != QpState::kErr && (halves_->requester.failed() || halves_->responder.failed())) {
      if (host_.keeps_ladder()) {
        host_.Note("      " + Name() + " goes to ERR");
      }
      ToError();
      Poll();
    }
    Transmit();
  } while (state_ != QpState::kErr && (halves_->requester.failed() || halves_->responder.failed()));
  Poll();
  CheckFlushed();
  CheckSqd();
}

// In ERR everything completes as soon as nothing writes to the buffers.
void Qp::CheckFlushed() {
  if (state_ != QpState::kErr || HasPending(false) || HasPending(true)) return;
  if (halves_->requester.outstanding() != 0) Wrong("send WRs without a completion in ERR");
  if (next_receive_ != (is_xrc() ? receives_taken_ : receives_posted_))
    Wrong("receives without a completion in ERR");
}

void Qp::CheckSqd() {
  if (state_ != QpState::kSqd || !out_checked() || !halves_->requester.drained()) return;
  if (una() != out().next || HasPending(false)) Wrong("drained with something outstanding");
}

void Qp::CheckAllDone() {
  for (; next_wr_ < posted_; ++next_wr_) {
    const Wr& wr = out().wrs[next_wr_];
    if (wr.signaled) Wrong("WR " + std::to_string(next_wr_) + " has no completion");
    if (out_checked()) Check(out().CheckData(wr, memory_, peer_memory_));
  }
  if (in_checked() && next_receive_ != in().receives.size()) {
    Wrong("a message without its completion");
  }
}

// Is this an end that the WR may have without being wrong?
bool Qp::MayFail(const Wr& wr, WcStatus status) const {
  if (out().tainted || status == wr.expected) return true;
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
void Qp::CheckRetries(const transport::TransportCounters& before) {
  if (out().tainted || retries_exceeded_) return;
  const transport::TransportCounters& counters = halves_->requester.counters();
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

void Qp::OnSendCompletion(const Completion& completion) {
  if (host_.keeps_ladder()) {
    host_.Note("      " + Name() + " send CQE " + Text(completion));
  }
  const std::string who = "send CQE " + Text(completion);
  const bool success = completion.status == WcStatus::kSuccess;
  const uint64_t index = completion.wr_id & 0xffffffff;
  if (!success) ++errors_;
  if (completion.wr_id >> 32 != connection_->number || index < next_wr_ || index >= posted_) {
    return Wrong(who + ": repeated or invented");
  }
  if (send_failed_ && completion.status != WcStatus::kWrFlushErr) {
    Wrong(who + ": not flushed after a failure");
  }
  for (; next_wr_ < index; ++next_wr_) {
    const Wr& skipped = out().wrs[next_wr_];
    if (skipped.signaled || send_failed_) Wrong(who + ": overtakes another WR");
    if (!out().tainted) Check(out().CheckData(skipped, memory_, peer_memory_));
  }
  const Wr& wr = out().wrs[next_wr_++];
  if (completion.opcode != transport::CompletionOpcode(wr.opcode)) Wrong(who + ": wrong opcode");
  if (success) {
    if (!wr.signaled) Wrong(who + ": was not signalled");
    if (out().tainted) return;
    if (wr.expected != WcStatus::kSuccess) Wrong(who + ": success of a WR that is wrong");
    Check(out().CheckData(wr, memory_, peer_memory_));
    return;
  }
  if (completion.status == WcStatus::kWrFlushErr) {
    if (state_ != QpState::kErr) Wrong(who + ": flushed outside ERR");
  } else if (!MayFail(wr, completion.status)) {
    Wrong(who + ": failed without a reason");
  }
  send_failed_ = true;
}

void Qp::OnRecvCompletion(const Completion& completion) {
  if (host_.keeps_ladder()) {
    host_.Note("      " + Name() + " recv CQE " + Text(completion));
  }
  const std::string who = "recv CQE " + Text(completion);
  const uint64_t index = completion.wr_id & 0xffffffff;
  if (completion.status != WcStatus::kSuccess) ++errors_;
  if (completion.wr_id >> 32 != connection_->number || index != next_receive_ ||
      index >= receives_posted_) {
    return Wrong(who + ": out of order, repeated or invented");
  }
  if (is_xrc() && completion.srq.value() != in().receives[index].srq && in_checked()) {
    Wrong(who + ": of another SRQ");
  }
  ++next_receive_;
  if (recv_failed_ && completion.status != WcStatus::kWrFlushErr) {
    Wrong(who + ": not flushed after a failure");
  }
  if (completion.status != WcStatus::kSuccess) recv_failed_ = true;
  if (completion.status == WcStatus::kWrFlushErr) {
    // Receives behind a failed placement do not wait for the NAK to be sent.
    if (state_ != QpState::kErr && !connection_->memory_failed) {
      Wrong(who + ": flushed outside ERR");
    }
    return;
  }
  if (in().tainted) return;
  const auto& wrs = in().wrs;
  const auto is_message = [](const Wr& wr) { return wr.takes_receive() && wr.packets != 0; };
  while (next_message_ < wrs.size() && !is_message(wrs[next_message_])) ++next_message_;
  if (next_message_ >= wrs.size()) return Wrong(who + ": no message for it");
  const Wr& wr = wrs[next_message_++];
  switch (completion.status) {
    case WcStatus::kSuccess:
      break;
    case WcStatus::kLocLenErr:
      if (wr.expected != WcStatus::kRemInvReqErr) Wrong(who + ": the message fits");
      return;
    case WcStatus::kLocProtErr:
      if (wr.expected != WcStatus::kRemOpErr && !connection_->memory_failed) {
        Wrong(who + ": nothing is wrong with the receive");
      }
      return;
    case WcStatus::kLocAccessErr:
      if (wr.opcode != WrOpcode::kSendInv || wr.expected == WcStatus::kSuccess) {
        Wrong(who + ": the key may be invalidated");
      }
      return;
    default:
      return Wrong(who + ": failed without a reason");
  }
  const bool is_write = wr.opcode == WrOpcode::kRdmaWriteImm;
  const bool has_inv = wr.opcode == WrOpcode::kSendInv;
  if (completion.opcode != (is_write ? WcOpcode::kRecvRdmaWithImm : WcOpcode::kRecv) ||
      completion.byte_len != wr.bytes || completion.has_imm != wr.has_imm() ||
      completion.has_inv != has_inv || completion.solicited != wr.solicited ||
      ((wr.has_imm() || has_inv) && completion.imm_or_inv != wr.imm_or_inv)) {
    Wrong(who + ": fields differ from the message's");
  }
  if (wr.first == kNoSequence || in().expected < wr.end()) Wrong(who + ": before the message");
  Check(in().CheckData(wr, peer_memory_, memory_));
}

}  // namespace verbena::sim
