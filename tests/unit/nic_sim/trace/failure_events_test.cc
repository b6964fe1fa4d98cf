// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/trace/failure_events.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "transport/transport_event.h"
#include "transport/verbs_types.h"

namespace verbena::nic {
namespace {

using transport::AsyncEventType;
using transport::WcStatus;

class CollectFailuresTest : public ::testing::Test {
 protected:
  TraceEvent& Add(TraceKind kind, uint32_t qpn, int64_t time_ns) {
    all_.push_back({.time_ns = time_ns, .qpn = qpn, .kind = kind});
    return all_.back();
  }
  void AddCompletion(uint32_t qpn, WcStatus status, int64_t time_ns) {
    Add(TraceKind::kCompletion, qpn, time_ns).code = static_cast<uint8_t>(status);
  }
  void AddSent(uint32_t qpn, uint32_t peer, int64_t time_ns) {
    Add(TraceKind::kSent, qpn, time_ns).peer_qpn = peer;
  }
  std::vector<FailedQp> Collect() { return CollectFailures(all_, &seen_ns_); }

  std::vector<TraceEvent> all_;
  int64_t seen_ns_ = 0;
};

TEST_F(CollectFailuresTest, WithoutAFailureThereIsNothing) {
  AddSent(1, 2, 10);
  AddCompletion(1, WcStatus::kSuccess, 20);
  AddCompletion(1, WcStatus::kWrFlushErr, 30);
  EXPECT_TRUE(Collect().empty());
}

TEST_F(CollectFailuresTest, GivesTheEventsOfTheQpAndItsPeerAndTheRules) {
  Add(TraceKind::kReceived, 2, 15);
  AddSent(1, 2, 10);
  AddSent(7, 8, 11);  // another pair
  Add(TraceKind::kFault, 7, 12);
  Add(TraceKind::kDeviceFault, 0, 13);
  AddCompletion(1, WcStatus::kRetryExcErr, 20);
  const std::vector<FailedQp> failed = Collect();
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].qpn, 1u);
  EXPECT_EQ(failed[0].time_ns, 20);
  std::vector<int64_t> times;
  for (const TraceEvent& event : failed[0].events) times.push_back(event.time_ns);
  EXPECT_EQ(times, (std::vector<int64_t>{10, 12, 13, 15, 20}));
}

TEST_F(CollectFailuresTest, TellsOfAFailureOnce) {
  AddCompletion(1, WcStatus::kRemAccessErr, 20);
  Add(TraceKind::kEvent, 3, 25).code = static_cast<uint8_t>(AsyncEventType::kQpFatal);
  EXPECT_EQ(Collect().size(), 2u);
  EXPECT_EQ(seen_ns_, 25);
  EXPECT_TRUE(Collect().empty());
  AddCompletion(5, WcStatus::kRemAccessErr, 30);
  EXPECT_EQ(Collect().at(0).qpn, 5u);
}

// What a program costs that fails QPs in a loop.
TEST_F(CollectFailuresTest, IsBoundedHoweverMuchHappens) {
  constexpr uint32_t kQps = 1000;
  int64_t now = 0;
  for (int round = 0; round < 200; ++round) {
    for (uint32_t qpn = 1; qpn <= kQps; ++qpn) AddSent(qpn, qpn + kQps, ++now);
  }
  for (uint32_t qpn = 1; qpn <= kQps; ++qpn) {
    for (int i = 0; i < 700; ++i) AddSent(qpn, qpn + kQps, ++now);
    AddCompletion(qpn, WcStatus::kRetryExcErr, ++now);
    for (int i = 0; i < 100; ++i) Add(TraceKind::kReceived, qpn, ++now);
  }
  const std::vector<FailedQp> failed = Collect();
  ASSERT_EQ(failed.size(), kMostFailedQps);
  for (size_t i = 0; i < failed.size(); ++i) {
    const FailedQp& one = failed[i];
    EXPECT_EQ(one.qpn, i + 1);  // The first that failed.
    EXPECT_EQ(one.events.size(), kMostFailureEvents);
    EXPECT_LE(one.events.capacity(), 2 * kMostFailureEvents);
    // The failure is among them, with what came before and a little after.
    const auto failure = std::ranges::find(one.events, one.time_ns, &TraceEvent::time_ns);
    EXPECT_EQ(one.events.end() - failure, static_cast<long>(kMostEventsAfter) + 1);
  }
  EXPECT_EQ(seen_ns_, now - 100);
}

}  // namespace
}  // namespace verbena::nic
