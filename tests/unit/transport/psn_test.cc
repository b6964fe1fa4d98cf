// SPDX-License-Identifier: Apache-2.0
#include "transport/psn.h"

#include <gtest/gtest.h>

namespace verbena::transport {
namespace {

constexpr int32_t kHalf = 1 << 23;

TEST(Psn, KeepsTheLow24Bits) {
  EXPECT_EQ(Psn(0xff123456).value(), 0x123456u);
  EXPECT_EQ(Psn(0x1000000), Psn(0));
}

TEST(Psn, AddsModulo24Bits) {
  EXPECT_EQ(Psn(0xffffff).Next(), Psn(0));
  EXPECT_EQ(Psn(0).Previous(), Psn(0xffffff));
  EXPECT_EQ(Psn(0xfffffe) + 5, Psn(3));
  EXPECT_EQ(Psn(3) - 5, Psn(0xfffffe));
  Psn psn(0xffffff);
  psn += 2;
  EXPECT_EQ(psn, Psn(1));
  EXPECT_EQ(Psn(7) + 0x1000000, Psn(7));
}

TEST(Psn, DistanceIsPositiveAheadAndNegativeBehind) {
  EXPECT_EQ(Psn::Distance(Psn(5), Psn(5)), 0);
  EXPECT_EQ(Psn::Distance(Psn(5), Psn(6)), 1);
  EXPECT_EQ(Psn::Distance(Psn(6), Psn(5)), -1);
  EXPECT_EQ(Psn::Distance(Psn(0xffffff), Psn(0)), 1);
  EXPECT_EQ(Psn::Distance(Psn(0), Psn(0xffffff)), -1);
  EXPECT_EQ(Psn::Distance(Psn(0xfffff0), Psn(0x10)), 0x20);
}

TEST(Psn, HalfTheSpaceAwayIsBehind) {
  // The window is [-2^23, 2^23): the farthest number counts as a duplicate.
  for (uint32_t base : {0u, 1u, 0x7fffffu, 0x800000u, 0xffffffu}) {
    const Psn psn(base);
    EXPECT_EQ(Psn::Distance(psn, psn + (kHalf - 1)), kHalf - 1);
    EXPECT_EQ(Psn::Distance(psn, psn + kHalf), -kHalf);
    EXPECT_EQ(Psn::Distance(psn, psn + (kHalf + 1)), -kHalf + 1);
  }
}

TEST(Psn, DistanceInvertsAdditionEverywhereInTheWindow) {
  for (uint32_t base = 0; base <= 0xffffff; base += 0x0fffe3) {
    for (int32_t step = -kHalf; step < kHalf; step += 0x01fff1) {
      ASSERT_EQ(Psn::Distance(Psn(base), Psn(base) + static_cast<uint32_t>(step)), step)
          << base << " + " << step;
    }
  }
}

TEST(Psn, WindowHoldsItsFirstAndLastButNotTheNext) {
  const Psn first(0xfffffe);
  EXPECT_TRUE(first.InWindow(first, 4));
  EXPECT_TRUE(Psn(1).InWindow(first, 4));
  EXPECT_FALSE(Psn(2).InWindow(first, 4));
  EXPECT_FALSE(Psn(0xfffffd).InWindow(first, 4));
  EXPECT_FALSE(first.InWindow(first, 0));
}

}  // namespace
}  // namespace verbena::transport
