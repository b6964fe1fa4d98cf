// SPDX-License-Identifier: Apache-2.0
#include "tests/testing/network_simulator.h"

namespace verbena::testing {

using transport::Duration;
using transport::Time;

uint64_t Random::Next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

void NetworkSimulator::Enqueue(std::vector<std::byte> frame, Time now) {
  Duration delay = profile_.delay;
  if (profile_.jitter > Duration::Zero()) {
    delay += Duration::Nanoseconds(
        static_cast<int64_t>(random_.Below(static_cast<uint64_t>(profile_.jitter.ns()) + 1)));
  }
  if (random_.Chance(profile_.delayed)) delay += profile_.long_delay;
  in_flight_[{(now + delay).ns(), sequence_++}] = std::move(frame);
}

void NetworkSimulator::Send(std::vector<std::byte> frame, Time now) {
  if (random_.Chance(profile_.loss)) {
    ++lost_;
    return;
  }
  if (random_.Chance(profile_.duplicate)) {
    ++duplicated_;
    Enqueue(frame, now);
  }
  if (random_.Chance(profile_.corrupt)) {
    ++corrupted_;
    frame[random_.Below(frame.size())] ^= static_cast<std::byte>(1u << random_.Below(8));
  }
  Enqueue(std::move(frame), now);
}

Time NetworkSimulator::NextArrival() const {
  return in_flight_.empty() ? Time::Never()
                            : Time::FromNanoseconds(in_flight_.begin()->first.first);
}

std::optional<std::vector<std::byte>> NetworkSimulator::Receive(Time now) {
  if (NextArrival() > now || in_flight_.empty()) return std::nullopt;
  std::vector<std::byte> frame = std::move(in_flight_.begin()->second);
  in_flight_.erase(in_flight_.begin());
  return frame;
}

}  // namespace verbena::testing
