// SPDX-License-Identifier: Apache-2.0
//
// Meaning of the AETH syndrome: kinds, credit codes and RNR timers.
#include "transport/wire/aeth.h"

#include <gtest/gtest.h>

#include <array>

namespace verbena::transport {
namespace {

// The credit table of the specification, codes 0 to 30.
constexpr std::array<uint32_t, 31> kCredits = {
    0,   1,   2,   3,   4,    6,    8,    12,   16,   24,   32,   48,    64,    96,    128,  192,
    256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768};

// The RNR timer table of the specification, codes 0 to 31, in microseconds.
constexpr std::array<int64_t, 32> kRnrMicroseconds = {
    655360, 10,    20,    30,    40,    60,     80,     120,    160,    240,   320,
    480,    640,   960,   1280,  1920,  2560,   3840,   5120,   7680,   10240, 15360,
    20480,  30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};

TEST(AethCredits, FollowTheTable) {
  for (uint8_t code = 0; code < kCredits.size(); ++code) {
    EXPECT_EQ(CreditCount(code), kCredits[code]) << int{code};
    EXPECT_EQ(CreditCode(kCredits[code]), code);
  }
  EXPECT_EQ(CreditCount(31), std::nullopt);
}

TEST(AethCredits, CodeNeverPromisesMoreThanThereIs) {
  EXPECT_EQ(CreditCode(5), 4);
  EXPECT_EQ(CreditCode(7), 5);
  EXPECT_EQ(CreditCode(32767), 29);
  EXPECT_EQ(CreditCode(0xffffffff), 30);
}

TEST(AethRnrTimer, FollowsTheTable) {
  for (uint8_t code = 0; code < kRnrMicroseconds.size(); ++code) {
    EXPECT_EQ(RnrTimerDelay(code), Duration::Microseconds(kRnrMicroseconds[code])) << int{code};
  }
}

TEST(AethSyndrome, HasTheBytesSeenOnTheWire) {
  // From captures of Linux rxe: ACK 0x1f, sequence NAK 0x60, access NAK 0x62.
  EXPECT_EQ(Aeth::Ack(Msn(1)).syndrome, 0x1f);
  EXPECT_EQ(Aeth::Nak(Msn(1), NakCode::kPsnSequenceError).syndrome, 0x60);
  EXPECT_EQ(Aeth::Nak(Msn(1), NakCode::kInvalidRequest).syndrome, 0x61);
  EXPECT_EQ(Aeth::Nak(Msn(1), NakCode::kRemoteAccessError).syndrome, 0x62);
  EXPECT_EQ(Aeth::Nak(Msn(1), NakCode::kRemoteOperationalError).syndrome, 0x63);
  EXPECT_EQ(Aeth::RnrNak(Msn(1), 12).syndrome, 0x2c);
}

TEST(AethSyndrome, BitsSixAndFiveDecideTheKind) {
  for (unsigned syndrome = 0; syndrome < 128; ++syndrome) {
    const Aeth aeth{static_cast<uint8_t>(syndrome), Msn(0)};
    EXPECT_EQ(static_cast<unsigned>(aeth.kind()), syndrome >> 5);
    EXPECT_EQ(aeth.code(), syndrome & 31);
    EXPECT_EQ(aeth.is_ack(), syndrome < 0x20);
    EXPECT_EQ(aeth.is_rnr_nak(), syndrome >= 0x20 && syndrome < 0x40);
    EXPECT_EQ(aeth.is_nak(), syndrome >= 0x60);
  }
}

}  // namespace
}  // namespace verbena::transport
