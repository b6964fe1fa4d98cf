// SPDX-License-Identifier: Apache-2.0
//
// The RC requester against single responses: which status each NAK gives, the
// retry counters, timers, go-back-N, ghosts, responses that are not as they
// should be, local errors, flush.
#include "transport/rc/requester.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/testing/frames.h"
#include "tests/testing/packet_matchers.h"
#include "tests/testing/rc_pair.h"

namespace verbena::transport {
namespace {

using testing::Frame;
using ::testing::IsEmpty;
using testing::RcOptions;
using testing::RcSide;
using ::testing::SizeIs;
using testing::ViewOf;
using enum Opcode;

constexpr uint32_t kKey = 0x101;
constexpr uint64_t kBase = 0x10000;
constexpr size_t kRegion = 1 << 16;
constexpr uint32_t kMtu = 256;
constexpr uint8_t kAck = 0x1f;
constexpr uint8_t kSequenceNak = 0x60;
const Psn kFirst(0xfffffe);

class RcRequesterTest : public ::testing::Test {
 protected:
  RcRequesterTest() { Reset(RcOptions{}); }

  void Reset(const RcOptions& options) {
    side = std::make_unique<RcSide>(options);
    side->memory.AddRegion(kKey, kBase, kRegion);
    last_wr_id = 0;
  }

  void Post(WrOpcode opcode, uint32_t bytes, bool signaled = true, uint32_t key = kKey,
            uint64_t address = kBase) {
    const MemorySegment sge{address, bytes, key};
    SendRequest request;
    request.wr_id = ++last_wr_id;
    request.opcode = opcode;
    request.signaled = signaled;
    request.rkey = 0x777;
    request.remote_address = 0x5000;
    request.sges = {&sge, 1};
    side->requester.Post(request, now);
  }

  std::vector<Frame> Sent() { return side->Transmit(now); }

  void Respond(Opcode opcode, Psn psn, uint8_t syndrome = kAck, size_t bytes = 0) {
    TransportHeaders headers;
    headers.bth.opcode = opcode;
    headers.bth.psn = psn;
    headers.aeth = {syndrome, Msn(1)};
    headers.atomic_ack_eth = {42};
    side->Deliver(
        testing::BuildFrame(testing::Ipv4Address(), headers, testing::CountingBytes(bytes)), now);
    side->CommitAll(now);
    side->Poll();
  }
  void Acknowledge(Psn psn, uint8_t syndrome = kAck) { Respond(kRcAcknowledge, psn, syndrome); }

  void FireTimer() {
    ASSERT_FALSE(side->requester.next_timeout().IsNever());
    now = side->requester.next_timeout();
    side->requester.HandleTimeout(now);
    side->Poll();
  }

  WcStatus LastStatus() const {
    return side->send_completions.empty() ? WcStatus::kSuccess
                                          : side->send_completions.back().status;
  }
  std::vector<WcStatus> Statuses() const {
    std::vector<WcStatus> statuses;
    for (const Completion& c : side->send_completions) statuses.push_back(c.status);
    return statuses;
  }

  std::unique_ptr<RcSide> side;
  uint64_t last_wr_id = 0;
  Time now = Time::FromNanoseconds(1'000'000);
};

struct NakCase {
  const char* name;
  uint8_t syndrome;
  WcStatus status;
};
void PrintTo(const NakCase& c, std::ostream* out) { *out << c.name; }

class RcNakTest : public RcRequesterTest, public ::testing::WithParamInterface<NakCase> {};

INSTANTIATE_TEST_SUITE_P(
    Table, RcNakTest,
    ::testing::Values(NakCase{"invalid_request", 0x61, WcStatus::kRemInvReqErr},
                      NakCase{"remote_access", 0x62, WcStatus::kRemAccessErr},
                      NakCase{"remote_operational", 0x63, WcStatus::kRemOpErr},
                      NakCase{"reserved_nak_code", 0x6f, WcStatus::kBadRespErr},
                      NakCase{"reserved_kind", 0x40, WcStatus::kBadRespErr}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(RcNakTest, FailsItsWorkRequestAfterTheEarlierOnes) {
  Post(WrOpcode::kRdmaWrite, 8);
  Post(WrOpcode::kRdmaWrite, 8, false);
  Post(WrOpcode::kRdmaWrite, 8, false);  // fails although unsignalled
  Post(WrOpcode::kRdmaWrite, 8, false);  // flushed although unsignalled
  Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  Acknowledge(kFirst + 2, GetParam().syndrome);
  EXPECT_EQ(Statuses(), (std::vector{WcStatus::kSuccess, GetParam().status, WcStatus::kWrFlushErr,
                                     WcStatus::kWrFlushErr}));
  EXPECT_EQ(side->send_completions[1].wr_id, 3u);
  EXPECT_EQ(side->send_completions[1].vendor_err, GetParam().syndrome);
  EXPECT_TRUE(side->requester.failed());
  EXPECT_THAT(Sent(), IsEmpty());
}

TEST_F(RcRequesterTest, AckAcknowledgesAllBeforeIt) {
  for (int i = 0; i < 5; ++i) Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  Acknowledge(kFirst + 3);
  EXPECT_THAT(side->send_completions, SizeIs(4));
  EXPECT_EQ(side->requester.una_psn(), kFirst + 4);
}

TEST_F(RcRequesterTest, GhostsAreIgnored) {
  Post(WrOpcode::kRdmaWrite, 8);
  Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  Acknowledge(kFirst);
  Acknowledge(kFirst);        // repeated
  Acknowledge(kFirst - 1);    // before everything
  Acknowledge(kFirst + 2);    // not sent yet
  Acknowledge(kFirst, 0x61);  // a NAK of the past
  Acknowledge(kFirst + 2, kSequenceNak);
  Acknowledge(kFirst + 1000, 0x62);
  Respond(kRcReadResponseOnly, kFirst, kAck, 8);
  Respond(kRcAtomicAcknowledge, kFirst - 5);
  EXPECT_THAT(side->send_completions, SizeIs(1));
  EXPECT_FALSE(side->requester.failed());
  EXPECT_EQ(side->requester.counters().dropped, 8u);
  EXPECT_THAT(Sent(), IsEmpty());
  Acknowledge(kFirst + 1);
  EXPECT_THAT(side->send_completions, SizeIs(2));
}

TEST_F(RcRequesterTest, SequenceNakSendsAgainFromThere) {
  for (int i = 0; i < 4; ++i) Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  Acknowledge(kFirst + 2, kSequenceNak);
  EXPECT_THAT(side->send_completions, SizeIs(2));
  const auto again = Sent();
  ASSERT_THAT(again, SizeIs(2));
  EXPECT_THAT(ViewOf(again[0]), testing::IsPacket(kRcWriteOnly, kFirst + 2));
  EXPECT_EQ(side->requester.counters().rcvd_seq_err, 1u);
}

TEST_F(RcRequesterTest, GoBackResumesInTheMiddleOfAMessage) {
  const MemorySegment sges[] = {
      {kBase, 300, kKey}, {kBase + 1000, 0, kKey}, {kBase + 2000, 700, kKey}};
  auto bytes = side->memory.Bytes(kKey);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 3 / 7);
  SendRequest request;
  request.opcode = WrOpcode::kRdmaWrite;
  request.sges = sges;
  side->requester.Post(request, now);
  const auto first = Sent();
  ASSERT_THAT(first, SizeIs(4));
  for (uint32_t from = 0; from < 4; ++from) {
    Acknowledge(kFirst + from, kSequenceNak);
    const auto again = Sent();
    ASSERT_THAT(again, SizeIs(4 - from));
    for (size_t i = 0; i < again.size(); ++i) EXPECT_EQ(again[i], first[from + i]);
  }
}

TEST_F(RcRequesterTest, RepeatedSequenceNakSendsOnce) {
  for (int i = 0; i < 3; ++i) Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  Acknowledge(kFirst + 1, kSequenceNak);
  Acknowledge(kFirst + 1, kSequenceNak);
  EXPECT_EQ(side->requester.counters().completer_retry_err, 1u);
  EXPECT_THAT(Sent(), SizeIs(2));
}

class RcRetryTest : public RcRequesterTest, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(RetryCount, RcRetryTest, ::testing::Values(0, 1, 3, 7));

TEST_P(RcRetryTest, TimeoutsBeyondRetryCntFail) {
  RcOptions options;
  options.retry_cnt = static_cast<uint8_t>(GetParam());
  options.timeout = 8;
  Reset(options);
  Post(WrOpcode::kRdmaWrite, 8);
  const Time start = now;
  for (int i = 0; i <= GetParam(); ++i) {
    ASSERT_THAT(Sent(), SizeIs(1)) << i;
    EXPECT_THAT(side->send_completions, IsEmpty());
    EXPECT_EQ((side->requester.next_timeout() - now).ns(), 4096 << 8);
    FireTimer();
  }
  EXPECT_EQ(LastStatus(), WcStatus::kRetryExcErr);
  EXPECT_EQ((now - start).ns(), (4096 << 8) * (GetParam() + 1));
  EXPECT_TRUE(side->requester.next_timeout().IsNever());
  EXPECT_EQ(side->requester.counters().retry_exceeded_err, 1u);
}

TEST_P(RcRetryTest, SequenceNaksBeyondRetryCntFail) {
  RcOptions options;
  options.retry_cnt = static_cast<uint8_t>(GetParam());
  Reset(options);
  Post(WrOpcode::kRdmaWrite, 8);
  Post(WrOpcode::kRdmaWrite, 8);
  for (int i = 0; i <= GetParam(); ++i) {
    EXPECT_THAT(side->send_completions, IsEmpty());
    ASSERT_THAT(Sent(), SizeIs(2));
    Acknowledge(kFirst, kSequenceNak);
  }
  EXPECT_EQ(Statuses(), (std::vector{WcStatus::kRetryExcErr, WcStatus::kWrFlushErr}));
}

TEST_P(RcRetryTest, RnrNaksBeyondRnrRetryFail) {
  RcOptions options;
  options.rnr_retry = static_cast<uint8_t>(GetParam());
  Reset(options);
  Post(WrOpcode::kSend, 8);
  const int rounds = GetParam() == 7 ? 100 : GetParam();  // 7 is for ever
  for (int i = 0; i < rounds; ++i) {
    ASSERT_THAT(Sent(), SizeIs(1));
    Acknowledge(kFirst, 0x20 | 1);
    EXPECT_THAT(Sent(), IsEmpty());
    FireTimer();
    EXPECT_THAT(side->send_completions, IsEmpty());
  }
  ASSERT_THAT(Sent(), SizeIs(1));
  Acknowledge(kFirst, 0x20 | 1);
  if (GetParam() == 7) {
    EXPECT_THAT(side->send_completions, IsEmpty());
  } else {
    EXPECT_EQ(LastStatus(), WcStatus::kRnrRetryExcErr);
  }
}

// It waits for the READ before it, whose data is not visible yet.
TEST_F(RcRequesterTest, FailedWorkRequestDoesNotFailAgain) {
  for (const uint8_t syndrome : {kSequenceNak, uint8_t{0x20 | 1}}) {
    RcOptions options;
    options.retry_cnt = options.rnr_retry = 0;
    Reset(options);
    side->memory.set_deferred(true);
    const auto respond = [&](Opcode opcode, Psn psn, uint8_t aeth, size_t bytes) {
      TransportHeaders headers;
      headers.bth.opcode = opcode;
      headers.bth.psn = psn;
      headers.aeth = {aeth, Msn(1)};
      side->Deliver(
          testing::BuildFrame(testing::Ipv4Address(), headers, testing::CountingBytes(bytes)), now);
    };
    Post(WrOpcode::kRdmaRead, 8);
    Post(WrOpcode::kSend, 8);
    EXPECT_THAT(Sent(), SizeIs(2));
    respond(kRcReadResponseOnly, kFirst, kAck, 8);
    for (int i = 0; i < 3; ++i) respond(kRcAcknowledge, kFirst + 1, syndrome, 0);
    const TransportCounters& counters = side->requester.counters();
    EXPECT_EQ(counters.retry_exceeded_err + counters.retry_rnr_exceeded_err, 1u);
    EXPECT_LE(counters.rcvd_rnr_err, 1u);
    EXPECT_THAT(side->send_completions, IsEmpty());
    side->CommitAll(now);
    side->Poll();
    EXPECT_THAT(Statuses(), SizeIs(2));
    EXPECT_EQ(LastStatus(),
              syndrome == kSequenceNak ? WcStatus::kRetryExcErr : WcStatus::kRnrRetryExcErr);
  }
}

// Between going back and sending again nothing is in flight.
TEST_F(RcRequesterTest, ReconfiguringDuringRetriesDoesNotRestoreThem) {
  RcOptions options;
  options.retry_cnt = 2;
  Reset(options);
  Post(WrOpcode::kRdmaWrite, 8);
  const auto reconfigure = [&](uint8_t retry_cnt) {
    side->requester.Reconfigure({.pmtu = options.pmtu,
                                 .first_psn = options.psn,
                                 .timeout = options.timeout,
                                 .retry_cnt = retry_cnt,
                                 .rnr_retry = options.rnr_retry,
                                 .max_rd_atomic = options.max_rd_atomic});
  };
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(side->send_completions, IsEmpty());
    EXPECT_THAT(Sent(), SizeIs(1));
    FireTimer();
    reconfigure(2);
  }
  EXPECT_EQ(LastStatus(), WcStatus::kRetryExcErr);
}

TEST_F(RcRequesterTest, ReconfiguringAnIdleRequesterGivesItsRetries) {
  RcOptions options;
  options.retry_cnt = 0;
  Reset(options);
  side->requester.Reconfigure({.pmtu = options.pmtu,
                               .first_psn = options.psn,
                               .timeout = options.timeout,
                               .retry_cnt = 1,
                               .rnr_retry = options.rnr_retry,
                               .max_rd_atomic = options.max_rd_atomic});
  Post(WrOpcode::kRdmaWrite, 8);
  EXPECT_THAT(Sent(), SizeIs(1));
  FireTimer();
  EXPECT_THAT(side->send_completions, IsEmpty());
  EXPECT_THAT(Sent(), SizeIs(1));
}

TEST_F(RcRequesterTest, ProgressRestoresTheRetries) {
  RcOptions options;
  options.retry_cnt = 1;
  Reset(options);
  Post(WrOpcode::kRdmaWrite, 8);
  Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  FireTimer();
  Sent();
  Acknowledge(kFirst);
  FireTimer();
  EXPECT_FALSE(side->requester.failed());
  EXPECT_THAT(Sent(), SizeIs(1));
}

TEST_F(RcRequesterTest, ProgressRestartsTheTimer) {
  Post(WrOpcode::kRdmaWrite, 8);
  Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  const Time deadline = side->requester.next_timeout();
  now += Duration::Microseconds(700);
  Acknowledge(kFirst);
  EXPECT_EQ(side->requester.next_timeout(), deadline + Duration::Microseconds(700));
  Acknowledge(kFirst + 1);
  EXPECT_TRUE(side->requester.next_timeout().IsNever());
}

TEST_F(RcRequesterTest, TimeoutCodeZeroIsNever) {
  RcOptions options;
  options.timeout = 0;
  Reset(options);
  Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  EXPECT_TRUE(side->requester.next_timeout().IsNever());
}

TEST_F(RcRequesterTest, RnrWaitIsTheTimersAndNotShortened) {
  // Code, wait in microseconds: a few rows of the specification's table.
  const std::pair<uint8_t, int64_t> kRows[] = {
      {0, 655360}, {1, 10}, {12, 640}, {14, 1280}, {31, 491520}};
  for (const auto& [code, us] : kRows) {
    Reset(RcOptions{});
    Post(WrOpcode::kSend, 8);
    Post(WrOpcode::kSend, 8);
    Sent();
    Acknowledge(kFirst, static_cast<uint8_t>(0x20 | code));
    const Time until = now + Duration::Microseconds(us);
    EXPECT_EQ(side->requester.next_timeout(), until) << int{code};
    now += Duration::Microseconds(us / 2);
    Acknowledge(kFirst, kSequenceNak);  // of the packet behind
    Acknowledge(kFirst, static_cast<uint8_t>(0x20 | code));
    EXPECT_THAT(Sent(), IsEmpty());
    EXPECT_EQ(side->requester.next_timeout(), until);
    EXPECT_EQ(side->requester.counters().rcvd_rnr_err, 1u);
    FireTimer();
    EXPECT_THAT(Sent(), SizeIs(2));
  }
}

TEST_F(RcRequesterTest, ShiftMovesTheDeadlines) {
  Post(WrOpcode::kSend, 8);
  Sent();
  const Time deadline = side->requester.next_timeout();
  side->requester.ShiftDeadlines(Duration::Milliseconds(50));
  EXPECT_EQ(side->requester.next_timeout(), deadline + Duration::Milliseconds(50));
}

TEST_F(RcRequesterTest, ReadResponsesAcknowledgeWhatIsBefore) {
  Post(WrOpcode::kRdmaWrite, 8);
  Post(WrOpcode::kRdmaRead, 8);
  Sent();
  Respond(kRcReadResponseOnly, kFirst + 1, kAck, 8);
  EXPECT_EQ(Statuses(), (std::vector{WcStatus::kSuccess, WcStatus::kSuccess}));
}

TEST_F(RcRequesterTest, PlainAckDoesNotCompleteARead) {
  Post(WrOpcode::kRdmaRead, 8);
  Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  Acknowledge(kFirst + 1);
  EXPECT_THAT(side->send_completions, IsEmpty());
  // Its response is missing: asked for again, once.
  const auto again = Sent();
  ASSERT_THAT(again, SizeIs(2));
  EXPECT_THAT(ViewOf(again[0]), testing::IsPacket(kRcReadRequest, kFirst));
  Acknowledge(kFirst + 1);
  EXPECT_THAT(Sent(), IsEmpty());
  Respond(kRcReadResponseOnly, kFirst, kAck, 8);
  EXPECT_THAT(side->send_completions, SizeIs(1));
  Acknowledge(kFirst + 1);
  EXPECT_THAT(side->send_completions, SizeIs(2));
}

TEST_F(RcRequesterTest, LostReadResponseIsAskedForWithAddressAndLengthAdvanced) {
  Post(WrOpcode::kRdmaRead, 1000);
  Sent();
  Respond(kRcReadResponseFirst, kFirst, kAck, kMtu);
  FireTimer();
  const auto again = Sent();
  ASSERT_THAT(again, SizeIs(1));
  EXPECT_THAT(ViewOf(again[0]), testing::IsPacket(kRcReadRequest, kFirst + 1));
  EXPECT_EQ(ViewOf(again[0]).reth().va, 0x5000u + kMtu);
  EXPECT_EQ(ViewOf(again[0]).reth().dma_length, 1000 - kMtu);
  Respond(kRcReadResponseFirst, kFirst + 1, kAck, kMtu);
  Respond(kRcReadResponseMiddle, kFirst + 2, kAck, kMtu);
  Respond(kRcReadResponseLast, kFirst + 3, kAck, 1000 - 3 * kMtu);
  EXPECT_EQ(Statuses(), std::vector{WcStatus::kSuccess});
}

TEST_F(RcRequesterTest, ResumedReadStreamOfRxeIsTaken) {
  Post(WrOpcode::kRdmaRead, 1000);
  Sent();
  Respond(kRcReadResponseFirst, kFirst, kAck, kMtu);
  FireTimer();
  Sent();
  Respond(kRcReadResponseMiddle, kFirst + 1, kAck, kMtu);
  Respond(kRcReadResponseMiddle, kFirst + 2, kAck, kMtu);
  FireTimer();
  Sent();
  Respond(kRcReadResponseLast, kFirst + 3, kAck, 1000 - 3 * kMtu);
  EXPECT_EQ(Statuses(), std::vector{WcStatus::kSuccess});
}

struct BadResponseCase {
  const char* name;
  WrOpcode opcode;
  uint32_t bytes;
  Opcode response;
  size_t payload;
  uint8_t syndrome = kAck;
  bool after_first = false;  // a correct FIRST comes before
};
void PrintTo(const BadResponseCase& c, std::ostream* out) { *out << c.name; }

const BadResponseCase kBadResponses[] = {
    {"read_response_to_a_write", WrOpcode::kRdmaWrite, 8, kRcReadResponseOnly, 8},
    {"atomic_response_to_a_write", WrOpcode::kRdmaWrite, 8, kRcAtomicAcknowledge, 0},
    {"atomic_response_to_a_read", WrOpcode::kRdmaRead, 8, kRcAtomicAcknowledge, 0},
    {"read_response_to_an_atomic", WrOpcode::kFetchAdd, 8, kRcReadResponseOnly, 8},
    {"only_too_short", WrOpcode::kRdmaRead, 8, kRcReadResponseOnly, 7},
    {"only_too_long", WrOpcode::kRdmaRead, 8, kRcReadResponseOnly, 9},
    {"first_for_one_packet", WrOpcode::kRdmaRead, 8, kRcReadResponseFirst, 8},
    {"only_for_two_packets", WrOpcode::kRdmaRead, 300, kRcReadResponseOnly, 256},
    {"middle_first", WrOpcode::kRdmaRead, 600, kRcReadResponseMiddle, 256},
    {"last_first", WrOpcode::kRdmaRead, 8, kRcReadResponseLast, 8},
    {"first_short", WrOpcode::kRdmaRead, 600, kRcReadResponseFirst, 255},
    {"first_with_a_nak_syndrome", WrOpcode::kRdmaRead, 600, kRcReadResponseFirst, 256, 0x62},
    {"first_again", WrOpcode::kRdmaRead, 600, kRcReadResponseFirst, 256, kAck, true},
    {"last_too_early", WrOpcode::kRdmaRead, 600, kRcReadResponseLast, 256, kAck, true},
    {"last_too_short", WrOpcode::kRdmaRead, 300, kRcReadResponseLast, 43, kAck, true},
    {"middle_too_late", WrOpcode::kRdmaRead, 300, kRcReadResponseMiddle, 44, kAck, true},
    {"atomic_with_a_nak_syndrome", WrOpcode::kFetchAdd, 8, kRcAtomicAcknowledge, 0, 0x61},
};

class RcBadResponseTest : public RcRequesterTest,
                          public ::testing::WithParamInterface<BadResponseCase> {};
INSTANTIATE_TEST_SUITE_P(Table, RcBadResponseTest, ::testing::ValuesIn(kBadResponses),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(RcBadResponseTest, IsABadResponseError) {
  const BadResponseCase& c = GetParam();
  Post(c.opcode, c.bytes);
  Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  Psn psn = kFirst;
  if (c.after_first) {
    Respond(kRcReadResponseFirst, psn, kAck, kMtu);
    psn = psn.Next();
  }
  Respond(c.response, psn, c.syndrome, c.payload);
  EXPECT_EQ(Statuses(), (std::vector{WcStatus::kBadRespErr, WcStatus::kWrFlushErr}));
  EXPECT_TRUE(side->memory.AreGuardsIntact());
}

struct LocalErrorCase {
  const char* name;
  WrOpcode opcode;
  uint32_t bytes;
  uint32_t key;
  uint64_t address;
  WcStatus status;
};
void PrintTo(const LocalErrorCase& c, std::ostream* out) { *out << c.name; }

const LocalErrorCase kLocalErrors[] = {
    {"send_bad_lkey", WrOpcode::kSend, 8, 0x999, kBase, WcStatus::kLocProtErr},
    {"write_out_of_bounds", WrOpcode::kRdmaWrite, 9, kKey, kBase + kRegion - 8,
     WcStatus::kLocProtErr},
    {"read_into_bad_lkey", WrOpcode::kRdmaRead, 8, 0x999, kBase, WcStatus::kLocProtErr},
    {"read_without_local_write", WrOpcode::kRdmaRead, 8, 0x500, 0, WcStatus::kLocProtErr},
    {"atomic_without_local_write", WrOpcode::kFetchAdd, 8, 0x500, 0, WcStatus::kLocProtErr},
    {"send_from_unmapped_page", WrOpcode::kSend, 8, 0x501, 0, WcStatus::kLocProtErr},
    {"atomic_result_too_small", WrOpcode::kFetchAdd, 4, kKey, kBase, WcStatus::kLocLenErr},
    {"message_over_two_gibibytes", WrOpcode::kSend, 0x80000001, kKey, kBase, WcStatus::kLocLenErr},
    {"bind_of_an_unknown_window", WrOpcode::kBindMw, 0, kKey, kBase, WcStatus::kMwBindErr},
    {"local_invalidate_of_a_wrong_key", WrOpcode::kLocalInv, 0, kKey, kBase, WcStatus::kLocQpOpErr},
};

class RcLocalErrorTest : public RcRequesterTest,
                         public ::testing::WithParamInterface<LocalErrorCase> {};
INSTANTIATE_TEST_SUITE_P(Table, RcLocalErrorTest, ::testing::ValuesIn(kLocalErrors),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(RcLocalErrorTest, CompletesInItsTurn) {
  const LocalErrorCase& c = GetParam();
  side->memory.AddRegion(0x500, 0, 64, kAccessRemoteRead);  // no LOCAL_WRITE
  side->memory.AddRegion(0x501, 0, 64);
  side->memory.Unmap(0x501);
  Post(WrOpcode::kRdmaWrite, 8);
  Post(c.opcode, c.bytes, false, c.key, c.address);
  Post(WrOpcode::kRdmaWrite, 8);
  ASSERT_THAT(Sent(), SizeIs(1));  // only what comes before
  side->Poll();
  EXPECT_THAT(side->send_completions, IsEmpty());
  Acknowledge(kFirst);
  Sent();
  side->Poll();
  EXPECT_EQ(Statuses(), (std::vector{WcStatus::kSuccess, c.status, WcStatus::kWrFlushErr}));
  EXPECT_THAT(Sent(), IsEmpty());
}

TEST_F(RcRequesterTest, MalformedWqeCompletesInItsTurn) {
  Post(WrOpcode::kRdmaWrite, 8);
  SendRequest request;
  request.wr_id = 9;
  request.malformed = WcStatus::kLocQpOpErr;
  side->requester.Post(request, now);
  EXPECT_THAT(Sent(), SizeIs(1));
  Acknowledge(kFirst);
  EXPECT_EQ(Statuses(), (std::vector{WcStatus::kSuccess, WcStatus::kLocQpOpErr}));
  EXPECT_EQ(side->send_completions[1].wr_id, 9u);
}

TEST_F(RcRequesterTest, LocalInvalidateNeedsNoPacket) {
  side->memory.AddRegion(0x404, 0, 64);
  side->memory.AllowInvalidate(0x404);
  SendRequest request;
  request.wr_id = 1;
  request.opcode = WrOpcode::kLocalInv;
  request.signaled = true;
  request.imm_or_inv = 0x404;
  side->requester.Drain();
  side->requester.Post(request, now);
  side->Poll();
  EXPECT_THAT(side->send_completions, IsEmpty());
  side->requester.Resume();
  side->Poll();
  EXPECT_EQ(Statuses(), std::vector{WcStatus::kSuccess});
  request.wr_id = 2;  // the key is gone
  side->requester.Post(request, now);
  side->Poll();
  EXPECT_EQ(LastStatus(), WcStatus::kLocQpOpErr);
}

TEST_F(RcRequesterTest, ReadsAreNotAllowedWithMaxRdAtomicZero) {
  RcOptions options;
  options.max_rd_atomic = 0;
  Reset(options);
  Post(WrOpcode::kRdmaRead, 8);
  EXPECT_THAT(Sent(), IsEmpty());
  side->Poll();
  EXPECT_EQ(LastStatus(), WcStatus::kLocQpOpErr);
}

TEST_F(RcRequesterTest, FetchFailureInTheMiddleOfAMessage) {
  const MemorySegment sges[] = {{kBase, 300, kKey}, {kBase, 300, 0x999}};
  SendRequest request;
  request.opcode = WrOpcode::kRdmaWrite;
  request.sges = sges;
  side->requester.Post(request, now);
  EXPECT_THAT(Sent(), SizeIs(1));
  side->Poll();
  EXPECT_EQ(LastStatus(), WcStatus::kLocProtErr);
}

TEST_F(RcRequesterTest, LateFailureOfReadData) {
  side->memory.set_deferred(true);
  Post(WrOpcode::kRdmaRead, 8);
  Post(WrOpcode::kRdmaRead, 300);
  Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  const auto respond = [this](Opcode opcode, Psn psn, size_t bytes) {
    TransportHeaders headers;
    headers.bth.opcode = opcode;
    headers.bth.psn = psn;
    headers.aeth = {kAck, Msn(1)};
    side->Deliver(
        testing::BuildFrame(testing::Ipv4Address(), headers, testing::CountingBytes(bytes)), now);
  };
  respond(kRcReadResponseOnly, kFirst, 8);
  respond(kRcReadResponseFirst, kFirst + 1, kMtu);
  respond(kRcReadResponseLast, kFirst + 2, 44);
  side->Commit(now);
  side->Commit(now);
  side->Commit(now, true);
  side->Poll();
  EXPECT_EQ(Statuses(),
            (std::vector{WcStatus::kSuccess, WcStatus::kLocProtErr, WcStatus::kWrFlushErr}));
}

TEST_F(RcRequesterTest, FlushCompletesEverythingInOrder) {
  Post(WrOpcode::kRdmaWrite, 8);
  Post(WrOpcode::kRdmaWrite, 8);
  Post(WrOpcode::kRdmaRead, 8, false);
  Sent();
  Acknowledge(kFirst);
  side->ModifyToError();
  side->Poll();
  EXPECT_EQ(Statuses(),
            (std::vector{WcStatus::kSuccess, WcStatus::kWrFlushErr, WcStatus::kWrFlushErr}));
  EXPECT_THAT(Sent(), IsEmpty());
  Post(WrOpcode::kSend, 8);  // posted in the error state
  side->Poll();
  EXPECT_THAT(side->send_completions, SizeIs(4));
  EXPECT_EQ(LastStatus(), WcStatus::kWrFlushErr);
  EXPECT_TRUE(side->requester.next_timeout().IsNever());
}

TEST_F(RcRequesterTest, FlushWaitsForReadDataUnderWay) {
  side->memory.set_deferred(true);
  Post(WrOpcode::kRdmaRead, 300);
  Sent();
  TransportHeaders headers;
  headers.bth.opcode = kRcReadResponseFirst;
  headers.bth.psn = kFirst;
  headers.aeth = {kAck, Msn(1)};
  side->Deliver(testing::BuildFrame(testing::Ipv4Address(), headers, testing::CountingBytes(kMtu)),
                now);
  side->ModifyToError();
  side->Poll();
  EXPECT_THAT(side->send_completions, IsEmpty());
  side->CommitAll(now);
  side->Poll();
  EXPECT_EQ(LastStatus(), WcStatus::kWrFlushErr);
}

TEST_F(RcRequesterTest, StartForgetsWhatWasBefore) {
  Post(WrOpcode::kRdmaWrite, 8);
  Sent();
  side->requester.Reset();
  EXPECT_EQ(side->requester.outstanding(), 0u);
  side->requester.Start({.pmtu = Pmtu::k512, .first_psn = Psn(77)});
  Post(WrOpcode::kRdmaWrite, 600);
  const auto frames = Sent();
  ASSERT_THAT(frames, SizeIs(2));
  EXPECT_THAT(ViewOf(frames[0]), testing::IsPacket(kRcWriteFirst, Psn(77)));
  EXPECT_EQ(ViewOf(frames[0]).payload_bytes(), 512u);
}

}  // namespace
}  // namespace verbena::transport
