// SPDX-License-Identifier: Apache-2.0
//
// What people and scripts see of a device: object lists, counters, the dump.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "nic_sim/device/device.h"
#include "nic_sim/device/device_state.h"
#include "nic_sim/stats/counters.h"

namespace verbena::nic {

using nlohmann::json;

namespace {

json Head(const DeviceContext& context) {
  return {{"device", context.nic().config().device},
          {"pid", context.client().pid},
          {"comm", context.client().comm}};
}

json Describe(const Qp& qp) {
  const Qp::Progress progress = qp.progress();
  return {{"qpn", qp.qpn().value()},
          {"type", transport::QpTypeName(qp.config().type)},
          {"state", transport::QpStateName(qp.state())},
          {"dest_qpn", qp.attr().dest_qpn},
          {"sq_psn", progress.sq_psn.value()},
          {"rq_psn", progress.rq_psn.value()},
          {"sq_posted", qp.sq().posted()},
          {"sq_fetched", qp.sq().fetched()},
          {"rq_posted", qp.rq().posted()},
          {"rq_taken", qp.rq().taken()},
          {"outstanding", progress.outstanding},
          {"una_psn", progress.una_psn.value()},
          {"msn", progress.msn.value()}};
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

void Add(json& items, const DeviceContext& context, json object) {
  object.update(Head(context));
  items.push_back(std::move(object));
}

void ListOf(std::string_view what, const DeviceContext& context, json& items) {
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
      if (const Region* region = context.nic().regions().Find(key)) {
        Add(items, context, Describe(*region));
      }
    }
  } else if (what == "cq") {
    for (const auto& cq : context.cqs()) {
      if (cq != nullptr) Add(items, context, Describe(*cq));
    }
  } else if (what == "qp") {
    for (const Qp* qp : context.qps()) {
      if (qp != nullptr) Add(items, context, Describe(*qp));
    }
  }
}

}  // namespace

json Device::List(std::string_view what) const {
  static constexpr std::string_view kKinds[] = {"context", "pd", "mr", "cq", "qp"};
  if (std::find(std::begin(kKinds), std::end(kKinds), what) == std::end(kKinds)) return nullptr;
  json items = json::array();
  for (const auto& context : state_->contexts) ListOf(what, *context, items);
  return {{"items", std::move(items)}};
}

json Device::Counters(std::string_view device) const {
  json devices = json::object();
  for (const auto& nic : state_->nics) {
    if (!device.empty() && device != nic->config().device) continue;
    const PortCounters& port = state_->engine->fabric().counters(nic->port());
    json counters;
#define X(name, meaning) counters[#name] = port.name;
    VERBENA_PORT_COUNTERS(X)
#undef X
    json drops;
    for (size_t i = 0; i < port.drops.size(); ++i) {
      drops[DropReasonName(static_cast<DropReason>(i))] = port.drops[i];
    }
    transport::TransportCounters sum = nic->retired_counters;
    nic->qps().ForEach([&sum](const Qp& qp) { qp.AddCounters(&sum); });
    json hardware;
#define X(name, meaning) hardware[#name] = sum.name;
    VERBENA_TRANSPORT_COUNTERS(X)
#undef X
    devices[nic->config().device] = {{"counters", std::move(counters)},
                                     {"hw_counters", std::move(hardware)},
                                     {"drops", std::move(drops)}};
  }
  if (!device.empty() && devices.empty()) return nullptr;
  return {{"devices", std::move(devices)}};
}

json Device::Dump() const {
  const EngineCounters& engine = state_->engine->counters();
  const DmaQueue::Counters& dma = state_->engine->dma().counters();
  return {{"engine",
           {{"passes", engine.passes},
            {"sleeps", engine.sleeps},
            {"no_packet", engine.no_packet},
            {"deadline_shifts", engine.deadline_shifts},
            {"doorbells", engine.doorbells},
            {"free_packets", state_->engine->free_packets()}}},
          {"dma",
           {{"placements", dma.placements},
            {"fetches", dma.fetches},
            {"bytes_placed", dma.bytes_placed},
            {"bytes_fetched", dma.bytes_fetched},
            {"system_calls", dma.system_calls},
            {"failures", dma.failures},
            {"slow_copies", dma.slow_copies}}},
          {"contexts", List("context")["items"]},
          {"cqs", List("cq")["items"]},
          {"qps", List("qp")["items"]},
          {"counters", Counters("")["devices"]}};
}

}  // namespace verbena::nic
