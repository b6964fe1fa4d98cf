// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/header_field.h"

#include <gtest/gtest.h>

#include <vector>

#include "transport/wire/aeth.h"
#include "transport/wire/bth.h"
#include "transport/wire/ip_udp.h"
#include "transport/wire/reth.h"

namespace verbena::transport {
namespace {

// Ethernet, IP, UDP, BTH and 28 more bytes, all ones, so that a field shows what it touches.
std::vector<std::byte> Ones(bool ipv6, Opcode opcode) {
  const size_t ip_bytes = ipv6 ? Ipv6Header::kBytes : Ipv4Header::kBytes;
  std::vector<std::byte> frame(14 + ip_bytes + 8 + 12 + 28, std::byte{0xff});
  StoreBe16(&frame[12], ipv6 ? kEtherTypeIpv6 : 0x0800);
  frame[14 + ip_bytes + 8] = static_cast<std::byte>(opcode);
  return frame;
}

void Write(std::vector<std::byte>& frame, const char* name, uint64_t value) {
  const HeaderField* field = FindHeaderField(name);
  ASSERT_NE(field, nullptr) << name;
  EXPECT_TRUE(WriteHeaderField(frame, 14, *field, value)) << name;
  EXPECT_EQ(ReadHeaderField(frame, 14, *field), value) << name;
}

TEST(HeaderField, NamesWhatTheHeadersReadThere) {
  std::vector<std::byte> frame = Ones(false, Opcode::kRcWriteOnly);
  Write(frame, "bth.psn", 0x123456);
  Write(frame, "bth.dest_qpn", 0xabcdef);
  Write(frame, "bth.pkey", 0x7fff);
  Write(frame, "bth.ack_req", 0);
  Write(frame, "bth.pad", 2);
  Write(frame, "reth.va", 0x0102030405060708);
  Write(frame, "reth.rkey", 0x11223344);
  Write(frame, "reth.length", 99);
  const std::byte* bth_bytes = &frame[14 + Ipv4Header::kBytes + 8];
  const Bth bth = Bth::Load(bth_bytes);
  EXPECT_EQ(bth.psn, Psn(0x123456));
  EXPECT_EQ(bth.dest_qpn, Qpn(0xabcdef));
  EXPECT_EQ(bth.pkey, Pkey(0x7fff));
  EXPECT_FALSE(bth.ack_req);
  EXPECT_EQ(bth.pad, 2);
  EXPECT_TRUE(bth.solicited) << "a neighbour";
  EXPECT_TRUE(bth.mig_req) << "a neighbour";
  EXPECT_EQ(bth.tver, 15) << "a neighbour";
  EXPECT_EQ(bth.reserved7, 0x7f) << "a neighbour";
  const Reth reth = Reth::Load(bth_bytes + 12);
  EXPECT_EQ(reth.va, 0x0102030405060708u);
  EXPECT_EQ(reth.rkey.value(), 0x11223344u);
  EXPECT_EQ(reth.dma_length, 99u);
}

TEST(HeaderField, IpFieldsAreThoseOfBothVersions) {
  std::vector<std::byte> v4 = Ones(false, Opcode::kRcSendOnly);
  Write(v4, "ip.dscp", 26);
  Write(v4, "ip.ecn", 1);
  Write(v4, "ip.ttl", 7);
  EXPECT_EQ(v4[15], std::byte{26 << 2 | 1});
  EXPECT_EQ(v4[14 + 8], std::byte{7});
  EXPECT_TRUE(Ipv4HeaderChecksumIsRight(&v4[14]));
  EXPECT_FALSE(WriteHeaderField(v4, 14, *FindHeaderField("ip.flow_label"), 1));

  std::vector<std::byte> v6 = Ones(true, Opcode::kRcSendOnly);
  Write(v6, "ip.dscp", 26);
  Write(v6, "ip.ecn", 1);
  Write(v6, "ip.ttl", 7);
  Write(v6, "ip.flow_label", 0x12345);
  // version 15 | traffic class 26 << 2 | 1 | flow label
  EXPECT_EQ(LoadBe32(&v6[14]), 0xf0000000u | (26u << 2 | 1) << 20 | 0x12345u);
  EXPECT_EQ(v6[14 + 7], std::byte{7});
}

TEST(HeaderField, IsAbsentWhereTheOpcodeHasNoSuchHeader) {
  std::vector<std::byte> frame = Ones(false, Opcode::kRcAcknowledge);
  EXPECT_FALSE(WriteHeaderField(frame, 14, *FindHeaderField("reth.rkey"), 1));
  EXPECT_EQ(ReadHeaderField(frame, 14, *FindHeaderField("reth.rkey")), std::nullopt);
  Write(frame, "aeth.syndrome", 0x63);
  Write(frame, "aeth.msn", 5);
  const Aeth aeth = Aeth::Load(&frame[14 + Ipv4Header::kBytes + 8 + 12]);
  EXPECT_EQ(aeth.syndrome, 0x63);
  EXPECT_EQ(aeth.msn, Msn(5));
}

TEST(HeaderField, BehindTheFramesEndIsAbsent) {
  std::vector<std::byte> frame = Ones(false, Opcode::kRcWriteOnly);
  frame.resize(14 + Ipv4Header::kBytes + 8 + 12 + 15);
  EXPECT_TRUE(WriteHeaderField(frame, 14, *FindHeaderField("reth.rkey"), 1));
  EXPECT_FALSE(WriteHeaderField(frame, 14, *FindHeaderField("reth.length"), 1));
}

TEST(HeaderField, UnknownNamesAreNone) {
  for (const char* name : {"", "bth", "bth.", "psn", "bth.psn ", "BTH.PSN"}) {
    EXPECT_EQ(FindHeaderField(name), nullptr) << name;
  }
}

}  // namespace
}  // namespace verbena::transport
