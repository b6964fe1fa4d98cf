// SPDX-License-Identifier: Apache-2.0
//
// Completion channels as event loops use them: not blocking, watched by epoll level- and
// edge-triggered, shared by many CQs and by threads.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

void SetNonBlocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  ASSERT_EQ(fcntl(fd, F_SETFL, flags | O_NONBLOCK), 0);
}

class Channels : public ::testing::Test {
 protected:
  Channels() {
    ConnectPair(a_, b_);
    SetNonBlocking(b_.channel()->fd);
  }
  ~Channels() override {
    if (epoll_ >= 0) close(epoll_);
  }
  void Watch(int fd, uint32_t events) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    epoll_event event = {};
    event.events = events;
    ASSERT_EQ(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event), 0);
  }
  bool IsReady(int milliseconds) {
    epoll_event event = {};
    return epoll_wait(epoll_, &event, 1, milliseconds) == 1;
  }
  void Arm() { ASSERT_EQ(ibv_req_notify_cq(b_.recv_cq(), 0), 0); }
  // A message whose completion is there, and polled.
  void Message(uint64_t id) {
    ASSERT_EQ(b_.PostRecv(id), 0);
    ASSERT_EQ(a_.PostSend(SendWr(id)), 0);
    EXPECT_EQ(PollOne(b_.recv_cq()).wr_id, id);
    PollOne(a_.send_cq());
  }
  // 0 or errno.
  int Get() {
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    if (ibv_get_cq_event(b_.channel(), &cq, &context) != 0) return errno;
    EXPECT_EQ(cq, b_.recv_cq());
    ibv_ack_cq_events(cq, 1);
    return 0;
  }

  RcEnd a_, b_{EndOptions{.device = "verbena1", .channel = true}};
  int epoll_ = -1;
};

TEST_F(Channels, WithoutAnEventANonBlockingOneSaysSo) {
  EXPECT_EQ(Get(), EAGAIN);
  Arm();
  EXPECT_EQ(Get(), EAGAIN);
  Watch(b_.channel()->fd, EPOLLIN);
  Message(1);
  ASSERT_TRUE(IsReady(5000));
  EXPECT_EQ(Get(), 0);
  EXPECT_EQ(Get(), EAGAIN);
}

TEST_F(Channels, LevelTriggeredOnesStayReadyUntilTheEventIsTaken) {
  Watch(b_.channel()->fd, EPOLLIN);
  EXPECT_FALSE(IsReady(0));
  for (uint64_t i = 0; i < 3; ++i) {
    Arm();
    Message(i);
    EXPECT_TRUE(IsReady(5000));
    EXPECT_TRUE(IsReady(0));
    EXPECT_EQ(Get(), 0);
    EXPECT_FALSE(IsReady(0));
  }
}

TEST_F(Channels, EdgeTriggeredOnesTellOfEachEventOnce) {
  Watch(b_.channel()->fd, EPOLLIN | EPOLLET);
  for (uint64_t i = 0; i < 3; ++i) {
    Arm();
    Message(2 * i);
    EXPECT_TRUE(IsReady(5000));
    EXPECT_FALSE(IsReady(20));
    // Not taken; the next one is an edge of its own.
    Arm();
    Message(2 * i + 1);
    EXPECT_TRUE(IsReady(5000));
    EXPECT_EQ(Get(), 0);
    EXPECT_EQ(Get(), 0);
    EXPECT_EQ(Get(), EAGAIN);
  }
}

TEST_F(Channels, ArmingTwiceIsArmingOnceAndForAnyBeatsSolicited) {
  Watch(b_.channel()->fd, EPOLLIN);
  Arm();
  Arm();
  Message(1);
  ASSERT_TRUE(IsReady(5000));
  EXPECT_EQ(Get(), 0);
  Message(2);
  EXPECT_FALSE(IsReady(20));
  // In either order (IBTA Vol 1 §11.4.2.2).
  for (const bool solicited_first : {true, false}) {
    ASSERT_EQ(ibv_req_notify_cq(b_.recv_cq(), solicited_first ? 1 : 0), 0);
    ASSERT_EQ(ibv_req_notify_cq(b_.recv_cq(), solicited_first ? 0 : 1), 0);
    Message(3);
    ASSERT_TRUE(IsReady(5000)) << solicited_first;
    EXPECT_EQ(Get(), 0);
  }
}

TEST_F(Channels, AsyncEventsAreWatchedInTheSameWay) {
  SetNonBlocking(b_.context()->async_fd);
  ibv_async_event event = {};
  while (NextAsyncEvent(b_.context(), Milliseconds(0)).has_value()) {
  }
  EXPECT_NE(ibv_get_async_event(b_.context(), &event), 0);
  EXPECT_EQ(errno, EAGAIN);
  Watch(b_.context()->async_fd, EPOLLIN | EPOLLET);
  Memory source(a_.pd(), 64);
  ASSERT_EQ(a_.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, 0, 1), {source.sge(0, 8)}), 0);
  ASSERT_TRUE(IsReady(5000));
  ASSERT_EQ(ibv_get_async_event(b_.context(), &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_QP_ACCESS_ERR);
  ibv_ack_async_event(&event);
  EXPECT_EQ(PollOne(a_.send_cq()).status, IBV_WC_REM_ACCESS_ERR);
}

// Each armed CQ of a shared channel gives one event, whoever takes it.
TEST(SharedChannel, ThreadsTakeTheEventsOfManyCqs) {
  constexpr int kCqs = 8, kRounds = 50, kThreads = 3;
  RcEnd b;
  const Owned<ibv_comp_channel> channel(ibv_create_comp_channel(b.context()));
  ASSERT_NE(channel, nullptr);
  std::vector<Owned<ibv_cq>> cqs;
  std::vector<Owned<ibv_qp>> qps;
  for (int i = 0; i < kCqs; ++i) {
    cqs.emplace_back(ibv_create_cq(b.context(), 64, nullptr, channel.get(), 0));
    ASSERT_NE(cqs.back(), nullptr);
  }
  // In ERR every WR is flushed at once.
  for (int i = 0; i < kCqs; ++i) {
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = cqs[static_cast<size_t>(i)].get();
    init.qp_type = IBV_QPT_RC;
    init.cap = {4, 64, 1, 1, 0};
    qps.emplace_back(ibv_create_qp(b.pd(), &init));
    ASSERT_NE(qps.back(), nullptr);
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_ERR;
    ASSERT_EQ(ibv_modify_qp(qps.back().get(), &attr, IBV_QP_STATE), 0);
  }
  std::map<ibv_cq*, std::atomic<int>> taken;
  for (const auto& cq : cqs) taken[cq.get()] = 0;
  std::atomic<int> total{0};
  SetNonBlocking(channel->fd);
  std::vector<std::thread> threads;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      while (total.load() < kCqs * kRounds && std::chrono::steady_clock::now() < end) {
        ibv_cq* cq = nullptr;
        void* context = nullptr;
        if (ibv_get_cq_event(channel.get(), &cq, &context) != 0) {
          std::this_thread::yield();
          continue;
        }
        ++taken.at(cq);
        ibv_ack_cq_events(cq, 1);
        ++total;
      }
    });
  }
  for (int round = 1; round <= kRounds; ++round) {
    for (int i = 0; i < kCqs; ++i) {
      ASSERT_EQ(ibv_req_notify_cq(cqs[static_cast<size_t>(i)].get(), 0), 0);
      ibv_recv_wr wr = {};
      ibv_recv_wr* bad = nullptr;
      ASSERT_EQ(ibv_post_recv(qps[static_cast<size_t>(i)].get(), &wr, &bad), 0);
      EXPECT_EQ(PollOne(cqs[static_cast<size_t>(i)].get()).status, IBV_WC_WR_FLUSH_ERR);
    }
    while (total.load() < round * kCqs && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
  }
  for (auto& thread : threads) thread.join();
  for (const auto& [cq, count] : taken) EXPECT_EQ(count.load(), kRounds);
}

}  // namespace
}  // namespace verbena::testing
