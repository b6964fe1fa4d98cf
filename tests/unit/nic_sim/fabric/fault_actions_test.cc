// SPDX-License-Identifier: Apache-2.0
//
// Rules that shape the traffic or rewrite packets, and the keys of time, size
// and transmission.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/unit/nic_sim/fabric/fabric_fixture.h"

namespace verbena::nic {
namespace {

using Psns = std::vector<uint32_t>;

// Opcodes of the IBTA table.
constexpr uint8_t kSendOnly = 0x04;
constexpr uint8_t kWriteOnly = 0x0a;
constexpr uint8_t kAcknowledge = 0x11;
constexpr uint8_t kSendFirst = 0x00;
constexpr uint8_t kSendMiddle = 0x01;
constexpr uint8_t kSendLast = 0x02;
// Offsets in an IPv4 frame.
constexpr size_t kBth = 14 + 20 + 8;
constexpr size_t kPsn = kBth + 9;

class FaultActionTest : public FabricTest {
 protected:
  // Sends packets 0 to `count` - 1 and says how long each waited.
  std::vector<int64_t> Waits(uint32_t count, int64_t step_us, int64_t limit_us) {
    SendPsns(0, count);
    std::vector<int64_t> waits;
    for (int64_t us = 0; us <= limit_us && waits.size() < count; us += step_us) {
      HandleTimeout();
      for (size_t n = Receive().size(); n > 0; --n) waits.push_back(us);
      AdvanceUs(step_us);
    }
    return waits;
  }
};

TEST_F(FaultActionTest, SetRewritesAFieldAndTheIcrcIsRightAgain) {
  const uint32_t rule = AddRule("set bth.psn=+1 bth.pkey=0x8001 psn=5");
  SendPsns(4, 2);
  const std::vector<Received> got = Receive();
  ASSERT_EQ(got.size(), 2u);
  EXPECT_EQ(got[0].frame[kPsn + 2], 4);
  EXPECT_EQ(got[1].frame[kPsn + 2], 6);
  EXPECT_EQ(got[1].frame[kBth + 2], 0x80);
  EXPECT_EQ(got[1].frame[kBth + 3], 0x01);
  EXPECT_TRUE(IcrcIsRight(got[1].frame));
  EXPECT_EQ(Hits(rule), 1u);
}

TEST_F(FaultActionTest, SetCountsBackwardsToo) {
  AddRule("set bth.psn=-1");
  SendPsns(0, 1);
  const std::vector<Received> got = Receive();
  ASSERT_EQ(got.size(), 1u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(got[0].frame[kPsn + i], 0xff);
}

TEST_F(FaultActionTest, SetCanLeaveTheIcrcWrong) {
  AddRule("set bth.psn=+1 icrc=wrong");
  SendPsns(0, 1);
  const std::vector<Received> got = Receive();
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(got[0].frame[kPsn + 2], 1);
  EXPECT_FALSE(IcrcIsRight(got[0].frame));
  EXPECT_FALSE(got[0].meta.trusted) << "the NIC has to look";
}

TEST_F(FaultActionTest, SetOfAFieldThatThePacketLacksIsNoHit) {
  const uint32_t rule = AddRule("set reth.rkey=1");
  Send({.opcode = kSendOnly, .psn = 0});
  EXPECT_EQ(ReceivePsns(), (Psns{0}));
  EXPECT_EQ(Hits(rule), 0u);
  Send({.opcode = kWriteOnly, .psn = 1});
  const std::vector<Received> got = Receive();
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(Hits(rule), 1u);
  EXPECT_EQ(got[0].frame[kBth + 12 + 8 + 3], 1);
}

TEST_F(FaultActionTest, LaterRulesSeeWhatSetLeft) {
  AddRule("set bth.dest_qpn=0x77 psn=0");
  AddRule("drop dqpn=0x77");
  AddRule("drop dqpn=0x22 psn=1");
  SendPsns(0, 3);
  EXPECT_EQ(ReceivePsns(), (Psns{2}));
}

TEST_F(FaultActionTest, CorruptAtAPlaceWithARightIcrcReachesTheQp) {
  AddRule("corrupt at=20 xor=0x81 icrc=right");
  SendPsns(0, 1);
  const std::vector<Received> got = Receive();
  ASSERT_EQ(got.size(), 1u);
  const std::vector<uint8_t> sent = FrameOfSpec({.psn = 0});
  EXPECT_EQ(got[0].frame[kBth + 20], sent[kBth + 20] ^ 0x81);
  EXPECT_TRUE(IcrcIsRight(got[0].frame));
}

TEST_F(FaultActionTest, CorruptAtAPlaceLeavesTheIcrcWrongByItself) {
  AddRule("corrupt at=20");
  SendPsns(0, 1);
  const std::vector<Received> got = Receive();
  ASSERT_EQ(got.size(), 1u);
  EXPECT_FALSE(IcrcIsRight(got[0].frame));
  EXPECT_FALSE(got[0].meta.trusted);
}

TEST_F(FaultActionTest, CorruptBehindThePacketsEndIsNoHit) {
  const uint32_t rule = AddRule("corrupt at=4000");
  SendPsns(0, 1);
  EXPECT_EQ(ReceivePsns(), (Psns{0}));
  EXPECT_EQ(Hits(rule), 0u);
}

TEST_F(FaultActionTest, TruncateCutsTheEndOffAndKeepsTheLengths) {
  const uint32_t rule = AddRule("truncate bytes=8 count=1");
  SendPsns(0, 2);
  const std::vector<Received> got = Receive();
  ASSERT_EQ(got.size(), 2u);
  EXPECT_EQ(Hits(rule), 1u);
  EXPECT_EQ(got[0].frame.size() + 8, got[1].frame.size());
  EXPECT_FALSE(got[0].meta.trusted);
  EXPECT_EQ(got[0].frame[16], got[1].frame[16]) << "IPv4 total length";
  EXPECT_EQ(got[0].frame[17], got[1].frame[17]);
}

TEST_F(FaultActionTest, TruncateBeyondThePacketLeavesItsHeaders) {
  AddRule("truncate bytes=4000");
  AddRule("drop opcode=read");  // Looks at what is left.
  SendPsns(0, 1);
  const std::vector<Received> got = Receive();
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(got[0].frame.size(), kBth + 12 + 4);
}

// 14 + 20 + 8 + 12 + 64 + 4 = 122 bytes: 97.6 us at 10 Mbit/s.
TEST_F(FaultActionTest, RateSendsPacketsOneBehindTheOther) {
  AddRule("rate mbps=10 dir=tx");
  const std::vector<int64_t> waits = Waits(5, 1, 1000);
  EXPECT_EQ(waits, (std::vector<int64_t>{98, 196, 293, 391, 488}));
}

TEST_F(FaultActionTest, RateDropsWhatItsQueueCannotHold) {
  const uint32_t rule = AddRule("rate mbps=1 dir=tx");
  SendPsns(0, 1010);
  EXPECT_EQ(Hits(rule), 1010u);
  EXPECT_EQ(Drops(0, DropReason::fault), 10u);
  AdvanceUs(2'000'000);
  HandleTimeout();
  EXPECT_EQ(Receive().size(), 1000u);
}

TEST_F(FaultActionTest, JitterKeepsTheOrderAndItsBounds) {
  AddRule("delay us=100 jitter=400 dir=tx seed=3");
  const std::vector<int64_t> waits = Waits(50, 10, 1000);
  ASSERT_EQ(waits.size(), 50u);
  EXPECT_GE(waits.front(), 100);
  EXPECT_LE(waits.back(), 500 + 10);
  EXPECT_GT(waits.back() - waits.front(), 50);
}

// The mean of a geometric distribution, and the share of packets that a chain
// with these probabilities spends in its bad state.
TEST_F(FaultActionTest, BurstsHaveTheLengthThatTheRuleSays) {
  AddRule("drop dir=tx prob=0.02 burst=10 seed=1");
  constexpr uint32_t kPackets = 60000;
  std::vector<bool> arrived(kPackets);
  for (uint32_t psn = 0; psn < kPackets; psn += 50) {
    SendPsns(psn, 50);
    for (const uint32_t got : ReceivePsns()) arrived[got] = true;
  }
  int bursts = 0, lost = 0;
  for (uint32_t psn = 0; psn < kPackets; ++psn) {
    if (arrived[psn]) continue;
    ++lost;
    if (psn == 0 || arrived[psn - 1]) ++bursts;
  }
  // A new burst may begin right behind one, with 0.02: 10 / (1 - 0.02).
  EXPECT_NEAR(static_cast<double>(lost) / bursts, 10.2, 1.0);
  // 50 packets between bursts on average (one of which begins the next).
  EXPECT_NEAR(static_cast<double>(lost) / kPackets, 10.0 / (10.0 + 49.0), 0.02);
}

TEST_F(FaultActionTest, WindowBeginsAndEndsAtItsTimes) {
  AddRule("drop after=100 until=300");
  HandleTimeout();  // The clock of the rule begins.
  Psns got;
  for (uint32_t psn = 0; psn < 4; ++psn) {  // at 0, 99, 100, 299
    if (psn == 1) AdvanceUs(99);
    if (psn == 2) AdvanceUs(1);
    if (psn == 3) AdvanceUs(199);
    SendPsns(psn, 1);
  }
  AdvanceUs(1);
  SendPsns(4, 1);
  EXPECT_EQ(ReceivePsns(), (Psns{0, 1, 4}));
}

TEST_F(FaultActionTest, LinkGoesDownAndUpInItsWindowWithoutPackets) {
  AddRule("down dev=verbena0 after=100 until=300");
  HandleTimeout();
  EXPECT_TRUE(fabric_->link_up(0));
  for (const auto& [us, up] : {std::pair{99, true}, {1, false}, {199, false}, {1, true}}) {
    AdvanceUs(us);
    HandleTimeout();
    EXPECT_EQ(fabric_->link_up(0), up) << us;
  }
}

// 20 + 8 + 12 + 64 + 4 and with 256 bytes of payload.
TEST_F(FaultActionTest, SizeSelectsByTheBytesOfTheIpPacket) {
  AddRule("drop size=108");
  Send({.psn = 0, .payload_bytes = 64});
  Send({.psn = 1, .payload_bytes = 60});
  Send({.psn = 2, .payload_bytes = 256});
  EXPECT_EQ(ReceivePsns(), (Psns{1, 2}));
  AddRule("drop size=109-400");
  Send({.psn = 3, .payload_bytes = 64});
  Send({.psn = 4, .payload_bytes = 60});
  Send({.psn = 5, .payload_bytes = 256});
  EXPECT_EQ(ReceivePsns(), (Psns{4}));
}

TEST_F(FaultActionTest, TransmissionCountsEachPsnOfEachFlow) {
  const uint32_t rule = AddRule("drop opcode=send transmission=2");
  for (int transmission = 1; transmission <= 3; ++transmission) {
    Send({.psn = 7});
    Send({.dest_qpn = 0x33, .psn = 7});
    Send({.opcode = kAcknowledge, .psn = 7});
  }
  EXPECT_EQ(ReceivePsns(), (Psns{7, 7, 7, 7, 7, 7, 7}));
  EXPECT_EQ(Hits(rule), 2u);
}

TEST_F(FaultActionTest, SourceAndDestinationQpnsMakeAPair) {
  const uint32_t rule = AddRule("drop sqpn=0x11 dqpn=0x22");
  Send({.source_qpn = 0x11, .dest_qpn = 0x22, .psn = 0});
  Send({.source_qpn = 0x12, .dest_qpn = 0x22, .psn = 1});
  Send({.source_qpn = 0x11, .dest_qpn = 0x23, .psn = 2});
  EXPECT_EQ(ReceivePsns(), (Psns{1, 2}));
  EXPECT_EQ(Hits(rule), 1u);
}

TEST_F(FaultActionTest, HeldPacketsWaitInOrderUntilTheyAreReleased) {
  const uint32_t rule = AddRule("hold psn=1");
  AddRule("hold psn=2");
  SendPsns(0, 4);
  SendPsns(1, 1);
  AdvanceUs(3'600'000'000);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{0, 3}));
  EXPECT_EQ(fabric_->next_deadline(), transport::Time::Never());
  const nlohmann::json held = fabric_->ListHeld();
  ASSERT_EQ(held.size(), 3u);
  EXPECT_EQ(held[0]["psn"], 1);
  EXPECT_EQ(held[0]["device"], "verbena0");
  EXPECT_EQ(held[0]["side"], "tx");
  EXPECT_EQ(held[1]["psn"], 2);
  EXPECT_EQ(held[2]["psn"], 1);

  EXPECT_EQ(fabric_->ReleaseHeld(0, 1), 1u);  // The oldest of all rules,
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{1}));
  EXPECT_EQ(fabric_->ReleaseHeld(rule, 5), 1u);  // and of one.
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{1}));
  EXPECT_EQ(fabric_->ReleaseHeld(0, SIZE_MAX), 1u);
  EXPECT_EQ(fabric_->ReleaseHeld(0, SIZE_MAX), 0u);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{2}));
}

TEST_F(FaultActionTest, ARuleThatGoesReleasesWhatItHolds) {
  const uint32_t rule = AddRule("hold");
  SendPsns(0, 3);
  EXPECT_EQ(fabric_->ListRules()[0]["held"], 3);
  EXPECT_EQ(fabric_->ClearRules(rule), 1u);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(fabric_->ListHeld().size(), 0u);
}

TEST_F(FaultActionTest, OfMoreThanTheQueueOfAHoldTheOldestGoesOn) {
  AddRule("hold");
  SendPsns(0, 1024);
  EXPECT_EQ(ReceivePsns().size(), 0u);
  SendPsns(1024, 2);
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{0, 1}));
}

// --- Whose packet it is

TEST_F(FaultActionTest, RulesKnowQpsByTheirApplication) {
  fabric_->NameQp(0, 0x11, "ib_write_bw", 1);
  fabric_->NameQp(1, 0x22, "ib_write_bw", 2);
  fabric_->NameQp(0, 0x12, "other", 1);
  const uint32_t first = AddRule("drop app=ib_write_bw nth_qp=1 dir=tx");
  Send({.source_qpn = 0x12, .psn = 1});
  Send({.source_qpn = 0x11, .psn = 2});
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{1}));
  EXPECT_EQ(Hits(first), 1u);
  fabric_->ForgetQp(0, 0x11);
  Send({.source_qpn = 0x11, .psn = 3});
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{3}));
  // At the receiver it is the second one's.
  AddRule("drop app=ib_write_bw nth_qp=2 dir=rx");
  SendPsns(4, 1);
  EXPECT_EQ(ReceivePsns().size(), 0u);
}

TEST_F(FaultActionTest, APairIsMetBothWays) {
  const uint32_t rule = AddRule("drop pair=0x11-0x22");
  Send({.source_qpn = 0x11, .dest_qpn = 0x22});
  Send({.source = kAddress1, .destination = kAddress0, .source_qpn = 0x22, .dest_qpn = 0x11}, 1);
  Send({.source_qpn = 0x11, .dest_qpn = 0x23});
  EXPECT_EQ(Hits(rule), 2u);
}

TEST_F(FaultActionTest, MessagesAreCountedByTheirFirstPackets) {
  const uint32_t rule = AddRule("drop msg=2");
  Send({.opcode = kSendFirst, .psn = 0});
  Send({.opcode = kSendLast, .psn = 1});
  Send({.opcode = kSendFirst, .psn = 2});
  Send({.opcode = kSendMiddle, .psn = 3});
  Send({.opcode = kSendLast, .psn = 4});
  Send({.opcode = kSendFirst, .psn = 2});  // a retransmission
  Send({.opcode = kSendOnly, .psn = 5});
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{0, 1, 5}));
  EXPECT_EQ(Hits(rule), 4u);
  // The answer to it is its too.
  Send({.source = kAddress1,
        .destination = kAddress0,
        .opcode = kAcknowledge,
        .source_qpn = 0x22,
        .dest_qpn = 0x11,
        .psn = 4},
       1);
  EXPECT_EQ(Hits(rule), 5u);
}

TEST_F(FaultActionTest, OpcodesCanBeListed) {
  const uint32_t rule = AddRule("drop opcode=first,last");
  Send({.opcode = kSendFirst});
  Send({.opcode = kSendMiddle});
  Send({.opcode = kSendLast});
  Send({.opcode = kSendOnly});
  EXPECT_EQ(Hits(rule), 2u);
}

// --- Answers that nobody sent

TEST_F(FaultActionTest, AForgedNakGoesBackToTheSender) {
  AddRule("forge kind=nak_access psn=7");
  Send({.psn = 7});
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{7}));  // It goes on.
  const std::vector<Received> back = Receive(0);
  ASSERT_EQ(back.size(), 1u);
  const std::vector<uint8_t>& frame = back[0].frame;
  ASSERT_EQ(frame.size(), kBth + 12 + 4 + 4);
  EXPECT_EQ(frame[kBth], kAcknowledge);
  EXPECT_EQ(frame[kBth + 7], 0x11);  // the sender's QP
  EXPECT_EQ(frame[kPsn + 2], 7);
  EXPECT_EQ(frame[kBth + 12], 0x62);
  EXPECT_TRUE(IcrcIsRight(frame));
  // From the receiver's address to the sender's.
  EXPECT_EQ(frame[14 + 15], kAddress1 & 0xff);
  EXPECT_EQ(frame[14 + 19], kAddress0 & 0xff);
}

TEST_F(FaultActionTest, ForgedAnswersOfEachKind) {
  AddRule("forge kind=ack psn=1");
  AddRule("forge kind=rnr rnr_timer=14 psn=2");
  AddRule("forge kind=nak_sequence psn=3");
  AddRule("forge kind=cnp psn=4");
  SendPsns(1, 4);
  const std::vector<Received> back = Receive(0);
  ASSERT_EQ(back.size(), 4u);
  EXPECT_EQ(back[0].frame[kBth + 12], 0x1f);
  EXPECT_EQ(back[1].frame[kBth + 12], 0x2e);
  EXPECT_EQ(back[2].frame[kBth + 12], 0x60);
  EXPECT_EQ(back[3].frame[kBth], 0x81);
  EXPECT_EQ(back[3].frame.size(), kBth + 12 + 16 + 4);
  for (const Received& one : back) EXPECT_TRUE(IcrcIsRight(one.frame));
}

TEST_F(FaultActionTest, AnAnswerIsNotAnswered) {
  const uint32_t rule = AddRule("forge kind=ack");
  Send({.opcode = kAcknowledge});
  Send({.opcode = 0x64});  // UD
  EXPECT_EQ(Hits(rule), 0u);
  EXPECT_EQ(Receive(0).size(), 0u);
}

// --- Times

TEST_F(FaultActionTest, DelaysHaveTheMeanOfTheirDistribution) {
  const auto mean_of = [&](const std::string& rule) {
    const uint32_t id = AddRule(rule);
    double sum = 0;
    constexpr int kCount = 300;
    for (int i = 0; i < kCount; ++i) {
      for (const int64_t waited : Waits(1, 5, 100'000)) sum += static_cast<double>(waited);
    }
    fabric_->ClearRules(id);
    return sum / kCount;
  };
  EXPECT_NEAR(mean_of("delay us=200 jitter=50 dist=normal"), 200, 15);
  EXPECT_NEAR(mean_of("delay us=100 jitter=100 dist=exponential"), 200, 25);
  EXPECT_NEAR(mean_of("delay us=100 jitter=100 dist=pareto"), 150, 25);  // 1/(alpha-1)
}

TEST_F(FaultActionTest, ALinkFlapsWithItsPeriod) {
  AddRule("down dev=verbena1 us=100 period=1000 after=50");
  std::string seen;
  for (int i = 0; i < 60; ++i) {
    HandleTimeout();
    seen += fabric_->link_up(1) ? '.' : 'x';
    AdvanceUs(50);
  }
  // Down from 50 to 150, from 1050 to 1150, ...
  const std::string period = ".xx" + std::string(17, '.');
  EXPECT_EQ(seen, period + period + period);
}

TEST_F(FaultActionTest, AStalledNicTakesNothingUntilItGoesOn) {
  AddRule("stall dev=verbena1 us=500");
  HandleTimeout();
  SendPsns(0, 3);
  EXPECT_TRUE(fabric_->stalled(1));
  EXPECT_TRUE(fabric_->congested(1));
  EXPECT_FALSE(fabric_->congested(0));
  EXPECT_FALSE(fabric_->has_received(1));
  const transport::Time end = fabric_->next_deadline();
  EXPECT_EQ(end, now_ + transport::Duration::Microseconds(500));
  now_ = end;
  HandleTimeout();
  EXPECT_FALSE(fabric_->stalled(1));
  EXPECT_TRUE(fabric_->has_received(1));
  EXPECT_EQ(ReceivePsns(), (std::vector<uint32_t>{0, 1, 2}));
}

TEST_F(FaultActionTest, AStallEndsWithItsRule) {
  const uint32_t rule = AddRule("stall dev=verbena0");
  HandleTimeout();
  EXPECT_TRUE(fabric_->congested(0));
  fabric_->ClearRules(rule);
  EXPECT_FALSE(fabric_->congested(0));
}

TEST_F(FaultActionTest, SlowDmaHoldsUpTheNicForEachPayload) {
  const uint32_t rule = AddRule("slow_dma dev=verbena1 us=10");
  SendPsns(0, 5);
  EXPECT_EQ(Hits(rule), 5u);
  EXPECT_TRUE(fabric_->stalled(1));
  EXPECT_FALSE(fabric_->stalled(0));
  AdvanceUs(49);
  HandleTimeout();
  EXPECT_TRUE(fabric_->stalled(1));
  AdvanceUs(1);
  HandleTimeout();
  EXPECT_FALSE(fabric_->stalled(1));
  Receive();
}

}  // namespace
}  // namespace verbena::nic
