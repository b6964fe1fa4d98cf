// SPDX-License-Identifier: Apache-2.0
#include "transport/rc/response_queue.h"

namespace verbena::transport {

void ResponseQueue::clear() {
  ring_.clear();
  outstanding_requests_ = 0;
}

void ResponseQueue::pop_front() {
  const Response& response = ring_.front();
  if (response.is_read_or_atomic() && !response.replay) --outstanding_requests_;
  ring_.pop_front();
}

void ResponseQueue::Add(const Response& response) {
  if (response.is_read_or_atomic() && !response.replay) ++outstanding_requests_;
  ring_.push_back() = response;
}

void ResponseQueue::Replay(const Response& response) {
  uint32_t position = ring_.size();
  for (uint32_t i = 0; i < ring_.size(); ++i) {
    Response& entry = ring_[i];
    if (entry.kind == response.kind && entry.end_psn == response.end_psn &&
        entry.is_read_or_atomic()) {
      if (entry.kind == Response::Kind::kAtomic) return;  // on its way already
      entry.psn = entry.first_psn = response.psn;
      entry.left = response.left;
      entry.rkey = response.rkey;
      entry.address = response.address;
      entry.restarted = true;
      return;
    }
    if (position == ring_.size() && Psn::Distance(response.psn, entry.psn) >= 0) position = i;
  }
  ring_.insert(position) = response;
}

void ResponseQueue::Truncate(uint32_t position) {
  for (uint32_t i = position; i < ring_.size(); ++i) {
    if (ring_[i].is_read_or_atomic() && !ring_[i].replay) --outstanding_requests_;
  }
  ring_.truncate(position);
}

void ResponseQueue::KeepFatalNak() {
  for (uint32_t i = 0; i < ring_.size(); ++i) {
    if (ring_[i].kind != Response::Kind::kFatalNak) continue;
    const Response nak = ring_[i];
    clear();
    Add(nak);
    return;
  }
  clear();
}

}  // namespace verbena::transport
