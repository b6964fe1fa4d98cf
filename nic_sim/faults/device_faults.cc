// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/faults/device_faults.h"

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>

#include "nic_sim/faults/rule_text.h"

namespace verbena::nic {

using transport::Completion;
using transport::Duration;
using transport::Time;

bool DeviceFaults::ActiveRule::is_timed() const {
  if (rule.action == DeviceAction::kFail || rule.action == DeviceAction::kCmError) return false;
  return !rule.at_completion();
}

bool DeviceFaults::Add(const DeviceRule& rule, uint32_t id, std::optional<uint32_t> nic) {
  const std::lock_guard guard(mutex_);
  if (rules_.size() >= kMaxDeviceRules) return false;
  ActiveRule& active = rules_.emplace_back();
  active.rule = rule;
  active.id = id;
  active.nic = nic;
  active.generator = rule.seed.value_or(id);
  UpdateKinds();
  return true;
}

void DeviceFaults::List(nlohmann::json* rows) const {
  const std::lock_guard guard(mutex_);
  for (const ActiveRule& active : rules_) {
    rows->push_back({{"id", active.id}, {"rule", active.rule.text}, {"hits", active.hits}});
  }
}

uint32_t DeviceFaults::Clear(uint32_t id, std::vector<DeviceRule>* ended) {
  const std::lock_guard guard(mutex_);
  uint32_t removed = 0;
  for (auto active = rules_.begin(); active != rules_.end();) {
    if (id != 0 && active->id != id) {
      ++active;
      continue;
    }
    if (active->begun && !active->ended && active->rule.is_undone()) {
      ended->push_back(active->rule);
    }
    active = rules_.erase(active);
    ++removed;
  }
  UpdateKinds();
  return removed;
}

void DeviceFaults::UpdateKinds() {
  uint32_t kinds = 0;
  uint32_t checked = 0;
  for (const ActiveRule& active : rules_) {
    const DeviceRule& rule = active.rule;
    if (rule.action == DeviceAction::kFail) {
      const bool data_path = *rule.verb >= kVerbPostSend && *rule.verb <= kVerbReqNotifyCq;
      if (data_path) checked |= 1u << (*rule.verb - kVerbPostSend);
      kinds |= data_path ? kAtDataPath : *rule.verb >= kVerbRdmaCm ? kAtCm : kAtVerb;
    } else if (rule.action == DeviceAction::kCmError) {
      kinds |= kAtCm;
    } else {
      kinds |= active.is_timed() ? kTimed : kAtCompletion;
    }
  }
  kinds_.store(kinds, std::memory_order_relaxed);
  checked_verbs_.store(checked, std::memory_order_relaxed);
}

bool DeviceFaults::Matches(ActiveRule* active, const FaultSubject& subject, Time now) const {
  const DeviceRule& rule = active->rule;
  if (!active->added) active->added = now;
  if (rule.count && active->hits >= *rule.count) return false;
  if (now < *active->added + rule.after) return false;
  if (rule.until && now >= *active->added + *rule.until) return false;
  if (active->nic && *active->nic != subject.nic) return false;
  if (rule.qpn && *rule.qpn != subject.qpn) return false;
  if (rule.nth_qp && *rule.nth_qp != subject.nth_qp) return false;
  return !rule.app || *rule.app == subject.app;
}

bool DeviceFaults::Selects(ActiveRule* active) {
  const DeviceRule& rule = active->rule;
  const uint64_t occurrence = ++active->selected;
  if (rule.nth && occurrence != *rule.nth) return false;
  if (rule.every && occurrence % *rule.every != 0) return false;
  return !rule.probability || Chance(&active->generator, *rule.probability);
}

void DeviceFaults::Hit(ActiveRule* active, const FaultSubject& subject, Time now) {
  ++active->hits;
  trace_.Record({.time_ns = now.ns(),
                 .qpn = subject.qpn,
                 .detail = active->id,
                 .port = static_cast<uint16_t>(subject.nic),
                 .kind = TraceKind::kDeviceFault,
                 .code = static_cast<uint8_t>(active->rule.action)});
}

CompletionFault DeviceFaults::OnCompletion(const FaultSubject& subject,
                                           const Completion& completion, Time now) {
  CompletionFault fault;
  const std::lock_guard guard(mutex_);
  for (ActiveRule& active : rules_) {
    const DeviceRule& rule = active.rule;
    if (active.is_timed() || rule.action == DeviceAction::kFail ||
        rule.action == DeviceAction::kCmError) {
      continue;
    }
    if (!Matches(&active, subject, now)) continue;
    if (rule.send_queue && *rule.send_queue != completion.is_send) continue;
    if (rule.opcodes && (*rule.opcodes & OpcodeBit(completion.opcode)) == 0) continue;
    if (rule.wr_id && *rule.wr_id != completion.wr_id) continue;
    if (!Selects(&active)) continue;
    switch (rule.action) {
      case DeviceAction::kComplete:
        if (rule.status) fault.status = rule.status;
        if (rule.vendor_err) fault.vendor_err = rule.vendor_err;
        fault.fails_qp |= rule.status.value_or(0) != 0 && !rule.keeps_qp;
        break;
      case DeviceAction::kLoseCompletion:
        fault.lost = true;
        break;
      case DeviceAction::kDuplicateCompletion:
        ++fault.copies;
        break;
      case DeviceAction::kDelayCompletion:
        fault.delay = fault.delay + *rule.duration;
        break;
      case DeviceAction::kCqOverrun:
        fault.overrun = true;
        break;
      case DeviceAction::kQpError:
        fault.qp_fatal = true;
        break;
      default:
        fault.events.push_back(*rule.event);
        break;
    }
    Hit(&active, subject, now);
  }
  return fault;
}

int DeviceFaults::OnVerb(uint16_t verb, const FaultSubject& subject, Time now) {
  const std::lock_guard guard(mutex_);
  for (ActiveRule& active : rules_) {
    if (active.rule.action != DeviceAction::kFail || *active.rule.verb != verb) continue;
    if (!Matches(&active, subject, now) || !Selects(&active)) continue;
    Hit(&active, subject, now);
    return active.rule.error;
  }
  return 0;
}

std::optional<int32_t> DeviceFaults::OnCm(uint8_t event, const FaultSubject& subject, Time now) {
  constexpr uint8_t kRejected = 8;
  constexpr uint32_t kByConsumer = 28;  // IBTA Vol 1 §12.6.7.2
  const std::lock_guard guard(mutex_);
  for (ActiveRule& active : rules_) {
    const DeviceRule& rule = active.rule;
    if (rule.action != DeviceAction::kCmError || *rule.event != event) continue;
    if (!Matches(&active, subject, now) || !Selects(&active)) continue;
    Hit(&active, subject, now);
    if (event == kRejected) return static_cast<int32_t>(rule.reason.value_or(kByConsumer));
    return -(rule.error != 0 ? rule.error : ETIMEDOUT);
  }
  return std::nullopt;
}

std::vector<DeviceFaults::Due> DeviceFaults::TakeDue(Time now) {
  std::vector<std::pair<Time, Due>> due;
  {
    const std::lock_guard guard(mutex_);
    for (ActiveRule& active : rules_) {
      if (!active.is_timed()) continue;
      if (!active.added) active.added = now;
      const Time start = *active.added + active.rule.after;
      if (!active.begun && now >= start) {
        active.begun = true;
        due.push_back({start, {active.rule, active.id, active.nic, false}});
      }
      if (!active.rule.is_undone() || !active.rule.duration) continue;
      if (active.begun && !active.ended && now >= start + *active.rule.duration) {
        active.ended = true;
        due.push_back({start + *active.rule.duration, {active.rule, active.id, active.nic, true}});
      }
    }
  }
  std::ranges::stable_sort(due, {}, &std::pair<Time, Due>::first);
  std::vector<Due> result;
  for (auto& [time, one] : due) result.push_back(std::move(one));
  return result;
}

Time DeviceFaults::next_due() const {
  Time next = Time::Never();
  const std::lock_guard guard(mutex_);
  for (const ActiveRule& active : rules_) {
    if (!active.is_timed()) continue;
    if (!active.added) return Time::Zero();
    const Time start = *active.added + active.rule.after;
    if (!active.begun) next = std::min(next, start);
    const bool comes_back = active.rule.is_undone() && active.rule.duration;
    if (active.begun && !active.ended && comes_back) {
      next = std::min(next, start + *active.rule.duration);
    }
  }
  return next;
}

bool DeviceFaults::Means(const Due& due, const FaultSubject& subject) {
  const DeviceRule& rule = due.rule;
  if (due.nic && *due.nic != subject.nic) return false;
  if (rule.qpn && *rule.qpn != subject.qpn) return false;
  if (rule.nth_qp && *rule.nth_qp != subject.nth_qp) return false;
  return !rule.app || *rule.app == subject.app;
}

void DeviceFaults::CountHit(uint32_t id, const FaultSubject& subject, Time now) {
  const std::lock_guard guard(mutex_);
  for (ActiveRule& active : rules_) {
    if (active.id == id) Hit(&active, subject, now);
  }
}

void DeviceFaults::ForEachHit(const std::function<void(const TraceEvent&)>& visit) const {
  const std::lock_guard guard(mutex_);
  trace_.ForEach(visit);
}

}  // namespace verbena::nic
