// SPDX-License-Identifier: Apache-2.0
//
// What ibv_reg_mr(3) accepts, and what the device is told.
#include <sys/mman.h>

#include "provider/memory_check.h"
#include "tests/unit/provider/provider_fixture.h"

namespace verbena::provider {
namespace {

constexpr size_t kPage = 4096;

// Four pages: writable, read-only, no access, writable; then a hole.
class FourPages {
 public:
  FourPages() {
    base_ = static_cast<char*>(
        mmap(nullptr, 5 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + kPage, kPage, PROT_READ);
    mprotect(base_ + 2 * kPage, kPage, PROT_NONE);
    munmap(base_ + 4 * kPage, kPage);
  }
  ~FourPages() { munmap(base_, 4 * kPage); }
  char* page(int n) const { return base_ + static_cast<size_t>(n) * kPage; }

 private:
  char* base_;
};

class CheckRangeBothWays : public ::testing::TestWithParam<bool> {
 protected:
  int Check(const char* address, size_t length, bool write) {
    return CheckRange(reinterpret_cast<uint64_t>(address), length, write, GetParam());
  }
  FourPages pages_;
};

TEST_P(CheckRangeBothWays, SeesProtectionAndHoles) {
  EXPECT_EQ(Check(pages_.page(0), kPage, true), 0);
  EXPECT_EQ(Check(pages_.page(0) + 17, kPage, true), EFAULT);
  EXPECT_EQ(Check(pages_.page(0) + 17, kPage, false), 0);
  EXPECT_EQ(Check(pages_.page(1), kPage, false), 0);
  EXPECT_EQ(Check(pages_.page(1), kPage, true), EFAULT);
  EXPECT_EQ(Check(pages_.page(1), kPage + 1, false), EFAULT);
  EXPECT_EQ(Check(pages_.page(2), 1, false), EFAULT);
  EXPECT_EQ(Check(pages_.page(3), kPage, true), 0);
  EXPECT_EQ(Check(pages_.page(3), kPage + 1, false), EFAULT);
  EXPECT_EQ(Check(pages_.page(4), 1, false), EFAULT);
  EXPECT_EQ(Check(nullptr, 1, false), EFAULT);
}

INSTANTIATE_TEST_SUITE_P(KernelAndMaps, CheckRangeBothWays, ::testing::Bool());

class OpenedPd : public OpenedDevice {
 protected:
  void SetUp() override {
    OpenedDevice::SetUp();
    pd_ = ibv_alloc_pd(context_);
    ASSERT_NE(pd_, nullptr);
  }
  void TearDown() override {
    EXPECT_EQ(ibv_dealloc_pd(pd_), 0);
    OpenedDevice::TearDown();
  }
  // errno of a registration, 0 if it works.
  int Register(void* address, size_t length, unsigned access) {
    errno = 0;
    ibv_mr* mr =
        ibv_reg_mr_iova2(pd_, address, length, reinterpret_cast<uint64_t>(address), access);
    if (mr == nullptr) return errno;
    EXPECT_EQ(ibv_dereg_mr(mr), 0);
    return 0;
  }
  abi::RegMrRequest Request() { return device_.Last<abi::RegMrRequest>(abi::kCmdRegMr); }

  ibv_pd* pd_ = nullptr;
  char buffer_[3 * kPage];
};

TEST_F(OpenedPd, RegistersRangeAndRights) {
  ibv_mr* mr = ibv_reg_mr(pd_, buffer_, 5000, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(Request().pd, pd_->handle);
  EXPECT_EQ(Request().address, reinterpret_cast<uint64_t>(buffer_));
  EXPECT_EQ(Request().iova, reinterpret_cast<uint64_t>(buffer_));
  EXPECT_EQ(Request().length, 5000u);
  EXPECT_EQ(Request().access, 1u | 4u);
  EXPECT_EQ(mr->addr, buffer_);
  EXPECT_EQ(mr->length, 5000u);
  EXPECT_EQ(mr->lkey, mr->handle << 8 | 1);
  EXPECT_EQ(mr->rkey, mr->handle << 8 | 2);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST_F(OpenedPd, IovaAndZeroBasedReachTheDevice) {
  ibv_mr* mr = ibv_reg_mr_iova(pd_, buffer_, 100, 0x12345000, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(Request().iova, 0x12345000u);
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
  mr = ibv_reg_mr(pd_, buffer_, 100, IBV_ACCESS_ZERO_BASED);
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(Request().iova, 0u);
  EXPECT_EQ(Request().address, reinterpret_cast<uint64_t>(buffer_));
  EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST_F(OpenedPd, RefusesWhatTheManPageRefuses) {
  const unsigned rw = IBV_ACCESS_LOCAL_WRITE;
  EXPECT_EQ(Register(buffer_, 0, rw), EINVAL);
  EXPECT_EQ(Register(buffer_, SIZE_MAX, rw), EINVAL);
  EXPECT_EQ(Register(buffer_, 10, IBV_ACCESS_REMOTE_WRITE), EINVAL);
  EXPECT_EQ(Register(buffer_, 10, IBV_ACCESS_REMOTE_ATOMIC), EINVAL);
  EXPECT_EQ(Register(buffer_, 10, rw | 1u << 15), EINVAL);
  EXPECT_EQ(Register(buffer_, 10, rw | 1u << 9), EOPNOTSUPP);
  EXPECT_EQ(Register(buffer_, 10, rw | IBV_ACCESS_RELAXED_ORDERING), 0);
  EXPECT_EQ(Request().access, rw);
  EXPECT_EQ(Register(buffer_, 10, rw | IBV_ACCESS_MW_BIND), 0);
}

TEST_F(OpenedPd, RefusesPagesThatCannotBeUsed) {
  const FourPages pages;
  EXPECT_EQ(Register(pages.page(1), kPage, IBV_ACCESS_REMOTE_READ), 0);
  EXPECT_EQ(Register(pages.page(1), kPage, IBV_ACCESS_LOCAL_WRITE), EFAULT);
  EXPECT_EQ(Register(pages.page(3), 2 * kPage, 0), EFAULT);
  EXPECT_EQ(Register(nullptr, 1, 0), EFAULT);
}

}  // namespace
}  // namespace verbena::provider
