// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/profile.h"

namespace verbena::sim {
namespace {

const Profile kProfiles[] = {
    {.name = "quiet", .network = {}, .expect_success = true},
    {.name = "late_memory",
     .network = {},
     .max_wrs = 16,
     .commit_delay = Duration::Microseconds(300),
     .expect_success = true},
    {.name = "loss", .share = 2, .network = {.loss = 0.03}, .expect_success = true},
    {.name = "bursts",
     .share = 2,
     .network = {.burst_begin = 0.03},
     .commit_delay = Duration::Microseconds(50)},
    {.name = "duplicates", .network = {.duplicate = 0.2}, .expect_success = true},
    {.name = "reorder",
     .share = 2,
     .network = {.jitter = Duration::Microseconds(20)},
     .expect_success = true},
    {.name = "everything",
     .share = 3,
     .network = {.loss = 0.02,
                 .duplicate = 0.05,
                 .corrupt = 0.02,
                 .delayed = 0.01,
                 .burst_begin = 0.005,
                 .jitter = Duration::Microseconds(10)},
     .commit_delay = Duration::Microseconds(50)},
    {.name = "overtaken",  // delays beyond the timeouts
     .share = 2,
     .network = {.loss = 0.01, .duplicate = 0.05, .delayed = 0.1},
     .commit_delay = Duration::Milliseconds(1)},
    {.name = "storm",
     .network = {.loss = 0.25, .duplicate = 0.2, .corrupt = 0.05, .delayed = 0.1},
     .max_wrs = 6,
     .commit_delay = Duration::Milliseconds(6)},
    {.name = "late_receives",
     .network = {.loss = 0.01, .duplicate = 0.02},
     .max_wrs = 8,
     .commit_delay = Duration::Microseconds(20),
     .receives_posted = 0.2},
    {.name = "stalls",
     .network = {.loss = 0.02, .duplicate = 0.02, .delayed = 0.03},
     .max_wrs = 8,
     .commit_delay = Duration::Microseconds(50),
     .receives_posted = 0.3,
     .stalls = 0.02},
    {.name = "too_late_receives",
     .network = {.loss = 0.01, .duplicate = 0.02},
     .max_wrs = 8,
     .commit_delay = Duration::Microseconds(20),
     .receives_posted = 0.05,
     .rnr_retry = 2},
    {.name = "failing_memory",
     .share = 2,
     .network = {.loss = 0.02, .duplicate = 0.05, .jitter = Duration::Microseconds(5)},
     .max_connections = 2,
     .commit_delay = Duration::Microseconds(100),
     .placement_failure = 0.02,
     .fetch_fault = 0.01,
     .vanishing_key = 0.05},
    {.name = "wrong_requests",
     .share = 2,
     .network = {.loss = 0.01, .jitter = Duration::Microseconds(5)},
     .max_connections = 2,
     .commit_delay = Duration::Microseconds(60),
     .bad_wr = 0.08,
     .bad_receive = 0.04},
    {.name = "restless",  // QPs are destroyed, reset and used again
     .share = 4,
     .network =
         {.loss = 0.02, .duplicate = 0.1, .delayed = 0.15, .jitter = Duration::Microseconds(10)},
     .max_connections = 4,
     .max_wrs = 8,
     .commit_delay = Duration::Microseconds(100),
     .interference = 0.6,
     .drain = 0.3},
    {.name = "drains",
     .network = {.loss = 0.02, .duplicate = 0.02},
     .commit_delay = Duration::Microseconds(50),
     .drain = 1},
    {.name = "hostile",
     .share = 2,
     .network = {.loss = 0.01, .duplicate = 0.03, .jitter = Duration::Microseconds(5)},
     .max_connections = 2,
     .max_wrs = 8,
     .commit_delay = Duration::Microseconds(60),
     .forged = 1},
    {.name = "crowd",  // up to 64 pairs
     .network = {.loss = 0.02,
                 .duplicate = 0.03,
                 .corrupt = 0.01,
                 .delayed = 0.02,
                 .burst_begin = 0.003,
                 .jitter = Duration::Microseconds(10)},
     .max_pairs = 64,
     .max_connections = 2,
     .max_wrs = 3,
     .max_bytes = 800,
     .commit_delay = Duration::Microseconds(30),
     .placement_failure = 0.001,
     .bad_wr = 0.01,
     .interference = 0.2,
     .drain = 0.1},
    {.name = "flood",  // many small messages over slow memory: the queues run full
     .network = {.duplicate = 0.1},
     .max_pairs = 1,
     .max_wrs = 150,
     .max_bytes = 16,
     .commit_delay = Duration::Milliseconds(2),
     .receives_posted = 1},
    {.name = "xrc",
     .share = 2,
     .network = {.loss = 0.02, .duplicate = 0.05, .jitter = Duration::Microseconds(10)},
     .commit_delay = Duration::Microseconds(60),
     .expect_success = true,
     .xrc = true},
    {.name = "restless_xrc",
     .share = 2,
     .network = {.loss = 0.02,
                 .duplicate = 0.1,
                 .corrupt = 0.01,
                 .delayed = 0.05,
                 .jitter = Duration::Microseconds(10)},
     .max_connections = 4,
     .max_wrs = 8,
     .commit_delay = Duration::Microseconds(100),
     .placement_failure = 0.005,
     .bad_wr = 0.05,
     .bad_receive = 0.03,
     .interference = 0.4,
     .drain = 0.2,
     .receives_posted = 0.3,
     .xrc = true},
    {.name = "hostile_xrc",
     .network = {.loss = 0.01, .duplicate = 0.03, .jitter = Duration::Microseconds(5)},
     .max_connections = 2,
     .max_wrs = 8,
     .commit_delay = Duration::Microseconds(60),
     .forged = 1,
     .xrc = true},
    {.name = "long_messages",
     .network = {.loss = 0.004, .jitter = Duration::Microseconds(2)},
     .max_pairs = 1,
     .max_wrs = 3,
     .max_bytes = 20'000},
};

}  // namespace

std::span<const Profile> Profiles() { return kProfiles; }

const Profile* FindProfile(std::string_view name) {
  for (const Profile& profile : kProfiles) {
    if (name == profile.name) return &profile;
  }
  return nullptr;
}

const Profile& ProfileOf(uint64_t seed) {
  uint64_t shares = 0;
  for (const Profile& profile : kProfiles) shares += profile.share;
  uint64_t left = seed % shares;
  for (const Profile& profile : kProfiles) {
    if (left < profile.share) return profile;
    left -= profile.share;
  }
  return kProfiles[0];
}

}  // namespace verbena::sim
