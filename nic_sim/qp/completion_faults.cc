// SPDX-License-Identifier: Apache-2.0
//
// What fault rules make of completions and QPs.
#include <algorithm>

#include "nic_sim/engine/shard.h"
#include "nic_sim/qp/qp.h"

namespace verbena::nic {

using transport::AsyncEventType;
using transport::Completion;
using transport::Duration;
using transport::QpState;
using transport::Time;
using transport::WcStatus;

FaultSubject Qp::fault_subject() const {
  return {.nic = config_.nic->config().index,
          .app = config_.app,
          .qpn = qpn_.value(),
          .nth_qp = config_.nth_qp};
}

void Qp::FailByFault() {
  if (state_ == QpState::kReset || state_ == QpState::kErr) return;
  flushes_all_ = true;
  MoveToError();
  config_.sink->OnQpEvent(*this, AsyncEventType::kQpFatal);
}

bool Qp::WriteWithFaults(CompletionQueue& cq, Completion completion, const CqeOrigin& origin,
                         Time now) {
  if (flushes_all_ && completion.status == WcStatus::kSuccess) {
    completion.status = WcStatus::kWrFlushErr;
  }
  const CompletionFault fault =
      config_.shard->faults().OnCompletion(fault_subject(), completion, now);
  if (fault.status) completion.status = WcStatus{*fault.status};
  if (fault.vendor_err) completion.vendor_err = *fault.vendor_err;
  if (!fault.lost) TraceCompletion(completion, origin.src_qpn);
  bool written = true;
  for (uint32_t i = 0; i <= fault.copies && written && !fault.lost && !fault.overrun; ++i) {
    if (config_.shard->Delay(*this, cq, completion, origin, fault.delay)) continue;
    written = cq.Write(completion, origin, static_cast<uint64_t>(now.ns()));
    if (written) config_.shard->MarkDirty(cq);
  }
  for (const uint8_t type : fault.events) config_.sink->OnInjectedEvent(*this, &cq, type);
  if (fault.overrun) {
    cq.Fail();
    return false;
  }
  if (fault.fails_qp && state_ != QpState::kErr && state_ != QpState::kReset) {
    flushes_all_ = true;
    MoveToError();
  }
  if (fault.qp_fatal) FailByFault();
  return written;
}

bool Shard::Delay(Qp& qp, CompletionQueue& cq, const Completion& completion,
                  const CqeOrigin& origin, Duration delay) {
  Time release = now_ + delay;
  bool waits = delay > Duration();
  for (const DelayedCompletion& one : delayed_) {
    if (one.qp != &qp || one.completion.is_send != completion.is_send) continue;
    waits = true;
    release = std::max(release, one.release);
  }
  if (!waits || delayed_.size() >= kMaxDelayedCompletions) return false;
  delayed_.push_back({release, &qp, &cq, completion, origin});
  return true;
}

void Shard::RunDelayed() {
  // A copy: an overrun may make the QP complete more.
  std::vector<DelayedCompletion> due;
  std::erase_if(delayed_, [&](const DelayedCompletion& one) {
    if (one.release > now_) return false;
    due.push_back(one);
    return true;
  });
  std::ranges::stable_sort(due, {}, &DelayedCompletion::release);
  for (const DelayedCompletion& one : due) {
    if (one.cq->in_error()) continue;
    if (one.cq->Write(one.completion, one.origin, static_cast<uint64_t>(now_.ns()))) {
      MarkDirty(*one.cq);
    } else {
      one.qp->config().sink->OnCqOverrun(*one.cq);
    }
  }
}

std::shared_ptr<uint32_t> Shard::QpCountOf(pid_t pid) {
  std::erase_if(qp_counts_, [](const auto& entry) { return entry.second.expired(); });
  std::shared_ptr<uint32_t> count = qp_counts_[pid].lock();
  if (count == nullptr) qp_counts_[pid] = count = std::make_shared<uint32_t>(0);
  return count;
}

}  // namespace verbena::nic
