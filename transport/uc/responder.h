// SPDX-License-Identifier: Apache-2.0
//
// UcResponder: the receiving half of a UC QP. Whatever is wrong with a message
// (a packet missing, no receive, a key that does not allow it) makes it drop
// the message without a word; it takes the next one that begins (IBTA Vol 1
// §9.8.2.2). Only faults of its own memory end the connection. Sans-I/O.
//
// A receive that a dropped message has taken is used for the next one. Placement
// is asynchronous: a completion waits for the DMA ticket that it depends on.
//
// Owner: one QP. Thread: whoever runs the QP's shard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/base/ring.h"
#include "transport/memory_port.h"
#include "transport/psn.h"
#include "transport/transport_event.h"
#include "transport/types.h"
#include "transport/wire/packet_view.h"
#include "transport/work_request.h"

namespace verbena::transport {

struct UcResponderConfig {
  Pmtu pmtu = Pmtu::k1024;
  Psn expected_psn;
  uint32_t access_flags = 0;  // AccessFlag bits: remote write
};

class UcResponder {
 public:
  // Why a packet went nowhere.
  enum class Verdict : uint8_t {
    kAccepted,
    kLostMessage,    // belongs to a message that is dropped
    kOutOfSequence,  // not the opcode or length that may come here
    kNoReceive,
    kReceiveTooSmall,
    kAccess,  // rights of the QP, or the key
  };

  UcResponder(MemoryPort& memory, ReceiveQueuePort& receive_queue)
      : memory_(memory), receive_queue_(receive_queue) {}

  // INIT→RTR. Forgets everything earlier.
  void Start(const UcResponderConfig& config);
  void set_access_flags(uint32_t flags) { access_flags_ = flags; }
  void Reset();

  // A packet of this QP, ICRC, P_Key and source already checked. Its bytes must
  // stay until the placements are committed.
  Verdict HandleRequest(const PacketView& packet);
  void HandleCommitted(Ticket ticket);
  // Placement `ticket` failed, later ones of this port are void.
  void HandlePlacementFailed(Ticket ticket);
  // QP to error: the receive that was taken and then all posted ones complete
  // as flushed.
  void Flush() { flushing_ = true; }

  bool PollCompletion(Completion* completion);
  // kQpAccessErr, or kCommEst with the first packet after Start.
  bool PollEvent(AsyncEventType* event);

  // A fault of local memory: the QP goes to ERR.
  bool failed() const { return failed_; }
  // After Flush: no receive that was taken waits for its completion.
  bool flushed() const { return flushing_ && received_.empty() && !has_receive_; }
  Psn expected_psn() const { return expected_psn_; }
  const TransportCounters& counters() const { return counters_; }

 private:
  struct Received {
    uint64_t wr_id;
    Ticket ticket;  // waits for this
    Ticket before;  // the last one of what came before the message
    uint32_t wqe_index;
    uint32_t imm;
    uint32_t byte_len;
    WcStatus status;
    WcOpcode opcode;
    bool has_imm;
    bool solicited;
  };

  Verdict Begin(const PacketView& packet);
  Verdict Check(const PacketView& packet) const;
  Verdict Place(const PacketView& packet);
  bool TakeReceive();
  MemoryStatus Scatter(std::span<const std::byte> bytes, bool last);
  void EndMessage(const PacketView& packet);
  void FailReceive(WcStatus status);
  Verdict Drop(Verdict verdict);

  MemoryPort& memory_;
  ReceiveQueuePort& receive_queue_;
  uint32_t mtu_ = 1024;
  uint32_t access_flags_ = 0;
  Psn expected_psn_;
  bool running_ = false;
  bool failed_ = false;
  bool flushing_ = false;
  bool established_ = false;
  bool tickets_void_ = false;
  bool event_comm_est_ = false;
  bool event_access_err_ = false;
  Ticket committed_ = 0;
  Ticket last_ticket_ = 0;

  // The message in progress; kNone between messages and while one is dropped.
  OperationKind kind_ = OperationKind::kNone;
  Ticket before_ = 0;     // the last ticket when it began
  uint32_t done_ = 0;     // bytes placed
  uint32_t length_ = 0;   // WRITE: of the RETH
  uint64_t address_ = 0;  // WRITE
  uint32_t rkey_ = 0;     // WRITE

  // The receive that was taken.
  bool has_receive_ = false;
  uint32_t sge_ = 0;
  uint32_t sge_used_ = 0;
  uint64_t receive_bytes_ = 0;
  RecvRequest receive_;

  Ring<Received, 512> received_;
  TransportCounters counters_;
};

}  // namespace verbena::transport
