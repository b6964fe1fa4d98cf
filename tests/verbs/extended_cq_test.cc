// SPDX-License-Identifier: Apache-2.0
//
// Extended CQs, resize and moderation: ibv_create_cq_ex(3), ibv_resize_cq(3), ibv_modify_cq(3).
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <time.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

constexpr uint64_t kTimestamps =
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

struct CqExDeleter {
  void operator()(ibv_cq_ex* cq) const { ibv_destroy_cq(ibv_cq_ex_to_cq(cq)); }
};
using OwnedCqEx = std::unique_ptr<ibv_cq_ex, CqExDeleter>;

ibv_cq_init_attr_ex Attributes(uint32_t cqe, uint64_t wc_flags = IBV_WC_STANDARD_FLAGS) {
  ibv_cq_init_attr_ex attr = {};
  attr.cqe = cqe;
  attr.wc_flags = wc_flags;
  return attr;
}

// Two RC QPs of one context whose completions all go to one extended CQ.
class ExtendedCq : public ::testing::Test {
 protected:
  void Create(ibv_cq_init_attr_ex attr) {
    cq_.reset(ibv_create_cq_ex(context_.get(), &attr));
    ASSERT_NE(cq_, nullptr) << strerror(errno);
    for (auto& qp : qps_) {
      ibv_qp_init_attr init = {};
      init.send_cq = init.recv_cq = ibv_cq_ex_to_cq(cq_.get());
      init.cap = {.max_send_wr = 64,
                  .max_recv_wr = 64,
                  .max_send_sge = 1,
                  .max_recv_sge = 1,
                  .max_inline_data = 0};
      init.qp_type = IBV_QPT_RC;
      qp.reset(ibv_create_qp(pd_.get(), &init));
      ASSERT_NE(qp, nullptr);
    }
    Connect(qps_[0].get(), qps_[1]->qp_num);
    Connect(qps_[1].get(), qps_[0]->qp_num);
  }

  void Connect(ibv_qp* qp, uint32_t peer) {
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = kAllAccess;
    ASSERT_EQ(ibv_modify_qp(qp, &attr,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
              0);
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = 8;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.sgid_index = 1;
    attr.ah_attr.grh.hop_limit = 1;
    ASSERT_EQ(ibv_query_gid(context_.get(), 1, 1, &attr.ah_attr.grh.dgid), 0);
    ASSERT_EQ(ibv_modify_qp(qp, &attr,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
              0);
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = attr.rnr_retry = 7;
    attr.max_rd_atomic = 1;
    ASSERT_EQ(ibv_modify_qp(qp, &attr,
                            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
              0);
  }

  void Receive(uint64_t id) {
    ibv_sge sge = memory_.sge(2048, 1024);
    ibv_recv_wr wr = {id, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    ASSERT_EQ(ibv_post_recv(qps_[1].get(), &wr, &bad), 0);
  }
  int Send(ibv_send_wr wr, uint32_t bytes) {
    ibv_sge sge = memory_.sge(0, bytes);
    wr.sg_list = &sge;
    wr.num_sge = 1;
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qps_[0].get(), &wr, &bad);
  }
  // start_poll until something is there.
  int Start(Milliseconds limit = Milliseconds(20000)) {
    const auto end = std::chrono::steady_clock::now() + limit;
    ibv_poll_cq_attr attr = {};
    int error;
    while ((error = ibv_start_poll(cq_.get(), &attr)) == ENOENT) {
      if (std::chrono::steady_clock::now() > end) break;
    }
    return error;
  }
  int Next(Milliseconds limit = Milliseconds(20000)) {
    const auto end = std::chrono::steady_clock::now() + limit;
    int error;
    while ((error = ibv_next_poll(cq_.get())) == ENOENT) {
      if (std::chrono::steady_clock::now() > end) break;
    }
    return error;
  }

  Owned<ibv_context> context_ = OpenDevice();
  Owned<ibv_pd> pd_{ibv_alloc_pd(context_.get())};
  Memory memory_{pd_.get(), 4096};
  OwnedCqEx cq_;
  Owned<ibv_qp> qps_[2];
};

TEST_F(ExtendedCq, AnEmptyCqStartsNoPoll) {
  Create(Attributes(16));
  ibv_poll_cq_attr attr = {};
  for (int i = 0; i < 40; ++i) EXPECT_EQ(ibv_start_poll(cq_.get(), &attr), ENOENT);
  attr.comp_mask = 1;
  EXPECT_EQ(ibv_start_poll(cq_.get(), &attr), EINVAL);
}

TEST_F(ExtendedCq, EveryFieldIsReadOfTheCompletionThatIsLookedAt) {
  Create(Attributes(16, IBV_WC_STANDARD_FLAGS | kTimestamps));
  Receive(70);
  Receive(71);
  ibv_send_wr wr = SendWr(80, IBV_WR_SEND_WITH_IMM, 0);
  wr.imm_data = htonl(0x01020304);
  ASSERT_EQ(Send(wr, 100), 0);
  ASSERT_EQ(Send(SendWr(81, IBV_WR_SEND, IBV_SEND_SIGNALED), 33), 0);
  ASSERT_EQ(Start(), 0);
  EXPECT_EQ(cq_->wr_id, 70u);
  EXPECT_EQ(cq_->status, IBV_WC_SUCCESS);
  EXPECT_EQ(ibv_wc_read_opcode(cq_.get()), IBV_WC_RECV);
  EXPECT_EQ(ibv_wc_read_byte_len(cq_.get()), 100u);
  EXPECT_EQ(ibv_wc_read_imm_data(cq_.get()), htonl(0x01020304));
  EXPECT_EQ(ibv_wc_read_wc_flags(cq_.get()), unsigned{IBV_WC_WITH_IMM});
  EXPECT_EQ(ibv_wc_read_qp_num(cq_.get()), qps_[1]->qp_num);
  EXPECT_EQ(ibv_wc_read_src_qp(cq_.get()), qps_[0]->qp_num);
  EXPECT_EQ(ibv_wc_read_vendor_err(cq_.get()), 0u);
  EXPECT_EQ(ibv_wc_read_slid(cq_.get()), 0u);
  EXPECT_EQ(ibv_wc_read_dlid_path_bits(cq_.get()), 0u);
  bool sent = false, received = false;
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(Next(), 0);
    if (cq_->wr_id == 71) {
      received = true;
      EXPECT_EQ(ibv_wc_read_byte_len(cq_.get()), 33u);
      EXPECT_EQ(ibv_wc_read_wc_flags(cq_.get()), 0u);
    } else {
      sent = true;
      EXPECT_EQ(cq_->wr_id, 81u);
      EXPECT_EQ(ibv_wc_read_opcode(cq_.get()), IBV_WC_SEND);
      EXPECT_EQ(ibv_wc_read_qp_num(cq_.get()), qps_[0]->qp_num);
    }
  }
  EXPECT_TRUE(sent && received);
  EXPECT_EQ(ibv_next_poll(cq_.get()), ENOENT);
  ibv_end_poll(cq_.get());
}

TEST_F(ExtendedCq, APollThatIsEndedEarlyLeavesTheRest) {
  Create(Attributes(16));
  for (uint64_t i = 0; i < 3; ++i) Receive(i);
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(Send(SendWr(9, IBV_WR_SEND, 0), 8), 0);
  for (uint64_t i = 0; i < 3; ++i) {
    ASSERT_EQ(Start(), 0);
    EXPECT_EQ(cq_->wr_id, i);
    ibv_end_poll(cq_.get());
  }
}

// start_poll that finds something, next_poll as often as one likes, also after it found nothing,
// end_poll; between them ibv_poll_cq. Whatever the order, each completion comes once, in its turn.
TEST_F(ExtendedCq, EveryOrderOfPollingGivesEachCompletionOnce) {
  Create(Attributes(64));
  Random random(TestSeed());
  SCOPED_TRACE("seed " + std::to_string(TestSeed()));
  constexpr uint64_t kMessages = 2000;
  uint64_t sent = 0, seen = 0;
  const auto post = [&] {
    for (uint64_t i = random.Below(8); i > 0 && sent < kMessages && sent - seen < 60; --i) {
      ASSERT_EQ(Send(RdmaWr(sent, IBV_WR_RDMA_WRITE, memory_.address(2048), memory_.rkey()), 8), 0);
      ++sent;
    }
  };
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (seen < kMessages) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    ASSERT_NO_FATAL_FAILURE(post());
    if (random.OneIn(4)) {
      ibv_wc wc[3];
      const int count =
          ibv_poll_cq(ibv_cq_ex_to_cq(cq_.get()), static_cast<int>(random.Below(4)), wc);
      ASSERT_GE(count, 0);
      for (int i = 0; i < count; ++i) ASSERT_EQ(wc[i].wr_id, seen++);
      continue;
    }
    ibv_poll_cq_attr attr = {};
    const int started = ibv_start_poll(cq_.get(), &attr);
    if (started == ENOENT) continue;  // and no end_poll
    ASSERT_EQ(started, 0);
    ASSERT_EQ(cq_->wr_id, seen++);
    for (uint64_t i = random.Below(6); i > 0; --i) {
      if (random.OneIn(3)) {
        ASSERT_NO_FATAL_FAILURE(post());  // while the poll is open
      }
      const int next = ibv_next_poll(cq_.get());
      if (next == ENOENT) continue;
      ASSERT_EQ(next, 0);
      ASSERT_EQ(cq_->wr_id, seen++);
      ASSERT_EQ(cq_->status, IBV_WC_SUCCESS);
      ASSERT_EQ(ibv_wc_read_opcode(cq_.get()), IBV_WC_RDMA_WRITE);
    }
    ibv_end_poll(cq_.get());
  }
  EXPECT_EQ(sent, kMessages);
  ibv_poll_cq_attr attr = {};
  EXPECT_EQ(ibv_start_poll(cq_.get(), &attr), ENOENT);
}

TEST_F(ExtendedCq, IsAPlainCqToo) {
  Create(Attributes(16));
  Receive(5);
  ASSERT_EQ(Send(SendWr(6, IBV_WR_SEND, 0), 8), 0);
  const ibv_wc wc = PollOne(ibv_cq_ex_to_cq(cq_.get()));
  EXPECT_EQ(wc.wr_id, 5u);
  EXPECT_EQ(wc.byte_len, 8u);
}

TEST_F(ExtendedCq, TimestampsAreOfTheDeviceClockAndOfTheWallClock) {
  Create(Attributes(16, kTimestamps));
  ibv_device_attr_ex device = {};
  ASSERT_EQ(ibv_query_device_ex(context_.get(), nullptr, &device), 0);
  EXPECT_NE(device.completion_timestamp_mask, 0u);
  ASSERT_NE(device.hca_core_clock, 0u);  // kHz
  const auto ticks = [this] {
    ibv_values_ex values = {};
    values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
    EXPECT_EQ(ibv_query_rt_values_ex(context_.get(), &values), 0);
    EXPECT_EQ(values.comp_mask, uint32_t{IBV_VALUES_MASK_RAW_CLOCK});
    return static_cast<uint64_t>(values.raw_clock.tv_sec) * 1'000'000'000 +
           static_cast<uint64_t>(values.raw_clock.tv_nsec);
  };
  const auto wall = [] {
    timespec now = {};
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
  };
  const uint64_t ticks_before = ticks();
  const uint64_t wall_before = wall();
  Receive(1);
  ASSERT_EQ(Send(SendWr(2, IBV_WR_SEND, 0), 8), 0);
  ASSERT_EQ(Start(), 0);
  const uint64_t stamp = ibv_wc_read_completion_ts(cq_.get());
  const uint64_t wall_stamp = ibv_wc_read_completion_wallclock_ns(cq_.get());
  ibv_end_poll(cq_.get());
  EXPECT_GE(stamp, ticks_before);
  EXPECT_LE(stamp, ticks());
  constexpr uint64_t kSlack = 2'000'000;  // the wall clock may be adjusted
  EXPECT_GE(wall_stamp + kSlack, wall_before);
  EXPECT_LE(wall_stamp, wall() + kSlack);
}

TEST_F(ExtendedCq, WrongAttributesAreRefused) {
  const auto error_of = [this](ibv_cq_init_attr_ex attr) {
    errno = 0;
    ibv_cq_ex* cq = ibv_create_cq_ex(context_.get(), &attr);
    if (cq != nullptr) ibv_destroy_cq(ibv_cq_ex_to_cq(cq));
    return cq != nullptr ? 0 : errno;
  };
  ibv_cq_init_attr_ex attr = Attributes(0);
  EXPECT_EQ(error_of(attr), EINVAL);
  attr = Attributes(1 << 30);
  EXPECT_EQ(error_of(attr), EINVAL);
  attr = Attributes(8);
  attr.comp_vector = static_cast<uint32_t>(context_->num_comp_vectors);
  EXPECT_EQ(error_of(attr), EINVAL);
  attr = Attributes(8, 1u << 20);
  EXPECT_NE(error_of(attr), 0);
  attr = Attributes(8);
  attr.comp_mask = 1u << 9;
  EXPECT_EQ(error_of(attr), EINVAL);
  attr = Attributes(8);
  attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
  attr.flags = 1u << 9;
  EXPECT_EQ(error_of(attr), EOPNOTSUPP);
  attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
  EXPECT_EQ(error_of(attr), 0);
}

TEST_F(ExtendedCq, OneThatIgnoresOverrunsGoesOnAfterOne) {
  ibv_cq_init_attr_ex attr = Attributes(4);
  attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
  attr.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
  Create(attr);
  for (int i = 0; i < 20; ++i)
    ASSERT_EQ(Send(RdmaWr(1, IBV_WR_RDMA_WRITE, memory_.address(2048), memory_.rkey()), 8), 0);
  EXPECT_FALSE(NextAsyncEvent(context_.get(), Milliseconds(200)).has_value());
  ibv_qp_attr qp = {};
  ibv_qp_init_attr init = {};
  ASSERT_EQ(ibv_query_qp(qps_[0].get(), &qp, IBV_QP_STATE, &init), 0);
  EXPECT_EQ(qp.qp_state, IBV_QPS_RTS);
}

class ExtendedCqWithFaults : public ExtendedCq {
 protected:
  void SetUp() override { Create(Attributes(16)); }
  void TearDown() override { EXPECT_EQ(VerbenaHere({"fault", "clear"}).status, 0); }
  void Add(const std::string& rule) {
    const Finished added =
        VerbenaHere({"fault", "add", rule + " qpn=" + std::to_string(qps_[0]->qp_num)});
    ASSERT_EQ(added.status, 0) << added.output;
  }
  // An RDMA WRITE of the first QP into the second's memory.
  void Write(uint64_t wr_id) {
    ASSERT_EQ(Send(RdmaWr(wr_id, IBV_WR_RDMA_WRITE, memory_.address() + 2048, memory_.rkey()), 64),
              0);
  }
  void ExpectNext(uint64_t wr_id, ibv_wc_status status) {
    ASSERT_EQ(Start(), 0);
    EXPECT_EQ(cq_->wr_id, wr_id);
    EXPECT_EQ(cq_->status, status);
    last_vendor_err_ = ibv_wc_read_vendor_err(cq_.get());
    ibv_end_poll(cq_.get());
  }
  uint32_t last_vendor_err_ = 0;
};

TEST_F(ExtendedCqWithFaults, ACompletionGetsAnotherStatus) {
  Add("complete status=REM_OP_ERR vendor_err=0x81 nth=2");
  Write(1);
  ExpectNext(1, IBV_WC_SUCCESS);
  EXPECT_EQ(last_vendor_err_, 0u);
  Write(2);
  ExpectNext(2, IBV_WC_REM_OP_ERR);
  EXPECT_EQ(last_vendor_err_, 0x81u);
}

TEST_F(ExtendedCqWithFaults, CompletionsAreLostAndDoubled) {
  Add("lose_completion nth=1");
  Add("duplicate_completion nth=2");
  for (const uint64_t wr_id : {1, 2, 3}) Write(wr_id);
  // The first rule takes 1; 2 is the second that the other one sees.
  for (const uint64_t wr_id : {2, 2, 3}) ExpectNext(wr_id, IBV_WC_SUCCESS);
  ibv_poll_cq_attr attr = {};
  EXPECT_EQ(ibv_start_poll(cq_.get(), &attr), ENOENT);
}

TEST_F(ExtendedCqWithFaults, ADelayedCompletionIsNotThereBefore) {
  Add("delay_completion us=100000 nth=1");
  const auto start = std::chrono::steady_clock::now();
  Write(1);
  ExpectNext(1, IBV_WC_SUCCESS);
  EXPECT_GE(std::chrono::steady_clock::now() - start, Milliseconds(100));
}

TEST_F(ExtendedCqWithFaults, AnOverrunEndsIt) {
  Add("cq_overrun nth=1");
  Write(1);
  ibv_async_event event;
  ASSERT_EQ(ibv_get_async_event(context_.get(), &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_CQ_ERR);
  EXPECT_EQ(event.element.cq, ibv_cq_ex_to_cq(cq_.get()));
  ibv_ack_async_event(&event);
}

TEST_F(ExtendedCq, StartingAPollFailsAsPollingDoes) {
  Create(Attributes(16));
  Receive(5);
  ASSERT_EQ(Send(SendWr(6, IBV_WR_SEND, 0), 8), 0);
  ASSERT_EQ(Start(), 0);
  ibv_end_poll(cq_.get());
  Receive(7);
  ASSERT_EQ(Send(SendWr(8, IBV_WR_SEND, 0), 8), 0);
  ASSERT_EQ(VerbenaHere({"fault", "add", "fail verb=poll_cq errno=EIO count=1"}).status, 0);
  ibv_poll_cq_attr attr = {};
  EXPECT_EQ(ibv_start_poll(cq_.get(), &attr), EIO);
  EXPECT_EQ(Start(), 0);  // Nothing was lost, nothing stays locked.
  EXPECT_EQ(cq_->wr_id, 7u);
  ibv_end_poll(cq_.get());
  EXPECT_EQ(VerbenaHere({"fault", "clear"}).status, 0);
}

TEST_F(ExtendedCq, TwoThreadsPollOneCq) {
  Create(Attributes(256));
  constexpr uint64_t kMessages = 3000;
  std::atomic<uint64_t> seen{0}, sum{0};
  const auto poll = [&] {
    ibv_poll_cq_attr attr = {};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (seen.load() < kMessages && std::chrono::steady_clock::now() < end) {
      if (ibv_start_poll(cq_.get(), &attr) != 0) continue;
      do {
        EXPECT_EQ(cq_->status, IBV_WC_SUCCESS);
        sum += cq_->wr_id;
        ++seen;
      } while (ibv_next_poll(cq_.get()) == 0);
      ibv_end_poll(cq_.get());
    }
  };
  std::thread one(poll), two(poll);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (uint64_t i = 0; i < kMessages; ++i) {
    const ibv_send_wr wr = RdmaWr(i, IBV_WR_RDMA_WRITE, memory_.address(2048), memory_.rkey());
    int error;
    while ((error = Send(wr, 8)) == ENOMEM && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    ASSERT_EQ(error, 0);
  }
  one.join();
  two.join();
  EXPECT_EQ(seen.load(), kMessages);
  EXPECT_EQ(sum.load(), kMessages * (kMessages - 1) / 2);
}

TEST(ResizeCq, KeepsWhatIsNotPolledAndRefusesToLoseIt) {
  RcEnd a(EndOptions{.cqe = 8}), b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b);
  Memory local(a.pd(), 64), remote(b.pd(), 64);
  const auto write = [&](uint64_t id) {
    ASSERT_EQ(a.PostSend(RdmaWr(id, IBV_WR_RDMA_WRITE, remote.address(), remote.rkey()),
                         {local.sge(0, 8)}),
              0);
  };
  const int before = a.send_cq()->cqe;
  for (uint64_t i = 0; i < 6; ++i) write(i);
  // All six are there when the last is; they are left unpolled.
  for (int i = 0; i < 3; ++i) EXPECT_EQ(PollOne(a.send_cq()).wr_id, static_cast<uint64_t>(i));
  ASSERT_TRUE(StaysEmpty(b.recv_cq(), Milliseconds(100)));
  EXPECT_EQ(ibv_resize_cq(a.send_cq(), 1), EINVAL);
  EXPECT_EQ(a.send_cq()->cqe, before);
  EXPECT_EQ(ibv_resize_cq(a.send_cq(), 0), EINVAL);
  ASSERT_EQ(ibv_resize_cq(a.send_cq(), 100), 0);
  EXPECT_GE(a.send_cq()->cqe, 100);
  for (uint64_t i = 6; i < 40; ++i) write(i);
  for (uint64_t i = 3; i < 20; ++i) EXPECT_EQ(PollOne(a.send_cq()).wr_id, i);
  ASSERT_EQ(ibv_resize_cq(a.send_cq(), 32), 0);
  for (uint64_t i = 20; i < 40; ++i) EXPECT_EQ(PollOne(a.send_cq()).wr_id, i);
  EXPECT_TRUE(StaysEmpty(a.send_cq(), Milliseconds(50)));
}

TEST(ResizeCq, UnderTrafficNothingIsLostNorReordered) {
  RcEnd a(EndOptions{.cqe = 128}), b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b);
  Memory local(a.pd(), 64), remote(b.pd(), 64);
  std::atomic<bool> stop{false};
  std::atomic<int> resizes{0};
  std::thread resizer([&] {
    for (int i = 0; !stop.load(); ++i) {
      static constexpr int kSizes[] = {65, 1000, 128, 300};
      EXPECT_EQ(ibv_resize_cq(a.send_cq(), kSizes[i % 4]), 0);
      ++resizes;
    }
  });
  constexpr uint64_t kMessages = 5000;
  uint64_t posted = 0, polled = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while ((polled < kMessages || resizes.load() < 8) && std::chrono::steady_clock::now() < end) {
    if (polled == kMessages) continue;
    while (posted < kMessages && posted - polled < 60) {
      ASSERT_EQ(a.PostSend(RdmaWr(posted, IBV_WR_RDMA_WRITE, remote.address(), remote.rkey()),
                           {local.sge(0, 8)}),
                0);
      ++posted;
    }
    ibv_wc wc[16];
    const int count = ibv_poll_cq(a.send_cq(), 16, wc);
    ASSERT_GE(count, 0);
    for (int i = 0; i < count; ++i, ++polled) {
      ASSERT_EQ(wc[i].status, IBV_WC_SUCCESS);
      ASSERT_EQ(wc[i].wr_id, polled);
    }
  }
  stop = true;
  resizer.join();
  EXPECT_EQ(polled, kMessages);
  EXPECT_GE(resizes.load(), 8);
}

TEST(CqModeration, AnEventWaitsForItsCountOrItsPeriod) {
  RcEnd a(EndOptions{.channel = true}), b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b);
  Memory local(a.pd(), 64), remote(b.pd(), 64);
  const auto write = [&] {
    ASSERT_EQ(a.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, remote.address(), remote.rkey()),
                         {local.sge(0, 8)}),
              0);
  };
  ibv_modify_cq_attr attr = {};
  attr.attr_mask = IBV_CQ_ATTR_MODERATE;
  attr.moderate = {.cq_count = 4, .cq_period = 0xffff};  // 65 ms
  ASSERT_EQ(ibv_modify_cq(a.send_cq(), &attr), 0);
  ASSERT_EQ(ibv_req_notify_cq(a.send_cq(), 0), 0);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 4; ++i) write();
  ASSERT_EQ(NextCqEvent(a.channel(), Milliseconds(20000)), a.send_cq());
  for (int i = 0; i < 4; ++i) PollOne(a.send_cq());
  ASSERT_EQ(ibv_req_notify_cq(a.send_cq(), 0), 0);
  const auto second = std::chrono::steady_clock::now();
  write();
  PollOne(a.send_cq());  // it is there, but its event waits
  ASSERT_EQ(NextCqEvent(a.channel(), Milliseconds(20000)), a.send_cq());
  const auto waited = std::chrono::steady_clock::now() - second;
  EXPECT_GE(waited, std::chrono::milliseconds(60));
  static_cast<void>(start);
  attr.attr_mask = 0;
  EXPECT_EQ(ibv_modify_cq(a.send_cq(), &attr), EINVAL);
  attr.attr_mask = 1u << 5;
  EXPECT_EQ(ibv_modify_cq(a.send_cq(), &attr), EINVAL);
}

}  // namespace
}  // namespace verbena::testing
