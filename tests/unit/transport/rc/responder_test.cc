// SPDX-License-Identifier: Apache-2.0
//
// The RC responder against single packets: violations and their NAKs (table of
// the specification), duplicates, gaps, RNR, late and failing placements.
#include "transport/rc/responder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/testing/fake_memory.h"
#include "tests/testing/frames.h"
#include "tests/testing/packet_matchers.h"
#include "tests/testing/rc_pair.h"

namespace verbena::transport {
namespace {

using ::testing::ElementsAre;
using testing::Frame;
using ::testing::IsEmpty;
using testing::RcOptions;
using testing::RcSide;
using ::testing::SizeIs;
using testing::ViewOf;

constexpr uint32_t kKey = 0x202;
constexpr uint64_t kBase = 0x10000;
constexpr size_t kRegion = 1 << 16;
constexpr uint32_t kMtu = 256;
const Psn kFirst(0xfffffe);

// Syndromes of NAKs.
constexpr uint8_t kSequence = 0x60;
constexpr uint8_t kInvalid = 0x61;
constexpr uint8_t kAccess = 0x62;
constexpr uint8_t kOperational = 0x63;

class RcResponderTest : public ::testing::Test {
 protected:
  RcResponderTest() { Reset(RcOptions{}); }

  void Reset(const RcOptions& options) {
    side = std::make_unique<RcSide>(options);
    side->memory.AddRegion(kKey, kBase, kRegion);
    psn = kFirst;
  }

  // A request with the next PSN.
  void Send(Opcode opcode, size_t bytes = 0, uint32_t dma_length = 0, uint32_t rkey = kKey,
            uint64_t address = kBase) {
    SendAt(psn, opcode, bytes, dma_length, rkey, address);
    psn = psn.Next();
  }
  void SendAt(Psn at, Opcode opcode, size_t bytes = 0, uint32_t dma_length = 0,
              uint32_t rkey = kKey, uint64_t address = kBase) {
    TransportHeaders headers;
    headers.bth.opcode = opcode;
    headers.bth.psn = at;
    headers.bth.ack_req = ack_request;
    headers.reth = {address, Rkey(rkey), dma_length};
    headers.atomic_eth = {address, Rkey(rkey), 5, 7};
    headers.ieth = {Rkey(rkey)};
    headers.imm = {0x01020304};
    headers.feth = feth;
    const auto payload = testing::CountingBytes(bytes);
    side->Deliver(testing::BuildFrame(testing::Ipv4Address(), headers, payload), now);
  }

  void PostReceive(uint32_t bytes, uint32_t key = kKey) {
    side->receive_queue.Post(++last_receive, {{kBase, bytes, key}});
  }

  std::vector<Frame> Answers() { return side->Transmit(now); }
  // The only answer, an ACK or NAK.
  uint8_t OnlySyndrome(Psn expected) {
    const auto answers = Answers();
    EXPECT_THAT(answers, SizeIs(1));
    if (answers.size() != 1) return 0xff;
    EXPECT_THAT(ViewOf(answers[0]), testing::IsPacket(Opcode::kRcAcknowledge, expected));
    return ViewOf(answers[0]).aeth().syndrome;
  }

  std::unique_ptr<RcSide> side;
  Psn psn;
  bool ack_request = true;
  Feth feth = Feth::Of(Feth::kGlobal, Feth::kLevelRange);
  uint64_t last_receive = 0;
  const Time now = Time::FromNanoseconds(1000);
};

// One row per violation: what is sent, which NAK comes for which packet (0 is
// the first), what becomes of the receive, which async event.
struct ViolationCase {
  const char* name;
  uint32_t access_flags = kAccessRemoteWrite | kAccessRemoteRead | kAccessRemoteAtomic;
  struct Packet {
    Opcode opcode;
    size_t bytes = 0;
    uint32_t dma_length = 0;
    uint32_t rkey = kKey;
    uint64_t address = kBase;
  };
  std::vector<Packet> packets;
  int receive_bytes = -1;  // posted receive, -1: none
  uint8_t syndrome = 0;
  std::optional<WcStatus> receive_status = std::nullopt;  // of the receive
  std::optional<AsyncEventType> event = std::nullopt;
};

void PrintTo(const ViolationCase& c, std::ostream* out) { *out << c.name; }

constexpr uint32_t kReadOnlyKey = 0x303;   // no remote right but READ
constexpr uint32_t kWriteOnlyKey = 0x304;  // no remote right but WRITE
constexpr uint32_t kOtherPdKey = 0x305;
constexpr uint32_t kNoKey = 0x999;
using enum Opcode;
constexpr auto kReqErr = AsyncEventType::kQpReqErr;
constexpr auto kAccessErr = AsyncEventType::kQpAccessErr;

const ViolationCase kViolations[] = {
    // Opcode out of sequence.
    {.name = "send_middle_first",
     .packets = {{kRcSendMiddle, kMtu}},
     .receive_bytes = 1000,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kReqErr},
    {.name = "send_last_first",
     .packets = {{kRcSendLast, 5}},
     .receive_bytes = 1000,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kReqErr},
    {.name = "write_middle_first",
     .packets = {{kRcWriteMiddle, kMtu}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "send_only_inside_send",
     .packets = {{kRcSendFirst, kMtu}, {kRcSendOnly, 5}},
     .receive_bytes = 1000,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kReqErr},
    {.name = "write_last_inside_send",
     .packets = {{kRcSendFirst, kMtu}, {kRcWriteLast, 5}},
     .receive_bytes = 1000,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kReqErr},
    {.name = "send_last_inside_write",
     .packets = {{kRcWriteFirst, kMtu, 300}, {kRcSendLast, 44}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "read_inside_write",
     .packets = {{kRcWriteFirst, kMtu, 300}, {kRcReadRequest, 0, 8}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "atomic_inside_send",
     .packets = {{kRcSendFirst, kMtu}, {kRcFetchAdd}},
     .receive_bytes = 1000,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kReqErr},
    {.name = "flush_is_not_supported",
     .packets = {{kRcFlush}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "atomic_write_of_4_bytes",
     .packets = {{kRcAtomicWrite, 4, 4}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "atomic_write_that_announces_more",
     .packets = {{kRcAtomicWrite, 8, 16}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "atomic_write_misaligned",
     .packets = {{kRcAtomicWrite, 8, 8, kKey, kBase + 4}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "atomic_write_without_the_right_of_the_qp",
     .access_flags = kAccessRemoteRead | kAccessRemoteAtomic,
     .packets = {{kRcAtomicWrite, 8, 8}},
     .syndrome = kInvalid,
     .event = kReqErr},
    // Lengths.
    {.name = "send_first_short",
     .packets = {{kRcSendFirst, kMtu - 1}},
     .receive_bytes = 1000,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kReqErr},
    {.name = "send_first_long",
     .packets = {{kRcSendFirst, kMtu + 4}},
     .receive_bytes = 1000,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kReqErr},
    {.name = "send_middle_short",
     .packets = {{kRcSendFirst, kMtu}, {kRcSendMiddle, 100}},
     .receive_bytes = 1000,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kReqErr},
    {.name = "send_last_empty",
     .packets = {{kRcSendFirst, kMtu}, {kRcSendLast, 0}},
     .receive_bytes = 1000,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kReqErr},
    {.name = "send_only_over_mtu",
     .packets = {{kRcSendOnly, kMtu + 1}},
     .receive_bytes = 1000,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kReqErr},
    {.name = "write_only_longer_than_reth",
     .packets = {{kRcWriteOnly, 9, 8}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "write_only_shorter_than_reth",
     .packets = {{kRcWriteOnly, 7, 8}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "write_first_of_one_packet",
     .packets = {{kRcWriteFirst, kMtu, kMtu}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "write_last_too_short",
     .packets = {{kRcWriteFirst, kMtu, 300}, {kRcWriteLast, 43}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "write_last_too_long",
     .packets = {{kRcWriteFirst, kMtu, 300}, {kRcWriteLast, 45}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "write_middle_beyond_reth",
     .packets = {{kRcWriteFirst, kMtu, 300}, {kRcWriteMiddle, kMtu}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "write_over_two_gibibytes",
     .packets = {{kRcWriteFirst, kMtu, 0x80000001}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "read_over_two_gibibytes",
     .packets = {{kRcReadRequest, 0, 0x80000001}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "atomic_misaligned",
     .packets = {{kRcFetchAdd, 0, 0, kKey, kBase + 4}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "swap_misaligned",
     .packets = {{kRcCompareSwap, 0, 0, kKey, kBase + 1}},
     .syndrome = kInvalid,
     .event = kReqErr},
    // Rights of the QP.
    {.name = "qp_without_write",
     .access_flags = kAccessRemoteRead | kAccessRemoteAtomic,
     .packets = {{kRcWriteOnly, 8, 8}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "qp_without_read",
     .access_flags = kAccessRemoteWrite | kAccessRemoteAtomic,
     .packets = {{kRcReadRequest, 0, 8}},
     .syndrome = kInvalid,
     .event = kReqErr},
    {.name = "qp_without_atomic",
     .access_flags = kAccessRemoteWrite | kAccessRemoteRead,
     .packets = {{kRcCompareSwap}},
     .syndrome = kInvalid,
     .event = kReqErr},
    // Keys.
    {.name = "write_unknown_key",
     .packets = {{kRcWriteOnly, 8, 8, kNoKey}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "write_first_unknown_key",
     .packets = {{kRcWriteFirst, kMtu, 300, kNoKey}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "write_range_checked_at_first",
     .packets = {{kRcWriteFirst, kMtu, 300, kKey, kBase + kRegion - 299}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "write_below_region",
     .packets = {{kRcWriteOnly, 8, 8, kKey, kBase - 1}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "write_imm_unknown_key_takes_no_receive",
     .packets = {{kRcWriteOnlyImm, 8, 8, kNoKey}},
     .receive_bytes = 100,
     .syndrome = kAccess,
     .receive_status = WcStatus::kWrFlushErr,
     .event = kAccessErr},
    {.name = "write_region_without_right",
     .packets = {{kRcWriteOnly, 8, 8, kReadOnlyKey}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "write_other_pd",
     .packets = {{kRcWriteOnly, 8, 8, kOtherPdKey}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "read_unknown_key",
     .packets = {{kRcReadRequest, 0, 8, kNoKey}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "read_out_of_bounds",
     .packets = {{kRcReadRequest, 0, 9, kKey, kBase + kRegion - 8}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "read_address_wraps",
     .packets = {{kRcReadRequest, 0, 0x100, kKey, 0xffffffffffffff80}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "read_region_without_right",
     .packets = {{kRcReadRequest, 0, 8, kWriteOnlyKey}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "atomic_unknown_key",
     .packets = {{kRcFetchAdd, 0, 0, kNoKey}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "atomic_region_without_right",
     .packets = {{kRcFetchAdd, 0, 0, kReadOnlyKey}},
     .syndrome = kAccess,
     .event = kAccessErr},
    {.name = "atomic_out_of_bounds",
     .packets = {{kRcFetchAdd, 0, 0, kKey, kBase + kRegion}},
     .syndrome = kAccess,
     .event = kAccessErr},
    // The receive.
    {.name = "send_longer_than_receive",
     .packets = {{kRcSendOnly, 11}},
     .receive_bytes = 10,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kLocLenErr},
    {.name = "send_last_exceeds_receive",
     .packets = {{kRcSendFirst, kMtu}, {kRcSendLast, 10}},
     .receive_bytes = 265,
     .syndrome = kInvalid,
     .receive_status = WcStatus::kLocLenErr},
    {.name = "receive_outside_its_region",
     .packets = {{kRcSendOnly, 8}},
     .receive_bytes = 1 << 20,
     .syndrome = kOperational,
     .receive_status = WcStatus::kLocProtErr},
};

class RcViolationTest : public RcResponderTest,
                        public ::testing::WithParamInterface<ViolationCase> {};

INSTANTIATE_TEST_SUITE_P(Table, RcViolationTest, ::testing::ValuesIn(kViolations),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(RcViolationTest, GivesItsNakAndEndsTheConnection) {
  const ViolationCase& c = GetParam();
  RcOptions options;
  options.access_flags = c.access_flags;
  Reset(options);
  side->memory.AddRegion(kReadOnlyKey, kBase, 64, kAccessRemoteRead);
  side->memory.AddRegion(kWriteOnlyKey, kBase, 64, kAccessRemoteWrite | kAccessLocalWrite);
  side->memory.AddRegion(kOtherPdKey, kBase, 64);
  side->memory.MoveToOtherPd(kOtherPdKey);
  ack_request = false;
  if (c.receive_bytes >= 0) {
    // One that lies outside its region cannot be placed.
    const uint64_t at = c.receive_bytes > static_cast<int>(kRegion) ? kBase + kRegion : kBase;
    side->receive_queue.Post(1, {{at, static_cast<uint32_t>(c.receive_bytes), kKey}});
  }
  for (const auto& packet : c.packets) {
    Send(packet.opcode, packet.bytes, packet.dma_length, packet.rkey, packet.address);
  }
  const Psn violating = psn.Previous();
  EXPECT_EQ(OnlySyndrome(violating), c.syndrome);
  EXPECT_TRUE(side->responder.failed());
  side->Poll();
  if (c.receive_bytes >= 0) {
    ASSERT_THAT(side->recv_completions, SizeIs(1));
    EXPECT_EQ(side->recv_completions[0].status, c.receive_status);
    EXPECT_EQ(side->recv_completions[0].wr_id, 1u);
  } else {
    EXPECT_THAT(side->recv_completions, IsEmpty());
  }
  if (c.event.has_value()) {
    EXPECT_THAT(side->events, ElementsAre(AsyncEventType::kCommEst, *c.event));
  } else {
    EXPECT_THAT(side->events, ElementsAre(AsyncEventType::kCommEst));
  }
  // The QP is in error: silence from now on.
  ack_request = true;
  Send(kRcWriteOnly, 8, 8);
  EXPECT_THAT(Answers(), IsEmpty());
  EXPECT_TRUE(side->memory.AreGuardsIntact());
}

TEST_F(RcResponderTest, TooManyReadsAndAtomicsAreAnInvalidRequest) {
  RcOptions options;
  options.max_rd_atomic = 2;
  Reset(options);
  Send(kRcReadRequest, 0, 8);
  Send(kRcFetchAdd);
  Send(kRcReadRequest, 0, 8);
  side->CommitAll(now);
  const auto answers = Answers();
  ASSERT_THAT(answers, SizeIs(3));
  EXPECT_EQ(ViewOf(answers[2]).aeth().syndrome, kInvalid);
  EXPECT_EQ(ViewOf(answers[2]).psn(), kFirst + 2);
}

TEST_F(RcResponderTest, AnsweredReadsMakeRoomForNewOnes) {
  RcOptions options;
  options.max_rd_atomic = 1;
  Reset(options);
  for (int i = 0; i < 5; ++i) {
    Send(kRcReadRequest, 0, 8);
    EXPECT_THAT(Answers(), SizeIs(1));
  }
  EXPECT_FALSE(side->responder.failed());
}

TEST_F(RcResponderTest, ZeroLengthReadAndWriteDoNotNeedAKey) {
  Send(kRcWriteOnly, 0, 0, kNoKey, 1);
  Send(kRcReadRequest, 0, 0, kNoKey, 3);
  const auto answers = Answers();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_THAT(ViewOf(answers[0]), testing::IsPacket(kRcReadResponseOnly, kFirst + 1));
  EXPECT_EQ(ViewOf(answers[0]).payload_bytes(), 0u);
  EXPECT_EQ(ViewOf(answers[0]).aeth().msn, Msn(2));
}

TEST_F(RcResponderTest, ReservedOpcodeIsAnInvalidRequest) {
  side->responder.HandleReservedOpcode(kFirst + 1, now);  // not its turn
  EXPECT_THAT(Answers(), IsEmpty());
  side->responder.HandleReservedOpcode(kFirst, now);
  EXPECT_EQ(OnlySyndrome(kFirst), kInvalid);
}

TEST_F(RcResponderTest, OtherServicesAndResponsesAreIgnored) {
  Send(kUcSendOnly, 8);
  Send(kRcAcknowledge);
  EXPECT_THAT(Answers(), IsEmpty());
  EXPECT_EQ(side->responder.counters().dropped, 1u);
  EXPECT_EQ(side->responder.expected_psn(), kFirst);
}

TEST_F(RcResponderTest, NoAckUnlessAsked) {
  ack_request = false;
  Send(kRcWriteOnly, 8, 8);
  EXPECT_THAT(Answers(), IsEmpty());
  EXPECT_EQ(side->responder.msn(), Msn(1));
}

TEST_F(RcResponderTest, AckInsideAMessageCarriesTheOldMsn) {
  Send(kRcWriteFirst, kMtu, 600);
  auto answers = Answers();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_EQ(ViewOf(answers[0]).aeth().msn, Msn(0));
  Send(kRcWriteMiddle, kMtu);
  Send(kRcWriteLast, 88);
  answers = Answers();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_EQ(ViewOf(answers[0]).aeth().msn, Msn(1));
}

TEST_F(RcResponderTest, GapGivesOneNakUntilTheExpectedPacketComes) {
  SendAt(kFirst + 1, kRcWriteOnly, 8, 8);
  SendAt(kFirst + 2, kRcWriteOnly, 8, 8);
  EXPECT_EQ(OnlySyndrome(kFirst), kSequence);
  SendAt(kFirst + 3, kRcWriteOnly, 8, 8);
  EXPECT_THAT(Answers(), IsEmpty());
  EXPECT_EQ(side->responder.counters().out_of_seq_request, 3u);
  SendAt(kFirst, kRcWriteOnly, 8, 8);
  EXPECT_EQ(OnlySyndrome(kFirst), 0x1f);
  SendAt(kFirst + 2, kRcWriteOnly, 8, 8);
  EXPECT_EQ(OnlySyndrome(kFirst + 1), kSequence);
}

TEST_F(RcResponderTest, SequenceNakWaitsForEarlierPlacements) {
  side->memory.set_deferred(true);
  Send(kRcWriteOnly, 8, 8);
  SendAt(kFirst + 2, kRcWriteOnly, 8, 8);
  EXPECT_THAT(Answers(), IsEmpty());
  side->CommitAll(now);
  const auto answers = Answers();
  ASSERT_FALSE(answers.empty());
  EXPECT_EQ(ViewOf(answers.back()).aeth().syndrome, kSequence);
}

TEST_F(RcResponderTest, MissingReceiveGivesRnrWithTheTimer) {
  RcOptions options;
  options.min_rnr_timer = 14;
  Reset(options);
  SendAt(kFirst, kRcSendOnly, 8);
  EXPECT_EQ(OnlySyndrome(kFirst), 0x20 | 14);
  // What is in flight behind it draws nothing.
  SendAt(kFirst + 1, kRcSendOnly, 8);
  EXPECT_THAT(Answers(), IsEmpty());
  EXPECT_EQ(side->responder.expected_psn(), kFirst);
  EXPECT_EQ(side->responder.counters().send_rnr_err, 1u);
  PostReceive(100);
  SendAt(kFirst, kRcSendOnly, 8);
  EXPECT_EQ(OnlySyndrome(kFirst), 0x1f);
  side->Poll();
  EXPECT_THAT(side->recv_completions, SizeIs(1));
}

TEST_F(RcResponderTest, RnrAtTheLastPacketOfAWriteWithImmediate) {
  Send(kRcWriteFirst, kMtu, 300);
  Answers();
  SendAt(psn, kRcWriteLastImm, 44);
  EXPECT_EQ(OnlySyndrome(psn), 0x20 | 12);
  PostReceive(1);
  SendAt(psn, kRcWriteLastImm, 44);
  EXPECT_EQ(OnlySyndrome(psn), 0x1f);
  side->Poll();
  ASSERT_THAT(side->recv_completions, SizeIs(1));
  EXPECT_EQ(side->recv_completions[0].byte_len, 300u);
}

TEST_F(RcResponderTest, DuplicateSendIsAcknowledgedAndNotExecuted) {
  PostReceive(100);
  PostReceive(100);
  Send(kRcSendOnly, 8);
  Send(kRcWriteOnly, 8, 8);
  EXPECT_EQ(OnlySyndrome(kFirst + 1), 0x1f);
  ack_request = false;
  SendAt(kFirst, kRcSendOnly, 8);
  EXPECT_EQ(OnlySyndrome(kFirst + 1), 0x1f);  // the newest PSN
  side->Poll();
  EXPECT_THAT(side->recv_completions, SizeIs(1));
  EXPECT_EQ(side->receive_queue.posted(), 1u);
  EXPECT_EQ(side->responder.counters().duplicate_request, 1u);
  EXPECT_EQ(side->responder.msn(), Msn(2));
}

TEST_F(RcResponderTest, DuplicateAckWaitsForThePlacement) {
  side->memory.set_deferred(true);
  Send(kRcWriteOnly, 8, 8);
  SendAt(kFirst, kRcWriteOnly, 8, 8);
  EXPECT_THAT(Answers(), IsEmpty());
  side->CommitAll(now);
  EXPECT_THAT(Answers(), SizeIs(1));
}

// A peer need not ask for an ACK of the WRITE, which would stand in the way.
TEST_F(RcResponderTest, ReadAndAtomicWaitForThePlacementBeforeThem) {
  ack_request = false;
  for (const Opcode opcode : {kRcReadRequest, kRcFetchAdd}) {
    Reset(RcOptions{});
    side->memory.set_deferred(true);
    Send(kRcWriteOnly, 8, 8);
    Send(opcode, 0, 8);
    EXPECT_THAT(Answers(), IsEmpty());
    side->CommitAll(now);
    EXPECT_THAT(Answers(), SizeIs(1));
  }
}

TEST_F(RcResponderTest, DuplicateReadIsExecutedFromTheAskedAddress) {
  auto bytes = side->memory.Bytes(kKey);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i / 100);
  Send(kRcReadRequest, 0, 1000);
  auto answers = Answers();
  ASSERT_THAT(answers, SizeIs(4));
  EXPECT_THAT(ViewOf(answers[0]), testing::IsPacket(kRcReadResponseFirst, kFirst));
  EXPECT_THAT(ViewOf(answers[1]), testing::IsPacket(kRcReadResponseMiddle, kFirst + 1));
  EXPECT_THAT(ViewOf(answers[3]), testing::IsPacket(kRcReadResponseLast, kFirst + 3));
  EXPECT_EQ(side->responder.expected_psn(), kFirst + 4);
  bytes[600] = std::byte{0xee};
  SendAt(kFirst + 2, kRcReadRequest, 0, 1000 - 512, kKey, kBase + 512);
  answers = Answers();
  ASSERT_THAT(answers, SizeIs(2));
  EXPECT_THAT(ViewOf(answers[0]), testing::IsPacket(kRcReadResponseFirst, kFirst + 2));
  EXPECT_THAT(ViewOf(answers[1]), testing::IsPacket(kRcReadResponseLast, kFirst + 3));
  EXPECT_EQ(ViewOf(answers[0]).payload()[600 - 512], std::byte{0xee});
  EXPECT_EQ(side->responder.msn(), Msn(1));
}

TEST_F(RcResponderTest, RepeatedReadRestartsTheStreamUnderWay) {
  Send(kRcReadRequest, 0, 2560);
  TxPacket packet;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(side->responder.PollTransmit(now, &packet));
  EXPECT_EQ(packet.psn, kFirst + 4);
  SendAt(kFirst + 2, kRcReadRequest, 0, 2560 - 512, kKey, kBase + 512);
  const auto answers = Answers();
  ASSERT_THAT(answers, SizeIs(8));
  EXPECT_THAT(ViewOf(answers[0]), testing::IsPacket(kRcReadResponseFirst, kFirst + 2));
  EXPECT_THAT(ViewOf(answers[7]), testing::IsPacket(kRcReadResponseLast, kFirst + 9));
}

TEST_F(RcResponderTest, DuplicateReadIsAnsweredBeforeLaterRequests) {
  Send(kRcReadRequest, 0, 8);
  EXPECT_THAT(Answers(), SizeIs(1));
  Send(kRcReadRequest, 0, 8);
  SendAt(kFirst, kRcReadRequest, 0, 8);
  const auto answers = Answers();
  ASSERT_THAT(answers, SizeIs(2));
  EXPECT_EQ(ViewOf(answers[0]).psn(), kFirst);
  EXPECT_EQ(ViewOf(answers[1]).psn(), kFirst + 1);
}

TEST_F(RcResponderTest, DuplicateReadThatIsNoMoreValidIsDropped) {
  side->memory.AddRegion(0x500, 0, 64);
  Send(kRcReadRequest, 0, 8, 0x500, 0);
  EXPECT_THAT(Answers(), SizeIs(1));
  side->memory.RemoveRegion(0x500);
  SendAt(kFirst, kRcReadRequest, 0, 8, 0x500, 0);       // its key is gone
  SendAt(kFirst, kRcReadRequest, 0, 257, kKey, kBase);  // longer than executed
  EXPECT_THAT(Answers(), IsEmpty());
  EXPECT_FALSE(side->responder.failed());
  EXPECT_EQ(side->responder.counters().dropped, 2u);
}

TEST_F(RcResponderTest, DuplicateAtomicGivesTheStoredResult) {
  side->memory.SetWord(kKey, kBase, 100);
  Send(kRcFetchAdd);  // + 5
  side->CommitAll(now);
  auto answers = Answers();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_EQ(ViewOf(answers[0]).atomic_ack_eth().original, 100u);
  SendAt(kFirst, kRcFetchAdd);
  answers = Answers();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_THAT(ViewOf(answers[0]), testing::IsPacket(kRcAtomicAcknowledge, kFirst));
  EXPECT_EQ(ViewOf(answers[0]).atomic_ack_eth().original, 100u);
  EXPECT_EQ(side->memory.Word(kKey, kBase), 105u);
  EXPECT_EQ(side->memory.atomics_executed(), 1u);
}

TEST_F(RcResponderTest, AnAtomicWriteIsAnsweredByAnEmptyReadResponseWhenItIsVisible) {
  side->memory.set_deferred(true);
  Send(kRcAtomicWrite, 8, 8, kKey, kBase + 16);
  EXPECT_THAT(Answers(), IsEmpty());
  side->CommitAll(now);
  const auto answers = Answers();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_THAT(ViewOf(answers[0]), testing::IsPacket(kRcReadResponseOnly, kFirst));
  EXPECT_EQ(ViewOf(answers[0]).payload_bytes(), 0u);
  EXPECT_TRUE(ViewOf(answers[0]).aeth().is_ack());
  EXPECT_EQ(ViewOf(answers[0]).aeth().msn, Msn(1));
}

TEST_F(RcResponderTest, ADuplicateAtomicWriteIsAnsweredAndNotExecutedAgain) {
  Send(kRcAtomicWrite, 8, 8);
  side->CommitAll(now);
  EXPECT_THAT(Answers(), SizeIs(1));
  side->memory.SetWord(kKey, kBase, 1234);
  SendAt(kFirst, kRcAtomicWrite, 8, 8);
  side->CommitAll(now);
  const auto answers = Answers();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_THAT(ViewOf(answers[0]), testing::IsPacket(kRcReadResponseOnly, kFirst));
  EXPECT_EQ(side->memory.Word(kKey, kBase), 1234u);
}

TEST_F(RcResponderTest, AFlushIsAnsweredWhenEverythingBeforeItIsVisible) {
  RcOptions options;
  options.access_flags = kAccessRemoteWrite | kAccessFlushGlobal;
  Reset(options);
  side->memory.AddRegion(kKey, kBase, kRegion, kAccessRemoteWrite | kAccessLocalWrite);
  side->memory.AddRegion(0x500, 0, 64, kAccessFlushGlobal);
  side->memory.set_deferred(true);
  ack_request = false;
  Send(kRcWriteOnly, 8, 8, kKey, kBase);
  ack_request = true;
  Send(kRcFlush, 0, 64, 0x500, 0);  // another region: what was written before still counts
  EXPECT_THAT(Answers(), IsEmpty());
  side->CommitAll(now);
  const auto answers = Answers();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_THAT(ViewOf(answers[0]), testing::IsPacket(kRcReadResponseOnly, kFirst + 1));
  EXPECT_EQ(ViewOf(answers[0]).payload_bytes(), 0u);
  EXPECT_TRUE(ViewOf(answers[0]).aeth().is_ack());
  EXPECT_EQ(ViewOf(answers[0]).aeth().msn, Msn(2));
  SendAt(kFirst + 1, kRcFlush, 0, 64, 0x500, 0);  // its answer was lost
  const auto again = Answers();
  ASSERT_THAT(again, SizeIs(1));
  EXPECT_THAT(ViewOf(again[0]), testing::IsPacket(kRcReadResponseOnly, kFirst + 1));
}

// What a FLUSH must be to be carried out, and the NAK if it is not.
struct FlushCase {
  const char* name;
  uint8_t syndrome;  // 0: it is carried out
  uint32_t type = Feth::kGlobal;
  uint32_t level = Feth::kLevelRange;
  uint32_t qp_rights = kAccessFlushGlobal;
  uint32_t region_rights = kAccessFlushGlobal;
  uint64_t address = kBase;
  uint32_t length = 64;
  uint32_t key = 0x500;
};
void PrintTo(const FlushCase& c, std::ostream* out) { *out << c.name; }

class RcFlushTest : public RcResponderTest, public ::testing::WithParamInterface<FlushCase> {};

INSTANTIATE_TEST_SUITE_P(
    Table, RcFlushTest,
    ::testing::Values(
        FlushCase{.name = "range", .syndrome = 0},
        FlushCase{.name = "region_whatever_the_range",
                  .syndrome = 0,
                  .level = Feth::kLevelRegion,
                  .address = 1,
                  .length = 0},
        FlushCase{.name = "no_type", .syndrome = kInvalid, .type = 0},
        FlushCase{.name = "persistent", .syndrome = kInvalid, .type = Feth::kPersistent},
        FlushCase{.name = "reserved_type", .syndrome = kInvalid, .type = 4},
        FlushCase{.name = "reserved_level", .syndrome = kInvalid, .level = 2},
        FlushCase{.name = "no_right_of_the_qp", .syndrome = kInvalid, .qp_rights = 15},
        FlushCase{.name = "no_right_of_the_region", .syndrome = kAccess, .region_rights = 15},
        FlushCase{.name = "no_right_of_the_region_as_a_whole",
                  .syndrome = kAccess,
                  .level = Feth::kLevelRegion,
                  .region_rights = 15},
        FlushCase{.name = "too_long", .syndrome = kAccess, .length = 65},
        FlushCase{.name = "below", .syndrome = kAccess, .address = kBase - 1},
        FlushCase{.name = "no_key", .syndrome = kAccess, .key = kNoKey},
        FlushCase{
            .name = "no_region", .syndrome = kAccess, .level = Feth::kLevelRegion, .key = kNoKey}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(RcFlushTest, IsCarriedOutOrRefused) {
  const FlushCase& c = GetParam();
  RcOptions options;
  options.access_flags = c.qp_rights;
  Reset(options);
  side->memory.AddRegion(0x500, kBase, 64, c.region_rights);
  feth = Feth::Of(c.type, c.level);
  Send(kRcFlush, 0, c.length, c.key, c.address);
  if (c.syndrome == 0) {
    const auto answers = Answers();
    ASSERT_THAT(answers, SizeIs(1));
    EXPECT_THAT(ViewOf(answers[0]), testing::IsPacket(kRcReadResponseOnly, kFirst));
    return;
  }
  EXPECT_EQ(OnlySyndrome(kFirst), c.syndrome);
  side->Poll();
  EXPECT_TRUE(side->in_error);
}

TEST_F(RcResponderTest, AtomicsOlderThanTheReplayQueueAreDropped) {
  RcOptions options;
  options.max_rd_atomic = 2;
  Reset(options);
  for (int i = 0; i < 3; ++i) {
    Send(kRcFetchAdd);
    side->CommitAll(now);
    EXPECT_THAT(Answers(), SizeIs(1));
  }
  SendAt(kFirst, kRcFetchAdd);
  EXPECT_THAT(Answers(), IsEmpty());
  SendAt(kFirst + 1, kRcFetchAdd);
  EXPECT_THAT(Answers(), SizeIs(1));
  SendAt(kFirst + 2, kRcCompareSwap);  // not the request that was executed
  EXPECT_THAT(Answers(), IsEmpty());
  EXPECT_EQ(side->memory.atomics_executed(), 3u);
}

TEST_F(RcResponderTest, DuplicateAtomicDoesNotOvertakeItsExecution) {
  Send(kRcFetchAdd);
  SendAt(kFirst, kRcFetchAdd);
  EXPECT_THAT(Answers(), IsEmpty());
  side->CommitAll(now);
  EXPECT_THAT(Answers(), SizeIs(1));
}

TEST_F(RcResponderTest, SendWithInvalidateOfAWrongKeyFailsWithoutAnAnswer) {
  PostReceive(100);
  PostReceive(100);
  Send(kRcSendOnlyInv, 8, 0, kKey);  // not one that may be invalidated
  EXPECT_THAT(Answers(), IsEmpty());
  EXPECT_TRUE(side->responder.failed());
  side->Poll();
  ASSERT_THAT(side->recv_completions, SizeIs(2));
  EXPECT_NE(side->recv_completions[0].status, WcStatus::kSuccess);
  EXPECT_NE(side->recv_completions[0].status, WcStatus::kWrFlushErr);
  EXPECT_EQ(side->recv_completions[1].status, WcStatus::kWrFlushErr);
}

TEST_F(RcResponderTest, UnusableReceiveGivesRemoteOperational) {
  side->receive_queue.Post(1, {}, true);
  Send(kRcSendOnly, 8);
  EXPECT_EQ(OnlySyndrome(kFirst), kOperational);
  side->Poll();
  ASSERT_THAT(side->recv_completions, SizeIs(1));
  EXPECT_EQ(side->recv_completions[0].status, WcStatus::kLocProtErr);
}

TEST_F(RcResponderTest, ReceiveWithABadKeyGivesRemoteOperational) {
  PostReceive(100, kNoKey);
  Send(kRcSendOnly, 8);
  EXPECT_EQ(OnlySyndrome(kFirst), kOperational);
  side->Poll();
  ASSERT_THAT(side->recv_completions, SizeIs(1));
  EXPECT_EQ(side->recv_completions[0].status, WcStatus::kLocProtErr);
}

TEST_F(RcResponderTest, LateFailureOfAReceiveNaksItsFirstPacketNotPlaced) {
  side->memory.set_deferred(true);
  PostReceive(100);
  PostReceive(1000);
  PostReceive(100);
  PostReceive(100);
  Send(kRcSendOnly, 8);
  Send(kRcSendFirst, kMtu);
  Send(kRcSendLast, 8);
  Send(kRcSendOnly, 8);
  side->Commit(now);
  side->Commit(now);
  side->Commit(now, true);  // the LAST
  const auto answers = Answers();
  ASSERT_FALSE(answers.empty());
  EXPECT_THAT(ViewOf(answers.back()), testing::IsPacket(kRcAcknowledge, kFirst + 2));
  EXPECT_EQ(ViewOf(answers.back()).aeth().syndrome, kOperational);
  EXPECT_EQ(ViewOf(answers.back()).aeth().msn, Msn(1));
  side->Poll();
  ASSERT_THAT(side->recv_completions, SizeIs(4));
  EXPECT_EQ(side->recv_completions[0].status, WcStatus::kSuccess);
  EXPECT_EQ(side->recv_completions[1].status, WcStatus::kLocProtErr);
  EXPECT_EQ(side->recv_completions[2].status, WcStatus::kWrFlushErr);
  EXPECT_EQ(side->recv_completions[3].status, WcStatus::kWrFlushErr);
}

TEST_F(RcResponderTest, LateFailureInsideAMessage) {
  side->memory.set_deferred(true);
  PostReceive(1000);
  Send(kRcSendFirst, kMtu);
  Send(kRcSendMiddle, kMtu);
  side->Commit(now, true);
  EXPECT_EQ(OnlySyndrome(kFirst), kOperational);
  side->Poll();
  ASSERT_THAT(side->recv_completions, SizeIs(1));
  EXPECT_EQ(side->recv_completions[0].status, WcStatus::kLocProtErr);
}

TEST_F(RcResponderTest, LateFailureOfAWrite) {
  side->memory.set_deferred(true);
  PostReceive(100);
  Send(kRcWriteOnly, 8, 8);
  Send(kRcWriteOnly, 8, 8);
  Send(kRcReadRequest, 0, 8);
  Send(kRcSendOnly, 8);
  side->Commit(now);
  side->Commit(now, true);
  const auto answers = Answers();
  ASSERT_FALSE(answers.empty());
  EXPECT_THAT(ViewOf(answers.back()), testing::IsPacket(kRcAcknowledge, kFirst + 1));
  EXPECT_EQ(ViewOf(answers.back()).aeth().syndrome, kOperational);
  EXPECT_EQ(ViewOf(answers.back()).aeth().msn, Msn(1)) << "what was not placed does not count";
  for (const Frame& answer : answers) EXPECT_FALSE(ViewOf(answer).traits().is_read_response());
  side->Poll();
  ASSERT_THAT(side->recv_completions, SizeIs(1));
  EXPECT_EQ(side->recv_completions[0].status, WcStatus::kWrFlushErr);
  EXPECT_THAT(side->events, ElementsAre(AsyncEventType::kCommEst, kAccessErr));
}

// The receive was taken after the WRITE: it is not its buffer that failed.
TEST_F(RcResponderTest, LateFailureOfAWriteBeforeAMessageThatDoesNotFit) {
  side->memory.set_deferred(true);
  PostReceive(4);
  Send(kRcWriteOnly, 8, 8);
  Send(kRcSendOnly, 8);
  side->Commit(now, true);
  EXPECT_EQ(OnlySyndrome(kFirst), kOperational);
  side->Poll();
  ASSERT_THAT(side->recv_completions, SizeIs(1));
  EXPECT_EQ(side->recv_completions[0].status, WcStatus::kWrFlushErr);
  EXPECT_THAT(side->events, ::testing::Contains(kAccessErr));
}

TEST_F(RcResponderTest, UnmappedPageUnderARead) {
  side->memory.AddRegion(0x500, 0, 4096);
  Send(kRcReadRequest, 0, 1000, 0x500, 0);
  side->memory.Unmap(0x500);
  EXPECT_EQ(OnlySyndrome(kFirst), kOperational);
  EXPECT_TRUE(side->responder.failed());
}

TEST_F(RcResponderTest, KeyThatVanishesUnderARead) {
  side->memory.AddRegion(0x500, 0, 4096);
  Send(kRcReadRequest, 0, 1000, 0x500, 0);
  TxPacket packet;
  ASSERT_TRUE(side->responder.PollTransmit(now, &packet));  // the first goes out
  side->memory.RemoveRegion(0x500);
  EXPECT_EQ(OnlySyndrome(kFirst + 1), kAccess);
}

TEST_F(RcResponderTest, FlushCompletesTheReceiveInProgressFirst) {
  PostReceive(1000);
  PostReceive(1000);
  Send(kRcSendFirst, kMtu);
  side->ModifyToError();
  side->Poll();
  ASSERT_THAT(side->recv_completions, SizeIs(2));
  EXPECT_EQ(side->recv_completions[0].wr_id, 1u);
  EXPECT_EQ(side->recv_completions[0].status, WcStatus::kWrFlushErr);
  EXPECT_EQ(side->recv_completions[1].wr_id, 2u);
  // A receive that is posted in the error state is flushed too.
  PostReceive(1000);
  side->Poll();
  EXPECT_THAT(side->recv_completions, SizeIs(3));
}

TEST_F(RcResponderTest, FlushKeepsTheNakAndNothingElse) {
  Send(kRcReadRequest, 0, 1000);  // four PSNs
  SendAt(kFirst + 4, kRcWriteOnly, 8, 8, kNoKey);
  side->responder.Flush();
  EXPECT_EQ(OnlySyndrome(kFirst + 4), kAccess);
}

TEST_F(RcResponderTest, FlushWaitsForPlacementsIntoTheReceive) {
  side->memory.set_deferred(true);
  PostReceive(1000);
  Send(kRcSendFirst, kMtu);
  side->ModifyToError();
  side->Poll();
  EXPECT_THAT(side->recv_completions, IsEmpty());
  side->CommitAll(now);
  side->Poll();
  EXPECT_THAT(side->recv_completions, SizeIs(1));
}

TEST_F(RcResponderTest, AFullQueueDropsPackets) {
  side->memory.set_deferred(true);
  ack_request = true;
  // Nobody polls completions: they pile up.
  for (int i = 0; i < 600; ++i) PostReceive(100);
  for (int i = 0; i < 600; ++i) Send(kRcSendOnly, 4);
  EXPECT_GT(side->responder.counters().dropped, 0u);
  side->CommitAll(now);
  side->Poll();
  EXPECT_GE(side->recv_completions.size(), 500u);
  EXPECT_EQ(side->responder.expected_psn(),
            kFirst + static_cast<uint32_t>(side->recv_completions.size()));
}

}  // namespace
}  // namespace verbena::transport
