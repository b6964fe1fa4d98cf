// SPDX-License-Identifier: Apache-2.0
//
// Flow rules of raw packet QPs and their counters.
#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "nic_sim/device/device_context.h"

namespace verbena::nic {

using transport::QpType;

namespace {

// enum ibv_flow_flags. What the first bit once meant was never much used.
constexpr uint32_t kAllowLoopBack = 1 << 0;
constexpr uint32_t kDontTrap = 1 << 1;
constexpr uint32_t kEgress = 1 << 2;
constexpr uint32_t kMaxTag = 0xffffff;

int Check(const abi::CreateFlowRequest& request) {
  if (request.type > static_cast<uint32_t>(FlowType::kSniffer)) return EINVAL;
  if (request.port != 1 || request.spec_count > abi::kMaxFlowSpecs) return EINVAL;
  if (request.action > abi::kFlowDrop || request.tag > kMaxTag) return EINVAL;
  if ((request.flags & ~(kAllowLoopBack | kDontTrap | kEgress)) != 0) return EINVAL;
  if ((request.flags & kEgress) != 0) return EOPNOTSUPP;
  const bool is_normal = request.type == static_cast<uint32_t>(FlowType::kNormal);
  // Defaults and sniffers are what they are.
  if (!is_normal && (request.spec_count != 0 || (request.flags & kDontTrap) != 0)) return EINVAL;
  return CheckFlowSpecs({request.specs, request.spec_count});
}

}  // namespace

int DeviceContext::CreateFlow(const abi::CreateFlowRequest& request, uint32_t* handle) {
  Qp* qp = FindQp(request.qp);
  const auto rss = rss_.find(request.qp);
  if (rss == rss_.end() && (qp == nullptr || qp->config().type != QpType::kRawPacket)) {
    return EINVAL;
  }
  if (const int error = Check(request); error != 0) return error;
  const auto counters = counters_.find(request.counters);
  if (request.counters != abi::kNoHandle && counters == counters_.end()) return EINVAL;
  FlowRule rule{.type = static_cast<FlowType>(request.type),
                .priority = request.priority,
                .dont_trap = (request.flags & kDontTrap) != 0,
                .drop = request.action == abi::kFlowDrop,
                .tag = request.tag,
                .shard = shard_.id(),
                .qpn = qp != nullptr ? qp->qpn().value() : 0,
                .rss = qp != nullptr ? nullptr : rss->second.table,
                .specs = {request.specs, request.specs + request.spec_count},
                .counters = nullptr};
  if (counters != counters_.end()) rule.counters = counters->second.counts;
  const uint32_t id = shard_.fabric().AddFlow(nic_.port(), rule);
  if (id == 0) return ENOMEM;
  if (counters != counters_.end()) ++counters->second.flows;
  flows_.emplace(id, Flow{.qp = qp, .rss = request.qp, .counters = request.counters});
  ++(qp != nullptr ? qp->flows : rss->second.flows);
  *handle = id;
  return 0;
}

int DeviceContext::DestroyFlow(uint32_t handle) {
  const auto found = flows_.find(handle);
  if (found == flows_.end()) return EINVAL;
  const Flow flow = found->second;
  flows_.erase(found);
  shard_.fabric().RemoveFlow(nic_.port(), handle);
  --(flow.qp != nullptr ? flow.qp->flows : rss_.at(flow.rss).flows);
  const auto counters = counters_.find(flow.counters);
  if (counters != counters_.end()) --counters->second.flows;
  return 0;
}

void DeviceContext::DestroyFlowsOf(const Qp& qp) {
  while (qp.flows != 0) {
    for (const auto& [handle, flow] : flows_) {
      if (flow.qp != &qp) continue;
      DestroyFlow(handle);
      break;
    }
  }
}

int DeviceContext::CreateRss(const abi::CreateRssRequest& request, uint32_t* handle) {
  if (request.log_size > abi::kMaxLogRssSize || (request.fields & ~abi::kRssFields) != 0) {
    return EINVAL;
  }
  // One kind of address and one kind of port.
  const bool both_networks = (request.fields & 0x3) != 0 && (request.fields & 0xc) != 0;
  const bool both_protocols = (request.fields & 0x30) != 0 && (request.fields & 0xc0) != 0;
  if (both_networks || both_protocols) return EINVAL;
  if (rss_.size() >= Fabric::kMaxFlows) return ENOMEM;
  auto table = std::make_shared<RssTable>();
  table->fields = request.fields;
  std::copy(std::begin(request.key), std::end(request.key), table->key.begin());
  for (uint32_t i = 0; i < 1u << request.log_size; ++i) {
    const Qp* qp = FindQp(request.qps[i]);
    if (qp == nullptr || qp->config().type != QpType::kRawPacket) return EINVAL;
    table->qpns.push_back(qp->qpn().value());
  }
  *handle = next_rss_++;
  rss_.emplace(*handle, Rss{.table = std::move(table)});
  return 0;
}

int DeviceContext::DestroyRss(uint32_t handle) {
  const auto found = rss_.find(handle);
  if (found == rss_.end()) return EINVAL;
  if (found->second.flows != 0) return EBUSY;
  rss_.erase(found);
  return 0;
}

int DeviceContext::LimitQpRate(const abi::LimitQpRateRequest& request) {
  Qp* qp = FindQp(request.qp);
  if (qp == nullptr || request.kbps > abi::kMaxRateKbps) return EINVAL;
  return qp->LimitRate(request.kbps, request.max_burst_bytes);
}

int DeviceContext::CreateCounters(uint32_t* handle) {
  if (counters_.size() >= Fabric::kMaxFlows) return ENOMEM;
  *handle = next_counters_++;
  counters_.emplace(*handle, CountersObject{.counts = std::make_shared<FlowCounters>()});
  return 0;
}

int DeviceContext::DestroyCounters(uint32_t handle) {
  const auto found = counters_.find(handle);
  if (found == counters_.end()) return EINVAL;
  if (found->second.flows != 0) return EBUSY;
  counters_.erase(found);
  return 0;
}

int DeviceContext::ReadCounters(uint32_t handle, abi::ReadCountersReply* reply) {
  const auto found = counters_.find(handle);
  if (found == counters_.end()) return EINVAL;
  const FlowCounters counts = shard_.fabric().ReadFlowCounters(*found->second.counts);
  reply->packets = counts.packets;
  reply->bytes = counts.bytes;
  return 0;
}

}  // namespace verbena::nic
