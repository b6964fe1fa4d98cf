// SPDX-License-Identifier: Apache-2.0
//
// What fault rules that rewrite and shape packets do to programs, at both ends. Syndromes and who
// answers what: IBTA Vol 1, 9.9.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

constexpr size_t kBytes = 256;

class FaultyWire : public ::testing::Test {
 protected:
  FaultyWire()
      : a_(),
        b_(EndOptions{.device = "verbena1"}),
        source_(a_.pd(), kBytes),
        target_(b_.pd(), kBytes) {
    memset(source_.data(), 0x5a, kBytes);
    PathOptions path;
    path.timeout = 12;  // 16.8 ms
    ConnectPair(a_, b_, path);
  }
  void TearDown() override { EXPECT_EQ(VerbenaHere({"fault", "clear"}).status, 0); }

  void Add(const std::string& rule) {
    const Finished added = VerbenaHere({"fault", "add", rule});
    ASSERT_EQ(added.status, 0) << rule << ": " << added.output;
  }
  ibv_wc_status Send() {
    EXPECT_EQ(b_.PostRecv(10, {target_.sge(0, kBytes)}), 0);
    EXPECT_EQ(a_.PostSend(SendWr(1), {source_.sge(0, kBytes)}), 0);
    return PollOne(a_.send_cq()).status;
  }
  ibv_wc_status Write() {
    EXPECT_EQ(a_.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, target_.address(), target_.rkey()),
                          {source_.sge(0, kBytes)}),
              0);
    return PollOne(a_.send_cq()).status;
  }
  void ExpectReceived() {
    const ibv_wc wc = PollOne(b_.recv_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    EXPECT_EQ(wc.byte_len, kBytes);
  }

  RcEnd a_, b_;
  Memory source_, target_;
};

TEST_F(FaultyWire, ForgedNaksAreWhatTheRequesterSees) {
  Add("set aeth.syndrome=0x62 opcode=ack nth=1");  // NAK, remote access error
  EXPECT_EQ(Send(), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(a_.State(), IBV_QPS_ERR);
  ExpectReceived();  // The responder did its work and knows nothing.
  EXPECT_EQ(b_.State(), IBV_QPS_RTS);
}

TEST_F(FaultyWire, AKeyRewrittenOnTheWireDrawsATrueNak) {
  Add("set reth.rkey=+1 opcode=write nth=1");
  EXPECT_EQ(Write(), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(b_.State(), IBV_QPS_ERR);
  EXPECT_EQ(target_.data()[0], 0);
}

TEST_F(FaultyWire, APsnFromTheFutureIsRepeatedWithoutATrace) {
  Add("set bth.psn=+5 opcode=send nth=1");
  EXPECT_EQ(Send(), IBV_WC_SUCCESS);
  ExpectReceived();
  EXPECT_EQ(FaultHits().at(0), 1);
}

TEST_F(FaultyWire, TruncatedPacketsAreRepeatedAfterTheTimeout) {
  Add("truncate bytes=8 opcode=send count=2");
  EXPECT_EQ(Send(), IBV_WC_SUCCESS);
  ExpectReceived();
  EXPECT_EQ(FaultHits().at(0), 2);
}

TEST_F(FaultyWire, DamageWithARightIcrcArrives) {
  // BTH 12 bytes, then the payload.
  Add("corrupt at=112 xor=0xff icrc=right opcode=send nth=1");
  EXPECT_EQ(Send(), IBV_WC_SUCCESS);
  ExpectReceived();
  for (size_t i = 0; i < kBytes; ++i) {
    EXPECT_EQ(target_.data()[i], i == 100 ? 0xa5 : 0x5a) << i;
  }
}

TEST_F(FaultyWire, ALostRetransmissionIsSentOnceMore) {
  Add("drop opcode=send transmission=1");
  Add("drop opcode=send transmission=2");
  EXPECT_EQ(Send(), IBV_WC_SUCCESS);
  ExpectReceived();
  EXPECT_EQ(FaultHits(), (std::vector<int64_t>{1, 1}));
}

TEST_F(FaultyWire, ARateIsALowerBoundOfTheTime) {
  Add("rate mbps=8 dev=verbena0 dir=tx");  // a byte in a microsecond
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) ASSERT_EQ(Write(), IBV_WC_SUCCESS);
  const auto took = std::chrono::steady_clock::now() - start;
  // Ethernet, IP, UDP, BTH, RETH, payload, ICRC; each waits for the one before.
  EXPECT_GE(took, std::chrono::microseconds(20 * (14 + 20 + 8 + 12 + 16 + kBytes + 4)));
}

}  // namespace
}  // namespace verbena::testing
