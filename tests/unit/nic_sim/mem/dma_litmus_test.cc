// SPDX-License-Identifier: Apache-2.0
//
// What an application that polls its memory may rely on, tried with a process
// that does: the end of a message becomes visible last, an aligned word is never
// torn, messages of a QP come in order, nothing beside a message changes.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>

#include "nic_sim/mem/dma_queue.h"
#include "tests/unit/nic_sim/mem/target_process.h"

namespace verbena::nic {
namespace {

using testing::TargetProcess;
using Backend = AddressSpace::Backend;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kBufferBytes = 80 * 1024;
constexpr uint32_t kMaxCuts = 600;
constexpr uint8_t kOld = 0x11;
constexpr uint8_t kNew = 0xee;

// Shared by the writer and the watching process. The watched buffer is not: it
// is private memory of the watcher.
struct Control {
  std::atomic<uint32_t> round;  // writer: parameters of this round are set
  std::atomic<uint32_t> ready;  // watcher: the buffer holds kOld, place now
  std::atomic<uint32_t> done;   // watcher: checked
  std::atomic<bool> stop;
  uint64_t buffer;
  uint32_t offset, bytes;
  uint32_t watched;  // wait for the byte this far before the end, 0: the last
  uint32_t cut_count;
  uint32_t cuts[kMaxCuts];  // where packets meet, ascending offsets in the buffer

  uint64_t early_ends, torn_words, strays, polls;
};

Control* g_control;

template <typename T>
T Load(uint64_t address) {
  return *reinterpret_cast<const volatile T*>(static_cast<uintptr_t>(address));
}

constexpr uint64_t Word(uint8_t fill) { return fill * 0x0101010101010101u; }

// Looks at each aligned word inside the message that lies in one packet.
void CheckWords(Control& c) {
  uint32_t cut = 0;
  for (uint64_t at = (c.offset + 7) & ~7u; at + 8 <= c.offset + c.bytes; at += 8) {
    while (cut < c.cut_count && c.cuts[cut] <= at) ++cut;
    if (cut < c.cut_count && c.cuts[cut] < at + 8) continue;
    const auto word = Load<uint64_t>(c.buffer + at);
    if (word != Word(kOld) && word != Word(kNew)) ++c.torn_words;
  }
}

void WatchOneRound(Control& c) {
  const uint64_t start = c.buffer + c.offset;
  const uint64_t watched = start + c.bytes - 1 - c.watched;
  // Bytes that must be there when the watched one is: all before the last 8, and
  // all if it is the very last.
  const uint32_t earlier = c.watched == 0 ? c.bytes : c.bytes - std::min(c.bytes, 8u);
  while (Load<uint8_t>(watched) != kNew) {
    ++c.polls;
    if (c.bytes <= 512) CheckWords(c);
    if (c.stop.load(std::memory_order_relaxed)) return;
  }
  for (uint32_t i = 0; i < earlier; ++i) {
    if (Load<uint8_t>(start + i) != kNew) {
      ++c.early_ends;
      break;
    }
  }
}

int64_t Watch() {
  Control& c = *g_control;
  for (uint32_t round = 1;; ++round) {
    while (c.round.load(std::memory_order_acquire) != round) {
      if (c.stop.load(std::memory_order_relaxed)) return static_cast<int64_t>(round);
      sched_yield();
    }
    const uint32_t low = c.offset & ~63u;
    const uint32_t high = std::min(kBufferBytes, c.offset + c.bytes + 64);
    std::memset(reinterpret_cast<void*>(c.buffer + low), kOld, high - low);
    c.ready.store(round, std::memory_order_release);
    WatchOneRound(c);
    while (c.ready.load(std::memory_order_acquire) == round) {  // until the writer is through
      if (c.stop.load(std::memory_order_relaxed)) return static_cast<int64_t>(round);
      CheckWords(c);
    }
    for (uint32_t i = low; i < high; ++i) {
      const bool inside = i >= c.offset && i < c.offset + c.bytes;
      if (Load<uint8_t>(c.buffer + i) != (inside ? kNew : kOld)) {
        ++c.strays;
        break;
      }
    }
    c.done.store(round, std::memory_order_release);
  }
}

class CountingOwner final : public DmaOwner {
 public:
  void OnPlaced(transport::Ticket ticket) override { placed = ticket; }
  void OnAtomic(transport::Ticket, uint64_t) override {}
  void OnPlaceFailed(transport::Ticket) override { ++failed; }
  transport::Ticket placed = 0;
  int failed = 0;
};

class DmaLitmusTest : public ::testing::TestWithParam<Backend> {
 protected:
  // False when the watcher does not answer in time.
  static bool WaitFor(const std::atomic<uint32_t>& value, uint32_t wanted) {
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    while (value.load(std::memory_order_acquire) != wanted) {
      if (Clock::now() > deadline) return false;
      sched_yield();
    }
    return true;
  }

  // Cuts a message in packets of `mtu` and queues them.
  void PlaceMessage(DmaQueue& queue, const Extent& to, uint32_t bytes, uint32_t mtu,
                    std::mt19937& random) {
    for (uint32_t done = 0; done < bytes;) {
      const uint32_t step = std::min(mtu, bytes - done);
      // Payloads lie at any alignment in their packets.
      const std::byte* from = source_.get() + random() % 256;
      queue.Place({to.space, to.address + done}, {from, step}, done + step == bytes, &owner_,
                  ++ticket_);
      done += step;
      if (done < bytes) AddCut(to.address + done);
    }
  }
  void AddCut(uint64_t address) {
    Control& c = *g_control;
    ASSERT_LT(c.cut_count, kMaxCuts);
    c.cuts[c.cut_count++] = static_cast<uint32_t>(address - c.buffer);
  }

  void SetUp() override {
    g_control = static_cast<Control*>(
        mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(g_control, MAP_FAILED);
    std::memset(source_.get(), kNew, kSourceBytes);
  }
  void TearDown() override { munmap(g_control, sizeof(Control)); }

  static constexpr size_t kSourceBytes = 8192;
  std::unique_ptr<std::byte[]> source_ = std::make_unique<std::byte[]>(kSourceBytes);
  CountingOwner owner_;
  transport::Ticket ticket_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Backends, DmaLitmusTest,
                         ::testing::Values(Backend::kProcessVm, Backend::kProcMem),
                         [](const auto& info) {
                           return info.param == Backend::kProcessVm ? "ProcessVm" : "ProcMem";
                         });

TEST_P(DmaLitmusTest, EndOfMessageLastAndNoTornWord) {
  TargetProcess::bodies() = {Watch};
  TargetProcess target(kBufferBytes);
  auto space = target.Open(GetParam());
  ASSERT_NE(space, nullptr);
  Control& c = *g_control;
  c.buffer = target.address();
  target.Start(0);

  DmaQueue queue;
  std::mt19937 random(static_cast<uint32_t>(GetParam()) + 3);
  const auto deadline = Clock::now() + std::chrono::milliseconds(2500);
  const auto draw = [&](uint32_t bound) { return static_cast<uint32_t>(random() % bound); };
  uint32_t round = 0;
  for (; Clock::now() < deadline;) {
    const uint32_t limit = uint32_t{1} << draw(17);  // up to 64 KiB, small ones often
    const uint32_t mtu = draw(2) == 0 ? 1024 : 4096;
    c.bytes = 1 + draw(limit);
    // Half of them aligned as applications do, the others in all ways.
    c.offset = draw(2) == 0 ? draw(64) * 64 : draw(4096);
    c.cut_count = 0;
    // One message, or two, of which the second tells about the first.
    const uint32_t second = c.bytes > 1 && draw(2) == 0 ? std::min(c.bytes - 1, 1 + draw(16)) : 0;
    const Extent to{space.get(), c.buffer + c.offset};
    const uint32_t first = c.bytes - second;
    PlaceMessage(queue, to, first, mtu, random);
    uint32_t last_packet = (first - 1) % mtu + 1;
    if (second > 0) {
      AddCut(to.address + first);
      PlaceMessage(queue, {to.space, to.address + first}, second, mtu, random);
      last_packet = second;
    }
    c.watched = draw(2) == 0 ? 0 : draw(std::min(8u, last_packet));
    c.round.store(++round, std::memory_order_release);
    if (!WaitFor(c.ready, round)) break;
    queue.FlushPlacements();
    c.ready.store(0, std::memory_order_release);
    if (!WaitFor(c.done, round)) break;
    ASSERT_EQ(owner_.placed, ticket_);
  }
  c.stop = true;
  EXPECT_EQ(target.Join(), round + 1) << "the watcher did not come through";
  EXPECT_EQ(owner_.failed, 0);
  EXPECT_EQ(c.early_ends, 0u) << "of " << round << " messages";
  EXPECT_EQ(c.torn_words, 0u) << "of " << round << " messages";
  EXPECT_EQ(c.strays, 0u) << "of " << round << " messages";
  EXPECT_GT(round, 100u);
  RecordProperty("rounds", static_cast<int>(round));
  RecordProperty("polls", std::to_string(c.polls));
  printf("%u messages, %llu polls\n", round, static_cast<unsigned long long>(c.polls));
}

}  // namespace
}  // namespace verbena::nic
