// SPDX-License-Identifier: Apache-2.0
//
// A first part of what tools/simulate runs. A failure prints the violation, the
// last packets and the command that replays it.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "tests/sim/world.h"

namespace verbena::sim {
namespace {

constexpr uint64_t kSeeds = 15'000;
constexpr size_t kLadderLines = 100;

class RcSimTest : public ::testing::TestWithParam<Profile> {};

INSTANTIATE_TEST_SUITE_P(Profiles, RcSimTest, ::testing::ValuesIn(Profiles()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(RcSimTest, InvariantsHold) {
  const Profile& profile = GetParam();
  Totals totals;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const Profile& its_profile = ProfileOf(seed);
    if (its_profile.name != profile.name) continue;
    World world(its_profile, seed, false);
    const std::string failure = world.Run();
    ASSERT_EQ(failure, "") << Report(its_profile, seed, kLadderLines);
    totals.Add(world.totals());
  }
  std::printf("%s: %llu seeds, %llu packets, %llu failed WRs\n", profile.name,
              static_cast<unsigned long long>(totals.seeds),
              static_cast<unsigned long long>(totals.packets),
              static_cast<unsigned long long>(totals.errors));
  // A profile that is meant to break connections does so; the others do not.
  EXPECT_EQ(totals.errors == 0, profile.expect_success);
}

TEST(RcSimRepeat, TheSameSeedGivesTheSameLadder) {
  const Profile& profile = *FindProfile("everything");
  World first(profile, 7, true);
  World second(profile, 7, true);
  EXPECT_EQ(first.Run(), second.Run());
  EXPECT_GT(first.ladder().size(), 20u);
  EXPECT_EQ(first.ladder(), second.ladder());
  World other(profile, 8, true);
  other.Run();
  EXPECT_NE(first.ladder(), other.ladder());
}

}  // namespace
}  // namespace verbena::sim
