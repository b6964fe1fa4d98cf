// SPDX-License-Identifier: Apache-2.0
//
// Posting: what lies in the rings, doorbells, full queues and refusals.
#include <arpa/inet.h>

#include <cstring>

#include "tests/unit/provider/provider_fixture.h"

namespace verbena::provider {
namespace {

int Post(ibv_qp* qp, ibv_send_wr wr) {
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(qp, &wr, &bad);
  EXPECT_EQ(bad, error == 0 ? nullptr : &wr);
  return error;
}

TEST_F(QpInRts, WriteWithImmediateIsEncodedWithAllSges) {
  ibv_sge sges[3] = {{0x1000, 11, 1}, {0x2000, 22, 2}, {0x3000, 33, 3}};
  ibv_send_wr wr = {};
  wr.wr_id = 0xfeedfacecafebeef;
  wr.sg_list = sges;
  wr.num_sge = 3;
  wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  wr.send_flags = IBV_SEND_SOLICITED | IBV_SEND_FENCE;
  wr.imm_data = htonl(0x01020304);
  wr.wr.rdma.remote_addr = 0xabcdef0123456789;
  wr.wr.rdma.rkey = 0x55667788;
  ASSERT_EQ(Post(qp_, wr), 0);
  const abi::SendWqe& wqe = View().Send(0);
  EXPECT_EQ(wqe.wr_id, wr.wr_id);
  EXPECT_EQ(wqe.opcode, 1);
  EXPECT_EQ(wqe.flags, abi::kWqeFence | abi::kWqeSolicited);
  EXPECT_EQ(wqe.num_sge, 3);
  const uint8_t wire[4] = {1, 2, 3, 4};
  EXPECT_EQ(memcmp(&wqe.imm_or_inv, wire, 4), 0);
  EXPECT_EQ(wqe.remote_address, 0xabcdef0123456789u);
  EXPECT_EQ(wqe.rkey, 0x55667788u);
  EXPECT_EQ(wqe.inline_bytes, 0u);
  EXPECT_EQ(memcmp(View().SendSges(0), sges, sizeof(sges)), 0);
}

TEST_F(QpInRts, AtomicsAreEncodedWithBothOperands) {
  ibv_sge sge = {0x1000, 8, 1};
  ibv_send_wr wr = {};
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.wr.atomic.remote_addr = 0x8000;
  wr.wr.atomic.compare_add = 0x1111111122222222;
  wr.wr.atomic.swap = 0x3333333344444444;
  wr.wr.atomic.rkey = 99;
  ASSERT_EQ(Post(qp_, wr), 0);
  wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  ASSERT_EQ(Post(qp_, wr), 0);
  const abi::SendWqe& swap = View().Send(0);
  EXPECT_EQ(swap.opcode, 5);
  EXPECT_EQ(swap.flags, abi::kWqeSignaled);
  EXPECT_EQ(swap.remote_address, 0x8000u);
  EXPECT_EQ(swap.rkey, 99u);
  EXPECT_EQ(swap.atomic.compare_add, 0x1111111122222222u);
  EXPECT_EQ(swap.atomic.swap, 0x3333333344444444u);
  EXPECT_EQ(View().Send(1).opcode, 6);
  EXPECT_EQ(View().Send(1).atomic.compare_add, 0x1111111122222222u);
}

TEST_F(QpInRts, InlineDataIsCopiedAtPosting) {
  char first[60];
  char second[40];
  memset(first, 'a', sizeof(first));
  memset(second, 'b', sizeof(second));
  // An empty element may have any address.
  ibv_sge sges[3] = {{reinterpret_cast<uint64_t>(first), 60, 0},
                     {0, 0, 0},
                     {reinterpret_cast<uint64_t>(second), 40, 0}};
  ibv_send_wr wr = {};
  wr.sg_list = sges;
  wr.num_sge = 3;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_INLINE;
  ASSERT_EQ(Post(qp_, wr), 0);
  memset(first, 'x', sizeof(first));
  const abi::SendWqe& wqe = View().Send(0);
  EXPECT_EQ(wqe.flags, abi::kWqeInline);
  EXPECT_EQ(wqe.num_sge, 0);
  EXPECT_EQ(wqe.inline_bytes, 100u);
  const std::string data(reinterpret_cast<const char*>(View().SendInline(0)), 100);
  EXPECT_EQ(data, std::string(60, 'a') + std::string(40, 'b'));
}

TEST_F(QpInRts, BadSendsAreRefusedAndLeaveTheQueueAlone) {
  char data[kMaxInline + 1] = {};
  ibv_sge sges[4] = {};
  sges[0] = {reinterpret_cast<uint64_t>(data), sizeof(data), 0};
  ibv_send_wr good = {};
  good.opcode = IBV_WR_SEND;
  good.sg_list = sges;
  good.num_sge = 1;

  ibv_send_wr wr = good;
  wr.num_sge = 4;
  EXPECT_EQ(Post(qp_, wr), EINVAL);
  wr = good;
  wr.num_sge = -1;
  EXPECT_EQ(Post(qp_, wr), EINVAL);
  wr = good;
  wr.send_flags = IBV_SEND_INLINE;
  EXPECT_EQ(Post(qp_, wr), EINVAL);
  wr = good;
  wr.opcode = IBV_WR_RDMA_READ;
  wr.send_flags = IBV_SEND_INLINE;
  EXPECT_EQ(Post(qp_, wr), EINVAL);
  for (const int opcode : {8, 10, 11, 31, 32, 77, -1}) {
    wr = good;
    wr.opcode = static_cast<ibv_wr_opcode>(opcode);
    EXPECT_EQ(Post(qp_, wr), EINVAL) << opcode;
  }
  EXPECT_EQ(Record().sq_producer, 0u);
  EXPECT_FALSE(DoorbellBit());
}

TEST_F(QpInRts, OfAListTheGoodBeginningIsPosted) {
  ibv_send_wr wrs[3] = {};
  for (int i = 0; i < 3; ++i) {
    wrs[i].opcode = IBV_WR_SEND;
    wrs[i].next = i < 2 ? &wrs[i + 1] : nullptr;
  }
  wrs[1].num_sge = 9;
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_send(qp_, wrs, &bad), EINVAL);
  EXPECT_EQ(bad, &wrs[1]);
  EXPECT_EQ(Record().sq_producer, 1u);
  EXPECT_TRUE(DoorbellBit());
}

TEST_F(QpInRts, SendRingsTheDoorbellAgainAfterTheDeviceCleared) {
  EXPECT_FALSE(DoorbellBit());
  ASSERT_EQ(PostSend(1), 0);
  EXPECT_EQ(Record().sq_producer, 1u);
  EXPECT_TRUE(DoorbellBit());
  ClearDoorbell();
  ASSERT_EQ(PostSend(2), 0);
  EXPECT_EQ(Record().sq_producer, 2u);
  EXPECT_TRUE(DoorbellBit());
}

TEST_F(QpInRts, SendWakesASleepingEngine) {
  for (const uint32_t mode : {abi::kEngineThreadPerCpu, abi::kEngineSpinning}) {
    device_.status()->mode = mode;
    device_.wake()->threads[0].armed = 1;
    ASSERT_EQ(PostSend(1), 0);
    EXPECT_EQ(device_.wake()->threads[0].armed, 0u) << mode;
  }
}

TEST_F(QpInRts, StreamingLeavesSleepersAloneWhileAnEngineThreadIsAwake) {
  device_.status()->thread_count = 2;
  device_.wake()->threads[0].armed = 1;
  device_.wake()->threads[1].armed = 1;
  device_.status()->cpu[1] = abi::kAnyCpu;
  ASSERT_EQ(PostSend(1), 0);
  ASSERT_EQ(PostSend(2), 0);
  // Whoever was woken is awake now; the other one sleeps.
  const uint32_t sleeping = device_.wake()->threads[0].armed + device_.wake()->threads[1].armed;
  EXPECT_EQ(sleeping, 1u);
  device_.status()->thread_count = 1;
  device_.wake()->threads[0].armed = 0;
}

TEST_F(QpInRts, FullSendQueueGivesEnomemUntilACompletionIsPolled) {
  for (uint32_t i = 0; i < kDepth; ++i) ASSERT_EQ(PostSend(i), 0);
  EXPECT_EQ(PostSend(99), ENOMEM);
  // One completion of the third WQE frees three.
  CompleteSend(2);
  EXPECT_EQ(PostSend(99), ENOMEM);
  ibv_wc wc;
  ASSERT_EQ(ibv_poll_cq(send_cq_, 1, &wc), 1);
  for (uint32_t i = 0; i < 3; ++i) ASSERT_EQ(PostSend(i), 0);
  EXPECT_EQ(PostSend(99), ENOMEM);
  EXPECT_EQ(Record().sq_producer, 7u);
}

TEST_F(QpInRts, FullReceiveQueueGivesEnomemUntilACompletionIsPolled) {
  for (uint32_t i = 0; i < kDepth; ++i) ASSERT_EQ(PostRecv(i), 0);
  EXPECT_EQ(PostRecv(99), ENOMEM);
  device_.Complete(recv_cq_->handle, {.qp = qp_->handle, .send = false, .wqe_index = 0});
  ibv_wc wc;
  ASSERT_EQ(ibv_poll_cq(recv_cq_, 1, &wc), 1);
  EXPECT_EQ(PostRecv(4), 0);
  EXPECT_EQ(PostRecv(99), ENOMEM);
}

TEST_F(QpInRts, LyingCompletionIndexFreesNothing) {
  for (uint32_t i = 0; i < kDepth; ++i) ASSERT_EQ(PostSend(i), 0);
  CompleteSend(1000);
  ibv_wc wc;
  ASSERT_EQ(ibv_poll_cq(send_cq_, 1, &wc), 1);
  EXPECT_EQ(PostSend(99), ENOMEM);
}

TEST_F(QpInRts, ReceiveIsEncodedAndNeedsNoDoorbell) {
  ibv_sge sges[2] = {{0x1000, 11, 1}, {0x2000, 22, 2}};
  ibv_recv_wr wr = {};
  wr.wr_id = 0x0102030405060708;
  wr.sg_list = sges;
  wr.num_sge = 2;
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_recv(qp_, &wr, &bad), 0);
  EXPECT_EQ(View().Recv(0).wr_id, wr.wr_id);
  EXPECT_EQ(View().Recv(0).num_sge, 2u);
  EXPECT_EQ(memcmp(View().RecvSges(0), sges, sizeof(sges)), 0);
  EXPECT_EQ(Record().rq_producer, 1u);
  EXPECT_FALSE(DoorbellBit());
  wr.num_sge = 3;
  EXPECT_EQ(ibv_post_recv(qp_, &wr, &bad), EINVAL);
  EXPECT_EQ(bad, &wr);
}

// The device moves the QP to ERR by itself; nobody told the application.
TEST_F(QpInRts, ReceiveInErrorStateRingsTheDoorbell) {
  Record().state = IBV_QPS_ERR;
  ASSERT_EQ(PostRecv(1), 0);
  EXPECT_TRUE(DoorbellBit());
}

TEST_F(QpInRts, StatesThatAllowPosting) {
  struct {
    ibv_qp_state state;
    int send;
    int recv;
  } const cases[] = {
      {IBV_QPS_RESET, EINVAL, EINVAL},
      {IBV_QPS_INIT, EINVAL, 0},
      {IBV_QPS_RTR, EINVAL, 0},
      {IBV_QPS_RTS, 0, 0},
      {IBV_QPS_SQD, 0, 0},
      {IBV_QPS_SQE, 0, 0},
      {IBV_QPS_ERR, 0, 0},
  };
  for (const auto& test : cases) {
    MoveTo(IBV_QPS_RESET);
    MoveTo(test.state);
    EXPECT_EQ(PostSend(1), test.send) << test.state;
    EXPECT_EQ(PostRecv(1), test.recv) << test.state;
  }
}

TEST_F(QpInRts, ResetEmptiesBothQueues) {
  for (uint32_t i = 0; i < kDepth; ++i) {
    ASSERT_EQ(PostSend(i), 0);
    ASSERT_EQ(PostRecv(i), 0);
  }
  MoveTo(IBV_QPS_RESET);
  EXPECT_EQ(Record().sq_producer, 0u);
  EXPECT_EQ(Record().rq_producer, 0u);
  MoveTo(IBV_QPS_RTS);
  for (uint32_t i = 0; i < kDepth; ++i) {
    EXPECT_EQ(PostSend(i), 0);
    EXPECT_EQ(PostRecv(i), 0);
  }
}

TEST_F(QpInRts, ModifySendsOnlyWhatTheMaskNames) {
  ibv_qp_attr attr;
  memset(&attr, 0xff, sizeof(attr));
  attr.qp_state = IBV_QPS_RTR;
  attr.dest_qp_num = 0x1234;
  attr.ah_attr = {};
  attr.ah_attr.is_global = 1;
  attr.ah_attr.grh.sgid_index = 1;
  attr.ah_attr.grh.dgid.raw[15] = 7;
  attr.ah_attr.port_num = 1;
  ASSERT_EQ(ibv_modify_qp(qp_, &attr, IBV_QP_STATE | IBV_QP_DEST_QPN | IBV_QP_AV | 1 << 25), 0);
  const auto request = device_.Last<abi::ModifyQpRequest>(abi::kCmdModifyQp);
  EXPECT_EQ(request.mask, static_cast<uint32_t>(IBV_QP_STATE | IBV_QP_DEST_QPN | IBV_QP_AV));
  abi::QpAttr expected = {};
  expected.state = IBV_QPS_RTR;
  expected.dest_qpn = 0x1234;
  expected.ah.is_global = 1;
  expected.ah.sgid_index = 1;
  expected.ah.dgid[15] = 7;
  expected.ah.port_num = 1;
  EXPECT_EQ(memcmp(&request.attr, &expected, sizeof(expected)), 0);
  EXPECT_EQ(qp_->state, IBV_QPS_RTR);
}

TEST_F(QpInRts, QueryGivesStateAndRealCapacities) {
  ibv_qp_attr attr;
  ibv_qp_init_attr init;
  ASSERT_EQ(ibv_query_qp(qp_, &attr, IBV_QP_STATE, &init), 0);
  EXPECT_EQ(attr.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(attr.dest_qp_num, 0x777u);
  EXPECT_EQ(attr.ah_attr.grh.sgid_index, 3);
  EXPECT_EQ(attr.cap.max_send_wr, kDepth);
  EXPECT_EQ(init.cap.max_inline_data, kMaxInline);
  EXPECT_EQ(init.qp_context, this);
  EXPECT_EQ(init.send_cq, send_cq_);
}

// ibv_qp_to_qp_ex() of every release 36 … 56 must say "no".
TEST_F(QpInRts, IsNoExtendedQp) { EXPECT_EQ(ibv_qp_to_qp_ex(qp_), nullptr); }

TEST_F(QpInRts, CreationPassesTypeAndReturnsTheDevicesErrno) {
  device_.FailNext(abi::kCmdCreateQp, EOPNOTSUPP);
  ibv_qp_init_attr attr = {};
  attr.send_cq = send_cq_;
  attr.recv_cq = recv_cq_;
  attr.cap = {1, 1, 1, 1, 0};
  attr.qp_type = IBV_QPT_UD;
  errno = 0;
  EXPECT_EQ(ibv_create_qp(pd_, &attr), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  EXPECT_EQ(device_.Last<abi::CreateQpRequest>(abi::kCmdCreateQp).type, 4u);
  attr.send_cq = nullptr;
  EXPECT_EQ(ibv_create_qp(pd_, &attr), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

}  // namespace
}  // namespace verbena::provider
