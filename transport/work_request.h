// SPDX-License-Identifier: Apache-2.0
//
// WQEs as the state machines get them: copied out of shared memory, so that
// nothing changes any more, with what does not parse marked as malformed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/memory_port.h"
#include "transport/transport_event.h"
#include "transport/verbs_types.h"

namespace verbena::transport {

// Longest message.
inline constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 31;

// One validated send WR. `sges` and `inline_data` are copied by Post.
struct SendRequest {
  uint64_t wr_id = 0;
  uint32_t wqe_index = 0;
  WrOpcode opcode = WrOpcode::kSend;
  bool signaled = false;
  bool fence = false;
  bool solicited = false;
  // A WQE that the device could not accept (bad opcode, too many SGEs...): it
  // completes in its turn with this status and stops the QP.
  WcStatus malformed = WcStatus::kSuccess;
  // kLocalInv: the rkey to invalidate. kFlush: the FETH's value.
  uint32_t imm_or_inv = 0;
  // kBindMw has its operands here too, see BindOf().
  uint64_t remote_address = 0;
  uint32_t rkey = 0;
  // kFlush: the length. kAtomicWrite without SGEs: the bytes, as in memory.
  uint64_t compare_add = 0;
  uint64_t swap = 0;
  // UD: the address handle (0: none), the destination and its Q_Key.
  uint32_t ah = 0;
  uint32_t remote_qpn = 0;
  uint32_t remote_qkey = 0;
  SrqNumber remote_srq;  // XRC
  std::span<const MemorySegment> sges;
  std::span<const std::byte> inline_data;
};

// Where a BIND_MW request keeps what it asks for.
constexpr WindowBind BindOf(uint32_t imm_or_inv, uint64_t remote_address, uint32_t rkey,
                            uint64_t compare_add, uint64_t swap) {
  return {.window = imm_or_inv,
          .new_key = rkey,
          .region_key = static_cast<uint32_t>(swap),
          .access = static_cast<uint32_t>(swap >> 32),
          .address = remote_address,
          .length = compare_add};
}

// A receive WQE, copied and validated.
struct RecvRequest {
  uint64_t wr_id = 0;
  uint32_t wqe_index = 0;
  // The WQE itself is unusable (too many SGEs): LOC_PROT_ERR when its turn
  // comes.
  bool malformed = false;
  SrqNumber srq;  // XRC: where it comes from
  uint32_t sge_count = 0;
  MemorySegment sges[kMaxSge];

  RecvRequest() {}  // NOLINT: leaves `sges` as it is, on purpose
};

// Where a QP's receives come from: its own queue or an SRQ.
class ReceiveQueuePort {
 public:
  virtual ~ReceiveQueuePort() = default;
  // Takes the oldest receive WQE; false if none is posted.
  virtual bool Take(RecvRequest* request) = 0;
  // Puts the one taken last back: it was not used.
  virtual void PutBack() = 0;
  // XRC: what is taken and which memory is accessed from now on are those of this
  // SRQ and its PD. False: the QP's domain does not have it.
  virtual bool Select(SrqNumber) { return false; }
};

}  // namespace verbena::transport
