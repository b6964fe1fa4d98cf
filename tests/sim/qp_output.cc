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

void Qp::FetchFailed(Psn psn, bool is_response, MemoryStatus why) {
  HandleFetchFailed(psn, is_response, why);
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
    CheckPacket(is_response, packet, nullptr);
    FetchFailed(packet.psn, is_response, status);
    return;
  }
  const std::span<const std::byte> bytes(payload, to);
  if (bytes.size() != packet.payload_bytes) return Wrong("segments and payload_bytes differ");
  const double fault = host_.profile().fetch_fault;
  const bool failed = fault > 0 && packet.segment_count != 0 && host_.random().Chance(fault);
  CheckPacket(is_response, packet, failed ? nullptr : &bytes);
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
      HandleFetched(out.psn, out.is_response);
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
    bool is_response = false;
    if (!PollPacket(&packet, &is_response)) break;
    Build(packet, is_response);
  }
  FlushBurst();
}

// --- Completions

void Qp::Poll() {
  Completion completion;
  while (PollRecvCompletion(&completion)) OnRecvCompletion(completion);
  while (PollSendCompletion(&completion)) OnSendCompletion(completion);
}

void Qp::Service() {
  if (connection_ == nullptr) return;
  do {
    Poll();
    if (TakeFailure()) Poll();
    Transmit();
  } while (TakeFailure());
  Poll();
  CheckFlushed();
  CheckSqd();
}

// In ERR everything completes as soon as nothing writes to the buffers.
void Qp::CheckFlushed() {
  if (state_ != QpState::kErr || HasPending(false) || HasPending(true)) return;
  if (outstanding() != 0) Wrong("send WRs without a completion in ERR");
  const bool some_posted = queue_ != nullptr && !queue_->is_shared() && queue_->available() != 0;
  if (!taken_.empty() || some_posted) Wrong("receives without a completion in ERR");
}

void Qp::CheckSqd() {
  if (state_ != QpState::kSqd || !out_checked() || !drained()) return;
  if (una() != out().next || HasPending(false)) Wrong("drained with something outstanding");
}

void Qp::CheckAllDone() {
  for (; next_wr_ < posted_; ++next_wr_) {
    const Wr& wr = out().wrs[next_wr_];
    if (wr.signaled) Wrong("WR " + std::to_string(next_wr_) + " has no completion");
    if (out_checked()) CheckDone(wr);
  }
  if (in_checked()) CheckAllReceived();
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
    Wr& skipped = out().wrs[next_wr_];
    if (skipped.signaled || send_failed_) Wrong(who + ": overtakes another WR");
    skipped.over = true;
    if (out_checked()) CheckDone(skipped);
  }
  Wr& wr = out().wrs[next_wr_++];
  wr.over = true;
  if (completion.opcode != transport::CompletionOpcode(wr.opcode)) Wrong(who + ": wrong opcode");
  const WcStatus expected = out().ExpectedOf(wr);
  if (success) {
    if (!wr.signaled) Wrong(who + ": was not signalled");
    if (!out_checked()) return;
    if (expected != WcStatus::kSuccess) Wrong(who + ": success of a WR that is wrong");
    CheckDone(wr);
    return;
  }
  if (completion.status == WcStatus::kWrFlushErr) {
    if (state_ < QpState::kSqe) Wrong(who + ": flushed outside SQE and ERR");
  } else if (!out().tainted && completion.status != expected && !MayFail(wr, completion.status)) {
    Wrong(who + ": failed without a reason");
  }
  send_failed_ = true;
}

void Qp::OnRecvCompletion(const Completion& completion) {
  if (host_.keeps_ladder()) {
    host_.Note("      " + Name() + " recv CQE " + Text(completion));
  }
  const std::string who = "recv CQE " + Text(completion);
  if (completion.status != WcStatus::kSuccess) ++errors_;
  if (taken_.empty() || completion.wr_id != taken_.front().wr_id) {
    return Wrong(who + ": out of order, repeated or invented");
  }
  const Taken taken = taken_.front();
  taken_.pop_front();
  if (is_xrc() && completion.srq.value() != taken.srq) Wrong(who + ": of another SRQ");
  if (recv_failed_ && completion.status != WcStatus::kWrFlushErr) {
    Wrong(who + ": not flushed after a failure");
  }
  if (completion.status != WcStatus::kSuccess) recv_failed_ = true;
  if (completion.status == WcStatus::kWrFlushErr) {
    // Receives behind a failed placement do not wait for the NAK to be sent.
    if (state_ != QpState::kErr && !connection_->memory_failed) {
      Wrong(who + ": flushed outside ERR");
    }
    if (in_checked() && !connection_->memory_failed && IsWhole(taken)) {
      Wrong(who + ": flushed though its message was executed");
    }
    return;
  }
  if (in_checked()) CheckReceived(completion, taken, who);
}

void Qp::CheckMessageFields(const Completion& completion, const Wr& wr, const std::string& who) {
  const bool is_write = wr.opcode == WrOpcode::kRdmaWriteImm;
  const bool has_inv = wr.opcode == WrOpcode::kSendInv;
  if (completion.opcode != (is_write ? WcOpcode::kRecvRdmaWithImm : WcOpcode::kRecv) ||
      completion.byte_len != wr.bytes || completion.has_imm != wr.has_imm() ||
      completion.has_inv != has_inv || completion.solicited != wr.solicited ||
      ((wr.has_imm() || has_inv) && completion.imm_or_inv != wr.imm_or_inv)) {
    Wrong(who + ": fields differ from the message's");
  }
}

}  // namespace verbena::sim
