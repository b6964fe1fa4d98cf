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
#include "transport/types.h"

namespace verbena::transport {

class PlacementLog {
 public:
  bool full() const { return runs_.full(); }
  void clear() { runs_.clear(); }

  struct Packet {
    Psn psn;
    Msn msn;  // messages before the one that it belongs to
  };

  // The packet is placed when `ticket`, its last, has committed. Tickets and PSNs
  // grow from call to call. Not to be called when full().
  void Add(const Packet& packet, Ticket ticket) {
    if (!runs_.empty()) {
      Run& run = runs_.back();
      const uint32_t step = run.count == 1 ? (packet.msn == run.first.msn ? 0 : 1) : run.msn_step;
      if (ticket == run.ticket + run.count && packet.psn == run.first.psn + run.count &&
          packet.msn == run.first.msn + run.count * step) {
        run.msn_step = step;
        ++run.count;
        return;
      }
    }
    runs_.push_back() = Run{ticket, packet, 1, 0};
  }

  void Commit(Ticket ticket) {
    while (!runs_.empty() && runs_.front().ticket + runs_.front().count - 1 <= ticket) {
      runs_.pop_front();
    }
  }

  // The first packet that waits for `ticket` or a later one.
  std::optional<Packet> FirstNotPlaced(Ticket ticket) {
    for (uint32_t i = 0; i < runs_.size(); ++i) {
      const Run& run = runs_[i];
      if (ticket <= run.ticket) return run.first;
      if (ticket < run.ticket + run.count) {
        const auto behind = static_cast<uint32_t>(ticket - run.ticket);
        return Packet{run.first.psn + behind, run.first.msn + behind * run.msn_step};
      }
    }
    return std::nullopt;
  }

 private:
  // Packets psn, psn + 1, ... whose last tickets are ticket, ticket + 1, ...; all
  // of one message (step 0), or each a message (step 1).
  struct Run {
    Ticket ticket;
    Packet first;
    uint32_t count;
    uint32_t msn_step;
  };

  Ring<Run, 512> runs_;
};

}  // namespace verbena::transport
