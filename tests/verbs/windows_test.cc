// SPDX-License-Identifier: Apache-2.0
//
// Memory windows of both types: binding, rights, keys, invalidation, and who may destroy what.
// IBTA Vol 1 §10.6.7.2; ibv_bind_mw(3), ibv_alloc_mw(3).
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <functional>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

constexpr unsigned kBindable = kAllAccess | IBV_ACCESS_MW_BIND;
constexpr unsigned kWindowAll =
    IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

// `b` owns windows, `a` goes through them.
class Windows : public ::testing::Test {
 protected:
  Windows() { ConnectPair(a_, b_); }

  static ibv_mw_bind_info Info(const Memory& memory, size_t offset, size_t length,
                               unsigned access) {
    return {.mr = memory.mr(),
            .addr = memory.address(offset),
            .length = length,
            .mw_access_flags = access};
  }
  // Status of the completion of a BIND_MW of `b`.
  ibv_wc_status Bind(RcEnd& end, ibv_mw* mw, uint32_t rkey, const ibv_mw_bind_info& info) {
    ibv_send_wr wr = SendWr(500, IBV_WR_BIND_MW);
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = rkey;
    wr.bind_mw.bind_info = info;
    EXPECT_EQ(end.PostSend(wr), 0);
    const ibv_wc wc = PollOne(end.send_cq());
    EXPECT_EQ(wc.wr_id, 500u);
    if (wc.status == IBV_WC_SUCCESS) {
      EXPECT_EQ(wc.opcode, IBV_WC_BIND_MW);
    }
    return wc.status;
  }
  ibv_wc_status BindType1(ibv_mw* mw, const ibv_mw_bind_info& info) {
    ibv_mw_bind bind = {.wr_id = 7, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
    const uint32_t before = mw->rkey;
    EXPECT_EQ(ibv_bind_mw(b_.qp(), mw, &bind), 0);
    EXPECT_NE(mw->rkey, before);
    EXPECT_EQ(mw->rkey >> 8, before >> 8);
    const ibv_wc wc = PollOne(b_.send_cq());
    EXPECT_EQ(wc.wr_id, 7u);
    return wc.status;
  }
  ibv_wc_status Access(RcEnd& end, ibv_wr_opcode opcode, uint64_t address, uint32_t rkey,
                       uint32_t length = 8) {
    ibv_send_wr wr = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? AtomicWr(600, opcode, address, rkey, 1)
                                                           : RdmaWr(600, opcode, address, rkey);
    EXPECT_EQ(end.PostSend(wr, {local_.sge(0, length)}), 0);
    const ibv_wc wc = PollOne(end.send_cq());
    EXPECT_EQ(wc.wr_id, 600u);
    return wc.status;
  }
  ibv_wc_status Write(uint64_t address, uint32_t rkey, uint32_t length = 8) {
    return Access(a_, IBV_WR_RDMA_WRITE, address, rkey, length);
  }
  Owned<ibv_mw> Window(ibv_mw_type type) {
    Owned<ibv_mw> mw(ibv_alloc_mw(b_.pd(), type));
    Require(mw != nullptr, "ibv_alloc_mw");
    EXPECT_EQ(mw->type, type);
    EXPECT_EQ(mw->pd, b_.pd());
    EXPECT_NE(mw->rkey, 0u);
    return mw;
  }

  RcEnd a_;
  RcEnd b_{EndOptions{.device = "verbena1"}};
  Memory local_{a_.pd(), 8192};
  Memory region_{b_.pd(), 8192, kBindable};
  // Opens nothing to peers by itself.
  Memory closed_{b_.pd(), 8192, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND};
};

TEST_F(Windows, ATypeOneWindowOpensAPartOfARegionForAllQpsOfItsPd) {
  const auto mw = Window(IBV_MW_TYPE_1);
  ASSERT_EQ(BindType1(mw.get(), Info(closed_, 1000, 100, kWindowAll)), IBV_WC_SUCCESS);
  FillPattern(local_.bytes(), 3);
  EXPECT_EQ(Write(closed_.address(1000), mw->rkey, 100), IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch(closed_.bytes().subspan(1000, 100), 3), std::nullopt);
  EXPECT_EQ(closed_.data()[1100], 0);
  EXPECT_EQ(Access(a_, IBV_WR_RDMA_READ, closed_.address(1010), mw->rkey), IBV_WC_SUCCESS);
  EXPECT_EQ(Access(a_, IBV_WR_ATOMIC_FETCH_AND_ADD, closed_.address(1000), mw->rkey),
            IBV_WC_SUCCESS);
  RcEnd c, d(b_, EndOptions{});
  ConnectPair(c, d);
  Memory other(c.pd(), 64);
  ASSERT_EQ(
      c.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, closed_.address(1000), mw->rkey), {other.sge(0, 8)}),
      0);
  EXPECT_EQ(PollOne(c.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(Write(closed_.address(1096), mw->rkey), IBV_WC_REM_ACCESS_ERR);  // 4 bytes too far
}

TEST_F(Windows, RebindingATypeOneWindowEndsItsOldKey) {
  const auto mw = Window(IBV_MW_TYPE_1);
  ASSERT_EQ(BindType1(mw.get(), Info(region_, 0, 100, kWindowAll)), IBV_WC_SUCCESS);
  const uint32_t old = mw->rkey;
  ASSERT_EQ(BindType1(mw.get(), Info(region_, 4096, 100, kWindowAll)), IBV_WC_SUCCESS);
  EXPECT_EQ(Write(region_.address(4096), mw->rkey), IBV_WC_SUCCESS);
  EXPECT_EQ(Write(region_.address(0), old), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Windows, BindingATypeOneWindowToNothingClosesIt) {
  const auto mw = Window(IBV_MW_TYPE_1);
  ASSERT_EQ(BindType1(mw.get(), Info(region_, 0, 100, kWindowAll)), IBV_WC_SUCCESS);
  ASSERT_EQ(BindType1(mw.get(), ibv_mw_bind_info{}), IBV_WC_SUCCESS);
  EXPECT_EQ(Write(region_.address(0), mw->rkey), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Windows, AWindowThatWasNeverBoundOpensNothing) {
  const auto mw = Window(IBV_MW_TYPE_2);
  EXPECT_EQ(Write(region_.address(0), mw->rkey), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Windows, RightsOfAWindowAreItsOwn) {
  const auto mw = Window(IBV_MW_TYPE_2);
  const uint32_t rkey = ibv_inc_rkey(mw->rkey);
  ASSERT_EQ(Bind(b_, mw.get(), rkey, Info(region_, 0, 100, IBV_ACCESS_REMOTE_READ)),
            IBV_WC_SUCCESS);
  EXPECT_EQ(Access(a_, IBV_WR_RDMA_READ, region_.address(), rkey), IBV_WC_SUCCESS);
  EXPECT_EQ(Write(region_.address(), rkey), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(region_.data()[0], 0);
}

TEST_F(Windows, ATypeTwoWindowServesOnlyTheQpThatBoundIt) {
  const auto mw = Window(IBV_MW_TYPE_2);
  const uint32_t rkey = ibv_inc_rkey(mw->rkey);
  ASSERT_EQ(Bind(b_, mw.get(), rkey, Info(region_, 0, 100, kWindowAll)), IBV_WC_SUCCESS);
  EXPECT_EQ(Write(region_.address(), rkey), IBV_WC_SUCCESS);
  RcEnd c, d(b_, EndOptions{});
  ConnectPair(c, d);
  Memory other(c.pd(), 64);
  ASSERT_EQ(c.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, region_.address(), rkey), {other.sge(0, 8)}),
            0);
  EXPECT_EQ(PollOne(c.send_cq()).status, IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Windows, AZeroBasedTypeTwoWindowIsAddressedFromZero) {
  const auto mw = Window(IBV_MW_TYPE_2);
  const uint32_t rkey = ibv_inc_rkey(mw->rkey);
  ASSERT_EQ(Bind(b_, mw.get(), rkey, Info(region_, 512, 100, kWindowAll | IBV_ACCESS_ZERO_BASED)),
            IBV_WC_SUCCESS);
  FillPattern(local_.bytes(), 9);
  EXPECT_EQ(Write(0, rkey, 100), IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch(region_.bytes().subspan(512, 100), 9), std::nullopt);
  EXPECT_EQ(Write(region_.address(512), rkey), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Windows, ALocalInvalidateClosesAndTheWindowCanBeBoundAgain) {
  const auto mw = Window(IBV_MW_TYPE_2);
  uint32_t rkey = mw->rkey;
  for (int i = 0; i < 300; ++i) {  // round all keys of the window
    rkey = ibv_inc_rkey(rkey);
    ASSERT_EQ(Bind(b_, mw.get(), rkey, Info(region_, 0, 100, kWindowAll)), IBV_WC_SUCCESS);
    ASSERT_EQ(Write(region_.address(), rkey), IBV_WC_SUCCESS);
    ibv_send_wr wr = SendWr(501, IBV_WR_LOCAL_INV);
    wr.invalidate_rkey = rkey;
    ASSERT_EQ(b_.PostSend(wr), 0);
    const ibv_wc wc = PollOne(b_.send_cq());
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.opcode, IBV_WC_LOCAL_INV);
  }
  EXPECT_EQ(Write(region_.address(), rkey), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Windows, ASendWithInvalidateClosesThePeersWindowAndTellsItsKey) {
  const auto mw = Window(IBV_MW_TYPE_2);
  const uint32_t rkey = ibv_inc_rkey(mw->rkey);
  ASSERT_EQ(Bind(b_, mw.get(), rkey, Info(region_, 0, 100, kWindowAll)), IBV_WC_SUCCESS);
  ASSERT_EQ(b_.PostRecv(1, {region_.sge(4096, 64)}), 0);
  ibv_send_wr wr = SendWr(2, IBV_WR_SEND_WITH_INV);
  wr.invalidate_rkey = rkey;
  ASSERT_EQ(a_.PostSend(wr, {local_.sge(0, 16)}), 0);
  EXPECT_EQ(PollOne(a_.send_cq()).status, IBV_WC_SUCCESS);
  const ibv_wc wc = PollOne(b_.recv_cq());
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_TRUE((wc.wc_flags & IBV_WC_WITH_INV) != 0);
  EXPECT_EQ(wc.invalidated_rkey, rkey);
  EXPECT_EQ(Write(region_.address(), rkey), IBV_WC_REM_ACCESS_ERR);
}

struct BadBind {
  const char* name;
  std::function<ibv_mw_bind_info(const Memory& bindable, const Memory& plain, ibv_mw* mw,
                                 uint32_t* rkey)>
      make;
};

class BindErrors : public Windows, public ::testing::WithParamInterface<BadBind> {};

TEST_P(BindErrors, CompleteWithABindErrorAndStopTheQp) {
  const auto mw = Window(IBV_MW_TYPE_2);
  uint32_t rkey = ibv_inc_rkey(mw->rkey);
  Memory plain(b_.pd(), 4096);  // without MW_BIND
  const ibv_mw_bind_info info = GetParam().make(region_, plain, mw.get(), &rkey);
  EXPECT_EQ(Bind(b_, mw.get(), rkey, info), IBV_WC_MW_BIND_ERR);
  EXPECT_EQ(b_.State(), IBV_QPS_ERR);
}

INSTANTIATE_TEST_SUITE_P(
    Windows, BindErrors,
    ::testing::Values(
        BadBind{"ARegionWithoutTheRight",
                [](const Memory&, const Memory& plain, ibv_mw*, uint32_t*) {
                  return ibv_mw_bind_info{plain.mr(), plain.address(), 64, kWindowAll};
                }},
        BadBind{"ARangeThatLeavesTheRegion",
                [](const Memory& m, const Memory&, ibv_mw*, uint32_t*) {
                  return ibv_mw_bind_info{m.mr(), m.address(8192 - 63), 64, kWindowAll};
                }},
        BadBind{"AKeyOfAnotherWindow",
                [](const Memory& m, const Memory&, ibv_mw*, uint32_t* rkey) {
                  *rkey ^= 0x100;
                  return ibv_mw_bind_info{m.mr(), m.address(), 64, kWindowAll};
                }},
        BadBind{"NoLengthForTypeTwo",
                [](const Memory& m, const Memory&, ibv_mw*, uint32_t*) {
                  return ibv_mw_bind_info{m.mr(), m.address(), 0, kWindowAll};
                }}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(Windows, ABoundTypeTwoWindowCannotBeBoundAgain) {
  const auto mw = Window(IBV_MW_TYPE_2);
  const uint32_t rkey = ibv_inc_rkey(mw->rkey);
  ASSERT_EQ(Bind(b_, mw.get(), rkey, Info(region_, 0, 100, kWindowAll)), IBV_WC_SUCCESS);
  EXPECT_EQ(Bind(b_, mw.get(), ibv_inc_rkey(rkey), Info(region_, 0, 100, kWindowAll)),
            IBV_WC_MW_BIND_ERR);
}

TEST_F(Windows, AWindowOfAnotherPdCannotBeBound) {
  const Owned<ibv_pd> pd(ibv_alloc_pd(b_.context()));
  const Owned<ibv_mw> mw(ibv_alloc_mw(pd.get(), IBV_MW_TYPE_2));
  ASSERT_NE(mw, nullptr);
  EXPECT_EQ(Bind(b_, mw.get(), ibv_inc_rkey(mw->rkey), Info(region_, 0, 100, kWindowAll)),
            IBV_WC_MW_BIND_ERR);
}

TEST_F(Windows, WritesNeedLocalWriteOfTheRegion) {
  Memory readable(b_.pd(), 4096, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND);
  const auto mw = Window(IBV_MW_TYPE_2);
  const uint32_t rkey = ibv_inc_rkey(mw->rkey);
  ASSERT_EQ(Bind(b_, mw.get(), rkey, Info(readable, 0, 64, IBV_ACCESS_REMOTE_READ)),
            IBV_WC_SUCCESS);
  const auto second = Window(IBV_MW_TYPE_2);
  EXPECT_EQ(Bind(b_, second.get(), ibv_inc_rkey(second->rkey),
                 Info(readable, 0, 64, IBV_ACCESS_REMOTE_WRITE)),
            IBV_WC_MW_BIND_ERR);
}

TEST_F(Windows, InvalidatingWhatMayNotBeIsALocalOperationError) {
  ibv_send_wr wr = SendWr(1, IBV_WR_LOCAL_INV);
  wr.invalidate_rkey = region_.rkey();
  ASSERT_EQ(b_.PostSend(wr), 0);
  EXPECT_EQ(PollOne(b_.send_cq()).status, IBV_WC_LOC_QP_OP_ERR);
  EXPECT_EQ(b_.State(), IBV_QPS_ERR);
}

TEST_F(Windows, ARegionUnderAWindowIsBusy) {
  auto mw = Window(IBV_MW_TYPE_1);
  ibv_mr* mr = ibv_reg_mr(b_.pd(), region_.data(), 4096, static_cast<int>(kBindable));
  ASSERT_NE(mr, nullptr);
  ibv_mw_bind bind = {.wr_id = 1,
                      .send_flags = IBV_SEND_SIGNALED,
                      .bind_info = {mr, region_.address(), 64, kWindowAll}};
  ASSERT_EQ(ibv_bind_mw(b_.qp(), mw.get(), &bind), 0);
  ASSERT_EQ(PollOne(b_.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(ibv_dereg_mr(mr), EBUSY);
  mw.reset();  // bound as it is
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST_F(Windows, DestroyingTheQpFreesItsTypeTwoWindows) {
  const auto mw = Window(IBV_MW_TYPE_2);
  ibv_mr* mr = ibv_reg_mr(b_.pd(), region_.data(), 4096, static_cast<int>(kBindable));
  ASSERT_NE(mr, nullptr);
  ASSERT_EQ(Bind(b_, mw.get(), ibv_inc_rkey(mw->rkey), {mr, region_.address(), 64, kWindowAll}),
            IBV_WC_SUCCESS);
  EXPECT_EQ(ibv_dereg_mr(mr), EBUSY);
  b_.DestroyQp();
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST_F(Windows, APdWithAWindowIsBusy) {
  const Owned<ibv_context> context = OpenDevice();
  ibv_pd* pd = ibv_alloc_pd(context.get());
  ibv_mw* mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
  ASSERT_NE(mw, nullptr);
  EXPECT_EQ(ibv_dealloc_pd(pd), EBUSY);
  EXPECT_EQ(ibv_dealloc_mw(mw), 0);
  EXPECT_EQ(ibv_dealloc_pd(pd), 0);
}

TEST_F(Windows, UnknownTypesAreRefused) {
  errno = 0;
  EXPECT_EQ(ibv_alloc_mw(b_.pd(), static_cast<ibv_mw_type>(3)), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

}  // namespace
}  // namespace verbena::testing
