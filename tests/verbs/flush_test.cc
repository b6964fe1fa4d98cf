// SPDX-License-Identifier: Apache-2.0
//
// FLUSH by each right of QP and region (IBTA Vol 1 annex A19). ibv_wr_flush(3) is of libibverbs 45;
// this is built with any, so what the headers may lack stands here.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

constexpr uint64_t kWithFlush = 1u << 13;                 // IBV_QP_EX_WITH_FLUSH
constexpr unsigned kFlushGlobal = 1u << 8;                // IBV_ACCESS_FLUSH_GLOBAL
constexpr unsigned kFlushPersistent = 1u << 9;            // IBV_ACCESS_FLUSH_PERSISTENT
constexpr uint8_t kGlobal = 1, kPersistent = 2;           // IBV_FLUSH_GLOBAL, _PERSISTENT
constexpr uint8_t kRange = 0, kWholeRegion = 1;           // IBV_FLUSH_RANGE, _MR
constexpr auto kWcFlush = static_cast<ibv_wc_opcode>(8);  // IBV_WC_FLUSH

// ibv_qp_ex ends with these two in releases that have ibv_wr_flush.
using WrFlush = void (*)(ibv_qp_ex* qp, uint32_t rkey, uint64_t address, size_t length,
                         uint8_t type, uint8_t level);
constexpr size_t kOffsetOfWrFlush = offsetof(ibv_qp_ex, wr_abort) + 2 * sizeof(void (*)());

class Flush : public ::testing::Test {
 protected:
  // Null: this libibverbs has none (errno EOPNOTSUPP).
  static std::unique_ptr<RcEnd> Requester() {
    try {
      return std::make_unique<RcEnd>(
          EndOptions{.send_ops = kWithFlush | IBV_QP_EX_WITH_RDMA_WRITE});
    } catch (const std::runtime_error&) {
      return nullptr;
    }
  }
  static ibv_wc Perform(RcEnd& end, uint32_t rkey, uint64_t address, size_t length, uint8_t type,
                        uint8_t level) {
    ibv_qp_ex* const ex = ibv_qp_to_qp_ex(end.qp());
    Require(ex != nullptr, "ibv_qp_to_qp_ex");
    WrFlush flush = nullptr;
    memcpy(&flush, reinterpret_cast<const char*>(ex) + kOffsetOfWrFlush, sizeof flush);
    ibv_wr_start(ex);
    ex->wr_id = 1;
    ex->wr_flags = IBV_SEND_SIGNALED;
    flush(ex, rkey, address, length, type, level);
    EXPECT_EQ(ibv_wr_complete(ex), 0);
    return PollOne(end.send_cq());
  }
};

TEST_F(Flush, RightsOfQpAndRegionDecide) {
  if (Requester() == nullptr) {
    EXPECT_EQ(errno, EOPNOTSUPP);
    GTEST_SKIP() << "this libibverbs has no ibv_wr_flush";
  }
  for (const bool qp_right : {false, true}) {
    for (const bool region_right : {false, true}) {
      for (const uint8_t level : {kRange, kWholeRegion}) {
        SCOPED_TRACE(std::string("QP ") + (qp_right ? "with" : "without") + ", region " +
                     (region_right ? "with" : "without") + ", level " + std::to_string(level));
        const auto a = Requester();
        RcEnd b(EndOptions{.device = "verbena1"});
        PathOptions path;
        path.access = kAllAccess | (qp_right ? kFlushGlobal : 0);
        ConnectPair(*a, b, path);
        Memory source(a->pd(), 4096);
        Memory target(b.pd(), 4096, kAllAccess | (region_right ? kFlushGlobal : 0));
        FillPattern(source.bytes(), 5);
        ASSERT_EQ(a->PostSend(RdmaWr(9, IBV_WR_RDMA_WRITE, target.address(), target.rkey(), 0),
                              {source.sge(0, 4096)}),
                  0);
        const ibv_wc wc = Perform(*a, target.rkey(), target.address(), 4096, kGlobal, level);
        const ibv_wc_status status = !qp_right       ? IBV_WC_REM_INV_REQ_ERR
                                     : !region_right ? IBV_WC_REM_ACCESS_ERR
                                                     : IBV_WC_SUCCESS;
        EXPECT_EQ(wc.status, status) << Describe(wc);
        if (status == IBV_WC_SUCCESS) {
          EXPECT_EQ(wc.opcode, kWcFlush);
          EXPECT_EQ(PatternMismatch(target.bytes(), 5), std::nullopt);
          EXPECT_EQ(a->State(), IBV_QPS_RTS);
          EXPECT_EQ(b.State(), IBV_QPS_RTS);
        } else {
          EXPECT_EQ(a->State(), IBV_QPS_ERR);
          EXPECT_EQ(b.State(), IBV_QPS_ERR);
        }
      }
    }
  }
}

TEST_F(Flush, ARangeThatLeavesTheRegionIsAnAccessError) {
  const auto a = Requester();
  if (a == nullptr) GTEST_SKIP() << "this libibverbs has no ibv_wr_flush";
  RcEnd b(EndOptions{.device = "verbena1"});
  PathOptions path;
  path.access = kAllAccess | kFlushGlobal;
  ConnectPair(*a, b, path);
  Memory target(b.pd(), 4096, kAllAccess | kFlushGlobal);
  EXPECT_EQ(Perform(*a, target.rkey(), target.address(4000), 97, kGlobal, kRange).status,
            IBV_WC_REM_ACCESS_ERR);
}

// docs/DEVIATIONS.md: an application's memory does not survive a loss of power.
TEST_F(Flush, NothingIsPersistent) {
  const auto context = OpenDevice();
  const Owned<ibv_pd> pd(ibv_alloc_pd(context.get()));
  uint64_t word = 0;
  errno = 0;
  EXPECT_EQ(ibv_reg_mr(pd.get(), &word, 8, IBV_ACCESS_LOCAL_WRITE | kFlushPersistent), nullptr);
  EXPECT_EQ(errno, EINVAL);
  const auto a = Requester();
  if (a == nullptr) GTEST_SKIP() << "this libibverbs has no ibv_wr_flush";
  RcEnd b(EndOptions{.device = "verbena1"});
  PathOptions path;
  path.access = kAllAccess | kFlushGlobal;
  ConnectPair(*a, b, path);
  Memory target(b.pd(), 4096, kAllAccess | kFlushGlobal);
  EXPECT_EQ(Perform(*a, target.rkey(), target.address(), 64, kPersistent, kRange).status,
            IBV_WC_REM_INV_REQ_ERR);
}

}  // namespace
}  // namespace verbena::testing
