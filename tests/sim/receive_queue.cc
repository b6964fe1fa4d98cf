// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/receive_queue.h"

namespace verbena::sim {

namespace {

constexpr uint32_t kMaxSges = 4;

}  // namespace

std::vector<MemorySegment> RandomTargets(uint32_t bytes, uint32_t key, HostMemory& memory,
                                         Random& random) {
  std::vector<MemorySegment> sges;
  const uint32_t count =
      random.Chance(0.6) ? 1 : static_cast<uint32_t>(random.Between(1, kMaxSges));
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t take = i + 1 == count ? bytes : random.Below32(uint64_t{bytes} + 1);
    sges.push_back({memory.Allocate(take), take, key});
    bytes -= take;
  }
  return sges;
}

void ReceiveQueue::PlanAny(const Profile& profile, HostMemory& memory, Random& random) {
  PlannedReceive& receive = Plan();
  receive.bytes = profile.max_bytes + random.Below32(100);
  if (profile.small_receives > 0 && random.Chance(profile.small_receives)) {
    receive.bytes = random.Below32(profile.max_bytes);
  } else if (profile.bad_receive > 0 && random.Chance(profile.bad_receive)) {
    receive.malformed = random.Chance(0.5);
    receive.bad_key = !receive.malformed;
  }
  receive.sges =
      RandomTargets(receive.bytes, receive.bad_key ? kUnknownKey : kLocalKey, memory, random);
}

}  // namespace verbena::sim
