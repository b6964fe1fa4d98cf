// SPDX-License-Identifier: Apache-2.0
//
// The requester's own copy of a WR and what has become of it. Private to
// transport/rc.
#pragma once

#include <cstdint>

#include "transport/rc/requester.h"

namespace verbena::transport {

struct RcRequester::Wr {
  uint64_t wr_id;
  uint64_t remote_address;
  uint64_t compare_add;
  uint64_t swap;
  uint64_t first_seq;    // set when begun
  uint64_t request_seq;  // READ: where the latest request began
  Ticket first_ticket;   // placements of the response; 0: none
  Ticket last_ticket;
  uint64_t atomic_result;  // stable storage for the placement
  uint32_t wqe_index;
  uint32_t imm_or_inv;
  uint32_t rkey;
  SrqNumber srq;       // XRC
  uint32_t length;     // bytes of the message
  uint32_t psn_count;  // PSNs that it takes
  uint32_t vendor_err;
  uint8_t sge_count;
  WrOpcode opcode;
  WcStatus error;  // kSuccess until it fails
  bool signaled;
  bool fence;
  bool solicited;
  bool is_inline;

  bool is_read() const { return opcode == WrOpcode::kRdmaRead; }
  bool is_atomic() const {
    return opcode == WrOpcode::kCompareSwap || opcode == WrOpcode::kFetchAdd;
  }
  // Carried out here, without a packet.
  bool is_local() const { return opcode == WrOpcode::kLocalInv || opcode == WrOpcode::kBindMw; }
  // Answered by a READ response without payload.
  bool is_flush() const { return opcode == WrOpcode::kFlush; }
  bool is_atomic_write() const { return opcode == WrOpcode::kAtomicWrite; }
  // What a response of its own answers.
  bool is_read_or_atomic() const {
    return is_read() || is_atomic() || is_flush() || is_atomic_write();
  }
  uint64_t end_seq() const { return first_seq + psn_count; }
};

inline RcRequester::Wr& RcRequester::At(uint64_t index) const { return ring_[index & ring_mask_]; }

inline RcRequester::Sge* RcRequester::SgesOf(uint64_t index) const {
  return &sges_[(index & ring_mask_) * capacity_.max_sge];
}

inline std::byte* RcRequester::InlineOf(uint64_t index) const {
  return &inline_[(index & ring_mask_) * capacity_.max_inline];
}

}  // namespace verbena::transport
