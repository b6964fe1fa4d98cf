// SPDX-License-Identifier: Apache-2.0
//
// Unreliable connections: what arrives, what is lost without a word, what ends
// which end.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

EndOptions UcOptions(const std::string& device, bool sq_sig_all = false) {
  EndOptions options;
  options.device = device;
  options.type = IBV_QPT_UC;
  options.max_inline = 64;
  options.sq_sig_all = sq_sig_all;
  return options;
}

class Uc : public ::testing::TestWithParam<const char*> {
 protected:
  Uc() : a_(UcOptions("verbena0")), b_(UcOptions(GetParam())) { ConnectPair(a_, b_); }
  ~Uc() override { VerbenaHere({"fault", "clear"}); }

  ibv_wc_status Send(uint64_t wr_id, const ibv_sge& sge, ibv_wr_opcode opcode = IBV_WR_SEND) {
    ibv_send_wr wr = SendWr(wr_id, opcode, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED);
    wr.imm_data = htobe32(0x01020304);
    EXPECT_EQ(a_.PostSend(wr, {sge}), 0);
    const ibv_wc wc = PollOne(a_.send_cq());
    EXPECT_EQ(wc.wr_id, wr_id);
    return wc.status;
  }

  RcEnd a_;
  RcEnd b_;
};
INSTANTIATE_TEST_SUITE_P(Paths, Uc, ::testing::Values("verbena0", "verbena1"));

TEST_P(Uc, SendsOfAllSizesArriveWhole) {
  Memory source(a_.pd(), 1 << 20), target(b_.pd(), 1 << 20);
  uint64_t id = 0;
  for (const size_t bytes : {0, 1, 3, 1023, 1024, 1025, 4096, 65537, 1 << 20}) {
    ++id;
    FillPattern(source.bytes().first(bytes), id);
    ASSERT_EQ(b_.PostRecv(id, {target.sge(0, target.size())}), 0);
    ASSERT_EQ(Send(id, source.sge(0, bytes), IBV_WR_SEND_WITH_IMM), IBV_WC_SUCCESS);
    const ibv_wc wc = PollOne(b_.recv_cq());
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, id);
    EXPECT_EQ(wc.byte_len, bytes);
    EXPECT_EQ(wc.opcode, IBV_WC_RECV);
    EXPECT_EQ(wc.wc_flags & IBV_WC_WITH_IMM, IBV_WC_WITH_IMM);
    EXPECT_EQ(be32toh(wc.imm_data), 0x01020304u);
    EXPECT_EQ(wc.qp_num, b_.qp()->qp_num);
    EXPECT_EQ(PatternMismatch(target.bytes().first(bytes), id), std::nullopt);
  }
}

TEST_P(Uc, WritesArriveAndTellOnlyWithImmediate) {
  Memory source(a_.pd(), 10000), target(b_.pd(), 10000);
  FillPattern(source.bytes(), 7);
  ASSERT_EQ(b_.PostRecv(5), 0);
  ASSERT_EQ(a_.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, target.address(), target.rkey()),
                        {source.sge(0, 5000)}),
            0);
  EXPECT_EQ(PollOne(a_.send_cq()).opcode, IBV_WC_RDMA_WRITE);
  ibv_send_wr wr = RdmaWr(2, IBV_WR_RDMA_WRITE_WITH_IMM, target.address(5000), target.rkey());
  wr.imm_data = htobe32(9);
  ASSERT_EQ(a_.PostSend(wr, {source.sge(5000, 5000)}), 0);
  const ibv_wc wc = PollOne(b_.recv_cq());
  EXPECT_EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(wc.byte_len, 5000u);
  EXPECT_EQ(be32toh(wc.imm_data), 9u);
  EXPECT_EQ(PatternMismatch(target.bytes(), 7), std::nullopt);
}

TEST_P(Uc, InlineListsAndUnsignalledRequestsWork) {
  Memory source(a_.pd(), 256), target(b_.pd(), 256);
  FillPattern(source.bytes(), 3);
  ASSERT_EQ(b_.PostRecv(1, {target.sge(0, 10), target.sge(10, 90)}), 0);
  ASSERT_EQ(b_.PostRecv(2, {target.sge(100, 60)}), 0);
  ASSERT_EQ(a_.PostSend(SendWr(1, IBV_WR_SEND, 0), {source.sge(0, 33), source.sge(33, 67)}), 0);
  ibv_send_wr wr = SendWr(2, IBV_WR_SEND, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
  ASSERT_EQ(a_.PostSend(wr, {source.sge(100, 60)}), 0);
  EXPECT_EQ(PollOne(a_.send_cq()).wr_id, 2u);
  EXPECT_EQ(PollOne(b_.recv_cq()).byte_len, 100u);
  EXPECT_EQ(PollOne(b_.recv_cq()).byte_len, 60u);
  EXPECT_EQ(PatternMismatch(target.bytes().first(160), 3), std::nullopt);
}

TEST_P(Uc, OperationsThatUcDoesNotHaveAreRefusedAtPost) {
  Memory memory(a_.pd(), 64);
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
                                     IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_SEND_WITH_INV}) {
    ibv_send_wr wr = RdmaWr(1, opcode, memory.address(), memory.rkey());
    EXPECT_EQ(a_.PostSend(wr, {memory.sge(0, 8)}), EINVAL) << opcode;
  }
  EXPECT_EQ(a_.State(), IBV_QPS_RTS);
}

// ibv_post_send(3): UC has BIND_MW and LOCAL_INV. A window of type 2 belongs to its UC QP.
TEST_P(Uc, WindowsAreBoundAndInvalidated) {
  Memory source(a_.pd(), 64);
  Memory region(b_.pd(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
  const Owned<ibv_mw> mw(ibv_alloc_mw(b_.pd(), IBV_MW_TYPE_2));
  ASSERT_NE(mw, nullptr);
  ibv_send_wr bind = SendWr(1, IBV_WR_BIND_MW);
  bind.bind_mw = {.mw = mw.get(),
                  .rkey = ibv_inc_rkey(mw->rkey),
                  .bind_info = {.mr = region.mr(),
                                .addr = region.address(64),
                                .length = 64,
                                .mw_access_flags = IBV_ACCESS_REMOTE_WRITE}};
  ASSERT_EQ(b_.PostSend(bind), 0);
  const ibv_wc bound = PollOne(b_.send_cq());
  EXPECT_EQ(bound.status, IBV_WC_SUCCESS) << Describe(bound);
  EXPECT_EQ(bound.opcode, IBV_WC_BIND_MW);
  ASSERT_EQ(b_.PostRecv(5), 0);
  const auto write_imm = [&](uint64_t offset) {
    EXPECT_EQ(a_.PostSend(
                  RdmaWr(2, IBV_WR_RDMA_WRITE_WITH_IMM, region.address(offset), bind.bind_mw.rkey),
                  {source.sge(0, 8)}),
              0);
    EXPECT_EQ(PollOne(a_.send_cq()).status, IBV_WC_SUCCESS);
  };
  write_imm(120);
  EXPECT_EQ(PollOne(b_.recv_cq()).wr_id, 5u);
  ASSERT_EQ(b_.PostRecv(6), 0);
  write_imm(121);  // beyond the window
  EXPECT_TRUE(StaysEmpty(b_.recv_cq(), Milliseconds(20)));

  // Behind a message, unsignalled, and then signalled.
  ibv_send_wr invalidate = SendWr(3, IBV_WR_LOCAL_INV);
  invalidate.invalidate_rkey = bind.bind_mw.rkey;
  Memory own(b_.pd(), 4096);
  ASSERT_EQ(a_.PostRecv(7), 0);
  ASSERT_EQ(b_.PostSend(SendWr(8), {}), 0);
  ASSERT_EQ(b_.PostSend(invalidate), 0);
  EXPECT_EQ(PollOne(b_.send_cq()).wr_id, 8u);
  const ibv_wc gone = PollOne(b_.send_cq());
  EXPECT_EQ(gone.wr_id, 3u);
  EXPECT_EQ(gone.status, IBV_WC_SUCCESS) << Describe(gone);
  EXPECT_EQ(gone.opcode, IBV_WC_LOCAL_INV);
  write_imm(120);
  EXPECT_TRUE(StaysEmpty(b_.recv_cq(), Milliseconds(20)));

  ASSERT_EQ(b_.PostSend(invalidate), 0);  // of nothing
  EXPECT_EQ(PollOne(b_.send_cq()).status, IBV_WC_LOC_QP_OP_ERR);
  EXPECT_EQ(b_.State(), IBV_QPS_SQE);
  ASSERT_EQ(b_.ToState(IBV_QPS_RTS), 0);
  bind.bind_mw.rkey = ibv_inc_rkey(bind.bind_mw.rkey);
  ASSERT_EQ(b_.PostSend(bind), 0);
  EXPECT_EQ(PollOne(b_.send_cq()).status, IBV_WC_SUCCESS);
  write_imm(64);
  EXPECT_EQ(PollOne(b_.recv_cq()).wr_id, 6u);
}

// Nothing comes back, whatever happens to the message, and the next arrives.
TEST_P(Uc, WithoutAReceiveOrARightAMessageIsLostAndTheNextArrives) {
  Memory source(a_.pd(), 4096), target(b_.pd(), 4096);
  Memory readable(b_.pd(), 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  EXPECT_EQ(Send(1, source.sge(0, 4096)), IBV_WC_SUCCESS);  // no receive
  const auto write = [&](uint64_t address, uint32_t rkey) {
    EXPECT_EQ(a_.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, address, rkey), {source.sge(0, 64)}), 0);
    EXPECT_EQ(PollOne(a_.send_cq()).status, IBV_WC_SUCCESS);
  };
  write(target.address(), 0x12345);
  write(target.address(4090), target.rkey());  // beyond the end
  write(readable.address(), readable.rkey());
  ASSERT_EQ(b_.PostRecv(1, {target.sge(0, 10)}), 0);
  EXPECT_EQ(Send(2, source.sge(0, 11)), IBV_WC_SUCCESS);  // too long
  EXPECT_TRUE(StaysEmpty(b_.recv_cq(), Milliseconds(30)));
  EXPECT_EQ(Send(3, source.sge(0, 10)), IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(b_.recv_cq()).wr_id, 1u);
  EXPECT_EQ(a_.State(), IBV_QPS_RTS);
  EXPECT_EQ(b_.State(), IBV_QPS_RTS);
  EXPECT_EQ(NextAsyncEvent(b_.context(), Milliseconds(10)), std::nullopt);
}

TEST_P(Uc, ALostPacketLosesItsMessageOnly) {
  Memory source(a_.pd(), 8192), target(b_.pd(), 8192);
  for (uint64_t i = 0; i < 8; ++i) ASSERT_EQ(b_.PostRecv(i, {target.sge(0, 8192)}), 0);
  // 8 packets in a message: the third of the second message is dropped.
  ASSERT_EQ(
      VerbenaHere({"fault", "add",
                   "drop dev=verbena0 dir=tx qpn=" + std::to_string(a_.qp()->qp_num) + " nth=11"})
          .status,
      0);
  for (uint64_t i = 0; i < 4; ++i) {
    FillPattern(source.bytes(), i);
    EXPECT_EQ(Send(i, source.sge(0, 8192), IBV_WR_SEND_WITH_IMM), IBV_WC_SUCCESS);
    if (i == 1) continue;
    const ibv_wc wc = PollOne(b_.recv_cq());
    EXPECT_EQ(wc.wr_id, i == 0 ? 0 : i - 1);  // the lost message used none up
    EXPECT_EQ(PatternMismatch(target.bytes(), i), std::nullopt);
  }
  EXPECT_TRUE(StaysEmpty(b_.recv_cq(), Milliseconds(20)));
}

TEST_P(Uc, ABadLkeyStopsTheSendQueueUntilItIsStartedAgain) {
  Memory source(a_.pd(), 64), target(b_.pd(), 64);
  ibv_sge bad = source.sge(0, 64);
  bad.lkey ^= 0x5500;
  ASSERT_EQ(a_.PostSend(SendWr(1), {bad}), 0);
  ASSERT_EQ(a_.PostSend(SendWr(2), {source.sge(0, 64)}), 0);
  EXPECT_EQ(PollOne(a_.send_cq()).status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(PollOne(a_.send_cq()).status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(a_.State(), IBV_QPS_SQE);
  // It still receives.
  ASSERT_EQ(a_.PostRecv(4), 0);
  ASSERT_EQ(b_.PostSend(SendWr(1)), 0);
  EXPECT_EQ(PollOne(a_.recv_cq()).wr_id, 4u);
  ASSERT_EQ(a_.ToState(IBV_QPS_RTS), 0);
  ASSERT_EQ(b_.PostRecv(3, {target.sge(0, 64)}), 0);
  ASSERT_EQ(a_.PostSend(SendWr(3), {source.sge(0, 64)}), 0);
  EXPECT_EQ(PollOne(b_.recv_cq()).wr_id, 3u);
}

TEST_P(Uc, ABadReceiveBufferEndsTheReceiver) {
  Memory source(a_.pd(), 64), target(b_.pd(), 64);
  ibv_sge bad = target.sge(0, 64);
  bad.lkey ^= 0x5500;
  ASSERT_EQ(b_.PostRecv(1, {bad}), 0);
  ASSERT_EQ(b_.PostRecv(2, {target.sge(0, 64)}), 0);
  EXPECT_EQ(Send(1, source.sge(0, 64)), IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(b_.recv_cq()).status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(PollOne(b_.recv_cq()).status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(b_.State(), IBV_QPS_ERR);
}

TEST_P(Uc, DrainFinishesWhatWasBegunAndKeepsTheRest) {
  Memory source(a_.pd(), 4096), target(b_.pd(), 4096);
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(b_.PostRecv(i, {target.sge(0, 4096)}), 0);
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_SQD;
  attr.en_sqd_async_notify = 1;
  EXPECT_EQ(Send(1, source.sge(0, 4096)), IBV_WC_SUCCESS);
  ASSERT_EQ(ibv_modify_qp(a_.qp(), &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
  const auto event = NextAsyncEvent(a_.context(), Milliseconds(5000));
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event_type, IBV_EVENT_SQ_DRAINED);
  ASSERT_EQ(a_.PostSend(SendWr(2), {source.sge(0, 4096)}), 0);
  EXPECT_TRUE(StaysEmpty(a_.send_cq(), Milliseconds(20)));
  ASSERT_EQ(a_.ToState(IBV_QPS_RTS), 0);
  EXPECT_EQ(PollOne(a_.send_cq()).wr_id, 2u);
}

TEST(UcSrq, TakesReceivesFromAnSrq) {
  RcEnd a(UcOptions("verbena0"));
  RcEnd base(UcOptions("verbena1"));
  ibv_srq_init_attr init = {nullptr, {8, 1, 0}};
  const Owned<ibv_srq> srq(ibv_create_srq(base.pd(), &init));
  ASSERT_NE(srq, nullptr);
  EndOptions options = UcOptions("verbena1");
  options.srq = srq.get();
  RcEnd b(base, options);
  ConnectPair(a, b);
  Memory source(a.pd(), 64), target(base.pd(), 64);
  FillPattern(source.bytes(), 1);
  ibv_sge sge = target.sge(0, 64);
  ibv_recv_wr wr = {17, nullptr, &sge, 1};
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_srq_recv(srq.get(), &wr, &bad), 0);
  ASSERT_EQ(a.PostSend(SendWr(1), {source.sge(0, 64)}), 0);
  const ibv_wc wc = PollOne(b.recv_cq());
  EXPECT_EQ(wc.wr_id, 17u);
  EXPECT_EQ(wc.qp_num, b.qp()->qp_num);
  EXPECT_EQ(PatternMismatch(target.bytes(), 1), std::nullopt);
  ASSERT_EQ(b.ToState(IBV_QPS_ERR), 0);
  const auto event = NextAsyncEvent(base.context(), Milliseconds(5000));
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
}

// The table of IBTA Vol 1 for UC: neither less nor more.
TEST(UcModify, RefusesAttributesOfReliableConnections) {
  RcEnd end(UcOptions("verbena0"));
  ASSERT_EQ(end.ToInit(), 0);
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = IBV_MTU_1024;
  attr.dest_qp_num = end.qp()->qp_num;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = 1;
  attr.ah_attr.grh.sgid_index = 1;
  attr.ah_attr.grh.dgid = end.address().gid;
  const int rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
  for (const int extra : {IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_QKEY}) {
    EXPECT_EQ(ibv_modify_qp(end.qp(), &attr, rtr | extra), EINVAL);
  }
  for (const int missing : {IBV_QP_AV, IBV_QP_PATH_MTU, IBV_QP_DEST_QPN, IBV_QP_RQ_PSN}) {
    EXPECT_EQ(ibv_modify_qp(end.qp(), &attr, rtr & ~missing), EINVAL);
  }
  ASSERT_EQ(ibv_modify_qp(end.qp(), &attr, rtr), 0);
  attr.qp_state = IBV_QPS_RTS;
  const int rts = IBV_QP_STATE | IBV_QP_SQ_PSN;
  for (const int extra :
       {IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_MAX_QP_RD_ATOMIC}) {
    EXPECT_EQ(ibv_modify_qp(end.qp(), &attr, rts | extra), EINVAL);
  }
  EXPECT_EQ(ibv_modify_qp(end.qp(), &attr, IBV_QP_STATE), EINVAL);
  ASSERT_EQ(ibv_modify_qp(end.qp(), &attr, rts), 0);
  EXPECT_EQ(end.State(), IBV_QPS_RTS);
}

}  // namespace
}  // namespace verbena::testing
