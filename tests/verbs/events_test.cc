// SPDX-License-Identifier: Apache-2.0
//
// Completion channels and async events: none is lost, none is invented, solicited means solicited.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

class Events : public ::testing::Test {
 protected:
  void SetUp() override {
    EndOptions options;
    options.channel = true;
    a_ = std::make_unique<RcEnd>(options);
    options.device = "verbena1";
    b_ = std::make_unique<RcEnd>(options);
    ConnectPair(*a_, *b_);
  }
  std::unique_ptr<RcEnd> a_, b_;
};

TEST_F(Events, AnUnarmedCqSendsNone) {
  ASSERT_EQ(b_->PostRecv(1), 0);
  ASSERT_EQ(a_->PostSend(SendWr(1)), 0);
  PollOne(b_->recv_cq());
  EXPECT_EQ(NextCqEvent(b_->channel(), Milliseconds(30)), nullptr);
}

TEST_F(Events, AnArmedCqSendsOneForManyCompletions) {
  ASSERT_EQ(ibv_req_notify_cq(b_->recv_cq(), 0), 0);
  for (uint64_t i = 0; i < 5; ++i) {
    ASSERT_EQ(b_->PostRecv(i), 0);
    ASSERT_EQ(a_->PostSend(SendWr(i)), 0);
  }
  for (int i = 0; i < 5; ++i) PollOne(b_->recv_cq());
  EXPECT_EQ(NextCqEvent(b_->channel(), Milliseconds(5000)), b_->recv_cq());
  EXPECT_EQ(NextCqEvent(b_->channel(), Milliseconds(30)), nullptr);
}

TEST_F(Events, ArmingForSolicitedIgnoresOrdinaryOnes) {
  ASSERT_EQ(ibv_req_notify_cq(b_->recv_cq(), 1), 0);
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(b_->PostRecv(i), 0);
  ASSERT_EQ(a_->PostSend(SendWr(1)), 0);
  PollOne(b_->recv_cq());
  EXPECT_EQ(NextCqEvent(b_->channel(), Milliseconds(30)), nullptr);
  ASSERT_EQ(a_->PostSend(SendWr(2, IBV_WR_SEND, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED)), 0);
  EXPECT_EQ(NextCqEvent(b_->channel(), Milliseconds(5000)), b_->recv_cq());
  PollOne(b_->recv_cq());
}

TEST_F(Events, SolicitedHoldsForTheLastPacketOfALongMessage) {
  Memory source(a_->pd(), 20000), target(b_->pd(), 20000);
  ASSERT_EQ(ibv_req_notify_cq(b_->recv_cq(), 1), 0);
  ASSERT_EQ(b_->PostRecv(1, {target.sge(0, 20000)}), 0);
  ASSERT_EQ(a_->PostSend(SendWr(2, IBV_WR_SEND, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED),
                         {source.sge(0, 20000)}),
            0);
  EXPECT_EQ(NextCqEvent(b_->channel(), Milliseconds(5000)), b_->recv_cq());
  PollOne(b_->recv_cq());
}

TEST_F(Events, AnErrorCompletionCountsAsSolicited) {
  ASSERT_EQ(ibv_req_notify_cq(b_->recv_cq(), 1), 0);
  ASSERT_EQ(b_->PostRecv(1), 0);
  ASSERT_EQ(b_->ToState(IBV_QPS_ERR), 0);
  EXPECT_EQ(NextCqEvent(b_->channel(), Milliseconds(5000)), b_->recv_cq());
  EXPECT_EQ(PollOne(b_->recv_cq()).status, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(Events, SendCompletionsSendThemToo) {
  ASSERT_EQ(ibv_req_notify_cq(a_->send_cq(), 0), 0);
  ASSERT_EQ(b_->PostRecv(1), 0);
  ASSERT_EQ(a_->PostSend(SendWr(1)), 0);
  EXPECT_EQ(NextCqEvent(a_->channel(), Milliseconds(5000)), a_->send_cq());
  EXPECT_EQ(PollOne(a_->send_cq()).status, IBV_WC_SUCCESS);
}

// The sleep that everybody writes: arm, poll once more, wait. A lost event hangs it.
void WaitAndPoll(RcEnd& end, ibv_cq* cq, uint64_t expected) {
  for (;;) {
    ibv_wc wc = {};
    int count = ibv_poll_cq(cq, 1, &wc);
    if (count == 0) {
      Require(ibv_req_notify_cq(cq, 0) == 0, "ibv_req_notify_cq");
      count = ibv_poll_cq(cq, 1, &wc);
      if (count == 0) {
        Require(NextCqEvent(end.channel(), Milliseconds(10000)) != nullptr, "event lost");
        continue;
      }
    }
    if (count != 1 || wc.status != IBV_WC_SUCCESS || wc.wr_id != expected) {
      throw std::runtime_error("expected wr " + std::to_string(expected) + ", got " + Describe(wc));
    }
    return;
  }
}

TEST_F(Events, ThousandsOfSleepsLoseNoEvent) {
  constexpr uint64_t kRounds = 3000;
  std::string problem;
  for (uint64_t i = 0; i < 2; ++i) {
    ASSERT_EQ(a_->PostRecv(i), 0);
    ASSERT_EQ(b_->PostRecv(i), 0);
  }
  std::thread echo([&] {
    try {
      for (uint64_t i = 0; i < kRounds; ++i) {
        WaitAndPoll(*b_, b_->recv_cq(), i);
        Require(b_->PostRecv(i + 2) == 0, "post_recv");
        Require(b_->PostSend(SendWr(i)) == 0, "post_send");
        PollOne(b_->send_cq());
      }
    } catch (const std::exception& error) {
      problem = error.what();
    }
  });
  try {
    for (uint64_t i = 0; i < kRounds; ++i) {
      Require(a_->PostSend(SendWr(i)) == 0, "post_send");
      PollOne(a_->send_cq());
      WaitAndPoll(*a_, a_->recv_cq(), i);
      Require(a_->PostRecv(i + 2) == 0, "post_recv");
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  echo.join();
  EXPECT_EQ(problem, "");
}

TEST_F(Events, DestroyCqWaitsForAcknowledgedEventsOnly) {
  // Events written and never read must not hang destroy_cq (they were not given out).
  ASSERT_EQ(ibv_req_notify_cq(b_->recv_cq(), 0), 0);
  ASSERT_EQ(b_->PostRecv(1), 0);
  ASSERT_EQ(a_->PostSend(SendWr(1)), 0);
  PollOne(b_->recv_cq());
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  ASSERT_EQ(ibv_get_cq_event(b_->channel(), &cq, &context), 0);
  EXPECT_EQ(context, b_.get());
  std::atomic<bool> destroyed{false};
  std::thread destroyer([&] {
    b_.reset();
    destroyed = true;
  });
  std::this_thread::sleep_for(Milliseconds(100));
  EXPECT_FALSE(destroyed) << "destroy_cq returned before the event was acknowledged";
  ibv_ack_cq_events(cq, 1);
  destroyer.join();
}

TEST_F(Events, AFullCqGivesOverrunNotSilence) {
  RcEnd a(EndOptions{.send_wr = 256, .cqe = 4}), b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b);
  Memory target(b.pd(), 64), source(a.pd(), 64);
  const int room = a.send_cq()->cqe;
  int posted = 0;
  for (; posted < room + 20 && posted < 250; ++posted) {
    if (a.PostSend(RdmaWr(static_cast<uint64_t>(posted), IBV_WR_RDMA_WRITE, target.address(),
                          target.rkey()),
                   {source.sge(0, 8)}) != 0) {
      break;
    }
  }
  const auto event = NextAsyncEvent(a.context(), Milliseconds(5000));
  ASSERT_TRUE(event) << "no CQ error event";
  EXPECT_EQ(event->event_type, IBV_EVENT_CQ_ERR);
  EXPECT_EQ(event->element.cq, a.send_cq());
}

TEST(AsyncEvents, ALinkThatGoesAndComesIsTold) {
  const auto context = OpenDevice("verbena1");
  const auto other = OpenDevice("verbena0");
  const auto verbena = [](const std::string& arguments) {
    const std::string command = VerbenaCommand() + " " + arguments + " > /dev/null";
    ASSERT_EQ(system(command.c_str()), 0);
  };
  const auto expect = [&context](ibv_event_type type, ibv_port_state state) {
    const auto event = NextAsyncEvent(context.get(), Milliseconds(10000));
    ASSERT_TRUE(event.has_value());
    EXPECT_EQ(event->event_type, type);
    EXPECT_EQ(event->element.port_num, 1);
    ibv_port_attr port = {};
    ASSERT_EQ(ibv_query_port(context.get(), 1, &port), 0);
    EXPECT_EQ(port.state, state);
  };
  verbena("fault add 'down dev=verbena1'");
  expect(IBV_EVENT_PORT_ERR, IBV_PORT_DOWN);
  verbena("fault clear");
  expect(IBV_EVENT_PORT_ACTIVE, IBV_PORT_ACTIVE);
  EXPECT_FALSE(NextAsyncEvent(other.get(), Milliseconds(100)).has_value());
}

TEST(AsyncEvents, ABlockedReaderIsWokenByAnEvent) {
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b);
  Memory source(a.pd(), 64);
  ibv_async_event event = {};
  std::thread reader([&] {
    do {
      if (ibv_get_async_event(b.context(), &event) != 0) return;
      ibv_ack_async_event(&event);
    } while (event.event_type == IBV_EVENT_COMM_EST);
  });
  std::this_thread::sleep_for(Milliseconds(50));
  ASSERT_EQ(a.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, 0, 1), {source.sge(0, 8)}), 0);
  reader.join();
  EXPECT_EQ(event.event_type, IBV_EVENT_QP_ACCESS_ERR);
  EXPECT_EQ(PollOne(a.send_cq()).status, IBV_WC_REM_ACCESS_ERR);
}

}  // namespace
}  // namespace verbena::testing
