// SPDX-License-Identifier: Apache-2.0
//
// Posting by ibv_wr_* on QPs of other types than RC: ibv_wr_post(3).
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

#include "tests/verbs/ud_end.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

TEST(ExtendedQpTypes, UnreliableConnectionsSendAndWrite) {
  constexpr uint64_t kOps = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
                            IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  RcEnd a(EndOptions{.type = IBV_QPT_UC, .send_ops = kOps});
  RcEnd b(EndOptions{.device = "verbena1", .type = IBV_QPT_UC});
  ConnectPair(a, b);
  Memory local(a.pd(), 4096), remote(b.pd(), 4096);
  FillPattern(local.bytes(), 4);
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(b.PostRecv(i, {remote.sge(1024 * i, 1024)}), 0);
  ibv_qp_ex* const ex = ibv_qp_to_qp_ex(a.qp());
  ibv_wr_start(ex);
  ex->wr_flags = IBV_SEND_SIGNALED;
  for (uint64_t i = 0; i < 4; ++i) {
    ex->wr_id = i;
    if (i == 0) ibv_wr_send(ex);
    if (i == 1) ibv_wr_send_imm(ex, htonl(1));
    if (i == 2) ibv_wr_rdma_write(ex, remote.rkey(), remote.address(3072));
    if (i == 3) ibv_wr_rdma_write_imm(ex, remote.rkey(), remote.address(3200), htonl(3));
    ibv_wr_set_sge(ex, local.lkey(), local.address(), 100);
  }
  ASSERT_EQ(ibv_wr_complete(ex), 0);
  for (uint64_t i = 0; i < 4; ++i) {
    const ibv_wc wc = PollOne(a.send_cq());
    EXPECT_EQ(wc.wr_id, i);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
  }
  EXPECT_EQ(PollOne(b.recv_cq()).byte_len, 100u);
  EXPECT_EQ(PollOne(b.recv_cq()).imm_data, htonl(1));
  EXPECT_EQ(PollOne(b.recv_cq()).imm_data, htonl(3));
  for (const size_t at : {0, 1024, 3072, 3200}) {
    EXPECT_EQ(PatternMismatch(remote.bytes().subspan(at, 100), 4), std::nullopt) << at;
  }
}

// A UD, XRC_SEND or raw packet QP that posts by ibv_wr_*, in RTS.
class Sender {
 public:
  Sender(ibv_qp_type type, uint64_t ops, const PeerAddress& peer) {
    ibv_qp_init_attr_ex init = {};
    init.qp_type = type;
    init.send_cq = cq_.get();
    if (type != IBV_QPT_XRC_SEND) init.recv_cq = cq_.get();
    init.cap = {8, type != IBV_QPT_XRC_SEND ? 8u : 0u, 2, 1, 0};
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.pd = pd_.get();
    init.send_ops_flags = ops;
    qp_.reset(ibv_create_qp_ex(context_.get(), &init));
    Require(qp_ != nullptr, "ibv_create_qp_ex");
    ibv_qp_attr attr = {};
    attr.port_num = 1;
    attr.qkey = 0x11111111;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer.qpn;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = peer.gid;
    attr.ah_attr.grh.sgid_index = 1;
    attr.timeout = 14;
    attr.retry_cnt = attr.rnr_retry = 7;
    attr.rq_psn = attr.sq_psn = peer.psn;
    const bool ud = type == IBV_QPT_UD, raw = type == IBV_QPT_RAW_PACKET;
    const int masks[] = {
        IBV_QP_PORT | (raw ? 0 : IBV_QP_PKEY_INDEX) |
            (ud    ? int{IBV_QP_QKEY}
             : raw ? 0
                   : int{IBV_QP_ACCESS_FLAGS}),
        ud || raw ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
        raw  ? 0
        : ud ? int{IBV_QP_SQ_PSN}
             : IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                   IBV_QP_MAX_QP_RD_ATOMIC};
    const ibv_qp_state states[] = {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS};
    for (int i = 0; i < 3; ++i) {
      attr.qp_state = states[i];
      errno = ibv_modify_qp(qp_.get(), &attr, masks[i] | IBV_QP_STATE);
      Require(errno == 0, "ibv_modify_qp");
    }
  }
  ibv_context* context() { return context_.get(); }
  ibv_pd* pd() { return pd_.get(); }
  ibv_cq* cq() { return cq_.get(); }
  Memory& memory() { return memory_; }
  ibv_qp* qp() { return qp_.get(); }
  ibv_qp_ex* ex() { return ibv_qp_to_qp_ex(qp_.get()); }
  void Begin(uint64_t wr_id) {
    ibv_wr_start(ex());
    ex()->wr_id = wr_id;
    ex()->wr_flags = IBV_SEND_SIGNALED;
  }
  ibv_wc_status Finish(uint32_t bytes) {
    ibv_wr_set_sge(ex(), memory_.lkey(), memory_.address(), bytes);
    EXPECT_EQ(ibv_wr_complete(ex()), 0);
    return PollOne(cq_.get()).status;
  }

 private:
  Owned<ibv_context> context_ = OpenDevice();
  Owned<ibv_pd> pd_{ibv_alloc_pd(context_.get())};
  Owned<ibv_cq> cq_{ibv_create_cq(context_.get(), 32, nullptr, nullptr, 0)};
  Memory memory_{pd_.get(), 4096};
  Owned<ibv_qp> qp_;
};

TEST(ExtendedQpTypes, DatagramsGoWhereSetUdAddrSays) {
  Sender a(IBV_QPT_UD, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM, {});
  UdEnd b("verbena1");
  FillPattern(a.memory().bytes(), 6);
  ibv_ah_attr attr = {};
  attr.is_global = 1;
  attr.port_num = 1;
  attr.grh.sgid_index = 1;
  attr.grh.dgid = b.gid();
  const Owned<ibv_ah> ah(ibv_create_ah(a.pd(), &attr));
  ASSERT_NE(ah, nullptr);
  for (const bool with_imm : {false, true}) {
    b.Receive(7, 0, 1024);
    a.Begin(1);
    if (with_imm) {
      ibv_wr_send_imm(a.ex(), htonl(5));
    } else {
      ibv_wr_send(a.ex());
    }
    ibv_wr_set_ud_addr(a.ex(), ah.get(), b.qp()->qp_num, kQkey);
    EXPECT_EQ(a.Finish(200), IBV_WC_SUCCESS);
    const ibv_wc got = PollOne(b.cq());
    EXPECT_EQ(got.status, IBV_WC_SUCCESS);
    EXPECT_EQ(got.byte_len, 200 + kGrhBytes);
    EXPECT_EQ(got.src_qp, a.qp()->qp_num);
    EXPECT_EQ((got.wc_flags & IBV_WC_WITH_IMM) != 0, with_imm);
    EXPECT_EQ(PatternMismatch(b.memory().bytes().subspan(kGrhBytes, 200), 6), std::nullopt);
  }
}

TEST(ExtendedQpTypes, XrcGoesToTheSrqThatSetXrcSrqnNames) {
  const auto context = OpenDevice("verbena1");
  const Owned<ibv_pd> pd(ibv_alloc_pd(context.get()));
  const Owned<ibv_cq> cq(ibv_create_cq(context.get(), 16, nullptr, nullptr, 0));
  Memory memory(pd.get(), 4096);
  ibv_xrcd_init_attr domain = {};
  domain.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
  domain.fd = -1;
  domain.oflags = O_CREAT;
  ibv_xrcd* const xrcd = ibv_open_xrcd(context.get(), &domain);
  ASSERT_NE(xrcd, nullptr);
  {
    ibv_srq_init_attr_ex attr = {};
    attr.attr = {16, 1, 0};
    attr.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ |
                     IBV_SRQ_INIT_ATTR_PD;
    attr.srq_type = IBV_SRQT_XRC;
    attr.pd = pd.get();
    attr.xrcd = xrcd;
    attr.cq = cq.get();
    const Owned<ibv_srq> srq(ibv_create_srq_ex(context.get(), &attr));
    ASSERT_NE(srq, nullptr);
    uint32_t number = 0;
    ASSERT_EQ(ibv_get_srq_num(srq.get(), &number), 0);
    ibv_qp_init_attr_ex init = {};
    init.qp_type = IBV_QPT_XRC_RECV;
    init.comp_mask = IBV_QP_INIT_ATTR_XRCD;
    init.xrcd = xrcd;
    const Owned<ibv_qp> target(ibv_create_qp_ex(context.get(), &init));
    ASSERT_NE(target, nullptr);
    PeerAddress address{.qpn = target->qp_num, .psn = 5, .gid = {}};
    ASSERT_EQ(ibv_query_gid(context.get(), 1, 1, &address.gid), 0);
    Sender a(IBV_QPT_XRC_SEND, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE, address);
    ibv_qp_attr modify = {};
    modify.port_num = 1;
    modify.qp_access_flags = kAllAccess;
    modify.path_mtu = IBV_MTU_1024;
    modify.dest_qp_num = a.qp()->qp_num;
    modify.rq_psn = 5;
    modify.ah_attr.is_global = 1;
    modify.ah_attr.port_num = 1;
    modify.ah_attr.grh.sgid_index = 1;
    ASSERT_EQ(ibv_query_gid(a.context(), 1, 1, &modify.ah_attr.grh.dgid), 0);
    modify.qp_state = IBV_QPS_INIT;
    ASSERT_EQ(ibv_modify_qp(target.get(), &modify,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
              0);
    modify.qp_state = IBV_QPS_RTR;
    ASSERT_EQ(ibv_modify_qp(target.get(), &modify,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
              0);
    ibv_sge sge = memory.sge(0, 1024);
    ibv_recv_wr receive = {3, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    ASSERT_EQ(ibv_post_srq_recv(srq.get(), &receive, &bad), 0);
    FillPattern(a.memory().bytes(), 8);
    a.Begin(1);
    ibv_wr_send(a.ex());
    ibv_wr_set_xrc_srqn(a.ex(), number);
    EXPECT_EQ(a.Finish(300), IBV_WC_SUCCESS);
    EXPECT_EQ(PollOne(cq.get()).byte_len, 300u);
    EXPECT_EQ(PatternMismatch(memory.bytes().first(300), 8), std::nullopt);
    a.Begin(2);
    ibv_wr_rdma_write(a.ex(), memory.rkey(), memory.address(2048));
    ibv_wr_set_xrc_srqn(a.ex(), number);
    EXPECT_EQ(a.Finish(300), IBV_WC_SUCCESS);
    EXPECT_EQ(PatternMismatch(memory.bytes().subspan(2048, 300), 8), std::nullopt);
  }
  EXPECT_EQ(ibv_close_xrcd(xrcd), 0);
}

TEST(ExtendedQpTypes, RawPacketsAreSent) {
  Sender a(IBV_QPT_RAW_PACKET, IBV_QP_EX_WITH_SEND, {});
  std::memset(a.memory().data(), 0xff, 12);  // to everybody, of an unused type
  a.memory().data()[12] = 0x88;
  a.memory().data()[13] = 0xb5;
  a.Begin(1);
  ibv_wr_send(a.ex());
  EXPECT_EQ(a.Finish(100), IBV_WC_SUCCESS);
}

}  // namespace
}  // namespace verbena::testing
