// SPDX-License-Identifier: Apache-2.0
//
// Shared receive queues: life, limits, events, many QPs of many processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

int PostSrq(ibv_srq* srq, uint64_t wr_id, std::vector<ibv_sge> sges = {}) {
  ibv_recv_wr wr = {};
  wr.wr_id = wr_id;
  wr.sg_list = sges.empty() ? nullptr : sges.data();
  wr.num_sge = static_cast<int>(sges.size());
  ibv_recv_wr* bad = nullptr;
  return ibv_post_srq_recv(srq, &wr, &bad);
}

Owned<ibv_srq> CreateSrq(ibv_pd* pd, uint32_t max_wr = 64, uint32_t max_sge = 4) {
  ibv_srq_init_attr init = {nullptr, {max_wr, max_sge, 0}};
  Owned<ibv_srq> srq(ibv_create_srq(pd, &init));
  Require(srq != nullptr, "ibv_create_srq");
  return srq;
}

ibv_srq_attr Query(ibv_srq* srq) {
  ibv_srq_attr attr = {};
  Require(ibv_query_srq(srq, &attr) == 0, "ibv_query_srq");
  return attr;
}

int Modify(ibv_srq* srq, int mask, uint32_t max_wr, uint32_t limit) {
  ibv_srq_attr attr = {max_wr, 0, limit};
  return ibv_modify_srq(srq, &attr, mask);
}

// `base` has device, PD and the SRQ; QPs on it are made as needed.
class Srq : public ::testing::Test {
 protected:
  void SetUp() override { srq_ = CreateSrq(base_.pd()); }

  EndOptions OnSrq() const {
    EndOptions options;
    options.srq = srq_.get();
    return options;
  }
  // A peer on the other NIC and its QP on the SRQ.
  struct Pair {
    std::unique_ptr<RcEnd> peer;
    std::unique_ptr<RcEnd> mine;
  };
  Pair MakePair(const PathOptions& path = {}) {
    EndOptions other;
    other.device = "verbena1";
    Pair pair{std::make_unique<RcEnd>(other), std::make_unique<RcEnd>(base_, OnSrq())};
    ConnectPair(*pair.peer, *pair.mine, path);
    return pair;
  }

  RcEnd base_;
  Owned<ibv_srq> srq_;
};

TEST_F(Srq, HasTheSizeThatWasAskedFor) {
  ibv_srq_init_attr init = {this, {100, 3, 0}};
  const Owned<ibv_srq> srq(ibv_create_srq(base_.pd(), &init));
  ASSERT_NE(srq, nullptr);
  EXPECT_GE(init.attr.max_wr, 100u);
  EXPECT_GE(init.attr.max_sge, 3u);
  EXPECT_EQ(srq->srq_context, this);
  EXPECT_EQ(srq->pd, base_.pd());
  const ibv_srq_attr attr = Query(srq.get());
  EXPECT_EQ(attr.max_wr, init.attr.max_wr);
  EXPECT_EQ(attr.max_sge, init.attr.max_sge);
  EXPECT_EQ(attr.srq_limit, 0u);
}

TEST_F(Srq, TheMaximaOfTheDeviceWorkAndMoreDoesNot) {
  ibv_device_attr device = {};
  ASSERT_EQ(ibv_query_device(base_.context(), &device), 0);
  ASSERT_GT(device.max_srq_wr, 0);
  ASSERT_GT(device.max_srq_sge, 0);
  const auto most_wr = static_cast<uint32_t>(device.max_srq_wr);
  const auto most_sge = static_cast<uint32_t>(device.max_srq_sge);
  EXPECT_NE(CreateSrq(base_.pd(), most_wr, most_sge), nullptr);
  for (const auto& [wr, sge] : {std::pair{most_wr + 1, 1u}, {1u, most_sge + 1}}) {
    ibv_srq_init_attr init = {nullptr, {wr, sge, 0}};
    errno = 0;
    EXPECT_EQ(ibv_create_srq(base_.pd(), &init), nullptr);
    EXPECT_EQ(errno, EINVAL);
  }
}

TEST_F(Srq, ExtendedCreationMakesABasicOneAndRefusesWhatItDoesNotKnow) {
  ibv_srq_init_attr_ex init = {};
  init.attr = {16, 2, 0};
  init.srq_context = this;
  init.pd = base_.pd();
  init.srq_type = IBV_SRQT_BASIC;
  init.comp_mask = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE;
  Owned<ibv_srq> srq(ibv_create_srq_ex(base_.context(), &init));
  ASSERT_NE(srq, nullptr);
  EXPECT_EQ(srq->srq_context, this);
  EXPECT_EQ(PostSrq(srq.get(), 1), 0);
  init.comp_mask = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE | 1u << 20;
  errno = 0;
  EXPECT_EQ(ibv_create_srq_ex(base_.context(), &init), nullptr);
  EXPECT_EQ(errno, EINVAL);
  init.comp_mask = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_TM;
  init.srq_type = IBV_SRQT_TM;
  errno = 0;
  EXPECT_EQ(ibv_create_srq_ex(base_.context(), &init), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
}

TEST_F(Srq, CannotGoWhileAQpUsesItNorItsPd) {
  RcEnd end(base_, OnSrq());
  EXPECT_EQ(ibv_destroy_srq(srq_.get()), EBUSY);
  EXPECT_EQ(PostSrq(srq_.get(), 1), 0);
  end.DestroyQp();
  EXPECT_EQ(ibv_dealloc_pd(base_.pd()), EBUSY);
  EXPECT_EQ(ibv_destroy_srq(srq_.release()), 0);
}

TEST_F(Srq, AQpOnItHasNoReceiveQueueOfItsOwn) {
  ibv_qp_init_attr init = {};
  init.send_cq = base_.send_cq();
  init.recv_cq = base_.recv_cq();
  init.qp_type = IBV_QPT_RC;
  init.srq = srq_.get();
  init.cap = {.max_send_wr = 4,
              .max_recv_wr = 7,
              .max_send_sge = 1,
              .max_recv_sge = 5,
              .max_inline_data = 0};
  const Owned<ibv_qp> qp(ibv_create_qp(base_.pd(), &init));
  ASSERT_NE(qp, nullptr);
  EXPECT_EQ(init.cap.max_recv_wr, 0u);
  EXPECT_EQ(qp->srq, srq_.get());
  ibv_qp_attr attr = {};
  ibv_qp_init_attr queried = {};
  ASSERT_EQ(ibv_query_qp(qp.get(), &attr, IBV_QP_CAP, &queried), 0);
  EXPECT_EQ(queried.srq, srq_.get());
  attr = {};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  ASSERT_EQ(ibv_modify_qp(qp.get(), &attr,
                          IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
            0);
  ibv_recv_wr wr = {};
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_recv(qp.get(), &wr, &bad), EINVAL);
  EXPECT_EQ(bad, &wr);
}

TEST_F(Srq, AFullOneTakesNoMoreAndNamesTheFirstThatDidNotFit) {
  const auto srq = CreateSrq(base_.pd(), 10);
  const uint32_t room = Query(srq.get()).max_wr;
  std::vector<ibv_recv_wr> list(room + 2);
  for (size_t i = 0; i < list.size(); ++i) {
    list[i] = {};
    list[i].wr_id = i;
    list[i].next = i + 1 < list.size() ? &list[i + 1] : nullptr;
  }
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_srq_recv(srq.get(), &list[0], &bad), ENOMEM);
  EXPECT_EQ(bad, &list[room]);
  ibv_sge sges[33] = {};
  ibv_recv_wr wide = {};
  wide.sg_list = sges;
  wide.num_sge = 33;
  bad = nullptr;
  EXPECT_EQ(ibv_post_srq_recv(srq_.get(), &wide, &bad), EINVAL);
  EXPECT_EQ(bad, &wide);
}

TEST_F(Srq, MessagesOfManyQpsTakeReceivesInOrderAndTellWhoseTheyAre) {
  constexpr int kQps = 5;
  std::vector<Pair> pairs;
  for (int i = 0; i < kQps; ++i) pairs.push_back(MakePair());
  Memory target(base_.pd(), 40 * 64);
  for (uint64_t i = 0; i < 40; ++i) {
    ASSERT_EQ(PostSrq(srq_.get(), 1000 + i, {target.sge(i * 64, 64)}), 0);
  }
  std::set<uint64_t> seen;
  for (int round = 0; round < 8; ++round) {
    for (int q = 0; q < kQps; ++q) {
      RcEnd& peer = *pairs[static_cast<size_t>(q)].peer;
      RcEnd& mine = *pairs[static_cast<size_t>(q)].mine;
      const uint64_t id = static_cast<uint64_t>(round * kQps + q);
      Memory source(peer.pd(), 64);
      FillPattern(source.bytes(), id);
      ASSERT_EQ(peer.PostSend(SendWr(id), {source.sge(0, 64)}), 0);
      ASSERT_EQ(PollOne(peer.send_cq()).status, IBV_WC_SUCCESS);
      const ibv_wc wc = PollOne(mine.recv_cq());
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
      EXPECT_EQ(wc.wr_id, 1000 + id);  // one after the other: FIFO
      EXPECT_EQ(wc.qp_num, mine.qp()->qp_num);
      EXPECT_EQ(wc.src_qp, peer.qp()->qp_num);
      EXPECT_EQ(wc.opcode, IBV_WC_RECV);
      EXPECT_EQ(wc.byte_len, 64u);
      EXPECT_EQ(PatternMismatch(target.bytes().subspan(id * 64, 64), id), std::nullopt);
      seen.insert(wc.wr_id);
    }
  }
  EXPECT_EQ(seen.size(), 40u);
}

// A long message of one QP, a short one of another in between: they complete in
// another order than their receives were posted in.
TEST_F(Srq, ReceivesMayCompleteInAnotherOrderThanTheyWerePosted) {
  Pair slow = MakePair({.mtu = IBV_MTU_256});
  Pair fast = MakePair();
  constexpr size_t kLong = 4 << 20;
  Memory source(slow.peer->pd(), kLong), small(fast.peer->pd(), 16);
  Memory target(base_.pd(), kLong), other(base_.pd(), kLong);
  FillPattern(source.bytes(), 3);
  ASSERT_EQ(PostSrq(srq_.get(), 1, {target.sge(0, kLong)}), 0);
  ASSERT_EQ(PostSrq(srq_.get(), 2, {other.sge(0, kLong)}), 0);
  ASSERT_EQ(slow.peer->PostSend(SendWr(1), {source.sge(0, kLong)}), 0);
  // Its receive is taken with the first packet.
  while (target.data()[0] != PatternByte(3, 0)) std::this_thread::yield();
  ASSERT_EQ(fast.peer->PostSend(SendWr(2), {small.sge(0, 16)}), 0);
  const ibv_wc of_fast = PollOne(fast.mine->recv_cq());
  EXPECT_EQ(of_fast.wr_id, 2u);
  EXPECT_EQ(of_fast.byte_len, 16u);
  const ibv_wc of_slow = PollOne(slow.mine->recv_cq());
  EXPECT_EQ(of_slow.wr_id, 1u);
  EXPECT_EQ(of_slow.status, IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch(target.bytes(), 3), std::nullopt);
}

TEST_F(Srq, AnEmptyOneMakesTheSenderWaitAndARetryLimitEndsIt) {
  Pair pair = MakePair();
  ASSERT_EQ(pair.peer->PostSend(SendWr(1)), 0);
  EXPECT_TRUE(StaysEmpty(pair.peer->send_cq(), Milliseconds(30)));
  ASSERT_EQ(PostSrq(srq_.get(), 7), 0);
  EXPECT_EQ(PollOne(pair.mine->recv_cq()).wr_id, 7u);
  EXPECT_EQ(PollOne(pair.peer->send_cq()).status, IBV_WC_SUCCESS);
  Pair impatient = MakePair({.rnr_retry = 1});
  ASSERT_EQ(impatient.peer->PostSend(SendWr(2)), 0);
  EXPECT_EQ(PollOne(impatient.peer->send_cq()).status, IBV_WC_RNR_RETRY_EXC_ERR);
}

TEST_F(Srq, WriteWithImmediateTakesAReceiveAndOtherWritesDoNot) {
  Pair pair = MakePair();
  Memory target(base_.pd(), 64), source(pair.peer->pd(), 64);
  ASSERT_EQ(PostSrq(srq_.get(), 5), 0);
  ASSERT_EQ(pair.peer->PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, target.address(), target.rkey()),
                                {source.sge(0, 64)}),
            0);
  ibv_send_wr wr = RdmaWr(2, IBV_WR_RDMA_WRITE_WITH_IMM, target.address(), target.rkey());
  wr.imm_data = htobe32(77);
  ASSERT_EQ(pair.peer->PostSend(wr, {source.sge(0, 64)}), 0);
  const ibv_wc wc = PollOne(pair.mine->recv_cq());
  EXPECT_EQ(wc.wr_id, 5u);
  EXPECT_EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(be32toh(wc.imm_data), 77u);
  EXPECT_TRUE(StaysEmpty(pair.mine->recv_cq(), Milliseconds(20)));
}

TEST_F(Srq, BuffersAreOfThePdOfTheSrqNotOfTheQp) {
  const Owned<ibv_pd> other(ibv_alloc_pd(base_.context()));
  const auto srq = CreateSrq(other.get());
  EndOptions options;
  options.srq = srq.get();
  RcEnd peer;
  RcEnd mine(base_, options);
  ConnectPair(peer, mine);
  Memory target(other.get(), 16), source(peer.pd(), 16);
  FillPattern(source.bytes(), 1);
  ASSERT_EQ(PostSrq(srq.get(), 1, {target.sge(0, 16)}), 0);
  ASSERT_EQ(peer.PostSend(SendWr(1), {source.sge(0, 16)}), 0);
  EXPECT_EQ(PollOne(mine.recv_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch(target.bytes(), 1), std::nullopt);
  mine.DestroyQp();
}

// --- Limit ---

TEST_F(Srq, TheLimitEventComesOnceWhenFewerAreLeft) {
  Pair pair = MakePair();
  for (uint64_t i = 0; i < 10; ++i) ASSERT_EQ(PostSrq(srq_.get(), i), 0);
  ASSERT_EQ(Modify(srq_.get(), IBV_SRQ_LIMIT, 0, 8), 0);
  EXPECT_EQ(Query(srq_.get()).srq_limit, 8u);
  const auto send = [&] {
    ASSERT_EQ(pair.peer->PostSend(SendWr(1)), 0);
    PollOne(pair.mine->recv_cq());
    PollOne(pair.peer->send_cq());
  };
  send();
  send();  // 8 are left: not fewer
  EXPECT_EQ(NextAsyncEvent(base_.context(), Milliseconds(30)), std::nullopt);
  send();
  const auto event = NextAsyncEvent(base_.context(), Milliseconds(5000));
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
  EXPECT_EQ(event->element.srq, srq_.get());
  EXPECT_EQ(Query(srq_.get()).srq_limit, 0u);
  send();
  EXPECT_EQ(NextAsyncEvent(base_.context(), Milliseconds(30)), std::nullopt);
  // Armed again.
  for (uint64_t i = 0; i < 10; ++i) ASSERT_EQ(PostSrq(srq_.get(), i), 0);
  ASSERT_EQ(Modify(srq_.get(), IBV_SRQ_LIMIT, 0, 16), 0);
  send();
  EXPECT_TRUE(NextAsyncEvent(base_.context(), Milliseconds(5000)).has_value());
}

TEST_F(Srq, ALimitThatIsReachedAlreadyTellsAtOnceAndZeroDisarms) {
  ASSERT_EQ(PostSrq(srq_.get(), 1), 0);
  ASSERT_EQ(PostSrq(srq_.get(), 2), 0);
  ASSERT_EQ(Modify(srq_.get(), IBV_SRQ_LIMIT, 0, 2), 0);
  ASSERT_EQ(Modify(srq_.get(), IBV_SRQ_LIMIT, 0, 0), 0);
  EXPECT_EQ(NextAsyncEvent(base_.context(), Milliseconds(30)), std::nullopt);
  ASSERT_EQ(Modify(srq_.get(), IBV_SRQ_LIMIT, 0, 3), 0);
  const auto event = NextAsyncEvent(base_.context(), Milliseconds(5000));
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
}

TEST_F(Srq, LimitsBeyondItsSizeAndUnknownAttributesAreRefused) {
  const uint32_t room = Query(srq_.get()).max_wr;
  EXPECT_EQ(Modify(srq_.get(), IBV_SRQ_LIMIT, 0, room + 1), EINVAL);
  EXPECT_EQ(Modify(srq_.get(), 1 << 5, 0, 0), EINVAL);
  ASSERT_EQ(PostSrq(srq_.get(), 1), 0);
  EXPECT_EQ(Query(srq_.get()).srq_limit, 0u);
}

TEST_F(Srq, DestroyWaitsForItsEventsToBeAcknowledged) {
  auto srq = CreateSrq(base_.pd());
  ASSERT_EQ(Modify(srq.get(), IBV_SRQ_LIMIT, 0, 1), 0);
  ibv_async_event event = {};
  ASSERT_EQ(ibv_get_async_event(base_.context(), &event), 0);
  std::atomic<bool> destroyed{false};
  std::thread destroyer([&] {
    EXPECT_EQ(ibv_destroy_srq(srq.release()), 0);
    destroyed = true;
  });
  std::this_thread::sleep_for(Milliseconds(30));
  EXPECT_FALSE(destroyed);
  ibv_ack_async_event(&event);
  destroyer.join();
  // One that nobody has read is taken back.
  srq = CreateSrq(base_.pd());
  ASSERT_EQ(Modify(srq.get(), IBV_SRQ_LIMIT, 0, 1), 0);
  EXPECT_EQ(ibv_destroy_srq(srq.release()), 0);
  EXPECT_EQ(NextAsyncEvent(base_.context(), Milliseconds(30)), std::nullopt);
}

// --- Resize ---

TEST_F(Srq, ResizeKeepsWhatIsPostedAndMakesRoom) {
  const auto srq = CreateSrq(base_.pd(), 4);
  EndOptions options;
  options.srq = srq.get();
  RcEnd peer;
  RcEnd mine(base_, options);
  ConnectPair(peer, mine);
  Memory target(base_.pd(), 4096), source(peer.pd(), 64);
  uint64_t posted = 0;
  uint64_t received = 0;
  const auto post = [&](int expected) {
    ASSERT_EQ(PostSrq(srq.get(), posted, {target.sge(posted % 64 * 64, 64)}), expected);
    if (expected == 0) ++posted;
  };
  const auto receive = [&] {
    FillPattern(source.bytes(), received);
    ASSERT_EQ(peer.PostSend(SendWr(1), {source.sge(0, 64)}), 0);
    PollOne(peer.send_cq());
    const ibv_wc wc = PollOne(mine.recv_cq());
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    ASSERT_EQ(wc.wr_id, received);
    ASSERT_EQ(PatternMismatch(target.bytes().subspan(received % 64 * 64, 64), received),
              std::nullopt);
    ++received;
  };
  for (int i = 0; i < 4; ++i) post(0);
  receive();
  post(0);
  post(ENOMEM);
  ASSERT_EQ(Modify(srq.get(), IBV_SRQ_MAX_WR, 20, 0), 0);
  EXPECT_EQ(Query(srq.get()).max_wr, 20u);
  for (int i = 0; i < 16; ++i) post(0);
  post(ENOMEM);
  for (int i = 0; i < 18; ++i) receive();
  // Smaller again, but not smaller than what is posted.
  EXPECT_EQ(Modify(srq.get(), IBV_SRQ_MAX_WR, 1, 0), EINVAL);
  EXPECT_EQ(Query(srq.get()).max_wr, 20u);
  ASSERT_EQ(Modify(srq.get(), IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT, 3, 1), 0);
  EXPECT_EQ(Query(srq.get()).max_wr, 3u);
  EXPECT_EQ(Query(srq.get()).srq_limit, 1u);
  post(0);
  post(ENOMEM);
  for (int i = 0; i < 3; ++i) receive();
  EXPECT_EQ(posted, received);
  EXPECT_TRUE(NextAsyncEvent(base_.context(), Milliseconds(5000)).has_value());
  ibv_device_attr device = {};
  ASSERT_EQ(ibv_query_device(base_.context(), &device), 0);
  EXPECT_NE(device.device_cap_flags & IBV_DEVICE_SRQ_RESIZE, 0u);
  EXPECT_EQ(Modify(srq.get(), IBV_SRQ_MAX_WR, static_cast<uint32_t>(device.max_srq_wr) + 1, 0),
            EINVAL);
  mine.DestroyQp();
}

TEST_F(Srq, ThreadsPostWhileItIsResizedAndUsed) {
  constexpr uint64_t kMessages = 6000;
  constexpr int kPosters = 3;
  Pair a = MakePair();
  Pair b = MakePair();
  std::atomic<uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < kPosters; ++i) {
    threads.emplace_back([&] {
      for (uint64_t id = next++; id < kMessages; id = next++) {
        int error;
        while ((error = PostSrq(srq_.get(), id)) == ENOMEM && !stop) std::this_thread::yield();
        if (stop) return;
        EXPECT_EQ(error, 0);
      }
    });
  }
  std::thread resizer([&] {
    for (uint32_t i = 0; !stop; ++i) {
      const int error = Modify(srq_.get(), IBV_SRQ_MAX_WR, 40 + i % 7 * 30, 0);
      EXPECT_TRUE(error == 0 || error == EINVAL) << error;
    }
  });
  std::vector<bool> seen(kMessages);
  uint64_t sent = 0;
  uint64_t received = 0;
  uint64_t outstanding[2] = {0, 0};
  Pair* const pairs[2] = {&a, &b};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (received < kMessages && std::chrono::steady_clock::now() < end) {
    for (int p = 0; p < 2; ++p) {
      ibv_wc wc[16];
      if (sent < kMessages && outstanding[p] < 32) {
        ASSERT_EQ(pairs[p]->peer->PostSend(SendWr(1)), 0);
        ++outstanding[p];
        ++sent;
      }
      int count = ibv_poll_cq(pairs[p]->peer->send_cq(), 16, wc);
      for (int i = 0; i < count; ++i) ASSERT_EQ(wc[i].status, IBV_WC_SUCCESS) << Describe(wc[i]);
      outstanding[p] -= static_cast<uint64_t>(count);
      count = ibv_poll_cq(pairs[p]->mine->recv_cq(), 16, wc);
      for (int i = 0; i < count; ++i) {
        ASSERT_EQ(wc[i].status, IBV_WC_SUCCESS) << Describe(wc[i]);
        ASSERT_LT(wc[i].wr_id, kMessages);
        ASSERT_FALSE(seen[wc[i].wr_id]) << wc[i].wr_id;
        seen[wc[i].wr_id] = true;
        ++received;
      }
    }
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  resizer.join();
  EXPECT_EQ(received, kMessages);
}

// --- Errors ---

TEST_F(Srq, AQpInErrorSaysThatItTakesNoMoreAndTheOthersGoOn) {
  Pair broken = MakePair();
  Pair good = MakePair();
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(PostSrq(srq_.get(), i), 0);
  ASSERT_EQ(broken.mine->ToState(IBV_QPS_ERR), 0);
  const auto event = NextAsyncEvent(base_.context(), Milliseconds(5000));
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
  EXPECT_EQ(event->element.qp, broken.mine->qp());
  EXPECT_TRUE(StaysEmpty(broken.mine->recv_cq(), Milliseconds(20)));  // none is flushed
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(good.peer->PostSend(SendWr(i)), 0);
    EXPECT_EQ(PollOne(good.mine->recv_cq()).wr_id, i);
  }
  EXPECT_EQ(NextAsyncEvent(base_.context(), Milliseconds(20)), std::nullopt);
}

TEST_F(Srq, AMessageTooLongForItsReceiveFailsThatReceiveAndItsQpOnly) {
  Pair broken = MakePair();
  Pair good = MakePair();
  Memory source(broken.peer->pd(), 64), fitting(good.peer->pd(), 64), target(base_.pd(), 128);
  ASSERT_EQ(PostSrq(srq_.get(), 1, {target.sge(0, 10)}), 0);
  ASSERT_EQ(PostSrq(srq_.get(), 2, {target.sge(64, 64)}), 0);
  ASSERT_EQ(broken.peer->PostSend(SendWr(1), {source.sge(0, 11)}), 0);
  EXPECT_EQ(PollOne(broken.peer->send_cq()).status, IBV_WC_REM_INV_REQ_ERR);
  const ibv_wc wc = PollOne(broken.mine->recv_cq());
  EXPECT_EQ(wc.status, IBV_WC_LOC_LEN_ERR);
  EXPECT_EQ(wc.wr_id, 1u);
  ASSERT_EQ(good.peer->PostSend(SendWr(2), {fitting.sge(0, 64)}), 0);
  EXPECT_EQ(PollOne(good.mine->recv_cq()).wr_id, 2u);
  std::set<ibv_event_type> events;
  while (const auto event = NextAsyncEvent(base_.context(), Milliseconds(100))) {
    events.insert(event->event_type);
  }
  EXPECT_TRUE(events.contains(IBV_EVENT_QP_LAST_WQE_REACHED));
}

TEST_F(Srq, AQpThatWasResetIsUsedAgain) {
  Pair pair = MakePair();
  ASSERT_EQ(pair.mine->ToState(IBV_QPS_ERR), 0);
  ASSERT_EQ(pair.mine->ToState(IBV_QPS_RESET), 0);
  ASSERT_EQ(pair.peer->ToState(IBV_QPS_RESET), 0);
  ConnectPair(*pair.peer, *pair.mine);
  ASSERT_EQ(PostSrq(srq_.get(), 9), 0);
  ASSERT_EQ(pair.peer->PostSend(SendWr(1)), 0);
  EXPECT_EQ(PollOne(pair.mine->recv_cq()).wr_id, 9u);
}

TEST_F(Srq, DatagramsTakeReceivesFromItToo) {
  ibv_qp_init_attr init = {};
  init.send_cq = base_.send_cq();
  init.recv_cq = base_.recv_cq();
  init.qp_type = IBV_QPT_UD;
  init.cap = {.max_send_wr = 8,
              .max_recv_wr = 8,
              .max_send_sge = 1,
              .max_recv_sge = 1,
              .max_inline_data = 0};
  const Owned<ibv_qp> sender(ibv_create_qp(base_.pd(), &init));
  init.srq = srq_.get();
  const Owned<ibv_qp> receiver(ibv_create_qp(base_.pd(), &init));
  ASSERT_NE(sender, nullptr);
  ASSERT_NE(receiver, nullptr);
  for (ibv_qp* qp : {sender.get(), receiver.get()}) {
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qkey = 0x1234;
    ASSERT_EQ(
        ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), 0);
    attr.qp_state = IBV_QPS_RTR;
    ASSERT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
    attr.qp_state = IBV_QPS_RTS;
    ASSERT_EQ(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), 0);
  }
  ibv_ah_attr ah_attr = {};
  ah_attr.is_global = 1;
  ah_attr.port_num = 1;
  ah_attr.grh.sgid_index = 1;
  ASSERT_EQ(ibv_query_gid(base_.context(), 1, 1, &ah_attr.grh.dgid), 0);
  const Owned<ibv_ah> ah(ibv_create_ah(base_.pd(), &ah_attr));
  Memory memory(base_.pd(), 4096);
  const auto send = [&](uint32_t bytes) {
    ibv_sge sge = memory.sge(2048, bytes);
    ibv_send_wr wr = SendWr(1);
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.wr.ud = {ah.get(), receiver->qp_num, 0x1234};
    ibv_send_wr* bad = nullptr;
    ASSERT_EQ(ibv_post_send(sender.get(), &wr, &bad), 0);
    ASSERT_EQ(PollOne(base_.send_cq()).status, IBV_WC_SUCCESS);
  };
  ASSERT_EQ(PostSrq(srq_.get(), 4, {memory.sge(0, 100)}), 0);
  send(61);  // with 40 bytes of GRH one too many: dropped, the receive stays
  EXPECT_TRUE(StaysEmpty(base_.recv_cq(), Milliseconds(20)));
  send(60);
  const ibv_wc wc = PollOne(base_.recv_cq());
  EXPECT_EQ(wc.wr_id, 4u);
  EXPECT_EQ(wc.byte_len, 100u);
  EXPECT_EQ(wc.src_qp, sender->qp_num);
}

// --- Processes ---

constexpr uint64_t kPerQp = 300;
constexpr int kQpsPerProcess = 4;

// Sends on all its QPs; arguments: an address for each.
VERBENA_ROLE(SrqSender) {
  EndOptions options;
  options.device = "verbena1";
  RcEnd base(options);
  std::vector<std::unique_ptr<RcEnd>> ends;
  std::string text;
  for (int i = 0; i < kQpsPerProcess; ++i) {
    ends.push_back(std::make_unique<RcEnd>(base, options));
    text += ends.back()->address().Text() + " ";
  }
  printf("addresses %s\n", text.c_str());
  // What is sent before the other side is ready is sent again.
  const PathOptions patient{.timeout = 16};
  for (size_t i = 0; i < ends.size(); ++i) {
    ends[i]->Connect(PeerAddress::Parse(arguments.at(i)), patient);
  }
  Memory memory(base.pd(), 64);
  for (uint64_t i = 0; i < kPerQp; ++i) {
    for (auto& end : ends) {
      ibv_send_wr wr = SendWr(i, IBV_WR_SEND_WITH_IMM);
      wr.imm_data = htobe32(static_cast<uint32_t>(i));
      if (end->PostSend(wr, {memory.sge(0, 32)}) != 0) return 3;
    }
    for (auto& end : ends) {
      if (PollOne(end->send_cq()).status != IBV_WC_SUCCESS) return 4;
    }
  }
  return 0;
}

TEST_F(Srq, SixteenQpsOfFourProcessesShareOne) {
  constexpr size_t kProcesses = 4;
  Memory target(base_.pd(), 64 * 64);
  std::vector<std::unique_ptr<RcEnd>> mine;
  std::map<uint32_t, uint32_t> next;  // QPN → expected immediate
  EndOptions options = OnSrq();
  for (size_t i = 0; i < kProcesses * kQpsPerProcess; ++i) {
    mine.push_back(std::make_unique<RcEnd>(base_, options));
    next[mine.back()->qp()->qp_num] = 0;
  }
  for (uint64_t i = 0; i < 64; ++i) {
    ASSERT_EQ(PostSrq(srq_.get(), i, {target.sge(i * 64, 64)}), 0);
  }
  std::vector<std::unique_ptr<Process>> senders;
  for (size_t p = 0; p < kProcesses; ++p) {
    std::vector<std::string> addresses;
    for (int q = 0; q < kQpsPerProcess; ++q) {
      addresses.push_back(mine[p * kQpsPerProcess + static_cast<size_t>(q)]->address().Text());
    }
    senders.push_back(std::make_unique<Process>(RoleProcess("SrqSender", addresses)));
  }
  for (size_t p = 0; p < kProcesses; ++p) {
    const auto text = senders[p]->WaitForLine("addresses ", Milliseconds(20000));
    ASSERT_TRUE(text.has_value()) << senders[p]->Output();
    std::istringstream line(*text);
    for (int q = 0; q < kQpsPerProcess; ++q) {
      std::string peer;
      line >> peer;
      mine[p * kQpsPerProcess + static_cast<size_t>(q)]->Connect(PeerAddress::Parse(peer));
    }
  }
  uint64_t received = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (received < kPerQp * mine.size() && std::chrono::steady_clock::now() < end) {
    for (auto& one : mine) {
      ibv_wc wc[8];
      const int count = ibv_poll_cq(one->recv_cq(), 8, wc);
      for (int i = 0; i < count; ++i) {
        ASSERT_EQ(wc[i].status, IBV_WC_SUCCESS) << Describe(wc[i]);
        ASSERT_EQ(wc[i].qp_num, one->qp()->qp_num);
        ASSERT_EQ(be32toh(wc[i].imm_data), next[wc[i].qp_num]++);
        ASSERT_EQ(PostSrq(srq_.get(), wc[i].wr_id, {target.sge(wc[i].wr_id * 64, 64)}), 0);
        ++received;
      }
    }
  }
  EXPECT_EQ(received, kPerQp * mine.size());
  for (auto& sender : senders) EXPECT_EQ(sender->Wait(), 0) << sender->Output();
}

}  // namespace
}  // namespace verbena::testing
