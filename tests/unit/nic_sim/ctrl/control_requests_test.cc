// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/control_requests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/nic_sim/ctrl/fake_hardware.h"

namespace verbena::nic {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class ControlRequests : public ::testing::Test {
 protected:
  ControlAnswer Ask(std::string_view text) {
    return AnswerControlRequest(text, &hardware_, daemon_, 3);
  }
  json Reply(std::string_view text) {
    const ControlAnswer answer = Ask(text);
    EXPECT_EQ(answer.action, ControlAnswer::Action::kReply);
    return json::parse(answer.text);
  }
  std::string Error(std::string_view text) {
    const json reply = Reply(text);
    EXPECT_EQ(reply.size(), 1u) << reply;
    return reply.value("error", "(none)");
  }

  FakeHardware hardware_;
  DaemonInfo daemon_ = {"lab", "/run/x/lab.sock", false, 4711};
};

TEST_F(ControlRequests, VersionAndStatusHaveTheDocumentedFields) {
  const json version = Reply(R"({"op":"version"})");
  EXPECT_EQ(version["pid"], 4711);
  EXPECT_EQ(version["abi"], json({1, 1}));
  const json status = Reply(R"({"op":"status"})");
  EXPECT_EQ(status["name"], "lab");
  EXPECT_EQ(status["socket"], "/run/x/lab.sock");
  EXPECT_EQ(status["system"], false);
  EXPECT_EQ(status["mode"], "thread-per-cpu");
  EXPECT_EQ(status["threads"], 2);
  EXPECT_EQ(status["clients"], 3);
  ASSERT_EQ(status["nics"].size(), 2u);
  const json& nic = status["nics"][1];
  EXPECT_EQ(nic["device"], "verbena1");
  EXPECT_EQ(nic["host"], 0);
  EXPECT_EQ(nic["ipv4"], "127.88.0.1");
  EXPECT_EQ(nic["state"], "ACTIVE");
  ASSERT_EQ(nic["gids"].size(), 16u);
  EXPECT_EQ(nic["gids"][1], "::ffff:127.88.0.1");
}

TEST_F(ControlRequests, ListsAndCounters) {
  EXPECT_EQ(Reply(R"({"op":"list","what":"qp"})")["items"][0]["qpn"], 0);
  EXPECT_THAT(Error(R"({"op":"list","what":"srq"})"), HasSubstr("srq"));
  EXPECT_THAT(Error(R"({"op":"list"})"), HasSubstr("what"));
  EXPECT_EQ(Reply(R"({"op":"counters","dev":"verbena0"})")["devices"].size(), 1u);
  EXPECT_EQ(Reply(R"({"op":"counters"})")["devices"].size(), 1u);
  EXPECT_THAT(Error(R"({"op":"counters","dev":"mlx5_0"})"), HasSubstr("mlx5_0"));
}

TEST_F(ControlRequests, FaultRules) {
  EXPECT_EQ(Reply(R"({"op":"fault_add","rule":"drop opcode=send nth=3"})")["id"], 1);
  const json refused = Reply(R"({"op":"fault_add","rule":"explode"})");
  EXPECT_THAT(refused.value("error", ""), HasSubstr("explode"));
  EXPECT_EQ(refused.value("field", ""), "action");
  const json rules = Reply(R"({"op":"fault_list"})")["rules"];
  ASSERT_EQ(rules.size(), 1u);
  EXPECT_EQ(rules[0]["rule"], "drop opcode=send nth=3");
  EXPECT_THAT(Error(R"({"op":"fault_clear","id":0})"), HasSubstr("id"));
  EXPECT_THAT(Error(R"({"op":"fault_clear","id":-1})"), HasSubstr("id"));
  EXPECT_THAT(Error(R"({"op":"fault_clear","id":4294967296})"), HasSubstr("id"));
  EXPECT_EQ(Reply(R"({"op":"fault_clear","id":9})")["removed"], 0);
  EXPECT_EQ(Reply(R"({"op":"fault_add","rule":"drop"})")["id"], 1);
  EXPECT_EQ(Reply(R"({"op":"fault_clear"})")["removed"], 1);
}

TEST_F(ControlRequests, CapturesAndTheEndAreLeftToTheConnection) {
  const ControlAnswer all = Ask(R"({"op":"capture","stage":"before"})");
  EXPECT_EQ(all.action, ControlAnswer::Action::kCapture);
  EXPECT_TRUE(all.before_faults);
  EXPECT_EQ(all.count, 0u);
  const ControlAnswer one = Ask(R"({"op":"capture","stage":"after","dev":"verbena1","count":12})");
  EXPECT_FALSE(one.before_faults);
  EXPECT_EQ(one.device, "verbena1");
  EXPECT_EQ(one.count, 12u);
  EXPECT_THAT(Error(R"({"op":"capture","stage":"between"})"), HasSubstr("stage"));
  EXPECT_THAT(Error(R"({"op":"capture","stage":"after","count":0})"), HasSubstr("count"));
  EXPECT_EQ(Ask(R"({"op":"capture_stop"})").action, ControlAnswer::Action::kCaptureStop);
  EXPECT_EQ(Ask(R"({"op":"shutdown"})").action, ControlAnswer::Action::kShutdown);
}

TEST_F(ControlRequests, AnnouncementsToConnectionsNameADeviceAndAnEvent) {
  EXPECT_THAT(Error(R"({"op":"cm_announce","event":"addr_change"})"), HasSubstr("dev"));
  EXPECT_THAT(Error(R"({"op":"cm_announce","dev":"mlx5_0","event":"addr_change"})"),
              HasSubstr("mlx5_0"));
  EXPECT_THAT(Error(R"({"op":"cm_announce","dev":"verbena0","event":"flood"})"),
              HasSubstr("device_removal"));
  EXPECT_THAT(Error(R"({"op":"cm_announce","dev":"verbena0","event":"device_removal"})"),
              HasSubstr("connection manager"));  // this device has none
}

TEST_F(ControlRequests, WhateverIsSentGetsAnErrorSentence) {
  EXPECT_THAT(Error(""), HasSubstr("JSON"));
  EXPECT_THAT(Error("{\"op\":"), HasSubstr("JSON"));
  EXPECT_THAT(Error("[]"), HasSubstr("JSON"));
  EXPECT_THAT(Error("{}"), HasSubstr("op"));
  EXPECT_THAT(Error(R"({"op":7})"), HasSubstr("op"));
  EXPECT_THAT(Error(R"({"op":"fly"})"), HasSubstr("fly"));
  EXPECT_THAT(Error(R"({"op":"status","color":1})"), HasSubstr("color"));
  EXPECT_THAT(Error(R"({"op":"fault_add","rule":["drop"]})"), HasSubstr("rule"));
  EXPECT_THAT(Error("{\"op\":\"\xff\xfe\"}"), HasSubstr("JSON"));
  EXPECT_THAT(Error(std::string(60000, '[')), HasSubstr("JSON"));
  EXPECT_THAT(Error(R"({"op":"fault_add","rule":")" + std::string(5000, 'd') + "\"}"),
              HasSubstr("too long"));
}

TEST_F(ControlRequests, BytesThatAreNoUtf8DoNotBreakTheReply) {
  EXPECT_EQ(Reply(R"({"op":"list","what":"qp"})")["items"][0]["comm"], "a\uFFFD");
}

TEST_F(ControlRequests, WithoutPrivilegeOnlyWhatIsPublicAndOnesOwn) {
  const ControlAsker stranger = {.uid = 12345, .privileged = false};
  const auto ask = [&](const char* text) {
    return json::parse(AnswerControlRequest(text, &hardware_, daemon_, 0, stranger).text);
  };
  for (const char* text :
       {R"({"op":"counters"})", R"({"op":"fault_add","rule":"drop"})", R"({"op":"fault_list"})",
        R"({"op":"fault_clear"})", R"({"op":"capture","stage":"after"})",
        R"({"op":"capture_stop"})", R"({"op":"dump"})", R"({"op":"shutdown"})"}) {
    EXPECT_EQ(ask(text).value("errno", ""), "EPERM") << text;
  }
  EXPECT_FALSE(ask(R"({"op":"version"})").contains("error"));
  EXPECT_FALSE(ask(R"({"op":"status"})").contains("error"));
  EXPECT_TRUE(ask(R"({"op":"list","what":"qp"})").contains("items"));
  EXPECT_EQ(hardware_.listed_user, 12345u);
}

}  // namespace
}  // namespace verbena::nic
