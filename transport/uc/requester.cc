// SPDX-License-Identifier: Apache-2.0
#include "transport/uc/requester.h"

#include <algorithm>

namespace verbena::transport {
namespace {

struct OpcodeRow {
  Opcode first;
  Opcode middle;
  Opcode last;
  Opcode only;
};

constexpr OpcodeRow RowOf(WrOpcode opcode) {
  switch (opcode) {
    case WrOpcode::kRdmaWrite:
      return {Opcode::kUcWriteFirst, Opcode::kUcWriteMiddle, Opcode::kUcWriteLast,
              Opcode::kUcWriteOnly};
    case WrOpcode::kRdmaWriteImm:
      return {Opcode::kUcWriteFirst, Opcode::kUcWriteMiddle, Opcode::kUcWriteLastImm,
              Opcode::kUcWriteOnlyImm};
    case WrOpcode::kSendImm:
      return {Opcode::kUcSendFirst, Opcode::kUcSendMiddle, Opcode::kUcSendLastImm,
              Opcode::kUcSendOnlyImm};
    default:
      return {Opcode::kUcSendFirst, Opcode::kUcSendMiddle, Opcode::kUcSendLast,
              Opcode::kUcSendOnly};
  }
}

constexpr bool IsWrite(WrOpcode opcode) {
  return opcode == WrOpcode::kRdmaWrite || opcode == WrOpcode::kRdmaWriteImm;
}

constexpr bool IsLocal(WrOpcode opcode) {
  return opcode == WrOpcode::kBindMw || opcode == WrOpcode::kLocalInv;
}

// What is wrong with a WR before its memory is looked at.
WcStatus Validate(const SendRequest& request, uint64_t length) {
  if (request.malformed != WcStatus::kSuccess) return request.malformed;
  const bool is_known = IsWrite(request.opcode) || IsLocal(request.opcode) ||
                        request.opcode == WrOpcode::kSend || request.opcode == WrOpcode::kSendImm;
  if (!is_known || request.sges.size() > kMaxSge) return WcStatus::kLocQpOpErr;
  return length > kMaxMessageBytes ? WcStatus::kLocLenErr : WcStatus::kSuccess;
}

}  // namespace

void UcRequester::Start(const UcRequesterConfig& config) {
  Reset();
  mtu_ = PmtuBytes(config.pmtu);
  next_psn_ = config.first_psn;
}

void UcRequester::Reset() {
  sent_.clear();
  failed_ = in_message_ = false;
}

void UcRequester::Fail(Sent& sent, WcStatus status) {
  sent.status = status;
  sent.out = sent.done = true;
  failed_ = true;
}

void UcRequester::Post(const SendRequest& request) {
  uint64_t length = request.inline_data.size();
  for (const MemorySegment& segment : request.sges) length += segment.length;
  Sent& sent = sent_.push_back();
  sent = {.wr_id = request.wr_id,
          .wqe_index = request.wqe_index,
          .byte_len = static_cast<uint32_t>(length),
          .last_psn = next_psn_,
          .status = WcStatus::kSuccess,
          .opcode = CompletionOpcode(request.opcode),
          .signaled = request.signaled,
          .out = false,
          .done = false};
  if (failed_) return Fail(sent, WcStatus::kWrFlushErr);
  const WcStatus status = Validate(request, length);
  if (status != WcStatus::kSuccess) return Fail(sent, status);
  in_message_ = true;
  message_ = request;
  length_ = static_cast<uint32_t>(length);
  offset_ = sge_ = sge_used_ = 0;
  ExecuteLocal();
}

// A message before it whose payload cannot be read flushes it, so it waits.
void UcRequester::ExecuteLocal() {
  if (!in_message_ || !IsLocal(message_.opcode)) return;
  for (uint32_t i = 0; i + 1 < sent_.size(); ++i) {
    if (!sent_[i].done) return;
  }
  const SendRequest& r = message_;
  const bool bind = r.opcode == WrOpcode::kBindMw;
  const MemoryStatus status =
      bind ? memory_.Bind(BindOf(r.imm_or_inv, r.remote_address, r.rkey, r.compare_add, r.swap))
           : memory_.Invalidate(r.imm_or_inv);
  in_message_ = false;
  sent_.back().out = sent_.back().done = true;
  if (status != MemoryStatus::kOk) {
    Fail(sent_.back(), bind ? WcStatus::kMwBindErr : WcStatus::kLocQpOpErr);
  }
}

void UcRequester::FillSegments(uint32_t bytes, TxPacket* packet) {
  uint32_t count = 0;
  while (bytes != 0) {
    const MemorySegment& sge = message_.sges[sge_];
    const uint32_t take = std::min(bytes, sge.length - sge_used_);
    if (take != 0) {
      packet->segments[count++] = {sge.address + sge_used_, take, sge.key};
      bytes -= take;
      sge_used_ += take;
    }
    if (sge_used_ == sge.length) {
      ++sge_;
      sge_used_ = 0;
    }
  }
  packet->segment_count = count;
}

bool UcRequester::PollTransmit(TxPacket* packet) {
  if (!in_message_ || failed_ || IsLocal(message_.opcode)) return false;
  const bool first = offset_ == 0;
  const uint32_t bytes = std::min(length_ - offset_, mtu_);
  const bool last = offset_ + bytes == length_;
  const OpcodeRow row = RowOf(message_.opcode);
  packet->opcode = first ? (last ? row.only : row.first) : (last ? row.last : row.middle);
  packet->psn = next_psn_;
  packet->ack_request = false;
  packet->solicited = last && message_.solicited && message_.opcode != WrOpcode::kRdmaWrite;
  packet->imm_or_inv = message_.imm_or_inv;
  packet->retransmission = false;
  packet->wr_id = message_.wr_id;
  if (IsWrite(message_.opcode)) {
    packet->remote_address = message_.remote_address;
    packet->rkey = message_.rkey;
    packet->dma_length = length_;
  }
  packet->payload_bytes = bytes;
  packet->payload_access = MemoryAccess::kLocalRead;
  if (!message_.inline_data.empty()) {
    packet->inline_payload = message_.inline_data.data() + offset_;
    packet->segment_count = 0;
  } else {
    packet->inline_payload = nullptr;
    FillSegments(bytes, packet);
  }
  offset_ += bytes;
  if (last) {
    Sent& sent = sent_.back();
    sent.last_psn = next_psn_;
    sent.out = true;
    in_message_ = false;
  }
  next_psn_ = next_psn_.Next();
  return true;
}

void UcRequester::HandleFetched(Psn psn) {
  for (uint32_t i = 0; i < sent_.size(); ++i) {
    Sent& sent = sent_[i];
    if (sent.done) continue;
    if (!sent.out || Psn::Distance(sent.last_psn, psn) < 0) break;
    sent.done = true;
    ++counters_.rdma_sends;
  }
  ExecuteLocal();
}

// The message that the packet belongs to is the first that is not read to its
// end. What is behind it is flushed, also if it has failed by itself meanwhile.
void UcRequester::HandleFetchFailed(Psn psn) {
  bool first = true;
  for (uint32_t i = 0; i < sent_.size(); ++i) {
    Sent& sent = sent_[i];
    if (first && (sent.done || (sent.out && Psn::Distance(psn, sent.last_psn) < 0))) continue;
    Fail(sent, first ? WcStatus::kLocProtErr : WcStatus::kWrFlushErr);
    first = false;
  }
  in_message_ = false;
}

void UcRequester::Flush() {
  failed_ = true;
  // What was given away is being read; the rest of the message is not sent.
  if (in_message_) Fail(sent_.back(), WcStatus::kWrFlushErr);
  in_message_ = false;
}

bool UcRequester::PollCompletion(Completion* completion) {
  while (!sent_.empty() && sent_.front().done) {
    const Sent sent = sent_.front();
    sent_.pop_front();
    if (!sent.signaled && sent.status == WcStatus::kSuccess) continue;
    *completion = {};
    completion->wr_id = sent.wr_id;
    completion->wqe_index = sent.wqe_index;
    completion->status = sent.status;
    completion->opcode = sent.opcode;
    completion->byte_len = sent.byte_len;
    completion->is_send = true;
    return true;
  }
  return false;
}

}  // namespace verbena::transport
