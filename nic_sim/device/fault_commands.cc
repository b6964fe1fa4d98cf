// SPDX-License-Identifier: Apache-2.0
//
// Fault rules of the device: what they do to contexts, and when.
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>

#include "nic_sim/device/device_context.h"
#include "nic_sim/device/device_state.h"
#include "nic_sim/faults/rule_text.h"

namespace verbena::nic {

using transport::AsyncEventType;
using transport::Time;

namespace {

// The clock of the engine.
Time SteadyNow() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return Time::FromNanoseconds(int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec);
}

}  // namespace

// --- One context

FaultSubject DeviceContext::fault_subject() const {
  return {.nic = nic_.config().index, .app = client_.comm, .qpn = 0, .nth_qp = 0};
}

int DeviceContext::InjectedError(uint16_t op) {
  if (!shard_.faults().wants(DeviceFaults::kAtVerb)) [[likely]]
    return 0;
  shard_.UpdateNow();
  return shard_.faults().OnVerb(op, fault_subject(), shard_.now());
}

int DeviceContext::CheckFault(const abi::CheckFaultRequest& request) {
  static_assert(kVerbReqNotifyCq - kVerbPostSend == abi::kCheckReqNotifyCq);
  if (request.verb >= abi::kCheckVerbs) return 0;
  FaultSubject subject = fault_subject();
  if (request.verb == abi::kCheckPostSend || request.verb == abi::kCheckPostRecv) {
    const Qp* qp = FindQp(request.handle);
    if (qp != nullptr) subject = qp->fault_subject();
  }
  shard_.UpdateNow();
  return shard_.faults().OnVerb(static_cast<uint16_t>(kVerbPostSend + request.verb), subject,
                                shard_.now());
}

void DeviceContext::OnInjectedEvent(Qp& qp, CompletionQueue* cq, uint8_t number) {
  const AsyncEventType type{number};
  SharedReceiveQueue* const srq = qp.config().srq;
  switch (type) {
    case AsyncEventType::kCqErr:
      if (cq == nullptr) cq = qp.config().send_cq;
      if (cq != nullptr && WriteEvent(cq->user_handle(), type)) ++cq->async_events;
      break;
    case AsyncEventType::kSrqErr:
    case AsyncEventType::kSrqLimitReached:
      if (srq != nullptr) OnSrqEvent(*srq, type);
      break;
    case AsyncEventType::kDeviceFatal:
    case AsyncEventType::kPortActive:
    case AsyncEventType::kPortErr:
    case AsyncEventType::kLidChange:
    case AsyncEventType::kPkeyChange:
    case AsyncEventType::kSmChange:
    case AsyncEventType::kClientReregister:
    case AsyncEventType::kGidChange:
      WriteEvent(1, type);  // the port
      break;
    default:
      OnQpEvent(qp, type);
      break;
  }
}

std::vector<FaultSubject> DeviceContext::ApplyFault(const DeviceFaults::Due& due) {
  std::vector<FaultSubject> hit;
  const auto type = AsyncEventType{due.rule.event.value_or(0)};
  const bool of_port =
      due.rule.action == DeviceAction::kEvent &&
      ((type >= AsyncEventType::kDeviceFatal && type < AsyncEventType::kSrqErr) ||
       type == AsyncEventType::kClientReregister || type == AsyncEventType::kGidChange);
  if (of_port) {
    if (!DeviceFaults::Means(due, fault_subject())) return hit;
    WriteEvent(1, type);
    return {fault_subject()};
  }
  const auto apply = [&](Qp& qp) {
    if (!DeviceFaults::Means(due, qp.fault_subject())) return;
    if (due.rule.action == DeviceAction::kQpError) {
      qp.FailByFault();
    } else {
      OnInjectedEvent(qp, nullptr, static_cast<uint8_t>(type));
    }
    hit.push_back(qp.fault_subject());
  };
  for (Qp* qp : qps_) {
    if (qp != nullptr) apply(*qp);
  }
  for (const auto& [handle, entry] : xrc_qps_) {
    if (entry.target->openers.front() == entry.opener.get()) apply(*entry.target->qp);
  }
  return hit;
}

void DeviceContext::ReportGidChange(const Nic& nic) {
  if (&nic == &nic_) WriteEvent(1, AsyncEventType::kGidChange);
}

// --- The device

uint32_t Device::AddRule(std::string_view text, std::string* error, std::string* field) {
  if (!IsDeviceAction(ActionWord(text))) return fabric().AddRule(text, error, field);
  DeviceRule rule;
  if (!ParseDeviceRule(text, &rule, error, field)) return 0;
  std::optional<uint32_t> nic;
  for (const auto& one : state_->nics) {
    if (rule.device == one->config().device) nic = one->config().index;
  }
  if (rule.device && !nic) {
    *error = "bad value in 'dev=" + *rule.device + "': there is no such device";
    if (field != nullptr) *field = "dev";
    return 0;
  }
  const uint32_t id = fabric().TakeRuleId();
  if (!state_->engine->faults().Add(rule, id, nic)) {
    *error = "there are " + std::to_string(kMaxDeviceRules) + " rules already";
    return 0;
  }
  UpdateCheckedVerbs();
  RunTimedFaults();
  return id;
}

nlohmann::json Device::ListRules() const {
  nlohmann::json rows = state_->engine->fabric().ListRules();
  state_->engine->faults().List(&rows);
  std::sort(rows.begin(), rows.end(), [](const nlohmann::json& a, const nlohmann::json& b) {
    return a["id"].get<uint32_t>() < b["id"].get<uint32_t>();
  });
  return rows;
}

uint32_t Device::ClearRules(uint32_t id) {
  std::vector<DeviceRule> ended;
  const uint32_t removed = fabric().ClearRules(id) + state_->engine->faults().Clear(id, &ended);
  UpdateCheckedVerbs();
  // What a rule begins just now is done before it is undone.
  std::unique_lock order(state_->timed_mutex, std::defer_lock);
  if (!ended.empty()) order.lock();
  for (const DeviceRule& rule : ended) {
    for (const auto& nic : state_->nics) {
      if (rule.device != nic->config().device) continue;
      if (rule.action == DeviceAction::kRemove) SetPresent(nic->config().index, true);
      if (rule.action == DeviceAction::kGidChange) ChangeGid(rule, nic->config().index, true);
    }
  }
  if (order.owns_lock()) order.unlock();
  Kick();  // packets that were held back are on their way
  return removed;
}

void Device::UpdateCheckedVerbs() {
  const uint32_t verbs = state_->engine->faults().checked_verbs();
  if (verbs == state_->checked_verbs.exchange(verbs)) return;
  for (const std::shared_ptr<Tenant>& tenant : state_->Tenants()) {
    const std::lock_guard guard(tenant->shard->lock());
    for (const auto& context : tenant->contexts) context->SetCheckedVerbs(verbs);
  }
}

void Device::SetPresent(uint32_t nic, bool present) {
  const uint64_t bit = uint64_t{1} << nic;
  const uint64_t before = present ? state_->absent.fetch_and(~bit) : state_->absent.fetch_or(bit);
  if (((before & bit) == 0) == present) return;
  for (const std::shared_ptr<Tenant>& tenant : state_->Tenants()) {
    const std::lock_guard guard(tenant->shard->lock());
    for (const auto& context : tenant->contexts) {
      if (!present && context->nic().config().index == nic) context->Remove();
    }
  }
  Announce(nic, present ? NicChange::kReturned : NicChange::kRemoved);
}

void Device::ChangeGid(const DeviceRule& rule, uint32_t index, bool ends) {
  Nic& nic = *state_->nics[index];
  const std::vector<transport::Gid>& configured = nic.config().addresses;
  const size_t entry = *rule.gid_index;
  transport::Gid gid = rule.gid.value_or(transport::Gid());
  if (ends) gid = entry <= configured.size() ? configured[entry - 1] : transport::Gid();
  nic.SetGid(entry, gid);
  fabric().SetGids(nic.port(), nic.gids());
  Announce(index, NicChange::kGids);
  for (const std::shared_ptr<Tenant>& tenant : state_->Tenants()) {
    const std::lock_guard guard(tenant->shard->lock());
    tenant->shard->UpdateNow();
    for (const auto& context : tenant->contexts) context->ReportGidChange(nic);
  }
}

void Device::Announce(uint32_t nic, NicChange change) {
  const std::lock_guard guard(state_->watcher_mutex);
  if (state_->watcher) state_->watcher(nic, change);
}

bool Device::present(size_t nic) const { return state_->present(nic); }

void Device::WatchNics(std::function<void(uint32_t nic, NicChange change)> watcher) {
  const std::lock_guard guard(state_->watcher_mutex);
  state_->watcher = std::move(watcher);
}

void Device::RunTimedFaults(std::optional<Time> at) {
  DeviceFaults& faults = state_->engine->faults();
  if (!faults.wants(DeviceFaults::kTimed)) [[likely]]
    return;
  // One at a time: what begins and ends stays in order.
  const std::lock_guard order(state_->timed_mutex);
  const Time now = at ? *at : state_->Now();
  for (const DeviceFaults::Due& due : faults.TakeDue(now)) {
    std::vector<FaultSubject> hit;
    switch (due.rule.action) {
      case DeviceAction::kRemove:
        SetPresent(*due.nic, due.ends);
        if (!due.ends) hit.push_back({.nic = *due.nic, .app = {}, .qpn = 0, .nth_qp = 0});
        break;
      case DeviceAction::kGidChange:
        ChangeGid(due.rule, *due.nic, due.ends);
        if (!due.ends) hit.push_back({.nic = *due.nic, .app = {}, .qpn = 0, .nth_qp = 0});
        break;
      case DeviceAction::kAddrChange:
        Announce(*due.nic, NicChange::kAddress);
        hit.push_back({.nic = *due.nic, .app = {}, .qpn = 0, .nth_qp = 0});
        break;
      default:
        for (const std::shared_ptr<Tenant>& tenant : state_->Tenants()) {
          const std::lock_guard guard(tenant->shard->lock());
          tenant->shard->UpdateNow();
          for (const auto& context : tenant->contexts) {
            for (const FaultSubject& subject : context->ApplyFault(due)) hit.push_back(subject);
          }
        }
        break;
    }
    for (const FaultSubject& subject : hit) faults.CountHit(due.id, subject, now);
  }
  if (!at && !faults.next_due().IsNever()) state_->fault_timer.Start(this);
}

Time Device::State::Now() {
  Shard& shard = engine->main_shard();
  const std::lock_guard guard(shard.lock());
  shard.UpdateNow();
  return shard.now();
}

FaultTimer::~FaultTimer() {
  {
    const std::lock_guard guard(mutex_);
    stop_ = true;
  }
  news_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void FaultTimer::Start(Device* device) {
  const std::lock_guard guard(mutex_);
  looks_again_ = true;
  news_.notify_all();
  if (!thread_.joinable()) thread_ = std::thread(&FaultTimer::Run, this, device);
}

void FaultTimer::Run(Device* device) {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (!looks_again_) {
      news_.wait(lock);
      continue;
    }
    looks_again_ = false;
    lock.unlock();
    device->RunTimedFaults();
    lock.lock();
    if (!looks_again_ || stop_) continue;
    lock.unlock();
    const Time due = device->faults().next_due();
    const int64_t left_ns = due.IsNever() ? INT64_MAX : due.ns() - SteadyNow().ns();
    lock.lock();
    constexpr int64_t kLongest = 1'000'000'000;
    if (left_ns > 0) news_.wait_for(lock, std::chrono::nanoseconds(std::min(left_ns, kLongest)));
  }
}

}  // namespace verbena::nic
