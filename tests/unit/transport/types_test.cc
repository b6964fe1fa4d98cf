// SPDX-License-Identifier: Apache-2.0
#include "transport/types.h"

#include <gtest/gtest.h>

#include <type_traits>

namespace verbena::transport {
namespace {

static_assert(!std::is_convertible_v<uint32_t, Qpn>);
static_assert(!std::is_convertible_v<Lkey, Rkey>);
static_assert(!std::is_constructible_v<Rkey, Lkey>);
static_assert(!std::is_convertible_v<Qpn, uint32_t>);

TEST(Identifier, KeepsTheFieldsWidth) {
  EXPECT_EQ(Qpn(0xff123456).value(), 0x123456u);
  EXPECT_EQ(SrqNumber(0xff000001).value(), 1u);
  EXPECT_EQ(Rkey(0xff123456).value(), 0xff123456u);
  EXPECT_EQ(Pkey(0xffff).value(), 0xffffu);
  EXPECT_EQ(Qpn().value(), 0u);
}

TEST(Msn, CountsModulo24Bits) {
  EXPECT_EQ(Msn(0xffffff).Next(), Msn(0));
  EXPECT_EQ(Msn(0xfffffe) + 3, Msn(1));
}

TEST(Pmtu, BytesAreThoseOfTheEncoding) {
  EXPECT_EQ(PmtuBytes(Pmtu::k256), 256u);
  EXPECT_EQ(PmtuBytes(Pmtu::k512), 512u);
  EXPECT_EQ(PmtuBytes(Pmtu::k1024), 1024u);
  EXPECT_EQ(PmtuBytes(Pmtu::k2048), 2048u);
  EXPECT_EQ(PmtuBytes(Pmtu::k4096), 4096u);
  EXPECT_EQ(PmtuFromBytes(2048), Pmtu::k2048);
  EXPECT_EQ(PmtuFromBytes(1500), std::nullopt);
  EXPECT_EQ(PmtuFromBytes(0), std::nullopt);
  EXPECT_EQ(PmtuFromBytes(8192), std::nullopt);
  EXPECT_FALSE(IsValid(Pmtu{0}));
  EXPECT_FALSE(IsValid(Pmtu{6}));
  EXPECT_TRUE(IsValid(Pmtu{1}));
  EXPECT_TRUE(IsValid(Pmtu{5}));
}

TEST(Gid, OfAnIpv4AddressIsMapped) {
  const Gid gid = Gid::FromIpv4(0x7f580001);
  EXPECT_TRUE(gid.IsV4Mapped());
  EXPECT_EQ(gid.Ipv4(), 0x7f580001u);
  EXPECT_EQ(gid.ToString(), "::ffff:127.88.0.1");
  EXPECT_EQ(gid, Gid::Parse("127.88.0.1"));
  EXPECT_EQ(gid, Gid::Parse("::ffff:127.88.0.1"));
  EXPECT_FALSE(gid.IsLinkLocal());
}

TEST(Gid, KnowsItsKind) {
  EXPECT_TRUE(Gid::Parse("fe80::1")->IsLinkLocal());
  EXPECT_TRUE(Gid::Parse("febf::1")->IsLinkLocal());
  EXPECT_FALSE(Gid::Parse("fec0::1")->IsLinkLocal());
  EXPECT_FALSE(Gid::Parse("fe80::1")->IsV4Mapped());
  // Neither the compatible form nor one with a stray bit is a mapped address.
  EXPECT_FALSE(Gid::Parse("::1.2.3.4")->IsV4Mapped());
  EXPECT_FALSE(Gid::Parse("1::ffff:1.2.3.4")->IsV4Mapped());
  EXPECT_TRUE(Gid::Parse("ff0e::1")->IsMulticast());
  EXPECT_TRUE(Gid::Parse("239.1.2.3")->IsMulticast());
  EXPECT_FALSE(Gid::Parse("240.0.0.1")->IsMulticast());
  EXPECT_FALSE(Gid::Parse("fe80::1")->IsMulticast());
  EXPECT_TRUE(Gid().IsZero());
  EXPECT_FALSE(Gid::Parse("::1")->IsZero());
}

TEST(Gid, LoadsAndStoresNetworkOrder) {
  const Gid gid = *Gid::Parse("0102:0304:0506:0708:090a:0b0c:0d0e:0f10");
  std::array<std::byte, 18> out;
  out.fill(std::byte{0xee});
  gid.Store(&out[1]);
  for (size_t i = 1; i <= 16; ++i) EXPECT_EQ(out[i], std::byte(i));
  EXPECT_EQ(out[0], std::byte{0xee});
  EXPECT_EQ(out[17], std::byte{0xee});
  EXPECT_EQ(Gid::Load(&out[1]), gid);
}

TEST(Gid, RefusesTextThatIsNoAddress) {
  for (const char* text : {"", "1.2.3", "1.2.3.4.5", "fe80::1::2", "verbena0", "fe80::1%lo"}) {
    EXPECT_EQ(Gid::Parse(text), std::nullopt) << text;
  }
}

TEST(MacAddress, ReadsAndPrintsText) {
  const MacAddress mac = MacAddress::FromUint64(0x0200c0ffee01);
  EXPECT_EQ(mac.ToString(), "02:00:c0:ff:ee:01");
  EXPECT_EQ(MacAddress::Parse("02:00:C0:ff:ee:01"), mac);
  EXPECT_FALSE(mac.IsGroup());
  EXPECT_TRUE(MacAddress::Parse("01:00:5e:00:00:01")->IsGroup());
  EXPECT_TRUE(MacAddress::Broadcast().IsGroup());
  for (const char* text : {"", "02:00:c0:ff:ee", "02:00:c0:ff:ee:0", "02:00:c0:ff:ee:0g",
                           "02-00-c0-ff-ee-01", "02:00:c0:ff:ee:01:"}) {
    EXPECT_EQ(MacAddress::Parse(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace verbena::transport
