// SPDX-License-Identifier: Apache-2.0
//
// Conversations of two Linux hosts, spoken again: one side is ours, the other
// the capture. Every MAD that ours sends is the captured one, byte for byte.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "tests/testing/vectors.h"
#include "transport/base/byteorder.h"
#include "transport/cm/protocol.h"
#include "transport/wire/packet_view.h"

namespace verbena::transport {
namespace {

using verbena::testing::CaptureFrames;

struct CapturedMad {
  size_t frame;
  MadHeader header;
  MadPacket mad;

  template <typename Message>
  Message As() const {
    return Message::Load(mad.bytes.data() + kMadHeaderBytes);
  }
};

std::vector<CapturedMad> Conversation(const std::string& capture) {
  std::vector<CapturedMad> result;
  const auto frames = CaptureFrames(capture);
  for (size_t i = 0; i < frames.size(); ++i) {
    const auto packet = PacketView::Parse(frames[i]);
    if (!packet.ok() || packet->bth().dest_qpn != kManagementQpn) continue;
    CapturedMad mad{.frame = i + 1, .header = {}, .mad = {}};
    std::memcpy(mad.mad.bytes.data(), packet->payload().data(), kMadBytes);
    mad.header = MadHeader::Load(mad.mad.bytes.data());
    mad.mad.source = packet->source_gid();
    mad.mad.destination = packet->destination_gid();
    result.push_back(mad);
  }
  return result;
}

uint32_t SwapBytes(uint32_t v) { return __builtin_bswap32(v); }

// The seed with which the first id is `id`.
uint32_t SeedFor(uint32_t id) { return SwapBytes(id) ^ 1; }

CmPath PathOf(const CmReq& req) {
  CmPath path;
  path.local_gid = Gid(req.primary_local_gid);
  path.remote_gid = Gid(req.primary_remote_gid);
  path.flow_label = req.primary_flow_label;
  path.traffic_class = req.primary_traffic_class;
  path.hop_limit = req.primary_hop_limit;
  path.rate = req.primary_rate;
  path.mtu = Pmtu{req.path_mtu};
  return path;
}

// Our next MAD is `expected`, and goes where that went.
void ExpectSends(CmProtocol& protocol, const CapturedMad& expected) {
  SCOPED_TRACE("frame " + std::to_string(expected.frame));
  MadPacket mad;
  ASSERT_TRUE(protocol.PollMad(&mad));
  EXPECT_EQ(mad.bytes, expected.mad.bytes);
  EXPECT_EQ(mad.source, expected.mad.source);
  EXPECT_EQ(mad.destination, expected.mad.destination);
}

CmReqParameters ParametersOf(const CmReq& req, std::span<const std::byte> data) {
  CmReqParameters p;
  p.path = PathOf(req);
  p.service_id = req.service_id;
  p.qpn = req.local_qpn;
  p.starting_psn = req.starting_psn;
  p.responder_resources = req.responder_resources;
  p.initiator_depth = req.initiator_depth;
  p.flow_control = req.flow_control;
  p.retry_count = req.retry_count;
  p.rnr_retry = req.rnr_retry;
  p.srq = req.srq;
  p.private_data = data;
  return p;
}

class ActiveSide : public ::testing::TestWithParam<const char*> {};
class PassiveSide : public ::testing::TestWithParam<const char*> {};

// The side that sent the first REQ is ours.
TEST_P(ActiveSide, SpeaksAsLinux) {
  const auto mads = Conversation(GetParam());
  ASSERT_GE(mads.size(), 2u);
  const auto req = mads[0].As<CmReq>();
  CmProtocol ours({{.ca_guid = req.local_ca_guid, .ack_delay = 15, .gids = {mads[0].mad.source}}},
                  SeedFor(req.local_comm_id));
  Time now;
  const auto id = ours.SendReq(ParametersOf(req, req.private_data), now);
  ASSERT_TRUE(id.ok());
  ExpectSends(ours, mads[0]);
  for (size_t i = 1; i < mads.size(); ++i) {
    const bool from_us = mads[i].mad.source == mads[0].mad.source;
    if (!from_us) {
      ours.HandleMad(mads[i].mad, now);
      continue;
    }
    // What the application does, or time.
    switch (mads[i].header.attribute) {
      case CmAttribute::kRtu:
        // Repeated if the peer repeated its REP.
        if (ours.Find(*id)->state == CmState::kRepReceived) {
          ASSERT_TRUE(ours.SendRtu(*id, {}, now).ok());
        }
        break;
      case CmAttribute::kDreq:
        ASSERT_TRUE(ours.SendDreq(*id, now).ok());
        break;
      case CmAttribute::kDrep:
        ASSERT_TRUE(ours.SendDrep(*id, now).ok());
        break;
      case CmAttribute::kReq:
        now = ours.next_timeout();
        ours.HandleTimeout(now);
        break;
      case CmAttribute::kRej:
        ours.Destroy(*id, now);
        break;
      default:
        FAIL() << "frame " << mads[i].frame;
    }
    ExpectSends(ours, mads[i]);
  }
  MadPacket more;
  EXPECT_FALSE(ours.PollMad(&more));
}

// The side that answered is ours.
TEST_P(PassiveSide, SpeaksAsLinux) {
  const auto mads = Conversation(GetParam());
  ASSERT_GE(mads.size(), 2u);
  uint32_t our_id = 0;
  uint64_t our_guid = 0;
  for (const CapturedMad& mad : mads) {
    if (mad.header.attribute != CmAttribute::kRep) continue;
    our_id = mad.As<CmRep>().local_comm_id;
    our_guid = mad.As<CmRep>().local_ca_guid;
  }
  CmProtocol ours({{.ca_guid = our_guid, .ack_delay = 15, .gids = {mads[0].mad.destination}}},
                  SeedFor(our_id));
  if (our_id != 0) ours.Listen(mads[0].As<CmReq>().service_id);
  Time now;
  CmEvent event;
  CmId id = 0;
  for (const CapturedMad& mad : mads) {
    if (mad.mad.source == mads[0].mad.source) {
      ours.HandleMad(mad.mad, now);
      while (ours.PollEvent(&event)) {
        if (event.type == CmEventType::kReqReceived) id = event.id;
      }
      continue;
    }
    switch (mad.header.attribute) {
      case CmAttribute::kRep: {
        const auto rep = mad.As<CmRep>();
        if (ours.Find(id)->state != CmState::kReqReceived) {  // its timer
          now = ours.next_timeout();
          ours.HandleTimeout(now);
          break;
        }
        CmRepParameters p;
        p.qpn = rep.local_qpn;
        p.starting_psn = rep.starting_psn;
        p.responder_resources = rep.responder_resources;
        p.initiator_depth = rep.initiator_depth;
        p.flow_control = rep.flow_control;
        p.rnr_retry = rep.rnr_retry;
        p.srq = rep.srq;
        p.private_data = rep.private_data;
        ASSERT_TRUE(ours.SendRep(id, p, now).ok());
        break;
      }
      case CmAttribute::kDreq:
        ASSERT_TRUE(ours.SendDreq(id, now).ok());
        break;
      case CmAttribute::kDrep:
        ASSERT_TRUE(ours.SendDrep(id, now).ok());
        break;
      case CmAttribute::kRej:  // nobody listens
        break;
      default:
        FAIL() << "frame " << mad.frame;
    }
    ExpectSends(ours, mad);
  }
  MadPacket more;
  EXPECT_FALSE(ours.PollMad(&more));
}

// A message that was lost on the wire stands in the capture all the same: the
// side that sent it is ours.
#define CONVERSATIONS                                                                       \
  "cm_rping_v4", "cm_rping_v6", "cm_ucmatose_v6", "vlan_cm_rping", "cm_reject_closed_port", \
      "cm_reject_closed_port_v6"

std::string NameOf(const ::testing::TestParamInfo<const char*>& info) { return info.param; }

INSTANTIATE_TEST_SUITE_P(Captures, ActiveSide,
                         ::testing::Values(CONVERSATIONS, "cm_loss_req", "cm_loss_rtu",
                                           "cm_req_unanswered"),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Captures, PassiveSide, ::testing::Values(CONVERSATIONS, "cm_loss_rep"),
                         NameOf);

class SidrConversations : public ::testing::TestWithParam<const char*> {};

TEST_P(SidrConversations, BothSidesSpeakAsLinux) {
  const auto mads = Conversation(GetParam());
  ASSERT_EQ(mads.size(), 2u);
  const auto req = mads[0].As<CmSidrReq>();
  const auto rep = mads[1].As<CmSidrRep>();
  Time now;

  CmProtocol asks({{.ca_guid = 1, .ack_delay = 15, .gids = {mads[0].mad.source}}},
                  SeedFor(req.request_id));
  CmSidrReqParameters p;
  p.path.local_gid = mads[0].mad.source;
  p.path.remote_gid = mads[0].mad.destination;
  p.service_id = req.service_id;
  p.private_data = req.private_data;
  ASSERT_TRUE(asks.SendSidrReq(p, now).ok());
  ExpectSends(asks, mads[0]);
  asks.HandleMad(mads[1].mad, now);
  CmEvent event;
  ASSERT_TRUE(asks.PollEvent(&event));
  EXPECT_EQ(event.type, CmEventType::kSidrRepReceived);

  CmProtocol answers({{.ca_guid = 2, .ack_delay = 15, .gids = {mads[0].mad.destination}}}, 5);
  const bool listens = rep.status == 0;
  if (listens) answers.Listen(req.service_id);
  answers.HandleMad(mads[0].mad, now);
  if (listens) {
    ASSERT_TRUE(answers.PollEvent(&event));
    ASSERT_TRUE(
        answers
            .SendSidrRep(event.id,
                         {.qpn = rep.qpn, .qkey = rep.qkey, .private_data = rep.private_data}, now)
            .ok());
  }
  ExpectSends(answers, mads[1]);
}

INSTANTIATE_TEST_SUITE_P(Captures, SidrConversations,
                         ::testing::Values("cm_udaddy_v4", "cm_udaddy_v6", "cm_sidr_closed_port"),
                         NameOf);

}  // namespace
}  // namespace verbena::transport
