// SPDX-License-Identifier: Apache-2.0
//
// What an application that polls its memory may rely on, tried with a process
// that does: the end of a message becomes visible last, an aligned word is never
// torn, messages of a QP come in order, nothing beside a message changes.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdio>
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
constexpr uint32_t kMaxCuts = 100;
constexpr uint8_t kOutside = 0x77;
// A sample during which more messages came is thrown away: fills would wrap.
constexpr uint32_t kMaxSteps = 100;

// Shared by the writer and the watching process. The watched buffer is not: it
// is private memory of the watcher. A round is a stream of messages to the same
// place, the n-th of them filled with n modulo 256.
struct Control {
  std::atomic<uint32_t> round;     // writer: what follows is set
  std::atomic<uint32_t> ready;     // watcher: the buffer is prepared
  std::atomic<uint32_t> finished;  // writer: the stream is over
  std::atomic<uint32_t> checked;   // watcher
  std::atomic<bool> stop;
  std::atomic<uint32_t> message;  // writer: this one is being placed
  uint64_t buffer;
  uint32_t offset, bytes;
  uint32_t second;                // where the second message starts, or the end
  uint32_t watched;               // the byte this far before the end, 0: the last
  uint32_t exposed_page_offsets;  // see Exposed
  uint32_t cut_count;
  uint32_t cuts[kMaxCuts];  // where packets meet, ascending offsets in the buffer

  uint64_t early_ends, torn_words, strays;
  std::atomic<uint64_t> changes;
  uint64_t torn_example[3];  // offset and bytes of the message, offset of the word
};

Control* g_control;

template <typename T>
T Load(uint64_t address) {
  return *reinterpret_cast<const volatile T*>(static_cast<uintptr_t>(address));
}

// Whether a word may be torn because a piece starts in the first bytes of its
// page: a message, or its last 8 bytes, which are a piece of their own.
bool Exposed(const Control& c, uint64_t at) {
  if (at % 4096 == 0 || at % 4096 > c.exposed_page_offsets) return false;
  const uint64_t end = c.offset + c.bytes;
  for (const uint64_t start : {uint64_t{c.offset}, uint64_t{c.second}, end - 16}) {
    if (at / 4096 == start / 4096 && at + 16 > start) return true;
  }
  return at < c.second && at + 16 > c.second;
}

// Looks at each aligned word inside the message that lies in one packet. Gives
// the offset of one that is torn, or 0.
uint64_t TornWord(const Control& c) {
  uint32_t cut = 0;
  for (uint64_t at = (c.offset + 7) & ~7u; at + 8 <= c.offset + c.bytes; at += 8) {
    while (cut < c.cut_count && c.cuts[cut] <= at) ++cut;
    if (cut < c.cut_count && c.cuts[cut] < at + 8) continue;
    if (Exposed(c, at)) continue;
    const auto word = Load<uint64_t>(c.buffer + at);
    if (word != (word & 0xff) * 0x0101010101010101u) return at;
  }
  return 0;
}

// Waits for the watched byte to change and looks whether what must be there
// before it is there. From the end on: what was copied last is what may be late.
void Sample(Control& c) {
  const uint64_t start = c.buffer + c.offset;
  const uint64_t watched_at = start + c.bytes - 1 - c.watched;
  // All before the last 8 bytes, and all bytes if the watched one is the very
  // last.
  const uint32_t earlier = c.watched == 0 ? c.bytes : c.bytes - std::min(c.bytes, 8u);
  const auto old = Load<uint8_t>(watched_at);
  auto watched = old;
  uint32_t before = 0;
  for (uint32_t i = 0; i < 2000 && watched == old; ++i) {
    before = c.message.load(std::memory_order_acquire);
    watched = Load<uint8_t>(watched_at);
  }
  if (watched == old) return;
  ++c.changes;
  bool early = false;
  for (uint32_t i = earlier; i-- > 0;) {
    const auto newer = static_cast<uint8_t>(Load<uint8_t>(start + i) - watched);
    early = early || newer > kMaxSteps + 1;
  }
  const bool in_time = c.message.load(std::memory_order_acquire) - before < kMaxSteps;
  if (early && in_time) ++c.early_ends;
}

void LookForTornWords(Control& c) {
  const uint64_t torn = TornWord(c);
  if (torn == 0) return;
  if (c.torn_words++ == 0) {
    c.torn_example[0] = c.offset;
    c.torn_example[1] = c.bytes;
    c.torn_example[2] = torn;
  }
}

// The n-th of the CPUs that we may use: writer and watcher must run at the same
// time to meet.
void PinToCpu(int n) {
  static const cpu_set_t allowed = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof(set), &set);
    return set;
  }();
  n %= std::max(1, CPU_COUNT(&allowed));
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || n-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof(one), &one);
    return;
  }
}

int64_t Watch() {
  PinToCpu(1);
  Control& c = *g_control;
  for (uint32_t round = 1;; ++round) {
    while (c.round.load(std::memory_order_acquire) != round) {
      if (c.stop.load()) return static_cast<int64_t>(round);
      sched_yield();
    }
    auto* buffer = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(c.buffer));
    std::memset(buffer, kOutside, kBufferBytes);
    std::memset(buffer + c.offset, 0, c.bytes);
    c.ready.store(round, std::memory_order_release);
    while (c.finished.load(std::memory_order_acquire) != round) {
      if (c.stop.load()) return static_cast<int64_t>(round);
      Sample(c);
      LookForTornWords(c);
    }
    const auto fill = static_cast<uint8_t>(c.message.load());
    for (uint32_t i = 0; i < kBufferBytes; ++i) {
      const bool inside = i >= c.offset && i < c.offset + c.bytes;
      if (Load<uint8_t>(c.buffer + i) != (inside ? fill : kOutside)) {
        ++c.strays;
        break;
      }
    }
    c.checked.store(round, std::memory_order_release);
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

  // Queues a message in packets of `mtu`.
  void PlaceMessage(DmaQueue& queue, const Extent& to, uint32_t bytes, uint32_t mtu,
                    std::mt19937& random) {
    for (uint32_t done = 0; done < bytes;) {
      const uint32_t step = std::min(mtu, bytes - done);
      // Payloads lie at any alignment in their packets.
      const std::byte* from = source_.get() + random() % 256;
      queue.Place({to.space, to.address + done}, {from, step}, done + step == bytes, &owner_,
                  ++ticket_);
      done += step;
    }
  }
  static void AddCuts(uint32_t offset, uint32_t bytes, uint32_t mtu) {
    Control& c = *g_control;
    for (uint32_t at = offset + mtu; at < offset + bytes; at += mtu) c.cuts[c.cut_count++] = at;
  }

  void SetUp() override {
    g_control = static_cast<Control*>(
        mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(g_control, MAP_FAILED);
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
  // /proc/PID/mem cannot avoid a copy that tears there (address_space.cc).
  c.exposed_page_offsets = GetParam() == Backend::kProcMem ? 63 : 0;
  target.Start(0);
  PinToCpu(0);

  DmaQueue queue;
  std::mt19937 random(static_cast<uint32_t>(GetParam()) + 3);
  const auto draw = [&](uint32_t bound) { return static_cast<uint32_t>(random() % bound); };
  const auto start = Clock::now();
  // On a busy machine the two seldom run at the same time: longer then.
  const auto more = [&] {
    return Clock::now() - start < std::chrono::seconds(c.changes > 1000 ? 3 : 20);
  };
  uint32_t round = 0;
  uint32_t messages = 0;
  while (more()) {
    const uint32_t mtu = draw(2) == 0 ? 1024 : 4096;
    // Up to 64 KiB, small ones often. Half of them aligned as applications do,
    // the others in all ways, often a few bytes behind the start of a page.
    c.bytes = 1 + draw(uint32_t{1} << draw(17));
    if (draw(2) == 0) c.bytes = std::bit_ceil(c.bytes);
    c.offset = draw(2) == 0 ? draw(64) * 64 : draw(2) == 0 ? draw(4096) : draw(2) * 4096 + draw(64);
    // One message, or two, of which the second tells about the first.
    const uint32_t second = c.bytes > 1 && draw(2) == 0 ? std::min(c.bytes - 1, 1 + draw(16)) : 0;
    const uint32_t first = c.bytes - second;
    c.second = c.offset + first;
    c.cut_count = 0;
    AddCuts(c.offset, first, mtu);
    if (second > 0) c.cuts[c.cut_count++] = c.offset + first;
    const uint32_t last_packet = second > 0 ? second : (first - 1) % mtu + 1;
    c.watched = draw(2) == 0 ? 0 : draw(std::min(8u, last_packet));
    c.message = 0;
    c.round.store(++round, std::memory_order_release);
    if (!WaitFor(c.ready, round)) break;
    const auto round_end = Clock::now() + std::chrono::milliseconds(10);
    while (Clock::now() < round_end) {
      std::memset(source_.get(), static_cast<uint8_t>(c.message + 1), kSourceBytes);
      ++c.message;
      const Extent to{space.get(), c.buffer + c.offset};
      PlaceMessage(queue, to, first, mtu, random);
      PlaceMessage(queue, {to.space, to.address + first}, second, mtu, random);
      queue.FlushPlacements();
      ASSERT_EQ(owner_.placed, ticket_);
      ++messages;
    }
    c.finished.store(round, std::memory_order_release);
    if (!WaitFor(c.checked, round)) break;
  }
  c.stop = true;
  EXPECT_EQ(target.Join(), round + 1) << "the watcher did not come through";
  EXPECT_EQ(owner_.failed, 0);
  EXPECT_EQ(c.early_ends, 0u);
  // An interrupt may stop the kernel's "rep movsb" between two bytes of a word. A copy that really
  // goes byte by byte tears far more.
  EXPECT_LE(c.torn_words, 1 + c.changes / 50000)
      << "at " << c.torn_example[2] << " in " << c.torn_example[1] << " bytes at "
      << c.torn_example[0];
  EXPECT_EQ(c.strays, 0u);
  printf("%u placements of %u messages, %llu changes seen\n", round, messages,
         static_cast<unsigned long long>(c.changes.load()));
  EXPECT_GT(c.changes, 20u) << "too little was seen to say anything";
}

}  // namespace
}  // namespace verbena::nic
