// SPDX-License-Identifier: Apache-2.0
//
// RcResponder: the receiving half of an RC QP. Checks and executes requests in
// PSN order, answers with ACKs, NAKs, READ and atomic responses, completes
// receives. Sans-I/O, like RcRequester; same call order.
//
// Placement is asynchronous: effects (ACK, completion, response) wait in order
// for the DMA ticket they depend on.
//
// Files: responder_checks.h (the checks, in order), responder.cc (execution),
// responder_transmit.cc (what goes out), response_queue.h (what is to be sent),
// replay_queue.h (results of atomics).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/base/ring.h"
#include "transport/base/time.h"
#include "transport/memory_port.h"
#include "transport/psn.h"
#include "transport/rc/placement_log.h"
#include "transport/rc/replay_queue.h"
#include "transport/rc/responder_checks.h"
#include "transport/rc/response_queue.h"
#include "transport/transport_event.h"
#include "transport/types.h"
#include "transport/wire/aeth.h"
#include "transport/wire/packet_view.h"
#include "transport/work_request.h"

namespace verbena::transport {

struct RcResponderConfig {
  Pmtu pmtu = Pmtu::k1024;
  Psn expected_psn;
  uint8_t max_dest_rd_atomic = 1;
  uint8_t min_rnr_timer = 12;      // RNR timer code 0-31
  uint32_t access_flags = 0;       // AccessFlag bits: remote write/read/atomic
  Service service = Service::kRc;  // or kXrc
};

class RcResponder {
 public:
  RcResponder(MemoryPort& memory, ReceiveQueuePort& receive_queue);
  ~RcResponder();
  RcResponder(const RcResponder&) = delete;
  RcResponder& operator=(const RcResponder&) = delete;

  // INIT→RTR. Forgets everything earlier.
  void Start(const RcResponderConfig& config);
  // Changes what modify_qp may change later: max_dest_rd_atomic, min_rnr_timer,
  // access_flags (the rest of `config` is not looked at).
  void Reconfigure(const RcResponderConfig& config);
  void Reset();

  // A request packet of this QP, ICRC, P_Key and source already checked.
  void HandleRequest(const PacketView& packet, Time now);
  // A packet of this QP whose opcode is reserved (PacketView::ParseReserved), all
  // else already checked; NAKed as an invalid request when its PSN is the
  // expected one, ignored otherwise. (Linux rxe is always silent.)
  void HandleReservedOpcode(Psn psn, Time now);
  // Placements up to `ticket` are visible. Still to be called after Flush:
  // receives whose placement is pending complete only when it is over.
  void HandleCommitted(Ticket ticket, Time now);
  // The atomic behind `ticket` found `original`; commits `ticket` too.
  void HandleAtomicCommitted(Ticket ticket, uint64_t original, Time now);
  // The placement `ticket` failed; all before it are committed, later ones of
  // this port are void. Ignored if neither it nor a later one is the
  // responder's.
  void HandlePlacementFailed(Ticket ticket, MemoryStatus why, Time now);
  // Payload of the READ response with `psn` could not be fetched. kFault is a
  // local fault while executing (NAK remote operational error); anything else
  // means that the key or range has ceased to be valid since the request was
  // checked (NAK remote access error).
  void HandleFetchFailed(Psn psn, MemoryStatus why, Time now);

  // QP to error: the receive in progress and then all posted ones complete as
  // flushed (PollCompletion takes them from the queue port). A NAK that is
  // still to be sent stays for PollTransmit.
  void Flush();

  // ACKs are coalesced: one for all that is committed since the last call.
  bool PollTransmit(Time now, TxPacket* packet);
  bool PollCompletion(Completion* completion);
  // Async event (kQpReqErr, kQpAccessErr, kCommEst), or false. kCommEst comes
  // once, with the first packet after Start; it is meant for a QP in RTR.
  bool PollEvent(AsyncEventType* event);

  // True once a violation ended the connection and everything due before that,
  // and the NAK, went out through PollTransmit: the owner moves the QP to error
  // and calls Flush().
  bool failed() const { return failing_ && responses_.empty(); }

  // After Flush: no receive that was taken waits for its completion.
  bool flushed() const { return flushing_ && completions_.empty() && !has_receive_; }

  Psn expected_psn() const { return expected_psn_; }
  Msn msn() const { return msn_; }
  const TransportCounters& counters() const { return counters_; }

 private:
  struct RecvCompletion {
    uint64_t wr_id;
    Ticket ticket;  // waits for this
    uint32_t wqe_index;
    uint32_t imm_or_inv;
    uint32_t byte_len;
    Psn first_psn;  // of the message
    SrqNumber srq;
    WcStatus status;
    WcOpcode opcode;
    bool has_imm;
    bool has_inv;
    bool solicited;
  };

  bool IsQueueFull() const {
    return responses_.full() || completions_.full() || placements_.full();
  }

  // Checks that involve the receive queue.
  Verdict Check(const PacketView& packet);
  Verdict CheckXrcSrq(const PacketView& packet);
  Verdict CheckReceive(const PacketView& packet);

  Verdict Execute(const PacketView& packet);
  Verdict ExecuteSend(const PacketView& packet);
  Verdict ExecuteWrite(const PacketView& packet);
  Verdict ExecuteRead(const PacketView& packet);
  Verdict ExecuteAtomic(const PacketView& packet);
  Verdict ExecuteAtomicWrite(const PacketView& packet);
  Verdict ExecuteFlush(const PacketView& packet);
  void RespondWithoutPayload();
  Response EmptyReadResponse(Psn psn) const;
  MemoryStatus PlaceIntoReceive(std::span<const std::byte> payload, bool last);
  void NotePlacement(Psn psn, Ticket ticket);
  void EndMessage(const PacketView& packet, WcOpcode opcode);

  void HandleGap();
  void HandleDuplicate(const PacketView& packet);
  void ReplayRead(const PacketView& packet);
  void ReplayAtomic(const PacketView& packet);

  // What a verdict other than kNext leads to.
  void Reject(Verdict verdict, Psn psn);
  void EndConnection(Psn psn, NakCode code);
  void FailReceive(WcStatus status);
  void FailUncommittedReceives(Ticket ticket, Psn psn, bool* is_receive_fault);
  void AddNak(Response::Kind kind, Psn psn, uint8_t syndrome);
  void AddAck();

  bool IsReady(uint32_t position);
  bool EmitRead(Response& response, TxPacket* packet);
  void EmitAeth(Opcode opcode, Psn psn, uint8_t syndrome, Msn msn, TxPacket* packet);
  void FlushReceive(Completion* completion);

  MemoryPort& memory_;
  ReceiveQueuePort& receive_queue_;

  bool running_ = false;
  bool failing_ = false;
  bool flushing_ = false;
  bool established_ = false;   // a packet came since Start
  bool nak_pending_ = false;   // a transient NAK was sent for expected_psn_
  bool tickets_void_ = false;  // a placement failed
  uint8_t min_rnr_timer_ = 0;
  uint8_t events_ = 0;  // bit mask, see PollEvent
  Service service_ = Service::kRc;
  uint32_t mtu_ = 1024;
  uint32_t access_flags_ = 0;
  uint32_t max_dest_rd_atomic_ = 0;

  Psn expected_psn_;
  Msn msn_;
  Ticket committed_ = 0;
  Ticket last_ticket_ = 0;  // of the newest placement

  MessageState message_;
  Psn message_psn_;  // of its first packet

  // The receive that is being filled.
  bool has_receive_ = false;
  uint32_t rx_sge_ = 0;
  uint32_t rx_sge_used_ = 0;
  uint64_t receive_bytes_ = 0;
  RecvRequest receive_;

  ResponseQueue responses_;
  PlacementLog placements_;
  Ring<RecvCompletion, 512> completions_;
  ReplayQueue replay_queue_;
  TransportCounters counters_;
};

}  // namespace verbena::transport
