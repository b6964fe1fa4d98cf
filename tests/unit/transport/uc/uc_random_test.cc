// SPDX-License-Identifier: Apache-2.0
//
// Random messages over a network that loses, repeats and reorders packets. A
// model knows which messages must come: those whose packets arrive all, one
// directly after the other. Everything that comes is whole and right.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/unit/transport/uc/uc_pair.h"

namespace verbena::transport {
namespace {

using testing::kUcBase;
using testing::kUcReceiveKey;
using testing::kUcSourceKey;
using testing::kUcTargetKey;
using testing::UcPair;

constexpr uint32_t kSlot = 2048;  // bytes of a message
constexpr int kMessages = 200;

struct Arrival {
  testing::Frame frame;
  uint64_t message;
};

std::byte PatternByte(uint64_t message, uint32_t i) {
  return static_cast<std::byte>(message * 31 + i * 7 + i / 256);
}

class Conversation {
 public:
  explicit Conversation(uint32_t seed) : random_(seed), pair_(Psn(seed * 977), 4 * kSlot) {}

  void All() {
    for (uint64_t i = 0; i < kMessages; ++i) Send(i);
    Shuffle();
    for (const Arrival& arrival : network_) Arrive(arrival);
    EXPECT_FALSE(pair_.responder.failed());
    EXPECT_TRUE(pair_.memory.AreGuardsIntact());
    EXPECT_GT(received_, 0u);
  }

 private:
  uint32_t Below(uint32_t limit) {
    return std::uniform_int_distribution<uint32_t>(0, limit - 1)(random_);
  }

  void Send(uint64_t message) {
    static constexpr WrOpcode kOpcodes[] = {WrOpcode::kSend, WrOpcode::kSendImm,
                                            WrOpcode::kRdmaWrite, WrOpcode::kRdmaWriteImm};
    const WrOpcode opcode = kOpcodes[Below(4)];
    const uint32_t bytes = Below(3) == 0 ? Below(3) : Below(kSlot);
    auto source = pair_.memory.At(kUcSourceKey, kUcBase, kSlot);
    for (uint32_t i = 0; i < bytes; ++i) source[i] = PatternByte(message, i);
    pair_.Post(message, opcode, bytes);
    for (auto& frame : pair_.TransmitAll()) network_.push_back({std::move(frame), message});
    const auto sent = pair_.Sent();
    ASSERT_TRUE(sent.has_value());
    EXPECT_EQ(sent->status, WcStatus::kSuccess);
    lengths_.push_back(bytes);
    opcodes_.push_back(opcode);
  }

  void Shuffle() {
    std::vector<Arrival> after;
    for (Arrival& arrival : network_) {
      if (Below(20) == 0) continue;
      after.push_back(arrival);
      if (Below(50) == 0) after.push_back(arrival);
    }
    for (size_t i = 0; i + 1 < after.size(); ++i) {
      if (Below(40) == 0) std::swap(after[i], after[i + 1]);
    }
    network_ = std::move(after);
  }

  // What the packets so far, in this order, make of the message of the last.
  void Model(const PacketView& packet, bool* whole) {
    const OpcodeTraits& traits = packet.traits();
    const bool follows = last_psn_.has_value() && packet.psn() == last_psn_->Next();
    if (traits.begins_message()) {
      in_message_ = true;
    } else if (!follows) {
      in_message_ = false;
    }
    *whole = in_message_ && traits.ends_message();
    if (traits.ends_message()) in_message_ = false;
    last_psn_ = packet.psn();
  }

  void Arrive(const Arrival& arrival) {
    // Receives are always there; their slots rotate.
    while (pair_.receives.posted() < 2) {
      pair_.Receive(next_receive_, kSlot, next_receive_ % 4 * kSlot);
      ++next_receive_;
    }
    const PacketView packet = testing::ViewOf(arrival.frame);
    bool whole = false;
    Model(packet, &whole);
    const auto verdict = pair_.Deliver(arrival.frame);
    const WrOpcode opcode = opcodes_[arrival.message];
    const uint32_t bytes = lengths_[arrival.message];
    const auto completion = pair_.Received();
    if (!whole) {
      ASSERT_FALSE(completion.has_value());
      return;
    }
    ++received_;
    ASSERT_EQ(verdict, UcResponder::Verdict::kAccepted);
    ASSERT_EQ(completion.has_value(), opcode != WrOpcode::kRdmaWrite);
    uint64_t at = kUcBase;
    if (completion.has_value()) {
      ASSERT_EQ(completion->status, WcStatus::kSuccess);
      ASSERT_EQ(completion->byte_len, bytes);
      if (completion->opcode == WcOpcode::kRecv) at += completion->wr_id % 4 * kSlot;
    }
    const bool is_send = opcode == WrOpcode::kSend || opcode == WrOpcode::kSendImm;
    const auto got = pair_.memory.At(is_send ? kUcReceiveKey : kUcTargetKey, at, kSlot);
    for (uint32_t i = 0; i < bytes; ++i) {
      ASSERT_EQ(got[i], PatternByte(arrival.message, i))
          << "message " << arrival.message << " at " << i;
    }
  }

  std::mt19937 random_;
  UcPair pair_;
  std::vector<Arrival> network_;
  std::vector<uint32_t> lengths_;
  std::vector<WrOpcode> opcodes_;
  std::optional<Psn> last_psn_;
  bool in_message_ = false;
  uint64_t next_receive_ = 0;
  uint64_t received_ = 0;
};

TEST(UcRandom, WhatArrivesInOneRunIsDeliveredAndNothingElse) {
  for (uint32_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Conversation(seed).All();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace verbena::transport
