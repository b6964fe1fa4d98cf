// SPDX-License-Identifier: Apache-2.0
//
// Flow rules of raw packet QPs, and the objects that count what they take.
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "provider/provider.h"

namespace verbena::provider {
namespace {

constexpr uint32_t kMaxCounterIndex = 32;

struct Counters {
  ibv_counters base;
  uint32_t handle;
  uint32_t flows;   // rules that count here
  uint32_t points;  // one more than the largest index
  // 0: nothing is attached there, else 1 + enum ibv_counter_description.
  uint8_t what[kMaxCounterIndex];
};

struct Flow {
  ibv_flow base;
  Counters* counters;  // or NULL
};

// Where a spec has its filter; its mask follows.
struct Layout {
  size_t at;
  size_t bytes;  // of the filter; 0: the type is not known
};

template <typename Spec>
constexpr Layout LayoutOf() {
  return {offsetof(Spec, val), sizeof(Spec::val)};
}

Layout LayoutOf(uint32_t type) {
  switch (type) {
    case IBV_FLOW_SPEC_ETH:
      return LayoutOf<ibv_flow_spec_eth>();
    case IBV_FLOW_SPEC_IPV4:
      return LayoutOf<ibv_flow_spec_ipv4>();
    case IBV_FLOW_SPEC_IPV4_EXT:
      return LayoutOf<ibv_flow_spec_ipv4_ext>();
    case IBV_FLOW_SPEC_IPV6:
      return LayoutOf<ibv_flow_spec_ipv6>();
    case IBV_FLOW_SPEC_TCP:
    case IBV_FLOW_SPEC_UDP:
      return LayoutOf<ibv_flow_spec_tcp_udp>();
    default:
      return {0, 0};
  }
}

// Actions change the request as a whole. 0, or an errno; ENOENT: it is no action.
int TakeAction(uint32_t type, const ibv_flow_spec& spec, abi::CreateFlowRequest* request,
               Counters** counters) {
  switch (type) {
    case IBV_FLOW_SPEC_ACTION_TAG:
      if (spec.hdr.size != sizeof(spec.flow_tag)) return EINVAL;
      request->tag = spec.flow_tag.tag_id;
      return 0;
    case IBV_FLOW_SPEC_ACTION_DROP:
      if (spec.hdr.size != sizeof(spec.drop)) return EINVAL;
      request->action = abi::kFlowDrop;
      return 0;
    case IBV_FLOW_SPEC_ACTION_COUNT:
      if (spec.hdr.size != sizeof(spec.flow_count) || spec.flow_count.counters == nullptr ||
          *counters != nullptr) {
        return EINVAL;
      }
      *counters = Downcast<Counters>(spec.flow_count.counters);
      request->counters = (*counters)->handle;
      return 0;
    default:
      return ENOENT;
  }
}

int TakeSpec(const ibv_flow_spec& spec, abi::CreateFlowRequest* request, Counters** counters) {
  uint32_t type;
  memcpy(&type, &spec, sizeof(type));  // any number may stand there
  const int error = TakeAction(type, spec, request, counters);
  if (error != ENOENT) return error;
  const Layout layout = LayoutOf(type);
  const size_t end = layout.at + 2 * layout.bytes;
  // The structures end on a multiple of 4; sizes of what the device does not look at
  // are not looked at either.
  if (end != 0 && spec.hdr.size != end && spec.hdr.size != (end + 3) / 4 * 4) return EINVAL;
  if (request->spec_count == abi::kMaxFlowSpecs) return EINVAL;
  abi::FlowSpec& to = request->specs[request->spec_count++];
  to.type = type;
  const uint8_t* from = reinterpret_cast<const uint8_t*>(&spec) + layout.at;
  static_assert(sizeof(ibv_flow_ipv6_filter) <= sizeof(to.value));
  memcpy(to.value, from, layout.bytes);
  memcpy(to.mask, from + layout.bytes, layout.bytes);
  return 0;
}

}  // namespace

ibv_flow* CreateFlow(ibv_qp* qp, ibv_flow_attr* attr) {
  abi::CreateFlowRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdCreateFlow;
  request.qp = qp->handle;
  request.type = attr->type;
  request.flags = attr->flags;
  request.priority = attr->priority;
  request.port = attr->port;
  request.counters = abi::kNoHandle;
  Counters* counters = nullptr;
  int error = attr->comp_mask != 0 ? EINVAL : 0;
  const uint8_t* at = reinterpret_cast<const uint8_t*>(attr + 1);
  for (int i = 0; error == 0 && i < attr->num_of_specs; ++i) {
    const ibv_flow_spec* spec = reinterpret_cast<const ibv_flow_spec*>(at);
    if (spec->hdr.size < sizeof(spec->hdr)) {
      error = EINVAL;
      break;
    }
    error = TakeSpec(*spec, &request, &counters);
    at += spec->hdr.size;
  }
  Flow* flow = error == 0 ? static_cast<Flow*>(calloc(1, sizeof(Flow))) : nullptr;
  if (error == 0 && flow == nullptr) error = ENOMEM;
  if (error == 0) error = ToContext(qp->context)->channel.Execute(&request, &reply);
  if (error != 0) {
    free(flow);
    errno = error;
    return nullptr;
  }
  flow->base.context = qp->context;
  flow->base.handle = reply.handle;
  flow->counters = counters;
  if (counters != nullptr) __atomic_add_fetch(&counters->flows, 1, __ATOMIC_RELAXED);
  return &flow->base;
}

namespace {

int Destroy(ibv_context* ibv, uint16_t op, uint32_t handle) {
  Context* context = ToContext(ibv);
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = op;
  request.handle = handle;
  return DestroyResult(context, context->channel.Execute(&request, &reply));
}

}  // namespace

int DestroyFlow(ibv_flow* ibv) {
  Flow* flow = Downcast<Flow>(ibv);
  const int error = Destroy(ibv->context, abi::kCmdDestroyFlow, ibv->handle);
  if (error != 0) return error;
  if (flow->counters != nullptr) __atomic_sub_fetch(&flow->counters->flows, 1, __ATOMIC_RELAXED);
  free(flow);
  return 0;
}

ibv_counters* CreateCounters(ibv_context* ibv, ibv_counters_init_attr* attr) {
  if (attr->comp_mask != 0) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  Counters* counters = static_cast<Counters*>(calloc(1, sizeof(Counters)));
  if (counters == nullptr) return nullptr;
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdCreateCounters;
  const int error = ToContext(ibv)->channel.Execute(&request, &reply);
  if (error != 0) {
    free(counters);
    errno = error;
    return nullptr;
  }
  counters->base.context = ibv;
  counters->handle = reply.handle;
  return &counters->base;
}

int DestroyCounters(ibv_counters* ibv) {
  Counters* counters = Downcast<Counters>(ibv);
  const int error = Destroy(ibv->context, abi::kCmdDestroyCounters, counters->handle);
  if (error == 0) free(counters);
  return error;
}

// Only before a rule counts there, as the manual page has it for a NULL flow.
int AttachCountersPointFlow(ibv_counters* ibv, ibv_counter_attach_attr* attr, ibv_flow* flow) {
  Counters* counters = Downcast<Counters>(ibv);
  if (flow != nullptr || attr->comp_mask != 0) return EOPNOTSUPP;
  uint32_t what;
  memcpy(&what, &attr->counter_desc, sizeof(what));
  if (what > IBV_COUNTER_BYTES) return EOPNOTSUPP;
  if (attr->index >= kMaxCounterIndex) return EINVAL;
  if (__atomic_load_n(&counters->flows, __ATOMIC_RELAXED) != 0) return EBUSY;
  counters->what[attr->index] = static_cast<uint8_t>(1 + what);
  if (attr->index >= counters->points) counters->points = attr->index + 1;
  return 0;
}

int ReadCounters(ibv_counters* ibv, uint64_t* values, uint32_t count, uint32_t flags) {
  const Counters* counters = Downcast<Counters>(ibv);
  if ((flags & ~uint32_t{IBV_READ_COUNTERS_ATTR_PREFER_CACHED}) != 0) return EINVAL;
  if (count < counters->points) return EINVAL;
  abi::HandleRequest request = {};
  abi::ReadCountersReply reply = {};
  request.header.op = abi::kCmdReadCounters;
  request.handle = counters->handle;
  const int error = ToContext(ibv->context)->channel.Execute(&request, &reply);
  if (error != 0) return error;
  for (uint32_t i = 0; i < counters->points; ++i) {
    if (counters->what[i] == 0) continue;
    values[i] = counters->what[i] == 1 + IBV_COUNTER_PACKETS ? reply.packets : reply.bytes;
  }
  return 0;
}

}  // namespace verbena::provider
