// SPDX-License-Identifier: Apache-2.0
//
// What happened last: a ring of events that is always written and read on
// demand (`verbena trace`, `verbena explain`). One writer at a time, and readers
// under the writer's lock: a shard's, or the fabric's for faults. Recording is a
// few stores; nothing allocates after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "nic_sim/trace/measured_parts.h"

namespace verbena::nic {

enum class TraceKind : uint8_t {
  kPosted,       // a send WQE was fetched: wr_id, code = WrOpcode, bytes
  kSent,         // a packet left the QP: opcode, psn, bytes of payload, detail = AETH
  kReceived,     // a packet came for the QP and was taken
  kRefused,      // it was not: code = DropReason, qpn = its destination QP
  kTimer,        // the QP's timer ran out
  kCompletion,   // a CQE: wr_id, code = WcStatus, opcode = WcOpcode, detail = vendor_err
  kState,        // code = new QpState, opcode = the old one
  kEvent,        // code = AsyncEventType
  kFault,        // a rule hit a packet: detail = the rule's id, code = FaultAction
  kDeviceFault,  // a rule hit the device: detail = the rule's id, code = DeviceAction
  kDoorbell,     // the QP's doorbell was seen: something is posted
  kDma,          // copies since the last one: bytes; kReceivingSide: into applications
  kCommand,      // a verbs command: bytes = abi::CommandOp, detail = errno; qpn = 0
};

struct TraceEvent {
  static constexpr uint8_t kRetransmission = 1;
  static constexpr uint8_t kResponse = 2;
  static constexpr uint8_t kAckRequest = 4;
  static constexpr uint8_t kSendQueue = 8;       // kCompletion
  static constexpr uint8_t kReceivingSide = 16;  // kFault, kDma

  int64_t time_ns = 0;  // CLOCK_MONOTONIC
  uint64_t wr_id = 0;
  uint32_t qpn = 0;       // kFault: the source QP, 0 if it is outside
  uint32_t peer_qpn = 0;  // destination QP of what is sent, else the connected one
  uint32_t psn = 0;
  uint32_t bytes = 0;
  uint32_t detail = 0;  // AETH: syndrome << 24 | MSN
  uint16_t port = 0;
  TraceKind kind = TraceKind::kPosted;
  uint8_t opcode = 0;
  uint8_t code = 0;
  uint8_t flags = 0;
};
static_assert(sizeof(TraceEvent) == 48 && std::is_trivially_copyable_v<TraceEvent>);

class TraceRing {
 public:
  // `capacity`: a power of two.
  explicit TraceRing(size_t capacity) : events_(capacity), mask_(capacity - 1) {}

  // Field by field, so that the event is made in the ring. Made elsewhere by narrow stores and
  // copied by wide loads, the loads would wait for the stores: a seventh of the engine's time.
  void Record(const TraceEvent& event) {
    if constexpr (!kHasTrace) return;
    TraceEvent& slot = events_[written_++ & mask_];
    slot.time_ns = event.time_ns;
    slot.wr_id = event.wr_id;
    slot.qpn = event.qpn;
    slot.peer_qpn = event.peer_qpn;
    slot.psn = event.psn;
    slot.bytes = event.bytes;
    slot.detail = event.detail;
    slot.port = event.port;
    slot.kind = event.kind;
    slot.opcode = event.opcode;
    slot.code = event.code;
    slot.flags = event.flags;
  }

  // Calls visit(event) for what is still there, oldest first.
  template <typename Visitor>
  void ForEach(Visitor visit) const {
    const uint64_t first = written_ > events_.size() ? written_ - events_.size() : 0;
    for (uint64_t i = first; i < written_; ++i) visit(events_[i & (events_.size() - 1)]);
  }

 private:
  std::vector<TraceEvent> events_;
  uint64_t mask_;
  uint64_t written_ = 0;
};

}  // namespace verbena::nic
