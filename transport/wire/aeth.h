// SPDX-License-Identifier: Apache-2.0
//
// ACK Extended Transport Header, 4 bytes: syndrome 8, MSN 24, and the meaning
// of the syndrome:
//   bits 6:5  00 ACK, bits 4:0 credit code
//             01 RNR NAK, bits 4:0 timer code
//             10 reserved
//             11 NAK, bits 4:0 NakCode
// Bit 7 is reserved (0).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "transport/base/byteorder.h"
#include "transport/base/time.h"
#include "transport/types.h"

namespace verbena::transport {

enum class AethKind : uint8_t { kAck = 0, kRnrNak = 1, kReserved = 2, kNak = 3 };

enum class NakCode : uint8_t {
  kPsnSequenceError = 0,
  kInvalidRequest = 1,
  kRemoteAccessError = 2,
  kRemoteOperationalError = 3,
  kInvalidRdRequest = 4,  // RD only
};

// Code 31 of an ACK: the responder does not use end-to-end credits.
inline constexpr uint8_t kNoCreditsCode = 31;

namespace internal {
// 0, 1, 2, 3, 4, 6, 8, 12, 16, ... 32768 for 0..30: powers of two with their
// one-and-a-half folds between them. The RNR timer table is the same series.
constexpr uint32_t HalfPowerSeries(uint32_t index) {
  if (index < 2) return index;
  const uint32_t power = uint32_t{1} << (index / 2);
  return index % 2 == 0 ? power : power + power / 2;
}
}  // namespace internal

// End-to-end credits of an ACK's credit code; empty for kNoCreditsCode.
constexpr std::optional<uint32_t> CreditCount(uint8_t code) {
  if ((code & 31) == kNoCreditsCode) return std::nullopt;
  return internal::HalfPowerSeries(code & 31);
}

// The largest credit code that does not promise more than `credits`.
constexpr uint8_t CreditCode(uint32_t credits) {
  uint8_t code = 0;
  while (code < 30 && internal::HalfPowerSeries(code + 1u) <= credits) ++code;
  return code;
}

// Least time that a requester waits after an RNR NAK with this timer code
// (min_rnr_timer of the responder QP): 0.01 ms to 491.52 ms for 1..31, and
// 655.36 ms for 0. The low five bits count.
constexpr Duration RnrTimerDelay(uint8_t code) {
  const uint32_t index = (code & 31) == 0 ? 32u : code & 31u;
  return Duration::Microseconds(10) * internal::HalfPowerSeries(index);
}

struct Aeth {
  static constexpr size_t kBytes = 4;

  uint8_t syndrome = 0;
  Msn msn;

  static constexpr Aeth Ack(Msn msn, uint8_t credit_code = kNoCreditsCode) {
    return Aeth{static_cast<uint8_t>(credit_code & 31), msn};
  }
  static constexpr Aeth RnrNak(Msn msn, uint8_t timer_code) {
    return Aeth{static_cast<uint8_t>(0x20 | (timer_code & 31)), msn};
  }
  static constexpr Aeth Nak(Msn msn, NakCode code) {
    return Aeth{static_cast<uint8_t>(0x60 | static_cast<uint8_t>(code)), msn};
  }

  constexpr AethKind kind() const { return static_cast<AethKind>((syndrome >> 5) & 3); }
  constexpr bool is_ack() const { return kind() == AethKind::kAck; }
  constexpr bool is_rnr_nak() const { return kind() == AethKind::kRnrNak; }
  constexpr bool is_nak() const { return kind() == AethKind::kNak; }
  // Low five bits: credit code, timer code or NAK code by kind().
  constexpr uint8_t code() const { return syndrome & 31; }
  // Meaningful when is_nak(); may be a code without an enumerator.
  constexpr NakCode nak_code() const { return static_cast<NakCode>(code()); }

  static constexpr Aeth Load(const std::byte* p) { return Aeth{LoadBe8(p), Msn(LoadBe24(p + 1))}; }
  constexpr void Store(std::byte* p) const {
    StoreBe8(p, syndrome);
    StoreBe24(p + 1, msn.value());
  }
  constexpr bool operator==(const Aeth&) const = default;
};

}  // namespace verbena::transport
