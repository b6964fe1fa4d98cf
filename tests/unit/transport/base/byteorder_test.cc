// SPDX-License-Identifier: Apache-2.0
#include "transport/base/byteorder.h"

#include <gtest/gtest.h>

#include <array>

namespace verbena::transport {
namespace {

constexpr std::array<std::byte, 9> kBytes = {std::byte{0xff}, std::byte{0x81}, std::byte{0x02},
                                             std::byte{0x93}, std::byte{0x04}, std::byte{0xa5},
                                             std::byte{0x06}, std::byte{0xb7}, std::byte{0x08}};

TEST(ByteOrder, LoadsMostSignificantByteFirstAtOddAddresses) {
  EXPECT_EQ(LoadBe8(&kBytes[1]), 0x81u);
  EXPECT_EQ(LoadBe16(&kBytes[1]), 0x8102u);
  EXPECT_EQ(LoadBe24(&kBytes[1]), 0x810293u);
  EXPECT_EQ(LoadBe32(&kBytes[1]), 0x81029304u);
  EXPECT_EQ(LoadBe64(&kBytes[1]), 0x81029304a506b708u);
  EXPECT_EQ(LoadLe32(&kBytes[1]), 0x04930281u);
}

TEST(ByteOrder, StoresWhatLoadsReadAndNothingElse) {
  std::array<std::byte, 10> out;
  const auto reset = [&] { out.fill(std::byte{0xee}); };
  const auto untouched_from = [&](size_t begin) {
    for (size_t i = begin; i < out.size(); ++i) {
      if (out[i] != std::byte{0xee}) return false;
    }
    return out[0] == std::byte{0xee};
  };
  reset();
  StoreBe8(&out[1], 0x81);
  EXPECT_EQ(LoadBe8(&out[1]), 0x81u);
  EXPECT_TRUE(untouched_from(2));
  reset();
  StoreBe16(&out[1], 0x8102);
  EXPECT_EQ(out[1], std::byte{0x81});
  EXPECT_EQ(out[2], std::byte{0x02});
  EXPECT_TRUE(untouched_from(3));
  reset();
  StoreBe24(&out[1], 0xff810293);
  EXPECT_EQ(LoadBe24(&out[1]), 0x810293u);
  EXPECT_TRUE(untouched_from(4));
  reset();
  StoreBe32(&out[1], 0x81029304);
  EXPECT_EQ(out[1], std::byte{0x81});
  EXPECT_EQ(out[4], std::byte{0x04});
  EXPECT_TRUE(untouched_from(5));
  reset();
  StoreLe32(&out[1], 0x81029304);
  EXPECT_EQ(out[1], std::byte{0x04});
  EXPECT_EQ(out[4], std::byte{0x81});
  EXPECT_TRUE(untouched_from(5));
  reset();
  StoreBe64(&out[1], 0x81029304a506b708u);
  EXPECT_EQ(out[1], std::byte{0x81});
  EXPECT_EQ(out[8], std::byte{0x08});
  EXPECT_TRUE(untouched_from(9));
}

static_assert(LoadBe16(&kBytes[0]) == 0xff81, "usable in constant expressions");

}  // namespace
}  // namespace verbena::transport
