// SPDX-License-Identifier: Apache-2.0
//
// The maxima of query_device are reached and not passed, within a time that an
// application would wait.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <vector>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kPatience(60);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSlow = true;  // 100 000 objects take minutes
#else
constexpr bool kSlow = false;
#endif

class Limits : public ::testing::Test {
 protected:
  Limits()
      : context_(OpenDevice()),
        pd_(ibv_alloc_pd(context_.get())),
        cq_(ibv_create_cq(context_.get(), 16, nullptr, nullptr, 0)) {
    Require(ibv_query_device(context_.get(), &attr_) == 0, "ibv_query_device");
  }

  // Makes `limit` objects and finds that one more gives ENOMEM; what is made
  // before by others counts.
  template <typename Object, typename Make>
  void Fill(
      int limit, int there, Make make, const std::function<void()>& when_full = [] {}) {
    const auto end = Clock::now() + kPatience;
    std::vector<Owned<Object>> all;
    for (int i = there; i < limit; ++i) {
      all.emplace_back(make());
      ASSERT_NE(all.back(), nullptr) << i << ": " << strerror(errno);
    }
    errno = 0;
    EXPECT_EQ(make(), nullptr);
    EXPECT_EQ(errno, ENOMEM);
    all.pop_back();
    all.emplace_back(make());
    EXPECT_NE(all.back(), nullptr);
    when_full();
    all.clear();
    EXPECT_LT(Clock::now(), end);
  }

  Owned<ibv_context> context_;
  Owned<ibv_pd> pd_;
  Owned<ibv_cq> cq_;
  ibv_device_attr attr_ = {};
};

TEST_F(Limits, QueuePairs) {
  const auto make = [this] {
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = cq_.get();
    init.qp_type = IBV_QPT_RC;
    init.cap = {.max_send_wr = 1,
                .max_recv_wr = 1,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = 0};
    return ibv_create_qp(pd_.get(), &init);
  };
  // The command waits ten seconds for an answer.
  Fill<ibv_qp>(attr_.max_qp, 0, make, [] {
    if (!kSlow) {
      EXPECT_EQ(VerbenaHere({"list", "qp"}).status, 0);
    }
  });
}

TEST_F(Limits, CompletionQueues) {
  Fill<ibv_cq>(attr_.max_cq, 1,
               [this] { return ibv_create_cq(context_.get(), 1, nullptr, nullptr, 0); });
}

TEST_F(Limits, SharedReceiveQueues) {
  Fill<ibv_srq>(attr_.max_srq, 0, [this] {
    ibv_srq_init_attr init = {nullptr, {1, 1, 0}};
    return ibv_create_srq(pd_.get(), &init);
  });
}

TEST_F(Limits, ProtectionDomains) {
  Fill<ibv_pd>(attr_.max_pd, 1, [this] { return ibv_alloc_pd(context_.get()); });
}

TEST_F(Limits, MemoryRegions) {
  if (kSlow) GTEST_SKIP() << "built with a sanitizer";
  ASSERT_GE(attr_.max_mr, 100'000);
  alignas(64) static uint8_t bytes[64];
  Fill<ibv_mr>(attr_.max_mr, 0, [this] {
    return ibv_reg_mr(pd_.get(), bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
  });
}

TEST_F(Limits, MemoryWindows) {
  if (kSlow) GTEST_SKIP() << "built with a sanitizer";
  Fill<ibv_mw>(attr_.max_mw, 0, [this] { return ibv_alloc_mw(pd_.get(), IBV_MW_TYPE_2); });
}

TEST_F(Limits, AddressHandles) {
  if (kSlow) GTEST_SKIP() << "built with a sanitizer";
  ibv_ah_attr attr = {};
  attr.is_global = 1;
  attr.port_num = 1;
  attr.grh.sgid_index = 1;
  ASSERT_EQ(ibv_query_gid(context_.get(), 1, 1, &attr.grh.dgid), 0);
  Fill<ibv_ah>(attr_.max_ah, 0, [&] { return ibv_create_ah(pd_.get(), &attr); });
}

TEST_F(Limits, WorkQueuesAndTheirTables) {
  ibv_device_attr_ex attr = {};
  ASSERT_EQ(ibv_query_device_ex(context_.get(), nullptr, &attr), 0);
  const auto make = [this] {
    ibv_wq_init_attr init = {};
    init.wq_type = IBV_WQT_RQ;
    init.max_wr = init.max_sge = 1;
    init.pd = pd_.get();
    init.cq = cq_.get();
    return ibv_create_wq(context_.get(), &init);
  };
  Fill<ibv_wq>(static_cast<int>(attr.max_wq_type_rq), 0, make);
  const Owned<ibv_wq> wq(make());
  ASSERT_NE(wq, nullptr);
  ibv_wq* entries[1] = {wq.get()};
  ibv_rwq_ind_table_init_attr init = {.log_ind_tbl_size = 0, .ind_tbl = entries, .comp_mask = 0};
  Fill<ibv_rwq_ind_table>(static_cast<int>(attr.rss_caps.max_rwq_indirection_tables), 0,
                          [&] { return ibv_create_rwq_ind_table(context_.get(), &init); });
}

TEST_F(Limits, TheLargestQueuesWorkAndLargerOnesAreInvalid) {
  const Owned<ibv_cq> cq(ibv_create_cq(context_.get(), attr_.max_cqe, nullptr, nullptr, 0));
  ASSERT_NE(cq, nullptr);
  errno = 0;
  EXPECT_EQ(ibv_create_cq(context_.get(), attr_.max_cqe + 1, nullptr, nullptr, 0), nullptr);
  EXPECT_EQ(errno, EINVAL);
  ibv_qp_init_attr init = {};
  init.send_cq = init.recv_cq = cq.get();
  init.qp_type = IBV_QPT_RC;
  const auto most_wr = static_cast<uint32_t>(attr_.max_qp_wr);
  const auto most_sge = static_cast<uint32_t>(attr_.max_sge);
  init.cap = {.max_send_wr = most_wr,
              .max_recv_wr = most_wr,
              .max_send_sge = most_sge,
              .max_recv_sge = most_sge,
              .max_inline_data = 0};
  const Owned<ibv_qp> qp(ibv_create_qp(pd_.get(), &init));
  ASSERT_NE(qp, nullptr);
  const ibv_qp_cap good = {1, 1, 1, 1, 0};
  for (uint32_t ibv_qp_cap::*field : {&ibv_qp_cap::max_send_wr, &ibv_qp_cap::max_recv_wr,
                                      &ibv_qp_cap::max_send_sge, &ibv_qp_cap::max_recv_sge}) {
    init.cap = good;
    const bool wr = field == &ibv_qp_cap::max_send_wr || field == &ibv_qp_cap::max_recv_wr;
    init.cap.*field = (wr ? most_wr : most_sge) + 1;
    errno = 0;
    EXPECT_EQ(ibv_create_qp(pd_.get(), &init), nullptr);
    EXPECT_EQ(errno, EINVAL);
  }
  // As many receives as there is room for, one more is too many.
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  ASSERT_EQ(ibv_modify_qp(qp.get(), &attr,
                          IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
            0);
  ibv_recv_wr wr = {};
  ibv_recv_wr* bad = nullptr;
  for (uint32_t i = 0; i < most_wr; ++i) ASSERT_EQ(ibv_post_recv(qp.get(), &wr, &bad), 0) << i;
  EXPECT_EQ(ibv_post_recv(qp.get(), &wr, &bad), ENOMEM);
  EXPECT_EQ(bad, &wr);
}

}  // namespace
}  // namespace verbena::testing
