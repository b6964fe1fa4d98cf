// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/packet_view.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "tests/testing/frames.h"
#include "tests/testing/packet_matchers.h"

namespace verbena::transport {
namespace {

using verbena::testing::BuildFrame;
using verbena::testing::ByteVector;
using verbena::testing::CountingBytes;
using verbena::testing::HasOpcode;
using verbena::testing::HasPayload;
using verbena::testing::HasPsn;
using verbena::testing::Ipv4Address;
using verbena::testing::Ipv6Address;

constexpr size_t kL3 = EthernetHeader::kBytes;
constexpr size_t kUdpOfIpv4 = kL3 + Ipv4Header::kBytes;
constexpr size_t kBthOfIpv4 = kUdpOfIpv4 + UdpHeader::kBytes;

// A good packet: RC SEND_ONLY with three bytes, pad 1, over IPv4 without VLAN.
ByteVector GoodFrame() { return BuildFrame(Ipv4Address(), Opcode::kRcSendOnly, CountingBytes(3)); }

void FixIpv4Checksum(ByteVector& frame) {
  StoreBe16(&frame[kL3 + 10], Ipv4HeaderChecksum(&frame[kL3]));
}

// The error of the good frame after a change.
ParseError ErrorAfter(const std::function<void(ByteVector&)>& change,
                      ByteVector frame = GoodFrame()) {
  EXPECT_TRUE(PacketView::Parse(frame).ok());
  change(frame);
  const auto packet = PacketView::Parse(frame);
  EXPECT_FALSE(packet.ok());
  return packet.ok() ? ParseError{0xff} : packet.error();
}

TEST(PacketViewParse, RefusesWhatIsNotIp) {
  for (const uint16_t ether_type : {uint16_t{kEtherTypeArp}, uint16_t{0x88cc}, uint16_t{0}}) {
    EXPECT_EQ(ErrorAfter([&](ByteVector& f) { StoreBe16(&f[12], ether_type); }),
              ParseError::kNotIp);
  }
}

TEST(PacketViewParse, RefusesASecondVlanTag) {
  PacketAddress address = Ipv4Address();
  address.has_vlan = true;
  EXPECT_EQ(ErrorAfter([](ByteVector& f) { StoreBe16(&f[16], kEtherTypeVlan); },
                       BuildFrame(address, Opcode::kRcSendOnly)),
            ParseError::kNotIp);
}

TEST(PacketViewParse, RefusesTheOtherIpVersion) {
  EXPECT_EQ(ErrorAfter([](ByteVector& f) { f[kL3] = std::byte{0x65}; }), ParseError::kBadIpHeader);
  EXPECT_EQ(ErrorAfter([](ByteVector& f) { f[kL3] = std::byte{0x40}; },
                       BuildFrame(Ipv6Address(), Opcode::kRcSendOnly)),
            ParseError::kBadIpHeader);
}

TEST(PacketViewParse, RefusesIpv4Options) {
  for (const int words : {0, 4, 6, 15}) {
    EXPECT_EQ(ErrorAfter([&](ByteVector& f) {
                f[kL3] = static_cast<std::byte>(0x40 | words);
                FixIpv4Checksum(f);
              }),
              ParseError::kBadIpHeader)
        << words;
  }
}

TEST(PacketViewParse, RefusesAWrongIpv4Checksum) {
  EXPECT_EQ(ErrorAfter([](ByteVector& f) { f[kL3 + 8] = std::byte{63}; }),
            ParseError::kBadIpChecksum);
}

TEST(PacketViewParse, RefusesFragments) {
  // Both the first fragment and later ones; the reserved flag is no fragment.
  for (const uint16_t bits : {uint16_t{0x2000}, uint16_t{0x0001}, uint16_t{0x1fff}}) {
    EXPECT_EQ(ErrorAfter([&](ByteVector& f) {
                StoreBe16(&f[kL3 + 6], bits);
                FixIpv4Checksum(f);
              }),
              ParseError::kFragment)
        << bits;
  }
  EXPECT_EQ(ErrorAfter([](ByteVector& f) { f[kL3 + 6] = std::byte{44}; },
                       BuildFrame(Ipv6Address(), Opcode::kRcSendOnly)),
            ParseError::kFragment);
}

TEST(PacketViewParse, RefusesOtherProtocols) {
  EXPECT_EQ(ErrorAfter([](ByteVector& f) {
              f[kL3 + 9] = std::byte{6};
              FixIpv4Checksum(f);
            }),
            ParseError::kNotUdp);
  EXPECT_EQ(ErrorAfter([](ByteVector& f) { f[kL3 + 6] = std::byte{58}; },
                       BuildFrame(Ipv6Address(), Opcode::kRcSendOnly)),
            ParseError::kNotUdp);
}

TEST(PacketViewParse, RefusesOtherPorts) {
  EXPECT_EQ(ErrorAfter([](ByteVector& f) { StoreBe16(&f[kUdpOfIpv4 + 2], 4790); }),
            ParseError::kNotRoce);
}

TEST(PacketViewParse, TakesAnySourcePort) {
  ByteVector frame = GoodFrame();
  StoreBe16(&frame[kUdpOfIpv4], 4791);
  EXPECT_TRUE(PacketView::Parse(frame).ok());
}

TEST(PacketViewParse, RefusesLengthsThatContradictEachOther) {
  // IP beyond the frame; UDP beyond IP; UDP shorter than IP; IP without room
  // for its own header or for UDP.
  EXPECT_EQ(ErrorAfter([](ByteVector& f) {
              StoreBe16(&f[kL3 + 2], static_cast<uint16_t>(f.size() - kL3 + 1));
              FixIpv4Checksum(f);
            }),
            ParseError::kTruncatedIp);
  EXPECT_EQ(ErrorAfter([](ByteVector& f) {
              StoreBe16(&f[kUdpOfIpv4 + 4], static_cast<uint16_t>(f.size() - kUdpOfIpv4 + 1));
            }),
            ParseError::kTruncatedUdp);
  EXPECT_EQ(ErrorAfter([](ByteVector& f) {
              StoreBe16(&f[kUdpOfIpv4 + 4], static_cast<uint16_t>(f.size() - kUdpOfIpv4 - 4));
            }),
            ParseError::kTrailingBytes);
  EXPECT_EQ(ErrorAfter([](ByteVector& f) {
              StoreBe16(&f[kL3 + 2], 19);
              FixIpv4Checksum(f);
            }),
            ParseError::kBadIpHeader);
  EXPECT_EQ(ErrorAfter([](ByteVector& f) {
              StoreBe16(&f[kL3 + 2], 27);
              FixIpv4Checksum(f);
            }),
            ParseError::kTruncatedUdp);
  EXPECT_EQ(ErrorAfter([](ByteVector& f) { StoreBe16(&f[kUdpOfIpv4 + 4], 0); }),
            ParseError::kTruncatedUdp);
}

TEST(PacketViewParse, RefusesAnyTransportVersionButZero) {
  for (int version = 1; version < 16; ++version) {
    EXPECT_EQ(ErrorAfter([&](ByteVector& f) {
                f[kBthOfIpv4 + 1] = static_cast<std::byte>(0x50 | version);
              }),
              ParseError::kBadTver);
  }
}

TEST(PacketViewParse, RefusesEveryReservedOpcode) {
  size_t reserved = 0;
  for (unsigned code = 0; code < 256; ++code) {
    if (!TraitsOf(static_cast<Opcode>(code)).is_reserved()) continue;
    ++reserved;
    EXPECT_EQ(ErrorAfter([&](ByteVector& f) { f[kBthOfIpv4] = static_cast<std::byte>(code); }),
              ParseError::kReservedOpcode);
  }
  EXPECT_EQ(reserved, 256u - 63u);
}

TEST(PacketViewParseReserved, ShowsBthAddressesAndIcrcOfReservedOpcodesOnly) {
  TransportHeaders headers;
  headers.bth.opcode = Opcode::kRcSendOnly;
  headers.bth.dest_qpn = Qpn(0x123456);
  headers.bth.psn = Psn(77);
  const ByteVector payload = verbena::testing::CountingBytes(10);
  for (const bool is_ipv6 : {false, true}) {
    const PacketAddress address =
        is_ipv6 ? verbena::testing::Ipv6Address() : verbena::testing::Ipv4Address();
    ByteVector frame = BuildFrame(address, headers, payload);
    EXPECT_FALSE(PacketView::ParseReserved(frame).ok());
    const size_t bth = is_ipv6 ? kBthOfIpv4 + 20 : kBthOfIpv4;
    frame[bth] = std::byte{0x18};
    const auto view = PacketView::ParseReserved(frame);
    ASSERT_TRUE(view.ok());
    EXPECT_TRUE(view->traits().is_reserved());
    EXPECT_EQ(view->dest_qpn(), Qpn(0x123456));
    EXPECT_EQ(view->psn(), Psn(77));
    EXPECT_EQ(view->source_gid(), address.source_gid);
    EXPECT_EQ(view->payload_bytes(), payload.size());
    EXPECT_EQ(view->frame_bytes(), frame.size());
    EXPECT_FALSE(view->VerifyIcrc());  // it was computed for the other opcode
    StoreLe32(&frame[frame.size() - kIcrcBytes], view->ComputeIcrc());
    EXPECT_TRUE(PacketView::ParseReserved(frame)->VerifyIcrc());
    for (size_t bytes = 0; bytes < frame.size(); ++bytes) {
      EXPECT_FALSE(PacketView::ParseReserved(std::span(frame).first(bytes)).ok()) << bytes;
    }
    frame[bth + 1] = static_cast<std::byte>(0x01);  // transport version
    EXPECT_FALSE(PacketView::ParseReserved(frame).ok());
  }
}

TEST(PacketViewParse, RefusesAPadThatDoesNotFit) {
  // No payload at all, but a pad count.
  EXPECT_EQ(ErrorAfter([](ByteVector& f) { f[kBthOfIpv4 + 1] = std::byte{0x70}; },
                       BuildFrame(Ipv4Address(), Opcode::kRcSendOnly)),
            ParseError::kBadPad);
  // A packet that is no multiple of four bytes.
  for (const uint16_t less : {uint16_t{1}, uint16_t{2}, uint16_t{3}}) {
    EXPECT_EQ(ErrorAfter([&](ByteVector& f) {
                const size_t udp_bytes = f.size() - kUdpOfIpv4;
                verbena::testing::CutConsistently(f, false,
                                                  static_cast<uint16_t>(udp_bytes - less));
              }),
              ParseError::kBadPad);
  }
}

TEST(PacketViewParse, RefusesAPayloadThatTheOpcodeDoesNotHave) {
  const Opcode without_payload[] = {Opcode::kRcReadRequest, Opcode::kRcAcknowledge,
                                    Opcode::kRcAtomicAcknowledge, Opcode::kRcCompareSwap,
                                    Opcode::kCnp};
  for (const Opcode opcode : without_payload) {
    const auto packet = PacketView::Parse(BuildFrame(Ipv4Address(), opcode, CountingBytes(4)));
    ASSERT_FALSE(packet.ok()) << OpcodeName(opcode);
    EXPECT_EQ(packet.error(), ParseError::kTrailingBytes);
  }
}

TEST(PacketViewParse, IgnoresEthernetPadding) {
  ByteVector frame = GoodFrame();
  const size_t frame_bytes = frame.size();
  frame.resize(frame_bytes + 38, std::byte{0xa5});
  const auto packet = PacketView::Parse(frame);
  ASSERT_TRUE(packet.ok());
  EXPECT_EQ(packet->frame_bytes(), frame_bytes);
  EXPECT_THAT(*packet, HasPayload(CountingBytes(3)));
  EXPECT_TRUE(packet->VerifyIcrc());
}

TEST(PacketViewParse, TakesEveryOpcodeOverBothIpVersionsAndVlan) {
  for (unsigned code = 0; code < 256; ++code) {
    const auto opcode = static_cast<Opcode>(code);
    const OpcodeTraits& traits = TraitsOf(opcode);
    if (traits.is_reserved()) continue;
    for (int variant = 0; variant < 4; ++variant) {
      PacketAddress address = (variant & 1) != 0 ? Ipv6Address() : Ipv4Address();
      address.has_vlan = (variant & 2) != 0;
      const ByteVector payload = CountingBytes(traits.carries_payload ? 5 : 0);
      const ByteVector frame = BuildFrame(address, opcode, payload);
      const auto packet = PacketView::Parse(frame);
      ASSERT_TRUE(packet.ok()) << OpcodeName(opcode) << ": " << Describe(packet.error());
      EXPECT_THAT(*packet, HasOpcode(opcode));
      EXPECT_THAT(*packet, HasPayload(payload));
      EXPECT_EQ(packet->frame_bytes(), frame.size());
      EXPECT_TRUE(packet->VerifyIcrc());
    }
  }
}

TEST(PacketView, ShowsTheLinkAndNetworkLayerOfIpv4) {
  PacketAddress address = Ipv4Address();
  address.has_vlan = true;
  address.vlan_tci = 0xa005;
  address.traffic_class = 0x6a;
  address.hop_limit = 7;
  address.ipv4_id = 0x1234;
  address.udp_source_port = 0xd872;
  const ByteVector frame = BuildFrame(address, Opcode::kRcSendOnly);
  const auto packet = PacketView::Parse(frame);
  ASSERT_TRUE(packet.ok());
  EXPECT_FALSE(packet->is_ipv6());
  EXPECT_TRUE(packet->has_vlan());
  EXPECT_EQ(packet->vlan_tci(), 0xa005);
  EXPECT_EQ(packet->l3_offset(), 18u);
  EXPECT_EQ(packet->dscp(), 26);
  EXPECT_EQ(packet->ecn(), Ecn::kEct0);
  EXPECT_EQ(packet->hop_limit(), 7);
  EXPECT_EQ(packet->ipv4().identification, 0x1234);
  EXPECT_EQ(packet->udp().source_port, 0xd872);
  EXPECT_EQ(packet->flow_label(), 0u);
  EXPECT_EQ(packet->source_gid().ToString(), "::ffff:10.0.0.1");
  EXPECT_EQ(packet->destination_gid().ToString(), "::ffff:10.0.0.2");
  EXPECT_EQ(packet->ethernet().source.ToString(), "02:00:00:00:00:01");
  EXPECT_EQ(packet->ethernet().destination.ToString(), "02:00:00:00:00:02");
}

TEST(PacketView, ShowsTheNetworkLayerOfIpv6) {
  PacketAddress address = Ipv6Address();
  address.traffic_class = 0x6b;
  address.hop_limit = 9;
  address.flow_label = 0x12345;
  const ByteVector frame = BuildFrame(address, Opcode::kRcSendOnly);
  const auto packet = PacketView::Parse(frame);
  ASSERT_TRUE(packet.ok());
  EXPECT_TRUE(packet->is_ipv6());
  EXPECT_FALSE(packet->has_vlan());
  EXPECT_EQ(packet->vlan_tci(), 0);
  EXPECT_EQ(packet->dscp(), 26);
  EXPECT_EQ(packet->ecn(), Ecn::kCe);
  EXPECT_EQ(packet->hop_limit(), 9);
  EXPECT_EQ(packet->flow_label(), 0x12345u);
  EXPECT_EQ(packet->source_gid(), *Gid::Parse("fd00::1"));
  EXPECT_EQ(packet->destination_gid(), *Gid::Parse("fd00::2"));
}

TEST(PacketView, LengthsCountPadAndIcrc) {
  const auto frame = GoodFrame();
  const auto packet = PacketView::Parse(frame);
  ASSERT_TRUE(packet.ok());
  EXPECT_EQ(packet->payload_bytes(), 3u);
  EXPECT_EQ(packet->pad(), 1);
  EXPECT_EQ(packet->l3_bytes(), 20u + 8 + 12 + 3 + 1 + 4);
  EXPECT_EQ(packet->frame_bytes(), 14u + packet->l3_bytes());
  EXPECT_EQ(packet->headers().size(), 14u + 20 + 8 + 12);
  EXPECT_EQ(packet->payload_offset(), packet->headers().size());
}

TEST(PacketView, IcrcCoversPayloadPadAndHeaders) {
  ByteVector frame = GoodFrame();
  const auto packet = PacketView::Parse(frame);
  ASSERT_TRUE(packet.ok());
  for (const size_t offset : {kBthOfIpv4 + 5, packet->payload_offset(), frame.size() - 5}) {
    frame[offset] ^= std::byte{1};
    EXPECT_FALSE(PacketView::Parse(frame)->VerifyIcrc()) << offset;
    frame[offset] ^= std::byte{1};
  }
  EXPECT_TRUE(PacketView::Parse(frame)->VerifyIcrc());
}

TEST(PacketViewParseHead, SeesAPacketWhosePayloadLiesElsewhere) {
  TransportHeaders headers;
  headers.bth.opcode = Opcode::kRcWriteOnlyImm;
  headers.bth.psn = Psn(0x123456);
  headers.imm.value = 7;
  const ByteVector whole = BuildFrame(Ipv4Address(), headers, CountingBytes(1001));
  const size_t header_bytes = PacketView::Parse(whole)->payload_offset();

  // A heap block of exactly this length: a reader beyond it is caught by ASan.
  const ByteVector head(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(header_bytes));
  const auto packet = PacketView::ParseHead(head, whole.size());
  ASSERT_TRUE(packet.ok());
  EXPECT_THAT(*packet, HasPsn(Psn(0x123456)));
  EXPECT_FALSE(packet->has_contiguous_payload());
  EXPECT_EQ(packet->payload_bytes(), 1001u);
  EXPECT_EQ(packet->imm().value, 7u);
  EXPECT_EQ(packet->frame_bytes(), whole.size());

  for (size_t bytes = 0; bytes < header_bytes; ++bytes) {
    const ByteVector cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(bytes));
    EXPECT_FALSE(PacketView::ParseHead(cut, whole.size()).ok()) << bytes;
  }
  EXPECT_FALSE(PacketView::ParseHead(head, whole.size() - 1).ok());
}

TEST(ParseErrorNames, AreUnique) {
  std::set<std::string_view> names;
  for (size_t i = 0; i < kParseErrorCount; ++i) {
    const auto error = static_cast<ParseError>(i);
    EXPECT_TRUE(names.insert(ParseErrorName(error)).second);
    EXPECT_TRUE(Describe(error).starts_with(std::string(ParseErrorName(error)) + ": "));
  }
  EXPECT_EQ(ParseErrorName(ParseError::kReservedOpcode), "reserved_opcode");
}

}  // namespace
}  // namespace verbena::transport
