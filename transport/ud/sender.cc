// SPDX-License-Identifier: Apache-2.0
#include "transport/ud/sender.h"

#include <algorithm>

namespace verbena::transport {
namespace {

// A WR's Q_Key with this bit means "the QP's own" (IBTA Vol 1, 10.2.5).
constexpr uint32_t kOwnQkeyBit = 0x80000000;

// What is wrong with a WR before its memory is looked at.
WcStatus Validate(const SendRequest& request, bool has_path, uint64_t bytes, uint32_t mtu) {
  if (request.malformed != WcStatus::kSuccess) return request.malformed;
  const bool is_send = request.opcode == WrOpcode::kSend || request.opcode == WrOpcode::kSendImm;
  if (!is_send || !has_path) return WcStatus::kLocQpOpErr;
  return bytes > mtu ? WcStatus::kLocLenErr : WcStatus::kSuccess;
}

uint64_t PayloadBytes(const SendRequest& request) {
  uint64_t bytes = request.inline_data.size();
  for (const MemorySegment& segment : request.sges) bytes += segment.length;
  return bytes;
}

}  // namespace

void UdSender::Start(const UdSenderConfig& config) {
  Reset();
  config_ = config;
  next_psn_ = config.first_psn;
}

void UdSender::Reset() {
  sent_.clear();
  failed_ = false;
}

bool UdSender::Fail(Sent& sent, WcStatus status) {
  sent.status = status;
  sent.done = true;
  failed_ = true;
  return false;
}

bool UdSender::Send(const SendRequest& request, bool has_path, TxPacket* packet) {
  Sent& sent = sent_.push_back();
  sent = {.wr_id = request.wr_id,
          .wqe_index = request.wqe_index,
          .psn = next_psn_,
          .status = WcStatus::kSuccess,
          .signaled = request.signaled,
          .done = false};
  if (failed_) return Fail(sent, WcStatus::kWrFlushErr);
  const uint64_t bytes = PayloadBytes(request);
  const WcStatus status = Validate(request, has_path, bytes, config_.max_payload_bytes);
  if (status != WcStatus::kSuccess) return Fail(sent, status);

  const bool has_imm = request.opcode == WrOpcode::kSendImm;
  packet->opcode = has_imm ? Opcode::kUdSendOnlyImm : Opcode::kUdSendOnly;
  packet->psn = next_psn_;
  packet->ack_request = false;
  packet->solicited = request.solicited;
  packet->imm_or_inv = request.imm_or_inv;
  packet->dest_qpn = Qpn(request.remote_qpn);
  packet->qkey =
      (request.remote_qkey & kOwnQkeyBit) != 0 ? config_.qkey : Qkey(request.remote_qkey);
  packet->retransmission = false;
  packet->wr_id = request.wr_id;
  packet->payload_bytes = static_cast<uint32_t>(bytes);
  packet->payload_access = MemoryAccess::kLocalRead;
  packet->inline_payload = request.inline_data.empty() ? nullptr : request.inline_data.data();
  packet->segment_count = static_cast<uint32_t>(request.sges.size());
  std::copy(request.sges.begin(), request.sges.end(), packet->segments);
  next_psn_ = next_psn_.Next();
  return true;
}

void UdSender::HandleFetched(Psn psn) {
  for (uint32_t i = 0; i < sent_.size(); ++i) {
    Sent& sent = sent_[i];
    if (sent.done) continue;
    if (Psn::Distance(sent.psn, psn) < 0) return;
    sent.done = true;
    ++counters_.rdma_sends;
  }
}

void UdSender::HandleFetchFailed(Psn psn) {
  for (uint32_t i = 0; i < sent_.size(); ++i) {
    Sent& sent = sent_[i];
    if (sent.done || Psn::Distance(sent.psn, psn) > 0) continue;
    Fail(sent, sent.psn == psn ? WcStatus::kLocProtErr : WcStatus::kWrFlushErr);
  }
}

void UdSender::Flush() { failed_ = true; }

bool UdSender::PollCompletion(Completion* completion) {
  while (!sent_.empty() && sent_.front().done) {
    const Sent sent = sent_.front();
    sent_.pop_front();
    if (!sent.signaled && sent.status == WcStatus::kSuccess) continue;
    *completion = {};
    completion->wr_id = sent.wr_id;
    completion->wqe_index = sent.wqe_index;
    completion->status = sent.status;
    completion->opcode = WcOpcode::kSend;
    completion->is_send = true;
    return true;
  }
  return false;
}

}  // namespace verbena::transport
