// SPDX-License-Identifier: Apache-2.0
//
// Many seeds of RcSimulation over several profiles of network and memory. A
// failure prints the seed, the last packets and how to run it again:
//   RC_SIM_PROFILE=name RC_SIM_SEED=n bazel-bin/tests/sim/rc_sim_test
// RC_SIM_SEEDS=n runs n seeds of each profile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/sim/rc_simulation.h"

namespace verbena::testing {
namespace {

using transport::Duration;

const SimulationProfile kProfiles[] = {
    {.name = "quiet", .network = {}},
    {.name = "late_memory", .network = {}, .commit_delay = Duration::Microseconds(300)},
    {.name = "loss", .network = {.loss = 0.03}, .commit_delay = Duration::Microseconds(5)},
    {.name = "duplicates",
     .network = {.duplicate = 0.2},
     .commit_delay = Duration::Microseconds(5)},
    {.name = "reorder",
     .network = {.jitter = Duration::Microseconds(20)},
     .commit_delay = Duration::Microseconds(5)},
    {.name = "everything",
     .network = {.loss = 0.02,
                 .duplicate = 0.05,
                 .corrupt = 0.02,
                 .delayed = 0.01,
                 .jitter = Duration::Microseconds(10)},
     .commit_delay = Duration::Microseconds(50)},
    {.name = "overtaken",  // delays beyond the timeout
     .network = {.loss = 0.01, .duplicate = 0.05, .delayed = 0.1},
     .commit_delay = Duration::Milliseconds(1)},
    {.name = "storm",
     .network = {.loss = 0.25, .duplicate = 0.2, .corrupt = 0.05, .delayed = 0.1},
     .commit_delay = Duration::Milliseconds(6),
     .expect_success = false},
    {.name = "late_receives",
     .network = {.loss = 0.01, .duplicate = 0.02},
     .commit_delay = Duration::Microseconds(20),
     .receives_posted = 0.1},
    {.name = "too_late_receives",
     .network = {.loss = 0.01, .duplicate = 0.02},
     .commit_delay = Duration::Microseconds(20),
     .expect_success = false,
     .rnr_retry = 2,
     .receives_posted = 0.1},
    {.name = "failing_memory",
     .network = {.loss = 0.02, .duplicate = 0.05, .jitter = Duration::Microseconds(5)},
     .commit_delay = Duration::Microseconds(100),
     .placement_failure = 0.02,
     .expect_success = false},
    {.name = "bad_keys",
     .network = {.loss = 0.02, .jitter = Duration::Microseconds(5)},
     .commit_delay = Duration::Microseconds(100),
     .fetch_failure = 0.03,
     .expect_success = false},
};

constexpr uint64_t kDefaultSeeds = 170;  // of each profile
constexpr size_t kLadderLines = 150;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 0);
}

class RcSimTest : public ::testing::TestWithParam<SimulationProfile> {};

INSTANTIATE_TEST_SUITE_P(Profiles, RcSimTest, ::testing::ValuesIn(kProfiles),
                         [](const auto& info) { return std::string(info.param.name); });

std::string Report(const SimulationProfile& profile, uint64_t seed, const std::string& failure) {
  RcSimulation again(profile, seed, true);
  again.Run();
  std::string text = failure + "\nreplay: RC_SIM_PROFILE=" + profile.name +
                     " RC_SIM_SEED=" + std::to_string(seed) + " bazel-bin/tests/sim/rc_sim_test\n";
  const auto& ladder = again.ladder();
  const size_t from = ladder.size() - std::min(ladder.size(), kLadderLines);
  for (size_t i = from; i < ladder.size(); ++i) text += ladder[i] + "\n";
  return text;
}

TEST_P(RcSimTest, InvariantsHold) {
  const SimulationProfile& profile = GetParam();
  const char* only = std::getenv("RC_SIM_PROFILE");
  if (only != nullptr && std::string(only) != profile.name) GTEST_SKIP();
  const uint64_t first = FromEnvironment("RC_SIM_SEED", 1);
  const uint64_t seeds =
      std::getenv("RC_SIM_SEED") != nullptr ? 1 : FromEnvironment("RC_SIM_SEEDS", kDefaultSeeds);
  uint64_t packets = 0;
  uint64_t errors = 0;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    RcSimulation simulation(profile, seed, false);
    const std::string failure = simulation.Run();
    ASSERT_EQ(failure, "") << Report(profile, seed, failure);
    packets += simulation.packets();
    errors += simulation.errors();
  }
  std::printf("%s: %llu packets, %llu completions with an error\n", profile.name,
              static_cast<unsigned long long>(packets), static_cast<unsigned long long>(errors));
  // A profile that is meant to break connections must do so.
  if (!profile.expect_success && seeds >= kDefaultSeeds) {
    EXPECT_GT(errors, 0u);
  }
}

}  // namespace
}  // namespace verbena::testing
