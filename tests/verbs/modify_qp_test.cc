// SPDX-License-Identifier: Apache-2.0
//
// ibv_modify_qp by the specification's table for RC QPs, through the public interface: required
// and optional attributes of each transition, transitions that do not exist, wrong values. What is
// refused has no effect. Also posting in each state.
#include <gtest/gtest.h>
#include <sched.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

struct Transition {
  ibv_qp_state from, to;
  int required, optional;  // besides IBV_QP_STATE
};

// From the table for RC.
constexpr int kMigration = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;
constexpr Transition kTransitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_ALT_PATH},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | kMigration},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | kMigration},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0,
     IBV_QP_AV | IBV_QP_PORT | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
         IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_ACCESS_FLAGS |
         IBV_QP_PKEY_INDEX | IBV_QP_MIN_RNR_TIMER | kMigration},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | kMigration},
};

constexpr ibv_qp_state kStates[] = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR,
                                    IBV_QPS_RTS,   IBV_QPS_SQD,  IBV_QPS_ERR};
const char* Name(ibv_qp_state state) {
  static constexpr const char* kNames[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
  return kNames[state];
}

// The library of Debian 12 knows these bits.
constexpr int kAttributeBits[] = {
    IBV_QP_CUR_STATE,
    IBV_QP_EN_SQD_ASYNC_NOTIFY,
    IBV_QP_ACCESS_FLAGS,
    IBV_QP_PKEY_INDEX,
    IBV_QP_PORT,
    IBV_QP_AV,
    IBV_QP_PATH_MTU,
    IBV_QP_TIMEOUT,
    IBV_QP_RETRY_CNT,
    IBV_QP_RNR_RETRY,
    IBV_QP_RQ_PSN,
    IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER,
    IBV_QP_SQ_PSN,
    IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_DEST_QPN,
    IBV_QP_ALT_PATH,
    IBV_QP_PATH_MIG_STATE,
};

class ModifyQp : public ::testing::Test {
 protected:
  // A new QP in `state`.
  void Enter(ibv_qp_state state) {
    end_ = std::make_unique<RcEnd>();
    if (state == IBV_QPS_RESET) return;
    ASSERT_EQ(end_->ToInit(), 0);
    if (state == IBV_QPS_INIT) return;
    if (state == IBV_QPS_ERR) {
      ASSERT_EQ(end_->ToState(IBV_QPS_ERR), 0);
      return;
    }
    ASSERT_EQ(end_->ToRtr(end_->address()), 0);
    if (state == IBV_QPS_RTR) return;
    ASSERT_EQ(end_->ToRts(), 0);
    if (state == IBV_QPS_RTS) return;
    ASSERT_EQ(end_->ToState(IBV_QPS_SQD), 0);
    for (int i = 0; i < 200 && end_->State() != IBV_QPS_SQD; ++i) usleep(1000);
  }

  // Good values for every attribute.
  ibv_qp_attr Values(ibv_qp_state from, ibv_qp_state to) const {
    ibv_qp_attr attr = {};
    attr.qp_state = to;
    attr.cur_qp_state = from;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    attr.port_num = 1;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.sgid_index = 1;
    attr.ah_attr.grh.hop_limit = 64;
    attr.ah_attr.grh.dgid = end_->address().gid;
    attr.alt_ah_attr = attr.ah_attr;
    attr.alt_port_num = 1;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = end_->qp()->qp_num;
    attr.timeout = 14;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = 1;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = 12;
    return attr;
  }

  int Modify(ibv_qp_attr attr, int mask) { return ibv_modify_qp(end_->qp(), &attr, mask); }

  std::unique_ptr<RcEnd> end_;
};

TEST_F(ModifyQp, TakesExactlyTheAttributesOfTheTable) {
  for (const Transition& t : kTransitions) {
    SCOPED_TRACE(std::string(Name(t.from)) + " to " + Name(t.to));
    Enter(t.from);
    const ibv_qp_attr values = Values(t.from, t.to);
    for (const int bit : kAttributeBits) {
      const int all = IBV_QP_STATE | t.required;
      if ((t.required & bit) != 0) {
        EXPECT_EQ(Modify(values, all & ~bit), EINVAL) << "without bit " << std::hex << bit;
      } else if ((t.optional & bit) == 0) {
        EXPECT_EQ(Modify(values, all | bit), EINVAL) << "with bit " << std::hex << bit;
      } else {
        continue;
      }
      ASSERT_EQ(end_->State(), t.from) << "a refused call changed the state";
    }
    EXPECT_EQ(Modify(values, IBV_QP_STATE | t.required | t.optional), 0);
    for (int i = 0; i < 200 && end_->State() != t.to; ++i) usleep(1000);
    EXPECT_EQ(end_->State(), t.to);
  }
}

TEST_F(ModifyQp, RefusesTransitionsThatDoNotExist) {
  for (const ibv_qp_state from : kStates) {
    Enter(from);
    for (const ibv_qp_state to : kStates) {
      if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) continue;
      bool exists = false;
      for (const Transition& t : kTransitions) exists |= t.from == from && t.to == to;
      if (exists) continue;
      // With whatever attributes the target state may need.
      for (const Transition& t : kTransitions) {
        if (t.to != to) continue;
        EXPECT_EQ(Modify(Values(from, to), IBV_QP_STATE | t.required), EINVAL)
            << Name(from) << " to " << Name(to);
      }
      ASSERT_EQ(end_->State(), from);
    }
  }
}

TEST_F(ModifyQp, ResetAndErrorCanBeReachedFromEveryState) {
  for (const ibv_qp_state from : kStates) {
    for (const ibv_qp_state to : {IBV_QPS_RESET, IBV_QPS_ERR}) {
      Enter(from);
      if (from == IBV_QPS_RESET && to == IBV_QPS_ERR) continue;  // Differs between devices.
      EXPECT_EQ(end_->ToState(to), 0) << Name(from) << " to " << Name(to);
      EXPECT_EQ(end_->State(), to);
    }
  }
}

TEST_F(ModifyQp, RefusesWrongValuesWithoutEffect) {
  struct Wrong {
    const char* what;
    ibv_qp_state from, to;
    void (*spoil)(ibv_qp_attr*);
  };
  const Wrong cases[] = {
      {"port 2", IBV_QPS_RESET, IBV_QPS_INIT, [](ibv_qp_attr* a) { a->port_num = 2; }},
      {"port 0", IBV_QPS_RESET, IBV_QPS_INIT, [](ibv_qp_attr* a) { a->port_num = 0; }},
      {"pkey index", IBV_QPS_RESET, IBV_QPS_INIT, [](ibv_qp_attr* a) { a->pkey_index = 1; }},
      {"MTU 0", IBV_QPS_INIT, IBV_QPS_RTR,
       [](ibv_qp_attr* a) { a->path_mtu = static_cast<ibv_mtu>(0); }},
      {"MTU 6", IBV_QPS_INIT, IBV_QPS_RTR,
       [](ibv_qp_attr* a) { a->path_mtu = static_cast<ibv_mtu>(6); }},
      {"max_dest_rd_atomic", IBV_QPS_INIT, IBV_QPS_RTR,
       [](ibv_qp_attr* a) { a->max_dest_rd_atomic = 17; }},
      {"RNR timer", IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr* a) { a->min_rnr_timer = 32; }},
      {"sgid_index empty", IBV_QPS_INIT, IBV_QPS_RTR,
       [](ibv_qp_attr* a) { a->ah_attr.grh.sgid_index = 9; }},
      {"sgid_index", IBV_QPS_INIT, IBV_QPS_RTR,
       [](ibv_qp_attr* a) { a->ah_attr.grh.sgid_index = 200; }},
      {"AH port", IBV_QPS_INIT, IBV_QPS_RTR, [](ibv_qp_attr* a) { a->ah_attr.port_num = 3; }},
      {"retry count", IBV_QPS_RTR, IBV_QPS_RTS, [](ibv_qp_attr* a) { a->retry_cnt = 8; }},
      {"RNR retry", IBV_QPS_RTR, IBV_QPS_RTS, [](ibv_qp_attr* a) { a->rnr_retry = 8; }},
      {"timeout", IBV_QPS_RTR, IBV_QPS_RTS, [](ibv_qp_attr* a) { a->timeout = 32; }},
      {"max_rd_atomic", IBV_QPS_RTR, IBV_QPS_RTS, [](ibv_qp_attr* a) { a->max_rd_atomic = 17; }},
  };
  for (const Wrong& c : cases) {
    Enter(c.from);
    int required = 0;
    for (const Transition& t : kTransitions) {
      if (t.from == c.from && t.to == c.to) required = t.required;
    }
    ibv_qp_attr values = Values(c.from, c.to);
    c.spoil(&values);
    EXPECT_EQ(Modify(values, IBV_QP_STATE | required), EINVAL) << c.what;
    EXPECT_EQ(end_->State(), c.from) << c.what;
    // A good call still works.
    EXPECT_EQ(Modify(Values(c.from, c.to), IBV_QP_STATE | required), 0) << c.what;
  }
}

TEST_F(ModifyQp, RefusesAWrongCurrentState) {
  Enter(IBV_QPS_RTS);
  ibv_qp_attr values = Values(IBV_QPS_SQD, IBV_QPS_RTS);
  EXPECT_EQ(Modify(values, IBV_QP_STATE | IBV_QP_CUR_STATE), EINVAL);
  EXPECT_EQ(end_->State(), IBV_QPS_RTS);
}

TEST_F(ModifyQp, QueryGivesBackWhatWasSet) {
  Enter(IBV_QPS_INIT);
  PathOptions path;
  path.mtu = IBV_MTU_2048;
  path.timeout = 13;
  path.retry_cnt = 5;
  path.rnr_retry = 3;
  path.min_rnr_timer = 17;
  path.rd_atomic = 9;
  PeerAddress peer = end_->address();
  peer.psn = 0x123456;
  peer.qpn = 0x654321;
  ASSERT_EQ(end_->ToRtr(peer, path), 0);
  ASSERT_EQ(end_->ToRts(path), 0);
  ibv_qp_attr attr = {};
  ibv_qp_init_attr init = {};
  ASSERT_EQ(ibv_query_qp(end_->qp(), &attr, 0xfffff, &init), 0);
  EXPECT_EQ(attr.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(attr.cur_qp_state, IBV_QPS_RTS);
  EXPECT_EQ(attr.path_mtu, IBV_MTU_2048);
  EXPECT_EQ(attr.timeout, 13);
  EXPECT_EQ(attr.retry_cnt, 5);
  EXPECT_EQ(attr.rnr_retry, 3);
  EXPECT_EQ(attr.min_rnr_timer, 17);
  EXPECT_EQ(attr.max_rd_atomic, 9);
  EXPECT_EQ(attr.max_dest_rd_atomic, 9);
  EXPECT_EQ(attr.dest_qp_num, 0x654321u);
  EXPECT_EQ(attr.rq_psn, 0x123456u);
  EXPECT_EQ(attr.sq_psn, end_->address().psn);
  EXPECT_EQ(attr.port_num, 1);
  EXPECT_EQ(attr.pkey_index, 0);
  EXPECT_EQ(attr.qp_access_flags, kAllAccess & ~static_cast<unsigned>(IBV_ACCESS_LOCAL_WRITE));
  EXPECT_EQ(attr.ah_attr.is_global, 1);
  EXPECT_EQ(attr.ah_attr.grh.sgid_index, 1);
  EXPECT_EQ(memcmp(&attr.ah_attr.grh.dgid, &peer.gid, 16), 0);
}

TEST_F(ModifyQp, AQpWorksAgainAfterReset) {
  RcEnd a, b;
  Memory source(a.pd(), 4096), target(b.pd(), 4096);
  for (uint64_t round = 0; round < 5; ++round) {
    ConnectPair(a, b);
    FillPattern(source.bytes(), round);
    ASSERT_EQ(b.PostRecv(round, {target.sge(0, 4096)}), 0);
    ASSERT_EQ(b.PostRecv(77, {target.sge(0, 4096)}), 0);  // Thrown away by RESET.
    ASSERT_EQ(a.PostSend(SendWr(round), {source.sge(0, 4096)}), 0);
    EXPECT_EQ(PollOne(a.send_cq()).wr_id, round);
    EXPECT_EQ(PollOne(b.recv_cq()).wr_id, round);
    EXPECT_EQ(PatternMismatch(target.bytes(), round), std::nullopt);
    ASSERT_EQ(a.ToState(IBV_QPS_RESET), 0);
    ASSERT_EQ(b.ToState(IBV_QPS_RESET), 0);
    EXPECT_TRUE(StaysEmpty(b.recv_cq(), Milliseconds(5)));
  }
}

class PostIn : public ModifyQp {};

TEST_F(PostIn, ResetRefusesBoth) {
  Enter(IBV_QPS_RESET);
  EXPECT_EQ(end_->PostSend(SendWr(1)), EINVAL);
  EXPECT_EQ(end_->PostRecv(1), EINVAL);
}

TEST_F(PostIn, InitAndRtrTakeReceivesOnly) {
  for (const ibv_qp_state state : {IBV_QPS_INIT, IBV_QPS_RTR}) {
    Enter(state);
    EXPECT_EQ(end_->PostSend(SendWr(1)), EINVAL) << Name(state);
    EXPECT_EQ(end_->PostRecv(1), 0) << Name(state);
  }
}

TEST_F(PostIn, ErrorFlushesBoth) {
  Enter(IBV_QPS_ERR);
  for (uint64_t i = 1; i <= 3; ++i) {
    EXPECT_EQ(end_->PostSend(SendWr(i, IBV_WR_SEND, 0)), 0);
    EXPECT_EQ(end_->PostRecv(10 + i), 0);
  }
  for (uint64_t i = 1; i <= 3; ++i) {
    const ibv_wc sent = PollOne(end_->send_cq());
    EXPECT_EQ(sent.wr_id, i);
    EXPECT_EQ(sent.status, IBV_WC_WR_FLUSH_ERR);
    const ibv_wc received = PollOne(end_->recv_cq());
    EXPECT_EQ(received.wr_id, 10 + i);
    EXPECT_EQ(received.status, IBV_WC_WR_FLUSH_ERR);
  }
}

TEST_F(PostIn, ErrorFlushesWhatWasPostedBeforeInOrder) {
  Enter(IBV_QPS_INIT);
  for (uint64_t i = 0; i < 10; ++i) ASSERT_EQ(end_->PostRecv(i), 0);
  ASSERT_EQ(end_->ToState(IBV_QPS_ERR), 0);
  for (uint64_t i = 0; i < 10; ++i) {
    const ibv_wc wc = PollOne(end_->recv_cq());
    EXPECT_EQ(wc.wr_id, i);
    EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
  }
  EXPECT_TRUE(StaysEmpty(end_->recv_cq(), Milliseconds(10)));
}

TEST_F(PostIn, SendQueueDrainKeepsNewRequestsUntilRts) {
  RcEnd a, b;
  ConnectPair(a, b);
  Memory source(a.pd(), 64), target(b.pd(), 64);
  memset(source.data(), 0x5a, 64);
  ASSERT_EQ(a.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, target.address(), target.rkey()),
                       {source.sge(0, 64)}),
            0);
  // SQD finishes what has been begun (IBTA Vol 1 10.3.1), so it must have been.
  const auto* landed = reinterpret_cast<const volatile uint8_t*>(target.data());
  const auto end = std::chrono::steady_clock::now() + Milliseconds(5000);
  while (*landed != 0x5a && std::chrono::steady_clock::now() < end) sched_yield();
  ASSERT_EQ(*landed, 0x5a);
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_SQD;
  attr.en_sqd_async_notify = 1;
  ASSERT_EQ(ibv_modify_qp(a.qp(), &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
  EXPECT_EQ(PollOne(a.send_cq()).wr_id, 1u);
  const auto event = NextAsyncEvent(a.context(), Milliseconds(5000));
  ASSERT_TRUE(event);
  EXPECT_EQ(event->event_type, IBV_EVENT_SQ_DRAINED);
  EXPECT_EQ(event->element.qp, a.qp());
  ASSERT_EQ(a.PostSend(RdmaWr(2, IBV_WR_RDMA_WRITE, target.address(), target.rkey()),
                       {source.sge(0, 64)}),
            0);
  EXPECT_TRUE(StaysEmpty(a.send_cq(), Milliseconds(50)));
  ASSERT_EQ(a.ToState(IBV_QPS_RTS), 0);
  const ibv_wc wc = PollOne(a.send_cq());
  EXPECT_EQ(wc.wr_id, 2u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
}

}  // namespace
}  // namespace verbena::testing
