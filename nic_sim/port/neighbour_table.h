// SPDX-License-Identifier: Apache-2.0
//
// Which MAC address a host on the link has: asked for by ARP or neighbour
// discovery when it is needed, asked again while it is used, given up when
// nobody answers. The table says what to ask; others write the frames.
//
// Only the NIC's own traffic makes entries; what others say changes entries that
// exist. So nobody on the link can fill the table.
//
// Time is a parameter. Nothing allocates after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "transport/base/time.h"
#include "transport/types.h"

namespace verbena::nic {

class NeighbourTable {
 public:
  static constexpr size_t kCapacity = 1024;
  static constexpr uint32_t kNoSlot = 0xffffffff;
  // A question is repeated after this; so many are asked in all.
  static constexpr transport::Duration kInterval = transport::Duration::Milliseconds(500);
  static constexpr uint32_t kQuestions = 6;
  // An answer is believed for this long, then asked for again on the next use,
  // of the host itself at first. The old one serves meanwhile.
  static constexpr transport::Duration kReachable = transport::Duration::Milliseconds(30'000);
  static constexpr uint32_t kProbes = 5;

  NeighbourTable();

  struct Answer {
    const transport::MacAddress* mac = nullptr;  // null: packets have to wait
    uint32_t slot = kNoSlot;                     // none: the table is full of those that wait
  };
  // For a packet that is to be sent now.
  Answer Use(const transport::Gid& address, transport::Time now);
  // A packet waits for the slot, or none does any more: such slots are kept.
  void SetWaiting(uint32_t slot, bool waiting) { entries_[slot].waiting = waiting; }

  // Somebody says that `address` has `mac`. `confirms`: in answer to a question.
  // `overrides`: also when another MAC is known. True if the entry exists.
  bool Learn(const transport::Gid& address, const transport::MacAddress& mac, bool confirms,
             bool overrides, transport::Time now);

  // A packet came from it: its entry, if it has that MAC, is right.
  void Confirm(const transport::Gid& address, const transport::MacAddress& mac,
               transport::Time now);

  // What to ask now; `mac` set: of that host alone.
  struct Question {
    transport::Gid address;
    const transport::MacAddress* mac = nullptr;
  };
  bool PollQuestion(Question* question);
  // Slots whose packets can go, or were given up.
  struct Outcome {
    uint32_t slot = kNoSlot;
    bool resolved = false;
  };
  bool PollOutcome(Outcome* outcome);

  transport::Time next_deadline() const { return next_deadline_; }
  void HandleTimeout(transport::Time now);
  size_t size() const { return index_.size(); }

 private:
  enum class State : uint8_t {
    kIncomplete,  // asked, no answer yet
    kReachable,
    kProbing,  // asked again; the old answer serves
    kFailed,   // nobody answered; the next use asks again
  };
  struct Entry {
    transport::Gid address{};
    transport::MacAddress mac{};
    State state = State::kFailed;
    bool used = false;
    bool waiting = false;
    uint32_t asked = 0;
    transport::Time deadline = transport::Time::Never();  // of the next question
    transport::Time confirmed{};
    transport::Time last_use{};
  };

  uint32_t Allocate(const transport::Gid& address);
  void Ask(uint32_t slot, transport::Time now);
  void Finish(uint32_t slot, bool resolved);

  std::vector<Entry> entries_;
  std::unordered_map<transport::Gid, uint32_t> index_;
  std::vector<uint32_t> questions_;  // slots, oldest first
  std::vector<Outcome> outcomes_;
  transport::Time next_deadline_ = transport::Time::Never();
};

}  // namespace verbena::nic
