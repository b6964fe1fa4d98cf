// SPDX-License-Identifier: Apache-2.0
//
// Two RC QPs end to end on a quiet network: every opcode, segmentation, SGE
// lists, order of completions, fence, limits.
#include "tests/testing/rc_pair.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <vector>

#include "tests/testing/frames.h"
#include "tests/testing/packet_matchers.h"

namespace verbena::transport {
namespace {

using testing::CountingBytes;
using ::testing::ElementsAre;
using testing::Frame;
using ::testing::IsEmpty;
using testing::RcOptions;
using testing::RcPair;
using ::testing::SizeIs;
using testing::ViewOf;

constexpr uint32_t kLocalKey = 0x101;   // at both sides
constexpr uint32_t kRemoteKey = 0x202;  // at both sides
constexpr uint64_t kLocal = 0x10000;
constexpr uint64_t kRemote = 0x7f0000001000;
constexpr size_t kRegion = 1 << 16;

class RcPairTest : public ::testing::Test {
 protected:
  RcPairTest() { Reset({}); }

  void Reset(const RcOptions& options) {
    pair = std::make_unique<RcPair>(options);
    for (testing::RcSide* side : {&pair->a, &pair->b}) {
      side->memory.AddRegion(kLocalKey, kLocal, kRegion);
      side->memory.AddRegion(kRemoteKey, kRemote, kRegion);
    }
  }

  void Fill(testing::RcSide& side, uint32_t key, uint8_t seed) {
    auto bytes = side.memory.Bytes(key);
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>((i * 7 + i / 256 + seed) & 0xff);
    }
  }

  SendRequest Request(WrOpcode opcode, std::span<const MemorySegment> sges) {
    SendRequest request;
    request.wr_id = ++last_wr_id;
    request.opcode = opcode;
    request.signaled = true;
    request.remote_address = kRemote;
    request.rkey = kRemoteKey;
    request.sges = sges;
    return request;
  }
  void Post(const SendRequest& request) { pair->a.requester.Post(request, pair->now); }

  static bool Equal(std::span<const std::byte> x, std::span<const std::byte> y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end());
  }

  std::unique_ptr<RcPair> pair;
  uint64_t last_wr_id = 0;
};

// Message sizes around every boundary of segmentation (PMTU 256).
class RcSizesTest : public RcPairTest, public ::testing::WithParamInterface<uint32_t> {};

INSTANTIATE_TEST_SUITE_P(Sizes, RcSizesTest,
                         ::testing::Values(0, 1, 3, 255, 256, 257, 511, 512, 513, 1000, 4096,
                                           40000));

TEST_P(RcSizesTest, SendFillsTheReceive) {
  const uint32_t size = GetParam();
  Fill(pair->a, kLocalKey, 1);
  pair->b.receive_queue.Post(77, {{kLocal, kRegion, kLocalKey}});
  const MemorySegment sge{kLocal, size, kLocalKey};
  Post(Request(WrOpcode::kSend, {&sge, 1}));
  pair->Drive();
  ASSERT_THAT(pair->a.send_completions, SizeIs(1));
  EXPECT_EQ(pair->a.send_completions[0].status, WcStatus::kSuccess);
  ASSERT_THAT(pair->b.recv_completions, SizeIs(1));
  const Completion& recv = pair->b.recv_completions[0];
  EXPECT_EQ(recv.wr_id, 77u);
  EXPECT_EQ(recv.status, WcStatus::kSuccess);
  EXPECT_EQ(recv.opcode, WcOpcode::kRecv);
  EXPECT_EQ(recv.byte_len, size);
  EXPECT_FALSE(recv.has_imm);
  EXPECT_TRUE(Equal(pair->b.memory.At(kLocalKey, kLocal, size),
                    pair->a.memory.At(kLocalKey, kLocal, size)));
  EXPECT_EQ(pair->b.memory.Bytes(kLocalKey)[size], std::byte{0});
  EXPECT_EQ(pair->b.responder.msn(), Msn(1));
}

TEST_P(RcSizesTest, WritePlacesAtTheAddress) {
  const uint32_t size = GetParam();
  Fill(pair->a, kLocalKey, 2);
  const MemorySegment sge{kLocal + 5, size, kLocalKey};
  SendRequest request = Request(WrOpcode::kRdmaWrite, {&sge, 1});
  request.remote_address = kRemote + 11;
  Post(request);
  pair->Drive();
  ASSERT_THAT(pair->a.send_completions, SizeIs(1));
  EXPECT_EQ(pair->a.send_completions[0].status, WcStatus::kSuccess);
  EXPECT_EQ(pair->a.send_completions[0].opcode, WcOpcode::kRdmaWrite);
  EXPECT_THAT(pair->b.recv_completions, IsEmpty());
  EXPECT_TRUE(Equal(pair->b.memory.At(kRemoteKey, kRemote + 11, size),
                    pair->a.memory.At(kLocalKey, kLocal + 5, size)));
}

TEST_P(RcSizesTest, ReadFetchesFromTheAddress) {
  const uint32_t size = GetParam();
  Fill(pair->b, kRemoteKey, 3);
  const MemorySegment sge{kLocal + 3, size, kLocalKey};
  SendRequest request = Request(WrOpcode::kRdmaRead, {&sge, 1});
  request.remote_address = kRemote + 9;
  Post(request);
  pair->Drive();
  ASSERT_THAT(pair->a.send_completions, SizeIs(1));
  EXPECT_EQ(pair->a.send_completions[0].status, WcStatus::kSuccess);
  EXPECT_EQ(pair->a.send_completions[0].byte_len, size);
  EXPECT_TRUE(Equal(pair->a.memory.At(kLocalKey, kLocal + 3, size),
                    pair->b.memory.At(kRemoteKey, kRemote + 9, size)));
  // A READ takes as many PSNs as its response has packets, at least one.
  const uint32_t packets = size == 0 ? 1 : (size + 255) / 256;
  EXPECT_EQ(pair->b.responder.expected_psn(), Psn(0xfffffe) + packets);
  EXPECT_EQ(pair->a.requester.next_psn(), Psn(0xfffffe) + packets);
}

// The value in the WR itself, or in a piece of memory that may be in parts.
TEST_F(RcPairTest, AnAtomicWriteWritesEightBytes) {
  const uint64_t value = 0x1122334455667788;
  SendRequest request = Request(WrOpcode::kAtomicWrite, {});
  request.compare_add = value;
  request.remote_address = kRemote + 8;
  Post(request);
  Fill(pair->a, kLocalKey, 1);
  const MemorySegment parts[] = {{kLocal + 3, 5, kLocalKey}, {kLocal + 100, 3, kLocalKey}};
  request = Request(WrOpcode::kAtomicWrite, parts);
  request.remote_address = kRemote + 24;
  Post(request);
  pair->Drive();
  ASSERT_THAT(pair->a.send_completions, SizeIs(2));
  for (const Completion& done : pair->a.send_completions) {
    EXPECT_EQ(done.status, WcStatus::kSuccess);
    EXPECT_EQ(done.opcode, WcOpcode::kAtomicWrite);
  }
  EXPECT_EQ(pair->b.memory.Word(kRemoteKey, kRemote + 8), value);
  EXPECT_TRUE(Equal(pair->b.memory.At(kRemoteKey, kRemote + 24, 5),
                    pair->a.memory.At(kLocalKey, kLocal + 3, 5)));
  EXPECT_TRUE(Equal(pair->b.memory.At(kRemoteKey, kRemote + 29, 3),
                    pair->a.memory.At(kLocalKey, kLocal + 100, 3)));
  EXPECT_EQ(pair->b.memory.Word(kRemoteKey, kRemote), 0u);
  EXPECT_EQ(pair->b.memory.Word(kRemoteKey, kRemote + 16), 0u);
}

TEST_F(RcPairTest, AnAtomicWriteOfAnotherLengthIsALocalError) {
  for (const uint32_t length : {0u, 7u, 9u}) {
    Reset({});
    const MemorySegment sge{kLocal, length, kLocalKey};
    Post(Request(WrOpcode::kAtomicWrite, {&sge, 1}));
    pair->Drive();
    ASSERT_THAT(pair->a.send_completions, SizeIs(1));
    EXPECT_EQ(pair->a.send_completions[0].status, WcStatus::kLocLenErr);
    EXPECT_FALSE(pair->b.in_error);
  }
}

// Every packet is lost once: what is sent again is done once, in its order.
TEST_F(RcPairTest, AtomicWritesAndFlushesSurviveLosses) {
  RcOptions options;
  options.access_flags |= kAccessFlushGlobal;
  for (uint32_t lost = 0; lost < 16; ++lost) {
    last_wr_id = 0;
    Reset(options);
    for (testing::RcSide* side : {&pair->a, &pair->b}) {
      side->memory.AddRegion(0x303, 0, 64, kAccessFlushGlobal);
    }
    uint32_t seen = 0;
    pair->lose = [&](const PacketView&) { return seen++ == lost; };
    for (uint64_t i = 1; i <= 4; ++i) {
      SendRequest request = Request(WrOpcode::kAtomicWrite, {});
      request.compare_add = i;
      Post(request);
      request = Request(WrOpcode::kFlush, {});
      request.rkey = 0x303;
      request.remote_address = 0;
      request.compare_add = 64;
      request.imm_or_inv = Feth::Of(Feth::kGlobal, Feth::kLevelRange).value;
      Post(request);
    }
    do {
      pair->Drive();
    } while (pair->a.send_completions.size() < 8 && pair->AdvanceToTimer());
    ASSERT_THAT(pair->a.send_completions, SizeIs(8)) << "lost: packet " << lost;
    for (size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(pair->a.send_completions[i].wr_id, i + 1);
      EXPECT_EQ(pair->a.send_completions[i].status, WcStatus::kSuccess);
      EXPECT_EQ(pair->a.send_completions[i].opcode,
                i % 2 == 0 ? WcOpcode::kAtomicWrite : WcOpcode::kFlush);
    }
    EXPECT_EQ(pair->b.memory.Word(kRemoteKey, kRemote), 4u);
  }
}

TEST_P(RcSizesTest, WriteWithImmediateCompletesAReceiveWithoutTouchingIt) {
  const uint32_t size = GetParam();
  Fill(pair->a, kLocalKey, 4);
  pair->b.receive_queue.Post(5, {{kLocal, 4, kLocalKey}});
  const MemorySegment sge{kLocal, size, kLocalKey};
  SendRequest request = Request(WrOpcode::kRdmaWriteImm, {&sge, 1});
  request.imm_or_inv = 0x11223344;
  request.solicited = true;
  Post(request);
  pair->Drive();
  ASSERT_THAT(pair->b.recv_completions, SizeIs(1));
  const Completion& recv = pair->b.recv_completions[0];
  EXPECT_EQ(recv.opcode, WcOpcode::kRecvRdmaWithImm);
  EXPECT_EQ(recv.byte_len, size);
  EXPECT_TRUE(recv.has_imm);
  EXPECT_TRUE(recv.solicited);
  EXPECT_EQ(recv.imm_or_inv, 0x11223344u);
  EXPECT_TRUE(Equal(pair->b.memory.At(kRemoteKey, kRemote, size),
                    pair->a.memory.At(kLocalKey, kLocal, size)));
}

TEST_F(RcPairTest, OpcodesOfAMessageFollowItsLength) {
  const MemorySegment sge{kLocal, 700, kLocalKey};
  SendRequest request = Request(WrOpcode::kRdmaWriteImm, {&sge, 1});
  Post(request);
  const auto frames = pair->a.Transmit(pair->now);
  ASSERT_THAT(frames, SizeIs(3));
  const Psn psn(0xfffffe);
  EXPECT_THAT(ViewOf(frames[0]), testing::IsPacket(Opcode::kRcWriteFirst, psn));
  EXPECT_THAT(ViewOf(frames[1]), testing::IsPacket(Opcode::kRcWriteMiddle, psn + 1));
  EXPECT_THAT(ViewOf(frames[2]), testing::IsPacket(Opcode::kRcWriteLastImm, Psn(0)));
  EXPECT_EQ(ViewOf(frames[0]).reth().dma_length, 700u);
  EXPECT_EQ(ViewOf(frames[0]).payload_bytes(), 256u);
  EXPECT_EQ(ViewOf(frames[2]).payload_bytes(), 188u);
  EXPECT_FALSE(ViewOf(frames[0]).bth().ack_req);
  EXPECT_FALSE(ViewOf(frames[1]).bth().ack_req);
  EXPECT_THAT(ViewOf(frames[2]), testing::AsksForAck());
}

TEST_F(RcPairTest, LongMessagesAskForAcksOnTheWay) {
  const MemorySegment sge{kLocal, 200 * 256, kLocalKey};
  Post(Request(WrOpcode::kRdmaWrite, {&sge, 1}));
  const auto frames = pair->a.Transmit(pair->now);
  ASSERT_THAT(frames, SizeIs(200));
  size_t gap = 0;
  size_t longest = 0;
  for (const Frame& frame : frames) {
    longest = std::max(longest, ++gap);
    if (ViewOf(frame).bth().ack_req) gap = 0;
  }
  EXPECT_EQ(gap, 0u);
  EXPECT_LE(longest, 70u);
  EXPECT_GE(longest, 32u);
}

TEST_F(RcPairTest, SgeListsAreGatheredAndScattered) {
  Fill(pair->a, kLocalKey, 9);
  std::vector<MemorySegment> gather;
  std::vector<std::byte> expected;
  uint64_t at = kLocal;
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t length = (i * 37) % 101;  // some are empty
    gather.push_back({at, length, kLocalKey});
    const auto bytes = pair->a.memory.At(kLocalKey, at, length);
    expected.insert(expected.end(), bytes.begin(), bytes.end());
    at += length + 13;
  }
  std::vector<MemorySegment> scatter;
  for (uint32_t i = 0; i < 32; ++i) {
    scatter.push_back({kRemote + i * 128, i % 5 == 0 ? 0u : 80u, kRemoteKey});
  }
  pair->b.receive_queue.Post(1, scatter);
  Post(Request(WrOpcode::kSend, gather));
  pair->Drive();
  ASSERT_THAT(pair->b.recv_completions, SizeIs(1));
  EXPECT_EQ(pair->b.recv_completions[0].byte_len, expected.size());
  std::vector<std::byte> received;
  for (const MemorySegment& sge : scatter) {
    const auto bytes = pair->b.memory.At(kRemoteKey, sge.address, sge.length);
    received.insert(received.end(), bytes.begin(), bytes.end());
  }
  received.resize(expected.size());
  EXPECT_EQ(received, expected);
  EXPECT_TRUE(pair->b.memory.AreGuardsIntact());
}

TEST_F(RcPairTest, ReadScattersOverSges) {
  Fill(pair->b, kRemoteKey, 10);
  const MemorySegment scatter[] = {
      {kLocal, 100, kLocalKey}, {kLocal + 200, 0, kLocalKey}, {kLocal + 300, 900, kLocalKey}};
  Post(Request(WrOpcode::kRdmaRead, scatter));
  pair->Drive();
  EXPECT_TRUE(Equal(pair->a.memory.At(kLocalKey, kLocal, 100),
                    pair->b.memory.At(kRemoteKey, kRemote, 100)));
  EXPECT_TRUE(Equal(pair->a.memory.At(kLocalKey, kLocal + 300, 900),
                    pair->b.memory.At(kRemoteKey, kRemote + 100, 900)));
}

TEST_F(RcPairTest, InlineDataIsCopiedAtPost) {
  pair->b.receive_queue.Post(1, {{kLocal, 1000, kLocalKey}});
  auto data = CountingBytes(300);
  SendRequest request = Request(WrOpcode::kSend, {});
  request.inline_data = data;
  Post(request);
  std::fill(data.begin(), data.end(), std::byte{0});
  pair->Drive();
  EXPECT_TRUE(Equal(pair->b.memory.At(kLocalKey, kLocal, 300), CountingBytes(300)));
}

TEST_F(RcPairTest, SendWithImmediateAndSolicited) {
  pair->b.receive_queue.Post(1, {{kLocal, 1000, kLocalKey}});
  const MemorySegment sge{kLocal, 300, kLocalKey};
  SendRequest request = Request(WrOpcode::kSendImm, {&sge, 1});
  request.imm_or_inv = 0xa1b2c3d4;
  request.solicited = true;
  Post(request);
  const auto frames = pair->a.Transmit(pair->now);
  ASSERT_THAT(frames, SizeIs(2));
  EXPECT_FALSE(ViewOf(frames[0]).bth().solicited);
  EXPECT_THAT(ViewOf(frames[1]), testing::IsSolicited());
  for (const Frame& frame : frames) pair->b.Deliver(frame, pair->now);
  pair->Drive();
  ASSERT_THAT(pair->b.recv_completions, SizeIs(1));
  EXPECT_TRUE(pair->b.recv_completions[0].has_imm);
  EXPECT_TRUE(pair->b.recv_completions[0].solicited);
  EXPECT_EQ(pair->b.recv_completions[0].imm_or_inv, 0xa1b2c3d4u);
}

TEST_F(RcPairTest, SendWithInvalidateTakesTheKeyAway) {
  pair->b.memory.AddRegion(0x303, 0x5000, 64);
  pair->b.memory.AllowInvalidate(0x303);
  pair->b.receive_queue.Post(1, {{kLocal, 1000, kLocalKey}});
  const MemorySegment sge{kLocal, 8, kLocalKey};
  SendRequest request = Request(WrOpcode::kSendInv, {&sge, 1});
  request.imm_or_inv = 0x303;
  Post(request);
  pair->Drive();
  ASSERT_THAT(pair->b.recv_completions, SizeIs(1));
  EXPECT_TRUE(pair->b.recv_completions[0].has_inv);
  EXPECT_FALSE(pair->b.recv_completions[0].has_imm);
  EXPECT_EQ(pair->b.recv_completions[0].imm_or_inv, 0x303u);
  EXPECT_EQ(pair->b.memory.Check(0x303, 0x5000, 1, MemoryAccess::kRemoteRead),
            MemoryStatus::kBadKey);
}

TEST_F(RcPairTest, AtomicsReturnTheOriginalValue) {
  pair->b.memory.SetWord(kRemoteKey, kRemote, 100);
  const MemorySegment sge{kLocal, 8, kLocalKey};
  const MemorySegment sge2{kLocal + 8, 8, kLocalKey};
  const MemorySegment sge3{kLocal + 16, 8, kLocalKey};
  SendRequest add = Request(WrOpcode::kFetchAdd, {&sge, 1});
  add.compare_add = 11;
  Post(add);
  SendRequest swap = Request(WrOpcode::kCompareSwap, {&sge2, 1});
  swap.compare_add = 111;
  swap.swap = 0x123456789abcdef0;
  Post(swap);
  SendRequest miss = Request(WrOpcode::kCompareSwap, {&sge3, 1});
  miss.compare_add = 1;
  miss.swap = 2;
  Post(miss);
  pair->Drive();
  ASSERT_THAT(pair->a.send_completions, SizeIs(3));
  EXPECT_EQ(pair->a.send_completions[0].opcode, WcOpcode::kFetchAdd);
  EXPECT_EQ(pair->a.send_completions[1].opcode, WcOpcode::kCompSwap);
  EXPECT_EQ(pair->a.send_completions[0].byte_len, 8u);
  EXPECT_EQ(pair->a.memory.Word(kLocalKey, kLocal), 100u);
  EXPECT_EQ(pair->a.memory.Word(kLocalKey, kLocal + 8), 111u);
  EXPECT_EQ(pair->a.memory.Word(kLocalKey, kLocal + 16), 0x123456789abcdef0u);
  EXPECT_EQ(pair->b.memory.Word(kRemoteKey, kRemote), 0x123456789abcdef0u);
  EXPECT_EQ(pair->b.responder.msn(), Msn(3));
}

TEST_F(RcPairTest, OnlySignalledWorkRequestsComplete) {
  const MemorySegment sge{kLocal, 8, kLocalKey};
  for (int i = 0; i < 6; ++i) {
    SendRequest request = Request(WrOpcode::kRdmaWrite, {&sge, 1});
    request.signaled = i % 3 == 2;
    Post(request);
  }
  pair->Drive();
  ASSERT_THAT(pair->a.send_completions, SizeIs(2));
  EXPECT_EQ(pair->a.send_completions[0].wr_id, 3u);
  EXPECT_EQ(pair->a.send_completions[1].wr_id, 6u);
  EXPECT_EQ(pair->a.requester.outstanding(), 0u);
}

TEST_F(RcPairTest, OneAckForAllThatIsCommitted) {
  const MemorySegment sge{kLocal, 8, kLocalKey};
  for (int i = 0; i < 10; ++i) Post(Request(WrOpcode::kRdmaWrite, {&sge, 1}));
  pair->Exchange(pair->a, pair->b);
  const auto acks = pair->b.Transmit(pair->now);
  ASSERT_THAT(acks, SizeIs(1));
  EXPECT_THAT(ViewOf(acks[0]), testing::IsPacket(Opcode::kRcAcknowledge, Psn(0xfffffe) + 9));
  EXPECT_EQ(ViewOf(acks[0]).aeth().syndrome, 0x1f);
  EXPECT_EQ(ViewOf(acks[0]).aeth().msn, Msn(10));
  pair->a.Deliver(acks[0], pair->now);
  pair->a.Poll();
  EXPECT_THAT(pair->a.send_completions, SizeIs(10));
}

TEST_F(RcPairTest, NoAckNoCompletionBeforeTheCommit) {
  pair->b.memory.set_deferred(true);
  pair->b.receive_queue.Post(1, {{kLocal, 1000, kLocalKey}});
  const MemorySegment sge{kLocal, 600, kLocalKey};
  Post(Request(WrOpcode::kSend, {&sge, 1}));
  pair->Exchange(pair->a, pair->b);
  EXPECT_EQ(pair->b.memory.pending(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(pair->b.Transmit(pair->now), IsEmpty());
    pair->b.Poll();
    EXPECT_THAT(pair->b.recv_completions, IsEmpty());
    pair->b.Commit(pair->now);
  }
  EXPECT_THAT(pair->b.Transmit(pair->now), SizeIs(1));
  pair->b.Poll();
  EXPECT_THAT(pair->b.recv_completions, SizeIs(1));
  EXPECT_GE(pair->b.responder.counters().ack_deferred, 1u);
}

TEST_F(RcPairTest, ReadCompletesWhenItsDataIsVisible) {
  pair->a.memory.set_deferred(true);
  Fill(pair->b, kRemoteKey, 1);
  const MemorySegment sge{kLocal, 300, kLocalKey};
  Post(Request(WrOpcode::kRdmaRead, {&sge, 1}));
  pair->Exchange(pair->a, pair->b);
  pair->Exchange(pair->b, pair->a);
  EXPECT_EQ(pair->a.requester.una_psn(), pair->a.requester.next_psn());
  pair->a.Poll();
  EXPECT_THAT(pair->a.send_completions, IsEmpty());
  pair->a.Commit(pair->now);
  pair->a.Poll();
  EXPECT_THAT(pair->a.send_completions, IsEmpty());
  pair->a.Commit(pair->now);
  pair->a.Poll();
  EXPECT_THAT(pair->a.send_completions, SizeIs(1));
}

TEST_F(RcPairTest, ReadSeesTheWriteBeforeIt) {
  pair->b.memory.set_deferred(true);
  Fill(pair->a, kLocalKey, 5);
  const MemorySegment from{kLocal, 64, kLocalKey};
  const MemorySegment to{kLocal + 1000, 64, kLocalKey};
  Post(Request(WrOpcode::kRdmaWrite, {&from, 1}));
  Post(Request(WrOpcode::kRdmaRead, {&to, 1}));
  pair->Exchange(pair->a, pair->b);
  EXPECT_THAT(pair->b.Transmit(pair->now), IsEmpty());
  pair->b.CommitAll(pair->now);
  // The READ response acknowledges the WRITE: no ACK of its own.
  const auto frames = pair->b.Transmit(pair->now);
  ASSERT_THAT(frames, SizeIs(1));
  EXPECT_THAT(ViewOf(frames[0]), testing::HasOpcode(Opcode::kRcReadResponseOnly));
  pair->a.Deliver(frames[0], pair->now);
  pair->a.Poll();
  EXPECT_THAT(pair->a.send_completions, SizeIs(2));
  EXPECT_TRUE(Equal(pair->a.memory.At(kLocalKey, kLocal + 1000, 64),
                    pair->a.memory.At(kLocalKey, kLocal, 64)));
}

TEST_F(RcPairTest, FenceWaitsForReadData) {
  pair->a.memory.set_deferred(true);
  Fill(pair->b, kRemoteKey, 6);
  const MemorySegment sge{kLocal, 64, kLocalKey};
  Post(Request(WrOpcode::kRdmaRead, {&sge, 1}));
  SendRequest write = Request(WrOpcode::kRdmaWrite, {&sge, 1});
  write.fence = true;
  write.remote_address = kRemote + 4096;
  Post(write);
  EXPECT_THAT(pair->a.Transmit(pair->now), SizeIs(1));
  RcPair fresh;
  Reset({});
  pair->a.memory.set_deferred(true);
  Fill(pair->b, kRemoteKey, 6);
  Post(Request(WrOpcode::kRdmaRead, {&sge, 1}));
  Post(write);
  pair->Exchange(pair->a, pair->b);
  pair->Exchange(pair->b, pair->a);
  // The response is there, but not in memory.
  EXPECT_THAT(pair->a.Transmit(pair->now), IsEmpty());
  pair->Drive();
  EXPECT_THAT(pair->a.send_completions, SizeIs(2));
  EXPECT_TRUE(Equal(pair->b.memory.At(kRemoteKey, kRemote + 4096, 64),
                    pair->b.memory.At(kRemoteKey, kRemote, 64)));
}

TEST_F(RcPairTest, MaxRdAtomicLimitsOutstandingReads) {
  const MemorySegment sge{kLocal, 8, kLocalKey};
  for (int i = 0; i < 7; ++i) Post(Request(WrOpcode::kRdmaRead, {&sge, 1}));
  EXPECT_THAT(pair->a.Transmit(pair->now), SizeIs(4));
  Reset({});
  for (int i = 0; i < 7; ++i) {
    Post(Request(i % 2 == 0 ? WrOpcode::kRdmaRead : WrOpcode::kFetchAdd, {&sge, 1}));
  }
  pair->Drive();
  EXPECT_THAT(pair->a.send_completions, SizeIs(7));
}

TEST_F(RcPairTest, WindowBoundsPacketsInFlight) {
  RcOptions options;
  options.capacity.max_wr = 2048;
  Reset(options);
  const MemorySegment sge{kLocal, 8, kLocalKey};
  for (int i = 0; i < 1000; ++i) Post(Request(WrOpcode::kRdmaWrite, {&sge, 1}));
  EXPECT_THAT(pair->a.Transmit(pair->now), SizeIs(RcRequester::kWindowPackets));
  Reset(options);
  for (int i = 0; i < 1000; ++i) Post(Request(WrOpcode::kRdmaWrite, {&sge, 1}));
  pair->Drive();
  EXPECT_THAT(pair->a.send_completions, SizeIs(1000));
}

TEST_F(RcPairTest, LongReadIsSentPacketByPacket) {
  const MemorySegment sge{kLocal, 40000, kLocalKey};
  const MemorySegment small{kLocal, 8, kLocalKey};
  Post(Request(WrOpcode::kRdmaRead, {&sge, 1}));
  Post(Request(WrOpcode::kRdmaWrite, {&small, 1}));
  pair->Exchange(pair->a, pair->b);
  TxPacket packet;
  Psn psn(0xfffffe);
  for (int i = 0; i < 157; ++i, psn = psn.Next()) {
    ASSERT_TRUE(pair->b.responder.PollTransmit(pair->now, &packet));
    EXPECT_EQ(packet.psn, psn);
    EXPECT_TRUE(TraitsOf(packet.opcode).is_read_response());
  }
  ASSERT_TRUE(pair->b.responder.PollTransmit(pair->now, &packet));
  EXPECT_EQ(packet.opcode, Opcode::kRcAcknowledge);
  EXPECT_EQ(packet.psn, psn);
  EXPECT_FALSE(pair->b.responder.PollTransmit(pair->now, &packet));
}

TEST_F(RcPairTest, DrainFinishesWhatWasBegun) {
  const MemorySegment sge{kLocal, 1000, kLocalKey};
  Post(Request(WrOpcode::kRdmaWrite, {&sge, 1}));
  Post(Request(WrOpcode::kRdmaWrite, {&sge, 1}));
  const auto first = pair->a.Transmit(pair->now, 1);
  pair->a.requester.Drain();
  EXPECT_FALSE(pair->a.requester.drained());
  pair->b.Deliver(first[0], pair->now);
  pair->Drive();
  EXPECT_TRUE(pair->a.requester.drained());
  EXPECT_THAT(pair->a.send_completions, SizeIs(1));
  pair->a.requester.Resume();
  pair->Drive();
  EXPECT_THAT(pair->a.send_completions, SizeIs(2));
}

TEST_F(RcPairTest, LocalInvalidateRunsInItsTurn) {
  pair->a.memory.AddRegion(0x404, 0x9000, 64);
  pair->a.memory.AllowInvalidate(0x404);
  const MemorySegment sge{0x9000, 64, 0x404};
  Post(Request(WrOpcode::kRdmaWrite, {&sge, 1}));
  SendRequest invalidate = Request(WrOpcode::kLocalInv, {});
  invalidate.imm_or_inv = 0x404;
  Post(invalidate);
  pair->Exchange(pair->a, pair->b);
  EXPECT_EQ(pair->a.memory.Check(0x404, 0x9000, 1, MemoryAccess::kLocalRead), MemoryStatus::kOk);
  pair->Drive();
  ASSERT_THAT(pair->a.send_completions, SizeIs(2));
  EXPECT_EQ(pair->a.send_completions[1].opcode, WcOpcode::kLocalInv);
  EXPECT_EQ(pair->a.send_completions[1].status, WcStatus::kSuccess);
  EXPECT_EQ(pair->a.memory.Check(0x404, 0x9000, 1, MemoryAccess::kLocalRead),
            MemoryStatus::kBadKey);
}

TEST_F(RcPairTest, FirstPacketTellsThatTheConnectionIsEstablished) {
  const MemorySegment sge{kLocal, 8, kLocalKey};
  Post(Request(WrOpcode::kRdmaWrite, {&sge, 1}));
  Post(Request(WrOpcode::kRdmaWrite, {&sge, 1}));
  pair->Drive();
  EXPECT_THAT(pair->b.events, ElementsAre(AsyncEventType::kCommEst));
  EXPECT_THAT(pair->a.events, IsEmpty());
}

// Memory that is as large as an address can tell, and holds nothing.
class EndlessMemory : public MemoryPort {
 public:
  MemoryStatus Check(uint32_t, uint64_t, uint64_t, MemoryAccess) override {
    return MemoryStatus::kOk;
  }
  MemoryStatus Place(const MemorySegment&, std::span<const std::byte>, MemoryAccess, bool,
                     Ticket*) override {
    return MemoryStatus::kOk;
  }
  MemoryStatus Atomic(uint32_t, uint64_t, const AtomicOperation&, Ticket*) override {
    return MemoryStatus::kOk;
  }
  MemoryStatus Invalidate(uint32_t) override { return MemoryStatus::kOk; }
};

class RcLargeTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kTwoGibibytes = 0x80000000;

  RcLargeTest() {
    requester.Start({.pmtu = Pmtu::k256, .first_psn = Psn(5), .max_rd_atomic = 4});
    responder.Start({.pmtu = Pmtu::k256,
                     .expected_psn = Psn(5),
                     .max_dest_rd_atomic = 4,
                     .access_flags = kAccessRemoteRead});
  }

  void Post(WrOpcode opcode, std::initializer_list<MemorySegment> sges) {
    SendRequest request;
    request.opcode = opcode;
    request.sges = std::span(sges.begin(), sges.size());
    requester.Post(request, now);
  }

  EndlessMemory memory;
  testing::FakeReceiveQueue receives;
  RcRequester requester{{.max_wr = 8, .max_sge = 2}, memory};
  RcResponder responder{memory, receives};
  TxPacket packet;
  const Time now = Time::FromNanoseconds(1);
};

TEST_F(RcLargeTest, WriteAnnouncesTwoGibibytes) {
  Post(WrOpcode::kRdmaWrite, {{0, kTwoGibibytes, 1}});
  ASSERT_TRUE(requester.PollTransmit(now, &packet));
  EXPECT_EQ(packet.opcode, Opcode::kRcWriteFirst);
  EXPECT_EQ(packet.dma_length, kTwoGibibytes);
}

TEST_F(RcLargeTest, OneByteMoreIsALocalLengthError) {
  Post(WrOpcode::kRdmaWrite, {{0, kTwoGibibytes, 1}, {0, 1, 1}});
  EXPECT_FALSE(requester.PollTransmit(now, &packet));
  Completion completion;
  ASSERT_TRUE(requester.PollCompletion(&completion));
  EXPECT_EQ(completion.status, WcStatus::kLocLenErr);
}

// At PMTU 256 it takes exactly 2^23 PSNs, half of all: nothing else fits beside
// it, and the repeated request is as far behind as a PSN can be.
TEST_F(RcLargeTest, ReadOfTwoGibibytesTakesHalfThePsnSpace) {
  Post(WrOpcode::kRdmaRead, {{0, kTwoGibibytes, 1}});
  Post(WrOpcode::kRdmaWrite, {{0, 8, 1}});
  ASSERT_TRUE(requester.PollTransmit(now, &packet));
  EXPECT_EQ(requester.next_psn(), Psn(5 + (1 << 23)));
  TransportHeaders headers;
  headers.bth.opcode = packet.opcode;
  headers.bth.psn = packet.psn;
  headers.reth = {packet.remote_address, Rkey(packet.rkey), packet.dma_length};
  EXPECT_FALSE(requester.PollTransmit(now, &packet));

  const Frame frame = testing::BuildFrame(testing::Ipv4Address(), headers);
  responder.HandleRequest(ViewOf(frame), now);
  EXPECT_EQ(responder.expected_psn(), Psn(5 + (1 << 23)));
  for (uint32_t i = 0; i < 1000; ++i) {
    ASSERT_TRUE(responder.PollTransmit(now, &packet));
    EXPECT_EQ(packet.psn, Psn(5 + i));
  }
  responder.HandleRequest(ViewOf(frame), now);
  EXPECT_EQ(responder.counters().duplicate_request, 1u);
  ASSERT_TRUE(responder.PollTransmit(now, &packet));
  EXPECT_EQ(packet.opcode, Opcode::kRcReadResponseFirst);
  EXPECT_EQ(packet.psn, Psn(5));

  // The first response makes room for one more PSN.
  TransportHeaders response;
  response.bth.opcode = Opcode::kRcReadResponseFirst;
  response.bth.psn = Psn(5);
  response.aeth = {0x1f, Msn(1)};
  const Frame data =
      testing::BuildFrame(testing::Ipv4Address(), response, testing::CountingBytes(256));
  requester.HandleResponse(ViewOf(data), now);
  ASSERT_TRUE(requester.PollTransmit(now, &packet));
  EXPECT_EQ(packet.opcode, Opcode::kRcWriteOnly);
}

}  // namespace
}  // namespace verbena::transport
