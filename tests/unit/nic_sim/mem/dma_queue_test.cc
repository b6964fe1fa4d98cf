// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/mem/dma_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/unit/nic_sim/mem/fake_space.h"

namespace verbena::nic {
namespace {

using ::testing::ElementsAre;
using testing::FakeSpace;
using ::testing::IsEmpty;
using transport::AtomicKind;
using transport::AtomicOperation;
using transport::Ticket;
using Bytes = std::vector<std::byte>;
using Pieces = std::vector<std::pair<uint64_t, size_t>>;

constexpr uint64_t kBase = 0x10000;

// Writes down what it is told: "placed 3", "atomic 4 = 17", "failed 5".
class LoggingOwner final : public DmaOwner {
 public:
  void OnPlaced(Ticket ticket) override { Add("placed " + std::to_string(ticket)); }
  void OnAtomic(Ticket ticket, uint64_t original) override {
    Add("atomic " + std::to_string(ticket) + " = " + std::to_string(original));
  }
  void OnPlaceFailed(Ticket ticket) override { Add("failed " + std::to_string(ticket)); }

  std::vector<std::string> log;
  std::function<void()> on_event;

 private:
  void Add(std::string line) {
    log.push_back(std::move(line));
    if (on_event) on_event();
  }
};

class DmaQueueTest : public ::testing::Test {
 protected:
  ~DmaQueueTest() override {
    for (FakeSpace* space : {&a_, &b_}) EXPECT_THAT(space->errors, IsEmpty());
  }

  // The bytes live as long as the test.
  std::span<const std::byte> Data(size_t bytes, uint8_t fill) {
    data_.emplace_back(bytes, std::byte{fill});
    return data_.back();
  }
  Extent At(FakeSpace& space, uint64_t offset) { return {&space, space.base() + offset}; }
  void Place(DmaOwner& owner, Ticket ticket, FakeSpace& space, uint64_t offset, size_t bytes,
             bool last = false) {
    queue_.Place(At(space, offset), Data(bytes, static_cast<uint8_t>(ticket)), last, &owner,
                 ticket);
  }
  void Add(DmaOwner& owner, Ticket ticket, FakeSpace& space, uint64_t offset, uint64_t add) {
    queue_.Atomic(At(space, offset), {.kind = AtomicKind::kFetchAdd, .swap_or_add = add}, &owner,
                  ticket);
  }
  void Swap(DmaOwner& owner, Ticket ticket, FakeSpace& space, uint64_t offset, uint64_t compare,
            uint64_t swap) {
    queue_.Atomic(At(space, offset),
                  {.kind = AtomicKind::kCompareSwap, .swap_or_add = swap, .compare = compare},
                  &owner, ticket);
  }
  static Bytes Part(const FakeSpace& space, size_t offset, size_t bytes) {
    return {space.memory.begin() + static_cast<ptrdiff_t>(offset),
            space.memory.begin() + static_cast<ptrdiff_t>(offset + bytes)};
  }
  static Bytes Fill(size_t bytes, uint8_t fill) { return Bytes(bytes, std::byte{fill}); }

  FakeSpace a_{kBase, 1 << 20};
  FakeSpace b_{kBase + (1 << 24), 1 << 20};
  DmaQueue queue_{256};
  LoggingOwner x_;
  LoggingOwner y_;
  std::deque<Bytes> data_;
};

TEST_F(DmaQueueTest, NothingIsCopiedOrReportedBeforeTheFlush) {
  EXPECT_FALSE(queue_.has_placements());
  Place(x_, 1, a_, 0, 100);
  EXPECT_TRUE(queue_.has_placements());
  EXPECT_EQ(queue_.room(), 255u);
  EXPECT_THAT(a_.calls, IsEmpty());
  EXPECT_THAT(x_.log, IsEmpty());
  queue_.FlushPlacements();
  EXPECT_FALSE(queue_.has_placements());
  EXPECT_EQ(queue_.room(), 256u);
  EXPECT_EQ(Part(a_, 0, 100), Fill(100, 1));
  EXPECT_THAT(x_.log, ElementsAre("placed 1"));
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("placed 1"));
}

TEST_F(DmaQueueTest, BurstOfPacketsIsOneCallWithFewPieces) {
  for (Ticket t = 1; t <= 32; ++t) Place(x_, t, a_, (t - 1) * 4096, 4096, t == 32);
  queue_.FlushPlacements();
  ASSERT_EQ(a_.calls.size(), 1u);
  EXPECT_EQ(a_.calls[0].pieces, (Pieces{{0, 32 * 4096 - 8}, {32 * 4096 - 8, 8}}));
  EXPECT_THAT(x_.log, ElementsAre("placed 32"));
  EXPECT_EQ(queue_.counters().system_calls, 1u);
  EXPECT_EQ(queue_.counters().placements, 32u);
  EXPECT_EQ(queue_.counters().bytes_placed, 32u * 4096);
}

TEST_F(DmaQueueTest, SmallPayloadsAreFewLocalPieces) {
  for (Ticket t = 1; t <= 32; ++t) Place(x_, t, a_, t * 64, 8, true);
  queue_.FlushPlacements();
  ASSERT_EQ(a_.calls.size(), 1u);
  EXPECT_EQ(a_.calls[0].pieces.size(), 32u);
  // More than one where addresses make a copy slow.
  EXPECT_LE(a_.calls[0].local_pieces, 3u);
  for (uint8_t t = 1; t <= 32; ++t) EXPECT_EQ(Part(a_, t * 64, 8), Fill(8, t));
}

// The kernel copies piece by piece, and may tear or reorder inside a piece: so
// the words that hold the last 8 bytes have pieces of their own, and no piece
// starts inside a word that another piece has the rest of, if both belong to the
// same placement.
TEST_F(DmaQueueTest, EndOfAMessageHasPiecesOfItsOwn) {
  struct Case {
    uint64_t offset;
    size_t bytes;
    Pieces pieces;
  };
  const Case cases[] = {
      {0, 1, {{0, 1}}},
      {0, 8, {{0, 8}}},
      {16, 4, {{16, 4}}},
      {4, 4, {{4, 4}}},
      {4, 8, {{4, 4}, {8, 4}}},
      {7, 2, {{7, 1}, {8, 1}}},
      {0, 16, {{0, 8}, {8, 8}}},
      {0, 4096, {{0, 4088}, {4088, 8}}},
      {0, 9, {{0, 8}, {8, 1}}},
      {0, 17, {{0, 8}, {8, 8}, {16, 1}}},
      {0, 100, {{0, 88}, {88, 8}, {96, 4}}},
      {3, 8, {{3, 5}, {8, 3}}},
      // 103: the last 8 bytes, 95 to 102, lie in the words at 88 and 96.
      {3, 100, {{3, 5}, {8, 80}, {88, 8}, {96, 7}}},
      {5, 27, {{5, 3}, {8, 16}, {24, 8}}},
  };
  for (const Case& c : cases) {
    a_.calls.clear();
    Place(x_, 1, a_, c.offset, c.bytes, true);
    queue_.FlushPlacements();
    ASSERT_EQ(a_.calls.size(), 1u);
    EXPECT_EQ(a_.calls[0].pieces, c.pieces) << c.offset << " " << c.bytes;
  }
}

TEST_F(DmaQueueTest, PacketsThatBeginOrEndInsideAWordAreCutThere) {
  Place(x_, 1, a_, 3, 1024);
  Place(x_, 2, a_, 1027, 1024);
  queue_.FlushPlacements();
  EXPECT_EQ(a_.calls[0].pieces,
            (Pieces{{3, 5}, {8, 1016}, {1024, 3}, {1027, 5}, {1032, 1016}, {2048, 3}}));
  // Unless nobody looks before the completion.
  a_.calls.clear();
  queue_.Place(At(a_, 3), Data(1024, 1), false, &x_, 3, /*watched=*/false);
  queue_.Place(At(a_, 1027), Data(1024, 1), true, &x_, 4, /*watched=*/false);
  queue_.FlushPlacements();
  EXPECT_EQ(a_.calls[0].pieces, (Pieces{{3, 2048}}));
}

// Whatever the addresses are, no word is torn by a copy that goes byte by byte.
TEST_F(DmaQueueTest, NoDestinationIsAFewBytesBehindItsSourceModuloAPage) {
  Bytes buffer(3 * 4096);
  Ticket ticket = 0;
  for (const size_t bytes : {8, 32, 64, 65, 100, 128, 129, 1024, 4096}) {
    for (uint64_t distance = 1; distance < 32; ++distance) {
      SCOPED_TRACE(std::to_string(bytes) + " bytes, distance " + std::to_string(distance));
      const auto local = reinterpret_cast<uintptr_t>(buffer.data());
      std::fill(buffer.begin(), buffer.end(), static_cast<std::byte>(distance));
      const uint64_t behind = (local + distance - kBase) % 4096;
      queue_.Place(At(a_, behind), std::span(buffer).first(bytes), true, &x_, ++ticket);
      queue_.FlushPlacements();
      EXPECT_EQ(Part(a_, behind, bytes), Fill(bytes, static_cast<uint8_t>(distance)));

      const uint64_t before = (local - distance - kBase) % 4096;
      for (size_t i = 0; i < bytes; ++i) a_.memory[before + i] = static_cast<std::byte>(i);
      queue_.Fetch(At(a_, before), buffer.data(), static_cast<uint32_t>(bytes), 1);
      queue_.FlushFetches([](uint32_t) { FAIL(); });
      EXPECT_EQ(Part(a_, before, bytes), Bytes(buffer.begin(), buffer.begin() + bytes));
      ASSERT_EQ(a_.bytewise_copies, 0u);
    }
  }
}

TEST_F(DmaQueueTest, MessagesAreNotMergedWithEachOther) {
  // Adjacent messages of a stream; the second may be the flag of the first.
  Place(x_, 1, a_, 0, 64, true);
  Place(x_, 2, a_, 64, 8, true);
  Place(x_, 3, a_, 72, 8, true);
  Place(x_, 4, a_, 80, 64, true);
  queue_.FlushPlacements();
  ASSERT_EQ(a_.calls.size(), 1u);
  EXPECT_EQ(a_.calls[0].pieces, (Pieces{{0, 56}, {56, 8}, {64, 8}, {72, 8}, {80, 56}, {136, 8}}));
}

TEST_F(DmaQueueTest, NeighboursOfDifferentOwnersAreNotMerged) {
  Place(x_, 1, a_, 0, 64);
  Place(y_, 1, a_, 64, 64);
  Place(y_, 2, a_, 128, 64);
  queue_.FlushPlacements();
  EXPECT_EQ(a_.calls[0].pieces, (Pieces{{0, 64}, {64, 128}}));
  EXPECT_THAT(x_.log, ElementsAre("placed 1"));
  EXPECT_THAT(y_.log, ElementsAre("placed 2"));
}

TEST_F(DmaQueueTest, LaterPlacementWinsWhereTheyOverlap) {
  Place(x_, 1, a_, 0, 100);
  Place(x_, 2, a_, 50, 100);
  Place(x_, 3, a_, 0, 10);
  queue_.FlushPlacements();
  EXPECT_EQ(Part(a_, 0, 10), Fill(10, 3));
  EXPECT_EQ(Part(a_, 10, 40), Fill(40, 1));
  EXPECT_EQ(Part(a_, 50, 100), Fill(100, 2));
}

TEST_F(DmaQueueTest, EmptyPlacementsAreReportedInTheirTurn) {
  Place(x_, 1, a_, 0, 0);
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("placed 1"));
  EXPECT_THAT(a_.calls, IsEmpty());
  Place(x_, 2, a_, 0, 8);
  Place(x_, 3, a_, 8, 0, true);
  Place(x_, 4, a_, 8, 8);
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("placed 1", "placed 4"));
}

TEST_F(DmaQueueTest, InterleavedAddressSpacesGetOneCallEach) {
  for (Ticket t = 1; t <= 16; ++t) {
    Place(x_, t, a_, t * 100, 100);
    Place(y_, t, b_, t * 100, 100);
  }
  queue_.FlushPlacements();
  ASSERT_EQ(a_.calls.size(), 1u);
  ASSERT_EQ(b_.calls.size(), 1u);
  EXPECT_EQ(a_.calls[0].pieces.size(), b_.calls[0].pieces.size());
  EXPECT_THAT(x_.log, ElementsAre("placed 16"));
  EXPECT_THAT(y_.log, ElementsAre("placed 16"));
  EXPECT_EQ(queue_.counters().system_calls, 2u);
}

TEST_F(DmaQueueTest, OwnerInTwoAddressSpacesKeepsItsOrder) {
  // Broken memory in the middle: what came before is placed, nothing behind it.
  b_.Break(0, 64);
  Place(x_, 1, a_, 0, 8);
  Place(x_, 2, b_, 0, 8);
  Place(x_, 3, a_, 8, 8);
  Place(y_, 1, a_, 16, 8);
  queue_.FlushPlacements();
  EXPECT_EQ(Part(a_, 0, 8), Fill(8, 1));
  EXPECT_EQ(Part(a_, 8, 8), Fill(8, 0));
  EXPECT_EQ(Part(a_, 16, 8), Fill(8, 1));
  EXPECT_THAT(x_.log, ElementsAre("placed 1", "failed 2"));
  EXPECT_THAT(y_.log, ElementsAre("placed 1"));
}

TEST_F(DmaQueueTest, MoreAddressSpacesThanOneRunTakes) {
  std::vector<std::unique_ptr<FakeSpace>> spaces;
  for (size_t i = 0; i < 150; ++i) {
    spaces.push_back(std::make_unique<FakeSpace>(kBase, 4096));
    LoggingOwner& owner = i % 2 == 0 ? x_ : y_;
    Place(owner, i + 1, *spaces.back(), 0, 8);
  }
  queue_.FlushPlacements();
  for (size_t i = 0; i < 150; ++i) {
    EXPECT_EQ(Part(*spaces[i], 0, 8), Fill(8, static_cast<uint8_t>(i + 1)));
  }
  EXPECT_THAT(x_.log, ElementsAre("placed 149"));
  EXPECT_THAT(y_.log, ElementsAre("placed 150"));
  std::byte bytes[150];
  for (uint32_t i = 0; i < 150; ++i) queue_.Fetch(At(*spaces[i], 0), &bytes[i], 1, i);
  queue_.FlushFetches([](uint32_t tag) { ADD_FAILURE() << tag; });
  for (uint32_t i = 0; i < 150; ++i) EXPECT_EQ(bytes[i], static_cast<std::byte>(i + 1));
}

TEST_F(DmaQueueTest, FailureIsReportedForTheTicketAndVoidsLaterOnesOfItsOwner) {
  a_.Break(1000, 10);
  Place(x_, 1, a_, 0, 100);
  Place(y_, 1, a_, 200, 100);
  Place(x_, 2, a_, 950, 100);  // fails
  Place(y_, 2, a_, 400, 100);
  Place(x_, 3, a_, 500, 100);
  Place(y_, 3, a_, 600, 100);
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("placed 1", "failed 2"));
  EXPECT_THAT(y_.log, ElementsAre("placed 3"));
  EXPECT_EQ(Part(a_, 0, 100), Fill(100, 1));
  EXPECT_EQ(Part(a_, 500, 100), Fill(100, 0));
  EXPECT_EQ(Part(a_, 600, 100), Fill(100, 3));
  EXPECT_EQ(queue_.counters().failures, 1u);
  // The next flush starts afresh.
  Place(x_, 4, a_, 500, 100);
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("placed 1", "failed 2", "placed 4"));
}

TEST_F(DmaQueueTest, BadPageUnderMergedPacketsIsBlamedOnTheRightPacket) {
  for (int bad = 0; bad < 8; ++bad) {
    FakeSpace space(kBase, 1 << 16);
    space.Break(static_cast<size_t>(bad) * 1024 + 700, 1);
    LoggingOwner owner;
    for (Ticket t = 1; t <= 8; ++t) Place(owner, t, space, (t - 1) * 1024, 1024, t == 8);
    Place(y_, 1, space, 20000, 8);
    queue_.FlushPlacements();
    std::vector<std::string> expected;
    if (bad > 0) expected.push_back("placed " + std::to_string(bad));
    expected.push_back("failed " + std::to_string(bad + 1));
    EXPECT_EQ(owner.log, expected);
    for (int p = 0; p < bad; ++p) {
      EXPECT_EQ(Part(space, static_cast<size_t>(p) * 1024, 1024),
                Fill(1024, static_cast<uint8_t>(p + 1)));
    }
    const auto behind = static_cast<size_t>(bad + 1) * 1024;
    EXPECT_EQ(Part(space, behind, 8192 - behind), Fill(8192 - behind, 0));
    EXPECT_EQ(Part(space, 20000, 8), Fill(8, 1));
    EXPECT_THAT(space.errors, IsEmpty());
  }
}

TEST_F(DmaQueueTest, VanishedProcessFailsEachOwnersFirstTicket) {
  a_.Vanish();
  Place(x_, 1, a_, 0, 8);
  Place(y_, 7, a_, 8, 8);
  Place(x_, 2, a_, 16, 8);
  Add(y_, 8, a_, 24, 1);
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("failed 1"));
  EXPECT_THAT(y_.log, ElementsAre("failed 7"));
  std::byte bytes[16];
  queue_.Fetch(At(a_, 0), bytes, 8, 1);
  queue_.Fetch(At(b_, 0), bytes + 8, 8, 2);
  std::vector<uint32_t> failed;
  queue_.FlushFetches([&](uint32_t tag) { failed.push_back(tag); });
  EXPECT_THAT(failed, ElementsAre(1));
}

TEST_F(DmaQueueTest, AtomicsSeeWhatWasPlacedBeforeAndEachOther) {
  a_.SetWord(0, 100);
  a_.SetWord(8, 7);
  Add(x_, 1, a_, 0, 5);
  Add(y_, 1, a_, 0, 10);
  Swap(x_, 2, a_, 0, 115, 1000);  // succeeds
  Swap(x_, 3, a_, 0, 115, 2000);  // does not
  Swap(x_, 4, a_, 8, 7, 8);
  Add(x_, 5, a_, 0, UINT64_MAX);  // minus one
  Place(x_, 6, a_, 0, 8);         // 0x0606…
  Add(x_, 7, a_, 0, 1);
  Place(x_, 8, a_, 64, 8);
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("atomic 1 = 100", "atomic 2 = 115", "atomic 3 = 1000",
                                  "atomic 4 = 7", "atomic 5 = 1000", "placed 6",
                                  "atomic 7 = " + std::to_string(0x0606060606060606u), "placed 8"));
  EXPECT_THAT(y_.log, ElementsAre("atomic 1 = 105"));
  EXPECT_EQ(a_.Word(0), 0x0606060606060607u);
  EXPECT_EQ(a_.Word(8), 8u);
  EXPECT_EQ(queue_.counters().atomics, 7u);
}

TEST_F(DmaQueueTest, BurstOfAtomicsIsTwoCalls) {
  for (Ticket t = 1; t <= 32; ++t) Add(x_, t, a_, 0, 1);
  queue_.FlushPlacements();
  ASSERT_EQ(a_.calls.size(), 2u);
  EXPECT_EQ(a_.calls[0].pieces.size(), 1u);
  EXPECT_EQ(a_.calls[1].pieces.size(), 1u);
  EXPECT_EQ(a_.Word(0), 32u);
  ASSERT_EQ(x_.log.size(), 32u);
  EXPECT_EQ(x_.log[31], "atomic 32 = 31");
}

TEST_F(DmaQueueTest, FailedCompareWritesNothing) {
  Swap(x_, 1, a_, 0, 5, 9);
  queue_.FlushPlacements();
  ASSERT_EQ(a_.calls.size(), 1u);
  EXPECT_FALSE(a_.calls[0].write);
  EXPECT_THAT(x_.log, ElementsAre("atomic 1 = 0"));
}

TEST_F(DmaQueueTest, BadAtomicFailsAloneForOtherOwners) {
  a_.Break(8, 8);
  Add(x_, 1, a_, 0, 1);
  Add(x_, 2, a_, 8, 1);  // fails
  Add(y_, 1, a_, 0, 1);
  Add(x_, 3, a_, 0, 1);  // void
  Add(y_, 2, a_, 16, 1);
  Place(x_, 4, a_, 32, 8);  // void
  Place(y_, 3, a_, 40, 8);
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("atomic 1 = 0", "failed 2"));
  EXPECT_THAT(y_.log, ElementsAre("atomic 1 = 1", "atomic 2 = 0", "placed 3"));
  EXPECT_EQ(a_.Word(0), 2u);
  EXPECT_EQ(a_.Word(16), 1u);
  EXPECT_EQ(a_.Word(32), 0u);
}

TEST_F(DmaQueueTest, FullQueueIsFlushedByTheCallThatFindsItFull) {
  for (Ticket t = 1; t <= 256; ++t) Place(x_, t, a_, t * 16, 8);
  EXPECT_EQ(queue_.room(), 0u);
  EXPECT_THAT(x_.log, IsEmpty());
  Place(x_, 257, a_, 257 * 16, 8);
  EXPECT_THAT(x_.log, ElementsAre("placed 256"));
  EXPECT_EQ(queue_.room(), 255u);
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("placed 256", "placed 257"));
}

TEST_F(DmaQueueTest, ForgottenOwnersEntriesAreDropped) {
  Place(x_, 1, a_, 0, 8);
  Place(y_, 1, a_, 8, 8);
  Add(x_, 2, a_, 16, 1);
  queue_.Forget(&x_);
  // A new owner may have the address of the old one.
  Place(x_, 1, a_, 24, 8);
  queue_.FlushPlacements();
  EXPECT_EQ(Part(a_, 0, 8), Fill(8, 0));
  EXPECT_EQ(a_.Word(16), 0u);
  EXPECT_EQ(Part(a_, 24, 8), Fill(8, 1));
  EXPECT_THAT(x_.log, ElementsAre("placed 1"));
  EXPECT_THAT(y_.log, ElementsAre("placed 1"));
  queue_.Forget(&x_);
}

TEST_F(DmaQueueTest, CallbackMayForgetAnyOwner) {
  auto z = std::make_unique<LoggingOwner>();
  Add(x_, 1, a_, 0, 1);
  Add(*z, 1, a_, 8, 1);
  Place(*z, 2, a_, 16, 8);
  Add(x_, 2, a_, 0, 1);
  Place(y_, 1, a_, 24, 8);
  x_.on_event = [&] {
    queue_.Forget(z.get());
    z.reset();
    queue_.Forget(&x_);  // itself
  };
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("atomic 1 = 0"));
  EXPECT_THAT(y_.log, ElementsAre("placed 1"));
}

TEST_F(DmaQueueTest, WhatACallbackQueuesBelongsToTheNextFlush) {
  Ticket next = 2;
  x_.on_event = [&] {
    if (next > 5) return;
    Place(x_, next, a_, 64 * next, 8);
    ++next;
    queue_.FlushPlacements();  // ignored
  };
  Place(x_, 1, a_, 0, 8);
  Place(y_, 1, a_, 8, 8);
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("placed 1"));
  EXPECT_TRUE(queue_.has_placements());
  EXPECT_EQ(Part(a_, 128, 8), Fill(8, 0));
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("placed 1", "placed 2"));
  EXPECT_EQ(Part(a_, 128, 8), Fill(8, 2));
  EXPECT_THAT(y_.log, ElementsAre("placed 1"));
}

TEST_F(DmaQueueTest, FetchesScatterMergedReads) {
  for (size_t i = 0; i < 1 << 16; ++i) a_.memory[i] = static_cast<std::byte>(i / 256 + i);
  Bytes packets(32 * 4096);
  for (uint32_t i = 0; i < 16; ++i) {
    queue_.Fetch(At(a_, i * 4096), &packets[(15 - i) * 4096], 4096, i);
  }
  queue_.FlushFetches([](uint32_t tag) { ADD_FAILURE() << tag; });
  ASSERT_EQ(a_.calls.size(), 1u);
  EXPECT_EQ(a_.calls[0].pieces, (Pieces{{0, 16 * 4096}}));
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(Bytes(packets.begin() + static_cast<ptrdiff_t>((15 - i) * 4096),
                    packets.begin() + static_cast<ptrdiff_t>((16 - i) * 4096)),
              Part(a_, i * 4096, 4096));
  }
}

TEST_F(DmaQueueTest, SmallFetchesOfAPageAreOnePiece) {
  for (size_t i = 0; i < 1 << 16; ++i) a_.memory[i] = static_cast<std::byte>(i / 256 + i);
  std::byte words[64][8];
  // 64 bytes apart, as a sender walks through its buffer, wrapping in between.
  for (uint32_t i = 0; i < 64; ++i) {
    queue_.Fetch(At(a_, 4096 + (i * 64 + 1024) % 4096), words[i], 8, i);
  }
  queue_.FlushFetches([](uint32_t tag) { ADD_FAILURE() << tag; });
  ASSERT_EQ(a_.calls.size(), 1u);
  EXPECT_LE(a_.calls[0].pieces.size(), 2u);
  for (auto [offset, bytes] : a_.calls[0].pieces) {
    EXPECT_GE(offset, 4096u);  // no page that no fetch touches
    EXPECT_LE(offset + bytes, 8192u);
  }
  for (uint32_t i = 0; i < 64; ++i) {
    EXPECT_EQ(Bytes(words[i], words[i] + 8), Part(a_, 4096 + (i * 64 + 1024) % 4096, 8)) << i;
  }
}

TEST_F(DmaQueueTest, FailedFetchesNameEachPacketOnceInOrder) {
  a_.Break(5000, 1);
  a_.Break(20480, 4096);  // a page
  Bytes to(64 * 1024);
  uint32_t place = 0;
  const auto fetch = [&](FakeSpace& space, uint64_t offset, uint32_t bytes, uint32_t tag) {
    queue_.Fetch(At(space, offset), &to[place], bytes, tag);
    place += bytes;
  };
  std::fill(b_.memory.begin(), b_.memory.end(), std::byte{0xbb});
  std::fill(a_.memory.begin(), a_.memory.end(), std::byte{0xaa});
  fetch(a_, 3072, 1024, 1);  // these three are neighbours
  fetch(a_, 4096, 1024, 2);  // fails
  fetch(a_, 5120, 1024, 3);
  fetch(b_, 0, 100, 4);
  fetch(a_, 20488, 8, 5);  // fails, in two pieces
  fetch(a_, 20552, 8, 5);
  fetch(a_, 20616, 8, 6);  // fails
  fetch(b_, 4096, 2000, 7);
  fetch(a_, 0, 8, 8);
  std::vector<uint32_t> failed;
  queue_.FlushFetches([&](uint32_t tag) { failed.push_back(tag); });
  EXPECT_THAT(failed, ElementsAre(2, 5, 6));
  EXPECT_EQ(Bytes(to.begin(), to.begin() + 1024), Fill(1024, 0xaa));
  EXPECT_EQ(Bytes(to.begin() + 2048, to.begin() + 3072), Fill(1024, 0xaa));
  EXPECT_EQ(Bytes(to.begin() + 3072, to.begin() + 3172), Fill(100, 0xbb));
  EXPECT_EQ(Bytes(to.begin() + 3196, to.begin() + 5196), Fill(2000, 0xbb));
  EXPECT_EQ(Bytes(to.begin() + 5196, to.begin() + 5204), Fill(8, 0xaa));
  failed.clear();
  fetch(a_, 0, 8, 9);
  queue_.FlushFetches([&](uint32_t tag) { failed.push_back(tag); });
  EXPECT_THAT(failed, IsEmpty());
}

TEST_F(DmaQueueTest, FailuresOfAFullFetchQueueAreNotForgotten) {
  a_.Break(0, 8);
  std::byte to[8];
  for (uint32_t i = 0; i < 600; ++i) queue_.Fetch(At(a_, i == 3 ? 0 : 64 + i * 8), to, 8, i);
  std::vector<uint32_t> failed;
  queue_.FlushFetches([&](uint32_t tag) { failed.push_back(tag); });
  // Its neighbours in the page are read with it, so they may fail with it.
  EXPECT_THAT(failed, ::testing::Contains(3u));
  EXPECT_THAT(failed, ::testing::Not(::testing::Contains(599u)));
}

// Random placements against a model that does one after the other.
TEST_F(DmaQueueTest, RandomMixEqualsOneAfterTheOther) {
  std::mt19937 random(12);
  for (int round = 0; round < 300; ++round) {
    constexpr size_t kBytes = 4096;
    FakeSpace spaces[3] = {{kBase, kBytes}, {kBase + 0x100000, kBytes}, {kBase + 0x200000, kBytes}};
    std::vector<Bytes> model(3, Bytes(kBytes));
    std::vector<std::pair<int, size_t>> broken;
    for (int i = 0; i < static_cast<int>(random() % 3); ++i) {
      broken.push_back({static_cast<int>(random() % 3), random() % kBytes});
      spaces[broken.back().first].Break(broken.back().second, 1);
    }
    // Owner o has the bytes [o * 512, o * 512 + 512) of each space, so that the
    // order between owners does not matter.
    constexpr uint64_t kOwners = 8;
    LoggingOwner owners[kOwners];
    std::vector<std::string> expected[kOwners];
    Ticket placed[kOwners] = {};
    bool failed[kOwners] = {};
    Ticket ticket = 1;
    const auto count = random() % 120;
    for (uint32_t i = 0; i < count; ++i, ++ticket) {
      const uint64_t o = random() % kOwners;
      const auto s = static_cast<int>(random() % 50 == 0 ? random() % 3 : o % 3);
      const bool atomic = random() % 4 == 0;
      const size_t bytes = atomic ? 8 : random() % 3 == 0 ? random() % 200 : random() % 20;
      size_t offset = o * 512 + random() % (512 - bytes);
      if (atomic) offset &= ~size_t{7};
      bool bad = false;
      for (auto [space, at] : broken) {
        bad = bad || (space == s && at >= offset && at < offset + bytes);
      }
      const uint64_t add = random();
      if (atomic) {
        Add(owners[o], ticket, spaces[s], offset, add);
      } else {
        Place(owners[o], ticket, spaces[s], offset, bytes, random() % 2 == 0);
      }
      if (failed[o]) continue;
      const auto report_placed = [&] {
        if (placed[o] != 0) expected[o].push_back("placed " + std::to_string(placed[o]));
        placed[o] = 0;
      };
      if (bad) {
        report_placed();
        expected[o].push_back("failed " + std::to_string(ticket));
        failed[o] = true;
        continue;
      }
      if (atomic) {
        report_placed();
        uint64_t word;
        std::memcpy(&word, &model[static_cast<size_t>(s)][offset], 8);
        expected[o].push_back("atomic " + std::to_string(ticket) + " = " + std::to_string(word));
        word += add;
        std::memcpy(&model[static_cast<size_t>(s)][offset], &word, 8);
      } else {
        std::fill_n(model[static_cast<size_t>(s)].begin() + static_cast<ptrdiff_t>(offset), bytes,
                    std::byte{static_cast<uint8_t>(ticket)});
        placed[o] = ticket;
      }
    }
    queue_.FlushPlacements();
    for (uint64_t o = 0; o < kOwners; ++o) {
      if (placed[o] != 0) expected[o].push_back("placed " + std::to_string(placed[o]));
      ASSERT_EQ(owners[o].log, expected[o]) << "round " << round << " owner " << o;
      if (failed[o]) continue;  // the failed placement itself is there in part
      for (size_t s = 0; s < 3; ++s) {
        ASSERT_EQ(Part(spaces[s], o * 512, 512),
                  Bytes(model[s].begin() + static_cast<ptrdiff_t>(o * 512),
                        model[s].begin() + static_cast<ptrdiff_t>(o * 512 + 512)))
            << "round " << round << " owner " << o << " space " << s;
      }
    }
    for (const FakeSpace& space : spaces) ASSERT_THAT(space.errors, IsEmpty());
  }
}

class QpMemoryTest : public DmaQueueTest {
 protected:
  QpMemoryTest() {
    Region region{.space = &a_,
                  .pd = 3,
                  .access = transport::kAccessLocalWrite | transport::kAccessRemoteWrite |
                            transport::kAccessRemoteAtomic,
                  .iova = 0,
                  .length = 4096,
                  .address = kBase + 8192};
    EXPECT_EQ(table_.Register(region, &key_), 0);
  }
  RegionTable table_{16, 1};
  uint32_t key_ = 0;
  QpMemory memory_{table_, queue_, 3, &x_};
};

using transport::MemoryAccess;
using transport::MemoryStatus;

TEST_F(QpMemoryTest, PlacesAtTheTranslatedAddressWithTicketsFromOne) {
  Ticket ticket = 0;
  EXPECT_EQ(memory_.Place({.address = 16, .length = 100, .key = key_}, Data(100, 9),
                          MemoryAccess::kRemoteWrite, true, &ticket),
            MemoryStatus::kOk);
  EXPECT_EQ(ticket, 1u);
  EXPECT_EQ(memory_.Atomic(key_, 512, {.swap_or_add = 4}, &ticket), MemoryStatus::kOk);
  EXPECT_EQ(ticket, 2u);
  queue_.FlushPlacements();
  EXPECT_THAT(x_.log, ElementsAre("placed 1", "atomic 2 = 0"));
  EXPECT_EQ(Part(a_, 8192 + 16, 100), Fill(100, 9));
  EXPECT_EQ(a_.Word(8192 + 512), 4u);
}

TEST_F(QpMemoryTest, ChecksGiveNoTicketAndPlaceNothing) {
  Ticket ticket = 77;
  const auto place = [&](uint64_t address, uint32_t key, MemoryAccess access) {
    return memory_.Place({.address = address, .length = 8, .key = key}, Data(8, 1), access, false,
                         &ticket);
  };
  EXPECT_EQ(place(4089, key_, MemoryAccess::kRemoteWrite), MemoryStatus::kOutOfBounds);
  EXPECT_EQ(place(0, key_ ^ 1, MemoryAccess::kRemoteWrite), MemoryStatus::kBadKey);
  EXPECT_EQ(place(0, key_, MemoryAccess::kRemoteRead), MemoryStatus::kNoRight);
  EXPECT_EQ(memory_.Atomic(key_, 4090, {}, &ticket), MemoryStatus::kOutOfBounds);
  QpMemory other(table_, queue_, 4, &x_);
  EXPECT_EQ(other.Check(key_, 0, 8, MemoryAccess::kLocalRead), MemoryStatus::kWrongPd);
  EXPECT_EQ(memory_.Check(key_, 0, 4096, MemoryAccess::kLocalRead), MemoryStatus::kOk);
  EXPECT_EQ(memory_.Check(key_, 0, 4097, MemoryAccess::kLocalRead), MemoryStatus::kOutOfBounds);
  EXPECT_EQ(ticket, 77u);
  EXPECT_FALSE(queue_.has_placements());
}

TEST_F(QpMemoryTest, OnlyRdmaWriteEndsInPiecesOfItsOwn) {
  Ticket ticket;
  for (auto access : {MemoryAccess::kLocalWrite, MemoryAccess::kRemoteWrite}) {
    a_.calls.clear();
    memory_.Place({.address = 0, .length = 256, .key = key_}, Data(256, 1), access, true, &ticket);
    queue_.FlushPlacements();
    EXPECT_EQ(a_.calls[0].pieces.size(), access == MemoryAccess::kLocalWrite ? 1u : 2u);
  }
}

TEST_F(QpMemoryTest, RegionsCannotBeInvalidated) {
  EXPECT_EQ(memory_.Invalidate(key_), MemoryStatus::kNoRight);
  EXPECT_EQ(memory_.Invalidate(key_ ^ 1), MemoryStatus::kBadKey);
}

}  // namespace
}  // namespace verbena::nic
