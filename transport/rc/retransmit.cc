// SPDX-License-Identifier: Apache-2.0
//
// RcRequester: timers, go-back-N and failures.
#include <algorithm>

#include "transport/rc/requester.h"
#include "transport/rc/requester_wr.h"
#include "transport/wire/aeth.h"

namespace verbena::transport {

namespace {

constexpr uint8_t kRetryForEver = 7;  // of rnr_retry only

}  // namespace

void RcRequester::ArmAckTimer(Time now) {
  // Local ACK timeout: 4.096 µs · 2^code, 0 = never.
  if (timeout_ != 0) ack_deadline_ = now + Duration::Nanoseconds(int64_t{4096} << timeout_);
}

// Sending continues at the oldest unacknowledged PSN.
void RcRequester::SeekToUna() {
  send_wr_ = una_wr_;
  send_seq_ = una_seq_;
  in_flight_ = 0;
  tx_sge_ = tx_sge_used_ = 0;
  if (una_seq_ == next_seq_) return;
  const Wr& wr = At(una_wr_);
  if (wr.is_inline || wr.is_read_or_atomic()) return;
  uint64_t skip = (una_seq_ - wr.first_seq) << mtu_shift_;
  const Sge* sges = SgesOf(una_wr_);
  while (skip != 0 && skip >= sges[tx_sge_].length) skip -= sges[tx_sge_++].length;
  tx_sge_used_ = static_cast<uint32_t>(skip);
}

void RcRequester::GoBack() {
  ++counters_.completer_retry_err;
  gone_back_ = una_seq_;
  ack_deadline_ = Time::Never();
  SeekToUna();
}

// One more attempt for the oldest unacknowledged packet, if any is left.
void RcRequester::Retry() {
  if (retries_left_ != 0) {
    --retries_left_;
  } else if (alternate_armed_) {
    alternate_armed_ = false;
    migrated_ = true;
    retries_left_ = retry_cnt_;
  } else {
    ++counters_.retry_exceeded_err;
    Fail(una_wr_, WcStatus::kRetryExcErr, 0);
    return;
  }
  GoBack();
}

void RcRequester::HandleTimeout(Time now) {
  if (!running_ || failed_) return;
  if (rnr_waiting_ && now >= rnr_deadline_) rnr_waiting_ = false;
  if (now < ack_deadline_) return;
  ack_deadline_ = Time::Never();
  if (una_wr_ >= error_wr_ || una_seq_ >= send_seq_) return;
  ++counters_.local_ack_timeout_err;
  Retry();
  Retire();
}

void RcRequester::HandleSequenceNak(uint64_t seq, Time now) {
  ++counters_.rcvd_seq_err;
  if (!AcknowledgeBefore(seq, now)) {
    HandleHole();
    return;
  }
  // During an RNR wait it comes from packets that were behind the one that has
  // to wait, and does not shorten the wait. If nothing was sent since going
  // back, it is a repetition. A WR that has failed already waits for those
  // before it to complete, and does not fail again.
  if (rnr_waiting_ || send_seq_ == una_seq_ || una_wr_ >= error_wr_) return;
  Retry();
}

void RcRequester::HandleRnrNak(uint8_t timer_code, uint64_t seq, Time now) {
  if (!AcknowledgeBefore(seq, now)) {
    HandleHole();
    return;
  }
  // A repetition, or the WR has failed already.
  if (rnr_waiting_ || una_wr_ >= error_wr_) return;
  ++counters_.rcvd_rnr_err;
  if (rnr_retry_ != kRetryForEver) {
    if (rnr_retries_left_ == 0) {
      ++counters_.retry_rnr_exceeded_err;
      Fail(una_wr_, WcStatus::kRnrRetryExcErr, 0);
      return;
    }
    --rnr_retries_left_;
  }
  GoBack();
  rnr_waiting_ = true;
  rnr_deadline_ = now + RnrTimerDelay(timer_code);
}

// A response beyond a READ or atomic whose own response is missing: lost, or
// overtaken. Asks again at once, but only once until something progresses, and
// leaves the last attempt to the timer: overtaking must not break a connection.
void RcRequester::HandleHole() {
  ++counters_.dropped;
  if (rnr_waiting_ || gone_back_ == una_seq_ || retries_left_ == 0) return;
  if (una_wr_ >= error_wr_ || send_seq_ == una_seq_) return;
  Retry();
}

void RcRequester::Fail(uint64_t index, WcStatus status, uint32_t vendor_err) {
  Wr& wr = At(index);
  if (wr.error != WcStatus::kSuccess) return;
  wr.error = status;
  wr.vendor_err = vendor_err;
  error_wr_ = std::min(error_wr_, index);
}

void RcRequester::HandleFetchFailed(Psn psn, MemoryStatus /*why*/, Time /*now*/) {
  if (!running_ || failed_) return;
  const uint64_t seq = una_seq_ + Psn(psn.value() - una_psn().value()).value();
  if (seq >= sent_high_) return;
  uint64_t index = una_wr_;
  while (At(index).end_seq() <= seq) ++index;
  Fail(index, WcStatus::kLocProtErr, 0);
  Retire();
}

void RcRequester::HandlePlacementFailed(Ticket ticket, MemoryStatus /*why*/, Time /*now*/) {
  if (ticket != 0) committed_ = std::max(committed_, ticket - 1);
  tickets_void_ = true;
  if (!running_ || failed_) return;
  for (uint64_t i = retired_; i < started_; ++i) {
    const Wr& wr = At(i);
    if (wr.last_ticket >= ticket && wr.first_ticket <= ticket) {
      Fail(i, WcStatus::kLocProtErr, 0);
      break;
    }
  }
  Retire();
}

void RcRequester::ShiftDeadlines(Duration gap) {
  ack_deadline_ += gap;
  rnr_deadline_ += gap;
}

}  // namespace verbena::transport
