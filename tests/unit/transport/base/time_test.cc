// SPDX-License-Identifier: Apache-2.0
#include "transport/base/time.h"

#include <gtest/gtest.h>

namespace verbena::transport {
namespace {

TEST(Duration, UnitsAreNanoseconds) {
  EXPECT_EQ(Duration::Nanoseconds(7).ns(), 7);
  EXPECT_EQ(Duration::Microseconds(7).ns(), 7'000);
  EXPECT_EQ(Duration::Milliseconds(7).ns(), 7'000'000);
  EXPECT_EQ(Duration::Seconds(7).ns(), 7'000'000'000);
  EXPECT_EQ(Duration::Nanoseconds(4'096'999).us(), 4'096);
  EXPECT_EQ(Duration::Nanoseconds(4'999'999).ms(), 4);
}

TEST(Duration, AddsScalesAndCompares) {
  const Duration a = Duration::Microseconds(3);
  const Duration b = Duration::Nanoseconds(500);
  EXPECT_EQ((a + b).ns(), 3'500);
  EXPECT_EQ((a - b).ns(), 2'500);
  EXPECT_EQ((a * 4).ns(), 12'000);
  EXPECT_EQ((4 * a).ns(), 12'000);
  EXPECT_EQ((a / 2).ns(), 1'500);
  EXPECT_LT(b, a);
  EXPECT_LT(a, Duration::Max());
}

TEST(Time, MovesByDurationsAndDiffersByThem) {
  const Time start = Time::FromNanoseconds(1'000);
  const Time later = start + Duration::Microseconds(2);
  EXPECT_EQ(later.ns(), 3'000);
  EXPECT_EQ(later - start, Duration::Microseconds(2));
  EXPECT_EQ(start - later, Duration::Nanoseconds(-2'000));
  EXPECT_EQ((later - Duration::Microseconds(1)).ns(), 2'000);
  EXPECT_LT(start, later);
}

TEST(Time, NeverIsLaterThanEverythingAndStaysSo) {
  const Time never = Time::Never();
  EXPECT_TRUE(never.IsNever());
  EXPECT_LT(Time::FromNanoseconds(Time::Max().ns() - 1), never);
  EXPECT_TRUE((never + Duration::Seconds(1)).IsNever());
  EXPECT_TRUE((never + Duration::Seconds(-1)).IsNever());
  EXPECT_TRUE((never - Duration::Seconds(1)).IsNever());
}

TEST(Time, AddingAVeryLongDurationSaturates) {
  EXPECT_TRUE((Time::FromNanoseconds(5) + Duration::Max()).IsNever());
  EXPECT_EQ((Time::Zero() + Duration::Zero()), Time::Zero());
}

}  // namespace
}  // namespace verbena::transport
