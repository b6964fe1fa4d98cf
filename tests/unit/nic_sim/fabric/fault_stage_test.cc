// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "nic_sim/fabric/fabric.h"
#include "tests/unit/nic_sim/fabric/fabric_fixture.h"

namespace verbena::nic {
namespace {

using Psns = std::vector<uint32_t>;
using transport::Duration;
using transport::Time;

// Opcodes of the IBTA table.
constexpr uint8_t kSendOnly = 0x04;
constexpr uint8_t kAcknowledge = 0x11;

class FaultStageTest : public FabricTest {};

TEST_F(FaultStageTest, DropTakesTheNthMatchOnly) {
  const uint32_t rule = AddRule("drop opcode=send nth=3");
  for (uint32_t i = 0; i < 6; ++i) {
    Send({.opcode = kAcknowledge, .psn = 100 + i});
    Send({.opcode = kSendOnly, .psn = i});
  }
  EXPECT_EQ(ReceivePsns(), (Psns{100, 0, 101, 1, 102, 103, 3, 104, 4, 105, 5}));
  EXPECT_EQ(Hits(rule), 1u);
  EXPECT_EQ(Drops(0, DropReason::fault), 1u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_discards, 1u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_packets, 11u);
  EXPECT_EQ(fabric_->counters(1).port_rcv_packets, 11u);
}

TEST_F(FaultStageTest, DropOnTheReceivingSideCountsThere) {
  const uint32_t rule = AddRule("drop dev=verbena1 dir=rx every=4");
  SendPsns(1, 8);
  EXPECT_EQ(ReceivePsns(), (Psns{1, 2, 3, 5, 6, 7}));
  EXPECT_EQ(Hits(rule), 2u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_packets, 8u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_discards, 0u);
  EXPECT_EQ(fabric_->counters(1).port_rcv_packets, 6u);
  EXPECT_EQ(fabric_->counters(1).port_rcv_errors, 2u);
  EXPECT_EQ(Drops(1, DropReason::fault), 2u);
}

TEST_F(FaultStageTest, CountLimitsTheHits) {
  const uint32_t rule = AddRule("drop count=3");
  SendPsns(0, 10);
  EXPECT_EQ(ReceivePsns(), (Psns{3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(Hits(rule), 3u);
}

TEST_F(FaultStageTest, PsnMatchesEachTransmissionOfAPacket) {
  AddRule("drop psn=2 count=2");
  SendPsns(0, 4);
  SendPsns(2, 1);
  SendPsns(2, 1);
  EXPECT_EQ(ReceivePsns(), (Psns{0, 1, 3, 2}));
}

struct SelectionCase {
  const char* rule;
  // Which of these four it hits: 0→1, 1→0, 0→0, 1→1 (source QPN 0x11 and
  // destination QPN 0x22 in all).
  std::vector<int> hits;
};
class Selection : public FabricTest, public ::testing::WithParamInterface<SelectionCase> {};

TEST_P(Selection, LooksAtTheSideOfTheDevice) {
  const uint32_t addresses[] = {kAddress0, kAddress1};
  const int ways[4][2] = {{0, 1}, {1, 0}, {0, 0}, {1, 1}};
  const uint32_t rule = AddRule(std::string("mark ") + GetParam().rule);
  std::vector<int> hits;
  for (const auto& [from, to] : ways) {
    const uint64_t before = Hits(rule);
    Send({.source = addresses[from], .destination = addresses[to]}, static_cast<PortId>(from));
    hits.push_back(static_cast<int>(Hits(rule) - before));
    ASSERT_EQ(Receive(static_cast<PortId>(to)).size(), 1u);
  }
  EXPECT_EQ(hits, GetParam().hits);
}

INSTANTIATE_TEST_SUITE_P(
    Rules, Selection,
    ::testing::Values(
        SelectionCase{"", {1, 1, 1, 1}},  // once per packet, not per side
        SelectionCase{"dir=tx", {1, 1, 1, 1}}, SelectionCase{"dir=rx", {1, 1, 1, 1}},
        SelectionCase{"dev=verbena0", {1, 1, 1, 0}}, SelectionCase{"dev=verbena1", {1, 1, 0, 1}},
        SelectionCase{"dev=verbena0 dir=tx", {1, 0, 1, 0}},
        SelectionCase{"dev=verbena0 dir=rx", {0, 1, 1, 0}}, SelectionCase{"qpn=0x11", {1, 1, 1, 1}},
        SelectionCase{"qpn=34", {1, 1, 1, 1}}, SelectionCase{"qpn=1", {0, 0, 0, 0}},
        SelectionCase{"dir=tx qpn=0x11", {1, 1, 1, 1}},
        SelectionCase{"dir=tx qpn=0x22", {0, 0, 0, 0}},
        SelectionCase{"dir=rx qpn=0x22", {1, 1, 1, 1}},
        SelectionCase{"dir=rx qpn=0x11", {0, 0, 0, 0}},
        SelectionCase{"dev=verbena0 qpn=0x11", {1, 0, 1, 0}},
        SelectionCase{"dev=verbena0 qpn=0x22", {0, 1, 1, 0}},
        SelectionCase{"opcode=SEND_ONLY", {1, 1, 1, 1}}, SelectionCase{"opcode=any", {1, 1, 1, 1}},
        SelectionCase{"opcode=ack", {0, 0, 0, 0}}));

TEST_F(FaultStageTest, DuplicateSendsACopyBehindThePacket) {
  const uint32_t rule = AddRule("duplicate every=2");
  SendPsns(0, 4);
  const std::vector<Received> received = Receive();
  Psns psns;
  for (const Received& r : received) psns.push_back(r.psn);
  EXPECT_EQ(psns, (Psns{0, 1, 1, 2, 3, 3}));
  EXPECT_EQ(received[1].frame, received[2].frame);
  EXPECT_EQ(received[2].meta.source_qpn, 0x11u);
  EXPECT_TRUE(received[2].meta.trusted);
  EXPECT_EQ(Hits(rule), 2u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_packets, 6u);
  EXPECT_EQ(fabric_->counters(1).port_rcv_packets, 6u);
}

TEST_F(FaultStageTest, DuplicateWithoutAFreePacketIsNoHit) {
  const uint32_t rule = AddRule("duplicate");
  std::vector<rte_mbuf*> taken;
  rte_mbuf* packet = NewPacket({.psn = 1});
  while (rte_mbuf* other = rte_pktmbuf_alloc(pool())) taken.push_back(other);
  fabric_->Transmit(0, {&packet, 1}, now_);
  EXPECT_EQ(ReceivePsns(), Psns{1});
  EXPECT_EQ(Hits(rule), 0u);
  rte_pktmbuf_free_bulk(taken.data(), static_cast<unsigned>(taken.size()));
}

TEST_F(FaultStageTest, CorruptFlipsOneBitThatTheIcrcShows) {
  const uint32_t rule = AddRule("corrupt");
  for (uint32_t i = 0; i < 300; ++i) {
    const PacketSpec spec{.ipv6 = i % 2 == 0, .psn = i, .payload_bytes = (i % 3) * 4};
    Send(spec);
    const Received received = Receive().at(0);
    EXPECT_FALSE(received.meta.trusted);
    EXPECT_TRUE(received.meta.icrc_present);
    EXPECT_FALSE(IcrcIsRight(received.frame));
    std::vector<uint8_t> good = FrameOfSpec(spec);
    const uint32_t crc = SlowIcrc(good);
    for (size_t k = 0; k < 4; ++k) good[good.size() - 4 + k] = static_cast<uint8_t>(crc >> (8 * k));
    int bits = 0;
    size_t where = 0;
    ASSERT_EQ(good.size(), received.frame.size());
    for (size_t k = 0; k < good.size(); ++k) {
      if (good[k] != received.frame[k]) where = k;
      bits += __builtin_popcount(good[k] ^ received.frame[k]);
    }
    EXPECT_EQ(bits, 1);
    EXPECT_GE(where, (spec.ipv6 ? 54u : 34u) + 8u + 9u);  // behind the QPN
  }
  EXPECT_EQ(Hits(rule), 300u);
}

TEST_F(FaultStageTest, CorruptLeavesAPacketThatOthersReferToAlone) {
  AddRule("corrupt");
  rte_mbuf* packet = NewPacket({});
  rte_mbuf_refcnt_update(packet, 1);
  const std::vector<uint8_t> before = FrameOfSpec({});
  fabric_->Transmit(0, {&packet, 1}, now_);
  const Received received = Receive().at(0);
  EXPECT_FALSE(IcrcIsRight(received.frame));
  // All but the place of the ICRC.
  EXPECT_TRUE(std::equal(before.begin(), before.end() - 4,
                         reinterpret_cast<const uint8_t*>(FrameOf(packet))));
  EXPECT_EQ(rte_mbuf_refcnt_read(packet), 1);
  rte_pktmbuf_free(packet);
}

TEST_F(FaultStageTest, MarkSetsCongestionExperiencedAndKeepsChecksumAndIcrcRight) {
  MakeFabric(true);
  AddRule("mark");
  Send({});
  Send({.ipv6 = true});
  const std::vector<Received> received = Receive();
  ASSERT_EQ(received.size(), 2u);
  const std::vector<uint8_t>& ipv4 = received[0].frame;
  EXPECT_EQ(ipv4[15] & 3, 3);
  uint32_t sum = 0;
  for (size_t i = 14; i < 34; i += 2) sum += static_cast<uint32_t>(ipv4[i] << 8) + ipv4[i + 1];
  EXPECT_EQ((sum & 0xffff) + (sum >> 16), 0xffffu);
  // Traffic class: low half of byte 0, high half of byte 1.
  EXPECT_EQ(received[1].frame[14], 0x60);
  EXPECT_EQ(received[1].frame[15], 0x30);
  for (const Received& r : received) EXPECT_TRUE(IcrcIsRight(r.frame));
}

TEST_F(FaultStageTest, DelayHoldsForItsTime) {
  AddRule("delay us=100 opcode=send");
  EXPECT_EQ(fabric_->next_deadline(), Time::Never());
  const Time sent = now_;
  SendPsns(0, 2);
  Send({.opcode = kAcknowledge, .psn = 9});
  EXPECT_EQ(ReceivePsns(), Psns{9});
  EXPECT_EQ(fabric_->counters(0).port_xmit_packets, 1u);
  EXPECT_EQ(fabric_->next_deadline(), sent + Duration::Microseconds(100));
  AdvanceUs(60);
  SendPsns(2, 1);
  AdvanceUs(39);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), Psns{});
  AdvanceUs(1);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), (Psns{0, 1}));
  EXPECT_EQ(fabric_->next_deadline(), sent + Duration::Microseconds(160));
  AdvanceUs(1000);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), Psns{2});
  EXPECT_EQ(fabric_->next_deadline(), Time::Never());
}

TEST_F(FaultStageTest, DelayedPacketsOfSeveralRulesComeInTheOrderOfTheirTimes) {
  AddRule("delay us=300 psn=1");
  AddRule("delay us=100 psn=2");
  AddRule("delay us=200 psn=3");
  SendPsns(1, 3);
  AdvanceUs(1000);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), (Psns{2, 3, 1}));
}

TEST_F(FaultStageTest, DueDelayedPacketGoesBeforeOneThatIsSentNow) {
  AddRule("delay us=100 psn=1");
  SendPsns(1, 1);
  AdvanceUs(100);
  SendPsns(2, 1);
  EXPECT_EQ(ReceivePsns(), (Psns{1, 2}));
}

TEST_F(FaultStageTest, DelaysOfBothSidesAddUp) {
  AddRule("delay us=100 dir=tx");
  AddRule("delay us=100 dir=rx");
  SendPsns(1, 1);
  AdvanceUs(100);
  HandleTimeout();
  EXPECT_EQ(fabric_->counters(0).port_xmit_packets, 1u);
  EXPECT_EQ(ReceivePsns(), Psns{});
  AdvanceUs(100);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), Psns{1});
}

TEST_F(FaultStageTest, DelayHoldsABoundedNumberAndLosesNothing) {
  constexpr uint32_t kHeld = 4096;
  AddRule("delay us=1000");
  SendPsns(0, kHeld);
  EXPECT_EQ(ReceivePsns(), Psns{});
  SendPsns(kHeld, 3);
  EXPECT_EQ(ReceivePsns(), (Psns{0, 1, 2}));
  AdvanceUs(1000);
  HandleTimeout();
  Psns rest(kHeld);
  std::iota(rest.begin(), rest.end(), 3);
  EXPECT_EQ(ReceivePsns(), rest);
}

TEST_F(FaultStageTest, ReorderLetsLaterPacketsOfTheFlowGoFirst) {
  const uint32_t rule = AddRule("reorder by=2 psn=1");
  SendPsns(0, 5);
  EXPECT_EQ(ReceivePsns(), (Psns{0, 2, 3, 1, 4}));
  EXPECT_EQ(Hits(rule), 1u);
}

TEST_F(FaultStageTest, ReorderCountsOnlyPacketsOfTheFlow) {
  AddRule("reorder by=1 psn=1");
  Send({.psn = 1});
  Send({.dest_qpn = 0x33, .psn = 50});
  Send({.ipv6 = true, .dest_qpn = 0x34, .psn = 51});
  EXPECT_EQ(ReceivePsns(), (Psns{50, 51}));
  Send({.psn = 2});
  EXPECT_EQ(ReceivePsns(), (Psns{2, 1}));
}

TEST_F(FaultStageTest, ReorderOfEveryPacketSwapsNeighbours) {
  const uint32_t rule = AddRule("reorder");
  SendPsns(0, 6);
  EXPECT_EQ(ReceivePsns(), (Psns{1, 0, 3, 2, 5, 4}));
  EXPECT_EQ(Hits(rule), 3u);
}

TEST_F(FaultStageTest, ReorderedLastPacketGoesOnAfterAWhile) {
  AddRule("reorder by=3 psn=1");
  SendPsns(1, 1);
  EXPECT_EQ(fabric_->next_deadline(), now_ + Duration::Milliseconds(1));
  AdvanceUs(999);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), Psns{});
  AdvanceUs(1);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), Psns{1});
}

TEST_F(FaultStageTest, DownDropsBothDirectionsWhileTheRuleExists) {
  EXPECT_TRUE(fabric_->link_up(1));
  const uint32_t rule = AddRule("down dev=verbena1");
  EXPECT_FALSE(fabric_->link_up(1));
  EXPECT_TRUE(fabric_->link_up(0));
  SendPsns(0, 3);
  Send({.source = kAddress1, .destination = kAddress0}, 1);
  Send({.destination = kAddress0, .psn = 7});  // does not cross that link
  EXPECT_EQ(ReceivePsns(1), Psns{});
  EXPECT_EQ(ReceivePsns(0), Psns{7});
  EXPECT_EQ(Hits(rule), 4u);
  EXPECT_EQ(Drops(1, DropReason::port_down), 4u);
  EXPECT_EQ(fabric_->counters(1).port_rcv_errors, 3u);
  EXPECT_EQ(fabric_->counters(1).port_xmit_discards, 1u);
  EXPECT_EQ(fabric_->ClearRules(rule), 1u);
  EXPECT_TRUE(fabric_->link_up(1));
  SendPsns(4, 1);
  EXPECT_EQ(ReceivePsns(1), Psns{4});
}

TEST_F(FaultStageTest, DownForATimeEndsByItself) {
  AddRule("down us=500");
  EXPECT_EQ(fabric_->next_deadline(), Time::Zero());  // the time begins with the next call
  HandleTimeout();
  EXPECT_FALSE(fabric_->link_up(0));
  EXPECT_EQ(fabric_->next_deadline(), now_ + Duration::Microseconds(500));
  SendPsns(0, 1);
  AdvanceUs(499);
  SendPsns(1, 1);
  AdvanceUs(1);
  SendPsns(2, 1);
  EXPECT_TRUE(fabric_->link_up(0));
  EXPECT_EQ(ReceivePsns(), Psns{2});
}

TEST_F(FaultStageTest, DownInOneDirectionLetsTheOtherPass) {
  AddRule("down dev=verbena0 dir=tx");
  SendPsns(0, 1);
  Send({.source = kAddress1, .destination = kAddress0, .psn = 5}, 1);
  EXPECT_EQ(ReceivePsns(1), Psns{});
  EXPECT_EQ(ReceivePsns(0), Psns{5});
}

TEST_F(FaultStageTest, DownBeginsAtThePacketThatItsKeysSelect) {
  const uint32_t rule = AddRule("down psn=2 us=100");
  EXPECT_TRUE(fabric_->link_up(0));
  SendPsns(0, 5);
  EXPECT_EQ(ReceivePsns(), (Psns{0, 1}));
  EXPECT_EQ(Hits(rule), 3u);
  AdvanceUs(100);
  SendPsns(2, 2);  // once only
  EXPECT_EQ(ReceivePsns(), (Psns{2, 3}));
}

TEST_F(FaultStageTest, SameSeedGivesTheSameFaults) {
  const auto run = [this](const std::string& seed) {
    AddRule("drop prob=0.1 seed=" + seed);
    AddRule("reorder prob=0.1 by=3 seed=" + seed + "1");
    AddRule("duplicate prob=0.1 seed=" + seed + "2");
    SendPsns(0, 500);
    AdvanceUs(5000);
    HandleTimeout();
    const Psns psns = ReceivePsns();
    fabric_->ClearRules(0);
    return psns;
  };
  const Psns first = run("7");
  EXPECT_EQ(run("7"), first);
  EXPECT_NE(run("8"), first);
}

TEST_F(FaultStageTest, ProbabilityIsWhatTheRuleSays) {
  const uint32_t rule = AddRule("drop prob=0.02 seed=1");
  AddRule("drop prob=0");
  for (int i = 0; i < 20; ++i) {
    SendPsns(0, 1000);
    Receive();
  }
  // 20000 trials: 400 expected, standard deviation 19.8.
  EXPECT_GT(Hits(rule), 300u);
  EXPECT_LT(Hits(rule), 500u);
  const uint32_t all = AddRule("drop prob=1");
  SendPsns(0, 100);
  EXPECT_EQ(ReceivePsns(), Psns{});
  EXPECT_GE(Hits(all), 90u);
}

TEST_F(FaultStageTest, RulesActInTheOrderOfTheirIds) {
  const uint32_t drop = AddRule("drop psn=1");
  const uint32_t corrupt = AddRule("corrupt");
  const uint32_t duplicate = AddRule("duplicate");
  SendPsns(0, 2);
  const std::vector<Received> received = Receive();
  ASSERT_EQ(received.size(), 2u);
  EXPECT_EQ(received[0].frame, received[1].frame);
  EXPECT_FALSE(received[1].meta.trusted);
  EXPECT_EQ(Hits(drop), 1u);
  EXPECT_EQ(Hits(corrupt), 1u);
  EXPECT_EQ(Hits(duplicate), 1u);
}

TEST_F(FaultStageTest, RulesAreListedAndRemoved) {
  const uint32_t a = AddRule("drop   opcode=send nth=3");
  const uint32_t b = AddRule("delay us=5");
  EXPECT_NE(a, b);
  EXPECT_EQ(fabric_->ListRules(),
            nlohmann::json::parse(R"([{"id":)" + std::to_string(a) +
                                  R"(,"rule":"drop opcode=send nth=3","hits":0},{"id":)" +
                                  std::to_string(b) + R"(,"rule":"delay us=5","hits":0}])"));
  EXPECT_EQ(fabric_->ClearRules(a), 1u);
  EXPECT_EQ(fabric_->ClearRules(a), 0u);
  EXPECT_EQ(fabric_->ListRules().size(), 1u);
  const uint32_t c = AddRule("drop");
  EXPECT_NE(c, a);  // ids are not used again
  EXPECT_EQ(fabric_->ClearRules(0), 2u);
  EXPECT_EQ(fabric_->ListRules(), nlohmann::json::array());
}

TEST_F(FaultStageTest, RemovedRuleGivesItsPacketsBack) {
  const uint32_t rule = AddRule("delay us=1000000");
  SendPsns(0, 3);
  EXPECT_EQ(ReceivePsns(), Psns{});
  fabric_->ClearRules(rule);
  EXPECT_EQ(fabric_->next_deadline(), Time::Zero());
  SendPsns(3, 1);
  EXPECT_EQ(ReceivePsns(), (Psns{0, 1, 2, 3}));
  EXPECT_EQ(fabric_->next_deadline(), Time::Never());

  AddRule("reorder by=5");
  SendPsns(0, 1);
  fabric_->ClearRules(0);
  HandleTimeout();
  EXPECT_EQ(ReceivePsns(), Psns{0});
}

TEST_F(FaultStageTest, BadRulesAreRefusedByName) {
  std::string error;
  EXPECT_EQ(fabric_->AddRule("drop dev=verbena7", &error), 0u);
  EXPECT_THAT(error, ::testing::HasSubstr("'dev=verbena7'"));
  EXPECT_EQ(fabric_->AddRule("drop color=red", &error), 0u);
  EXPECT_THAT(error, ::testing::HasSubstr("'color'"));
  EXPECT_EQ(fabric_->ListRules().size(), 0u);
}

TEST_F(FaultStageTest, NumberOfRulesIsBounded) {
  std::string error;
  for (int i = 0; i < 1024; ++i) ASSERT_NE(fabric_->AddRule("drop prob=0", &error), 0u);
  EXPECT_EQ(fabric_->AddRule("drop prob=0", &error), 0u);
  EXPECT_THAT(error, ::testing::HasSubstr("1024"));
}

// Chaos: whatever the rules do, packets are conserved.
TEST_F(FaultStageTest, EveryPacketIsDeliveredDroppedOrCopied) {
  const uint32_t drop = AddRule("drop prob=0.05");
  const uint32_t duplicate = AddRule("duplicate prob=0.05 dir=rx");
  AddRule("corrupt prob=0.05");
  AddRule("reorder by=3 prob=0.05");
  AddRule("delay us=20 prob=0.05 dir=rx");
  const uint32_t down = AddRule("down every=500 us=10");
  size_t received = 0;
  constexpr size_t kSent = 20000;
  for (uint32_t i = 0; i < kSent; ++i) {
    Send({.dest_qpn = i % 5, .psn = i});
    if (i % 10 == 0) AdvanceUs(1);
    if (i % 50 == 0) received += Receive().size();
  }
  AdvanceUs(10000);
  HandleTimeout();
  received += Receive().size();
  EXPECT_GT(Hits(down), 100u);
  EXPECT_EQ(received, kSent - Hits(drop) - Hits(down) + Hits(duplicate));
  EXPECT_EQ(received, fabric_->counters(1).port_rcv_packets);
}

}  // namespace
}  // namespace verbena::nic
