// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/network.h"

#include "transport/base/byteorder.h"
#include "transport/wire/packet_view.h"

namespace verbena::sim {

using transport::Time;

uint32_t FramePool::Take() {
  if (free_.empty()) {
    frames_.push_back(std::make_unique<Frame>());
    return static_cast<uint32_t>(frames_.size() - 1);
  }
  const uint32_t number = free_.back();
  free_.pop_back();
  return number;
}

bool Link::IsLost() {
  if (in_burst_) {
    if (random_.Chance(profile_.burst_end)) in_burst_ = false;
  } else if (profile_.burst_begin > 0 && random_.Chance(profile_.burst_begin)) {
    in_burst_ = true;
  }
  return random_.Chance(in_burst_ ? profile_.burst_loss : profile_.loss);
}

void Link::Corrupt(Frame& frame) {
  if (const auto view = transport::PacketView::Parse(frame.span()); view.ok() && !frame.has_icrc) {
    transport::StoreLe32(&frame.data[frame.bytes - transport::kIcrcBytes], view->ComputeIcrc());
  }
  frame.has_icrc = true;
  for (uint64_t flips = random_.Between(1, 4); flips > 0; --flips) {
    frame.data[random_.Below(frame.bytes)] ^= static_cast<std::byte>(1u << random_.Below(8));
  }
  if (random_.Chance(0.1)) frame.bytes = random_.Below32(frame.bytes + 1);
}

void Link::Add(uint32_t frame, Time now) {
  Time at = now + profile_.delay;
  if (profile_.jitter > Duration::Zero()) at += random_.UpTo(profile_.jitter);
  if (profile_.delayed > 0 && random_.Chance(profile_.delayed)) {
    at += random_.UpTo(profile_.long_delay);
  }
  arrivals_[count_++] = {frame, at};
}

std::span<const Link::Arrival> Link::Send(uint32_t frame, Time now) {
  count_ = 0;
  if (IsLost()) {
    pool_.Give(frame);
    return {};
  }
  if (profile_.duplicate > 0 && random_.Chance(profile_.duplicate)) {
    const uint32_t copy = pool_.Take();
    pool_[copy] = pool_[frame];
    Add(copy, now);
  }
  if (profile_.corrupt > 0 && random_.Chance(profile_.corrupt)) Corrupt(pool_[frame]);
  Add(frame, now);
  return {arrivals_, count_};
}

}  // namespace verbena::sim
