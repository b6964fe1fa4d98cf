// SPDX-License-Identifier: Apache-2.0
//
// One UD QP with everything that it needs, for tests of datagrams.
#pragma once

#include <infiniband/verbs.h>

#include <cstring>
#include <string>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {

inline constexpr uint32_t kQkey = 0x11111111;
inline constexpr uint32_t kGrhBytes = 40;

// In RTS; its memory is of 64 KiB.
class UdEnd {
 public:
  explicit UdEnd(const std::string& device = "verbena0", int gid_index = 1,
                 uint32_t create_flags = 0)
      : gid_index_(gid_index),
        context_(OpenDevice(device)),
        pd_(ibv_alloc_pd(context_.get())),
        cq_(ibv_create_cq(context_.get(), 128, nullptr, nullptr, 0)),
        memory_(pd_.get(), 1 << 16) {
    Require(cq_ != nullptr, "ibv_create_cq");
    ibv_qp_init_attr_ex init = {};
    init.comp_mask = IBV_QP_INIT_ATTR_PD;
    init.pd = pd_.get();
    if (create_flags != 0) init.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
    init.create_flags = create_flags;
    init.send_cq = init.recv_cq = cq_.get();
    init.qp_type = IBV_QPT_UD;
    init.cap = {.max_send_wr = 32,
                .max_recv_wr = 32,
                .max_send_sge = 4,
                .max_recv_sge = 4,
                .max_inline_data = 64};
    qp_.reset(ibv_create_qp_ex(context_.get(), &init));
    Require(qp_ != nullptr, "ibv_create_qp UD");
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qkey = kQkey;
    Require(ibv_modify_qp(qp_.get(), &attr,
                          IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0,
            "INIT");
    Require(ToState(IBV_QPS_RTR) == 0, "RTR");
    attr.qp_state = IBV_QPS_RTS;
    attr.sq_psn = 0xfffffe;
    Require(ibv_modify_qp(qp_.get(), &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0, "RTS");
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
  ibv_gid gid() {
    ibv_gid gid = {};
    Require(ibv_query_gid(context_.get(), 1, gid_index_, &gid) == 0, "query_gid");
    return gid;
  }
  ibv_ah_attr AttributesFor(UdEnd& peer) {
    ibv_ah_attr attr = {};
    attr.is_global = 1;
    attr.port_num = 1;
    attr.grh.sgid_index = static_cast<uint8_t>(gid_index_);
    attr.grh.hop_limit = 17;
    attr.grh.traffic_class = 0x68;
    attr.grh.dgid = peer.gid();
    return attr;
  }
  Owned<ibv_ah> AhTo(UdEnd& peer) {
    ibv_ah_attr attr = AttributesFor(peer);
    Owned<ibv_ah> ah(ibv_create_ah(pd_.get(), &attr));
    Require(ah != nullptr, "ibv_create_ah");
    return ah;
  }
  int Send(uint64_t wr_id, ibv_ah* ah, UdEnd& to, uint32_t bytes, uint32_t qkey = kQkey,
           ibv_wr_opcode opcode = IBV_WR_SEND, uint32_t offset = 0) {
    ibv_sge sge = memory_.sge(offset, bytes);
    return SendSge(wr_id, ah, to, sge, qkey, opcode);
  }
  int SendSge(uint64_t wr_id, ibv_ah* ah, UdEnd& to, ibv_sge sge, uint32_t qkey = kQkey,
              ibv_wr_opcode opcode = IBV_WR_SEND) {
    ibv_send_wr wr = SendWr(wr_id, opcode);
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.imm_data = htobe32(0xfeedbeef);
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = to.qp()->qp_num;
    wr.wr.ud.remote_qkey = qkey;
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp_.get(), &wr, &bad);
  }
  void Receive(uint64_t wr_id, uint32_t offset, uint32_t bytes) {
    ibv_sge sge = memory_.sge(offset, bytes);
    ibv_recv_wr wr = {};
    wr.wr_id = wr_id;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    Require(ibv_post_recv(qp_.get(), &wr, &bad) == 0, "post_recv");
  }

  ibv_context* context() { return context_.get(); }
  ibv_pd* pd() { return pd_.get(); }
  ibv_cq* cq() { return cq_.get(); }
  ibv_qp* qp() { return qp_.get(); }
  Memory& memory() { return memory_; }

 private:
  int gid_index_;
  Owned<ibv_context> context_;
  Owned<ibv_pd> pd_;
  Owned<ibv_cq> cq_;
  Memory memory_;
  Owned<ibv_qp> qp_;
};

}  // namespace verbena::testing
