// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/queues/completion_queue.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace verbena::nic {

using transport::Completion;
using transport::NetworkHeader;
using transport::WcStatus;

EventChannel::~EventChannel() { close(fd_); }

bool EventChannel::Write(uint64_t user_handle) {
  ssize_t written;
  do {
    written = write(fd_, &user_handle, sizeof user_handle);
  } while (written < 0 && errno == EINTR);
  // Anything but "full" means that nobody will ever read: nothing to repeat.
  return written == sizeof user_handle || errno != EAGAIN;
}

CompletionQueue::CompletionQueue(uint32_t slot, const Ring& ring, abi::CqRecord* record,
                                 uint64_t user_handle, std::shared_ptr<EventChannel> channel)
    : slot_(slot),
      ring_(ring),
      record_(record),
      user_handle_(user_handle),
      channel_(std::move(channel)) {
  record_->consumer.store(0, std::memory_order_relaxed);
  record_->arm.store(abi::kCqNotArmed, std::memory_order_relaxed);
}

bool CompletionQueue::Write(const Completion& completion, const CqeOrigin& origin,
                            uint64_t timestamp_ns) {
  if (in_error_) return false;
  if (producer_ - consumer_ >= slots()) {
    // The application's index is a hint: one outside the ring leaves it full.
    const uint32_t consumer = record_->consumer.load(std::memory_order_acquire);
    if (producer_ - consumer <= slots()) consumer_ = consumer;
    if (producer_ - consumer_ >= slots()) {
      in_error_ = true;
      return false;
    }
  }
  abi::Cqe cqe{};
  cqe.wr_id = completion.wr_id;
  cqe.status = static_cast<uint8_t>(completion.status);
  cqe.opcode = static_cast<uint8_t>(completion.opcode);
  cqe.flags = static_cast<uint8_t>(
      (completion.is_send ? abi::kCqeSend : 0) | (completion.has_imm ? abi::kCqeWithImm : 0) |
      (completion.has_inv ? abi::kCqeWithInv : 0) |
      (completion.solicited ? abi::kCqeSolicited : 0) | (origin.of_xrc_srq ? abi::kCqeXrcSrq : 0) |
      (completion.network_header != NetworkHeader::kNone ? abi::kCqeGrh : 0));
  cqe.sl = static_cast<uint8_t>(completion.network_header);
  cqe.byte_len = completion.byte_len;
  cqe.imm_or_inv = completion.imm_or_inv;
  cqe.qpn = origin.qpn;
  cqe.src_qpn = origin.src_qpn;
  cqe.vendor_err = completion.vendor_err;
  cqe.timestamp_ns = timestamp_ns;
  cqe.wqe_index = completion.wqe_index;
  cqe.qp_slot = origin.qp_slot;
  cqe.qp_generation = origin.qp_generation;

  std::byte* slot = ring_.data + uint64_t{producer_ & (slots() - 1)} * sizeof(abi::Cqe);
  std::memcpy(slot, &cqe, offsetof(abi::Cqe, phase));
  reinterpret_cast<abi::Cqe*>(slot)->phase.store(abi::PhaseOf(producer_, slots()),
                                                 std::memory_order_release);
  ++producer_;
  dirty_ = true;
  dirty_solicited_ |= completion.solicited || completion.status != WcStatus::kSuccess;
  return true;
}

bool CompletionQueue::Notify() {
  if (!dirty_) return true;
  if (channel_ != nullptr) {
    const uint32_t arm = record_->arm.load(std::memory_order_acquire);
    const bool wanted =
        arm == abi::kCqArmedAny || (arm == abi::kCqArmedSolicited && dirty_solicited_);
    if (wanted) {
      // Disarm first: who sees the event may arm again at once.
      record_->arm.store(abi::kCqNotArmed, std::memory_order_seq_cst);
      if (!channel_->Write(user_handle_)) {
        record_->arm.store(arm, std::memory_order_seq_cst);
        return false;
      }
      ++comp_events;
    }
  }
  dirty_ = false;
  dirty_solicited_ = false;
  return true;
}

}  // namespace verbena::nic
