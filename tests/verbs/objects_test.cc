// SPDX-License-Identifier: Apache-2.0
//
// Life of verbs objects: limits, wrong arguments, use of an object that others need. Errors as
// the man pages give them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

class Objects : public ::testing::Test {
 protected:
  ibv_qp* CreateQp(const ibv_qp_cap& cap, ibv_qp_init_attr* init = nullptr) {
    ibv_qp_init_attr own = {};
    if (init == nullptr) init = &own;
    init->send_cq = init->recv_cq = cq_.get();
    init->qp_type = IBV_QPT_RC;
    init->cap = cap;
    errno = 0;
    return ibv_create_qp(pd_.get(), init);
  }

  Owned<ibv_context> context_ = OpenDevice();
  Owned<ibv_pd> pd_{ibv_alloc_pd(context_.get())};
  Owned<ibv_cq> cq_{ibv_create_cq(context_.get(), 16, nullptr, nullptr, 0)};
};

TEST_F(Objects, APdInUseIsBusy) {
  {
    const Memory memory(pd_.get(), 4096);
    EXPECT_EQ(ibv_dealloc_pd(pd_.get()), EBUSY);
  }
  {
    const Owned<ibv_qp> qp(CreateQp({1, 1, 1, 1, 0}));
    ASSERT_NE(qp, nullptr);
    EXPECT_EQ(ibv_dealloc_pd(pd_.get()), EBUSY);
  }
  EXPECT_EQ(ibv_dealloc_pd(pd_.release()), 0);
}

TEST_F(Objects, ACqInUseIsBusy) {
  {
    const Owned<ibv_qp> qp(CreateQp({1, 1, 1, 1, 0}));
    ASSERT_NE(qp, nullptr);
    EXPECT_EQ(ibv_destroy_cq(cq_.get()), EBUSY);
  }
  EXPECT_EQ(ibv_destroy_cq(cq_.release()), 0);
}

TEST_F(Objects, ACompletionChannelInUseIsBusy) {
  Owned<ibv_comp_channel> channel(ibv_create_comp_channel(context_.get()));
  ASSERT_NE(channel, nullptr);
  {
    const Owned<ibv_cq> cq(ibv_create_cq(context_.get(), 4, nullptr, channel.get(), 0));
    ASSERT_NE(cq, nullptr);
    EXPECT_EQ(ibv_destroy_comp_channel(channel.get()), EBUSY);
  }
  EXPECT_EQ(ibv_destroy_comp_channel(channel.release()), 0);
}

TEST_F(Objects, ClosingADeviceFreesWhatTheApplicationForgot) {
  for (int i = 0; i < 50; ++i) {
    ibv_context* context = OpenDevice().release();
    ibv_pd* pd = ibv_alloc_pd(context);
    ASSERT_NE(pd, nullptr);
    ibv_cq* cq = ibv_create_cq(context, 100, nullptr, nullptr, 0);
    ASSERT_NE(cq, nullptr);
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = cq;
    init.qp_type = IBV_QPT_RC;
    init.cap = {16, 16, 4, 4, 0};
    ASSERT_NE(ibv_create_qp(pd, &init), nullptr);
    ASSERT_EQ(ibv_close_device(context), 0);
  }
}

TEST_F(Objects, CqSizesOutsideTheLimitsAreRefused) {
  for (const int cqe : {0, -1, (1 << 20) + 1}) {
    errno = 0;
    ibv_cq* cq = ibv_create_cq(context_.get(), cqe, nullptr, nullptr, 0);
    EXPECT_EQ(cq, nullptr) << cqe;
    EXPECT_EQ(errno, EINVAL) << cqe;
    if (cq != nullptr) ibv_destroy_cq(cq);
  }
  for (const int cqe : {1, 2, 255, 1 << 20}) {
    const Owned<ibv_cq> cq(ibv_create_cq(context_.get(), cqe, nullptr, nullptr, 0));
    ASSERT_NE(cq, nullptr) << cqe << ": " << strerror(errno);
    EXPECT_GE(cq->cqe, cqe);
  }
}

TEST_F(Objects, CompletionVectorsOutsideTheContextAreRefused) {
  errno = 0;
  EXPECT_EQ(ibv_create_cq(context_.get(), 1, nullptr, nullptr, context_->num_comp_vectors),
            nullptr);
  EXPECT_EQ(errno, EINVAL);
  errno = 0;
  EXPECT_EQ(ibv_create_cq(context_.get(), 1, nullptr, nullptr, -1), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(Objects, QpCapsOutsideTheLimitsAreRefused) {
  const struct {
    const char* what;
    ibv_qp_cap cap;
  } cases[] = {
      {"max_send_wr", {16385, 1, 1, 1, 0}},   {"max_recv_wr", {1, 16385, 1, 1, 0}},
      {"max_send_sge", {1, 1, 33, 1, 0}},     {"max_recv_sge", {1, 1, 1, 33, 0}},
      {"max_inline_data", {1, 1, 1, 1, 513}},
  };
  for (const auto& c : cases) {
    ibv_qp* qp = CreateQp(c.cap);
    EXPECT_EQ(qp, nullptr) << c.what;
    EXPECT_EQ(errno, EINVAL) << c.what;
    if (qp != nullptr) ibv_destroy_qp(qp);
  }
}

TEST_F(Objects, QpCapsAtTheLimitsAreGrantedAndReported) {
  ibv_qp_init_attr init = {};
  const Owned<ibv_qp> qp(CreateQp({16384, 16384, 32, 32, 512}, &init));
  ASSERT_NE(qp, nullptr) << strerror(errno);
  EXPECT_EQ(init.cap.max_send_wr, 16384u);
  EXPECT_EQ(init.cap.max_recv_wr, 16384u);
  EXPECT_EQ(init.cap.max_send_sge, 32u);
  EXPECT_EQ(init.cap.max_recv_sge, 32u);
  EXPECT_EQ(init.cap.max_inline_data, 512u);
}

TEST_F(Objects, QpCapsAreNeverLessThanAskedAndTheSameByQuery) {
  ibv_qp_init_attr init = {};
  const Owned<ibv_qp> qp(CreateQp({5, 7, 3, 2, 20}, &init));
  ASSERT_NE(qp, nullptr);
  EXPECT_GE(init.cap.max_send_wr, 5u);
  EXPECT_GE(init.cap.max_recv_wr, 7u);
  EXPECT_GE(init.cap.max_send_sge, 3u);
  EXPECT_GE(init.cap.max_recv_sge, 2u);
  EXPECT_GE(init.cap.max_inline_data, 20u);
  ibv_qp_attr attr = {};
  ibv_qp_init_attr query = {};
  ASSERT_EQ(ibv_query_qp(qp.get(), &attr, IBV_QP_STATE | IBV_QP_CAP, &query), 0);
  EXPECT_EQ(attr.qp_state, IBV_QPS_RESET);
  EXPECT_EQ(memcmp(&query.cap, &init.cap, sizeof(init.cap)), 0);
  EXPECT_EQ(query.send_cq, cq_.get());
  EXPECT_EQ(query.recv_cq, cq_.get());
  EXPECT_EQ(query.qp_type, IBV_QPT_RC);
}

TEST_F(Objects, AQpWithoutCqsIsRefused) {
  ibv_qp_init_attr init = {};
  init.qp_type = IBV_QPT_RC;
  init.cap = {1, 1, 1, 1, 0};
  errno = 0;
  EXPECT_EQ(ibv_create_qp(pd_.get(), &init), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(Objects, QpNumbersAreUniqueAnd24Bit) {
  std::map<uint32_t, int> seen;
  std::vector<Owned<ibv_qp>> qps;
  for (int i = 0; i < 200; ++i) {
    qps.emplace_back(CreateQp({1, 1, 1, 1, 0}));
    ASSERT_NE(qps.back(), nullptr);
    EXPECT_EQ(++seen[qps.back()->qp_num], 1);
    EXPECT_LE(qps.back()->qp_num, 0xffffffu);
    EXPECT_GT(qps.back()->qp_num, 1u);
  }
}

class Registration : public Objects {
 protected:
  // errno of ibv_reg_mr, 0 for success (deregistered at once).
  int Register(void* address, size_t length, unsigned access) {
    errno = 0;
    ibv_mr* mr = ibv_reg_mr(pd_.get(), address, length, static_cast<int>(access));
    if (mr == nullptr) return errno;
    EXPECT_EQ(ibv_dereg_mr(mr), 0);
    return 0;
  }
};

TEST_F(Registration, UnmappedMemoryIsABadAddress) {
  uint8_t* pages = static_cast<uint8_t*>(
      mmap(nullptr, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  munmap(pages + 4096, 4096);
  EXPECT_EQ(Register(pages, 4096, IBV_ACCESS_LOCAL_WRITE), 0);
  EXPECT_EQ(Register(pages + 4096, 4096, IBV_ACCESS_LOCAL_WRITE), EFAULT);
  EXPECT_EQ(Register(pages + 4096, 4096, 0), EFAULT);
  EXPECT_EQ(Register(pages, 3 * 4096, IBV_ACCESS_LOCAL_WRITE), EFAULT) << "a hole in the middle";
  EXPECT_EQ(Register(pages + 4095, 2, IBV_ACCESS_LOCAL_WRITE), EFAULT) << "one byte too far";
  EXPECT_EQ(Register(pages + 4095, 1, IBV_ACCESS_LOCAL_WRITE), 0);
  munmap(pages, 4096);
  munmap(pages + 2 * 4096, 4096);
}

TEST_F(Registration, ReadOnlyMemoryCannotBeRegisteredForWriting) {
  void* page = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  EXPECT_EQ(Register(page, 4096, 0), 0);
  EXPECT_EQ(Register(page, 4096, IBV_ACCESS_REMOTE_READ), 0);
  EXPECT_EQ(Register(page, 4096, IBV_ACCESS_LOCAL_WRITE), EFAULT);
  munmap(page, 4096);
}

TEST_F(Registration, RemoteWriteOrAtomicWithoutLocalWriteIsInvalid) {
  std::vector<uint8_t> bytes(4096);
  EXPECT_EQ(Register(bytes.data(), 4096, IBV_ACCESS_REMOTE_WRITE), EINVAL);
  EXPECT_EQ(Register(bytes.data(), 4096, IBV_ACCESS_REMOTE_ATOMIC), EINVAL);
  EXPECT_EQ(Register(bytes.data(), 4096, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE), 0);
}

TEST_F(Registration, ARangeThatWrapsAroundIsRefused) {
  errno = 0;
  EXPECT_EQ(ibv_reg_mr(pd_.get(), reinterpret_cast<void*>(~uint64_t{0} - 4095), 1 << 20, 0),
            nullptr);
  EXPECT_TRUE(errno == EFAULT || errno == EINVAL) << strerror(errno);
}

TEST_F(Registration, KeysAreUnique) {
  std::vector<uint8_t> bytes(4096);
  std::map<uint32_t, int> lkeys, rkeys;
  std::vector<Owned<ibv_mr>> regions;
  for (int i = 0; i < 300; ++i) {
    regions.emplace_back(ibv_reg_mr(pd_.get(), bytes.data(), 4096, static_cast<int>(kAllAccess)));
    ASSERT_NE(regions.back(), nullptr);
    EXPECT_EQ(++lkeys[regions.back()->lkey], 1);
    EXPECT_EQ(++rkeys[regions.back()->rkey], 1);
  }
}

TEST_F(Registration, AKeyIsNotGivenOutAgainSoon) {
  std::vector<uint8_t> bytes(4096);
  std::map<uint32_t, int> seen;
  for (int i = 0; i < 300; ++i) {
    const Owned<ibv_mr> mr(ibv_reg_mr(pd_.get(), bytes.data(), 4096, static_cast<int>(kAllAccess)));
    ASSERT_NE(mr, nullptr);
    EXPECT_EQ(++seen[mr->lkey], 1) << "registration " << i;
  }
}

TEST_F(Objects, ReceivesBeyondTheQueueAreRefusedWithNoMemory) {
  RcEnd end((EndOptions{.recv_wr = 8}));
  ASSERT_EQ(end.ToInit(), 0);
  ibv_qp_attr attr = {};
  ibv_qp_init_attr init = {};
  ASSERT_EQ(ibv_query_qp(end.qp(), &attr, IBV_QP_CAP, &init), 0);
  Memory memory(end.pd(), 64);
  uint32_t posted = 0;
  int error = 0;
  while (posted <= init.cap.max_recv_wr && error == 0) {
    error = end.PostRecv(posted, {memory.sge(0, 64)});
    if (error == 0) ++posted;
  }
  EXPECT_EQ(posted, init.cap.max_recv_wr);
  EXPECT_EQ(error, ENOMEM);
}

// Creates objects while the process may have no more descriptors, then while it may have no more
// address space; both must be over when the shortage is.
VERBENA_ROLE(short_of_descriptors) {
  const auto context = OpenDevice();
  std::vector<int> fillers;
  for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0;) fillers.push_back(fd);
  const auto create = [&context](int cqe) {
    errno = 0;
    return Owned<ibv_cq>(ibv_create_cq(context.get(), cqe, nullptr, nullptr, 0));
  };
  Require(create(16) == nullptr && errno == EMFILE, "fail with EMFILE");
  for (const int fd : fillers) close(fd);
  Require(create(16) != nullptr, "create a CQ after that");
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b);
  Require(b.PostRecv(1) == 0 && a.PostSend(SendWr(2)) == 0, "post");
  Require(PollOne(a.send_cq()).status == IBV_WC_SUCCESS, "send");
  return 0;
}

VERBENA_ROLE(short_of_memory) {
  const auto context = OpenDevice();
  rlimit before = {};
  getrlimit(RLIMIT_AS, &before);
  const rlimit tight = {.rlim_cur = 1, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_AS, &tight);
  errno = 0;
  const Owned<ibv_cq> refused(ibv_create_cq(context.get(), 1 << 20, nullptr, nullptr, 0));
  const int error = errno;
  setrlimit(RLIMIT_AS, &before);
  Require(refused == nullptr && error == ENOMEM, "fail with ENOMEM");
  for (const int cqe : {1 << 20, 16}) {
    const Owned<ibv_cq> cq(ibv_create_cq(context.get(), cqe, nullptr, nullptr, 0));
    Require(cq != nullptr, "create a CQ after that");
  }
  return 0;
}

TEST(Shortage, OfDescriptorsFailsOneCreationNotTheContext) {
  const Finished done = RunProcess(RoleProcess("short_of_descriptors"));
  EXPECT_EQ(done.status, 0) << done.output;
}

TEST(Shortage, OfMemoryFailsOneCreationNotTheContext) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer needs address space itself";
#endif
  const Finished done = RunProcess(RoleProcess("short_of_memory"));
  EXPECT_EQ(done.status, 0) << done.output;
}

}  // namespace
}  // namespace verbena::testing
