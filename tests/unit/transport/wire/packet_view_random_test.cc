// SPDX-License-Identifier: Apache-2.0
//
// Damaged frames: captured packets with random bytes changed, cut, grown and
// with plausible lengths. Whatever parses has to describe itself, stay inside
// the frame (ASan watches) and be rebuilt from its fields.
// VERBENA_TEST_SEED and VERBENA_TEST_ROUNDS choose others than the defaults.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "tests/testing/frames.h"
#include "tests/testing/packet_matchers.h"
#include "tests/testing/vectors.h"
#include "transport/wire/packet_builder.h"

namespace verbena::transport {
namespace {

using verbena::testing::ByteVector;

uint64_t FromEnvironment(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 0) : fallback;
}

class FrameMutator {
 public:
  explicit FrameMutator(uint64_t seed) : random_(seed) {}

  size_t Below(size_t limit) { return random_() % limit; }

  ByteVector Mutate(ByteVector frame) {
    const size_t changes = Below(4);
    for (size_t i = 0; i < changes && !frame.empty(); ++i) {
      // Mostly headers: that is where decisions are made.
      const size_t range = Below(4) != 0 ? std::min<size_t>(frame.size(), 90) : frame.size();
      frame[Below(range)] = static_cast<std::byte>(random_());
    }
    switch (Below(6)) {
      case 0:
        frame.resize(Below(frame.size() + 1));
        break;
      case 1:
        frame.resize(frame.size() + Below(64), static_cast<std::byte>(random_()));
        break;
      case 2:
        if (frame.size() > 80) {
          const bool is_ipv6 = LoadBe16(&frame[12]) == kEtherTypeIpv6;
          const size_t most = frame.size() - kUdpEnd;
          verbena::testing::CutConsistently(frame, is_ipv6, static_cast<uint16_t>(Below(most)));
        }
        break;
      default:
        break;
    }
    // A wrong checksum would hide what is behind it.
    const size_t l3 = frame.size() > 18 && LoadBe16(&frame[12]) == kEtherTypeVlan ? 18 : 14;
    if (Below(8) != 0 && frame.size() >= l3 + Ipv4Header::kBytes &&
        LoadBe16(&frame[l3 - 2]) == kEtherTypeIpv4) {
      StoreBe16(&frame[l3 + 10], Ipv4HeaderChecksum(&frame[l3]));
    }
    frame.shrink_to_fit();
    return frame;
  }

 private:
  static constexpr size_t kUdpEnd = 14 + 40 + 8;
  std::mt19937_64 random_;
};

// Uses everything that a parsed packet offers.
void Use(const PacketView& packet, const ByteVector& frame) {
  EXPECT_FALSE(Describe(packet).empty());
  EXPECT_LE(packet.frame_bytes(), frame.size());
  EXPECT_EQ(packet.frame_bytes(),
            packet.headers().size() + packet.payload().size() + packet.pad() + kIcrcBytes);
  const auto payload = packet.payload();
  ByteVector copy(payload.begin(), payload.end());
  EXPECT_EQ(copy.size(), packet.payload_bytes());
  EXPECT_EQ(packet.VerifyIcrc(), packet.ComputeIcrc() == packet.icrc());

  ByteVector rebuilt(kMaxHeaderBytes, std::byte{0xa5});
  rebuilt.resize(
      WriteHeaders(AddressOf(packet), HeadersOf(packet), packet.payload_bytes(), rebuilt.data()));
  ByteVector headers(packet.headers().begin(), packet.headers().end());
  if (packet.opcode() == Opcode::kCnp) {
    // Its reserved bytes are ignored on receipt and sent as zero.
    headers.resize(headers.size() - 16);
    rebuilt.resize(rebuilt.size() - 16);
  }
  EXPECT_EQ(rebuilt, headers);
}

TEST(PacketViewWithDamagedFrames, NeitherCrashesNorLies) {
  const uint64_t seed = FromEnvironment("VERBENA_TEST_SEED", 1);
  const uint64_t rounds = FromEnvironment("VERBENA_TEST_ROUNDS", 200'000);
  SCOPED_TRACE("VERBENA_TEST_SEED=" + std::to_string(seed));

  std::vector<ByteVector> originals;
  for (const char* name : {"rc_atomics", "rc_write_imm", "rc_send_inv_only", "rc_read_mtu256",
                           "ipv6_rc_mix", "ipv6_ud_send", "ud_send", "vlan_rc", "uc_send_write",
                           "cm_mckey_v4", "tap_python_peer_probes"}) {
    for (ByteVector& frame : verbena::testing::CaptureFrames(name)) {
      originals.push_back(std::move(frame));
    }
  }
  originals.push_back(verbena::testing::BuildFrame(verbena::testing::Ipv6Address(), Opcode::kCnp));
  originals.push_back(
      verbena::testing::BuildFrame(verbena::testing::Ipv4Address(), Opcode::kXrcFetchAdd));
  ASSERT_GT(originals.size(), 100u);

  FrameMutator mutator(seed);
  uint64_t parsed = 0;
  std::array<uint64_t, kParseErrorCount> errors{};
  for (uint64_t round = 0; round < rounds; ++round) {
    const ByteVector frame = mutator.Mutate(originals[mutator.Below(originals.size())]);
    const auto packet = PacketView::Parse(frame);
    PeekBth(frame);
    if (const auto reserved = PacketView::ParseReserved(frame); reserved.ok()) {
      EXPECT_FALSE(packet.ok());
      EXPECT_LE(reserved->frame_bytes(), frame.size());
      reserved->VerifyIcrc();
    }
    if (packet.ok()) {
      ++parsed;
      Use(*packet, frame);
    } else {
      ++errors[static_cast<size_t>(packet.error())];
    }
    if (HasFailure()) FAIL() << "in round " << round;
  }
  // The damage reaches every check, and spares enough to use the accessors.
  EXPECT_GT(parsed, rounds / 10);
  for (size_t i = 0; i < errors.size(); ++i) {
    EXPECT_GT(errors[i], 0u) << ParseErrorName(static_cast<ParseError>(i));
  }
}

}  // namespace
}  // namespace verbena::transport
