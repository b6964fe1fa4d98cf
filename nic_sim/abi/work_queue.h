// SPDX-License-Identifier: Apache-2.0
//
// Formats of work queue entries and completion queue entries in shared rings.
//
// A ring has a power of two of slots of one fixed stride (reported at
// creation). WQE number n lies in slot n modulo the ring size. All fields are
// little-endian host order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace verbena::abi {

// Scatter/gather element. Same layout as ibv_sge.
struct Sge {
  uint64_t address;
  uint32_t length;
  uint32_t lkey;
};
static_assert(sizeof(Sge) == 16);

enum SendWqeFlags : uint8_t {
  kWqeSignaled = 1 << 0,
  kWqeFence = 1 << 1,
  kWqeSolicited = 1 << 2,
  kWqeInline = 1 << 3,
};

// Head of a send WQE. `num_sge` Sges follow at byte 48 or, with kWqeInline,
// `inline_bytes` bytes of payload. A stride is at least 64 bytes, so that one
// SGE fits into one block.
struct SendWqe {
  uint64_t wr_id;
  uint8_t opcode;  // numbers of enum ibv_wr_opcode
  uint8_t flags;   // SendWqeFlags
  uint8_t num_sge;
  uint8_t reserved0;    // MBZ
  uint32_t imm_or_inv;  // immediate data as on the wire (big-endian), or rkey
  uint64_t remote_address;
  uint32_t rkey;
  uint32_t inline_bytes;  // with kWqeInline, else MBZ
  // Atomics: compare_add and swap in host order. UD, XRC and BIND_MW: the other
  // views. An XRC atomic has its SRQ number in imm_or_inv; BIND_MW its new key in
  // `rkey`, the start in `remote_address`, the window's handle in imm_or_inv. A
  // FLUSH has its type (bits 0-3) and level (bits 4-5) in imm_or_inv and its length
  // in compare_add; an ATOMIC_WRITE without SGEs its eight bytes there.
  union {
    struct {
      uint64_t compare_add;
      uint64_t swap;
    } atomic;
    struct {
      uint32_t ah;  // handle of CreateAh
      uint32_t remote_qpn;
      uint32_t remote_qkey;
      uint32_t reserved;
    } ud;
    struct {
      uint32_t remote_srqn;
      uint32_t reserved[3];
    } xrc;
    struct {
      uint64_t length;  // 0: the window is unbound
      uint32_t lkey;
      uint32_t access;
    } bind;
  };
};
static_assert(sizeof(SendWqe) == 48);
static_assert(offsetof(SendWqe, remote_address) == 16);
static_assert(offsetof(SendWqe, atomic) == 32);

// Head of a receive WQE; `num_sge` Sges follow at byte 16.
struct RecvWqe {
  uint64_t wr_id;
  uint32_t num_sge;
  uint32_t reserved;  // MBZ
};
static_assert(sizeof(RecvWqe) == 16);

constexpr uint32_t RoundUp(uint32_t value, uint32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Stride of an SQ whose WQEs have up to `max_sge` SGEs or `max_inline` bytes.
constexpr uint32_t SendStride(uint32_t max_sge, uint32_t max_inline) {
  const uint32_t sges = max_sge * static_cast<uint32_t>(sizeof(Sge));
  const uint32_t tail = sges > max_inline ? sges : max_inline;
  const uint32_t whole = static_cast<uint32_t>(sizeof(SendWqe)) + tail;
  return RoundUp(whole < 64 ? 64 : whole, 64);
}

// Stride of an RQ whose WQEs have up to `max_sge` SGEs.
constexpr uint32_t RecvStride(uint32_t max_sge) {
  return RoundUp(static_cast<uint32_t>(sizeof(RecvWqe) + max_sge * sizeof(Sge)), 32);
}

enum CqeFlags : uint8_t {
  kCqeSend = 1 << 0,       // completes a send WQE, else a receive WQE
  kCqeWithImm = 1 << 1,    // imm_or_inv is immediate data (big-endian)
  kCqeWithInv = 1 << 2,    // imm_or_inv is the invalidated rkey
  kCqeGrh = 1 << 3,        // the first 40 bytes of the buffer hold a GRH
  kCqeSolicited = 1 << 4,  // was sent as a solicited event
  // Of an XRC SRQ: qp_slot and qp_generation are the SRQ's (its QP may belong to
  // another process).
  kCqeXrcSrq = 1 << 5
};

// Completion queue entry. Written by the device; valid when bit 0 of `phase`
// (acquire) equals PhaseOf(consumer index, ring slots).
struct Cqe {
  uint64_t wr_id;
  uint8_t status;  // numbers of enum ibv_wc_status
  uint8_t opcode;  // numbers of enum ibv_wc_opcode (low 8 bits)
  uint8_t flags;   // CqeFlags
  uint8_t sl;      // UD: packet type in the low nibble, see docs/PRM.md
  uint32_t byte_len;
  uint32_t imm_or_inv;
  uint32_t qpn;
  uint32_t src_qpn;
  uint32_t vendor_err;
  uint64_t timestamp_ns;  // device clock when the CQE was written
  uint32_t wqe_index;     // producer count of the WQE: frees slots up to it
  uint16_t qp_slot;       // context-local slot of the QP
  uint16_t pkey_index;
  uint32_t qp_generation;  // CreateQp/ModifyQp(RESET): stale CQEs are skipped
  uint32_t flow_tag;       // raw packets: of the flow rule, else 0
  uint32_t reserved;
  std::atomic<uint32_t> phase;
};
static_assert(sizeof(Cqe) == 64);
static_assert(offsetof(Cqe, phase) == 60);

// Rings start zeroed, so the first round carries phase 1, the second 0, ...
constexpr uint32_t PhaseOf(uint32_t index, uint32_t slots) { return ((index / slots) & 1) ^ 1; }

}  // namespace verbena::abi
