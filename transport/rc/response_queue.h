// SPDX-License-Identifier: Apache-2.0
//
// ResponseQueue: what an RC responder still has to send, in the order in which
// it has to go out, each entry with the DMA ticket that it waits for. ACKs are
// coalesced here; a READ is one entry however long it is.
#pragma once

#include <cstdint>

#include "transport/base/ring.h"
#include "transport/memory_port.h"
#include "transport/psn.h"
#include "transport/types.h"

namespace verbena::transport {

struct Response {
  enum class Kind : uint8_t {
    kAck,
    kTransientNak,  // sequence NAK, RNR NAK: void once the packet was accepted
    kFatalNak,
    kRead,
    kAtomic,
  };

  Kind kind = Kind::kAck;
  uint8_t syndrome = 0;    // NAKs
  bool replay = false;     // answers a duplicate
  bool restarted = false;  // READ: key and range are to be checked again
  uint8_t merged = 0;      // ACKs coalesced into this one
  Psn psn;                 // READ: of the next packet
  Psn first_psn;           // READ: where the stream (re)starts
  Psn end_psn;             // READ: one past the last packet
  Msn msn;
  uint32_t left = 0;  // READ: bytes to send
  uint32_t rkey = 0;
  uint64_t address = 0;
  SrqNumber srq;  // READ over XRC: of the request
  Ticket ticket = 0;

  bool is_read_or_atomic() const { return kind == Kind::kRead || kind == Kind::kAtomic; }
};

class ResponseQueue {
 public:
  // So many packets may delay the first one's ACK, when placements are slow.
  static constexpr uint8_t kMaxMerged = 16;

  bool empty() const { return ring_.empty(); }
  // No room for the response to one more packet.
  bool full() const { return ring_.full(); }
  uint32_t size() const { return ring_.size(); }
  void clear();

  Response& front() { return ring_.front(); }
  Response& operator[](uint32_t position) { return ring_[position]; }
  void pop_front();

  // READs and atomics, duplicates not counted, that are not answered yet.
  uint32_t outstanding_requests() const { return outstanding_requests_; }

  // Acknowledges `psn` and all before it when `ticket` has committed. Joins the
  // newest entry if that is an ACK and nothing is delayed much by it.
  void AddAck(Psn psn, Msn msn, Ticket ticket, Ticket committed);
  void Add(const Response& response);

  // A duplicate READ: restarts the stream that is still being sent, if there is
  // one, or sends it again ahead of all that answers later PSNs.
  void Replay(const Response& response);

  // Removes the entry at `position` and all behind it.
  void Truncate(uint32_t position);
  // Removes everything but fatal NAKs.
  void KeepFatalNak();

 private:
  Ring<Response, 128> ring_;
  uint32_t outstanding_requests_ = 0;
};

inline void ResponseQueue::AddAck(Psn psn, Msn msn, Ticket ticket, Ticket committed) {
  if (!ring_.empty()) {
    Response& newest = ring_.back();
    const bool no_delay = ticket <= committed;
    const bool short_delay = newest.ticket > committed && newest.merged < kMaxMerged;
    if (newest.kind == Response::Kind::kAck && (no_delay || short_delay)) {
      newest.psn = psn;
      newest.msn = msn;
      newest.ticket = ticket;
      if (!no_delay) ++newest.merged;
      return;
    }
  }
  Response& response = ring_.push_back();
  response.kind = Response::Kind::kAck;
  response.replay = false;
  response.merged = 0;
  response.psn = psn;
  response.msn = msn;
  response.ticket = ticket;
}

}  // namespace verbena::transport
