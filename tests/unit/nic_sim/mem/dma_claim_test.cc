// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/mem/dma_claim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "nic_sim/mem/dma_queue.h"
#include "nic_sim/mem/region_table.h"
#include "tests/unit/nic_sim/mem/fake_space.h"

namespace verbena::nic {
namespace {

using testing::FakeSpace;
using ::testing::HasSubstr;
using transport::MemoryAccess;

constexpr uint64_t kBase = 0x10000;
constexpr uint64_t kIova = 0x7000;
constexpr uint64_t kBytes = 4096;
constexpr PdId kPd = 3;

class OneRegion : public ::testing::Test {
 protected:
  OneRegion() {
    EXPECT_EQ(table_.Register({.space = &space_,
                               .pd = kPd,
                               .access = transport::kAccessRemoteRead,
                               .iova = kIova,
                               .length = kBytes,
                               .address = kBase,
                               .owner = 42},
                              &key_),
              0);
  }
  FullDmaClaim Claim(MemoryAccess access = MemoryAccess::kRemoteRead) const {
    return {&table_, key_, kPd, access};
  }
  std::string Violation(const FullDmaClaim& claim, uint64_t address, uint64_t length) const {
    return ViolationOf(claim, &space_, address, length);
  }

  FakeSpace space_{kBase, 1 << 16};
  FakeSpace other_{kBase, 1 << 16};
  RegionTable table_{16, 1};
  uint32_t key_ = 0;
};

TEST_F(OneRegion, RangesInsideAreNoViolation) {
  EXPECT_EQ(Violation(Claim(), kBase, kBytes), "");
  EXPECT_EQ(Violation(Claim(), kBase + kBytes - 1, 1), "");
  EXPECT_EQ(Violation(Claim(MemoryAccess::kLocalRead), kBase, 8), "");
}

TEST_F(OneRegion, RangesThatLeaveItAre) {
  EXPECT_THAT(Violation(Claim(), kBase - 1, 8), HasSubstr("leaves the region"));
  EXPECT_THAT(Violation(Claim(), kBase + kBytes - 7, 8), HasSubstr("leaves the region"));
  EXPECT_THAT(Violation(Claim(), kBase, kBytes + 1), HasSubstr("leaves the region"));
  EXPECT_THAT(Violation(Claim(), kBase + 8, ~uint64_t{0} - 4), HasSubstr("leaves the region"));
  EXPECT_THAT(Violation(Claim(), kIova, 8), HasSubstr("leaves the region"));
}

TEST_F(OneRegion, KeysPdsRightsAndProcessesAreCompared) {
  FullDmaClaim claim = Claim();
  claim.key ^= 1;
  EXPECT_THAT(Violation(claim, kBase, 8), HasSubstr("no region has this key"));
  claim = Claim();
  ++claim.pd;
  EXPECT_THAT(Violation(claim, kBase, 8), HasSubstr("another protection domain"));
  EXPECT_THAT(Violation(Claim(MemoryAccess::kRemoteWrite), kBase, 8), HasSubstr("the right"));
  EXPECT_THAT(Violation(Claim(MemoryAccess::kLocalWrite), kBase, 8), HasSubstr("the right"));
  EXPECT_THAT(ViolationOf(Claim(), &other_, kBase, 8), HasSubstr("another process"));
  EXPECT_THAT(Violation({}, kBase, 8), HasSubstr("no claim"));
}

TEST_F(OneRegion, ARegionThatIsGoneIsNoRight) {
  table_.Deregister(key_);
  EXPECT_THAT(Violation(Claim(), kBase, 8), HasSubstr("no region has this key"));
}

TEST_F(OneRegion, TheDumpTellsBothSides) {
  const std::string text = Violation(Claim(), kBase + kBytes, 8);
  EXPECT_THAT(text, HasSubstr("remote read of 8 bytes at 0x11000"));
  EXPECT_THAT(text, HasSubstr("region: 4096 bytes at 0x10000 (iova 0x7000)"));
  EXPECT_THAT(text, HasSubstr("context 42"));
}

class NoOwner final : public DmaOwner {
  void OnPlaced(transport::Ticket) override {}
  void OnAtomic(transport::Ticket, uint64_t) override {}
  void OnPlaceFailed(transport::Ticket) override {}
};

// What a defect of the engine would hand over: an extent that Translate gave for
// a region that is not there any more when the bytes are copied.
class DmaQueueThatChecks : public OneRegion {
 protected:
  DmaQueueThatChecks() {
    if (!kCheckDma) return;
    EXPECT_EQ(table_.Translate(key_, kPd, kIova, 8, MemoryAccess::kRemoteRead, &extent_),
              transport::MemoryStatus::kOk);
    queue_.RequireClaims();
  }
  void SetUp() override {
    if (!kCheckDma) GTEST_SKIP() << "this build does not check (--config=debug does)";
  }
  Extent extent_;
  DmaQueue queue_{16};
  NoOwner owner_;
  std::byte bytes_[8] = {};
};

TEST_F(DmaQueueThatChecks, CopiesWhatIsStillRight) {
  queue_.Fetch(extent_, bytes_, 8, 0);
  queue_.FlushFetches([](uint32_t) { FAIL(); });
  EXPECT_EQ(space_.calls.size(), 1u);
}

// A WRITE and the SEND with invalidate behind it come in one pass.
TEST_F(DmaQueueThatChecks, CopiesWhatCameThroughAWindowThatIsInvalidatedMeanwhile) {
  uint32_t region = 0, window = 0;
  ASSERT_EQ(table_.Register({.space = &space_,
                             .pd = kPd,
                             .access = transport::kAccessLocalWrite | transport::kAccessMwBind,
                             .iova = kBase,
                             .length = kBytes,
                             .address = kBase,
                             .owner = 42},
                            &region),
            0);
  ASSERT_EQ(table_.AllocateWindow(RegionKind::kWindow2, kPd, 42, &window), 0);
  ASSERT_EQ(table_.Bind({.window = window,
                         .new_key = window + 1,
                         .region_key = region,
                         .access = transport::kAccessRemoteWrite,
                         .address = kBase,
                         .length = 64},
                        kPd, 7),
            transport::MemoryStatus::kOk);
  Extent through;
  ASSERT_EQ(table_.Translate(window + 1, kPd, kBase, 8, MemoryAccess::kRemoteWrite, &through, 7),
            transport::MemoryStatus::kOk);
  queue_.Place(through, bytes_, true, &owner_, 1);
  ASSERT_EQ(table_.Invalidate(window + 1, kPd, 7), transport::MemoryStatus::kOk);
  queue_.FlushPlacements();
  EXPECT_GE(space_.calls.size(), 1u);
}

using DmaQueueThatChecksDeathTest = DmaQueueThatChecks;

TEST_F(DmaQueueThatChecksDeathTest, EndsBeforeAFetchThatIsNotCovered) {
  EXPECT_DEATH(
      {
        queue_.Fetch(extent_, bytes_, kBytes + 1, 0);
        queue_.FlushFetches([](uint32_t) {});
      },
      "leaves the region");
  EXPECT_DEATH(
      {
        queue_.Fetch(extent_, bytes_, 8, 0);
        table_.Deregister(key_);
        queue_.FlushFetches([](uint32_t) {});
      },
      "no region has this key");
}

TEST_F(DmaQueueThatChecksDeathTest, EndsBeforeAPlacementThatIsNotCovered) {
  // The claim of a read does not cover a write elsewhere, nor one without any.
  EXPECT_DEATH(
      {
        extent_.address += kBytes;
        queue_.Place(extent_, bytes_, true, &owner_, 1);
        queue_.FlushPlacements();
      },
      "leaves the region");
  EXPECT_DEATH(
      {
        queue_.Place({&space_, kBase}, bytes_, true, &owner_, 1);
        queue_.FlushPlacements();
      },
      "no claim");
}

TEST_F(DmaQueueThatChecksDeathTest, EndsBeforeAnAtomicThatIsNotCovered) {
  EXPECT_DEATH(
      {
        extent_.address += kBytes - 4;
        queue_.Atomic(extent_, {}, &owner_, 1);
        queue_.FlushPlacements();
      },
      "leaves the region");
}

}  // namespace
}  // namespace verbena::nic
