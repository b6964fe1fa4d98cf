// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/ip_udp.h"

#include <gtest/gtest.h>

#include "tests/testing/frames.h"

namespace verbena::transport {
namespace {

using verbena::testing::FromHex;

TEST(Ipv4Checksum, IsRightForKnownHeaders) {
  // An example of many textbooks.
  const auto header = FromHex("4500 0073 0000 4000 4011 b861 c0a80001 c0a800c7");
  EXPECT_EQ(Ipv4HeaderChecksum(header.data()), 0xb861);
  EXPECT_TRUE(Ipv4HeaderChecksumIsRight(header.data()));
}

TEST(Ipv4Checksum, NoticesEverySingleBit) {
  auto header = FromHex("4500 0073 0000 4000 4011 b861 c0a80001 c0a800c7");
  for (size_t bit = 0; bit < 8 * header.size(); ++bit) {
    header[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(Ipv4HeaderChecksumIsRight(header.data())) << bit;
    header[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(Ipv4Checksum, FoldsCarriesTwice) {
  std::vector<std::byte> header(20, std::byte{0xff});
  StoreBe16(&header[10], Ipv4HeaderChecksum(header.data()));
  EXPECT_EQ(LoadBe16(&header[10]), 0);
  EXPECT_TRUE(Ipv4HeaderChecksumIsRight(header.data()));
}

// Ports that Linux rxe chose for known flow labels and QPNs (captures).
TEST(UdpSourcePort, IsThatOfLinux) {
  EXPECT_EQ(UdpSourcePortFromFlowLabel(0x2b01a), 61456);
  EXPECT_EQ(RoceUdpSourcePort(0x2b01a, Qpn(1), Qpn(2)), 61456);
  // rc_atomics: QPs 0x20 and 0x30; ipv6_rc_mix: 0x2b and 0x46.
  EXPECT_EQ(RoceUdpSourcePort(0, Qpn(0x30), Qpn(0x20)), 50688);
  EXPECT_EQ(RoceUdpSourcePort(0, Qpn(0x46), Qpn(0x2b)), 52162);
  // cm_mckey_v4: a UD QP 0x9c; every MAD comes from QP1.
  EXPECT_EQ(UdUdpSourcePort(Qpn(0x9c)), 58764);
  EXPECT_EQ(UdUdpSourcePort(kManagementQpn), 55410);
}

TEST(UdpSourcePort, IsTheSameFromBothEndsAndAlwaysEphemeral) {
  for (uint32_t a = 1; a < 0x1000000; a += 0x0f1357) {
    for (uint32_t b = 1; b < 0x1000000; b += 0x0e2468) {
      const uint16_t port = RoceUdpSourcePort(0, Qpn(a), Qpn(b));
      EXPECT_EQ(port, RoceUdpSourcePort(0, Qpn(b), Qpn(a)));
      EXPECT_GE(port, 0xc000);
    }
  }
}

TEST(UdpSourcePort, TakesTwentyBitsOfTheFlowLabel) {
  EXPECT_EQ(UdpSourcePortFromFlowLabel(0xfff2b01a), UdpSourcePortFromFlowLabel(0x2b01a));
  // Only bits above the twentieth: as if there were no flow label.
  EXPECT_EQ(RoceUdpSourcePort(0xfff00000, Qpn(3), Qpn(5)), RoceUdpSourcePort(0, Qpn(3), Qpn(5)));
}

}  // namespace
}  // namespace verbena::transport
