// SPDX-License-Identifier: Apache-2.0
//
// The checks that a request packet passes at an RC responder, in order; the
// first verdict that is not kNext decides. Each looks at one thing and changes
// nothing. (The receive queue's check, which takes a receive, is the
// responder's own.)
#pragma once

#include <cstdint>

#include "transport/memory_port.h"
#include "transport/psn.h"
#include "transport/verbs_types.h"
#include "transport/wire/opcode.h"
#include "transport/wire/packet_view.h"

namespace verbena::transport {

enum class Verdict : uint8_t {
  kNext,                  // passes
  kDrop,                  // ignored, counted
  kDuplicate,             // executed before
  kSequenceNak,           // a packet is missing
  kRnrNak,                // no receive posted
  kInvalidRequest,        // NAK, ends the connection
  kRemoteAccess,          // NAK, ends the connection
  kRemoteOperational,     // NAK, ends the connection
  kReceiveTooSmall,       // NAK invalid request; the receive: LOC_LEN_ERR
  kReceiveFault,          // NAK remote operational; the receive: LOC_PROT_ERR
  kInvalidateNotAllowed,  // no answer; the receive fails, ends the connection
};

// The SEND or WRITE in progress.
struct MessageState {
  // kSend or kWrite between FIRST and LAST, kNone otherwise.
  OperationKind kind = OperationKind::kNone;
  uint32_t done = 0;     // bytes placed
  uint32_t length = 0;   // WRITE: of the RETH
  uint64_t address = 0;  // WRITE
  uint32_t rkey = 0;     // WRITE
  SrqNumber srq;         // XRC
};

inline Verdict CheckPsn(Psn expected, Psn received) {
  const int32_t distance = Psn::Distance(expected, received);
  if (distance == 0) return Verdict::kNext;
  return distance > 0 ? Verdict::kSequenceNak : Verdict::kDuplicate;
}

// FIRST, ONLY, READ and atomics only between messages; MIDDLE and LAST only
// inside a message of their kind.
inline Verdict CheckOpcodeSequence(const OpcodeTraits& traits, const MessageState& message) {
  const OperationKind expected = traits.begins_message() ? OperationKind::kNone : traits.kind;
  return message.kind == expected ? Verdict::kNext : Verdict::kInvalidRequest;
}

// Is it an operation that this responder has and that the QP's access flags
// allow?
inline Verdict CheckAccess(const OpcodeTraits& traits, uint32_t access_flags) {
  uint32_t needed = 0;
  switch (traits.kind) {
    case OperationKind::kSend:
      return Verdict::kNext;
    case OperationKind::kWrite:
    case OperationKind::kAtomicWrite:
      needed = kAccessRemoteWrite;
      break;
    case OperationKind::kReadRequest:
      needed = kAccessRemoteRead;
      break;
    case OperationKind::kCompareSwap:
    case OperationKind::kFetchAdd:
      needed = kAccessRemoteAtomic;
      break;
    case OperationKind::kFlush:
      return Verdict::kNext;  // CheckFlush
    default:
      return Verdict::kInvalidRequest;
  }
  return (access_flags & needed) != 0 ? Verdict::kNext : Verdict::kInvalidRequest;
}

// Type and level of a FLUSH, and whether the QP's access flags allow it.
Verdict CheckFlush(const PacketView& packet, uint32_t access_flags);

// `outstanding` READs and atomics have not been answered yet.
inline Verdict CheckReadAtomicLimit(uint32_t outstanding, uint32_t max_dest_rd_atomic) {
  return outstanding < max_dest_rd_atomic ? Verdict::kNext : Verdict::kInvalidRequest;
}

// Payload against path MTU (`mtu` bytes), RETH length and what the message has
// already; lengths of READs, alignment of atomics.
Verdict CheckLength(const PacketView& packet, const MessageState& message, uint32_t mtu);

// Does the SEND payload fit into what is left of the receive?
inline Verdict CheckReceiveLength(uint64_t receive_bytes, uint64_t message_bytes) {
  return message_bytes <= receive_bytes ? Verdict::kNext : Verdict::kReceiveTooSmall;
}

// Key, range and right of the RETH; only for packets that have one. (The key of
// an atomic is checked by MemoryPort::Atomic.)
Verdict CheckRkey(const PacketView& packet, MemoryPort& memory);

// What a port's refusal of a remote access means.
inline Verdict RemoteVerdict(MemoryStatus status) {
  if (status == MemoryStatus::kOk) return Verdict::kNext;
  return status == MemoryStatus::kFault ? Verdict::kRemoteOperational : Verdict::kRemoteAccess;
}

}  // namespace verbena::transport
