// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/packet_builder.h"

#include <gtest/gtest.h>

#include "tests/testing/frames.h"
#include "tests/testing/packet_matchers.h"

namespace verbena::transport {
namespace {

using verbena::testing::ByteVector;
using verbena::testing::CountingBytes;
using verbena::testing::FromHex;
using verbena::testing::Ipv4Address;
using verbena::testing::Ipv6Address;

TEST(PadBytes, FillUpToAMultipleOfFour) {
  EXPECT_EQ(PadBytes(0), 0u);
  EXPECT_EQ(PadBytes(1), 3u);
  EXPECT_EQ(PadBytes(2), 2u);
  EXPECT_EQ(PadBytes(3), 1u);
  EXPECT_EQ(PadBytes(4), 0u);
  EXPECT_EQ(PadBytes(4097), 3u);
}

// The frame written out by hand, from the layouts of the specifications; the
// IPv4 checksum added up by hand, too.
TEST(PacketBuilder, WritesEveryByteOverPoisonedBuffer) {
  PacketAddress address = Ipv4Address();
  address.has_vlan = true;
  address.vlan_tci = 5;
  address.traffic_class = 0x68;
  address.udp_source_port = 0xc123;
  TransportHeaders headers;
  headers.bth.opcode = Opcode::kRcWriteOnlyImm;
  headers.bth.solicited = true;
  headers.bth.dest_qpn = Qpn(0x11);
  headers.bth.ack_req = true;
  headers.bth.psn = Psn(0x222222);
  headers.reth = {0x7f0000001000, Rkey(0x1234), 5};
  headers.imm.value = 0xc0ffee01;
  // IP length: 20 + 8 + 32 + 5 + 3 + 4 = 72; UDP: 52.
  const ByteVector expected = FromHex(
      "020000000002 020000000001 8100 0005 0800"
      "45 68 0048 0000 4000 40 11 263b 0a000001 0a000002"
      "c123 12b7 0034 0000"
      "0b f0 ffff 00 000011 80 222222"
      "00007f0000001000 00001234 00000005"
      "c0ffee01");
  for (const std::byte poison : {std::byte{0}, std::byte{0xff}, std::byte{0xa5}}) {
    ByteVector out(kMaxHeaderBytes, poison);
    ASSERT_EQ(WriteHeaders(address, headers, 5, out.data()), expected.size());
    out.resize(expected.size());
    EXPECT_EQ(out, expected);
  }
}

TEST(PacketBuilder, WritesIpv6OverPoisonedBuffer) {
  PacketAddress address = Ipv6Address();
  address.traffic_class = 0x6a;
  address.flow_label = 0x12345;
  address.hop_limit = 9;
  TransportHeaders headers;
  headers.bth.opcode = Opcode::kUdSendOnly;
  headers.bth.mig_req = false;
  headers.bth.dest_qpn = Qpn(1);
  headers.deth = {Qkey(0x80010000), 0, Qpn(1)};
  // IPv6 and UDP length: 8 + 20 + 256 + 4 = 288.
  const ByteVector expected = FromHex(
      "020000000002 020000000001 86dd"
      "66a12345 0120 11 09"
      "fd000000000000000000000000000001 fd000000000000000000000000000002"
      "c000 12b7 0120 0000"
      "64 00 ffff 00 000001 00 000000"
      "80010000 00 000001");
  ByteVector out(kMaxHeaderBytes, std::byte{0xa5});
  ASSERT_EQ(WriteHeaders(address, headers, 256, out.data()), expected.size());
  out.resize(expected.size());
  EXPECT_EQ(out, expected);
}

TEST(PacketBuilder, StaysWithinTheRoomItAsksFor) {
  for (unsigned code = 0; code < 256; ++code) {
    TransportHeaders headers;
    headers.bth.opcode = static_cast<Opcode>(code);
    if (TraitsOf(headers.bth.opcode).is_reserved()) continue;
    for (int variant = 0; variant < 4; ++variant) {
      PacketAddress address = (variant & 1) != 0 ? Ipv6Address() : Ipv4Address();
      address.has_vlan = (variant & 2) != 0;
      const PacketTemplate path(address);
      ByteVector out(kMaxHeaderBytes);  // ASan guards what is behind
      const size_t bytes = path.WriteHeaders(headers, 0, out.data());
      EXPECT_EQ(bytes, path.HeaderBytes(headers.bth.opcode));
      EXPECT_LE(bytes, kMaxHeaderBytes);
      EXPECT_EQ(path.FrameBytes(headers.bth.opcode, 0), bytes + 4);
    }
  }
}

TEST(PacketBuilder, CnpCarriesSixteenZeroBytes) {
  TransportHeaders headers;
  headers.bth.opcode = Opcode::kCnp;
  ByteVector out(kMaxHeaderBytes, std::byte{0xff});
  const size_t bytes = WriteHeaders(Ipv4Address(), headers, 0, out.data());
  ASSERT_EQ(bytes, 14u + 20 + 8 + 12 + 16);
  for (size_t i = bytes - 16; i < bytes; ++i) EXPECT_EQ(out[i], std::byte{0});
}

TEST(PacketBuilder, PiecesGiveTheSameFrameAsOneBuffer) {
  for (size_t payload_bytes = 0; payload_bytes < 40; ++payload_bytes) {
    const ByteVector payload = CountingBytes(payload_bytes);
    const ByteVector whole =
        verbena::testing::BuildFrame(Ipv4Address(), Opcode::kRcSendOnly, payload);
    const PacketTemplate path(Ipv4Address());
    TransportHeaders headers;
    headers.bth.opcode = Opcode::kRcSendOnly;
    ByteVector head(kMaxHeaderBytes);
    head.resize(path.WriteHeaders(headers, payload_bytes, head.data()));
    IcrcAccumulator icrc(std::span<const std::byte>(head).subspan(path.l3_offset()), false);
    const auto [first, second] = std::pair(payload_bytes / 2, payload_bytes - payload_bytes / 2);
    icrc.Add(std::span<const std::byte>(payload).first(first));
    icrc.Add(std::span<const std::byte>(payload).last(second));
    ByteVector tail(7, std::byte{0xa5});
    tail.resize(WritePadAndIcrc(icrc, payload_bytes, tail.data()));

    ByteVector pieces = head;
    pieces.insert(pieces.end(), payload.begin(), payload.end());
    pieces.insert(pieces.end(), tail.begin(), tail.end());
    EXPECT_EQ(pieces, whole) << payload_bytes;
    EXPECT_EQ(whole.size(), path.FrameBytes(Opcode::kRcSendOnly, payload_bytes));
  }
}

TEST(PacketBuilder, TemplateIsReusable) {
  const PacketTemplate path(Ipv4Address());
  TransportHeaders headers;
  headers.bth.opcode = Opcode::kRcSendMiddle;
  ByteVector used(kMaxHeaderBytes);
  for (const size_t payload_bytes : {4096, 0, 1, 65000, 17}) {
    ByteVector fresh(kMaxHeaderBytes);
    const size_t bytes = path.WriteHeaders(headers, payload_bytes, used.data());
    ASSERT_EQ(WriteHeaders(Ipv4Address(), headers, payload_bytes, fresh.data()), bytes);
    EXPECT_TRUE(
        std::equal(used.begin(), used.begin() + static_cast<ptrdiff_t>(bytes), fresh.begin()));
    EXPECT_TRUE(Ipv4HeaderChecksumIsRight(used.data() + path.l3_offset()));
  }
}

TEST(PacketBuilder, FieldsOfAPacketComeBack) {
  PacketAddress address = Ipv4Address();
  address.has_vlan = true;
  address.vlan_tci = 0x6005;
  address.traffic_class = 0xff;
  address.hop_limit = 1;
  address.ipv4_id = 0xfada;
  address.ipv4_flags_fragment = 0xc000;
  address.udp_checksum = 0xbeef;
  TransportHeaders headers;
  headers.bth = {.opcode = Opcode::kXrcCompareSwap,
                 .solicited = true,
                 .mig_req = false,
                 .pkey = Pkey(0x7fff),
                 .fecn = true,
                 .becn = true,
                 .reserved6 = 0x2a,
                 .dest_qpn = Qpn(0xabcdef),
                 .ack_req = true,
                 .reserved7 = 0x55,
                 .psn = Psn(0xffffff)};
  headers.xrceth = {0x77, SrqNumber(0x123456)};
  headers.atomic_eth = {~uint64_t{0}, Rkey(1), 2, 3};
  const ByteVector frame = verbena::testing::BuildFrame(address, headers);
  const auto packet = PacketView::Parse(frame);
  ASSERT_TRUE(packet.ok());
  EXPECT_TRUE(AddressOf(*packet) == address);
  EXPECT_TRUE(HeadersOf(*packet) == headers);
}

}  // namespace
}  // namespace verbena::transport
