// SPDX-License-Identifier: Apache-2.0
//
// What fault rules that rewrite and shape packets do to programs, at both ends. Syndromes and who
// answers what: IBTA Vol 1, 9.9.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

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

TEST_F(FaultyWire, AHeldPacketGoesOnWithAStep) {
  PathOptions path;
  path.timeout = 0;  // The requester waits for ever.
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b, path);
  Add("hold opcode=write");
  for (uint64_t wr = 1; wr <= 3; ++wr) {
    ASSERT_EQ(a.PostSend(RdmaWr(wr, IBV_WR_RDMA_WRITE, target_.address(), target_.rkey()),
                         {source_.sge(0, kBytes)}),
              0);
  }
  while (FaultHits().at(0) < 3) std::this_thread::yield();
  EXPECT_THAT(VerbenaHere({"fault", "held"}).output,
              ::testing::ContainsRegex("verbena0 tx .*RC_RDMA_WRITE_ONLY"));
  ibv_wc wc;
  EXPECT_EQ(ibv_poll_cq(a.send_cq(), 1, &wc), 0);
  EXPECT_EQ(VerbenaHere({"fault", "step"}).output, "released 1 packet\n");
  EXPECT_EQ(PollOne(a.send_cq()).wr_id, 1u);
  EXPECT_EQ(ibv_poll_cq(a.send_cq(), 1, &wc), 0);
  EXPECT_EQ(VerbenaHere({"fault", "release"}).output, "released 2 packets\n");
  EXPECT_EQ(PollOne(a.send_cq()).wr_id, 2u);
  EXPECT_EQ(PollOne(a.send_cq()).wr_id, 3u);
  EXPECT_EQ(target_.data()[kBytes - 1], 0x5a);
}

// --- verbena explain names what was done ---

using ::testing::HasSubstr;

class Explained : public FaultyWire {
 protected:
  static std::string Explain() {
    const Finished explained = VerbenaHere({"explain", "last"});
    EXPECT_EQ(explained.status, 0) << explained.output;
    return explained.output;
  }
  std::string Qpn() const { return std::to_string(a_.qp()->qp_num); }
};

TEST_F(Explained, LostRequests) {
  Add("drop opcode=send psn=0");
  EXPECT_EQ(Send(), IBV_WC_RETRY_EXC_ERR);
  const std::string text = Explain();
  EXPECT_THAT(text, HasSubstr("(" + Qpn() + "): RETRY_EXC_ERR"));
  EXPECT_THAT(text, HasSubstr("RC_SEND_ONLY with PSN"));
  EXPECT_THAT(text, HasSubstr("was sent 8 times and never acknowledged"));  // retry_cnt 7
  EXPECT_THAT(text, HasSubstr("('drop opcode=send psn=0') hit 8 packets that this QP sent"));
}

TEST_F(Explained, LostAnswers) {
  Add("drop opcode=ack");
  EXPECT_EQ(Send(), IBV_WC_RETRY_EXC_ERR);
  const std::string text = Explain();
  EXPECT_THAT(text, HasSubstr("('drop opcode=ack') hit 8 packets of the peer"));
  EXPECT_THAT(text, HasSubstr("the peer took it 8 times"));
}

TEST_F(Explained, DamagedPackets) {
  Add("corrupt opcode=send");
  EXPECT_EQ(Send(), IBV_WC_RETRY_EXC_ERR);
  const std::string text = Explain();
  EXPECT_THAT(text, HasSubstr("('corrupt opcode=send') hit 8 packets"));
  EXPECT_THAT(text, HasSubstr("refused 8 packets: the ICRC was wrong"));
}

TEST_F(Explained, APeerThatIsGone) {
  b_.DestroyQp();
  EXPECT_EQ(Write(), IBV_WC_RETRY_EXC_ERR);
  EXPECT_THAT(Explain(), HasSubstr("refused 8 packets: no QP has that number"));
}

TEST_F(Explained, APeerInError) {
  ASSERT_EQ(b_.ToState(IBV_QPS_ERR), 0);
  EXPECT_EQ(Write(), IBV_WC_RETRY_EXC_ERR);
  EXPECT_THAT(Explain(), HasSubstr("refused 8 packets: the QP is not in RTR or RTS"));
}

TEST_F(Explained, ALinkThatIsDown) {
  Add("down dev=verbena1");
  EXPECT_EQ(Write(), IBV_WC_RETRY_EXC_ERR);
  EXPECT_THAT(Explain(), HasSubstr("('down dev=verbena1') hit 8 packets"));
}

TEST_F(Explained, AForgedNak) {
  Add("set aeth.syndrome=0x62 opcode=ack nth=1");
  EXPECT_EQ(Send(), IBV_WC_REM_ACCESS_ERR);
  const std::string text = Explain();
  EXPECT_THAT(text, HasSubstr("NAK, remote access error"));
  EXPECT_THAT(text, HasSubstr("it was forged on the way"));
  EXPECT_THAT(text, HasSubstr("'set aeth.syndrome=0x62 opcode=ack nth=1'"));
}

TEST_F(Explained, ATrueNak) {
  EXPECT_EQ(a_.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, target_.address(), target_.rkey() + 1),
                        {source_.sge(0, kBytes)}),
            0);
  EXPECT_EQ(PollOne(a_.send_cq()).status, IBV_WC_REM_ACCESS_ERR);
  const std::string text = Explain();
  EXPECT_THAT(text, HasSubstr("was answered with NAK, remote access error"));
  EXPECT_THAT(text, HasSubstr("R_Key, address range or rights"));
  EXPECT_EQ(text.find("forged"), std::string::npos) << text;
  EXPECT_EQ(text.find("fault rule"), std::string::npos) << text;
}

TEST_F(Explained, AReceiveThatIsTooShort) {
  ASSERT_EQ(b_.PostRecv(10, {target_.sge(0, 16)}), 0);
  ASSERT_EQ(a_.PostSend(SendWr(1), {source_.sge(0, kBytes)}), 0);
  EXPECT_EQ(PollOne(a_.send_cq()).status, IBV_WC_REM_INV_REQ_ERR);
  const Finished of_a = VerbenaHere({"explain", Qpn()});
  EXPECT_THAT(of_a.output, HasSubstr("longer than the receive"));
  const Finished of_b = VerbenaHere({"explain", std::to_string(b_.qp()->qp_num)});
  EXPECT_THAT(of_b.output, HasSubstr("LOC_LEN_ERR"));
  EXPECT_THAT(of_b.output, HasSubstr("longer than the receive's buffers"));
}

TEST_F(Explained, NoReceive) {
  RcEnd a, b(EndOptions{.device = "verbena1"});
  PathOptions path;
  path.rnr_retry = 2;
  path.min_rnr_timer = 10;  // 0.32 ms
  ConnectPair(a, b, path);
  ASSERT_EQ(a.PostSend(SendWr(1)), 0);
  EXPECT_EQ(PollOne(a.send_cq()).status, IBV_WC_RNR_RETRY_EXC_ERR);
  EXPECT_THAT(Explain(), HasSubstr("the peer had no receive posted: RNR NAK 3 times"));
}

TEST_F(Explained, ADecisionOfTheApplication) {
  ASSERT_EQ(a_.ToState(IBV_QPS_ERR), 0);
  const Finished explained = VerbenaHere({"explain", Qpn()});
  EXPECT_THAT(explained.output, HasSubstr("moved to ERR"));
  EXPECT_THAT(explained.output, HasSubstr("ibv_modify_qp or rdma_disconnect did it"));
}

TEST_F(Explained, NothingOnAQpThatWorks) {
  EXPECT_EQ(Send(), IBV_WC_SUCCESS);
  EXPECT_THAT(VerbenaHere({"explain", Qpn()}).output, HasSubstr("nothing has failed"));
  EXPECT_NE(VerbenaHere({"explain", "0x1000000"}).status, 0);
}

TEST_F(Explained, TheTraceHasEachStepOfASend) {
  EXPECT_EQ(Send(), IBV_WC_SUCCESS);
  ExpectReceived();
  const std::string text = VerbenaHere({"trace", "--qp", Qpn()}).output;
  size_t at = 0;
  for (const char* step :
       {"RESET -> INIT", "INIT -> RTR", "RTR -> RTS", "posted SEND, wr_id 1, 256",
        "RC_SEND_ONLY psn", "RC_ACKNOWLEDGE psn", "completed SEND SUCCESS"}) {
    at = text.find(step, at);
    ASSERT_NE(at, std::string::npos) << step << " is missing or too early in\n" << text;
  }
}

}  // namespace
}  // namespace verbena::testing
