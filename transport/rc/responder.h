// SPDX-License-Identifier: Apache-2.0
//
// RcResponder: the receiving half of an RC QP. Checks and executes requests in
// PSN order, answers with ACKs, NAKs, READ and atomic responses, completes
// receives. Sans-I/O, like RcRequester; same call order.
//
// Placement is asynchronous: effects (ACK, completion, response) wait in order
// for the DMA ticket they depend on.
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

// A receive WQE, copied and validated.
struct RecvRequest {
  uint64_t wr_id = 0;
  uint32_t wqe_index = 0;
  // The WQE itself is unusable (too many SGEs): local operation error.
  bool malformed = false;
  uint32_t sge_count = 0;
  MemorySegment sges[kMaxSge];

  RecvRequest() {}  // NOLINT: leaves `sges` as it is, on purpose
};

// The QP's receive queue (later: an SRQ).
class ReceiveQueuePort {
 public:
  virtual ~ReceiveQueuePort() = default;
  // Takes the oldest receive WQE; false if none is posted.
  virtual bool Take(RecvRequest* request) = 0;
};

struct RcResponderConfig {
  Pmtu pmtu = Pmtu::k1024;
  Psn expected_psn;
  uint8_t max_dest_rd_atomic = 1;
  uint8_t min_rnr_timer = 12;     // RNR timer code 0-31
  uint32_t access_flags = 0;      // AccessFlag bits: remote write/read/atomic
};

class RcResponder {
 public:
  RcResponder(MemoryPort& memory, ReceiveQueuePort& receive_queue);
  ~RcResponder();
  RcResponder(const RcResponder&) = delete;
  RcResponder& operator=(const RcResponder&) = delete;

  // INIT→RTR. Forgets everything earlier.
  void Start(const RcResponderConfig& config);
  // Changes what modify_qp may change later (rights, RNR timer, ...).
  void Reconfigure(const RcResponderConfig& config);
  void Reset();

  // A request packet of this QP, ICRC, P_Key and source already checked.
  void HandleRequest(const PacketView& packet, Time now);
  void HandleCommitted(Ticket ticket, Time now);
  void HandleAtomicCommitted(Ticket ticket, uint64_t original, Time now);
  void HandlePlacementFailed(Ticket ticket, MemoryStatus why, Time now);
  // Payload of the READ response with `psn` could not be fetched.
  void HandleFetchFailed(Psn psn, MemoryStatus why, Time now);

  // QP to error: the receive in progress and then all posted ones complete as
  // flushed (PollCompletion takes them from the queue port). A NAK that is
  // still to be sent stays for PollTransmit.
  void Flush();

  // ACKs are coalesced: one for all that is committed since the last call.
  bool PollTransmit(Time now, TxPacket* packet);
  bool PollCompletion(Completion* completion);
  // Async event (kCommEst, kQpReqErr, kQpAccessErr), or false.
  bool PollEvent(AsyncEventType* event);

  // True once a violation ended the connection: the owner moves the QP to error
  // and calls Flush() after the NAK went out through PollTransmit.
  bool failed() const;

  Psn expected_psn() const;
  Msn msn() const;
  const TransportCounters& counters() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace verbena::transport
