// SPDX-License-Identifier: Apache-2.0
#include "transport/base/result.h"

#include <gtest/gtest.h>

#include <memory>
#include <type_traits>

namespace verbena::transport {
namespace {

enum class Problem { kNone, kTooSmall, kTooLarge };

Result<int, Problem> Half(int value) {
  if (value < 2) return Problem::kTooSmall;
  return value / 2;
}

TEST(Result, HoldsAValueOrAnError) {
  const auto good = Half(8);
  ASSERT_TRUE(good.ok());
  EXPECT_TRUE(static_cast<bool>(good));
  EXPECT_EQ(good.value(), 4);
  EXPECT_EQ(*good, 4);

  const auto bad = Half(1);
  ASSERT_FALSE(bad.ok());
  EXPECT_FALSE(static_cast<bool>(bad));
  EXPECT_EQ(bad.error(), Problem::kTooSmall);
  EXPECT_EQ(bad.value_or(-1), -1);
  EXPECT_EQ(good.value_or(-1), 4);
}

TEST(Result, MovesAValueThatCannotBeCopied) {
  Result<std::unique_ptr<int>, Problem> result = std::make_unique<int>(7);
  const std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 7);
}

TEST(Result, WithoutAValueIsSuccessUnlessGivenAnError) {
  const Result<void, Problem> good;
  EXPECT_TRUE(good.ok());
  // The first enumerator is an error too.
  const Result<void, Problem> bad = Problem::kNone;
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.error(), Problem::kNone);
}

static_assert(std::is_trivially_copyable_v<Result<int, Problem>>);

}  // namespace
}  // namespace verbena::transport
