// SPDX-License-Identifier: Apache-2.0
//
// UcReceiver: what the responder of a UC QP has to do with each packet that
// arrives (IBTA Vol 1 §9.8.2.2), worked out from the WRs that were posted: a
// message is delivered if its packets arrive one after the other with nothing
// in between; whatever else happens to it, it is dropped. A FIRST or ONLY is
// taken with whatever PSN, so a duplicate of a whole message is one more message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/sim/flow.h"

namespace verbena::sim {

class UcReceiver {
 public:
  enum class Outcome : uint8_t {
    kTaken,       // placed
    kDelivered,   // placed, and the message is complete
    kLost,        // belongs to a message that is not whole
    kRefused,     // no right to write there
    kNoReceive,   // none is posted
    kTooSmall,    // longer than the receive
    kBadReceive,  // the receive itself is wrong: the QP fails
  };

  void Reset() { *this = UcReceiver(); }

  // The packet `sequence` of `wr` comes. `held`: the receive that a dropped
  // message left, `next`: the oldest in the queue; nullptr: none.
  Outcome Begin(Wr& wr, uint64_t sequence, uint32_t mtu, const PlannedReceive* held,
                const PlannedReceive* next);
  // Bytes of it are placed.
  std::string CheckPlacement(const Flow& flow, const MemorySegment& to,
                             std::span<const std::byte> bytes, MemoryAccess access);
  // The responder is done with it. Returns what it should have placed and has not.
  std::string End();

  // Does the packet need a receive from the queue?
  bool needs_receive() const { return needs_receive_; }
  // The message in progress.
  Wr* message() const { return message_; }
  // WRITEs delivered, in order.
  const std::vector<Wr*>& written() const { return written_; }

 private:
  Outcome Decide(Wr& wr, uint64_t sequence, const PlannedReceive* held, const PlannedReceive* next);

  Wr* message_ = nullptr;
  uint64_t next_ = 0;                        // the sequence number that continues it
  const PlannedReceive* receive_ = nullptr;  // SEND: where it goes
  uint32_t bytes_ = 0;                       // of it, placed
  bool needs_receive_ = false;

  // The packet that is being handled.
  Outcome outcome_ = Outcome::kLost;
  uint32_t payload_ = 0;
  uint32_t placed_ = 0;

  std::vector<Wr*> written_;
};

}  // namespace verbena::sim
