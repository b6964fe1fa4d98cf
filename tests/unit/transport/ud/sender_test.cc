// SPDX-License-Identifier: Apache-2.0
#include "transport/ud/sender.h"

#include <gtest/gtest.h>

#include <vector>

namespace verbena::transport {
namespace {

class UdSenderTest : public ::testing::Test {
 protected:
  UdSenderTest() {
    sender_.Start({.first_psn = Psn(0xffffff), .qkey = Qkey(0x1234), .max_payload_bytes = 1024});
    sge_ = {.address = 0x1000, .length = 100, .key = 7};
  }

  SendRequest Request(uint64_t wr_id) {
    SendRequest request;
    request.wr_id = wr_id;
    request.wqe_index = static_cast<uint32_t>(wr_id);
    request.signaled = true;
    request.ah = 1;
    request.remote_qpn = 0x55;
    request.remote_qkey = 0x77;
    request.sges = {&sge_, 1};
    return request;
  }
  std::vector<std::pair<uint64_t, WcStatus>> Completions() {
    std::vector<std::pair<uint64_t, WcStatus>> all;
    for (Completion c; sender_.PollCompletion(&c);) {
      EXPECT_TRUE(c.is_send);
      all.emplace_back(c.wr_id, c.status);
    }
    return all;
  }
  using Statuses = std::vector<std::pair<uint64_t, WcStatus>>;

  UdSender sender_;
  MemorySegment sge_;
  TxPacket packet_;
};

TEST_F(UdSenderTest, OneWrIsOnePacketWithThePsnOfItsTurn) {
  ASSERT_TRUE(sender_.Send(Request(1), true, &packet_));
  EXPECT_EQ(packet_.opcode, Opcode::kUdSendOnly);
  EXPECT_EQ(packet_.psn, Psn(0xffffff));
  EXPECT_EQ(packet_.dest_qpn, Qpn(0x55));
  EXPECT_EQ(packet_.qkey, Qkey(0x77));
  EXPECT_EQ(packet_.payload_bytes, 100u);
  EXPECT_EQ(packet_.segment_count, 1u);
  SendRequest with_imm = Request(2);
  with_imm.opcode = WrOpcode::kSendImm;
  with_imm.imm_or_inv = 0x01020304;
  with_imm.solicited = true;
  ASSERT_TRUE(sender_.Send(with_imm, true, &packet_));
  EXPECT_EQ(packet_.opcode, Opcode::kUdSendOnlyImm);
  EXPECT_EQ(packet_.psn, Psn(0));
  EXPECT_EQ(packet_.imm_or_inv, 0x01020304u);
  EXPECT_TRUE(packet_.solicited);
}

TEST_F(UdSenderTest, QkeyWithTheTopBitMeansTheQpsOwn) {
  SendRequest request = Request(1);
  request.remote_qkey = 0x80000001;
  ASSERT_TRUE(sender_.Send(request, true, &packet_));
  EXPECT_EQ(packet_.qkey, Qkey(0x1234));
}

TEST_F(UdSenderTest, CompletesWhenThePayloadWasReadAndNotBefore) {
  ASSERT_TRUE(sender_.Send(Request(1), true, &packet_));
  ASSERT_TRUE(sender_.Send(Request(2), true, &packet_));
  EXPECT_EQ(Completions(), Statuses());
  EXPECT_FALSE(sender_.drained());
  sender_.HandleFetched(Psn(0xffffff));
  EXPECT_EQ(Completions(), (Statuses{{1, WcStatus::kSuccess}}));
  sender_.HandleFetched(Psn(0));
  EXPECT_EQ(Completions(), (Statuses{{2, WcStatus::kSuccess}}));
  EXPECT_TRUE(sender_.drained());
}

TEST_F(UdSenderTest, UnsignaledWrCompletesSilently) {
  SendRequest request = Request(1);
  request.signaled = false;
  ASSERT_TRUE(sender_.Send(request, true, &packet_));
  sender_.HandleFetched(packet_.psn);
  EXPECT_EQ(Completions(), Statuses());
  EXPECT_TRUE(sender_.drained());
}

TEST_F(UdSenderTest, MessageOfTheMtuGoesOneByteMoreFails) {
  sge_.length = 1024;
  EXPECT_TRUE(sender_.Send(Request(1), true, &packet_));
  sender_.HandleFetched(packet_.psn);
  sge_.length = 1025;
  EXPECT_FALSE(sender_.Send(Request(2), true, &packet_));
  EXPECT_TRUE(sender_.failed());
  EXPECT_EQ(Completions(), (Statuses{{1, WcStatus::kSuccess}, {2, WcStatus::kLocLenErr}}));
}

TEST_F(UdSenderTest, BadHandleOrOpcodeFailsAndWhatFollowsIsFlushedInOrder) {
  ASSERT_TRUE(sender_.Send(Request(1), true, &packet_));
  EXPECT_FALSE(sender_.Send(Request(2), false, &packet_));
  EXPECT_FALSE(sender_.Send(Request(3), true, &packet_));
  // The first is still on its way.
  EXPECT_EQ(Completions(), Statuses());
  sender_.HandleFetched(Psn(0xffffff));
  EXPECT_EQ(
      Completions(),
      (Statuses{{1, WcStatus::kSuccess}, {2, WcStatus::kLocQpOpErr}, {3, WcStatus::kWrFlushErr}}));
  sender_.Resume();
  SendRequest read = Request(4);
  read.opcode = WrOpcode::kRdmaRead;
  EXPECT_FALSE(sender_.Send(read, true, &packet_));
  EXPECT_EQ(Completions(), (Statuses{{4, WcStatus::kLocQpOpErr}}));
}

TEST_F(UdSenderTest, ResumedSenderGoesOnWithTheNextPsn) {
  EXPECT_FALSE(sender_.Send(Request(1), false, &packet_));
  sender_.Resume();
  ASSERT_TRUE(sender_.Send(Request(2), true, &packet_));
  EXPECT_EQ(packet_.psn, Psn(0xffffff));
}

TEST_F(UdSenderTest, UnreadablePayloadFailsItsWrAndFlushesThoseBehind) {
  ASSERT_TRUE(sender_.Send(Request(1), true, &packet_));
  ASSERT_TRUE(sender_.Send(Request(2), true, &packet_));
  const Psn second = packet_.psn;
  ASSERT_TRUE(sender_.Send(Request(3), true, &packet_));
  sender_.HandleFetchFailed(second);
  sender_.HandleFetched(Psn(0xffffff));
  EXPECT_EQ(
      Completions(),
      (Statuses{{1, WcStatus::kSuccess}, {2, WcStatus::kLocProtErr}, {3, WcStatus::kWrFlushErr}}));
}

TEST_F(UdSenderTest, FlushedWrsCompleteEvenUnsignaled) {
  sender_.Flush();
  SendRequest request = Request(1);
  request.signaled = false;
  EXPECT_FALSE(sender_.Send(request, true, &packet_));
  EXPECT_EQ(Completions(), (Statuses{{1, WcStatus::kWrFlushErr}}));
}

TEST_F(UdSenderTest, FullWindowTakesNoMore) {
  for (uint32_t i = 0; i < UdSender::kWindow; ++i) {
    ASSERT_TRUE(sender_.CanSend());
    ASSERT_TRUE(sender_.Send(Request(i), true, &packet_));
  }
  EXPECT_FALSE(sender_.CanSend());
  sender_.HandleFetched(Psn(0xffffff));
  EXPECT_EQ(Completions().size(), 1u);
  EXPECT_TRUE(sender_.CanSend());
}

}  // namespace
}  // namespace verbena::transport
