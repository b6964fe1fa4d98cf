// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/queues/work_queue.h"

#include <cstring>

namespace verbena::nic {
namespace {

using transport::MemorySegment;
using transport::WcStatus;
using transport::WrOpcode;

// A posted index beyond the ring is a lie; believe a full ring at most.
uint32_t Clamp(uint32_t producer, uint32_t consumer, uint32_t slots) {
  return producer - consumer <= slots ? producer : consumer;
}

void CopySges(const std::byte* from, uint32_t count, MemorySegment* to) {
  abi::Sge sges[transport::kMaxSge];
  std::memcpy(sges, from, count * sizeof(abi::Sge));
  for (uint32_t i = 0; i < count; ++i) {
    to[i] = {.address = sges[i].address, .length = sges[i].length, .key = sges[i].lkey};
  }
}

bool IsRcOpcode(uint8_t opcode) {
  return opcode <= static_cast<uint8_t>(WrOpcode::kSendInv) ||
         opcode == static_cast<uint8_t>(WrOpcode::kFlush) ||
         opcode == static_cast<uint8_t>(WrOpcode::kAtomicWrite);
}

bool HasNoInlineData(WrOpcode opcode) {
  return opcode == WrOpcode::kLocalInv || opcode == WrOpcode::kBindMw ||
         opcode == WrOpcode::kRdmaRead || opcode == WrOpcode::kCompareSwap ||
         opcode == WrOpcode::kFetchAdd || opcode == WrOpcode::kFlush ||
         opcode == WrOpcode::kAtomicWrite;
}

}  // namespace

uint32_t SendQueue::Posted() const {
  return Clamp(record_->sq_producer.load(std::memory_order_acquire), fetched_,
               ring_.location.slots);
}

bool SendQueue::Fetch(FetchedSend* fetched) {
  if (ring_.data == nullptr || empty()) return false;
  const std::byte* slot =
      ring_.data + uint64_t{fetched_ & (ring_.location.slots - 1)} * ring_.location.stride;
  abi::SendWqe wqe;
  std::memcpy(&wqe, slot, sizeof wqe);
  const std::byte* tail = slot + sizeof wqe;

  transport::SendRequest& r = fetched->request;
  r = {};
  r.wr_id = wqe.wr_id;
  r.wqe_index = fetched_++;
  r.signaled = limits_.signal_all || (wqe.flags & abi::kWqeSignaled) != 0;
  r.fence = (wqe.flags & abi::kWqeFence) != 0;
  r.solicited = (wqe.flags & abi::kWqeSolicited) != 0;
  if (!IsRcOpcode(wqe.opcode)) {
    r.malformed = WcStatus::kLocQpOpErr;
    return true;
  }
  r.opcode = static_cast<WrOpcode>(wqe.opcode);
  r.imm_or_inv = wqe.imm_or_inv;
  r.remote_address = wqe.remote_address;
  r.rkey = wqe.rkey;
  if (limits_.datagrams) {
    r.ah = wqe.ud.ah;
    r.remote_qpn = wqe.ud.remote_qpn;
    r.remote_qkey = wqe.ud.remote_qkey;
  } else {
    r.compare_add = wqe.atomic.compare_add;
    r.swap = wqe.atomic.swap;
    const bool is_atomic = r.opcode == WrOpcode::kCompareSwap || r.opcode == WrOpcode::kFetchAdd;
    if (limits_.xrc) {
      if (r.opcode == WrOpcode::kFlush || r.opcode == WrOpcode::kAtomicWrite) {
        r.malformed = WcStatus::kLocQpOpErr;
        return true;
      }
      r.remote_srq = transport::SrqNumber(is_atomic ? wqe.imm_or_inv : wqe.xrc.remote_srqn);
    }
  }
  if ((wqe.flags & abi::kWqeInline) != 0) {
    if (HasNoInlineData(r.opcode) || wqe.inline_bytes > limits_.max_inline ||
        wqe.inline_bytes > sizeof fetched->inline_data) {
      r.malformed = WcStatus::kLocQpOpErr;
      return true;
    }
    std::memcpy(fetched->inline_data, tail, wqe.inline_bytes);
    r.inline_data = {fetched->inline_data, wqe.inline_bytes};
  } else {
    if (wqe.num_sge > limits_.max_sge) {
      r.malformed = WcStatus::kLocQpOpErr;
      return true;
    }
    CopySges(tail, wqe.num_sge, fetched->sges);
    r.sges = {fetched->sges, wqe.num_sge};
  }
  return true;
}

void SendQueue::Reset() {
  fetched_ = 0;
  record_->sq_producer.store(0, std::memory_order_relaxed);
  Publish();
}

void CopyRecvWqe(const std::byte* slot, uint32_t max_sge, transport::RecvRequest* request) {
  abi::RecvWqe wqe;
  std::memcpy(&wqe, slot, sizeof wqe);
  request->wr_id = wqe.wr_id;
  request->malformed = wqe.num_sge > max_sge;
  request->sge_count = request->malformed ? 0 : wqe.num_sge;
  CopySges(slot + sizeof wqe, request->sge_count, request->sges);
}

uint32_t ReceiveQueue::Posted() const {
  return Clamp(record_->rq_producer.load(std::memory_order_acquire), taken_, ring_.location.slots);
}

bool ReceiveQueue::Take(transport::RecvRequest* request) {
  if (ring_.data == nullptr || empty()) return false;
  const std::byte* slot =
      ring_.data + uint64_t{taken_ & (ring_.location.slots - 1)} * ring_.location.stride;
  CopyRecvWqe(slot, max_sge_, request);
  request->wqe_index = taken_++;
  return true;
}

void ReceiveQueue::Reset() {
  taken_ = 0;
  record_->rq_producer.store(0, std::memory_order_relaxed);
}

}  // namespace verbena::nic
