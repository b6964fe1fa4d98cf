// SPDX-License-Identifier: Apache-2.0
#include "transport/ud/receiver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "tests/testing/fake_memory.h"
#include "tests/testing/frames.h"
#include "tests/testing/rc_pair.h"

namespace verbena::transport {
namespace {

using testing::ByteVector;
using testing::CountingBytes;
using Verdict = UdReceiver::Verdict;

constexpr uint32_t kKey = 9;
constexpr uint64_t kAddress = 0x10000;
constexpr Qkey kQkey{0x11111111};

class UdReceiverTest : public ::testing::Test {
 protected:
  UdReceiverTest() {
    memory_.AddRegion(kKey, kAddress, 8192);
    receiver_.Start(kQkey);
  }

  static ByteVector Frame(const PacketAddress& address, std::span<const std::byte> payload,
                          Qkey qkey = kQkey, bool imm = false) {
    TransportHeaders headers;
    headers.bth.opcode = imm ? Opcode::kUdSendOnlyImm : Opcode::kUdSendOnly;
    headers.bth.solicited = imm;
    headers.deth = {.qkey = qkey, .source_qpn = Qpn(0xabcdef)};
    headers.imm = {.value = 0x0a0b0c0d};
    return testing::BuildFrame(address, headers, payload);
  }
  Verdict Receive(const ByteVector& frame) {
    const auto view = PacketView::Parse(frame);
    EXPECT_TRUE(view.ok());
    const Verdict verdict = receiver_.HandlePacket(view.value());
    while (!deferred_ && memory_.HasPending()) Commit();
    return verdict;
  }
  void Commit() { receiver_.HandleCommitted(memory_.CommitNext().ticket); }
  void Post(uint64_t wr_id, uint32_t bytes, uint64_t offset = 0) {
    queue_.Post(wr_id, {{.address = kAddress + offset, .length = bytes, .key = kKey}});
  }
  std::optional<Completion> Poll() {
    Completion completion;
    if (!receiver_.PollCompletion(&completion)) return std::nullopt;
    return completion;
  }

  testing::FakeMemory memory_;
  testing::FakeReceiveQueue queue_;
  UdReceiver receiver_{memory_, queue_};
  bool deferred_ = false;
};

TEST_F(UdReceiverTest, Ipv4HeaderLiesAtBytes20To39AndThePayloadBehind) {
  Post(1, 200);
  const ByteVector payload = CountingBytes(100);
  const ByteVector frame = Frame(testing::Ipv4Address(), payload);
  EXPECT_EQ(Receive(frame), Verdict::kAccepted);
  const auto completion = Poll();
  ASSERT_TRUE(completion);
  EXPECT_EQ(completion->status, WcStatus::kSuccess);
  EXPECT_EQ(completion->opcode, WcOpcode::kRecv);
  EXPECT_FALSE(completion->is_send);
  EXPECT_EQ(completion->byte_len, 140u);
  EXPECT_EQ(completion->src_qpn, Qpn(0xabcdef));
  EXPECT_EQ(completion->network_header, NetworkHeader::kIpv4);
  const auto got = memory_.At(kKey, kAddress, 140);
  EXPECT_TRUE(std::all_of(got.begin(), got.begin() + 20, [](auto b) { return b == std::byte{}; }));
  EXPECT_EQ(std::memcmp(&got[20], &frame[14], 20), 0);
  EXPECT_EQ(std::memcmp(&got[40], payload.data(), 100), 0);
}

TEST_F(UdReceiverTest, Ipv6HeaderFillsThe40Bytes) {
  Post(1, 41);
  const ByteVector frame = Frame(testing::Ipv6Address(), CountingBytes(1));
  EXPECT_EQ(Receive(frame), Verdict::kAccepted);
  const auto completion = Poll();
  ASSERT_TRUE(completion);
  EXPECT_EQ(completion->network_header, NetworkHeader::kIpv6);
  EXPECT_EQ(std::memcmp(memory_.At(kKey, kAddress, 40).data(), &frame[14], 40), 0);
}

TEST_F(UdReceiverTest, ImmediateAndSolicitedReachTheCompletion) {
  Post(1, 100);
  EXPECT_EQ(Receive(Frame(testing::Ipv4Address(), {}, kQkey, true)), Verdict::kAccepted);
  const auto completion = Poll();
  ASSERT_TRUE(completion);
  EXPECT_TRUE(completion->has_imm);
  EXPECT_TRUE(completion->solicited);
  const uint8_t wire[4] = {0x0a, 0x0b, 0x0c, 0x0d};
  EXPECT_EQ(std::memcmp(&completion->imm_or_inv, wire, 4), 0);
  EXPECT_EQ(completion->byte_len, 40u);
}

TEST_F(UdReceiverTest, WrongQkeyConsumesNothing) {
  Post(1, 100);
  EXPECT_EQ(Receive(Frame(testing::Ipv4Address(), {}, Qkey(1))), Verdict::kWrongQkey);
  EXPECT_FALSE(Poll());
  EXPECT_EQ(queue_.posted(), 1u);
}

TEST_F(UdReceiverTest, OtherTransportIsRefused) {
  Post(1, 100);
  EXPECT_EQ(Receive(testing::BuildFrame(testing::Ipv4Address(), Opcode::kRcSendOnly)),
            Verdict::kNotUd);
  EXPECT_EQ(queue_.posted(), 1u);
}

TEST_F(UdReceiverTest, MessageLongerThanTheReceiveLeavesItPosted) {
  Post(1, 139);
  EXPECT_EQ(Receive(Frame(testing::Ipv4Address(), CountingBytes(100))), Verdict::kTooLong);
  EXPECT_FALSE(Poll());
  EXPECT_FALSE(receiver_.failed());
  EXPECT_EQ(Receive(Frame(testing::Ipv4Address(), CountingBytes(99))), Verdict::kAccepted);
  EXPECT_EQ(Poll()->wr_id, 1u);
}

TEST_F(UdReceiverTest, WithoutReceiveItIsDropped) {
  EXPECT_EQ(Receive(Frame(testing::Ipv4Address(), {})), Verdict::kNoReceive);
}

TEST_F(UdReceiverTest, PiecesOfAnySizeAreFilledInOrder) {
  const ByteVector payload = CountingBytes(77);
  const ByteVector frame = Frame(testing::Ipv4Address(), payload);
  std::vector<MemorySegment> sges;
  ByteVector expected(20);
  expected.insert(expected.end(), frame.begin() + 14, frame.begin() + 34);
  expected.insert(expected.end(), payload.begin(), payload.end());
  uint64_t address = kAddress;
  for (const uint32_t length : {0u, 3u, 30u, 0u, 20u, 64u}) {
    sges.push_back({.address = address, .length = length, .key = kKey});
    address += length + 5;
  }
  queue_.Post(1, sges);
  ASSERT_EQ(Receive(frame), Verdict::kAccepted);
  ASSERT_TRUE(Poll());
  ByteVector got;
  for (const MemorySegment& sge : sges) {
    const auto part = memory_.At(kKey, sge.address, sge.length);
    got.insert(got.end(), part.begin(), part.end());
  }
  EXPECT_EQ(got, expected);
}

TEST_F(UdReceiverTest, CompletionWaitsForItsPlacements) {
  deferred_ = true;
  memory_.set_deferred(true);
  Post(1, 200);
  const ByteVector frame = Frame(testing::Ipv4Address(), CountingBytes(50));
  EXPECT_EQ(Receive(frame), Verdict::kAccepted);
  while (memory_.pending() > 1) Commit();
  EXPECT_FALSE(Poll());
  Commit();
  EXPECT_TRUE(Poll());
}

TEST_F(UdReceiverTest, BadKeyFailsTheReceiveAndTheQp) {
  queue_.Post(1, {{.address = kAddress, .length = 100, .key = kKey + 1}});
  Post(2, 100);
  EXPECT_EQ(Receive(Frame(testing::Ipv4Address(), {})), Verdict::kAccepted);
  EXPECT_EQ(Poll()->status, WcStatus::kLocProtErr);
  EXPECT_TRUE(receiver_.failed());
  EXPECT_EQ(Receive(Frame(testing::Ipv4Address(), {})), Verdict::kNoReceive);
  receiver_.Flush();
  const auto flushed = Poll();
  ASSERT_TRUE(flushed);
  EXPECT_EQ(flushed->wr_id, 2u);
  EXPECT_EQ(flushed->status, WcStatus::kWrFlushErr);
  EXPECT_FALSE(Poll());
}

TEST_F(UdReceiverTest, MalformedReceiveFailsWhenItsTurnComes) {
  queue_.Post(1, {}, /*malformed=*/true);
  EXPECT_EQ(Receive(Frame(testing::Ipv4Address(), {})), Verdict::kAccepted);
  EXPECT_EQ(Poll()->status, WcStatus::kLocProtErr);
}

TEST_F(UdReceiverTest, LatePlacementFailureFailsThatReceiveAndVoidsTheLaterOnes) {
  deferred_ = true;
  memory_.set_deferred(true);
  Post(1, 100);
  Post(2, 100, 100);
  Post(3, 100, 200);
  const ByteVector frame = Frame(testing::Ipv4Address(), CountingBytes(4));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Receive(frame), Verdict::kAccepted);
  for (int i = 0; i < 4; ++i) Commit();  // three of the first, one of the second
  receiver_.HandlePlacementFailed(memory_.CommitNext(/*fail=*/true).ticket);
  EXPECT_TRUE(receiver_.failed());
  EXPECT_EQ(Poll()->status, WcStatus::kSuccess);
  EXPECT_EQ(Poll()->status, WcStatus::kLocProtErr);
  EXPECT_EQ(Poll()->status, WcStatus::kWrFlushErr);
  EXPECT_FALSE(Poll());
}

}  // namespace
}  // namespace verbena::transport
