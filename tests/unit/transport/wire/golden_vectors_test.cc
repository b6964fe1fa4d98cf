// SPDX-License-Identifier: Apache-2.0
//
// Every frame of the captures of Linux rxe: parsed to the fields that tshark
// reads, with the right ICRC, and built again byte for byte from its fields.
// The frames that are wrong on purpose give the error that special.tsv names.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "tests/testing/frames.h"
#include "tests/testing/packet_matchers.h"
#include "tests/testing/vectors.h"
#include "transport/wire/packet_builder.h"
#include "transport/wire/packet_view.h"

namespace verbena::transport {
namespace {

using verbena::testing::ByteVector;
using verbena::testing::CaptureFrames;
using verbena::testing::CaptureNames;
using verbena::testing::FrameKey;
using verbena::testing::SpecialFrames;
using verbena::testing::TsharkTable;

constexpr size_t kRoceFrames = 2060;

// The number behind `key` ("pkey=") in a frame's special rows, or `fallback`.
std::string SpecialOr(const std::multimap<FrameKey, std::string>& special, const FrameKey& frame,
                      const std::string& key, const std::string& fallback) {
  const auto [begin, end] = special.equal_range(frame);
  for (auto row = begin; row != end; ++row) {
    if (row->second.starts_with(key)) return row->second.substr(key.size());
  }
  return fallback;
}

uint64_t SpecialNumber(const std::multimap<FrameKey, std::string>& special, const FrameKey& frame,
                       const std::string& key, uint64_t fallback) {
  return std::stoull(SpecialOr(special, frame, key, std::to_string(fallback)), nullptr, 0);
}

// Calls `check` for every frame of every capture.
template <typename Check>
void ForEachFrame(Check check) {
  const auto names = CaptureNames();
  ASSERT_EQ(names.size(), 109u);
  for (const std::string& name : names) {
    const auto frames = CaptureFrames(name);
    ASSERT_FALSE(frames.empty()) << name;
    for (size_t i = 0; i < frames.size(); ++i) {
      SCOPED_TRACE(name + " frame " + std::to_string(i + 1));
      check(FrameKey(name, i + 1), frames[i]);
    }
  }
}

TEST(GoldenVectors, EveryFrameParsesOrGivesItsTypedError) {
  const auto special = SpecialFrames();
  const auto tshark = TsharkTable();
  size_t roce_frames = 0;
  ForEachFrame([&](const FrameKey& key, const ByteVector& bytes) {
    const auto packet = PacketView::Parse(bytes);
    const std::string error = packet.ok() ? "" : std::string(ParseErrorName(packet.error()));
    EXPECT_EQ(error, SpecialOr(special, key, "error=", ""));
    const bool foreign = error == "not_ip" || error == "not_udp";
    EXPECT_EQ(tshark.count(key), foreign ? 0u : 1u);
    if (!foreign) ++roce_frames;
  });
  EXPECT_EQ(roce_frames, kRoceFrames);
  EXPECT_EQ(tshark.size(), kRoceFrames);
}

TEST(GoldenVectors, EveryIcrcIsRightExceptTheSpoiledOnes) {
  const auto special = SpecialFrames();
  size_t wrong = 0;
  ForEachFrame([&](const FrameKey& key, const ByteVector& bytes) {
    const auto packet = PacketView::Parse(bytes);
    if (!packet.ok()) return;
    const bool spoiled = SpecialOr(special, key, "icrc=", "") == "bad";
    EXPECT_EQ(packet->VerifyIcrc(), !spoiled);
    if (spoiled) ++wrong;
  });
  EXPECT_EQ(wrong, 3u);
}

TEST(GoldenVectors, EveryPacketIsRebuiltByteForByteFromItsFields) {
  const auto special = SpecialFrames();
  ForEachFrame([&](const FrameKey& key, const ByteVector& bytes) {
    const auto packet = PacketView::Parse(bytes);
    if (!packet.ok()) return;
    ByteVector rebuilt =
        verbena::testing::BuildFrame(AddressOf(*packet), HeadersOf(*packet), packet->payload());
    ASSERT_EQ(rebuilt.size(), packet->frame_bytes());
    EXPECT_EQ(bytes.size() - rebuilt.size(), SpecialNumber(special, key, "ethernet_padding=", 0));
    ByteVector wanted(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(rebuilt.size()));
    if (SpecialOr(special, key, "icrc=", "") == "bad") {
      // The ICRC (or what it protects) was spoiled on the way: all but it.
      rebuilt.resize(rebuilt.size() - kIcrcBytes);
      wanted.resize(wanted.size() - kIcrcBytes);
    }
    EXPECT_EQ(rebuilt, wanted);
  });
}

using Fields = std::map<std::string, uint64_t>;

Fields FieldsOf(const PacketView& packet) {
  const Bth& bth = packet.bth();
  const OpcodeTraits& traits = packet.traits();
  const uint32_t icrc = packet.icrc();
  Fields fields = {
      {"opcode", static_cast<uint64_t>(bth.opcode)},
      {"se", bth.solicited},
      {"m", bth.mig_req},
      {"pad", bth.pad},
      {"tver", bth.tver},
      {"pkey", bth.pkey.value()},
      {"dest_qpn", bth.dest_qpn.value()},
      {"ack_req", bth.ack_req},
      {"reserved7", bth.reserved7},
      {"psn", bth.psn.value()},
      {"icrc_be", __builtin_bswap32(icrc)},
      {"udp_len", packet.udp().length},
      {"udp_sport", packet.udp().source_port},
  };
  if (traits.has_deth()) {
    fields["qkey"] = packet.deth().qkey.value();
    fields["src_qpn"] = packet.deth().source_qpn.value();
  }
  if (traits.has_reth()) {
    fields["va"] = packet.reth().va;
    fields["rkey"] = packet.reth().rkey.value();
    fields["dma_len"] = packet.reth().dma_length;
  }
  if (traits.has_atomic_eth()) {
    fields["va"] = packet.atomic_eth().va;
    fields["rkey"] = packet.atomic_eth().rkey.value();
    fields["swap_add"] = packet.atomic_eth().swap_add;
    fields["compare"] = packet.atomic_eth().compare;
  }
  if (traits.has_aeth()) {
    fields["syndrome"] = packet.aeth().syndrome;
    fields["msn"] = packet.aeth().msn.value();
  }
  if (traits.has_atomic_ack_eth()) fields["original"] = packet.atomic_ack_eth().original;
  if (traits.has_imm()) fields["imm"] = packet.imm().value;
  if (traits.has_ieth()) fields["inv_rkey"] = packet.ieth().rkey.value();
  return fields;
}

TEST(GoldenVectors, FieldsAreThoseThatTsharkReads) {
  const auto tshark = TsharkTable();
  std::set<uint64_t> opcodes;
  ForEachFrame([&](const FrameKey& key, const ByteVector& bytes) {
    const auto packet = PacketView::Parse(bytes);
    if (!packet.ok()) return;
    const auto expected = tshark.find(key);
    ASSERT_NE(expected, tshark.end());
    EXPECT_EQ(FieldsOf(*packet), expected->second);
    opcodes.insert(static_cast<uint64_t>(packet->opcode()));
  });
  // The captures show nearly all RC opcodes, and UC and UD.
  EXPECT_GE(opcodes.size(), 33u);
}

TEST(GoldenVectors, UnusualFramesShowWhatIsUnusual) {
  const auto special = SpecialFrames();
  ForEachFrame([&](const FrameKey& key, const ByteVector& bytes) {
    const auto packet = PacketView::Parse(bytes);
    if (!packet.ok()) return;
    const Bth& bth = packet->bth();
    EXPECT_EQ(bth.pkey.value(), SpecialNumber(special, key, "pkey=", 0xffff));
    EXPECT_EQ(bth.reserved7, SpecialNumber(special, key, "reserved7=", 0));
    const uint64_t congestion = SpecialNumber(special, key, "congestion_byte=", 0);
    EXPECT_EQ(bth.fecn, (congestion & 0x80) != 0);
    EXPECT_EQ(bth.becn, (congestion & 0x40) != 0);
    EXPECT_EQ(bth.reserved6, congestion & 0x3f);
    const bool ce = SpecialNumber(special, key, "ecn=", 0) == 3;
    EXPECT_EQ(packet->ecn() == Ecn::kCe, ce);
  });
}

TEST(GoldenVectors, ErrorsStillShowTheirBth) {
  const auto frames = CaptureFrames("tap_python_peer_probes");
  ASSERT_GE(frames.size(), 67u);
  const auto bad_version = PeekBth(frames[19]);
  ASSERT_TRUE(bad_version.has_value());
  EXPECT_EQ(bad_version->tver, 1);
  EXPECT_EQ(bad_version->opcode, Opcode::kRcSendOnly);
  const auto reserved = PeekBth(frames[66]);
  ASSERT_TRUE(reserved.has_value());
  EXPECT_EQ(static_cast<int>(reserved->opcode), 0x15);
  EXPECT_EQ(reserved->dest_qpn, Qpn(0x31));
  EXPECT_EQ(PeekBth(CaptureFrames("cm_mckey_v4").at(0)), std::nullopt);
}

// A capture is cut off at any byte: never a crash, never a packet.
TEST(GoldenVectors, EveryPacketCutOffAnywhereIsRefused) {
  std::set<std::pair<Opcode, bool>> seen;  // one of each opcode and IP version
  ForEachFrame([&](const FrameKey&, const ByteVector& bytes) {
    const auto packet = PacketView::Parse(bytes);
    if (!packet.ok() || !seen.insert({packet->opcode(), packet->is_ipv6()}).second) return;
    for (size_t length = 0; length < packet->frame_bytes(); ++length) {
      const ByteVector cut(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(length));
      ASSERT_FALSE(PacketView::Parse(cut).ok()) << length;
    }
  });
  EXPECT_GE(seen.size(), 40u);
}

}  // namespace
}  // namespace verbena::transport
