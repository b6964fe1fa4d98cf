// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/faults/device_faults.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <nlohmann/json.hpp>

namespace verbena::nic {
namespace {

using transport::Completion;
using transport::Duration;
using transport::Time;
using transport::WcOpcode;

class DeviceFaultsTest : public ::testing::Test {
 protected:
  uint32_t Add(std::string_view text, std::optional<uint32_t> nic = {}) {
    DeviceRule rule;
    std::string error;
    EXPECT_TRUE(ParseDeviceRule(text, &rule, &error)) << error;
    EXPECT_TRUE(faults_.Add(rule, ++last_id_, nic));
    return last_id_;
  }
  CompletionFault Complete(const FaultSubject &subject, bool send = true) {
    Completion completion;
    completion.is_send = send;
    completion.opcode = send ? WcOpcode::kRdmaWrite : WcOpcode::kRecv;
    return faults_.OnCompletion(subject, completion, now_);
  }
  int Call(uint16_t verb, const FaultSubject &subject = {}) {
    return faults_.OnVerb(verb, subject, now_);
  }
  int64_t Hits(uint32_t id) {
    nlohmann::json rows = nlohmann::json::array();
    faults_.List(&rows);
    for (const auto &row : rows) {
      if (row["id"] == id) return row["hits"];
    }
    return -1;
  }

  DeviceFaults faults_;
  uint32_t last_id_ = 0;
  Time now_ = Time::FromNanoseconds(1'000'000'000);
  const FaultSubject writer_ = {.nic = 1, .app = "writer", .qpn = 0x11, .nth_qp = 1};
};

TEST_F(DeviceFaultsTest, WithoutRulesNothingIsWanted) {
  EXPECT_FALSE(faults_.wants(~0u));
  const uint32_t id = Add("lose_completion");
  EXPECT_TRUE(faults_.wants(DeviceFaults::kAtCompletion));
  EXPECT_FALSE(faults_.wants(~uint32_t{DeviceFaults::kAtCompletion}));
  std::vector<DeviceRule> ended;
  EXPECT_EQ(faults_.Clear(id, &ended), 1u);
  EXPECT_FALSE(faults_.wants(~0u));
}

TEST_F(DeviceFaultsTest, MeetsTheNthCompletionOfTheNamedQp) {
  const uint32_t id = Add("complete status=REM_OP_ERR app=writer nth_qp=1 queue=send nth=2", 1);
  FaultSubject other = writer_;
  other.nth_qp = 2;
  EXPECT_FALSE(Complete(writer_).any());
  EXPECT_FALSE(Complete(other).any());
  EXPECT_FALSE(Complete(writer_, false).any());
  const CompletionFault fault = Complete(writer_);
  EXPECT_EQ(fault.status, 11);
  EXPECT_TRUE(fault.fails_qp);
  EXPECT_FALSE(Complete(writer_).any());
  EXPECT_EQ(Hits(id), 1);
}

TEST_F(DeviceFaultsTest, RulesOfOneCompletionAddUp) {
  Add("duplicate_completion");
  Add("delay_completion us=5");
  Add("delay_completion us=7 qpn=0x11");
  Add("event type=QP_ACCESS_ERR on=completion");
  const CompletionFault fault = Complete(writer_);
  EXPECT_EQ(fault.copies, 1u);
  EXPECT_EQ(fault.delay, Duration::Microseconds(12));
  EXPECT_EQ(fault.events, (std::vector<uint8_t>{3}));
  EXPECT_FALSE(fault.fails_qp);
}

TEST_F(DeviceFaultsTest, AVerbFailsAsOftenAsItIsTold) {
  DeviceRule rule;
  std::string error;
  ASSERT_TRUE(ParseDeviceRule("fail verb=reg_mr errno=ENOMEM", &rule, &error));
  const uint16_t reg_mr = *rule.verb;
  Add("fail verb=reg_mr errno=ENOMEM nth=2");
  EXPECT_EQ(Call(reg_mr), 0);
  EXPECT_EQ(Call(static_cast<uint16_t>(reg_mr + 1)), 0);
  EXPECT_EQ(Call(reg_mr), ENOMEM);
  EXPECT_EQ(Call(reg_mr), 0);
  EXPECT_EQ(faults_.checked_verbs(), 0u);
  Add("fail verb=poll_cq errno=EIO");
  EXPECT_EQ(faults_.checked_verbs(), 1u << (kVerbPollCq - kVerbPostSend));
}

TEST_F(DeviceFaultsTest, ProbabilitiesAreTheSameInEachRun) {
  const auto run = [&] {
    DeviceFaults faults;
    DeviceRule rule;
    std::string error;
    EXPECT_TRUE(ParseDeviceRule("lose_completion prob=0.3 seed=9", &rule, &error));
    EXPECT_TRUE(faults.Add(rule, 1, {}));
    std::string losses;
    for (int i = 0; i < 200; ++i) {
      losses += faults.OnCompletion(writer_, Completion(), now_).lost ? 'x' : '.';
    }
    return losses;
  };
  const std::string first = run();
  EXPECT_EQ(first, run());
  const auto lost = std::count(first.begin(), first.end(), 'x');
  EXPECT_GT(lost, 30);
  EXPECT_LT(lost, 90);
}

TEST_F(DeviceFaultsTest, TimesBeginAndEnd) {
  Add("remove dev=verbena1 after=100 us=50", 1);
  Add("qp_error after=120");
  EXPECT_EQ(faults_.next_due(), Time::Zero());
  EXPECT_EQ(faults_.TakeDue(now_).size(), 0u);
  EXPECT_EQ(faults_.next_due(), now_ + Duration::Microseconds(100));
  const auto due = faults_.TakeDue(now_ + Duration::Microseconds(200));
  ASSERT_EQ(due.size(), 3u);
  EXPECT_EQ(due[0].rule.action, DeviceAction::kRemove);
  EXPECT_FALSE(due[0].ends);
  EXPECT_EQ(due[1].rule.action, DeviceAction::kQpError);
  EXPECT_TRUE(due[2].ends);
  EXPECT_TRUE(faults_.next_due().IsNever());
  EXPECT_EQ(faults_.TakeDue(now_ + Duration::Microseconds(900)).size(), 0u);
}

TEST_F(DeviceFaultsTest, ADeviceThatIsOutComesBackWithItsRule) {
  const uint32_t id = Add("remove dev=verbena1", 1);
  std::vector<DeviceRule> ended;
  EXPECT_EQ(faults_.TakeDue(now_).size(), 1u);
  EXPECT_EQ(faults_.Clear(id, &ended), 1u);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].device, "verbena1");
}

TEST_F(DeviceFaultsTest, StepsOfTheConnectionManagerEndWithAStatus) {
  Add("cm_error type=REJECTED reason=24 nth=1");
  Add("cm_error type=ADDR_ERROR errno=ENODEV count=1");
  Add("cm_error type=UNREACHABLE app=other");
  EXPECT_EQ(faults_.OnCm(8, writer_, now_), 24);
  EXPECT_EQ(faults_.OnCm(8, writer_, now_), std::nullopt);
  EXPECT_EQ(faults_.OnCm(1, writer_, now_), -ENODEV);
  EXPECT_EQ(faults_.OnCm(1, writer_, now_), std::nullopt);
  EXPECT_EQ(faults_.OnCm(6, writer_, now_), std::nullopt);
}

}  // namespace
}  // namespace verbena::nic
