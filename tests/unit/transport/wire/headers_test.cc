// SPDX-License-Identifier: Apache-2.0
//
// The five tests of every header of the wire. Each header is described here a
// second time, by the bit positions of the specification (Layout<H>), and what
// Load and Store do is compared with that.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/testing/frames.h"
#include "tests/testing/packet_matchers.h"
#include "transport/wire/aeth.h"
#include "transport/wire/atomic_eth.h"
#include "transport/wire/bth.h"
#include "transport/wire/deth.h"
#include "transport/wire/immediate.h"
#include "transport/wire/ip_udp.h"
#include "transport/wire/reth.h"
#include "transport/wire/xrceth.h"

namespace verbena::transport {
namespace {

using verbena::testing::ByteVector;
using verbena::testing::CutConsistently;
using verbena::testing::FromHex;

template <typename H>
struct Field {
  const char* name;
  size_t first_bit;  // from the header's first byte, most significant bit first
  size_t bits;
  std::function<void(H&, uint64_t)> set;
  std::function<uint64_t(const H&)> get;

  uint64_t Max() const { return ~uint64_t{0} >> (64 - bits); }
};

// `member` is a plain number, a bool or an enumerator.
#define PLAIN_FIELD(H, member, first_bit, bits)                                           \
  Field<H> {                                                                              \
#member, first_bit, bits,                                                               \
        [](H& h, uint64_t v) { h.member = static_cast<decltype(h.member)>(v); },            \
        [](const H& h) { return static_cast<uint64_t>(h.member); } \
  }
// `member` is a strong type.
#define STRONG_FIELD(H, member, first_bit, bits)                                          \
  Field<H> {                                                                              \
#member, first_bit, bits,                                                               \
        [](H& h, uint64_t v) {                                                              \
          using Strong = decltype(h.member);                                                \
          h.member = Strong(static_cast<decltype(h.member.value())>(v));                    \
        },                                                                                  \
        [](const H& h) { return uint64_t{h.member.value()}; } \
  }

template <typename H>
struct Layout;

template <>
struct Layout<Bth> {
  static constexpr const char* kGolden = "17 a0 8001 c5 123456 a5 fedcba";
  static constexpr Opcode kCarrier = Opcode::kRcSendOnly;
  static std::vector<Field<Bth>> Fields() {
    return {PLAIN_FIELD(Bth, opcode, 0, 8),     PLAIN_FIELD(Bth, solicited, 8, 1),
            PLAIN_FIELD(Bth, mig_req, 9, 1),    PLAIN_FIELD(Bth, pad, 10, 2),
            PLAIN_FIELD(Bth, tver, 12, 4),      STRONG_FIELD(Bth, pkey, 16, 16),
            PLAIN_FIELD(Bth, fecn, 32, 1),      PLAIN_FIELD(Bth, becn, 33, 1),
            PLAIN_FIELD(Bth, reserved6, 34, 6), STRONG_FIELD(Bth, dest_qpn, 40, 24),
            PLAIN_FIELD(Bth, ack_req, 64, 1),   PLAIN_FIELD(Bth, reserved7, 65, 7),
            STRONG_FIELD(Bth, psn, 72, 24)};
  }
  static Bth Value() {
    return {.opcode = Opcode::kRcSendOnlyInv,
            .solicited = true,
            .mig_req = false,
            .pad = 2,
            .tver = 0,
            .pkey = Pkey(0x8001),
            .fecn = true,
            .becn = true,
            .reserved6 = 5,
            .dest_qpn = Qpn(0x123456),
            .ack_req = true,
            .reserved7 = 0x25,
            .psn = Psn(0xfedcba)};
  }
};

template <>
struct Layout<Reth> {
  static constexpr const char* kGolden = "0102030405060708 a1a2a3a4 80000000";
  static constexpr Opcode kCarrier = Opcode::kRcReadRequest;
  static std::vector<Field<Reth>> Fields() {
    return {PLAIN_FIELD(Reth, va, 0, 64), STRONG_FIELD(Reth, rkey, 64, 32),
            PLAIN_FIELD(Reth, dma_length, 96, 32)};
  }
  static Reth Value() { return {0x0102030405060708, Rkey(0xa1a2a3a4), 0x80000000}; }
};

template <>
struct Layout<Aeth> {
  static constexpr const char* kGolden = "62 abcdef";
  static constexpr Opcode kCarrier = Opcode::kRcAcknowledge;
  static std::vector<Field<Aeth>> Fields() {
    return {PLAIN_FIELD(Aeth, syndrome, 0, 8), STRONG_FIELD(Aeth, msn, 8, 24)};
  }
  static Aeth Value() { return Aeth::Nak(Msn(0xabcdef), NakCode::kRemoteAccessError); }
};

template <>
struct Layout<AtomicEth> {
  static constexpr const char* kGolden =
      "0102030405060708 a1a2a3a4 1112131415161718 2122232425262728";
  static constexpr Opcode kCarrier = Opcode::kRcCompareSwap;
  static std::vector<Field<AtomicEth>> Fields() {
    return {PLAIN_FIELD(AtomicEth, va, 0, 64), STRONG_FIELD(AtomicEth, rkey, 64, 32),
            PLAIN_FIELD(AtomicEth, swap_add, 96, 64), PLAIN_FIELD(AtomicEth, compare, 160, 64)};
  }
  static AtomicEth Value() {
    return {0x0102030405060708, Rkey(0xa1a2a3a4), 0x1112131415161718, 0x2122232425262728};
  }
};

template <>
struct Layout<AtomicAckEth> {
  static constexpr const char* kGolden = "0102030405060708";
  static constexpr Opcode kCarrier = Opcode::kRcAtomicAcknowledge;
  static std::vector<Field<AtomicAckEth>> Fields() {
    return {PLAIN_FIELD(AtomicAckEth, original, 0, 64)};
  }
  static AtomicAckEth Value() { return {0x0102030405060708}; }
};

template <>
struct Layout<Deth> {
  static constexpr const char* kGolden = "80010000 5a 000001";
  static constexpr Opcode kCarrier = Opcode::kUdSendOnly;
  static std::vector<Field<Deth>> Fields() {
    return {STRONG_FIELD(Deth, qkey, 0, 32), PLAIN_FIELD(Deth, reserved, 32, 8),
            STRONG_FIELD(Deth, source_qpn, 40, 24)};
  }
  static Deth Value() { return {Qkey(0x80010000), 0x5a, Qpn(1)}; }
};

template <>
struct Layout<XrcEth> {
  static constexpr const char* kGolden = "5a 123456";
  static constexpr Opcode kCarrier = Opcode::kXrcSendOnly;
  static std::vector<Field<XrcEth>> Fields() {
    return {PLAIN_FIELD(XrcEth, reserved, 0, 8), STRONG_FIELD(XrcEth, srq, 8, 24)};
  }
  static XrcEth Value() { return {0x5a, SrqNumber(0x123456)}; }
};

template <>
struct Layout<ImmDt> {
  static constexpr const char* kGolden = "c0ffee01";
  static constexpr Opcode kCarrier = Opcode::kRcSendOnlyImm;
  static std::vector<Field<ImmDt>> Fields() { return {PLAIN_FIELD(ImmDt, value, 0, 32)}; }
  static ImmDt Value() { return {0xc0ffee01}; }
};

template <>
struct Layout<Ieth> {
  static constexpr const char* kGolden = "08000288";
  static constexpr Opcode kCarrier = Opcode::kRcSendOnlyInv;
  static std::vector<Field<Ieth>> Fields() { return {STRONG_FIELD(Ieth, rkey, 0, 32)}; }
  static Ieth Value() { return {Rkey(0x08000288)}; }
};

template <>
struct Layout<Feth> {
  static constexpr const char* kGolden = "00000011";
  static constexpr Opcode kCarrier = Opcode::kRcFlush;
  static std::vector<Field<Feth>> Fields() { return {PLAIN_FIELD(Feth, value, 0, 32)}; }
  static Feth Value() { return {0x11}; }
};

template <>
struct Layout<EthernetHeader> {
  static constexpr const char* kGolden = "020000000002 020000000001 86dd";
  static constexpr Opcode kCarrier = Opcode::kRcSendOnly;
  static std::vector<Field<EthernetHeader>> Fields() {
    const auto mac = [](const char* name, size_t bit, MacAddress EthernetHeader::*member) {
      return Field<EthernetHeader>{
          name, bit, 48,
          [member](EthernetHeader& h, uint64_t v) { h.*member = MacAddress::FromUint64(v); },
          [member](const EthernetHeader& h) {
            const std::byte* p = (h.*member).bytes().data();
            return (uint64_t{LoadBe16(p)} << 32) | LoadBe32(p + 2);
          }};
    };
    return {mac("destination", 0, &EthernetHeader::destination),
            mac("source", 48, &EthernetHeader::source),
            PLAIN_FIELD(EthernetHeader, ether_type, 96, 16)};
  }
  static EthernetHeader Value() {
    return {MacAddress::FromUint64(0x020000000002), MacAddress::FromUint64(0x020000000001),
            kEtherTypeIpv6};
  }
};

template <>
struct Layout<VlanTag> {
  static constexpr const char* kGolden = "a005 0800";
  static constexpr Opcode kCarrier = Opcode::kRcSendOnly;
  static std::vector<Field<VlanTag>> Fields() {
    return {PLAIN_FIELD(VlanTag, tci, 0, 16), PLAIN_FIELD(VlanTag, ether_type, 16, 16)};
  }
  static VlanTag Value() { return {0xa005, kEtherTypeIpv4}; }
};

// The example header of many textbooks (checksum b861).
template <>
struct Layout<Ipv4Header> {
  static constexpr const char* kGolden = "45 00 0073 0000 4000 40 11 b861 c0a80001 c0a800c7";
  static constexpr Opcode kCarrier = Opcode::kRcSendOnly;
  static std::vector<Field<Ipv4Header>> Fields() {
    return {PLAIN_FIELD(Ipv4Header, version, 0, 4),
            PLAIN_FIELD(Ipv4Header, header_words, 4, 4),
            PLAIN_FIELD(Ipv4Header, tos, 8, 8),
            PLAIN_FIELD(Ipv4Header, total_length, 16, 16),
            PLAIN_FIELD(Ipv4Header, identification, 32, 16),
            PLAIN_FIELD(Ipv4Header, flags_fragment, 48, 16),
            PLAIN_FIELD(Ipv4Header, ttl, 64, 8),
            PLAIN_FIELD(Ipv4Header, protocol, 72, 8),
            PLAIN_FIELD(Ipv4Header, checksum, 80, 16),
            PLAIN_FIELD(Ipv4Header, source, 96, 32),
            PLAIN_FIELD(Ipv4Header, destination, 128, 32)};
  }
  static Ipv4Header Value() {
    return {
        .total_length = 0x73, .checksum = 0xb861, .source = 0xc0a80001, .destination = 0xc0a800c7};
  }
};

template <>
struct Layout<Ipv6Header> {
  static constexpr const char* kGolden =
      "66a12345 0040 11 09 fd000077000000000000000000000001 fd000077000000000000000000000002";
  static constexpr Opcode kCarrier = Opcode::kRcSendOnly;
  static std::vector<Field<Ipv6Header>> Fields() {
    const auto half = [](const char* name, size_t bit, Gid Ipv6Header::*member, size_t offset) {
      return Field<Ipv6Header>{
          name, bit, 64,
          [member, offset](Ipv6Header& h, uint64_t v) {
            Gid::Bytes bytes = (h.*member).bytes();
            StoreBe64(&bytes[offset], v);
            h.*member = Gid(bytes);
          },
          [member, offset](const Ipv6Header& h) { return LoadBe64(&(h.*member).bytes()[offset]); }};
    };
    return {PLAIN_FIELD(Ipv6Header, version, 0, 4),
            PLAIN_FIELD(Ipv6Header, traffic_class, 4, 8),
            PLAIN_FIELD(Ipv6Header, flow_label, 12, 20),
            PLAIN_FIELD(Ipv6Header, payload_length, 32, 16),
            PLAIN_FIELD(Ipv6Header, next_header, 48, 8),
            PLAIN_FIELD(Ipv6Header, hop_limit, 56, 8),
            half("source high", 64, &Ipv6Header::source, 0),
            half("source low", 128, &Ipv6Header::source, 8),
            half("destination high", 192, &Ipv6Header::destination, 0),
            half("destination low", 256, &Ipv6Header::destination, 8)};
  }
  static Ipv6Header Value() {
    return {.traffic_class = 0x6a,
            .flow_label = 0x12345,
            .payload_length = 0x40,
            .hop_limit = 9,
            .source = *Gid::Parse("fd00:77::1"),
            .destination = *Gid::Parse("fd00:77::2")};
  }
};

template <>
struct Layout<UdpHeader> {
  static constexpr const char* kGolden = "d872 12b7 0038 0000";
  static constexpr Opcode kCarrier = Opcode::kRcSendOnly;
  static std::vector<Field<UdpHeader>> Fields() {
    return {PLAIN_FIELD(UdpHeader, source_port, 0, 16),
            PLAIN_FIELD(UdpHeader, destination_port, 16, 16),
            PLAIN_FIELD(UdpHeader, length, 32, 16), PLAIN_FIELD(UdpHeader, checksum, 48, 16)};
  }
  static UdpHeader Value() { return {55410, 4791, 56, 0}; }
};

bool BitAt(const ByteVector& bytes, size_t bit) {
  return (std::to_integer<unsigned>(bytes[bit / 8]) >> (7 - bit % 8) & 1) != 0;
}

template <typename H>
class WireHeader : public ::testing::Test {
 protected:
  static constexpr size_t kGuard = 3;

  // Stores into a poisoned buffer and checks that nothing around it changed.
  static ByteVector Stored(const H& header, std::byte poison) {
    ByteVector buffer(H::kBytes + 2 * kGuard, poison);
    header.Store(buffer.data() + kGuard);
    for (size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(buffer[i], poison);
      EXPECT_EQ(buffer[buffer.size() - 1 - i], poison);
    }
    return ByteVector(buffer.begin() + kGuard, buffer.end() - kGuard);
  }
};

using AllHeaders =
    ::testing::Types<Bth, Reth, Aeth, AtomicEth, AtomicAckEth, Deth, XrcEth, ImmDt, Ieth, Feth,
                     EthernetHeader, VlanTag, Ipv4Header, Ipv6Header, UdpHeader>;
TYPED_TEST_SUITE(WireHeader, AllHeaders);

TYPED_TEST(WireHeader, DecodesGoldenBytes) {
  const ByteVector golden = FromHex(Layout<TypeParam>::kGolden);
  ASSERT_EQ(golden.size(), size_t{TypeParam::kBytes});
  EXPECT_TRUE(TypeParam::Load(golden.data()) == Layout<TypeParam>::Value());
}

TYPED_TEST(WireHeader, EncodesGoldenBytesOverPoisonedBuffer) {
  const ByteVector golden = FromHex(Layout<TypeParam>::kGolden);
  for (const std::byte poison : {std::byte{0x00}, std::byte{0xff}, std::byte{0xa5}}) {
    EXPECT_EQ(this->Stored(Layout<TypeParam>::Value(), poison), golden);
  }
}

TYPED_TEST(WireHeader, RoundTripsEveryField) {
  for (const auto& field : Layout<TypeParam>::Fields()) {
    for (const uint64_t value : {uint64_t{0}, field.Max(), 0x5555555555555555u & field.Max(),
                                 0x123456789abcdef1u & field.Max()}) {
      TypeParam header = Layout<TypeParam>::Value();
      field.set(header, value);
      const ByteVector bytes = this->Stored(header, std::byte{0xa5});
      const TypeParam loaded = TypeParam::Load(bytes.data());
      EXPECT_EQ(field.get(loaded), value) << field.name;
      EXPECT_TRUE(loaded == header) << field.name;
    }
  }
}

TYPED_TEST(WireHeader, SettersTouchOnlyTheirBits) {
  size_t covered_bits = 0;
  for (const auto& field : Layout<TypeParam>::Fields()) {
    covered_bits += field.bits;
    TypeParam zeros = Layout<TypeParam>::Value();
    TypeParam ones = zeros;
    field.set(zeros, 0);
    field.set(ones, field.Max());
    const ByteVector low = this->Stored(zeros, std::byte{0xa5});
    const ByteVector high = this->Stored(ones, std::byte{0xa5});
    for (size_t bit = 0; bit < 8 * TypeParam::kBytes; ++bit) {
      const bool inside = bit >= field.first_bit && bit < field.first_bit + field.bits;
      EXPECT_EQ(BitAt(low, bit) != BitAt(high, bit), inside) << field.name << ", bit " << bit;
      if (inside) {
        EXPECT_FALSE(BitAt(low, bit)) << field.name << ", bit " << bit;
      }
    }
  }
  EXPECT_EQ(covered_bits, 8 * TypeParam::kBytes) << "a field is missing in this test";
}

// Header structs have no lengths of their own: PacketView::Parse guards them.
TYPED_TEST(WireHeader, RejectsEveryTruncation) {
  for (const bool is_ipv6 : {false, true}) {
    const auto address =
        is_ipv6 ? verbena::testing::Ipv6Address() : verbena::testing::Ipv4Address();
    const ByteVector whole = verbena::testing::BuildFrame(address, Layout<TypeParam>::kCarrier);
    ASSERT_TRUE(PacketView::Parse(whole).ok());
    // The frame is cut off, its length fields are not.
    for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
      const ByteVector cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(bytes));
      EXPECT_FALSE(PacketView::Parse(cut).ok()) << bytes << " bytes of " << whole.size();
    }
    // Length fields that agree with the cut.
    const size_t udp_length = PacketView::Parse(whole)->udp().length;
    for (size_t bytes = UdpHeader::kBytes; bytes < udp_length; ++bytes) {
      ByteVector cut = whole;
      CutConsistently(cut, is_ipv6, static_cast<uint16_t>(bytes));
      const auto packet = PacketView::Parse(cut);
      ASSERT_FALSE(packet.ok()) << bytes << " bytes of UDP, of " << udp_length;
      const bool no_bth = bytes < UdpHeader::kBytes + Bth::kBytes + kIcrcBytes;
      EXPECT_EQ(packet.error(),
                no_bth ? ParseError::kTruncatedUdp : ParseError::kTruncatedTransport);
    }
  }
}

}  // namespace
}  // namespace verbena::transport
