// SPDX-License-Identifier: Apache-2.0
//
// PlacementLog: which packet a DMA ticket belongs to, for placements that are
// not committed yet. Needed only when one fails: the responder then NAKs for
// the first packet that was not placed. Consecutive packets with consecutive
// tickets, the usual case, take one entry together.
#pragma once

#include <cstdint>
#include <optional>

#include "transport/base/ring.h"
#include "transport/memory_port.h"
#include "transport/psn.h"

namespace verbena::transport {

class PlacementLog {
 public:
  bool full() const { return runs_.full(); }
  void clear() { runs_.clear(); }

  // The packet `psn` is placed when `ticket`, its last, has committed. Both
  // grow from call to call. Not to be called when full().
  void Add(Psn psn, Ticket ticket) {
    if (!runs_.empty()) {
      Run& run = runs_.back();
      if (ticket == run.ticket + run.count && psn == run.psn + run.count) {
        ++run.count;
        return;
      }
    }
    runs_.push_back() = Run{ticket, psn, 1};
  }

  void Commit(Ticket ticket) {
    while (!runs_.empty() && runs_.front().ticket + runs_.front().count - 1 <= ticket) {
      runs_.pop_front();
    }
  }

  // The first packet that waits for `ticket` or a later one.
  std::optional<Psn> FirstNotPlaced(Ticket ticket) {
    for (uint32_t i = 0; i < runs_.size(); ++i) {
      const Run& run = runs_[i];
      if (ticket <= run.ticket) return run.psn;
      if (ticket < run.ticket + run.count) {
        return run.psn + static_cast<uint32_t>(ticket - run.ticket);
      }
    }
    return std::nullopt;
  }

 private:
  // Packets psn, psn + 1, ... whose last tickets are ticket, ticket + 1, ...
  struct Run {
    Ticket ticket;
    Psn psn;
    uint32_t count;
  };

  Ring<Run, 512> runs_;
};

}  // namespace verbena::transport
