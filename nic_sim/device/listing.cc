// SPDX-License-Identifier: Apache-2.0
//
// What people and scripts see of a device: object lists, counters, the dump.
#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <vector>

#include "nic_sim/device/device.h"
#include "nic_sim/device/device_state.h"
#include "nic_sim/port/wire.h"
#include "nic_sim/stats/counters.h"
#include "nic_sim/trace/trace_json.h"

namespace verbena::nic {

using nlohmann::json;

namespace {

json Head(const DeviceContext& context) {
  return {{"device", context.nic().config().device},
          {"pid", context.client().pid},
          {"comm", context.client().comm}};
}

// There may be thousands of QPs, and the engine waits while they are looked at: copied first,
// made JSON without the lock.
struct QpSnapshot {
  std::shared_ptr<const json> head;  // of its context
  uint32_t qpn, dest_qpn, pdn;
  std::optional<uint32_t> srqn;
  transport::QpType type;
  transport::QpState state;
  Qp::Progress progress;
  uint32_t sq_posted, sq_fetched, rq_posted, rq_taken;
  transport::TransportCounters counters;

  QpSnapshot(const Qp& qp, std::shared_ptr<const json> head_of_context)
      : head(std::move(head_of_context)),
        qpn(qp.qpn().value()),
        dest_qpn(qp.attr().dest_qpn),
        pdn(qp.config().pd),
        type(qp.config().type),
        state(qp.state()),
        progress(qp.progress()),
        sq_posted(qp.sq().posted()),
        sq_fetched(qp.sq().fetched()),
        rq_posted(qp.rq().posted()),
        rq_taken(qp.rq().taken()) {
    if (qp.config().srq != nullptr) srqn = qp.config().srq->config().number;
    qp.AddCounters(&counters);
  }
};

json Describe(const SharedReceiveQueue& srq, const DeviceContext& context) {
  json qpns = json::array();
  for (const Qp* qp : context.qps()) {
    if (qp != nullptr && qp->config().srq == &srq) qpns.push_back(qp->qpn().value());
  }
  return {{"srqn", srq.config().number},
          {"type", srq.config().cq != nullptr ? "XRC" : "BASIC"},
          {"cqn", srq.config().cq != nullptr ? json(srq.config().cq->slot()) : json(nullptr)},
          {"pdn", srq.config().pd},
          {"max_wr", srq.config().max_wr},
          {"posted", srq.posted()},
          {"taken", srq.taken()},
          {"limit", srq.limit()},
          {"error", srq.in_error()},
          {"qpns", std::move(qpns)}};
}

json Describe(const CompletionQueue& cq) {
  return {{"cqn", cq.slot()},         {"cqe", cq.slots()},
          {"written", cq.producer()}, {"read", cq.consumer_hint()},
          {"armed", cq.arm_hint()},   {"error", cq.in_error()},
          {"qps", cq.qp_references},  {"comp_events", cq.comp_events}};
}

json Describe(const Region& region) {
  return {{"lkey", region.key},        {"rkey", region.key},  {"pdn", region.pd},
          {"address", region.address}, {"iova", region.iova}, {"length", region.length},
          {"access", region.access}};
}

json Describe(const QpSnapshot& qp) {
  json counters;
#define X(name, meaning) counters[#name] = qp.counters.name;
  VERBENA_TRANSPORT_COUNTERS(X)
#undef X
  json object = {{"qpn", qp.qpn},
                 {"type", transport::QpTypeName(qp.type)},
                 {"state", transport::QpStateName(qp.state)},
                 {"dest_qpn", qp.dest_qpn},
                 {"sq_psn", qp.progress.sq_psn.value()},
                 {"rq_psn", qp.progress.rq_psn.value()},
                 {"sq_posted", qp.sq_posted},
                 {"sq_fetched", qp.sq_fetched},
                 {"rq_posted", qp.rq_posted},
                 {"rq_taken", qp.rq_taken},
                 {"outstanding", qp.progress.outstanding},
                 {"una_psn", qp.progress.una_psn.value()},
                 {"msn", qp.progress.msn.value()},
                 {"pdn", qp.pdn},
                 {"srqn", qp.srqn ? json(*qp.srqn) : json(nullptr)},
                 {"counters", std::move(counters)}};
  object.update(*qp.head);
  return object;
}

// `rkey`: as it is now; the first one is the window's handle.
json DescribeWindow(uint32_t handle, const DeviceContext& context) {
  const Region* window = context.share().regions.FindWindow(handle);
  if (window == nullptr) return {{"rkey", handle}};
  const bool bound = window->parent != 0;
  return {{"rkey", window->key},
          {"type", window->kind == RegionKind::kWindow1 ? 1 : 2},
          {"pdn", window->pd},
          {"mr", bound ? json(window->parent) : json(nullptr)},
          {"qpn", window->qpn},
          {"address", window->iova},
          {"length", bound ? window->length : 0},
          {"access", bound ? window->access : 0}};
}

void Add(json& items, const DeviceContext& context, json object) {
  object.update(Head(context));
  items.push_back(std::move(object));
}

// QPs into `qps`, everything else into `items`.
void ListOf(std::string_view what, const DeviceContext& context, json& items,
            std::vector<QpSnapshot>& qps) {
  if (what == "context") {
    Add(items, context,
        {{"cookie", context.cookie()},
         {"uid", context.client().uid},
         {"backend", context.space().backend() == AddressSpace::Backend::kProcessVm ? "process_vm"
                                                                                    : "proc_mem"},
         {"ring_bytes", context.rings().allocated_bytes()}});
  } else if (what == "pd") {
    for (const auto& [handle, objects] : context.pds()) {
      Add(items, context, {{"pdn", handle}, {"objects", objects}});
    }
  } else if (what == "mr") {
    for (const uint32_t key : context.mrs()) {
      if (const Region* region = context.share().regions.Find(key)) {
        Add(items, context, Describe(*region));
      }
    }
  } else if (what == "cq") {
    for (const auto& cq : context.cqs()) {
      if (cq != nullptr) Add(items, context, Describe(*cq));
    }
  } else if (what == "qp") {
    const auto head = std::make_shared<const json>(Head(context));
    for (const Qp* qp : context.qps()) {
      if (qp != nullptr) qps.emplace_back(*qp, head);
    }
    context.ForEachXrcQp([&](const Qp& qp) { qps.emplace_back(qp, head); });
  } else if (what == "srq") {
    for (const auto& srq : context.srqs()) {
      if (srq != nullptr) Add(items, context, Describe(*srq, context));
    }
  } else if (what == "mw") {
    for (const auto& [handle, pd] : context.mws()) {
      Add(items, context, DescribeWindow(handle, context));
    }
  } else if (what == "dm") {
    context.ForEachDm([&](uint32_t handle, uint64_t bytes) {
      Add(items, context, {{"dm", handle}, {"length", bytes}});
    });
  } else if (what == "ah") {
    for (const auto& [handle, ah] : context.ahs()) {
      Add(items, context, {{"ah", handle}, {"pdn", ah.pd}, {"flow_label", ah.flow_label}});
    }
  } else if (what == "xrcd") {
    context.ForEachXrcd([&](uint32_t handle, const XrcDomain& domain, uint32_t objects) {
      Add(items, context,
          {{"xrcd", handle},
           {"inode", domain.file() ? json(domain.file()->inode) : json(nullptr)},
           {"opened", domain.handles},
           {"objects", objects}});
    });
  } else if (what == "flow") {
    context.ForEachFlow([&](uint32_t handle, uint32_t qpn) {
      Add(items, context, {{"flow", handle}, {"qpn", qpn}});
    });
  }
}

}  // namespace

namespace {

// How long a look waits for a shard.
constexpr std::chrono::milliseconds kPatience(200);
// How long it looks for a moment between two passes of the engine before the engine has to wait for
// it: on a machine whose CPUs are all taken that wait is long, and a lab page looks many times in a
// second.
constexpr std::chrono::milliseconds kCourtesy(20);
constexpr std::chrono::microseconds kGlance(50);

bool LockToLook(ShardLock& lock) {
  const auto end = std::chrono::steady_clock::now() + kCourtesy;
  while (!lock.TryLockForEngine()) {
    if (std::chrono::steady_clock::now() >= end) return lock.LockWithin(kPatience);
    std::this_thread::sleep_for(kGlance);
  }
  return true;
}

// Calls visit(tenant) for each user whose shard can be looked at; the uids of the others.
template <typename Visitor>
json ForEachTenant(const std::vector<std::shared_ptr<Tenant>>& tenants, Visitor visit) {
  json held_up = json::array();
  for (const std::shared_ptr<Tenant>& tenant : tenants) {
    if (!LockToLook(tenant->shard->lock())) {
      held_up.push_back(tenant->uid);
      continue;
    }
    const std::lock_guard guard(tenant->shard->lock(), std::adopt_lock);
    visit(*tenant);
  }
  return held_up;
}

}  // namespace

json Device::List(std::string_view what, std::optional<uid_t> user) const {
  static constexpr std::string_view kKinds[] = {"context", "pd", "mr", "cq",   "qp",  "srq",
                                                "mw",      "dm", "ah", "xrcd", "flow"};
  if (std::find(std::begin(kKinds), std::end(kKinds), what) == std::end(kKinds)) return nullptr;
  std::vector<std::shared_ptr<Tenant>> tenants = state_->Tenants();
  if (user) std::erase_if(tenants, [user](const auto& one) { return one->uid != UserOf(*user); });
  json items = json::array();
  std::vector<QpSnapshot> qps;
  json held_up = ForEachTenant(tenants, [&](const Tenant& tenant) {
    for (const auto& context : tenant.contexts) ListOf(what, *context, items, qps);
  });
  for (const QpSnapshot& qp : qps) items.push_back(Describe(qp));
  json list = {{"items", std::move(items)}};
  if (!held_up.empty()) list["held_up"] = std::move(held_up);
  return list;
}

json Device::Counters(std::string_view device) const {
  std::vector<transport::TransportCounters> sums(state_->nics.size());
  json held_up = ForEachTenant(state_->Tenants(), [&](const Tenant& tenant) {
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i].Add(tenant.shard->share(*state_->nics[i]).retired_counters);
    }
    for (const auto& context : tenant.contexts) {
      for (const Qp* qp : context->qps()) {
        if (qp != nullptr) qp->AddCounters(&sums[context->nic().config().index]);
      }
      context->ForEachXrcQp(
          [&](const Qp& qp) { qp.AddCounters(&sums[context->nic().config().index]); });
    }
  });
  json devices = json::object();
  for (const auto& nic : state_->nics) {
    if (!device.empty() && device != nic->config().device) continue;
    const PortCounters port = state_->engine->fabric().counters(nic->port());
    json counters;
#define X(name, meaning) counters[#name] = port.name;
    VERBENA_PORT_COUNTERS(X)
#undef X
    json drops;
    for (size_t i = 0; i < port.drops.size(); ++i) {
      drops[DropReasonName(static_cast<DropReason>(i))] = port.drops[i];
    }
    json hardware;
#define X(name, meaning) hardware[#name] = sums[nic->config().index].name;
    VERBENA_TRANSPORT_COUNTERS(X)
#undef X
    // As rxe and mlx5 call them.
    hardware["sent_pkts"] = port.port_xmit_packets;
    hardware["rcvd_pkts"] = port.port_rcv_packets;
    hardware["rx_icrc_encapsulated"] = port.drops[static_cast<size_t>(DropReason::bad_icrc)];
    json& device_counters = devices[nic->config().device];
    device_counters = {{"counters", std::move(counters)},
                       {"hw_counters", std::move(hardware)},
                       {"drops", std::move(drops)}};
    if (const auto wire = state_->engine->fabric().wire_status(nic->port())) {
      json& outside = device_counters["wire"];
#define X(name, meaning) outside[#name] = wire->counters.name;
      VERBENA_WIRE_COUNTERS(X)
#undef X
      outside["neighbours"] = wire->neighbours;
    }
  }
  if (!device.empty() && devices.empty()) return nullptr;
  json all = {{"devices", std::move(devices)}};
  if (!held_up.empty()) all["held_up"] = std::move(held_up);
  return all;
}

json Device::Dump() const {
  ShardCounters engine;
  DmaQueue::Counters dma;
  json shards = json::array();
  json held_up = ForEachTenant(state_->Tenants(), [&](const Tenant& tenant) {
    const ShardCounters& its = tenant.shard->counters();
    engine.Add(its);
    dma.Add(tenant.shard->dma().counters());
    shards.push_back({{"uid", tenant.uid},
                      {"contexts", tenant.contexts.size()},
                      {"passes", its.passes},
                      {"free_packets", tenant.shard->free_packets()}});
  });
  return {{"engine",
           {{"passes", engine.passes},
            {"sleeps", engine.sleeps},
            {"no_packet", engine.no_packet},
            {"deadline_shifts", engine.deadline_shifts},
            {"doorbells", engine.doorbells},
            {"free_packets", state_->engine->main_shard().free_packets()}}},
          {"dma",
           {{"placements", dma.placements},
            {"fetches", dma.fetches},
            {"bytes_placed", dma.bytes_placed},
            {"bytes_fetched", dma.bytes_fetched},
            {"system_calls", dma.system_calls},
            {"failures", dma.failures},
            {"slow_copies", dma.slow_copies}}},
          {"shards", std::move(shards)},
          {"held_up", std::move(held_up)},
          {"contexts", List("context")["items"]},
          {"cqs", List("cq")["items"]},
          {"qps", List("qp")["items"]},
          {"srqs", List("srq")["items"]},
          {"counters", Counters("")["devices"]}};
}

std::vector<TraceEvent> Device::TraceEvents() const {
  constexpr size_t kUsualRing = 32'768;  // of a shard: no growing under its lock
  std::vector<TraceEvent> events;
  const auto copy = [&](const TraceEvent& event) { events.push_back(event); };
  state_->engine->faults().ForEachHit(copy);
  ForEachTenant(state_->Tenants(), [&](const Tenant& tenant) {
    events.reserve(events.size() + kUsualRing);
    tenant.shard->trace().ForEach(copy);
  });
  state_->engine->fabric().ForEachHit(copy);
  return events;
}

json Device::Trace(std::optional<uint32_t> qpn, int64_t after_ns, size_t limit) const {
  limit = std::max<size_t>(limit, 1);
  std::vector<TraceEvent> events;
  // Of each ring the last `limit`: no more can be in the answer, and whoever writes the ring waits.
  const auto take_from = [&](const auto& visit_ring) {
    std::vector<TraceEvent> last;
    size_t taken = 0;
    visit_ring([&](const TraceEvent& event) {
      if (event.time_ns <= after_ns) return;
      const bool is_hit = event.kind == TraceKind::kFault;
      if (qpn && event.qpn != *qpn && !(is_hit && event.peer_qpn == *qpn)) return;
      if (taken < limit) {
        last.push_back(event);
      } else {
        last[taken % limit] = event;
      }
      ++taken;
    });
    if (taken > limit) {
      std::rotate(last.begin(), last.begin() + static_cast<ptrdiff_t>(taken % limit), last.end());
    }
    events.insert(events.end(), last.begin(), last.end());
  };
  // First, so that of what happened at the same time the cause comes before the effect.
  take_from([&](const auto& take) { state_->engine->faults().ForEachHit(take); });
  json held_up = ForEachTenant(state_->Tenants(), [&](const Tenant& tenant) {
    take_from([&](const auto& take) { tenant.shard->trace().ForEach(take); });
  });
  take_from([&](const auto& take) { state_->engine->fabric().ForEachHit(take); });
  std::ranges::stable_sort(events, {}, &TraceEvent::time_ns);
  if (events.size() > limit) events.erase(events.begin(), events.end() - static_cast<long>(limit));
  json list = json::array();
  for (const TraceEvent& event : events) {
    list.push_back(ToJson(event, event.port < state_->nics.size()
                                     ? state_->nics[event.port]->config().device
                                     : std::string()));
  }
  json trace = {{"events", std::move(list)}};
  if (!held_up.empty()) trace["held_up"] = std::move(held_up);
  return trace;
}

}  // namespace verbena::nic
