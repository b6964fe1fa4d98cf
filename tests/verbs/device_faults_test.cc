// SPDX-License-Identifier: Apache-2.0
//
// What fault rules of the device do to programs, and what the other end sees. Meanings of
// statuses and events: IBTA Vol 1, 11.6; of errors of calls: the manual pages.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr size_t kBytes = 256;

class FaultyDevice : public ::testing::Test {
 protected:
  FaultyDevice()
      : a_(),
        b_(EndOptions{.device = "verbena1"}),
        source_(a_.pd(), kBytes),
        target_(b_.pd(), kBytes) {
    ConnectPair(a_, b_, PathOptions());
  }
  void TearDown() override { EXPECT_EQ(VerbenaHere({"fault", "clear"}).status, 0); }

  void Add(const std::string& rule) {
    const Finished added = VerbenaHere({"fault", "add", rule});
    ASSERT_EQ(added.status, 0) << rule << ": " << added.output;
  }
  int PostWrite(uint64_t wr_id) {
    return a_.PostSend(RdmaWr(wr_id, IBV_WR_RDMA_WRITE, target_.address(), target_.rkey()),
                       {source_.sge(0, kBytes)});
  }
  ibv_wc Write(uint64_t wr_id = 1) {
    EXPECT_EQ(PostWrite(wr_id), 0);
    return PollOne(a_.send_cq());
  }
  // The next asynchronous event; -1: none within ten seconds.
  static int NextEvent(ibv_context* context) {
    pollfd ready = {context->async_fd, POLLIN, 0};
    ibv_async_event event;
    if (poll(&ready, 1, 10000) != 1 || ibv_get_async_event(context, &event) != 0) return -1;
    ibv_ack_async_event(&event);
    return event.event_type;
  }
  std::string QpnOf(const RcEnd& end) { return std::to_string(end.qp()->qp_num); }

  RcEnd a_, b_;
  Memory source_, target_;
};

TEST_F(FaultyDevice, ACompletionGetsAnotherStatusAndTheQpFails) {
  Add("complete status=REM_OP_ERR vendor_err=0x81 qpn=" + QpnOf(a_) + " nth=2");
  EXPECT_EQ(Write(1).status, IBV_WC_SUCCESS);
  const ibv_wc wc = Write(2);
  EXPECT_EQ(wc.status, IBV_WC_REM_OP_ERR);
  EXPECT_EQ(wc.vendor_err, 0x81u);
  EXPECT_EQ(a_.State(), IBV_QPS_ERR);
  EXPECT_EQ(b_.State(), IBV_QPS_RTS);  // The wire knows nothing of it.
  EXPECT_EQ(Write(3).status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(FaultHits(), (std::vector<int64_t>{1}));
}

TEST_F(FaultyDevice, WithKeepOnlyTheCompletionIsWrong) {
  Add("complete status=LOC_PROT_ERR qp=keep nth=1 qpn=" + QpnOf(a_));
  EXPECT_EQ(Write(1).status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(Write(2).status, IBV_WC_SUCCESS);
  EXPECT_EQ(a_.State(), IBV_QPS_RTS);
}

TEST_F(FaultyDevice, ALostCompletionIsMissingAndTheNextOneComes) {
  Add("lose_completion wr_id=1 qpn=" + QpnOf(a_));
  EXPECT_EQ(PostWrite(1), 0);
  EXPECT_EQ(Write(2).wr_id, 2u);
  ibv_wc wc;
  EXPECT_EQ(ibv_poll_cq(a_.send_cq(), 1, &wc), 0);
}

TEST_F(FaultyDevice, ADuplicateCompletionComesTwice) {
  Add("duplicate_completion nth=1 qpn=" + QpnOf(a_));
  EXPECT_EQ(Write(7).wr_id, 7u);
  EXPECT_EQ(PollOne(a_.send_cq()).wr_id, 7u);
  // The send queue is as it was: many more go through it.
  for (uint64_t wr = 8; wr < 200; ++wr) ASSERT_EQ(Write(wr).wr_id, wr);
}

TEST_F(FaultyDevice, ADelayedCompletionKeepsThoseBehindIt) {
  Add("delay_completion us=100000 nth=1 qpn=" + QpnOf(a_));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(PostWrite(1), 0);
  EXPECT_EQ(PostWrite(2), 0);
  EXPECT_EQ(PollOne(a_.send_cq()).wr_id, 1u);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(100));
  EXPECT_EQ(PollOne(a_.send_cq()).wr_id, 2u);
}

TEST_F(FaultyDevice, AnOverrunEndsTheCqAndItsQps) {
  Add("cq_overrun nth=2 qpn=" + QpnOf(a_));
  EXPECT_EQ(Write(1).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PostWrite(2), 0);
  EXPECT_EQ(NextEvent(a_.context()), IBV_EVENT_CQ_ERR);
  EXPECT_EQ(NextEvent(a_.context()), IBV_EVENT_QP_FATAL);
  EXPECT_EQ(a_.State(), IBV_QPS_ERR);
}

TEST_F(FaultyDevice, QpsGoToErrorByRule) {
  Add("qp_error qpn=" + QpnOf(a_));
  EXPECT_EQ(NextEvent(a_.context()), IBV_EVENT_QP_FATAL);
  EXPECT_EQ(a_.State(), IBV_QPS_ERR);
  EXPECT_EQ(b_.State(), IBV_QPS_RTS);
  EXPECT_EQ(Write().status, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(FaultyDevice, EveryEventCanBeReported) {
  const std::string mine = " qpn=" + QpnOf(a_);
  const struct {
    const char* name;
    int type;
  } kEvents[] = {{"CQ_ERR", IBV_EVENT_CQ_ERR},
                 {"QP_FATAL", IBV_EVENT_QP_FATAL},
                 {"QP_REQ_ERR", IBV_EVENT_QP_REQ_ERR},
                 {"QP_ACCESS_ERR", IBV_EVENT_QP_ACCESS_ERR},
                 {"COMM_EST", IBV_EVENT_COMM_EST},
                 {"SQ_DRAINED", IBV_EVENT_SQ_DRAINED},
                 {"PATH_MIG", IBV_EVENT_PATH_MIG},
                 {"PATH_MIG_ERR", IBV_EVENT_PATH_MIG_ERR},
                 {"QP_LAST_WQE_REACHED", IBV_EVENT_QP_LAST_WQE_REACHED}};
  for (const auto& [name, type] : kEvents) {
    Add(std::string("event type=") + name + mine);
    EXPECT_EQ(NextEvent(a_.context()), type) << name;
  }
  ibv_srq_init_attr init = {nullptr, {16, 1, 0}};
  const Owned<ibv_srq> srq(ibv_create_srq(a_.pd(), &init));
  const RcEnd on_srq(a_, EndOptions{.srq = srq.get()});
  for (const auto& [name, type] : {std::pair{"SRQ_ERR", IBV_EVENT_SRQ_ERR},
                                   {"SRQ_LIMIT_REACHED", IBV_EVENT_SRQ_LIMIT_REACHED}}) {
    Add(std::string("event type=") + name + " qpn=" + QpnOf(on_srq));
    EXPECT_EQ(NextEvent(a_.context()), type) << name;
  }
  for (const auto& [name, type] : {std::pair{"PORT_ERR", IBV_EVENT_PORT_ERR},
                                   {"PORT_ACTIVE", IBV_EVENT_PORT_ACTIVE},
                                   {"LID_CHANGE", IBV_EVENT_LID_CHANGE},
                                   {"PKEY_CHANGE", IBV_EVENT_PKEY_CHANGE},
                                   {"SM_CHANGE", IBV_EVENT_SM_CHANGE},
                                   {"CLIENT_REREGISTER", IBV_EVENT_CLIENT_REREGISTER},
                                   {"GID_CHANGE", IBV_EVENT_GID_CHANGE},
                                   {"DEVICE_FATAL", IBV_EVENT_DEVICE_FATAL}}) {
    Add(std::string("event dev=verbena0 type=") + name);
    EXPECT_EQ(NextEvent(a_.context()), type) << name;
  }
  EXPECT_EQ(Write().status, IBV_WC_SUCCESS);  // They were words only.
}

TEST_F(FaultyDevice, TheNthRegistrationFails) {
  Add("fail verb=reg_mr errno=ENOMEM nth=2");
  char memory[64];
  ibv_mr* first = ibv_reg_mr(a_.pd(), memory, sizeof memory, 0);
  EXPECT_NE(first, nullptr);
  errno = 0;
  EXPECT_EQ(ibv_reg_mr(a_.pd(), memory, sizeof memory, 0), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  ibv_mr* third = ibv_reg_mr(a_.pd(), memory, sizeof memory, 0);
  EXPECT_NE(third, nullptr);
  EXPECT_EQ(ibv_dereg_mr(first), 0);
  EXPECT_EQ(ibv_dereg_mr(third), 0);
}

TEST_F(FaultyDevice, VerbsFailByName) {
  Add("fail verb=alloc_pd errno=ENOMEM count=1");
  errno = 0;
  EXPECT_EQ(ibv_alloc_pd(a_.context()), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  Add("fail verb=create_cq errno=EMFILE count=1");
  errno = 0;
  EXPECT_EQ(ibv_create_cq(a_.context(), 1, nullptr, nullptr, 0), nullptr);
  EXPECT_EQ(errno, EMFILE);
  Add("fail verb=modify_qp errno=EBUSY count=1");
  EXPECT_EQ(a_.ToState(IBV_QPS_ERR), EBUSY);
  Add("fail verb=query_port errno=EIO count=1");
  ibv_port_attr port;
  EXPECT_EQ(ibv_query_port(a_.context(), 1, &port), EIO);
  Add("fail verb=open_device errno=ENODEV dev=verbena0 count=1");
  EXPECT_EQ(ibv_open_device(a_.context()->device), nullptr);
  ibv_context* again = ibv_open_device(a_.context()->device);
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(ibv_close_device(again), 0);
  EXPECT_EQ(Write().status, IBV_WC_SUCCESS);
}

TEST_F(FaultyDevice, PostingFailsAndPostsNothing) {
  Add("fail verb=post_send errno=ENOMEM nth=2 qpn=" + QpnOf(a_));
  Add("fail verb=post_recv errno=EINVAL count=1 qpn=" + QpnOf(b_));
  EXPECT_EQ(Write(1).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PostWrite(2), ENOMEM);
  EXPECT_EQ(Write(3).wr_id, 3u);
  EXPECT_EQ(b_.PostRecv(1, {target_.sge(0, kBytes)}), EINVAL);
  EXPECT_EQ(b_.PostRecv(2, {target_.sge(0, kBytes)}), 0);
  EXPECT_EQ(a_.PostSend(SendWr(4), {source_.sge(0, kBytes)}), 0);
  EXPECT_EQ(PollOne(b_.recv_cq()).wr_id, 2u);
  EXPECT_EQ(PollOne(a_.send_cq()).wr_id, 4u);
}

TEST_F(FaultyDevice, PollingAndArmingFail) {
  Add("fail verb=poll_cq errno=EIO count=1");
  ibv_wc wc;
  EXPECT_LT(ibv_poll_cq(a_.send_cq(), 1, &wc), 0);
  EXPECT_EQ(ibv_poll_cq(a_.send_cq(), 1, &wc), 0);
  Add("fail verb=req_notify_cq errno=EIO count=1");
  EXPECT_EQ(ibv_req_notify_cq(a_.send_cq(), 0), EIO);
  EXPECT_EQ(ibv_req_notify_cq(a_.send_cq(), 0), 0);
}

int DeviceCount() {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  ibv_free_device_list(list);
  return count;
}

TEST_F(FaultyDevice, ADeviceThatIsPulledOutIsGoneAndComesBack) {
  const int before = DeviceCount();
  ASSERT_EQ(PostWrite(1), 0);
  EXPECT_EQ(PollOne(a_.send_cq()).status, IBV_WC_SUCCESS);
  ASSERT_EQ(a_.PostRecv(5, {source_.sge(0, kBytes)}), 0);
  Add("remove dev=verbena0");
  EXPECT_EQ(NextEvent(a_.context()), IBV_EVENT_DEVICE_FATAL);
  // What was posted is flushed, calls fail, nobody finds it.
  EXPECT_EQ(PollOne(a_.recv_cq()).status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(PostWrite(2), EIO);
  ibv_port_attr port;
  EXPECT_NE(ibv_query_port(a_.context(), 1, &port), 0);
  EXPECT_EQ(ibv_open_device(a_.context()->device), nullptr);
  EXPECT_EQ(DeviceCount(), before - 1);
  EXPECT_THAT(VerbenaHere({"status"}).output, HasSubstr("REMOVED"));
  // The other one works.
  ibv_pd* pd = ibv_alloc_pd(b_.context());
  EXPECT_NE(pd, nullptr);
  EXPECT_EQ(ibv_dealloc_pd(pd), 0);

  EXPECT_EQ(VerbenaHere({"fault", "clear"}).status, 0);
  EXPECT_EQ(DeviceCount(), before);
  ibv_context* again = ibv_open_device(a_.context()->device);
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(ibv_query_port(again, 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(ibv_close_device(again), 0);
}

TEST_F(FaultyDevice, AStalledNicAnswersLate) {
  // It stalls from the moment when the rule is added.
  const auto start = std::chrono::steady_clock::now();
  Add("stall dev=verbena1 us=300000");
  EXPECT_EQ(Write().status, IBV_WC_SUCCESS);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(300));
}

TEST_F(FaultyDevice, SlowDmaIsALowerBoundOfTheTime) {
  Add("slow_dma dev=verbena1 us=5000");
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t wr = 1; wr <= 20; ++wr) ASSERT_EQ(Write(wr).status, IBV_WC_SUCCESS);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(19 * 5));
}

TEST_F(FaultyDevice, AForgedNakFailsTheRequestThatArrived) {
  Add("forge kind=nak_access opcode=write nth=1 sqpn=" + QpnOf(a_));
  EXPECT_EQ(Write().status, IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(b_.State(), IBV_QPS_RTS);
}

TEST_F(FaultyDevice, AGhostAckCompletesWhatNeverArrived) {
  target_.data()[0] = 1;
  source_.data()[0] = 9;
  Add("forge kind=ack opcode=write nth=1 sqpn=" + QpnOf(a_));
  Add("drop opcode=write sqpn=" + QpnOf(a_));
  EXPECT_EQ(Write().status, IBV_WC_SUCCESS);
  EXPECT_EQ(target_.data()[0], 1);
}

ibv_gid GidOf(ibv_context* context, int index) {
  ibv_gid gid = {};
  EXPECT_EQ(ibv_query_gid(context, 1, index, &gid), 0);
  return gid;
}
std::string TextOf(const ibv_gid& gid) {
  char text[INET6_ADDRSTRLEN];
  return inet_ntop(AF_INET6, gid.raw, text, sizeof(text));
}

TEST_F(FaultyDevice, AGidGoesAndComesBack) {
  const ibv_gid before = GidOf(a_.context(), 1);
  Add("gid_change dev=verbena0 index=1");
  EXPECT_EQ(NextEvent(a_.context()), IBV_EVENT_GID_CHANGE);
  EXPECT_EQ(TextOf(GidOf(a_.context(), 1)), "::");
  EXPECT_THAT(VerbenaHere({"status", "--json"}).output, Not(HasSubstr("127.88.0.1\"")));
  // What is connected goes on; what is not finds no such address.
  EXPECT_EQ(Write().status, IBV_WC_SUCCESS);
  RcEnd fresh;
  ASSERT_EQ(fresh.ToInit(), 0);
  EXPECT_EQ(fresh.ToRtr(b_.address()), EINVAL);
  RcEnd peer(EndOptions{.device = "verbena1"});
  ASSERT_EQ(peer.ToInit(), 0);
  PeerAddress gone = a_.address();
  std::memcpy(gone.gid.raw, before.raw, sizeof(before.raw));
  EXPECT_NE(peer.ToRtr(gone), 0);

  EXPECT_EQ(VerbenaHere({"fault", "clear"}).status, 0);
  EXPECT_EQ(NextEvent(a_.context()), IBV_EVENT_GID_CHANGE);
  EXPECT_EQ(TextOf(GidOf(a_.context(), 1)), TextOf(before));
  RcEnd again;
  EXPECT_NO_THROW(ConnectPair(again, peer));
}

TEST_F(FaultyDevice, AGidBecomesAnotherForATime) {
  const ibv_gid before = GidOf(a_.context(), 1);
  EXPECT_EQ(TextOf(GidOf(a_.context(), 3)), "::");
  Add("gid_change dev=verbena0 index=3 gid=10.7.7.7 us=2000000");
  EXPECT_EQ(NextEvent(a_.context()), IBV_EVENT_GID_CHANGE);
  EXPECT_EQ(TextOf(GidOf(a_.context(), 3)), "::ffff:10.7.7.7");
  {
    RcEnd c(EndOptions{.gid_index = 3});
    RcEnd d(EndOptions{.device = "verbena1"});
    ConnectPair(c, d);
    Memory memory(c.pd(), kBytes), target(d.pd(), kBytes);
    ASSERT_EQ(c.PostSend(RdmaWr(5, IBV_WR_RDMA_WRITE, target.address(), target.rkey()),
                         {memory.sge(0, kBytes)}),
              0);
    EXPECT_EQ(PollOne(c.send_cq()).status, IBV_WC_SUCCESS);
  }
  EXPECT_EQ(NextEvent(a_.context()), IBV_EVENT_GID_CHANGE);
  EXPECT_EQ(TextOf(GidOf(a_.context(), 3)), "::");
  EXPECT_EQ(TextOf(GidOf(a_.context(), 1)), TextOf(before));
  pollfd quiet = {b_.context()->async_fd, POLLIN, 0};
  EXPECT_EQ(poll(&quiet, 1, 0), 0);  // The other NIC's table is as it was.
}

TEST_F(FaultyDevice, TheTraceAndTheListTellOfHits) {
  Add("complete status=REM_OP_ERR nth=1 qpn=" + QpnOf(a_));
  EXPECT_EQ(Write().status, IBV_WC_REM_OP_ERR);
  EXPECT_THAT(VerbenaHere({"trace", "--json", "--qp", QpnOf(a_)}).output,
              HasSubstr("device_fault"));
  EXPECT_THAT(VerbenaHere({"fault", "list"}).output, HasSubstr("complete status=REM_OP_ERR"));
}

}  // namespace
}  // namespace verbena::testing
