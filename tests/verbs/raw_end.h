// SPDX-License-Identifier: Apache-2.0
//
// A raw packet QP with what it needs, frames and flow rules, for tests.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {

using Bytes = std::vector<uint8_t>;
using Mac = std::array<uint8_t, 6>;

struct FlowDeleter {
  void operator()(ibv_flow* flow) const { ibv_destroy_flow(flow); }
};
using Flow = std::unique_ptr<ibv_flow, FlowDeleter>;

inline constexpr uint32_t kSlot = 4608;

// A raw packet QP on a NIC with 32 receives posted.
class RawEnd {
 public:
  explicit RawEnd(const std::string& device = "verbena0", int receives = 32)
      : context_(OpenDevice(device)),
        pd_(ibv_alloc_pd(context_.get())),
        memory_(pd_.get(), kSlot * 34) {
    ibv_cq_init_attr_ex cq = {};
    cq.cqe = 128;
    cq.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_FLOW_TAG | IBV_WC_EX_WITH_QP_NUM;
    cq_.reset(ibv_cq_ex_to_cq(ibv_create_cq_ex(context_.get(), &cq)));
    Require(cq_ != nullptr, "ibv_create_cq_ex");
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = cq_.get();
    init.qp_type = IBV_QPT_RAW_PACKET;
    init.cap = {.max_send_wr = 128,
                .max_recv_wr = 64,
                .max_send_sge = 4,
                .max_recv_sge = 4,
                .max_inline_data = 128};
    qp_.reset(ibv_create_qp(pd_.get(), &init));
    Require(qp_ != nullptr, "ibv_create_qp RAW_PACKET");
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    Require(ibv_modify_qp(qp_.get(), &attr, IBV_QP_STATE | IBV_QP_PORT) == 0, "INIT");
    Require(ToState(IBV_QPS_RTR) == 0, "RTR");
    Require(ToState(IBV_QPS_RTS) == 0, "RTS");
    for (int i = 0; i < receives; ++i) Receive(static_cast<uint64_t>(i));
  }

  int ToState(ibv_qp_state state) {
    ibv_qp_attr attr = {};
    attr.qp_state = state;
    return ibv_modify_qp(qp_.get(), &attr, IBV_QP_STATE);
  }
  ibv_qp_state State() {
    ibv_qp_attr attr = {};
    ibv_qp_init_attr init = {};
    Require(ibv_query_qp(qp_.get(), &attr, IBV_QP_STATE, &init) == 0, "query_qp");
    return attr.qp_state;
  }
  // As the link-local GID has it.
  Mac mac() {
    ibv_gid gid = {};
    Require(ibv_query_gid(context_.get(), 1, 0, &gid) == 0, "query_gid");
    const uint8_t* g = gid.raw;
    return {static_cast<uint8_t>(g[8] ^ 2), g[9], g[10], g[13], g[14], g[15]};
  }
  void Receive(uint64_t slot, uint32_t bytes = kSlot) {
    ibv_sge sge = memory_.sge(slot * kSlot, bytes);
    ibv_recv_wr wr = {};
    wr.wr_id = slot;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    Require(ibv_post_recv(qp_.get(), &wr, &bad) == 0, "post_recv");
  }
  int Post(const Bytes& frame, ibv_wr_opcode opcode = IBV_WR_SEND, unsigned flags = 0) {
    std::memcpy(memory_.data() + 33 * kSlot, frame.data(), frame.size());
    ibv_sge sge = memory_.sge(33 * kSlot, frame.size());
    ibv_send_wr wr = SendWr(1000, opcode, IBV_SEND_SIGNALED | flags);
    wr.sg_list = &sge;
    wr.num_sge = 1;
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp_.get(), &wr, &bad);
  }
  void Send(const Bytes& frame) {
    Require(Post(frame) == 0, "post_send");
    const ibv_wc wc = PollOne(cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    EXPECT_EQ(wc.wr_id, 1000u);
  }
  // The next frame received.
  Bytes Next() {
    const ibv_wc wc = PollOne(cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    EXPECT_EQ(wc.opcode, IBV_WC_RECV);
    const uint8_t* at = memory_.data() + wc.wr_id * kSlot;
    Bytes frame(at, at + wc.byte_len);
    Receive(wc.wr_id);
    return frame;
  }

  ibv_context* context() { return context_.get(); }
  ibv_pd* pd() { return pd_.get(); }
  ibv_cq* cq() { return cq_.get(); }
  ibv_qp* qp() { return qp_.get(); }
  Memory& memory() { return memory_; }
  void DestroyQp() { qp_.reset(); }

 private:
  Owned<ibv_context> context_;
  Owned<ibv_pd> pd_;
  Memory memory_;
  Owned<ibv_cq> cq_;
  Owned<ibv_qp> qp_;
};

// --- Frames ---

inline constexpr Mac kTo = {0x02, 0x10, 0x20, 0x30, 0x40, 0x50};  // nobody's
inline constexpr Mac kFrom = {0x02, 0x11, 0x21, 0x31, 0x41, 0x51};
inline constexpr Mac kGroupMac = {0x01, 0x00, 0x5e, 0x01, 0x02, 0x03};

struct FrameOptions {
  Mac to = kTo;
  Mac from = kFrom;
  int vlan = -1;  // tag control information
  bool ipv6 = false;
  uint8_t protocol = 17;
  uint16_t source_port = 1000;
  uint16_t destination_port = 2000;
  uint8_t last_of_destination = 2;  // 10.0.0.2 or fd00::2
  uint8_t tos = 0;
  size_t payload = 40;
};

inline void Put16(Bytes& out, uint32_t value) {
  out.push_back(static_cast<uint8_t>(value >> 8));
  out.push_back(static_cast<uint8_t>(value));
}

inline Bytes MakeFrame(const FrameOptions& o) {
  Bytes out(o.to.begin(), o.to.end());
  out.insert(out.end(), o.from.begin(), o.from.end());
  if (o.vlan >= 0) {
    Put16(out, 0x8100);
    Put16(out, static_cast<uint32_t>(o.vlan));
  }
  Put16(out, o.ipv6 ? 0x86dd : 0x0800);
  const size_t header = o.protocol == 6 ? 20 : 8;
  const uint32_t l4_bytes = static_cast<uint32_t>(header + o.payload);
  if (o.ipv6) {
    out.push_back(static_cast<uint8_t>(0x60 | o.tos >> 4));
    out.push_back(static_cast<uint8_t>(o.tos << 4));
    Put16(out, 0);
    Put16(out, l4_bytes);
    out.insert(out.end(), {o.protocol, 64});
    Bytes address(16, 0);
    address[0] = 0xfd;
    address[15] = 1;
    out.insert(out.end(), address.begin(), address.end());
    address[15] = o.last_of_destination;
    out.insert(out.end(), address.begin(), address.end());
  } else {
    out.insert(out.end(), {0x45, o.tos});
    Put16(out, 20 + l4_bytes);
    Put16(out, 7);
    Put16(out, 0x4000);
    out.insert(out.end(), {64, o.protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, o.last_of_destination});
  }
  Put16(out, o.source_port);
  Put16(out, o.destination_port);
  out.resize(out.size() + header - 4);
  for (size_t i = 0; i < o.payload; ++i) out.push_back(PatternByte(5, i));
  return out;
}

// --- Rules ---

// A flow attribute with its specs behind it.
class Rule {
 public:
  explicit Rule(ibv_flow_attr_type type = IBV_FLOW_ATTR_NORMAL, uint16_t priority = 0,
                uint32_t flags = 0) {
    attr_.type = type;
    attr_.priority = priority;
    attr_.port = 1;
    attr_.flags = flags;
  }
  template <typename Spec>
  Rule& With(const Spec& spec) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&spec);
    specs_.insert(specs_.end(), bytes, bytes + sizeof spec);
    ++attr_.num_of_specs;
    return *this;
  }
  Rule& Eth(const Mac& to) {
    ibv_flow_spec_eth spec = {};
    spec.type = IBV_FLOW_SPEC_ETH;
    spec.size = sizeof spec;
    std::memcpy(spec.val.dst_mac, to.data(), 6);
    std::memset(spec.mask.dst_mac, 0xff, 6);
    return With(spec);
  }
  Rule& Vlan(uint16_t tag, uint16_t mask) {
    ibv_flow_spec_eth spec = {};
    spec.type = IBV_FLOW_SPEC_ETH;
    spec.size = sizeof spec;
    spec.val.vlan_tag = htobe16(tag);
    spec.mask.vlan_tag = htobe16(mask);
    return With(spec);
  }
  Rule& EtherType(uint16_t type) {
    ibv_flow_spec_eth spec = {};
    spec.type = IBV_FLOW_SPEC_ETH;
    spec.size = sizeof spec;
    spec.val.ether_type = htobe16(type);
    spec.mask.ether_type = 0xffff;
    return With(spec);
  }
  Rule& Ipv4(uint8_t last_of_destination) {
    ibv_flow_spec_ipv4 spec = {};
    spec.type = IBV_FLOW_SPEC_IPV4;
    spec.size = sizeof spec;
    spec.val.dst_ip = htobe32(0x0a000000u + last_of_destination);
    spec.mask.dst_ip = 0xffffffff;
    return With(spec);
  }
  Rule& Ipv4Ext(uint8_t protocol, uint8_t tos) {
    ibv_flow_spec_ipv4_ext spec = {};
    spec.type = IBV_FLOW_SPEC_IPV4_EXT;
    spec.size = sizeof spec;
    spec.val.proto = protocol;
    spec.mask.proto = 0xff;
    spec.val.tos = tos;
    spec.mask.tos = 0xff;
    return With(spec);
  }
  Rule& Ipv6(uint8_t last_of_destination) {
    ibv_flow_spec_ipv6 spec = {};
    spec.type = IBV_FLOW_SPEC_IPV6;
    spec.size = sizeof spec;
    spec.val.dst_ip[0] = 0xfd;
    spec.val.dst_ip[15] = last_of_destination;
    std::memset(spec.mask.dst_ip, 0xff, 16);
    return With(spec);
  }
  Rule& Port(ibv_flow_spec_type type, uint16_t destination) {
    ibv_flow_spec_tcp_udp spec = {};
    spec.type = type;
    spec.size = sizeof spec;
    spec.val.dst_port = htobe16(destination);
    spec.mask.dst_port = 0xffff;
    return With(spec);
  }
  Rule& Tag(uint32_t tag) {
    ibv_flow_spec_action_tag spec = {};
    spec.type = IBV_FLOW_SPEC_ACTION_TAG;
    spec.size = sizeof spec;
    spec.tag_id = tag;
    return With(spec);
  }
  Rule& Drop() {
    ibv_flow_spec_action_drop spec = {};
    spec.type = IBV_FLOW_SPEC_ACTION_DROP;
    spec.size = sizeof spec;
    return With(spec);
  }
  Rule& Count(ibv_counters* counters) {
    ibv_flow_spec_counter_action spec = {};
    spec.type = IBV_FLOW_SPEC_ACTION_COUNT;
    spec.size = sizeof spec;
    spec.counters = counters;
    return With(spec);
  }
  ibv_flow_attr& attr() { return attr_; }

  ibv_flow* Create(ibv_qp* qp) const {
    Bytes whole(sizeof attr_ + specs_.size());
    ibv_flow_attr attr = attr_;
    attr.size = static_cast<uint16_t>(whole.size());
    std::memcpy(whole.data(), &attr, sizeof attr);
    if (!specs_.empty()) std::memcpy(whole.data() + sizeof attr, specs_.data(), specs_.size());
    errno = 0;
    return ibv_create_flow(qp, reinterpret_cast<ibv_flow_attr*>(whole.data()));
  }
  Flow On(RawEnd& end) const {
    Flow flow(Create(end.qp()));
    Require(flow != nullptr, "ibv_create_flow");
    return flow;
  }

 private:
  ibv_flow_attr attr_ = {};
  Bytes specs_;
};

}  // namespace verbena::testing
