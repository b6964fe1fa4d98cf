// SPDX-License-Identifier: Apache-2.0
//
// RcRequester: the sending half of an RC QP. Turns WRs into request packets,
// matches ACKs, NAKs and responses, resends (go-back-N) and completes WRs in
// order. Sans-I/O: no clock, no memory access but through MemoryPort, no heap
// after construction.
//
// Owner: one QP. Thread: whoever runs the QP's shard. Call order: after every
// Post*/Handle*, drain PollTransmit, then PollCompletion, then read
// next_timeout(). PollTransmit may be left undrained (no buffer, scheduling);
// the rest is sent later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "transport/base/time.h"
#include "transport/memory_port.h"
#include "transport/psn.h"
#include "transport/transport_event.h"
#include "transport/types.h"
#include "transport/wire/packet_view.h"

namespace verbena::transport {

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
  uint32_t imm_or_inv = 0;
  uint64_t remote_address = 0;
  uint32_t rkey = 0;
  uint64_t compare_add = 0;
  uint64_t swap = 0;
  std::span<const MemorySegment> sges;
  std::span<const std::byte> inline_data;
};

struct RcRequesterConfig {
  Pmtu pmtu = Pmtu::k1024;
  Psn first_psn;
  uint8_t timeout = 14;       // local ACK timeout code 0-31; 0: never
  uint8_t retry_cnt = 7;      // 0-7 (7 means seven)
  uint8_t rnr_retry = 7;      // 0-7 (7: for ever)
  uint8_t max_rd_atomic = 1;  // outstanding READs and atomics; 0: none allowed
};

class RcRequester {
 public:
  struct Capacity {
    uint32_t max_wr = 1;  // WRs outstanding
    uint32_t max_sge = 1;
    uint32_t max_inline = 0;
  };

  RcRequester(const Capacity& capacity, MemoryPort& memory);
  ~RcRequester();
  RcRequester(const RcRequester&) = delete;
  RcRequester& operator=(const RcRequester&) = delete;

  // RTR→RTS. Forgets everything earlier.
  void Start(const RcRequesterConfig& config);
  // Changes what modify_qp may change in SQD and RTS.
  void Reconfigure(const RcRequesterConfig& config);
  // Back to the state after construction; nothing is completed.
  void Reset();

  // True if Post may be called: fewer than max_wr WRs are outstanding.
  bool CanPost() const;
  void Post(const SendRequest& request, Time now);

  // A response packet (ACK, NAK, READ response, atomic response) of this QP,
  // ICRC, P_Key and source already checked.
  void HandleResponse(const PacketView& packet, Time now);
  // next_timeout() has passed.
  void HandleTimeout(Time now);
  // Placements (READ data, atomic results) up to `ticket` are visible.
  void HandleCommitted(Ticket ticket, Time now);
  // The placement `ticket` failed; all before it are committed, later ones of
  // this port are void.
  void HandlePlacementFailed(Ticket ticket, MemoryStatus why, Time now);
  // The payload of the packet that PollTransmit gave with `psn` could not be
  // fetched (bad lkey, bounds, unmapped page). The packet was not sent.
  void HandleFetchFailed(Psn psn, MemoryStatus why, Time now);

  // QP to error: nothing more is sent, all WRs complete as flushed.
  void Flush();
  // SQD: WRs begun are finished, no new ones are begun until Resume. drained()
  // becomes true when nothing is outstanding.
  void Drain();
  void Resume();
  bool drained() const;

  // The next packet to send now, or false. Respects window, fence,
  // max_rd_atomic, RNR wait.
  bool PollTransmit(Time now, TxPacket* packet);
  // In order. Only signalled or failed WRs give one.
  bool PollCompletion(Completion* completion);

  // When HandleTimeout must be called; Time::Never() if not at all.
  Time next_timeout() const;
  // Shifts the pending deadlines (the engine did not run for `gap`).
  void ShiftDeadlines(Duration gap);

  // True once a WR has failed: the owner moves the QP to error, then calls
  // Flush() (completions of the failed WR come first, then flushed ones).
  bool failed() const;

  Psn next_psn() const;  // of the next new packet
  Psn una_psn() const;   // oldest not acknowledged
  uint32_t outstanding() const;
  const TransportCounters& counters() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace verbena::transport
