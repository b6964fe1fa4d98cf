// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/trace/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace verbena::nic {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

Json Hit(int64_t time_ns, uint32_t qpn, const char* action) {
  return {{"time_ns", time_ns}, {"event", "device_fault"}, {"device", "verbena0"}, {"qpn", qpn},
          {"rule", 3},          {"action", action}};
}
Json Completion(int64_t time_ns, uint32_t qpn, const char* status) {
  return {{"time_ns", time_ns}, {"event", "completion"}, {"qpn", qpn}, {"status", status}};
}
Json Rule(const char* text) { return Json::array({{{"id", 3}, {"rule", text}, {"hits", 1}}}); }

TEST(ExplainDeviceFaults, AChangedCompletionIsTheRulesWork) {
  const Explanation found =
      Explain(Json::array({Hit(1, 17, "complete"), Completion(1, 17, "REM_OP_ERR")}),
              Rule("complete status=REM_OP_ERR"), {});
  EXPECT_EQ(found.status, "REM_OP_ERR");
  EXPECT_THAT(found.because, Contains(AllOf(HasSubstr("complete status=REM_OP_ERR"),
                                            HasSubstr("changed a completion of this QP"))));
}

TEST(ExplainDeviceFaults, ThePeersErrorByRuleExplainsRetries) {
  const Json sent = {{"time_ns", 1},   {"event", "sent"}, {"qpn", 17},
                     {"peer_qpn", 18}, {"psn", 5},        {"bytes", 9}};
  const Explanation found =
      Explain(Json::array({sent, Hit(2, 18, "qp_error"), Completion(9, 17, "RETRY_EXC_ERR")}),
              Rule("qp_error qpn=18"), 17u);
  EXPECT_THAT(found.because, Contains(AllOf(HasSubstr("qp_error qpn=18"),
                                            HasSubstr("sent the peer's QP to ERR"))));
}

TEST(ExplainDeviceFaults, TheWayToErrIsTheRulesWork) {
  const Json state = {
      {"time_ns", 2}, {"event", "state"}, {"qpn", 17}, {"from", "RTS"}, {"to", "ERR"}};
  const Explanation found =
      Explain(Json::array({Hit(1, 17, "cq_overrun"), state}), Rule("cq_overrun nth=1"), 17u);
  EXPECT_EQ(found.status, "WR_FLUSH_ERR");
  EXPECT_THAT(found.because, Contains(HasSubstr("overran the CQ of this QP")));
}

TEST(ExplainDeviceFaults, ACallThatFailedByRuleIsNamedThoughNothingElseFailed) {
  const Explanation found =
      Explain(Json::array({Hit(1, 0, "fail"), Hit(2, 0, "fail")}), Rule("fail verb=reg_mr"), {});
  EXPECT_EQ(found.status, "");
  EXPECT_THAT(found.because, Contains(AllOf(HasSubstr("'fail verb=reg_mr'"),
                                            HasSubstr("made a call fail"), HasSubstr("2 times"))));
  EXPECT_THAT(found.what, HasSubstr("not all went smoothly"));
}

Json Request(int64_t time_ns, bool again) {
  return {{"time_ns", time_ns}, {"event", "sent"}, {"qpn", 17},        {"peer_qpn", 18},
          {"psn", 5},           {"bytes", 9},      {"opcode", "READ"}, {"retransmission", again}};
}

TEST(Explain, WhereTheTraceBeginsTooLateItSaysThatThereMayHaveBeenMore) {
  const Json late = Json::array({Request(1, true), Completion(9, 17, "RETRY_EXC_ERR")});
  EXPECT_THAT(Explain(late, Json::array(), 17u).what, HasSubstr("at least once"));
  const Json ready = {
      {"time_ns", 0}, {"event", "state"}, {"qpn", 17}, {"from", "INIT"}, {"to", "RTR"}};
  const Json whole =
      Json::array({ready, Request(1, false), Request(2, true), Completion(9, 17, "RETRY_EXC_ERR")});
  EXPECT_THAT(Explain(whole, Json::array(), 17u).what, HasSubstr("was sent 2 times"));
}

TEST(Explain, WhatIsFlushedDoesNotHideWhatLedToTheFailure) {
  Json events = Json::array({Request(1, false)});
  for (int i = 0; i < 100; ++i) events.push_back(Completion(2 + i, 18, "WR_FLUSH_ERR"));
  events.push_back(Completion(200, 17, "RETRY_EXC_ERR"));
  const Explanation found = Explain(events, Json::array(), 17u);
  ASSERT_EQ(found.events.size(), 2u);
  EXPECT_EQ(found.events.front().at("event"), "sent");
}

}  // namespace
}  // namespace verbena::nic
