// SPDX-License-Identifier: Apache-2.0
//
// The ICRC against a second, slow implementation that follows the text of the
// rule; that the rule is right is shown by golden_vectors_test.
#include "transport/wire/icrc.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/testing/frames.h"
#include "transport/wire/packet_view.h"

namespace verbena::transport {
namespace {

using verbena::testing::BuildFrame;
using verbena::testing::ByteVector;
using verbena::testing::CountingBytes;

// CRC-32 bit by bit; "123456789" gives 0xcbf43926.
uint32_t SlowCrc32(const ByteVector& bytes) {
  uint32_t crc = 0xffffffff;
  for (std::byte byte : bytes) {
    crc ^= std::to_integer<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

// Offsets from the IP header of the bytes that count as ones.
std::set<size_t> MaskedBytes(bool is_ipv6) {
  if (is_ipv6) return {1, 2, 3, 7, 40 + 6, 40 + 7, 40 + 8 + 4};
  return {1, 8, 10, 11, 20 + 6, 20 + 7, 20 + 8 + 4};
}

uint32_t SlowIcrc(const ByteVector& l3, bool is_ipv6) {
  ByteVector masked(8 + l3.size(), std::byte{0xff});
  std::copy(l3.begin(), l3.end(), masked.begin() + 8);
  for (size_t offset : MaskedBytes(is_ipv6)) masked[8 + offset] = std::byte{0xff};
  if (is_ipv6) masked[8] |= std::byte{0x0f};  // upper half of the traffic class
  return SlowCrc32(masked);
}

ByteVector L3Of(bool is_ipv6, size_t payload_bytes) {
  const auto address = is_ipv6 ? verbena::testing::Ipv6Address() : verbena::testing::Ipv4Address();
  const ByteVector frame = BuildFrame(address, Opcode::kRcWriteOnly, CountingBytes(payload_bytes));
  return ByteVector(frame.begin() + EthernetHeader::kBytes, frame.end() - kIcrcBytes);
}

TEST(Icrc, SlowImplementationGivesTheKnownCheckValue) {
  EXPECT_EQ(SlowCrc32(verbena::testing::FromHex("313233343536373839")), 0xcbf43926u);
}

TEST(Icrc, EqualsTheSlowImplementationForManyLengths) {
  for (const bool is_ipv6 : {false, true}) {
    for (const size_t bytes : {0, 1, 2, 3, 4, 15, 16, 63, 64, 255, 256, 1000, 4096, 9000}) {
      const ByteVector l3 = L3Of(is_ipv6, bytes);
      EXPECT_EQ(Icrc(l3, is_ipv6), SlowIcrc(l3, is_ipv6)) << bytes;
    }
  }
}

TEST(Icrc, IgnoresExactlyTheBitsThatRoutersChange) {
  for (const bool is_ipv6 : {false, true}) {
    ByteVector l3 = L3Of(is_ipv6, 8);
    const uint32_t icrc = Icrc(l3, is_ipv6);
    const std::set<size_t> masked = MaskedBytes(is_ipv6);
    for (size_t bit = 0; bit < 8 * l3.size(); ++bit) {
      const std::byte flipped = std::byte{1} << (bit % 8);
      const bool half_byte = is_ipv6 && bit / 8 == 0 && bit < 4;  // low bits of byte 0
      l3[bit / 8] ^= flipped;
      EXPECT_EQ(Icrc(l3, is_ipv6) == icrc, masked.count(bit / 8) == 1 || half_byte)
          << (is_ipv6 ? "IPv6" : "IPv4") << " byte " << bit / 8 << " bit " << bit % 8;
      l3[bit / 8] ^= flipped;
    }
  }
}

TEST(Icrc, IsTheSameInPieces) {
  for (const bool is_ipv6 : {false, true}) {
    const ByteVector l3 = L3Of(is_ipv6, 100);
    const std::span<const std::byte> all(l3);
    const size_t least = (is_ipv6 ? 40 : 20) + 8 + 12;
    for (size_t first = least; first <= l3.size(); ++first) {
      const size_t second = first + (l3.size() - first) / 3;
      IcrcAccumulator icrc(all.first(first), is_ipv6);
      icrc.Add(all.subspan(first, second - first));
      icrc.Add({});
      icrc.Add(all.subspan(second));
      EXPECT_EQ(icrc.value(), Icrc(l3, is_ipv6)) << first;
    }
  }
}

}  // namespace
}  // namespace verbena::transport
