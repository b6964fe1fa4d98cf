// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/faults/rule_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace verbena::nic {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(RuleFile, TablesBecomeOneLineRules) {
  std::vector<FileRule> rules;
  EXPECT_EQ(ReadRuleFile("[[rule]]\n"
                         "action = \"drop\"\n"
                         "psn = 100\n"
                         "prob = 0.25\n"
                         "\n"
                         "[[rule]]\n"
                         "action = \"set\"\n"
                         "bth.psn = \"+1\"\n",
                         "F.toml", &rules),
            "");
  ASSERT_EQ(rules.size(), 2u);
  EXPECT_THAT(rules[0].text, StartsWith("drop "));
  EXPECT_THAT(rules[0].text, HasSubstr(" psn=100"));
  EXPECT_THAT(rules[0].text, HasSubstr(" prob=0.25"));
  EXPECT_EQ(rules[1].text, "set bth.psn=+1");
  EXPECT_EQ(rules[1].line, 6u);
  EXPECT_EQ(rules[0].Complaint("F.toml", "psn", "too big"), "F.toml:3: psn: too big");
  EXPECT_EQ(rules[0].Complaint("F.toml", "", "no"), "F.toml:1: no");
  EXPECT_EQ(rules[1].Complaint("F.toml", "bth.psn", "no"), "F.toml:8: bth.psn: no");
}

TEST(RuleFile, NamesLineAndField) {
  const auto error = [](std::string_view text) {
    std::vector<FileRule> rules;
    return ReadRuleFile(text, "F.toml", &rules);
  };
  EXPECT_THAT(error("[[rule]]\npsn = 5\n"), StartsWith("F.toml:1: action:"));
  EXPECT_THAT(error("[[rule]]\naction = \"drop\"\npsn = true\n"), StartsWith("F.toml:3: psn:"));
  EXPECT_THAT(error("[[rule]]\naction = \"drop\"\ndev = \"a b\"\n"), StartsWith("F.toml:3: dev:"));
  EXPECT_THAT(error("[[rule]]\naction = 7\n"), StartsWith("F.toml:2: action:"));
  EXPECT_THAT(error("rule = 3\n"), StartsWith("F.toml:1:"));
  EXPECT_THAT(error("[[rules]]\naction = \"drop\"\n"), StartsWith("F.toml:1: rules:"));
  EXPECT_THAT(error("[[rule]\n"), StartsWith("F.toml:1:"));
}

}  // namespace
}  // namespace verbena::nic
