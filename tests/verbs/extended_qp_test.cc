// SPDX-License-Identifier: Apache-2.0
//
// Posting by ibv_wr_*: ibv_wr_post(3).
#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "tests/verbs/verbs_support.h"

// The provider's locks are not instrumented (it is loaded into any program), so the thread
// sanitizer is told of what they order.
#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace verbena::testing {
namespace {

void NoteAcquired([[maybe_unused]] void* locked) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(locked);
#endif
}
void NoteReleased([[maybe_unused]] void* locked) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(locked);
#endif
}

constexpr uint64_t kRcOps = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
                            IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
                            IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
                            IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_LOCAL_INV |
                            IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV;

class ExtendedQp : public ::testing::Test {
 protected:
  ExtendedQp()
      : a_(EndOptions{.send_wr = 16, .sge = 4, .max_inline = 128, .send_ops = kRcOps}),
        b_(EndOptions{.device = "verbena1"}) {
    ConnectPair(a_, b_);
    ex_ = ibv_qp_to_qp_ex(a_.qp());
    FillPattern(local_.bytes(), 1);
  }
  // Number of the WQEs that fit.
  uint32_t Capacity() {
    ibv_qp_attr attr = {};
    ibv_qp_init_attr init = {};
    EXPECT_EQ(ibv_query_qp(a_.qp(), &attr, IBV_QP_CAP, &init), 0);
    max_inline_ = init.cap.max_inline_data;
    max_sge_ = init.cap.max_send_sge;
    return init.cap.max_send_wr;
  }
  void Expect(uint64_t wr_id, ibv_wc_opcode opcode) {
    const ibv_wc wc = PollOne(a_.send_cq());
    EXPECT_EQ(wc.wr_id, wr_id);
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    EXPECT_EQ(wc.opcode, opcode);
  }
  void Next(uint64_t wr_id, unsigned flags = IBV_SEND_SIGNALED) {
    ex_->wr_id = wr_id;
    ex_->wr_flags = flags;
  }

  RcEnd a_, b_;
  Memory local_{a_.pd(), 4096}, remote_{b_.pd(), 4096};
  ibv_qp_ex* ex_ = nullptr;
  uint32_t max_inline_ = 0, max_sge_ = 0;
};

TEST_F(ExtendedQp, EveryOperationOfAReliableConnection) {
  ASSERT_NE(ex_, nullptr);
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(b_.PostRecv(i, {remote_.sge(1024 * i, 1024)}), 0);
  uint64_t word = 40;
  memcpy(remote_.data() + 3584, &word, 8);
  ibv_wr_start(ex_);
  Next(1);
  ibv_wr_rdma_write(ex_, remote_.rkey(), remote_.address(3072));
  ibv_wr_set_sge(ex_, local_.lkey(), local_.address(), 100);
  Next(2);
  ibv_wr_send(ex_);
  const ibv_sge list[] = {local_.sge(0, 10), local_.sge(10, 0), local_.sge(10, 20)};
  ibv_wr_set_sge_list(ex_, 3, list);
  Next(3);
  ibv_wr_send_imm(ex_, htonl(7));
  ibv_wr_set_sge(ex_, local_.lkey(), local_.address(), 50);
  Next(4);
  ibv_wr_rdma_write_imm(ex_, remote_.rkey(), remote_.address(3200), htonl(8));
  ibv_wr_set_sge(ex_, local_.lkey(), local_.address(), 60);
  Next(5);
  ibv_wr_rdma_read(ex_, remote_.rkey(), remote_.address(3072));
  ibv_wr_set_sge(ex_, local_.lkey(), local_.address(1000), 100);
  Next(6);
  ibv_wr_atomic_fetch_add(ex_, remote_.rkey(), remote_.address(3584), 2);
  ibv_wr_set_sge(ex_, local_.lkey(), local_.address(2000), 8);
  Next(7);
  ibv_wr_atomic_cmp_swp(ex_, remote_.rkey(), remote_.address(3584), 42, 77);
  ibv_wr_set_sge(ex_, local_.lkey(), local_.address(2008), 8);
  ASSERT_EQ(ibv_wr_complete(ex_), 0);
  Expect(1, IBV_WC_RDMA_WRITE);
  Expect(2, IBV_WC_SEND);
  Expect(3, IBV_WC_SEND);
  Expect(4, IBV_WC_RDMA_WRITE);
  Expect(5, IBV_WC_RDMA_READ);
  Expect(6, IBV_WC_FETCH_ADD);
  Expect(7, IBV_WC_COMP_SWAP);
  EXPECT_EQ(memcmp(remote_.data() + 3072, local_.data(), 100), 0);
  EXPECT_EQ(memcmp(local_.data() + 1000, local_.data(), 100), 0);
  EXPECT_EQ(PatternMismatch(remote_.bytes().subspan(0, 30), 1), std::nullopt);
  const uint64_t expected[] = {40, 42};
  EXPECT_EQ(memcmp(local_.data() + 2000, expected, 16), 0);
  memcpy(&word, remote_.data() + 3584, 8);
  EXPECT_EQ(word, 77u);
  EXPECT_EQ(PollOne(b_.recv_cq()).byte_len, 30u);
  EXPECT_EQ(PollOne(b_.recv_cq()).imm_data, htonl(7));
  const ibv_wc last = PollOne(b_.recv_cq());
  EXPECT_EQ(last.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(last.imm_data, htonl(8));
}

TEST_F(ExtendedQp, AnAtomicWriteWritesEightBytes) {
  constexpr uint64_t kWithAtomicWrite = 1u << 12;  // of rdma-core 44
  RcEnd a(EndOptions{.send_ops = kWithAtomicWrite | IBV_QP_EX_WITH_SEND}), b;
  ConnectPair(a, b);
  Memory remote(b.pd(), 64);
  ibv_qp_ex* ex = ibv_qp_to_qp_ex(a.qp());
  ASSERT_NE(ex, nullptr);
  const uint64_t value = 0x1122334455667788;
  for (size_t i = 0; i < 40; ++i) {
    const uint64_t word = value + i;
    ibv_wr_start(ex);
    ex->wr_id = i;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_atomic_write(ex, remote.rkey(), remote.address(8), &word);
    ASSERT_EQ(ibv_wr_complete(ex), 0);
    const ibv_wc wc = PollOne(a.send_cq());
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    EXPECT_EQ(static_cast<int>(wc.opcode), 9);  // IBV_WC_ATOMIC_WRITE
    uint64_t seen = 0;
    memcpy(&seen, remote.data() + 8, 8);
    ASSERT_EQ(seen, word);
  }
  ibv_wr_start(ex);
  ibv_wr_atomic_write(ex, remote.rkey(), remote.address(12), &value);
  ASSERT_EQ(ibv_wr_complete(ex), 0);
  EXPECT_EQ(PollOne(a.send_cq()).status, IBV_WC_REM_INV_REQ_ERR);
}

TEST_F(ExtendedQp, WhatIsAbortedIsNeverSeen) {
  ibv_wr_start(ex_);
  for (uint64_t i = 0; i < 5; ++i) {
    Next(i);
    ibv_wr_rdma_write(ex_, remote_.rkey(), remote_.address());
    ibv_wr_set_sge(ex_, local_.lkey(), local_.address(), 8);
  }
  ibv_wr_abort(ex_);
  ibv_wr_start(ex_);
  Next(99);
  ibv_wr_rdma_write(ex_, remote_.rkey(), remote_.address(8));
  ibv_wr_set_sge(ex_, local_.lkey(), local_.address(), 8);
  ASSERT_EQ(ibv_wr_complete(ex_), 0);
  Expect(99, IBV_WC_RDMA_WRITE);
  EXPECT_TRUE(StaysEmpty(a_.send_cq(), Milliseconds(50)));
  EXPECT_EQ(remote_.data()[0], 0);
}

TEST_F(ExtendedQp, NothingOfABatchThatDoesNotFitIsPosted) {
  const uint32_t capacity = Capacity();
  for (const uint32_t count : {capacity + 1, capacity}) {
    ibv_wr_start(ex_);
    for (uint32_t i = 0; i < count; ++i) {
      Next(i);
      ibv_wr_rdma_write(ex_, remote_.rkey(), remote_.address());
      ibv_wr_set_sge(ex_, local_.lkey(), local_.address(), 8);
    }
    EXPECT_EQ(ibv_wr_complete(ex_), count > capacity ? ENOMEM : 0);
    if (count > capacity) {
      EXPECT_TRUE(StaysEmpty(a_.send_cq(), Milliseconds(50)));
    }
  }
  for (uint32_t i = 0; i < capacity; ++i) Expect(i, IBV_WC_RDMA_WRITE);
}

TEST_F(ExtendedQp, InlineDataAndListsUpToTheLimit) {
  Capacity();
  ASSERT_GE(max_inline_, 128u);
  std::vector<uint8_t> bytes(max_inline_ * 4);
  FillPattern(bytes, 5);
  const auto post = [&](size_t length, bool list) {
    ibv_wr_start(ex_);
    Next(1, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
    ibv_wr_rdma_write(ex_, remote_.rkey(), remote_.address());
    if (list) {
      const ibv_data_buf buffers[] = {{bytes.data(), length / 2},
                                      {nullptr, 0},
                                      {bytes.data() + length / 2, length - length / 2}};
      ibv_wr_set_inline_data_list(ex_, 3, buffers);
    } else {
      ibv_wr_set_inline_data(ex_, bytes.data(), length);
    }
    return ibv_wr_complete(ex_);
  };
  for (const bool list : {false, true}) {
    for (const size_t length : {size_t{0}, size_t{1}, size_t{max_inline_}}) {
      memset(remote_.data(), 0, 4096);
      ASSERT_EQ(post(length, list), 0) << length;
      Expect(1, IBV_WC_RDMA_WRITE);
      EXPECT_EQ(PatternMismatch(remote_.bytes().subspan(0, length), 5), std::nullopt) << length;
      EXPECT_EQ(remote_.data()[length], 0);
    }
    EXPECT_NE(post(max_inline_ + 1, list), 0);
    EXPECT_NE(post(max_inline_ * 4, list), 0);
    // Far over: nothing of it is read, so it need not be there.
    for (const size_t length :
         {size_t{1} << 31, size_t{1} << 32, size_t{1} << 32 | 2, ~size_t{0}}) {
      EXPECT_NE(post(length, list), 0) << length;
    }
  }
  ASSERT_EQ(post(8, false), 0);  // it is as good as before
  Expect(1, IBV_WC_RDMA_WRITE);
}

TEST_F(ExtendedQp, TooManySgesAreRefused) {
  Capacity();
  std::vector<ibv_sge> list(max_sge_ + 1, local_.sge(0, 4));
  for (const size_t count : {size_t{max_sge_} + 1, size_t{max_sge_}}) {
    ibv_wr_start(ex_);
    Next(3);
    ibv_wr_rdma_write(ex_, remote_.rkey(), remote_.address());
    ibv_wr_set_sge_list(ex_, count, list.data());
    EXPECT_EQ(ibv_wr_complete(ex_) == 0, count == max_sge_);
  }
  Expect(3, IBV_WC_RDMA_WRITE);
}

TEST_F(ExtendedQp, ListsFarOverTheLimitAreRefused) {
  const std::vector<ibv_sge> list(5000, local_.sge(0, 1));
  const std::vector<ibv_data_buf> buffers(5000, ibv_data_buf{local_.data(), 1});
  for (const bool is_inline : {false, true}) {
    ibv_wr_start(ex_);
    Next(3, IBV_SEND_SIGNALED | (is_inline ? unsigned{IBV_SEND_INLINE} : 0));
    ibv_wr_rdma_write(ex_, remote_.rkey(), remote_.address());
    if (is_inline) {
      ibv_wr_set_inline_data_list(ex_, buffers.size(), buffers.data());
    } else {
      ibv_wr_set_sge_list(ex_, list.size(), list.data());
    }
    EXPECT_NE(ibv_wr_complete(ex_), 0);
  }
  EXPECT_TRUE(StaysEmpty(a_.send_cq(), Milliseconds(20)));
}

TEST_F(ExtendedQp, WindowsAreBoundAndInvalidated) {
  RcEnd owner(EndOptions{.device = "verbena1", .send_ops = kRcOps});
  RcEnd peer(EndOptions{.send_ops = kRcOps});
  ConnectPair(owner, peer);
  Memory region(owner.pd(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
  Memory source(peer.pd(), 64);
  ibv_qp_ex* const ex = ibv_qp_to_qp_ex(owner.qp());
  ibv_qp_ex* const peer_ex = ibv_qp_to_qp_ex(peer.qp());
  const Owned<ibv_mw> mw(ibv_alloc_mw(owner.pd(), IBV_MW_TYPE_2));
  uint32_t rkey = mw->rkey;
  const ibv_mw_bind_info info = {.mr = region.mr(),
                                 .addr = region.address(),
                                 .length = 64,
                                 .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
  const auto bind = [&] {
    rkey = ibv_inc_rkey(rkey);
    ibv_wr_start(ex);
    ex->wr_id = 1;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_bind_mw(ex, mw.get(), rkey, &info);
    EXPECT_EQ(ibv_wr_complete(ex), 0);
    const ibv_wc wc = PollOne(owner.send_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    EXPECT_EQ(wc.opcode, IBV_WC_BIND_MW);
  };
  bind();
  ibv_wr_start(ex);
  ex->wr_id = 2;
  ex->wr_flags = IBV_SEND_SIGNALED;
  ibv_wr_local_inv(ex, rkey);
  ASSERT_EQ(ibv_wr_complete(ex), 0);
  const ibv_wc local = PollOne(owner.send_cq());
  EXPECT_EQ(local.status, IBV_WC_SUCCESS) << Describe(local);
  EXPECT_EQ(local.opcode, IBV_WC_LOCAL_INV);
  bind();
  ASSERT_EQ(owner.PostRecv(9), 0);
  ibv_wr_start(peer_ex);
  peer_ex->wr_id = 3;
  peer_ex->wr_flags = IBV_SEND_SIGNALED;
  ibv_wr_rdma_write(peer_ex, rkey, region.address());
  ibv_wr_set_sge(peer_ex, source.lkey(), source.address(), 64);
  peer_ex->wr_id = 4;
  ibv_wr_send_inv(peer_ex, rkey);
  ASSERT_EQ(ibv_wr_complete(peer_ex), 0);
  EXPECT_EQ(PollOne(peer.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(peer.send_cq()).status, IBV_WC_SUCCESS);
  const ibv_wc got = PollOne(owner.recv_cq());
  EXPECT_TRUE((got.wc_flags & IBV_WC_WITH_INV) != 0);
  EXPECT_EQ(got.invalidated_rkey, rkey);
}

TEST_F(ExtendedQp, PostingBeforeReadyToSendIsRefused) {
  RcEnd end(EndOptions{.send_ops = kRcOps});
  ibv_qp_ex* ex = ibv_qp_to_qp_ex(end.qp());
  ASSERT_NE(ex, nullptr);
  ibv_wr_start(ex);
  ibv_wr_send(ex);
  EXPECT_EQ(ibv_wr_complete(ex), EINVAL);
}

TEST_F(ExtendedQp, ManyThreadsPostToOneQp) {
  constexpr int kThreads = 4, kEach = 500;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this] {
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      for (int i = 0; i < kEach;) {
        ibv_wr_start(ex_);
        NoteAcquired(ex_);
        Next(1);
        ibv_wr_atomic_fetch_add(ex_, remote_.rkey(), remote_.address(), 1);
        ibv_wr_set_sge(ex_, local_.lkey(), local_.address(), 8);
        NoteReleased(ex_);
        const int error = ibv_wr_complete(ex_);
        if (error == 0) {
          ++i;
        } else if (error != ENOMEM || std::chrono::steady_clock::now() > end) {
          ADD_FAILURE() << strerror(error);
          return;
        } else {
          std::this_thread::yield();
        }
      }
    });
  }
  for (int i = 0; i < kThreads * kEach; ++i) Expect(1, IBV_WC_FETCH_ADD);
  for (auto& thread : threads) thread.join();
  uint64_t sum = 0;
  memcpy(&sum, remote_.data(), 8);
  EXPECT_EQ(sum, uint64_t{kThreads * kEach});
}

TEST(ExtendedQpCreation, AQpWithoutOperationsIsNoExtendedQp) {
  RcEnd plain;
  EXPECT_EQ(ibv_qp_to_qp_ex(plain.qp()), nullptr);
}

TEST(ExtendedQpCreation, OperationsThatATypeDoesNotHaveAreNotSupported) {
  const auto context = OpenDevice();
  const Owned<ibv_pd> pd(ibv_alloc_pd(context.get()));
  const Owned<ibv_cq> cq(ibv_create_cq(context.get(), 16, nullptr, nullptr, 0));
  const auto error_of = [&](ibv_qp_type type, uint64_t ops) {
    ibv_qp_init_attr_ex init = {};
    init.send_cq = init.recv_cq = cq.get();
    init.cap = {1, 1, 1, 1, 0};
    init.qp_type = type;
    init.pd = pd.get();
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.send_ops_flags = ops;
    errno = 0;
    const Owned<ibv_qp> qp(ibv_create_qp_ex(context.get(), &init));
    return qp != nullptr ? 0 : errno;
  };
  EXPECT_EQ(error_of(IBV_QPT_RC, kRcOps), 0);
  EXPECT_EQ(error_of(IBV_QPT_UD, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM), 0);
  EXPECT_EQ(error_of(IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_WRITE), EOPNOTSUPP);
  EXPECT_EQ(error_of(IBV_QPT_UC, IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV), 0);
  EXPECT_EQ(error_of(IBV_QPT_UC, IBV_QP_EX_WITH_RDMA_READ), EOPNOTSUPP);
  EXPECT_EQ(error_of(IBV_QPT_RC, IBV_QP_EX_WITH_TSO), EOPNOTSUPP);
  EXPECT_EQ(error_of(IBV_QPT_RC, uint64_t{1} << 40), EOPNOTSUPP);
}

}  // namespace
}  // namespace verbena::testing
