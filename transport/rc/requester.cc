// SPDX-License-Identifier: Apache-2.0
#include "transport/rc/requester.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

#include "transport/rc/requester_wr.h"

namespace verbena::transport {

namespace {

constexpr uint64_t kMaxPsnsOutstanding = uint64_t{1} << 23;
constexpr uint32_t kAtomicBytes = 8;

struct OpcodeRow {
  Opcode first;
  Opcode middle;
  Opcode last;
  Opcode only;
};

// Opcodes of a message that carries its payload in the request.
constexpr OpcodeRow RowOf(WrOpcode opcode) {
  switch (opcode) {
    case WrOpcode::kRdmaWrite:
      return {Opcode::kRcWriteFirst, Opcode::kRcWriteMiddle, Opcode::kRcWriteLast,
              Opcode::kRcWriteOnly};
    case WrOpcode::kRdmaWriteImm:
      return {Opcode::kRcWriteFirst, Opcode::kRcWriteMiddle, Opcode::kRcWriteLastImm,
              Opcode::kRcWriteOnlyImm};
    case WrOpcode::kSendImm:
      return {Opcode::kRcSendFirst, Opcode::kRcSendMiddle, Opcode::kRcSendLastImm,
              Opcode::kRcSendOnlyImm};
    case WrOpcode::kSendInv:
      return {Opcode::kRcSendFirst, Opcode::kRcSendMiddle, Opcode::kRcSendLastInv,
              Opcode::kRcSendOnlyInv};
    default:
      return {Opcode::kRcSendFirst, Opcode::kRcSendMiddle, Opcode::kRcSendLast,
              Opcode::kRcSendOnly};
  }
}

constexpr bool IsWrite(WrOpcode opcode) {
  return opcode == WrOpcode::kRdmaWrite || opcode == WrOpcode::kRdmaWriteImm;
}

// What is wrong with a WR that can be seen without looking at memory.
WcStatus Validate(const SendRequest& request, const RcRequester::Capacity& capacity,
                  uint64_t length) {
  if (request.malformed != WcStatus::kSuccess) return request.malformed;
  if (request.sges.size() > capacity.max_sge || request.inline_data.size() > capacity.max_inline) {
    return WcStatus::kLocQpOpErr;
  }
  if (length > kMaxMessageBytes) return WcStatus::kLocLenErr;
  switch (request.opcode) {
    case WrOpcode::kCompareSwap:
    case WrOpcode::kFetchAdd:
      return length < kAtomicBytes ? WcStatus::kLocLenErr : WcStatus::kSuccess;
    case WrOpcode::kAtomicWrite:
      if (!request.inline_data.empty()) return WcStatus::kLocQpOpErr;
      return request.sges.empty() || length == kAtomicBytes ? WcStatus::kSuccess
                                                            : WcStatus::kLocLenErr;
    case WrOpcode::kFlush:
      return request.compare_add <= kMaxMessageBytes ? WcStatus::kSuccess : WcStatus::kLocLenErr;
    case WrOpcode::kRdmaWrite:
    case WrOpcode::kRdmaWriteImm:
    case WrOpcode::kSend:
    case WrOpcode::kSendImm:
    case WrOpcode::kSendInv:
    case WrOpcode::kRdmaRead:
    case WrOpcode::kLocalInv:
    case WrOpcode::kBindMw:
      return WcStatus::kSuccess;
  }
  return WcStatus::kLocQpOpErr;
}

}  // namespace

RcRequester::RcRequester(const Capacity& capacity, MemoryPort& memory)
    : memory_(memory), capacity_(capacity) {
  capacity_.max_wr = std::max(capacity_.max_wr, 1u);
  capacity_.max_sge = std::clamp(capacity_.max_sge, 1u, kMaxSge);
  const size_t slots = std::bit_ceil(size_t{capacity_.max_wr});
  ring_mask_ = slots - 1;
  // Not initialised: a slot is written by Post before anything reads it, and
  // pages of slots that are never used stay untouched.
  ring_ = std::make_unique_for_overwrite<Wr[]>(slots);
  sges_ = std::make_unique_for_overwrite<Sge[]>(slots * capacity_.max_sge);
  inline_ = std::make_unique_for_overwrite<std::byte[]>(slots * capacity_.max_inline + 1);
}

RcRequester::~RcRequester() = default;

void RcRequester::Reset() {
  running_ = draining_ = flushing_ = false;
  alternate_armed_ = migrated_ = false;
  failed_ = failure_reported_ = tickets_void_ = rnr_waiting_ = false;
  completed_ = retired_ = una_wr_ = send_wr_ = started_ = tail_ = 0;
  error_wr_ = gone_back_ = kNone;
  una_seq_ = send_seq_ = sent_high_ = next_seq_ = 0;
  in_flight_ = rd_outstanding_ = rd_unretired_ = 0;
  tx_sge_ = tx_sge_used_ = rx_sge_ = rx_sge_used_ = 0;
  committed_ = 0;
  ack_deadline_ = rnr_deadline_ = Time::Never();
}

void RcRequester::Start(const RcRequesterConfig& config) {
  Reset();
  assert(IsValid(config.pmtu));
  mtu_shift_ = static_cast<uint8_t>(std::countr_zero(PmtuBytes(config.pmtu)));
  una_seq_ = send_seq_ = sent_high_ = next_seq_ = config.first_psn.value();
  Reconfigure(config);
  retries_left_ = retry_cnt_;
  rnr_retries_left_ = rnr_retry_;
  running_ = true;
}

void RcRequester::Reconfigure(const RcRequesterConfig& config) {
  timeout_ = config.timeout & 31;
  retry_cnt_ = config.retry_cnt & 7;
  rnr_retry_ = config.rnr_retry & 7;
  retries_left_ = std::min(retries_left_, retry_cnt_);
  rnr_retries_left_ = std::min(rnr_retries_left_, rnr_retry_);
  // Nothing is being retried. (in_flight_ is 0 after going back too.)
  if (una_seq_ == sent_high_) {
    retries_left_ = retry_cnt_;
    rnr_retries_left_ = rnr_retry_;
  }
  max_rd_atomic_ = config.max_rd_atomic;
}

void RcRequester::Post(const SendRequest& request, Time /*now*/) {
  assert(CanPost());
  Wr& wr = At(tail_);
  uint64_t length = request.inline_data.size();
  for (const MemorySegment& sge : request.sges) length += sge.length;

  wr.wr_id = request.wr_id;
  wr.remote_address = request.remote_address;
  wr.compare_add = request.compare_add;
  wr.swap = request.swap;
  wr.first_ticket = wr.last_ticket = 0;
  wr.wqe_index = request.wqe_index;
  wr.imm_or_inv = request.imm_or_inv;
  wr.rkey = request.rkey;
  wr.srq = request.remote_srq;
  wr.vendor_err = 0;
  wr.opcode = request.opcode;
  wr.error = Validate(request, capacity_, length);
  wr.signaled = request.signaled;
  wr.fence = request.fence;
  wr.solicited = request.solicited;
  wr.is_inline = !request.inline_data.empty();
  wr.sge_count = 0;
  if (wr.error != WcStatus::kSuccess) {
    wr.length = wr.psn_count = 0;
    error_wr_ = std::min(error_wr_, tail_++);
    Retire();
    return;
  }

  const bool is_word = wr.is_atomic() || wr.is_atomic_write();
  wr.length = static_cast<uint32_t>(is_word ? kAtomicBytes : wr.is_flush() ? 0 : length);
  wr.psn_count = wr.length == 0 ? 1 : ((wr.length - 1) >> mtu_shift_) + 1;
  if (wr.is_inline) {
    std::memcpy(InlineOf(tail_), request.inline_data.data(), request.inline_data.size());
  } else {
    wr.sge_count = static_cast<uint8_t>(request.sges.size());
    Sge* out = SgesOf(tail_);
    for (const MemorySegment& sge : request.sges) *out++ = {sge.address, sge.length, sge.key};
  }
  ++tail_;
  if (wr.is_local()) Retire();
}

void RcRequester::Resume() {
  draining_ = false;
  Retire();
}

// The oldest WR, with nothing before it: earlier WRs might have to be sent
// again through the key. It sends nothing, so it does not wait for
// PollTransmit.
void RcRequester::ExecuteLocal(const Wr& wr) {
  const bool bind = wr.opcode == WrOpcode::kBindMw;
  const MemoryStatus status =
      bind
          ? memory_.Bind(BindOf(wr.imm_or_inv, wr.remote_address, wr.rkey, wr.compare_add, wr.swap))
          : memory_.Invalidate(wr.imm_or_inv);
  if (status == MemoryStatus::kOk) {
    retired_ = una_wr_ = started_ = ++send_wr_;
  } else {
    Fail(retired_, bind ? WcStatus::kMwBindErr : WcStatus::kLocQpOpErr, 0);
  }
}

// Is there room for one more READ or atomic? Fails the WR if it can never be.
bool RcRequester::BeginReadOrAtomic(const Wr& wr) {
  WcStatus error = WcStatus::kSuccess;
  if (max_rd_atomic_ == 0 || wr.is_inline) {
    error = WcStatus::kLocQpOpErr;
  } else if (rd_outstanding_ >= max_rd_atomic_) {
    return false;
  } else if (!wr.is_atomic_write() && !IsWritable({SgesOf(send_wr_), wr.sge_count})) {
    error = WcStatus::kLocProtErr;
  }
  if (error == WcStatus::kSuccess) return true;
  Fail(send_wr_, error, 0);
  Retire();
  return false;
}

bool RcRequester::IsWritable(std::span<const Sge> sges) const {
  return std::all_of(sges.begin(), sges.end(), [this](const Sge& sge) {
    return sge.length == 0 || memory_.Check(sge.key, sge.address, sge.length,
                                            MemoryAccess::kLocalWrite) == MemoryStatus::kOk;
  });
}

// May the WR at send_wr_, the first without PSNs, go out now? Gives it its
// PSNs if so.
bool RcRequester::Begin(Wr& wr) {
  if (draining_) return false;
  if (wr.fence && rd_unretired_ != 0) return false;
  if (wr.is_local()) return false;  // Retire does it
  // PSNs are told apart within half their space only.
  if (next_seq_ - una_seq_ + wr.psn_count > kMaxPsnsOutstanding) return false;
  if (wr.is_read_or_atomic()) {
    if (!BeginReadOrAtomic(wr)) return false;
    ++rd_outstanding_;
    ++rd_unretired_;
  }
  wr.first_seq = next_seq_;
  next_seq_ += wr.psn_count;
  ++started_;
  tx_sge_ = tx_sge_used_ = 0;
  return true;
}

bool RcRequester::PollTransmit(Time now, TxPacket* packet) {
  if (!running_ || failed_) return false;
  if (rnr_waiting_) {
    if (now < rnr_deadline_) return false;
    rnr_waiting_ = false;
  }
  if (in_flight_ >= kWindowPackets) return false;
  if (send_wr_ == tail_ || send_wr_ >= error_wr_) return false;
  Wr& wr = At(send_wr_);
  if (send_wr_ == started_ && !Begin(wr)) return false;
  if (wr.is_read_or_atomic()) {
    EmitReadOrAtomic(wr, packet);
    FinishTransmit(now, static_cast<uint32_t>(wr.end_seq() - send_seq_), packet);
  } else {
    EmitPayloadPacket(wr, packet);
    FinishTransmit(now, 1, packet);
  }
  return true;
}

void RcRequester::EmitPayloadPacket(Wr& wr, TxPacket* packet) {
  const uint64_t index = send_seq_ - wr.first_seq;
  const uint32_t mtu = uint32_t{1} << mtu_shift_;
  const uint32_t offset = static_cast<uint32_t>(index << mtu_shift_);
  const bool first = index == 0;
  const bool last = index + 1 == wr.psn_count;
  const OpcodeRow row = RowOf(wr.opcode);
  packet->opcode = first ? (last ? row.only : row.first) : (last ? row.last : row.middle);
  packet->solicited = last && wr.solicited && wr.opcode != WrOpcode::kRdmaWrite;
  packet->ack_request = last || (index + 1) % kAckRequestInterval == 0;
  packet->imm_or_inv = wr.imm_or_inv;
  packet->srq = wr.srq;
  if (IsWrite(wr.opcode)) {
    packet->remote_address = wr.remote_address;
    packet->rkey = wr.rkey;
    packet->dma_length = wr.length;
  }
  packet->payload_bytes = last ? wr.length - offset : mtu;
  packet->payload_access = MemoryAccess::kLocalRead;
  if (wr.is_inline) {
    packet->inline_payload = InlineOf(send_wr_) + offset;
    packet->segment_count = 0;
  } else {
    packet->inline_payload = nullptr;
    FillSegments(packet->payload_bytes, packet);
  }
}

void RcRequester::EmitReadOrAtomic(Wr& wr, TxPacket* packet) {
  packet->solicited = false;
  packet->ack_request = true;
  packet->rkey = wr.rkey;
  packet->remote_address = wr.remote_address;
  packet->srq = wr.srq;
  packet->payload_bytes = 0;
  packet->segment_count = 0;
  packet->inline_payload = nullptr;
  wr.request_seq = send_seq_;
  if (wr.is_read()) {
    // A repeated READ asks only for what is missing.
    const uint32_t offset = static_cast<uint32_t>((send_seq_ - wr.first_seq) << mtu_shift_);
    packet->opcode = Opcode::kRcReadRequest;
    packet->remote_address += offset;
    packet->dma_length = wr.length - offset;
    return;
  }
  if (wr.is_atomic_write()) {
    packet->opcode = Opcode::kRcAtomicWrite;
    packet->dma_length = kAtomicBytes;
    packet->payload_bytes = kAtomicBytes;
    packet->payload_access = MemoryAccess::kLocalRead;
    if (wr.sge_count == 0) {
      packet->inline_payload = reinterpret_cast<const std::byte*>(&wr.compare_add);
    } else {
      tx_sge_ = tx_sge_used_ = 0;
      FillSegments(kAtomicBytes, packet);
    }
    return;
  }
  if (wr.is_flush()) {
    packet->opcode = Opcode::kRcFlush;
    packet->dma_length = static_cast<uint32_t>(wr.compare_add);
    packet->imm_or_inv = wr.imm_or_inv;
    return;
  }
  const bool swap = wr.opcode == WrOpcode::kCompareSwap;
  packet->opcode = swap ? Opcode::kRcCompareSwap : Opcode::kRcFetchAdd;
  packet->swap_or_add = swap ? wr.swap : wr.compare_add;
  packet->compare = swap ? wr.compare_add : 0;
}

void RcRequester::FillSegments(uint32_t bytes, TxPacket* packet) {
  const Sge* sges = SgesOf(send_wr_);
  uint32_t count = 0;
  while (bytes != 0) {
    const Sge& sge = sges[tx_sge_];
    const uint32_t take = std::min(bytes, sge.length - tx_sge_used_);
    if (take != 0) {
      packet->segments[count++] = {sge.address + tx_sge_used_, take, sge.key};
      bytes -= take;
      tx_sge_used_ += take;
    }
    if (tx_sge_used_ == sge.length) {
      ++tx_sge_;
      tx_sge_used_ = 0;
    }
  }
  packet->segment_count = count;
}

void RcRequester::FinishTransmit(Time now, uint32_t psns, TxPacket* packet) {
  packet->psn = PsnOf(send_seq_);
  packet->retransmission = send_seq_ < sent_high_;
  packet->wr_id = At(send_wr_).wr_id;
  send_seq_ += psns;
  if (send_seq_ > sent_high_) sent_high_ = send_seq_;
  if (send_seq_ == At(send_wr_).end_seq()) {
    ++send_wr_;
    tx_sge_ = tx_sge_used_ = 0;
    ++counters_.rdma_sends;
  }
  ++in_flight_;
  if (ack_deadline_.IsNever()) ArmAckTimer(now);
}

// Moves retired_ over the WRs that are acknowledged and whose data is visible;
// notices a failed one when everything before it is done.
void RcRequester::Retire() {
  if (!running_ || failed_) return;
  while (retired_ != tail_) {
    const Wr& wr = At(retired_);
    if (draining_ && retired_ == started_) return;
    if (retired_ >= error_wr_ && wr.error != WcStatus::kSuccess) {
      failed_ = true;
      ack_deadline_ = rnr_deadline_ = Time::Never();
      rnr_waiting_ = false;
      return;
    }
    if (retired_ == started_ && wr.is_local()) {
      ExecuteLocal(wr);
      continue;
    }
    if (retired_ == una_wr_ || wr.last_ticket > committed_) return;
    if (wr.is_read_or_atomic()) --rd_unretired_;
    ++retired_;
  }
}

void RcRequester::Complete(const Wr& wr, WcStatus status, Completion* completion) const {
  *completion = Completion{};
  completion->wr_id = wr.wr_id;
  completion->wqe_index = wr.wqe_index;
  completion->status = status;
  completion->opcode = CompletionOpcode(wr.opcode);
  completion->is_send = true;
  completion->byte_len = wr.length;
  completion->vendor_err = status == WcStatus::kWrFlushErr ? 0 : wr.vendor_err;
}

bool RcRequester::PollCompletion(Completion* completion) {
  while (completed_ != tail_) {
    const Wr& wr = At(completed_);
    if (completed_ < retired_) {
      ++completed_;
      // IBTA Vol 1 §10.7.3.1: an unsignalled WR that succeeds gives none.
      if (!wr.signaled) continue;
      Complete(wr, WcStatus::kSuccess, completion);
      return true;
    }
    const bool failing = failed_ && !failure_reported_;
    if (!failing && !flushing_) return false;
    // The buffer may still be written to.
    if (wr.last_ticket > committed_ && !tickets_void_) return false;
    Complete(wr, failing ? wr.error : WcStatus::kWrFlushErr, completion);
    failure_reported_ |= failing;
    ++completed_;
    return true;
  }
  return false;
}

void RcRequester::Flush() {
  running_ = false;
  flushing_ = true;
  rnr_waiting_ = false;
  ack_deadline_ = rnr_deadline_ = Time::Never();
}

void RcRequester::HandleCommitted(Ticket ticket, Time /*now*/) {
  committed_ = std::max(committed_, ticket);
  Retire();
}

}  // namespace verbena::transport
