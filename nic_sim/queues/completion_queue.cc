// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/queues/completion_queue.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace verbena::nic {

using transport::Completion;
using transport::Duration;
using transport::NetworkHeader;
using transport::Time;
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
                                 uint64_t user_handle, std::shared_ptr<EventChannel> channel,
                                 bool overwrites)
    : slot_(slot),
      ring_(ring),
      record_(record),
      user_handle_(user_handle),
      channel_(std::move(channel)),
      overwrites_(overwrites) {
  record_->consumer.store(0, std::memory_order_relaxed);
  record_->arm.store(abi::kCqNotArmed, std::memory_order_relaxed);
}

bool CompletionQueue::Write(const Completion& completion, const CqeOrigin& origin,
                            uint64_t timestamp_ns) {
  if (in_error_) return false;
  if (producer_ - consumer_ >= slots() && !overwrites_) {
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
  cqe.flow_tag = completion.flow_tag;

  std::byte* slot = ring_.data + uint64_t{producer_ & (slots() - 1)} * sizeof(abi::Cqe);
  std::memcpy(slot, &cqe, offsetof(abi::Cqe, phase));
  reinterpret_cast<abi::Cqe*>(slot)->phase.store(abi::PhaseOf(producer_, slots()),
                                                 std::memory_order_release);
  ++producer_;
  dirty_ = true;
  dirty_solicited_ |= completion.solicited || completion.status != WcStatus::kSuccess;
  return true;
}

void CompletionQueue::SetModeration(uint32_t count, Duration period) {
  moderation_count_ = count;
  moderation_period_ = period;
}

// True if the event is to wait for more CQEs or for the end of the period.
bool CompletionQueue::HoldBack(Time now) {
  if (moderation_count_ <= 1 && moderation_period_ == Duration::Zero()) return false;
  const uint32_t news = producer_ - seen_producer_;
  seen_producer_ = producer_;
  if (waiting_ == 0) first_waiting_ = now;
  waiting_ += news;
  const bool enough = moderation_count_ != 0 && waiting_ >= moderation_count_;
  // Without a period the count alone decides, and would keep the last CQEs for ever:
  // NICs then use a time of their own.
  const Duration period =
      moderation_period_ != Duration::Zero() ? moderation_period_ : Duration::Milliseconds(1);
  if (!enough && now < first_waiting_ + period) {
    held_until_ = first_waiting_ + period;
    return true;
  }
  return false;
}

int CompletionQueue::SwitchTo(const Ring& ring) {
  if (old_ring_.location.slots != 0) return EBUSY;
  const uint32_t consumer = record_->consumer.load(std::memory_order_acquire);
  if (producer_ - consumer <= slots()) consumer_ = consumer;
  if (producer_ - consumer_ > ring.location.slots) return EINVAL;
  const uint32_t new_slots = ring.location.slots;
  for (uint32_t i = consumer_; i != producer_; ++i) {
    const std::byte* from = ring_.data + uint64_t{i & (slots() - 1)} * sizeof(abi::Cqe);
    std::byte* to = ring.data + uint64_t{i & (new_slots - 1)} * sizeof(abi::Cqe);
    std::memcpy(to, from, offsetof(abi::Cqe, phase));
    reinterpret_cast<abi::Cqe*>(to)->phase.store(abi::PhaseOf(i, new_slots),
                                                 std::memory_order_relaxed);
  }
  // A slot that holds none must not look like one: the zeroes of a new ring are
  // right for its first round only.
  for (uint32_t i = producer_; i != consumer_ + new_slots; ++i) {
    std::byte* to = ring.data + uint64_t{i & (new_slots - 1)} * sizeof(abi::Cqe);
    reinterpret_cast<abi::Cqe*>(to)->phase.store(abi::PhaseOf(i, new_slots) ^ 1,
                                                 std::memory_order_relaxed);
  }
  old_ring_ = ring_;
  ring_ = ring;
  return 0;
}

bool CompletionQueue::TakeOldRing(Ring* ring) {
  if (old_ring_.location.slots == 0) return false;
  *ring = old_ring_;
  old_ring_ = {};
  return true;
}

Time CompletionQueue::Notify(Time now) {
  if (!dirty_) return Time::Never();
  if (channel_ != nullptr) {
    const uint32_t arm = record_->arm.load(std::memory_order_acquire);
    const bool wanted =
        arm == abi::kCqArmedAny || (arm == abi::kCqArmedSolicited && dirty_solicited_);
    if (wanted && HoldBack(now)) return held_until_;
    if (wanted) {
      // Disarm first: who sees the event may arm again at once.
      record_->arm.store(abi::kCqNotArmed, std::memory_order_seq_cst);
      if (!channel_->Write(user_handle_)) {
        record_->arm.store(arm, std::memory_order_seq_cst);
        return now + Duration::Milliseconds(1);
      }
      ++comp_events;
    }
  }
  dirty_ = false;
  dirty_solicited_ = false;
  waiting_ = 0;
  seen_producer_ = producer_;
  return Time::Never();
}

}  // namespace verbena::nic
