// SPDX-License-Identifier: Apache-2.0
//
// Both sides of the CM protocol: every message lost, repeated or late, and the
// cases that Linux' ib_cm has rules for. Times are those of Linux 6.1 (captures
// cm_loss_*, cm_req_unanswered: 6.144 s and 4.096 s, there rounded up by the
// timer wheel).
#include "transport/cm/protocol.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "tests/unit/transport/cm/protocol_pair.h"
#include "transport/base/byteorder.h"

namespace verbena::transport {
namespace {

using ::testing::ElementsAre;
using enum CmEventType;

constexpr Duration kReqTimeout = Duration::Milliseconds(6144);
constexpr Duration kRepTimeout = Duration::Milliseconds(4096);
constexpr Duration kTimewait = Duration::Milliseconds(2048);

TEST(CmTimes, AreThoseOfLinux) {
  EXPECT_EQ(CmTime(20), Duration::Milliseconds(4096));
  EXPECT_EQ(CmTime(18), Duration::Milliseconds(1024));
  EXPECT_EQ(CmTime(24), Duration::Milliseconds(65536));
  EXPECT_EQ(CmTime(0), Duration::Milliseconds(1));
  EXPECT_EQ(CmAckTimeout(15, 18), 19);  // the captures' REQ
  EXPECT_EQ(CmAckTimeout(15, 14), 16);
  EXPECT_EQ(CmAckTimeout(15, 0), 15);
  EXPECT_EQ(CmAckTimeout(31, 31), 31);
}

enum class Ending { kActiveDisconnects, kPassiveDisconnects, kBothDisconnect };

const char* EndingName(Ending ending) {
  static constexpr const char* kNames[] = {"ActiveDisconnects", "PassiveDisconnects",
                                           "BothDisconnect"};
  return kNames[static_cast<size_t>(ending)];
}

// Connects, disconnects after 10 s, runs to the end of timewait.
void RunLife(ProtocolPair& pair, Ending ending) {
  pair.Connect();
  pair.RunUntil(Time::FromNanoseconds(10'000'000'000));
  EXPECT_EQ(pair.active().state(), CmState::kEstablished);
  EXPECT_EQ(pair.passive().state(), CmState::kEstablished);
  if (ending != Ending::kPassiveDisconnects) {
    EXPECT_TRUE(pair.active().protocol.SendDreq(pair.active().id, pair.now()).ok());
  }
  if (ending != Ending::kActiveDisconnects) {
    EXPECT_TRUE(pair.passive().protocol.SendDreq(pair.passive().id, pair.now()).ok());
  }
  pair.RunFor(Duration::Seconds(30));
}

size_t Count(const ProtocolPair::Side& side, CmEventType type) {
  return static_cast<size_t>(std::count(side.events.begin(), side.events.end(), type));
}

void ExpectLifeOfBothSides(ProtocolPair& pair, Ending ending) {
  const auto& active = pair.active();
  const auto& passive = pair.passive();
  switch (ending) {
    case Ending::kActiveDisconnects:
      EXPECT_THAT(active.events, ElementsAre(kRepReceived, kDrepReceived, kTimewaitExit));
      EXPECT_THAT(passive.events,
                  ElementsAre(kReqReceived, kRtuReceived, kDreqReceived, kTimewaitExit));
      break;
    case Ending::kPassiveDisconnects:
      EXPECT_THAT(active.events, ElementsAre(kRepReceived, kDreqReceived, kTimewaitExit));
      EXPECT_THAT(passive.events,
                  ElementsAre(kReqReceived, kRtuReceived, kDrepReceived, kTimewaitExit));
      break;
    case Ending::kBothDisconnect:
      // Whichever message comes first ends it; each side hears of it once.
      for (const auto* side : {&active, &passive}) {
        EXPECT_GE(Count(*side, kDreqReceived) + Count(*side, kDrepReceived), 1u);
        EXPECT_EQ(Count(*side, kTimewaitExit), 1u);
        EXPECT_EQ(side->events.back(), kTimewaitExit);
      }
      break;
  }
  EXPECT_EQ(pair.active().state(), CmState::kIdle);
  EXPECT_EQ(pair.passive().state(), CmState::kIdle);
  EXPECT_TRUE(pair.active().protocol.next_timeout().IsNever());
  EXPECT_TRUE(pair.passive().protocol.next_timeout().IsNever());
  pair.active().protocol.Destroy(pair.active().id, pair.now());
  pair.passive().protocol.Destroy(pair.passive().id, pair.now());
  EXPECT_EQ(pair.active().protocol.connection_count(), 0u);
  EXPECT_EQ(pair.passive().protocol.connection_count(), 0u);
}

class CmLife : public ::testing::TestWithParam<Ending> {};

TEST_P(CmLife, WithoutFaults) {
  ProtocolPair pair;
  RunLife(pair, GetParam());
  ExpectLifeOfBothSides(pair, GetParam());
  EXPECT_EQ(pair.CountSeen(CmAttribute::kReq), 1u);
  EXPECT_EQ(pair.CountSeen(CmAttribute::kRep), 1u);
  EXPECT_EQ(pair.CountSeen(CmAttribute::kRtu), 1u);
  EXPECT_EQ(pair.CountSeen(CmAttribute::kMra), 0u);
}

// Every message once lost, repeated, late by less and by more than its timer.
TEST_P(CmLife, SurvivesAnyFaultOfOneMessage) {
  const Fate fates[] = {{.drop = true},
                        {.duplicate = true},
                        {.delay = Duration::Milliseconds(3000)},
                        {.delay = Duration::Milliseconds(6500)},
                        {.duplicate = true, .delay = Duration::Milliseconds(4200)}};
  ProtocolPair quiet;
  RunLife(quiet, GetParam());
  const size_t messages = quiet.seen().size();
  ASSERT_GE(messages, 5u);
  for (size_t victim = 0; victim < messages; ++victim) {
    for (size_t i = 0; i < std::size(fates); ++i) {
      SCOPED_TRACE("fate " + std::to_string(i) + " of message " + std::to_string(victim));
      ProtocolPair pair;
      pair.fate = [&](size_t number, const SeenMad&) {
        return number == victim ? fates[i] : Fate{};
      };
      RunLife(pair, GetParam());
      ExpectLifeOfBothSides(pair, GetParam());
    }
  }
}

// Two faults at once, and random ones: no rule about the order of events but
// that both sides come to the end.
TEST_P(CmLife, SurvivesLossOfAnyTwoMessages) {
  for (size_t first = 0; first < 7; ++first) {
    for (size_t second = first + 1; second < 8; ++second) {
      SCOPED_TRACE(std::to_string(first) + " and " + std::to_string(second));
      ProtocolPair pair;
      pair.fate = [&](size_t number, const SeenMad&) {
        return Fate{.drop = number == first || number == second};
      };
      pair.Connect();
      pair.RunUntil(Time::FromNanoseconds(20'000'000'000));
      ASSERT_EQ(pair.passive().state(), CmState::kEstablished);
      if (GetParam() != Ending::kPassiveDisconnects) {
        EXPECT_TRUE(pair.active().protocol.SendDreq(pair.active().id, pair.now()).ok());
      }
      if (GetParam() != Ending::kActiveDisconnects) {
        EXPECT_TRUE(pair.passive().protocol.SendDreq(pair.passive().id, pair.now()).ok());
      }
      pair.RunFor(Duration::Seconds(30));
      ExpectLifeOfBothSides(pair, GetParam());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllEndings, CmLife,
                         ::testing::Values(Ending::kActiveDisconnects, Ending::kPassiveDisconnects,
                                           Ending::kBothDisconnect),
                         [](const auto& info) { return EndingName(info.param); });

// When the connection stands although one message was lost (captures cm_loss_*).
TEST(CmLoss, MessagesAreRepeatedAfterTheTimesOfLinux) {
  struct Row {
    CmAttribute lost;
    Duration active_done;   // REP at the active side
    Duration passive_done;  // RTU at the passive side
  };
  const Duration ms = Duration::Milliseconds(1);
  const Row rows[] = {
      {CmAttribute::kReq, kReqTimeout + 2 * ms, kReqTimeout + 3 * ms},
      {CmAttribute::kRep, kRepTimeout + 2 * ms, kRepTimeout + 3 * ms},
      {CmAttribute::kRtu, 2 * ms, kRepTimeout + 3 * ms},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(CmAttributeName(row.lost));
    ProtocolPair pair;
    bool done = false;
    pair.fate = [&](size_t, const SeenMad& mad) {
      return Fate{.drop = !done && mad.attribute == row.lost && (done = true)};
    };
    pair.Connect();
    pair.RunFor(Duration::Seconds(10));
    EXPECT_EQ(pair.active().when[kRepReceived], Time::Zero() + row.active_done);
    EXPECT_EQ(pair.passive().when[kRtuReceived], Time::Zero() + row.passive_done);
    // What is repeated is the same message, byte for byte.
    const MadPacket* first = nullptr;
    for (const SeenMad& mad : pair.seen()) {
      if (mad.attribute != row.lost) continue;
      if (first == nullptr) first = &mad.mad;
      EXPECT_EQ(mad.mad.bytes, first->bytes);
    }
  }
}

TEST(CmLoss, UnansweredReqIsSentSixteenTimes) {
  ProtocolPair pair;
  pair.fate = [](size_t, const SeenMad&) { return Fate{.drop = true}; };
  pair.Connect();
  pair.RunFor(Duration::Seconds(200));
  ASSERT_EQ(pair.CountSeen(CmAttribute::kReq), 16u);
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(pair.seen()[i].sent, Time::Zero() + kReqTimeout * static_cast<int64_t>(i));
  }
  EXPECT_THAT(pair.active().events, ElementsAre(kReqError));
  EXPECT_EQ(pair.active().when[kReqError], Time::Zero() + kReqTimeout * 16);
  EXPECT_EQ(pair.active().state(), CmState::kIdle);
}

// A REQ that is taken back leaves a message for a peer that may be waiting.
TEST(CmLoss, DestroyedReqIsTakenBackWithReasonTimeout) {
  ProtocolPair pair;
  pair.passive().accepts = false;
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  pair.active().protocol.Destroy(pair.active().id, pair.now());
  pair.RunFor(Duration::Seconds(1));
  ASSERT_EQ(pair.seen().back().attribute, CmAttribute::kRej);
  const CmRej rej = CmRej::Load(pair.seen().back().mad.bytes.data() + kMadHeaderBytes);
  EXPECT_EQ(rej.reason, static_cast<uint16_t>(CmRejectReason::kTimeout));
  EXPECT_EQ(rej.message, static_cast<uint8_t>(CmRejected::kOther));
  EXPECT_EQ(rej.info_length, 8);
  EXPECT_EQ(LoadBe64(rej.info.data()), 0xau);
  EXPECT_THAT(pair.passive().events, ElementsAre(kReqReceived, kRejReceived));
  EXPECT_EQ(pair.passive().state(), CmState::kIdle);
  EXPECT_EQ(pair.active().protocol.connection_count(), 0u);
}

TEST(CmLoss, UnansweredRepEndsInAnError) {
  ProtocolPair pair;
  pair.fate = [](size_t number, const SeenMad&) { return Fate{.drop = number > 0}; };
  pair.Connect();
  pair.RunFor(Duration::Seconds(90));
  EXPECT_EQ(pair.CountSeen(CmAttribute::kRep), 16u);
  EXPECT_EQ(pair.passive().events.at(1), kRepError);
  EXPECT_EQ(pair.passive().when[kRepError],
            Time::Zero() + Duration::Milliseconds(1) + kRepTimeout * 16);
}

TEST(CmLoss, UnansweredDreqEndsInTimewait) {
  ProtocolPair pair;
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  pair.fate = [](size_t, const SeenMad&) { return Fate{.drop = true}; };
  ASSERT_TRUE(pair.active().protocol.SendDreq(pair.active().id, pair.now()).ok());
  pair.RunFor(Duration::Seconds(200));
  EXPECT_EQ(pair.CountSeen(CmAttribute::kDreq), 16u);
  EXPECT_THAT(pair.active().events, ElementsAre(kRepReceived, kDreqError, kTimewaitExit));
  EXPECT_EQ(pair.active().when[kTimewaitExit] - pair.active().when[kDreqError], kTimewait);
}

TEST(CmEstablished, BothSidesKnowTheOthersNumbers) {
  ProtocolPair pair;
  pair.Connect(0x123456);
  pair.RunFor(Duration::Seconds(1));
  const CmConnection a = *pair.active().protocol.Find(pair.active().id);
  const CmConnection b = *pair.passive().protocol.Find(pair.passive().id);
  EXPECT_EQ(a.remote_id, b.id);
  EXPECT_EQ(b.remote_id, a.id);
  EXPECT_EQ(b.remote_qpn, 0x123456u);
  EXPECT_EQ(a.remote_qpn, b.local_qpn);
  // The starting PSN in a message is the one that its sender will receive.
  EXPECT_EQ(a.rq_psn, 0x777777u);
  EXPECT_EQ(b.sq_psn, 0x777777u);
  EXPECT_EQ(b.rq_psn, 0x555555u);
  EXPECT_EQ(a.sq_psn, 0x555555u);
  // The peer's initiator depth is what is served, its resources what is asked.
  EXPECT_EQ(a.responder_resources, 3);
  EXPECT_EQ(a.initiator_depth, 5);
  EXPECT_EQ(b.responder_resources, 5);
  EXPECT_EQ(b.initiator_depth, 3);
  EXPECT_EQ(a.ack_timeout, 19);
  EXPECT_EQ(b.ack_timeout, 19);
  EXPECT_EQ(b.path.remote_gid, ProtocolPair::Address(0));
  EXPECT_EQ(b.path.flow_label, 0x12345u);
  EXPECT_EQ(b.path.mtu, Pmtu::k4096);
}

TEST(CmReject, ReasonAndDataReachTheActiveSide) {
  ProtocolPair pair;
  pair.passive().accepts = false;
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  std::array<std::byte, 148> data;
  data.fill(std::byte{0x77});
  EXPECT_FALSE(pair.passive()
                   .protocol
                   .SendRej(pair.passive().id, CmRejectReason::kConsumerDefined, {},
                            std::vector<std::byte>(149), pair.now())
                   .ok());
  ASSERT_TRUE(
      pair.passive()
          .protocol
          .SendRej(pair.passive().id, CmRejectReason::kConsumerDefined, {}, data, pair.now())
          .ok());
  pair.RunFor(Duration::Seconds(1));
  EXPECT_THAT(pair.active().events, ElementsAre(kRejReceived));
  EXPECT_EQ(pair.active().rej.reason, 28);
  EXPECT_EQ(pair.active().rej.private_data, data);
  EXPECT_EQ(pair.active().state(), CmState::kIdle);
}

// As on Linux the passive side forgets a request that it has rejected.
TEST(CmReject, LostRejMakesTheRequestComeAgain) {
  ProtocolPair pair;
  pair.passive().rejects = true;
  pair.fate = [](size_t number, const SeenMad&) { return Fate{.drop = number == 1}; };
  pair.Connect();
  pair.RunFor(Duration::Seconds(20));
  EXPECT_THAT(pair.passive().events, ElementsAre(kReqReceived, kReqReceived));
  EXPECT_THAT(pair.active().events, ElementsAre(kRejReceived));
  EXPECT_EQ(pair.active().when[kRejReceived],
            Time::Zero() + kReqTimeout + Duration::Milliseconds(2));
}

TEST(CmReject, ClosedPortIsInvalidServiceId) {
  ProtocolPair pair;
  pair.passive().protocol.StopListening(kTestServiceId);
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  EXPECT_THAT(pair.active().events, ElementsAre(kRejReceived));
  EXPECT_EQ(pair.active().rej.reason, 8);
  EXPECT_EQ(pair.active().rej.local_comm_id, 0u);
  EXPECT_EQ(pair.passive().protocol.connection_count(), 0u);
}

TEST(CmReject, PassiveSideMayBeRejectedByTheActiveOne) {
  ProtocolPair pair;
  pair.active().answers = false;
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  ASSERT_TRUE(
      pair.active()
          .protocol.SendRej(pair.active().id, CmRejectReason::kConsumerDefined, {}, {}, pair.now())
          .ok());
  pair.RunFor(Duration::Seconds(1));
  EXPECT_EQ(pair.seen().back().attribute, CmAttribute::kRej);
  EXPECT_THAT(pair.passive().events, ElementsAre(kReqReceived, kRejReceived));
  EXPECT_EQ(pair.passive().rej.message, static_cast<uint8_t>(CmRejected::kRep));
}

// The passive application takes a minute to decide.
TEST(CmMra, RepeatedReqIsAnsweredWithMraAndWaitsLonger) {
  ProtocolPair pair;
  pair.passive().accepts = false;
  pair.Connect();
  pair.RunFor(Duration::Seconds(60));
  EXPECT_EQ(pair.CountSeen(CmAttribute::kMra), 1u);
  EXPECT_EQ(pair.CountSeen(CmAttribute::kReq), 2u);
  EXPECT_EQ(pair.active().state(), CmState::kMraReqReceived);
  CmRepParameters rep;
  rep.qpn = 0x300;
  ASSERT_TRUE(pair.passive().protocol.SendRep(pair.passive().id, rep, pair.now()).ok());
  pair.RunFor(Duration::Seconds(1));
  EXPECT_EQ(pair.active().state(), CmState::kEstablished);
  EXPECT_EQ(pair.passive().state(), CmState::kEstablished);
  // 65.536 s of service and 2.048 s of path.
  ProtocolPair longer;
  longer.passive().accepts = false;
  longer.Connect();
  longer.RunFor(Duration::Seconds(75));
  ASSERT_EQ(longer.CountSeen(CmAttribute::kReq), 3u);
  const Duration after_mra = Duration::Milliseconds(65536 + 2048);
  std::vector<Time> reqs;
  for (const SeenMad& mad : longer.seen()) {
    if (mad.attribute == CmAttribute::kReq) reqs.push_back(mad.sent);
  }
  EXPECT_EQ(reqs[2], reqs[1] + Duration::Milliseconds(2) + after_mra);
}

TEST(CmMra, RepeatedRepIsAnsweredWithMra) {
  ProtocolPair pair;
  pair.active().answers = false;
  pair.Connect();
  pair.RunFor(Duration::Seconds(30));
  EXPECT_EQ(pair.CountSeen(CmAttribute::kRep), 2u);
  EXPECT_EQ(pair.CountSeen(CmAttribute::kMra), 1u);
  EXPECT_EQ(pair.passive().state(), CmState::kMraRepReceived);
  ASSERT_TRUE(pair.active().protocol.SendRtu(pair.active().id, {}, pair.now()).ok());
  pair.RunFor(Duration::Seconds(1));
  EXPECT_EQ(pair.passive().state(), CmState::kEstablished);
}

TEST(CmMra, SentAtOnceWhenNotDelayed) {
  ProtocolPair pair;
  pair.passive().accepts = false;
  pair.Connect();
  // A second application that asks for time itself.
  auto& protocol = pair.passive().protocol;
  CmReq req = CmReq::Load(pair.seen()[0].mad.bytes.data() + kMadHeaderBytes);
  req.local_comm_id = 0x42;
  req.local_qpn = 0x999;
  MadPacket mad = pair.seen()[0].mad;
  req.Store(mad.bytes.data() + kMadHeaderBytes);
  protocol.HandleMad(mad, pair.now());
  CmEvent event;
  ASSERT_TRUE(protocol.PollEvent(&event));
  ASSERT_TRUE(protocol.SendMra(event.id, 20, false, pair.now()).ok());
  MadPacket out;
  ASSERT_TRUE(protocol.PollMad(&out));
  const CmMra mra = CmMra::Load(out.bytes.data() + kMadHeaderBytes);
  EXPECT_EQ(mra.service_timeout, 20);
  EXPECT_EQ(mra.message, static_cast<uint8_t>(CmRejected::kReq));
  EXPECT_EQ(mra.remote_comm_id, 0x42u);
}

// A host that crashed connects again with the same QP.
TEST(CmStale, NewRequestOfAQpInUseEndsTheOldConnection) {
  ProtocolPair pair;
  pair.Connect(0x100);
  pair.RunFor(Duration::Seconds(1));
  const CmId old = pair.active().id;
  pair.Connect(0x100);
  pair.RunFor(Duration::Seconds(1));
  EXPECT_EQ(pair.active().rej.reason, static_cast<uint16_t>(CmRejectReason::kStaleConnection));
  // The old connection is ended with a DREQ; here its peer still knows it.
  EXPECT_EQ(pair.CountSeen(CmAttribute::kDreq), 1u);
  const CmConnection* first = pair.active().protocol.Find(old);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->state, CmState::kTimewait);
  // The rejected one waits too before its QP may be used again.
  EXPECT_EQ(pair.active().state(), CmState::kTimewait);
  pair.RunFor(Duration::Seconds(3));
  pair.Connect(0x100);
  pair.RunFor(Duration::Seconds(1));
  EXPECT_EQ(pair.active().state(), CmState::kEstablished);
}

TEST(CmStale, RequestRepeatedInTimewaitIsStale) {
  ProtocolPair pair;
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  const MadPacket req = pair.seen()[0].mad;
  ASSERT_TRUE(pair.passive().protocol.SendDreq(pair.passive().id, pair.now()).ok());
  pair.RunFor(Duration::Milliseconds(100));
  ASSERT_EQ(pair.passive().state(), CmState::kTimewait);
  const size_t before = pair.seen().size();
  pair.Inject(ProtocolPair::kPassive, req);
  ASSERT_EQ(pair.seen().size(), before + 1);
  const CmRej rej = CmRej::Load(pair.seen().back().mad.bytes.data() + kMadHeaderBytes);
  EXPECT_EQ(rej.reason, static_cast<uint16_t>(CmRejectReason::kStaleConnection));
}

TEST(CmDisconnect, DreqOfAnUnknownConnectionIsAnswered) {
  ProtocolPair pair;
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  // The passive side lost its memory but for the id table: destroyed at once.
  pair.fate = [](size_t, const SeenMad& mad) { return Fate{.drop = mad.side == 1}; };
  pair.passive().protocol.Destroy(pair.passive().id, pair.now());
  pair.RunFor(Duration::Seconds(3));  // timewait is over
  EXPECT_EQ(pair.passive().protocol.connection_count(), 0u);
  pair.fate = nullptr;
  ASSERT_TRUE(pair.active().protocol.SendDreq(pair.active().id, pair.now()).ok());
  pair.RunFor(Duration::Milliseconds(10));
  EXPECT_THAT(pair.active().events, ElementsAre(kRepReceived, kDrepReceived));
}

TEST(CmDisconnect, DestroyOfAnEstablishedConnectionSendsOneDreq) {
  ProtocolPair pair;
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  pair.active().protocol.Destroy(pair.active().id, pair.now());
  EXPECT_EQ(pair.active().protocol.Find(pair.active().id), nullptr);
  pair.fate = [](size_t, const SeenMad&) { return Fate{.drop = true}; };
  pair.RunFor(Duration::Seconds(100));
  EXPECT_EQ(pair.CountSeen(CmAttribute::kDreq), 1u);
  EXPECT_EQ(pair.active().protocol.connection_count(), 0u);
  EXPECT_THAT(pair.active().events, ElementsAre(kRepReceived));
}

TEST(CmDisconnect, DreqForAnotherQpIsIgnored) {
  ProtocolPair pair;
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  MadPacket mad = pair.seen()[0].mad;
  MadHeader header;
  header.attribute = CmAttribute::kDreq;
  header.Store(mad.bytes.data());
  CmDreq dreq;
  dreq.local_comm_id = pair.active().id;
  dreq.remote_comm_id = pair.passive().id;
  dreq.remote_qpn = 0x111;
  dreq.Store(mad.bytes.data() + kMadHeaderBytes);
  pair.Inject(ProtocolPair::kPassive, mad);
  EXPECT_EQ(pair.passive().state(), CmState::kEstablished);
}

// Data of the peer arrives before its RTU, and the application says so.
TEST(CmEstablished, ApplicationMayNoticeItFirst) {
  ProtocolPair pair;
  pair.fate = [](size_t, const SeenMad& mad) {
    return Fate{.drop = mad.attribute == CmAttribute::kRtu};
  };
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  auto& protocol = pair.passive().protocol;
  ASSERT_TRUE(protocol.NotifyEstablished(pair.passive().id, pair.now()).ok());
  EXPECT_EQ(protocol.NotifyEstablished(pair.passive().id, pair.now()).error(),
            CmError::kIsConnected);
  pair.RunFor(Duration::Seconds(10));
  EXPECT_THAT(pair.passive().events, ElementsAre(kReqReceived, kUserEstablished));
  EXPECT_EQ(pair.CountSeen(CmAttribute::kRep), 1u);
}

TEST(CmRequests, PrivateDataHasLimits) {
  ProtocolPair pair;
  auto& protocol = pair.active().protocol;
  const std::vector<std::byte> bytes(256);
  const auto first = [&](size_t size) { return std::span(bytes).first(size); };
  CmReqParameters req = ProtocolPair::Request();
  req.private_data = first(93);
  EXPECT_EQ(protocol.SendReq(req, pair.now()).error(), CmError::kInvalidArgument);
  req.private_data = first(92);
  EXPECT_TRUE(protocol.SendReq(req, pair.now()).ok());
  CmSidrReqParameters sidr;
  sidr.path = ProtocolPair::Path(0);
  sidr.private_data = first(217);
  EXPECT_EQ(protocol.SendSidrReq(sidr, pair.now()).error(), CmError::kInvalidArgument);
  sidr.private_data = first(216);
  EXPECT_TRUE(protocol.SendSidrReq(sidr, pair.now()).ok());

  pair.passive().accepts = false;
  pair.RunFor(Duration::Seconds(1));
  auto& passive = pair.passive().protocol;
  CmRepParameters rep;
  rep.private_data = first(197);
  EXPECT_EQ(passive.SendRep(pair.passive().id, rep, pair.now()).error(), CmError::kInvalidArgument);
  rep.private_data = first(196);
  EXPECT_TRUE(passive.SendRep(pair.passive().id, rep, pair.now()).ok());
}

TEST(CmRequests, AreRefusedInTheWrongState) {
  ProtocolPair pair;
  auto& protocol = pair.active().protocol;
  pair.passive().accepts = false;
  pair.Connect();
  const CmId id = pair.active().id;
  EXPECT_EQ(protocol.SendRep(id, {}, pair.now()).error(), CmError::kInvalidState);
  EXPECT_EQ(protocol.SendRtu(id, {}, pair.now()).error(), CmError::kInvalidState);
  EXPECT_EQ(protocol.SendDreq(id, pair.now()).error(), CmError::kInvalidState);
  EXPECT_EQ(protocol.SendDrep(id, pair.now()).error(), CmError::kInvalidState);
  EXPECT_EQ(protocol.SendMra(id, 20, false, pair.now()).error(), CmError::kInvalidState);
  EXPECT_EQ(protocol.SendSidrRep(id, {}, pair.now()).error(), CmError::kInvalidState);
  EXPECT_EQ(protocol.NotifyEstablished(id, pair.now()).error(), CmError::kInvalidState);
  EXPECT_EQ(protocol.SendRtu(id + 1, {}, pair.now()).error(), CmError::kInvalidState);
}

TEST(CmTransports, UcAndXrcReachTheOtherSide) {
  for (const auto& [sent, received] : {std::pair(CmQpType::kUc, CmQpType::kUc),
                                       std::pair(CmQpType::kXrcInitiator, CmQpType::kXrcTarget)}) {
    ProtocolPair pair;
    CmReqParameters req = ProtocolPair::Request();
    req.qp_type = sent;
    pair.active().id = *pair.active().protocol.SendReq(req, pair.now());
    pair.RunFor(Duration::Seconds(1));
    EXPECT_EQ(pair.active().state(), CmState::kEstablished);
    const CmConnection* passive = pair.passive().protocol.Find(pair.passive().id);
    ASSERT_NE(passive, nullptr);
    EXPECT_EQ(passive->qp_type, received);
    // An XRC target's number stands where the EE context's would.
    const CmConnection* active = pair.active().protocol.Find(pair.active().id);
    EXPECT_EQ(active->remote_qpn, passive->local_qpn);
  }
}

TEST(CmTransports, UnknownOnesAreRejected) {
  ProtocolPair pair;
  pair.Connect();
  CmReq req = CmReq::Load(pair.seen()[0].mad.bytes.data() + kMadHeaderBytes);
  req.local_comm_id = 0x42;
  req.transport = static_cast<uint8_t>(CmTransport::kRd);
  MadPacket mad = pair.seen()[0].mad;
  req.Store(mad.bytes.data() + kMadHeaderBytes);
  pair.Inject(ProtocolPair::kPassive, mad);
  const CmRej rej = CmRej::Load(pair.seen().back().mad.bytes.data() + kMadHeaderBytes);
  EXPECT_EQ(rej.reason, static_cast<uint16_t>(CmRejectReason::kInvalidTransportType));
  EXPECT_EQ(rej.remote_comm_id, 0x42u);
}

// --- SIDR

class Sidr : public ::testing::Test {
 protected:
  void Ask() {
    CmSidrReqParameters req;
    req.path = ProtocolPair::Path(0);
    req.service_id = kTestServiceId;
    pair.active().id = *pair.active().protocol.SendSidrReq(req, pair.now());
  }
  void Answer(CmSidrStatus status) {
    ASSERT_TRUE(
        pair.passive()
            .protocol
            .SendSidrRep(pair.passive().id,
                         {.status = status, .qpn = 0x321, .qkey = 0x01234567, .private_data = {}},
                         pair.now())
            .ok());
  }
  // The id of the request that the passive side has got last.
  void Take() {
    CmEvent event;
    pair.passive().protocol.HandleMad(pair.seen().front().mad, pair.now());
    ASSERT_TRUE(pair.passive().protocol.PollEvent(&event));
    pair.passive().id = event.id;
  }
  ProtocolPair pair;
};

TEST_F(Sidr, RequestIsRepeatedAndGivenUp) {
  pair.fate = [](size_t, const SeenMad&) { return Fate{.drop = true}; };
  Ask();
  pair.RunFor(Duration::Seconds(100));
  EXPECT_EQ(pair.CountSeen(CmAttribute::kSidrReq), 16u);
  EXPECT_THAT(pair.active().events, ElementsAre(kSidrReqError));
  EXPECT_EQ(pair.active().when[kSidrReqError], Time::Zero() + kRepTimeout * 16);
}

TEST_F(Sidr, AnswerEndsIt) {
  pair.fate = [](size_t, const SeenMad& mad) {
    return Fate{.drop = mad.attribute == CmAttribute::kSidrReq};
  };
  Ask();
  pair.RunFor(Duration::Milliseconds(10));
  Take();
  Answer(CmSidrStatus::kSuccess);
  pair.RunFor(Duration::Seconds(10));
  EXPECT_THAT(pair.active().events, ElementsAre(kSidrRepReceived));
  EXPECT_EQ(pair.CountSeen(CmAttribute::kSidrReq), 1u);
  pair.active().protocol.Destroy(pair.active().id, pair.now());
  pair.passive().protocol.Destroy(pair.passive().id, pair.now());
  EXPECT_EQ(pair.active().protocol.connection_count(), 0u);
  EXPECT_EQ(pair.passive().protocol.connection_count(), 0u);
}

TEST_F(Sidr, RepeatedRequestIsOneUntilItIsAnswered) {
  Ask();
  pair.RunFor(Duration::Seconds(10));  // repeated twice
  EXPECT_EQ(pair.CountSeen(CmAttribute::kSidrReq), 3u);
  EXPECT_THAT(pair.passive().events, ElementsAre(kSidrReqReceived));
}

TEST_F(Sidr, ClosedPortIsUnsupported) {
  pair.passive().protocol.StopListening(kTestServiceId);
  Ask();
  pair.RunFor(Duration::Seconds(1));
  EXPECT_THAT(pair.active().events, ElementsAre(kSidrRepReceived));
  const CmSidrRep rep = CmSidrRep::Load(pair.seen().back().mad.bytes.data() + kMadHeaderBytes);
  EXPECT_EQ(rep.status, static_cast<uint8_t>(CmSidrStatus::kUnsupported));
  EXPECT_EQ(rep.service_id, kTestServiceId);
}

TEST_F(Sidr, DestroyedRequestIsRejected) {
  Ask();
  pair.fate = [](size_t, const SeenMad& mad) { return Fate{.drop = mad.side == 0}; };
  pair.RunFor(Duration::Milliseconds(10));
  Take();
  pair.passive().protocol.Destroy(pair.passive().id, pair.now());
  pair.RunFor(Duration::Seconds(1));
  const CmSidrRep rep = CmSidrRep::Load(pair.seen().back().mad.bytes.data() + kMadHeaderBytes);
  EXPECT_EQ(rep.status, static_cast<uint8_t>(CmSidrStatus::kReject));
  EXPECT_EQ(pair.passive().protocol.connection_count(), 0u);
}

// --- Hostile input

// Random messages with plausible headers and ids: nothing breaks, tables stay
// bounded by the number of requests.
TEST(CmHostile, RandomMessagesDoNoHarm) {
  std::mt19937 random(7);
  ProtocolPair pair;
  pair.Connect();
  pair.RunFor(Duration::Seconds(1));
  std::vector<uint32_t> ids = {0, 1, pair.active().id, pair.passive().id, 0xffffffff};
  for (int round = 0; round < 20000; ++round) {
    MadPacket mad;
    mad.source = ProtocolPair::Address(0);
    mad.destination = ProtocolPair::Address(1);
    for (std::byte& byte : mad.bytes) {
      byte = random() % 4 == 0 ? static_cast<std::byte>(random()) : std::byte{0};
    }
    MadHeader header;
    header.attribute = CmAttribute{static_cast<uint16_t>(0x0f + random() % 13)};
    if (random() % 64 == 0) header.management_class = 3;
    header.Store(mad.bytes.data());
    StoreBe32(mad.bytes.data() + 24, ids[random() % ids.size()]);
    if (random() % 2 == 0) StoreBe32(mad.bytes.data() + 28, ids[random() % ids.size()]);
    if (random() % 3 == 0) StoreBe64(mad.bytes.data() + 32, kTestServiceId);
    if (random() % 50 == 0) mad.nic = static_cast<uint32_t>(random() % 3);
    pair.Inject(random() % 2, mad);
    if (random() % 100 == 0)
      pair.RunFor(Duration::Milliseconds(static_cast<int64_t>(random() % 10000)));
  }
  EXPECT_LT(pair.passive().protocol.connection_count(), 20000u);
  EXPECT_GT(pair.passive().protocol.counters().malformed, 0u);
}

TEST(CmHostile, ConnectionsAreBounded) {
  ProtocolPair pair;
  pair.passive().accepts = false;
  pair.Connect();
  CmReq req = CmReq::Load(pair.seen()[0].mad.bytes.data() + kMadHeaderBytes);
  MadPacket mad = pair.seen()[0].mad;
  auto& protocol = pair.passive().protocol;
  for (uint32_t i = 0; i < CmProtocol::kMaxConnections + 10; ++i) {
    req.local_comm_id = 0x10000 + i;
    req.local_qpn = i;
    req.Store(mad.bytes.data() + kMadHeaderBytes);
    protocol.HandleMad(mad, pair.now());
    CmEvent event;
    while (protocol.PollEvent(&event)) {
    }
  }
  EXPECT_EQ(protocol.connection_count(), CmProtocol::kMaxConnections);
  EXPECT_EQ(protocol.counters().no_room, 10u);
}

TEST(CmHostile, PacketsForOtherAddressesAreIgnored) {
  ProtocolPair pair;
  pair.passive().accepts = false;
  pair.Connect();
  MadPacket mad = pair.seen()[0].mad;
  mad.destination = Gid::FromIpv4(0x0a0000ff);
  pair.passive().protocol.HandleMad(mad, pair.now());
  EXPECT_EQ(pair.passive().protocol.connection_count(), 0u);
  mad.destination = Gid();  // an empty entry of the GID table
  pair.passive().protocol.HandleMad(mad, pair.now());
  EXPECT_EQ(pair.passive().protocol.connection_count(), 0u);
}

}  // namespace
}  // namespace verbena::transport
