// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/queues/shared_receive_queue.h"

#include <algorithm>
#include <utility>

#include "nic_sim/queues/work_queue.h"

namespace verbena::nic {

using transport::AsyncEventType;

SharedReceiveQueue::SharedReceiveQueue(const Config& config) : config_(config) {
  config_.record->producer.store(0, std::memory_order_relaxed);
  config_.record->ring.store(0, std::memory_order_relaxed);
  config_.record->taken.store(0, std::memory_order_relaxed);
}

bool SharedReceiveQueue::Look(uint32_t* posted) const {
  *posted = config_.record->producer.load(std::memory_order_acquire);
  const uint32_t slots =
      std::max(config_.ring.location.slots, next_ring_.location.slots);  // 0 if there is none
  return *posted - taken_ <= slots;
}

uint32_t SharedReceiveQueue::posted() const {
  uint32_t posted = 0;
  return !in_error_ && Look(&posted) ? posted : taken_;
}

// After the producer was read: WQEs that it counts are in the ring that is
// named now.
const Ring& SharedReceiveQueue::CurrentRing() const {
  if (!resizing()) return config_.ring;
  const uint32_t number = config_.record->ring.load(std::memory_order_acquire);
  return number == ring_number_ ? config_.ring : next_ring_;
}

void SharedReceiveQueue::Fail() {
  in_error_ = true;
  config_.sink->OnSrqEvent(*this, AsyncEventType::kSrqErr);
}

bool SharedReceiveQueue::Take(transport::RecvRequest* request) {
  if (in_error_) return false;
  uint32_t posted = 0;
  if (!Look(&posted)) {
    Fail();
    return false;
  }
  if (posted == taken_) return false;
  const Ring& ring = CurrentRing();
  const std::byte* slot =
      ring.data + uint64_t{taken_ & (ring.location.slots - 1)} * ring.location.stride;
  CopyRecvWqe(slot, config_.max_sge, request);
  request->wqe_index = taken_++;
  return true;
}

void SharedReceiveQueue::Publish() {
  if (published_ != taken_) {
    published_ = taken_;
    config_.record->taken.store(taken_, std::memory_order_release);
  }
  if (limit_ == 0 || in_error_ || outstanding() >= limit_) return;
  limit_ = 0;  // once
  config_.sink->OnSrqEvent(*this, AsyncEventType::kSrqLimitReached);
}

void SharedReceiveQueue::SetLimit(uint32_t limit) {
  limit_ = limit;
  Publish();  // it may be reached already
}

uint32_t SharedReceiveQueue::BeginResize(const Ring& ring, uint32_t max_wr, uint32_t limit) {
  next_ring_ = ring;
  next_max_wr_ = max_wr;
  next_limit_ = limit;
  return ring_number_ ^ 1;
}

Ring SharedReceiveQueue::FinishResize(bool commit) {
  Ring unused = std::exchange(next_ring_, Ring{});
  if (!commit) return unused;
  std::swap(unused, config_.ring);
  config_.max_wr = next_max_wr_;
  ring_number_ ^= 1;
  SetLimit(next_limit_);
  return unused;
}

}  // namespace verbena::nic
