// SPDX-License-Identifier: Apache-2.0
//
// How a QP's state machines reach registered memory. One port per QP: it knows
// the QP's protection domain. Placement is asynchronous: the state machine gets
// a ticket and holds back everything that depends on it (ACK, response, CQE,
// MSN) until the port's owner reports the ticket as committed, because bytes of
// a whole burst are copied by few system calls and because a copy can fail late
// (page unmapped, process gone).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/verbs_types.h"

namespace verbena::transport {

// Monotonic per port, starting at 1. 0 means "nothing to wait for". Tickets
// commit in order: the commit of t commits all before t.
using Ticket = uint64_t;

enum class MemoryStatus : uint8_t {
  kOk = 0,
  kBadKey,       // no such key, or invalidated
  kWrongPd,      // the key belongs to another protection domain
  kOutOfBounds,  // the range leaves the region
  kNoRight,      // the region lacks the right
  kFault,        // the memory itself is gone (unmapped page, dead process)
};

// What the access is for; decides the right that the region must grant.
enum class MemoryAccess : uint8_t {
  kLocalRead,     // gather of a send; any region of the PD
  kLocalWrite,    // scatter of a receive, READ or atomic result: LOCAL_WRITE
  kRemoteRead,    // REMOTE_READ
  kRemoteWrite,   // REMOTE_WRITE
  kRemoteAtomic,  // REMOTE_ATOMIC
  kRemoteFlush,   // FLUSH_GLOBAL; only checked, nothing is accessed
};

// A piece of memory named by key (lkey or rkey) and address.
struct MemorySegment {
  uint64_t address = 0;
  uint32_t length = 0;
  uint32_t key = 0;
};

enum class AtomicKind : uint8_t { kCompareSwap, kFetchAdd };

struct AtomicOperation {
  AtomicKind kind = AtomicKind::kFetchAdd;
  uint64_t swap_or_add = 0;
  uint64_t compare = 0;
};

// A memory window gets a new key, which has the window's index, and opens onto a
// part of a region; or, with length 0, onto nothing.
struct WindowBind {
  uint32_t window = 0;  // any key that it had
  uint32_t new_key = 0;
  uint32_t region_key = 0;  // lkey
  uint32_t access = 0;      // AccessFlag
  uint64_t address = 0;
  uint64_t length = 0;
};

class MemoryPort {
 public:
  virtual ~MemoryPort() = default;

  // May `length` bytes (up to 2^31) at `address` be accessed through `key`?
  // Never called for zero-length remote accesses (IBTA C9-88).
  virtual MemoryStatus Check(uint32_t key, uint64_t address, uint64_t length,
                             MemoryAccess access) = 0;

  // May anything be accessed through `key`? Its range does not matter.
  virtual MemoryStatus CheckKey(uint32_t, MemoryAccess) { return MemoryStatus::kBadKey; }

  // Queues the placement of `bytes` (at most one packet) and sets *ticket. The
  // port copies the bytes or finishes before the caller's event ends up in the
  // next pass; the caller may not touch them afterwards. `last` marks the final
  // bytes of a message: its last 8 bytes become visible after all others. The
  // check of Check() is made again.
  virtual MemoryStatus Place(const MemorySegment& to, std::span<const std::byte> bytes,
                             MemoryAccess access, bool last, Ticket* ticket) = 0;

  // Queues an 8-byte atomic at `address` (aligned to 8; the caller checked).
  // The original value is reported with the commit, see
  // RcResponder::HandleAtomicCommitted. Ordered with placements.
  virtual MemoryStatus Atomic(uint32_t rkey, uint64_t address, const AtomicOperation& operation,
                              Ticket* ticket) = 0;

  // SEND with invalidate / local invalidate. kBadKey or kNoRight if the key is
  // not one that may be invalidated (only type 2 memory windows may).
  virtual MemoryStatus Invalidate(uint32_t rkey) = 0;

  // kOk, or why the window cannot be bound like this (MW_BIND_ERR).
  virtual MemoryStatus Bind(const WindowBind&) { return MemoryStatus::kBadKey; }
};

}  // namespace verbena::transport
