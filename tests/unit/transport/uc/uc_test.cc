// SPDX-License-Identifier: Apache-2.0
//
// IBTA Vol 1 §9.8.2: nothing is answered; what is wrong loses the message and
// nothing else.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "tests/unit/transport/uc/uc_pair.h"

namespace verbena::transport {
namespace {

using testing::kUcBase;
using testing::kUcReceiveKey;
using testing::kUcSourceKey;
using testing::kUcTargetKey;
using testing::UcPair;
using Verdict = UcResponder::Verdict;

class UcTest : public ::testing::Test {
 protected:
  void FillSource(uint8_t first) {
    auto bytes = pair_.memory.Bytes(kUcSourceKey);
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>(first + i * 7 + i / 251);
    }
  }
  bool Same(uint32_t key, size_t bytes, uint64_t to = 0, uint64_t from = 0) {
    const auto a = pair_.memory.At(key, kUcBase + to, bytes);
    const auto b = pair_.memory.At(kUcSourceKey, kUcBase + from, bytes);
    return std::equal(a.begin(), a.end(), b.begin());
  }
  void DeliverAll(const std::vector<testing::Frame>& frames) {
    for (const auto& frame : frames) EXPECT_EQ(pair_.Deliver(frame), Verdict::kAccepted);
  }

  void PostInvalidate(uint64_t wr_id, uint32_t key) {
    SendRequest request;
    request.wr_id = wr_id;
    request.opcode = WrOpcode::kLocalInv;
    request.signaled = true;
    request.imm_or_inv = key;
    pair_.requester.Post(request);
  }

  UcPair pair_;
};

TEST_F(UcTest, AMessageIsCutByThePathMtuAndCompletesWhenItsPayloadIsRead) {
  FillSource(1);
  pair_.Post(5, WrOpcode::kSendImm, 600);
  const auto frames = pair_.TransmitAll();
  ASSERT_EQ(frames.size(), 3u);
  EXPECT_EQ(testing::ViewOf(frames[0]).opcode(), Opcode::kUcSendFirst);
  EXPECT_EQ(testing::ViewOf(frames[1]).opcode(), Opcode::kUcSendMiddle);
  EXPECT_EQ(testing::ViewOf(frames[2]).opcode(), Opcode::kUcSendLastImm);
  EXPECT_EQ(testing::ViewOf(frames[0]).psn(), Psn(0xfffffe));
  EXPECT_EQ(testing::ViewOf(frames[2]).psn(), Psn(0));
  EXPECT_FALSE(testing::ViewOf(frames[0]).bth().solicited);
  EXPECT_TRUE(testing::ViewOf(frames[2]).bth().solicited);
  EXPECT_FALSE(testing::ViewOf(frames[2]).bth().ack_req);
  const auto sent = pair_.Sent();
  ASSERT_TRUE(sent.has_value());
  EXPECT_EQ(sent->wr_id, 5u);
  EXPECT_EQ(sent->status, WcStatus::kSuccess);
  EXPECT_TRUE(pair_.requester.drained());

  pair_.Receive(9, 600, 32);
  DeliverAll(frames);
  const auto received = pair_.Received();
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->wr_id, 9u);
  EXPECT_EQ(received->byte_len, 600u);
  EXPECT_EQ(received->opcode, WcOpcode::kRecv);
  EXPECT_TRUE(received->has_imm);
  EXPECT_EQ(received->imm_or_inv, 0x05050505u);
  EXPECT_TRUE(Same(kUcReceiveKey, 600, 32));
}

TEST_F(UcTest, WritesGoWhereTheySayAndTakeAReceiveOnlyWithImmediate) {
  FillSource(2);
  pair_.Post(1, WrOpcode::kRdmaWrite, 513, 0, 100);
  auto frames = pair_.TransmitAll();
  ASSERT_EQ(frames.size(), 3u);
  EXPECT_EQ(testing::ViewOf(frames[0]).opcode(), Opcode::kUcWriteFirst);
  EXPECT_EQ(testing::ViewOf(frames[2]).opcode(), Opcode::kUcWriteLast);
  DeliverAll(frames);
  EXPECT_TRUE(Same(kUcTargetKey, 513, 100));
  EXPECT_FALSE(pair_.Received().has_value());
  pair_.Receive(3, 0);
  pair_.Post(2, WrOpcode::kRdmaWriteImm, 0);
  frames = pair_.TransmitAll();
  ASSERT_EQ(frames.size(), 1u);
  EXPECT_EQ(testing::ViewOf(frames[0]).opcode(), Opcode::kUcWriteOnlyImm);
  DeliverAll(frames);
  const auto received = pair_.Received();
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->opcode, WcOpcode::kRecvRdmaWithImm);
}

TEST_F(UcTest, OpcodesThatUcDoesNotHaveCompleteWithAnErrorAndFlushTheRestUntilResumed) {
  pair_.Post(1, WrOpcode::kSend, 10);
  ASSERT_EQ(pair_.TransmitAll().size(), 1u);
  pair_.Post(2, WrOpcode::kRdmaRead, 10);
  EXPECT_TRUE(pair_.requester.failed());
  pair_.Post(3, WrOpcode::kSend, 10);
  EXPECT_TRUE(pair_.TransmitAll().empty());
  EXPECT_EQ(pair_.Sent()->status, WcStatus::kSuccess);
  EXPECT_EQ(pair_.Sent()->status, WcStatus::kLocQpOpErr);
  EXPECT_EQ(pair_.Sent()->status, WcStatus::kWrFlushErr);
  pair_.requester.Resume();
  pair_.Post(4, WrOpcode::kSend, 10);
  const auto frames = pair_.TransmitAll();
  ASSERT_EQ(frames.size(), 1u);
  EXPECT_EQ(testing::ViewOf(frames[0]).psn(), Psn(0xffffff));
}

TEST_F(UcTest, PayloadThatCannotBeReadFailsItsMessageOnly) {
  FillSource(3);
  pair_.Receive(1, 600);
  pair_.memory.Unmap(kUcSourceKey);
  pair_.Post(1, WrOpcode::kSend, 600);
  EXPECT_FALSE(pair_.Transmit().has_value());
  EXPECT_EQ(pair_.Sent()->status, WcStatus::kLocProtErr);
  EXPECT_TRUE(pair_.requester.failed());
}

TEST_F(UcTest, AWrongWrBehindAMessageThatCannotBeReadIsFlushed) {
  pair_.Post(1, WrOpcode::kSend, 10);
  TxPacket packet;
  ASSERT_TRUE(pair_.requester.PollTransmit(&packet));
  pair_.Post(2, WrOpcode::kRdmaRead, 10);
  EXPECT_FALSE(pair_.Sent().has_value());
  pair_.requester.HandleFetchFailed(packet.psn);
  EXPECT_EQ(pair_.Sent()->status, WcStatus::kLocProtErr);
  EXPECT_EQ(pair_.Sent()->status, WcStatus::kWrFlushErr);
}

TEST_F(UcTest, ALostPacketLosesItsMessageAndTheReceiveServesTheNext) {
  FillSource(4);
  pair_.Receive(1, 700);
  pair_.Receive(2, 700, 1000);
  for (size_t lost = 0; lost < 3; ++lost) {
    pair_.Post(1, WrOpcode::kSend, 700);
    const auto frames = pair_.TransmitAll();
    ASSERT_EQ(frames.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      if (i != lost) pair_.Deliver(frames[i]);
    }
    EXPECT_FALSE(pair_.Received().has_value()) << lost;
    EXPECT_FALSE(pair_.responder.failed());
  }
  pair_.Post(2, WrOpcode::kSend, 300, 2000);
  for (const auto& frame : pair_.TransmitAll()) pair_.Deliver(frame);
  const auto received = pair_.Received();
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->wr_id, 1u);
  EXPECT_EQ(received->byte_len, 300u);
  EXPECT_TRUE(Same(kUcReceiveKey, 300, 0, 2000));
}

TEST_F(UcTest, PacketsInAnotherOrderLoseTheMessageAndNothingAfterIt) {
  pair_.Receive(1, 700);
  pair_.Post(1, WrOpcode::kSend, 700);
  const auto frames = pair_.TransmitAll();
  EXPECT_EQ(pair_.Deliver(frames[0]), Verdict::kAccepted);
  EXPECT_EQ(pair_.Deliver(frames[2]), Verdict::kLostMessage);
  EXPECT_EQ(pair_.Deliver(frames[1]), Verdict::kLostMessage);
  pair_.Post(2, WrOpcode::kSend, 1);
  EXPECT_EQ(pair_.Deliver(pair_.TransmitAll()[0]), Verdict::kAccepted);
  EXPECT_EQ(pair_.Received()->byte_len, 1u);
}

TEST_F(UcTest, WithoutAReceiveAMessageIsLostAndTheNextIsTaken) {
  pair_.Post(1, WrOpcode::kSend, 300);
  for (const auto& frame : pair_.TransmitAll()) EXPECT_NE(pair_.Deliver(frame), Verdict::kAccepted);
  pair_.Receive(1, 10);
  pair_.Post(2, WrOpcode::kSend, 10);
  DeliverAll(pair_.TransmitAll());
  EXPECT_EQ(pair_.Received()->wr_id, 1u);
}

TEST_F(UcTest, AMessageLongerThanTheReceiveIsLostAndTheReceiveStays) {
  pair_.Receive(1, 299);
  pair_.Post(1, WrOpcode::kSend, 300);
  auto frames = pair_.TransmitAll();
  EXPECT_EQ(pair_.Deliver(frames[0]), Verdict::kAccepted);
  EXPECT_EQ(pair_.Deliver(frames[1]), Verdict::kReceiveTooSmall);
  pair_.Post(2, WrOpcode::kSend, 299);
  DeliverAll(pair_.TransmitAll());
  EXPECT_EQ(pair_.Received()->wr_id, 1u);
  EXPECT_FALSE(pair_.responder.failed());
}

TEST_F(UcTest, WritesWithoutRightOrKeyAreLost) {
  struct Case {
    const char* what;
    std::function<void(UcPair&)> spoil;
  };
  const Case cases[] = {
      {"QP flags", [](UcPair& p) { p.responder.set_access_flags(0); }},
      {"key gone", [](UcPair& p) { p.memory.RemoveRegion(kUcTargetKey); }},
      {"other PD", [](UcPair& p) { p.memory.MoveToOtherPd(kUcTargetKey); }},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.what);
    UcPair pair;
    one.spoil(pair);
    pair.Post(1, WrOpcode::kRdmaWrite, 300);
    const auto frames = pair.TransmitAll();
    EXPECT_EQ(pair.Deliver(frames[0]), Verdict::kAccess);
    EXPECT_EQ(pair.Deliver(frames[1]), Verdict::kLostMessage);
    EXPECT_FALSE(pair.responder.failed());
    pair.Receive(4, 1);
    pair.Post(2, WrOpcode::kSend, 1);
    EXPECT_EQ(pair.Deliver(pair.TransmitAll()[0]), Verdict::kAccepted);
  }
}

TEST_F(UcTest, ABadReceiveBufferEndsTheConnection) {
  pair_.receives.Post(1, {{.address = kUcBase, .length = 100, .key = 0x999}});
  pair_.receives.Post(2, {});
  pair_.Post(1, WrOpcode::kSend, 100);
  EXPECT_EQ(pair_.Deliver(pair_.TransmitAll()[0]), Verdict::kAccess);
  EXPECT_TRUE(pair_.responder.failed());
  pair_.responder.Flush();
  EXPECT_EQ(pair_.Received()->status, WcStatus::kLocProtErr);
  EXPECT_EQ(pair_.Received()->status, WcStatus::kWrFlushErr);
  EXPECT_FALSE(pair_.Received().has_value());
  EXPECT_TRUE(pair_.responder.flushed());
}

TEST_F(UcTest, ACompletionWaitsForItsPlacementAndALateFaultEndsTheConnection) {
  pair_.deferred = true;
  pair_.memory.set_deferred(true);
  pair_.Receive(1, 100);
  pair_.Receive(2, 100);
  for (uint64_t i = 1; i <= 2; ++i) {
    pair_.Post(i, WrOpcode::kSend, 100);
    pair_.Deliver(pair_.TransmitAll()[0]);
  }
  EXPECT_FALSE(pair_.Received().has_value());
  pair_.Commit();
  EXPECT_EQ(pair_.Received()->wr_id, 1u);
  EXPECT_FALSE(pair_.Received().has_value());
  pair_.Commit(/*fail=*/true);
  EXPECT_TRUE(pair_.responder.failed());
  const auto second = pair_.Received();
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->status, WcStatus::kLocProtErr);
}

// IBTA Vol 1 §10.7.3.2: only the receive whose buffer it was fails itself.
TEST_F(UcTest, ALateFaultUnderAWriteFlushesTheReceivesBehindIt) {
  for (const WrOpcode write : {WrOpcode::kRdmaWrite, WrOpcode::kRdmaWriteImm}) {
    UcPair pair;
    pair.deferred = true;
    pair.memory.set_deferred(true);
    pair.Receive(1, 100);
    pair.Receive(2, 100);
    pair.Post(1, write, 100);
    pair.Deliver(pair.TransmitAll()[0]);
    pair.Post(2, WrOpcode::kSend, 100);
    pair.Deliver(pair.TransmitAll()[0]);
    AsyncEventType event;
    ASSERT_TRUE(pair.responder.PollEvent(&event));
    EXPECT_EQ(event, AsyncEventType::kCommEst);
    pair.Commit(/*fail=*/true);
    EXPECT_TRUE(pair.responder.failed());
    ASSERT_TRUE(pair.responder.PollEvent(&event));
    EXPECT_EQ(event, AsyncEventType::kQpAccessErr);
    pair.responder.Flush();
    for (const uint64_t wr_id : {1u, 2u}) {
      const auto received = pair.Received();
      ASSERT_TRUE(received.has_value());
      EXPECT_EQ(received->wr_id, wr_id);
      EXPECT_EQ(received->status, WcStatus::kWrFlushErr);
    }
  }
}

TEST_F(UcTest, ALateFaultBehindABadReceiveFailsOneReceiveOnly) {
  pair_.deferred = true;
  pair_.memory.set_deferred(true);
  pair_.Receive(1, 100);
  pair_.receives.Post(2, {{.address = kUcBase, .length = 100, .key = 0x999}});
  for (uint64_t i = 1; i <= 2; ++i) {
    pair_.Post(i, WrOpcode::kSend, 100);
    pair_.Deliver(pair_.TransmitAll()[0]);
  }
  pair_.Commit(/*fail=*/true);
  EXPECT_EQ(pair_.Received()->status, WcStatus::kLocProtErr);
  EXPECT_EQ(pair_.Received()->status, WcStatus::kWrFlushErr);
}

TEST_F(UcTest, TheFirstPacketTellsThatThePeerIsThere) {
  AsyncEventType event;
  EXPECT_FALSE(pair_.responder.PollEvent(&event));
  pair_.Post(1, WrOpcode::kSend, 1);
  pair_.Deliver(pair_.TransmitAll()[0]);
  ASSERT_TRUE(pair_.responder.PollEvent(&event));
  EXPECT_EQ(event, AsyncEventType::kCommEst);
  EXPECT_FALSE(pair_.responder.PollEvent(&event));
}

TEST_F(UcTest, FlushCompletesWhatIsPostedAndTheReceiveThatWasTaken) {
  pair_.Receive(1, 700);
  pair_.Receive(2, 700);
  pair_.Post(1, WrOpcode::kSend, 700);
  pair_.Deliver(*pair_.Transmit());
  pair_.requester.Flush();
  pair_.responder.Flush();
  EXPECT_EQ(pair_.Sent()->status, WcStatus::kWrFlushErr);
  EXPECT_EQ(pair_.Received()->wr_id, 1u);
  EXPECT_EQ(pair_.Received()->wr_id, 2u);
  EXPECT_FALSE(pair_.Received().has_value());
}

// IBTA Vol 1 §10.8.3.4, ordering of local operations.
TEST_F(UcTest, ALocalOperationNeedsNoPacketAndTakesEffectAfterWhatIsBeforeIt) {
  constexpr uint32_t kWindow = 77;
  pair_.memory.AddRegion(kWindow, kUcBase, 64);
  pair_.memory.AllowInvalidate(kWindow);
  pair_.Post(1, WrOpcode::kSend, 10);
  TxPacket packet;
  ASSERT_TRUE(pair_.requester.PollTransmit(&packet));
  PostInvalidate(2, kWindow);
  EXPECT_FALSE(pair_.requester.CanPost());
  EXPECT_FALSE(pair_.requester.PollTransmit(&packet));
  EXPECT_FALSE(pair_.Sent().has_value());
  pair_.requester.HandleFetched(packet.psn);
  EXPECT_EQ(pair_.Sent()->wr_id, 1u);
  const auto done = pair_.Sent();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->status, WcStatus::kSuccess);
  EXPECT_EQ(done->opcode, WcOpcode::kLocalInv);
  EXPECT_TRUE(pair_.requester.CanPost());

  PostInvalidate(3, kWindow);  // it is gone
  const auto failed = pair_.Sent();
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->status, WcStatus::kLocQpOpErr);
  EXPECT_TRUE(pair_.requester.failed());
  EXPECT_EQ(pair_.requester.next_psn(), packet.psn.Next());
}

TEST_F(UcTest, ALocalOperationBehindAMessageThatCannotBeReadIsFlushed) {
  constexpr uint32_t kWindow = 77;
  pair_.memory.AddRegion(kWindow, kUcBase, 64);
  pair_.memory.AllowInvalidate(kWindow);
  pair_.Post(1, WrOpcode::kSend, 10);
  TxPacket packet;
  ASSERT_TRUE(pair_.requester.PollTransmit(&packet));
  PostInvalidate(2, kWindow);
  pair_.requester.HandleFetchFailed(packet.psn);
  EXPECT_EQ(pair_.Sent()->status, WcStatus::kLocProtErr);
  EXPECT_EQ(pair_.Sent()->status, WcStatus::kWrFlushErr);
  EXPECT_EQ(pair_.memory.Invalidate(kWindow), MemoryStatus::kOk);  // nobody did
}

}  // namespace
}  // namespace verbena::transport
