// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/port/neighbour_table.h"

#include <algorithm>

namespace verbena::nic {

using transport::Gid;
using transport::MacAddress;
using transport::Time;

NeighbourTable::NeighbourTable() : entries_(kCapacity) {
  index_.reserve(kCapacity);
  questions_.reserve(kCapacity);
  outcomes_.reserve(kCapacity);
}

// A free slot, or that which was unused for the longest time.
uint32_t NeighbourTable::Allocate(const Gid& address) {
  uint32_t best = kNoSlot;
  for (uint32_t slot = 0; slot < kCapacity; ++slot) {
    const Entry& entry = entries_[slot];
    if (!entry.used) {
      best = slot;
      break;
    }
    if (entry.waiting) continue;
    if (best == kNoSlot || entry.last_use < entries_[best].last_use) best = slot;
  }
  if (best == kNoSlot) return kNoSlot;
  if (entries_[best].used) {
    index_.erase(entries_[best].address);
    std::erase(questions_, best);
  }
  entries_[best] = {.address = address, .used = true};
  index_.emplace(address, best);
  return best;
}

void NeighbourTable::Ask(uint32_t slot, Time now) {
  Entry& entry = entries_[slot];
  ++entry.asked;
  entry.deadline = now + kInterval;
  next_deadline_ = std::min(next_deadline_, entry.deadline);
  if (std::find(questions_.begin(), questions_.end(), slot) == questions_.end()) {
    questions_.push_back(slot);
  }
}

// Only slots with packets have an outcome, each at most once until it is read.
void NeighbourTable::Finish(uint32_t slot, bool resolved) {
  if (!entries_[slot].waiting) return;
  for (Outcome& outcome : outcomes_) {
    if (outcome.slot != slot) continue;
    outcome.resolved = resolved;
    return;
  }
  outcomes_.push_back({slot, resolved});
}

NeighbourTable::Answer NeighbourTable::Use(const Gid& address, Time now) {
  const auto found = index_.find(address);
  const uint32_t slot = found != index_.end() ? found->second : Allocate(address);
  if (slot == kNoSlot) return {};
  Entry& entry = entries_[slot];
  entry.last_use = now;
  switch (entry.state) {
    case State::kFailed:
      entry.state = State::kIncomplete;
      entry.asked = 0;
      Ask(slot, now);
      [[fallthrough]];
    case State::kIncomplete:
      return {nullptr, slot};
    case State::kReachable:
      if (now - entry.confirmed > kReachable) {
        entry.state = State::kProbing;
        entry.asked = 0;
        Ask(slot, now);
      }
      [[fallthrough]];
    case State::kProbing:
      break;
  }
  return {&entry.mac, slot};
}

bool NeighbourTable::Learn(const Gid& address, const MacAddress& mac, bool confirms, bool overrides,
                           Time now) {
  const auto found = index_.find(address);
  if (found == index_.end()) return false;
  const uint32_t slot = found->second;
  Entry& entry = entries_[slot];
  const bool known = entry.state == State::kReachable || entry.state == State::kProbing;
  if (known && entry.mac != mac && !overrides) return true;
  // A changed address that nobody asked for serves, but is asked for soon.
  if (known && !confirms && entry.mac == mac) return true;
  entry.mac = mac;
  entry.state = State::kReachable;
  entry.deadline = Time::Never();
  entry.confirmed = confirms || !known ? now : now - kReachable;
  std::erase(questions_, slot);
  Finish(slot, true);
  return true;
}

void NeighbourTable::Confirm(const Gid& address, const MacAddress& mac, Time now) {
  const auto found = index_.find(address);
  if (found == index_.end()) return;
  Entry& entry = entries_[found->second];
  if (entry.mac != mac) return;
  if (entry.state == State::kProbing) {
    std::erase(questions_, found->second);
    entry.state = State::kReachable;
    entry.deadline = Time::Never();
  }
  if (entry.state == State::kReachable) entry.confirmed = now;
}

bool NeighbourTable::PollQuestion(Question* question) {
  if (questions_.empty()) return false;
  const Entry& entry = entries_[questions_.front()];
  questions_.erase(questions_.begin());
  question->address = entry.address;
  question->mac = entry.state == State::kProbing ? &entry.mac : nullptr;
  return true;
}

bool NeighbourTable::PollOutcome(Outcome* outcome) {
  if (outcomes_.empty()) return false;
  *outcome = outcomes_.back();
  outcomes_.pop_back();
  return true;
}

void NeighbourTable::HandleTimeout(Time now) {
  if (now < next_deadline_) return;
  next_deadline_ = Time::Never();
  for (uint32_t slot = 0; slot < kCapacity; ++slot) {
    Entry& entry = entries_[slot];
    if (!entry.used || entry.deadline.IsNever()) continue;
    if (entry.deadline > now) {
      next_deadline_ = std::min(next_deadline_, entry.deadline);
      continue;
    }
    entry.deadline = Time::Never();
    if (entry.state == State::kProbing && entry.asked >= kProbes) {
      // It does not answer any more: from the beginning, if it is used again.
      entry.state = State::kFailed;
    } else if (entry.state == State::kIncomplete && entry.asked >= kQuestions) {
      entry.state = State::kFailed;
      Finish(slot, false);
    } else if (entry.state == State::kProbing || entry.state == State::kIncomplete) {
      Ask(slot, now);
    }
  }
}

}  // namespace verbena::nic
