// SPDX-License-Identifier: Apache-2.0
//
// Domains, SRQs and QPs of extended reliable connections, for tests.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <cerrno>
#include <memory>
#include <string>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {

struct XrcdDeleter {
  void operator()(ibv_xrcd* xrcd) const { ibv_close_xrcd(xrcd); }
};
using OwnedXrcd = std::unique_ptr<ibv_xrcd, XrcdDeleter>;

inline ibv_xrcd* OpenXrcd(ibv_context* context, int fd, int flags = O_CREAT) {
  ibv_xrcd_init_attr init = {};
  init.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
  init.fd = fd;
  init.oflags = flags;
  errno = 0;
  return ibv_open_xrcd(context, &init);
}

inline int ModifyPath(ibv_qp* qp, ibv_qp_state state, const PeerAddress& peer, uint32_t own_psn,
                      const PathOptions& path = {}) {
  ibv_qp_attr attr = {};
  attr.qp_state = state;
  attr.port_num = 1;
  attr.qp_access_flags = path.access & ~static_cast<unsigned>(IBV_ACCESS_LOCAL_WRITE);
  attr.path_mtu = path.mtu;
  attr.dest_qp_num = peer.qpn;
  attr.rq_psn = peer.psn;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = 1;
  attr.ah_attr.grh.dgid = peer.gid;
  attr.ah_attr.grh.sgid_index = 1;
  attr.max_dest_rd_atomic = path.rd_atomic;
  attr.min_rnr_timer = path.min_rnr_timer;
  attr.timeout = path.timeout;
  attr.retry_cnt = path.retry_cnt;
  attr.rnr_retry = path.rnr_retry;
  attr.max_rd_atomic = path.rd_atomic;
  attr.sq_psn = own_psn;
  const bool target = qp->qp_type == IBV_QPT_XRC_RECV;
  int mask = IBV_QP_STATE;
  if (state == IBV_QPS_INIT) mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  if (state == IBV_QPS_RTR) {
    mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    if (target) mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  }
  if (state == IBV_QPS_RTS) {
    mask |= IBV_QP_TIMEOUT | IBV_QP_SQ_PSN;
    if (!target) mask |= IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
  }
  return ibv_modify_qp(qp, &attr, mask);
}

inline void Connect(ibv_qp* qp, const PeerAddress& peer, uint32_t own_psn,
                    const PathOptions& path = {}) {
  for (const ibv_qp_state state : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS}) {
    errno = ModifyPath(qp, state, peer, own_psn, path);
    Require(errno == 0, "ibv_modify_qp");
  }
}

// An XRC SRQ with CQ and memory on somebody's context.
struct Xsrq {
  Xsrq(ibv_context* context, ibv_pd* pd, ibv_xrcd* xrcd)
      : cq(ibv_create_cq(context, 64, nullptr, nullptr, 0)), memory(pd, 65536) {
    ibv_srq_init_attr_ex init = {};
    init.attr = {32, 2, 0};
    init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ |
                     IBV_SRQ_INIT_ATTR_PD;
    init.srq_type = IBV_SRQT_XRC;
    init.pd = pd;
    init.xrcd = xrcd;
    init.cq = cq.get();
    srq.reset(ibv_create_srq_ex(context, &init));
    Require(srq != nullptr, "ibv_create_srq_ex");
    Require(ibv_get_srq_num(srq.get(), &number) == 0, "ibv_get_srq_num");
  }
  void Post(uint64_t wr_id, size_t offset = 0, size_t bytes = 65536) {
    ibv_sge sge = memory.sge(offset, bytes);
    ibv_recv_wr wr = {wr_id, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    Require(ibv_post_srq_recv(srq.get(), &wr, &bad) == 0, "ibv_post_srq_recv");
  }

  Owned<ibv_cq> cq;
  Memory memory;
  Owned<ibv_srq> srq;
  uint32_t number = 0;
};

inline Owned<ibv_qp> CreateTarget(ibv_context* context, ibv_xrcd* xrcd) {
  ibv_qp_init_attr_ex init = {};
  init.qp_type = IBV_QPT_XRC_RECV;
  init.comp_mask = IBV_QP_INIT_ATTR_XRCD;
  init.xrcd = xrcd;
  Owned<ibv_qp> qp(ibv_create_qp_ex(context, &init));
  Require(qp != nullptr, "XRC_RECV QP");
  return qp;
}

// A sending QP on a device of its own.
struct Initiator {
  explicit Initiator(const std::string& device = "verbena1")
      : context(OpenDevice(device)),
        pd(ibv_alloc_pd(context.get())),
        cq(ibv_create_cq(context.get(), 64, nullptr, nullptr, 0)),
        memory(pd.get(), 65536) {
    ibv_qp_init_attr_ex init = {};
    init.qp_type = IBV_QPT_XRC_SEND;
    init.send_cq = cq.get();
    init.cap = {.max_send_wr = 32,
                .max_recv_wr = 0,
                .max_send_sge = 2,
                .max_recv_sge = 0,
                .max_inline_data = 0};
    init.comp_mask = IBV_QP_INIT_ATTR_PD;
    init.pd = pd.get();
    qp.reset(ibv_create_qp_ex(context.get(), &init));
    Require(qp != nullptr, "XRC_SEND QP");
  }
  PeerAddress Address() const {
    PeerAddress address;
    address.qpn = qp->qp_num;
    address.psn = 0xfffffd;
    Require(ibv_query_gid(context.get(), 1, 1, &address.gid) == 0, "ibv_query_gid");
    return address;
  }
  int Post(ibv_send_wr wr, uint32_t srq_number, size_t offset, size_t bytes) {
    ibv_sge sge = memory.sge(offset, bytes);
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.qp_type.xrc.remote_srqn = srq_number;
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp.get(), &wr, &bad);
  }
  ibv_wc_status Send(uint64_t id, uint32_t srq_number, size_t bytes) {
    FillPattern(memory.bytes().first(bytes), id);
    EXPECT_EQ(Post(SendWr(id), srq_number, 0, bytes), 0);
    return PollOne(cq.get()).status;
  }

  Owned<ibv_context> context;
  Owned<ibv_pd> pd;
  Owned<ibv_cq> cq;
  Memory memory;
  Owned<ibv_qp> qp;
};

inline PeerAddress AddressOf(ibv_qp* qp) {
  PeerAddress address;
  address.qpn = qp->qp_num;
  address.psn = 0x123;
  Require(ibv_query_gid(qp->context, 1, 1, &address.gid) == 0, "ibv_query_gid");
  return address;
}

}  // namespace verbena::testing
