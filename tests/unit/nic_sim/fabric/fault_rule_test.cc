// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/fault_rule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace verbena::nic {
namespace {

using ::testing::HasSubstr;

FaultRule Parsed(std::string_view text) {
  FaultRule rule;
  std::string error;
  EXPECT_TRUE(ParseFaultRule(text, &rule, &error)) << text << ": " << error;
  return rule;
}

std::string ErrorOf(std::string_view text) {
  FaultRule rule;
  std::string error;
  EXPECT_FALSE(ParseFaultRule(text, &rule, &error)) << text;
  return error;
}

std::vector<int> Codes(std::string_view name) {
  std::vector<int> codes;
  const auto set = ParseOpcodeSet(name);
  for (int code = 0; set && code < 256; ++code) {
    if (set->test(static_cast<size_t>(code))) codes.push_back(code);
  }
  return codes;
}

TEST(FaultRule, ReadsEveryAction) {
  EXPECT_EQ(Parsed("drop").action, FaultAction::kDrop);
  EXPECT_EQ(Parsed("duplicate").action, FaultAction::kDuplicate);
  EXPECT_EQ(Parsed("corrupt").action, FaultAction::kCorrupt);
  EXPECT_EQ(Parsed("reorder by=3").action, FaultAction::kReorder);
  EXPECT_EQ(Parsed("delay us=10").action, FaultAction::kDelay);
  EXPECT_EQ(Parsed("mark").action, FaultAction::kMark);
  EXPECT_EQ(Parsed("down").action, FaultAction::kDown);
}

TEST(FaultRule, ReadsEveryKey) {
  const FaultRule rule = Parsed(
      "  delay dev=verbena1\tdir=rx qpn=0x1a2b3c opcode=send psn=7 every=5 prob=0.25 seed=42 "
      "count=9 us=1500 ");
  EXPECT_EQ(rule.device, "verbena1");
  EXPECT_EQ(rule.direction, Direction::kRx);
  EXPECT_EQ(rule.qpn, 0x1a2b3cu);
  EXPECT_TRUE(rule.opcodes->test(0x04));
  EXPECT_FALSE(rule.opcodes->test(0x11));
  EXPECT_EQ(rule.psn_offset, 7u);
  EXPECT_EQ(rule.every, 5u);
  EXPECT_EQ(rule.probability, 0.25);
  EXPECT_EQ(rule.seed, 42u);
  EXPECT_EQ(rule.count, 9u);
  EXPECT_EQ(rule.duration->us(), 1500);
  EXPECT_EQ(rule.text,
            "delay dev=verbena1 dir=rx qpn=0x1a2b3c opcode=send psn=7 every=5 prob=0.25 seed=42 "
            "count=9 us=1500");
  EXPECT_EQ(Parsed("drop nth=3").nth, 3u);
  EXPECT_EQ(Parsed("drop dir=tx").direction, Direction::kTx);
  EXPECT_EQ(Parsed("reorder by=4").distance, 4u);
  EXPECT_EQ(Parsed("reorder").distance, 1u);
  EXPECT_EQ(Parsed("drop prob=1e-3").probability, 0.001);
  EXPECT_EQ(Parsed("drop mad=req").mad, 0x10);  // attribute ids: IBTA Vol 1, table 16.7.2
  EXPECT_EQ(Parsed("drop mad=rep").mad, 0x13);
  EXPECT_EQ(Parsed("drop mad=sidr_rep").mad, 0x18);
  EXPECT_TRUE(Parsed("down mad=req").has_trigger());
  EXPECT_FALSE(Parsed("drop opcode=any").opcodes.has_value());
}

TEST(FaultRule, NamesTheBadWord) {
  struct Case {
    const char* text;
    const char* named;
  };
  const Case cases[] = {
      {"", "ACTION"},
      {"   ", "ACTION"},
      {"droop", "'droop'"},
      {"DROP", "'DROP'"},
      {"drop qp=1", "'qp'"},
      {"drop Dev=verbena0", "'Dev'"},
      {"drop dev", "'dev'"},
      {"drop =3", "''"},
      {"drop dev=", "'dev='"},
      {"drop dir=in", "'dir=in'"},
      {"drop qpn=", "'qpn='"},
      {"drop qpn=-1", "'qpn=-1'"},
      {"drop qpn=0x1000000", "'qpn=0x1000000'"},
      {"drop qpn=12z", "'qpn=12z'"},
      {"drop qpn=0x", "'qpn=0x'"},
      {"drop opcode=rc_sned_only", "'opcode=rc_sned_only'"},
      {"drop opcode=", "'opcode='"},
      {"drop psn=16777216", "'psn=16777216'"},
      {"drop nth=0", "'nth=0'"},
      {"drop mad=", "'mad='"},
      {"drop mad=REQ", "'mad=REQ'"},
      {"drop every=0", "'every=0'"},
      {"drop every=1.5", "'every=1.5'"},
      {"drop nth=99999999999999999999", "'nth=99999999999999999999'"},
      {"drop count=0", "'count=0'"},
      {"drop prob=1.01", "'prob=1.01'"},
      {"drop prob=-0.1", "'prob=-0.1'"},
      {"drop prob=nan", "'prob=nan'"},
      {"drop prob=2%", "'prob=2%'"},
      {"drop prob=", "'prob='"},
      {"drop seed=x", "'seed=x'"},
      {"delay us=0", "'us=0'"},
      {"delay us=3600000001", "'us=3600000001'"},
      {"delay", "'us='"},
      {"drop us=5", "'us='"},
      {"reorder us=5", "'us='"},
      {"reorder by=0", "'by=0'"},
      {"drop by=2", "'by='"},
      {"drop nth=1 every=2", "'nth='"},
      {"drop nth=1 nth=2", "'nth'"},
      {"set", "bth.psn"},
      {"set bth.psm=1", "'bth.psm'"},
      {"set bth.psn=0x1000000", "'bth.psn=0x1000000'"},
      {"set bth.psn=*1", "'bth.psn=*1'"},
      {"drop bth.psn=1", "'bth.psn='"},
      {"truncate", "'bytes='"},
      {"drop bytes=1", "'bytes='"},
      {"rate", "'mbps='"},
      {"rate mbps=0", "'mbps=0'"},
      {"drop jitter=1", "'jitter='"},
      {"corrupt xor=1", "'at='"},
      {"corrupt at=1 xor=0x100", "'xor=0x100'"},
      {"corrupt icrc=left", "'icrc=left'"},
      {"drop icrc=right", "'icrc='"},
      {"drop size=9-", "'size=9-'"},
      {"drop size=9-8", "'size=9-8'"},
      {"drop transmission=0", "'transmission=0'"},
      {"drop burst=2", "'prob='"},
      {"drop after=5 until=5", "'until='"},
  };
  for (const Case& c : cases) EXPECT_THAT(ErrorOf(c.text), HasSubstr(c.named)) << c.text;
}

TEST(FaultRule, ReadsWhatRewritesAndShapes) {
  const FaultRule set = Parsed("set bth.psn=+1 aeth.syndrome=0x63 icrc=wrong");
  ASSERT_EQ(set.changes.size(), 2u);
  EXPECT_EQ(set.changes[0].field->name, "bth.psn");
  EXPECT_TRUE(set.changes[0].relative);
  EXPECT_EQ(set.changes[1].value, 0x63u);
  EXPECT_FALSE(set.changes[1].relative);
  EXPECT_EQ(set.right_icrc, false);
  EXPECT_EQ(Parsed("set bth.psn=-2").changes[0].value, uint64_t{0} - 2);
  const FaultRule keys = Parsed(
      "delay us=5 jitter=7 sqpn=1 dqpn=2 size=100-200 transmission=2 after=10 until=20 prob=0.5 "
      "burst=4");
  EXPECT_EQ(keys.jitter.us(), 7);
  EXPECT_EQ(keys.source_qpn, 1u);
  EXPECT_EQ(keys.dest_qpn, 2u);
  EXPECT_EQ(keys.min_size, 100u);
  EXPECT_EQ(keys.max_size, 200u);
  EXPECT_EQ(keys.transmission, 2u);
  EXPECT_EQ(keys.after.us(), 10);
  EXPECT_EQ(keys.until->us(), 20);
  EXPECT_EQ(keys.burst, 4u);
  EXPECT_EQ(Parsed("rate mbps=100").mbps, 100u);
  EXPECT_EQ(Parsed("truncate bytes=3").bytes, 3u);
  const FaultRule corrupt = Parsed("corrupt at=12 xor=0xf0 icrc=right");
  EXPECT_EQ(corrupt.at, 12u);
  EXPECT_EQ(corrupt.flipped, 0xf0);
  EXPECT_EQ(corrupt.right_icrc, true);
}

TEST(FaultRule, RefusesAnEndlessText) {
  EXPECT_THAT(ErrorOf("drop " + std::string(5000, ' ') + "nth=1"), HasSubstr("1024"));
}

// Codes from the IBTA opcode table.
TEST(FaultRule, KnowsOpcodesAsTheSpecificationAndTsharkWriteThem) {
  using Codes_ = std::vector<int>;
  EXPECT_EQ(Codes("RC_SEND_ONLY"), (Codes_{0x04}));
  EXPECT_EQ(Codes("rc_send_only"), (Codes_{0x04}));
  EXPECT_EQ(Codes("SEND_ONLY"), (Codes_{0x04, 0x24, 0x64, 0xa4}));
  EXPECT_EQ(Codes("RDMA_WRITE_FIRST"), (Codes_{0x06, 0x26, 0xa6}));
  EXPECT_EQ(Codes("write-first"), (Codes_{0x06, 0x26, 0xa6}));
  EXPECT_EQ(Codes("RC_RDMA_READ_RESPONSE_LAST"), (Codes_{0x0f}));
  EXPECT_EQ(Codes("RC_SEND_LAST_WITH_IMMEDIATE"), (Codes_{0x03}));
  EXPECT_EQ(Codes("RC_SEND_ONLY_IMM"), (Codes_{0x05}));
  EXPECT_EQ(Codes("RC_SEND_ONLY_WITH_INVALIDATE"), (Codes_{0x17}));
  EXPECT_EQ(Codes("RC_ACKNOWLEDGE"), (Codes_{0x11}));
  EXPECT_EQ(Codes("RC_ATOMIC_ACKNOWLEDGE"), (Codes_{0x12}));
  EXPECT_EQ(Codes("RC_CmpSwap"), (Codes_{0x13}));
  EXPECT_EQ(Codes("RC_COMPARE_AND_SWAP"), (Codes_{0x13}));
  EXPECT_EQ(Codes("RC_FETCH_ADD"), (Codes_{0x14}));
  EXPECT_EQ(Codes("RC_FETCH_AND_ADD"), (Codes_{0x14}));
  EXPECT_EQ(Codes("CNP"), (Codes_{0x81}));
  EXPECT_EQ(Codes("RC"), Codes_{});
  EXPECT_EQ(Codes("_"), Codes_{});
}

TEST(FaultRule, ClassesHoldTheirOpcodes) {
  const auto has = [](const char* name, size_t code) { return ParseOpcodeSet(name)->test(code); };
  EXPECT_TRUE(has("send", 0x17));
  EXPECT_TRUE(has("Send", 0x64));
  EXPECT_FALSE(has("send", 0x06));
  EXPECT_TRUE(has("write", 0x0b));
  EXPECT_FALSE(has("write", 0x0c));
  EXPECT_TRUE(has("read", 0x0c));
  EXPECT_TRUE(has("read", 0x0e));
  EXPECT_TRUE(has("atomic", 0x12));
  EXPECT_TRUE(has("atomic", 0x13));
  EXPECT_FALSE(has("atomic", 0x11));
  EXPECT_TRUE(has("ack", 0x11));
  EXPECT_TRUE(has("ack", 0xb1));
  EXPECT_FALSE(has("ack", 0x12));
}

}  // namespace
}  // namespace verbena::nic
