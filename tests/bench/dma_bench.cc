// SPDX-License-Identifier: Apache-2.0
//
// What the device's copies cost, by backend and kind of traffic: bursts of 32
// packets to and from another process. Prints nanoseconds per operation, the
// best of several rounds. Not a test: figures of a busy machine say nothing.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "nic_sim/mem/dma_queue.h"
#include "nic_sim/mem/region_table.h"
#include "tests/unit/nic_sim/mem/target_process.h"

namespace verbena::nic {
namespace {

using Clock = std::chrono::steady_clock;
using Backend = AddressSpace::Backend;

constexpr uint32_t kBurst = 32;
// Short rounds: some of them run undisturbed.
constexpr int kRounds = 300;
constexpr int kBursts = 20;
constexpr uint32_t kPacketStride = 4096 + 320;  // as payloads lie in a pool of mbufs

class SilentOwner final : public DmaOwner {
 public:
  void OnPlaced(transport::Ticket) override {}
  void OnAtomic(transport::Ticket, uint64_t) override {}
  void OnPlaceFailed(transport::Ticket) override { std::printf("placement failed\n"); }
};

double BestNanoseconds(const std::function<void()>& burst) {
  double best = 1e12;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = Clock::now();
    for (int i = 0; i < kBursts; ++i) burst();
    const std::chrono::duration<double, std::nano> time = Clock::now() - start;
    best = std::min(best, time.count() / (kBursts * kBurst));
  }
  return best;
}

void Run(Backend backend) {
  testing::TargetProcess target(4 << 20);
  auto space = target.Open(backend);
  if (space == nullptr) return;
  DmaQueue queue;
  SilentOwner owner;
  RegionTable table(16, 1);
  uint32_t key = 0;
  table.Register({.space = space.get(),
                  .pd = 1,
                  .access = transport::kAccessLocalWrite | transport::kAccessRemoteWrite,
                  .iova = target.address(),
                  .length = target.bytes(),
                  .address = target.address()},
                 &key);
  QpMemory memory(table, queue, 1, &owner);
  std::vector<std::byte> packets(kBurst * kPacketStride);
  std::memset(packets.data(), 1, packets.size());
  transport::Ticket ticket;

  const auto place = [&](uint32_t bytes, uint32_t stride, bool each_is_a_message) {
    for (uint32_t i = 0; i < kBurst; ++i) {
      memory.Place({.address = target.address() + i * stride, .length = bytes, .key = key},
                   {&packets[i * kPacketStride], bytes}, transport::MemoryAccess::kRemoteWrite,
                   each_is_a_message || i == kBurst - 1, &ticket);
    }
  };
  const auto fetch = [&](uint32_t bytes, uint32_t stride) {
    for (uint32_t i = 0; i < kBurst; ++i) {
      queue.Fetch({space.get(), target.address() + i * stride}, &packets[i * kPacketStride], bytes,
                  i);
    }
  };
  const auto flush_fetches = [&] { queue.FlushFetches([](uint32_t) {}); };
  const auto print = [&](const char* what, const std::function<void()>& burst) {
    const uint64_t calls = space->system_calls();
    const double best = BestNanoseconds(burst);
    std::printf("%-11s %-44s %8.0f ns/op  %5.2f calls/burst\n",
                backend == Backend::kProcessVm ? "process_vm" : "/proc/mem", what, best,
                static_cast<double>(space->system_calls() - calls) / (kRounds * kBursts));
  };

  print("queue a placement of 8 B, no flush", [&] {
    place(8, 64, true);
    queue.Forget(&owner);  // so that nothing is copied
    queue.FlushPlacements();
  });
  print("place 8 B messages, 64 B apart", [&] {
    place(8, 64, true);
    queue.FlushPlacements();
  });
  print("place 8 B messages, adjacent", [&] {
    place(8, 8, true);
    queue.FlushPlacements();
  });
  print("place 4 KiB packets of one message", [&] {
    place(4096, 4096, false);
    queue.FlushPlacements();
  });
  print("place 4 KiB messages, one buffer", [&] {
    place(4096, 0, true);
    queue.FlushPlacements();
  });
  print("fetch 8 B messages, 64 B apart", [&] {
    fetch(8, 64);
    flush_fetches();
  });
  print("fetch 4 KiB packets of one message", [&] {
    fetch(4096, 4096);
    flush_fetches();
  });
  print("fetch and place 8 B, 64 B apart", [&] {
    fetch(8, 64);
    flush_fetches();
    place(8, 64, true);
    queue.FlushPlacements();
  });
  print("fetch and place 4 KiB packets", [&] {
    fetch(4096, 4096);
    flush_fetches();
    place(4096, 4096, false);
    queue.FlushPlacements();
  });
}

}  // namespace
}  // namespace verbena::nic

int main() {
  verbena::nic::Run(verbena::nic::AddressSpace::Backend::kProcessVm);
  verbena::nic::Run(verbena::nic::AddressSpace::Backend::kProcMem);
  return 0;
}
