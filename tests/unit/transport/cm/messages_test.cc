// SPDX-License-Identifier: Apache-2.0
//
// CM messages against the captures of Linux, and field by field.
#include "transport/cm/messages.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

#include "tests/testing/vectors.h"
#include "transport/base/byteorder.h"
#include "transport/wire/packet_view.h"

namespace verbena::transport {
namespace {

using verbena::testing::CaptureFrames;
using verbena::testing::CaptureNames;

struct CapturedMad {
  std::string where;
  std::array<std::byte, kMadBytes> bytes;
  MadHeader header;
  const std::byte* data() const { return bytes.data() + kMadHeaderBytes; }
};

// All UD packets to QP1 of all captures.
std::vector<CapturedMad> CapturedMads() {
  std::vector<CapturedMad> mads;
  for (const std::string& name : CaptureNames()) {
    const auto frames = CaptureFrames(name);
    for (size_t i = 0; i < frames.size(); ++i) {
      const auto packet = PacketView::Parse(frames[i]);
      if (!packet.ok() || packet->bth().dest_qpn != kManagementQpn) continue;
      CapturedMad mad{.where = name + " frame " + std::to_string(i + 1), .bytes = {}, .header = {}};
      if (packet->payload().size() != kMadBytes) {
        ADD_FAILURE() << mad.where << ": " << packet->payload().size() << " bytes";
        continue;
      }
      std::memcpy(mad.bytes.data(), packet->payload().data(), kMadBytes);
      mads.push_back(mad);
    }
  }
  return mads;
}

template <typename Message>
void ExpectRebuilds(const CapturedMad& mad) {
  std::array<std::byte, kMadBytes> rebuilt;
  rebuilt.fill(std::byte{0xa5});
  mad.header.Store(rebuilt.data());
  Message::Load(mad.data()).Store(rebuilt.data() + kMadHeaderBytes);
  EXPECT_EQ(rebuilt, mad.bytes);
}

TEST(CmCaptures, EveryMessageIsRebuiltFromItsFields) {
  std::map<std::string, int> seen;
  for (CapturedMad& mad : CapturedMads()) {
    SCOPED_TRACE(mad.where);
    CmParseError error{};
    const auto header = ParseCmHeader(mad.bytes, &error);
    ASSERT_TRUE(header) << CmParseErrorName(error);
    mad.header = *header;
    ++seen[std::string(CmAttributeName(header->attribute))];
    switch (header->attribute) {
#define CASE(Name)                 \
  case CmAttribute::k##Name:       \
    ExpectRebuilds<Cm##Name>(mad); \
    break;
      CASE(Req)
      CASE(Mra)
      CASE(Rej)
      CASE(Rep)
      CASE(Rtu)
      CASE(Dreq)
      CASE(Drep)
      CASE(SidrReq)
      CASE(SidrRep)
#undef CASE
      default:
        ADD_FAILURE() << "unexpected message";
    }
  }
  // Counted in the captures with tshark.
  const std::map<std::string, int> expected = {{"Req", 27},    {"Rep", 16},   {"Rtu", 15},
                                               {"Rej", 3},     {"Dreq", 15},  {"Drep", 14},
                                               {"SidrReq", 3}, {"SidrRep", 3}};
  EXPECT_EQ(seen, expected);
}

CmReq FirstReq(const std::string& capture) {
  for (const CapturedMad& mad : CapturedMads()) {
    if (mad.where == capture + " frame 1") return CmReq::Load(mad.data());
  }
  ADD_FAILURE() << capture;
  return {};
}

TEST(CmCaptures, FieldsOfTheReqOfLinux) {
  const CmReq req = FirstReq("cm_rping_v4");
  EXPECT_EQ(req.local_comm_id, 0xf872ac20u);
  EXPECT_EQ(req.service_id, CmServiceId(0x0106, 7174));
  EXPECT_EQ(req.local_ca_guid, 0x505400fffe000001u);
  EXPECT_EQ(req.local_qpn, 0x92u);
  EXPECT_EQ(req.responder_resources, 1);
  EXPECT_EQ(req.initiator_depth, 1);
  EXPECT_EQ(req.remote_response_timeout, 20);
  EXPECT_EQ(req.transport, static_cast<uint8_t>(CmTransport::kRc));
  EXPECT_EQ(req.flow_control, 0);
  EXPECT_EQ(req.starting_psn, 0x0127fdu);  // of the first packet to the active side
  EXPECT_EQ(req.local_response_timeout, 20);
  EXPECT_EQ(req.retry_count, 7);
  EXPECT_EQ(req.pkey, 0xffff);
  EXPECT_EQ(req.path_mtu, 5);
  EXPECT_EQ(req.rnr_retry, 7);
  EXPECT_EQ(req.max_cm_retries, 15);
  EXPECT_EQ(req.srq, 0);
  EXPECT_EQ(req.primary_local_lid, 0xffff);
  EXPECT_EQ(Gid(req.primary_local_gid), Gid::FromIpv4(0xc0a84d01));
  EXPECT_EQ(Gid(req.primary_remote_gid), Gid::FromIpv4(0xc0a84d02));
  EXPECT_EQ(req.primary_flow_label, 0x2b01au);
  EXPECT_EQ(req.primary_rate, 0);
  EXPECT_EQ(req.primary_hop_limit, 64);
  EXPECT_EQ(req.primary_subnet_local, 0);
  EXPECT_EQ(req.primary_ack_timeout, 19);
  const auto ip = RdmaIpHeader::Load(req.private_data.data());
  ASSERT_TRUE(ip);
  EXPECT_EQ(ip->ip_version, 4);
  EXPECT_EQ(ip->source_port, 0x996c);
  EXPECT_EQ(ip->source, Gid::FromIpv4(0xc0a84d01));
  EXPECT_EQ(ip->destination, Gid::FromIpv4(0xc0a84d02));
}

TEST(CmCaptures, FieldsOfTheOtherMessagesOfLinux) {
  std::map<std::string, CapturedMad> by_place;
  for (const CapturedMad& mad : CapturedMads()) by_place[mad.where] = mad;
  const auto at = [&](const std::string& where) { return by_place.at(where).data(); };

  const CmRep rep = CmRep::Load(at("cm_loss_dreq frame 2"));
  EXPECT_EQ(rep.local_comm_id, 0xa34f2923u);
  EXPECT_EQ(rep.remote_comm_id, 0xf572ac20u);
  EXPECT_EQ(rep.local_qpn, 0x61u);
  EXPECT_EQ(rep.starting_psn, 0x9f6dbbu);
  EXPECT_EQ(rep.responder_resources, 1);
  EXPECT_EQ(rep.initiator_depth, 1);
  EXPECT_EQ(rep.target_ack_delay, 15);
  EXPECT_EQ(rep.failover_accepted, 0);
  EXPECT_EQ(rep.rnr_retry, 7);
  EXPECT_EQ(rep.local_ca_guid, 0x505400fffe000002u);

  const CmDreq dreq = CmDreq::Load(at("cm_loss_dreq frame 16"));
  EXPECT_EQ(dreq.local_comm_id, 0xf572ac20u);
  EXPECT_EQ(dreq.remote_comm_id, 0xa34f2923u);
  EXPECT_EQ(dreq.remote_qpn, 0x61u);

  const CmRej closed = CmRej::Load(at("cm_reject_closed_port frame 2"));
  EXPECT_EQ(closed.local_comm_id, 0u);
  EXPECT_EQ(closed.message, static_cast<uint8_t>(CmRejected::kReq));
  EXPECT_EQ(closed.reason, static_cast<uint16_t>(CmRejectReason::kInvalidServiceId));

  const CmRej timeout = CmRej::Load(at("cm_req_unanswered frame 11"));
  EXPECT_EQ(timeout.message, static_cast<uint8_t>(CmRejected::kOther));
  EXPECT_EQ(timeout.info_length, 8);
  EXPECT_EQ(timeout.reason, static_cast<uint16_t>(CmRejectReason::kTimeout));
  EXPECT_EQ(LoadBe64(timeout.info.data()), 0x505400fffe000001u);

  const CmSidrReq sidr = CmSidrReq::Load(at("cm_udaddy_v6 frame 1"));
  EXPECT_EQ(sidr.service_id, CmServiceId(0x0111, 7174));
  EXPECT_EQ(sidr.pkey, 0xffff);
  const auto ip = RdmaIpHeader::Load(sidr.private_data.data());
  ASSERT_TRUE(ip);
  EXPECT_EQ(ip->ip_version, 6);
  EXPECT_EQ(ip->source_port, 0x92e1);
  EXPECT_EQ(ip->source.ToString(), "fd00:77::1");
  EXPECT_EQ(ip->destination.ToString(), "fd00:77::2");

  const CmSidrRep found = CmSidrRep::Load(at("cm_udaddy_v4 frame 2"));
  EXPECT_EQ(found.status, 0);
  EXPECT_EQ(found.qpn, 0x5bu);
  EXPECT_EQ(found.qkey, 0x01234567u);
  const CmSidrRep none = CmSidrRep::Load(at("cm_sidr_closed_port frame 2"));
  EXPECT_EQ(none.status, static_cast<uint8_t>(CmSidrStatus::kUnsupported));
  EXPECT_EQ(none.service_id, CmServiceId(0x0111, 7174));
}

TEST(RdmaIpHeader, IsRebuiltForBothFamilies) {
  for (const char* capture : {"cm_rping_v4", "cm_rping_v6", "vlan_cm_rping"}) {
    const CmReq req = FirstReq(capture);
    const auto header = RdmaIpHeader::Load(req.private_data.data());
    ASSERT_TRUE(header) << capture;
    std::array<std::byte, RdmaIpHeader::kBytes> bytes;
    bytes.fill(std::byte{0xa5});
    header->Store(bytes.data());
    EXPECT_EQ(std::memcmp(bytes.data(), req.private_data.data(), bytes.size()), 0) << capture;
  }
}

TEST(RdmaIpHeader, RefusesVersionsThatNobodySpeaks) {
  std::array<std::byte, RdmaIpHeader::kBytes> bytes{};
  RdmaIpHeader{}.Store(bytes.data());
  ASSERT_TRUE(RdmaIpHeader::Load(bytes.data()));
  bytes[0] = std::byte{1};
  EXPECT_FALSE(RdmaIpHeader::Load(bytes.data()));
  bytes[0] = std::byte{0};
  bytes[1] = std::byte{0x50};
  EXPECT_FALSE(RdmaIpHeader::Load(bytes.data()));
}

TEST(CmHeader, RefusesEveryTruncation) {
  std::array<std::byte, kMadBytes> mad{};
  MadHeader{}.Store(mad.data());
  CmParseError error{};
  ASSERT_TRUE(ParseCmHeader(mad, &error));
  for (size_t size = 0; size < kMadBytes; ++size) {
    // A copy of exactly that size, so that a sanitizer sees a read behind it.
    const std::vector<std::byte> cut(mad.begin(), mad.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_FALSE(ParseCmHeader(cut, &error)) << size;
    EXPECT_EQ(error, CmParseError::kTruncated) << size;
  }
}

TEST(CmHeader, RefusesWhatIsNoCmMessage) {
  const auto error_of = [](const MadHeader& header) {
    std::array<std::byte, kMadBytes> mad{};
    header.Store(mad.data());
    CmParseError error{};
    EXPECT_FALSE(ParseCmHeader(mad, &error));
    return error;
  };
  MadHeader header;
  header.base_version = 2;
  EXPECT_EQ(error_of(header), CmParseError::kVersion);
  header = {};
  header.management_class = 0x04;
  EXPECT_EQ(error_of(header), CmParseError::kClass);
  header = {};
  header.class_version = 1;
  EXPECT_EQ(error_of(header), CmParseError::kVersion);
  header = {};
  header.method = 0x01;
  EXPECT_EQ(error_of(header), CmParseError::kMethod);
  header = {};
  header.attribute = CmAttribute{0x0f};
  EXPECT_EQ(error_of(header), CmParseError::kAttribute);
}

// Every field alone: it comes back, and nothing but its own bits is set.
template <typename Message, typename Set, typename Get>
void ExpectFieldIsAlone(const char* name, size_t bit, size_t bits, Set set, Get get) {
  Message message;
  set(message);
  std::array<std::byte, kCmDataBytes> bytes;
  bytes.fill(std::byte{0xa5});
  message.Store(bytes.data());
  for (size_t i = 0; i < kCmDataBytes * 8; ++i) {
    const bool is_set = ((bytes[i / 8] >> (7 - i % 8)) & std::byte{1}) != std::byte{0};
    EXPECT_EQ(is_set, i >= bit && i < bit + bits) << name << " bit " << i;
  }
  EXPECT_EQ(get(Message::Load(bytes.data())), get(message)) << name;
}

// The largest number of `bits` bits.
constexpr uint64_t AllOnes(size_t bits) { return ~uint64_t{0} >> (64 - bits); }

#define CHECK_FIELD(name, type, bit, bits)                                             \
  ExpectFieldIsAlone<Message>(                                                         \
      #name, bit, bits, [](Message& m) { m.name = static_cast<type>(AllOnes(bits)); }, \
      [](const Message& m) { return m.name; });
#define CHECK_BYTES(name, at, size)                                              \
  ExpectFieldIsAlone<Message>(                                                   \
      #name, (at)*8, (size)*8, [](Message& m) { m.name.fill(std::byte{0xff}); }, \
      [](const Message& m) { return m.name; });
#define FIELD_TEST(Name, FIELDS)                   \
  TEST(CmFields, Name##FieldsTouchOnlyTheirBits) { \
    using Message = Name;                          \
    FIELDS(CHECK_FIELD, CHECK_BYTES)               \
  }
FIELD_TEST(CmReq, VERBENA_CM_REQ_FIELDS)
FIELD_TEST(CmRep, VERBENA_CM_REP_FIELDS)
FIELD_TEST(CmMra, VERBENA_CM_MRA_FIELDS)
FIELD_TEST(CmRej, VERBENA_CM_REJ_FIELDS)
FIELD_TEST(CmRtu, VERBENA_CM_RTU_FIELDS)
FIELD_TEST(CmDreq, VERBENA_CM_DREQ_FIELDS)
FIELD_TEST(CmDrep, VERBENA_CM_DREP_FIELDS)
FIELD_TEST(CmSidrReq, VERBENA_CM_SIDR_REQ_FIELDS)
FIELD_TEST(CmSidrRep, VERBENA_CM_SIDR_REP_FIELDS)

TEST(CmFields, TooWideValuesAreCut) {
  CmReq req;
  req.local_qpn = 0xff123456;
  req.transport = 0xff;
  std::array<std::byte, kCmDataBytes> bytes;
  req.Store(bytes.data());
  const CmReq read = CmReq::Load(bytes.data());
  EXPECT_EQ(read.local_qpn, 0x123456u);
  EXPECT_EQ(read.transport, 3);
  EXPECT_EQ(read.remote_response_timeout, 0);
  EXPECT_EQ(read.responder_resources, 0);
}

}  // namespace
}  // namespace verbena::transport
