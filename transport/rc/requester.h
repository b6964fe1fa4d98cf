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
//
// Files: requester.cc (WRs to packets, completions), ack_handler.cc (what
// responses mean), retransmit.cc (timers, go-back-N, failures).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>

#include "transport/base/time.h"
#include "transport/memory_port.h"
#include "transport/psn.h"
#include "transport/transport_event.h"
#include "transport/types.h"
#include "transport/wire/packet_view.h"
#include "transport/work_request.h"

namespace verbena::transport {

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

  // Request packets sent and not acknowledged (a READ counts as one).
  static constexpr uint32_t kWindowPackets = 512;
  // Inside a long message every so many packets ask for an ACK.
  static constexpr uint32_t kAckRequestInterval = 64;

  RcRequester(const Capacity& capacity, MemoryPort& memory);
  ~RcRequester();
  RcRequester(const RcRequester&) = delete;
  RcRequester& operator=(const RcRequester&) = delete;

  // RTR→RTS. Forgets everything earlier.
  void Start(const RcRequesterConfig& config);
  // Changes what modify_qp may change in SQD and RTS: timeout, retry_cnt,
  // rnr_retry, max_rd_atomic (the rest of `config` is not looked at).
  void Reconfigure(const RcRequesterConfig& config);
  // Back to the state after construction; nothing is completed.
  void Reset();

  // True if Post may be called: fewer than max_wr WRs are outstanding.
  bool CanPost() const { return tail_ - completed_ < capacity_.max_wr; }
  void Post(const SendRequest& request, Time now);

  // A response packet (ACK, NAK, READ response, atomic response) of this QP,
  // ICRC, P_Key and source already checked.
  void HandleResponse(const PacketView& packet, Time now);
  // next_timeout() has passed.
  void HandleTimeout(Time now);
  // Placements (READ data, atomic results) up to `ticket` are visible. Still
  // to be called after Flush: WRs whose placement is pending are flushed only
  // when it is over.
  void HandleCommitted(Ticket ticket, Time now);
  // The placement `ticket` failed; all before it are committed, later ones of
  // this port are void. The ticket may be the responder's.
  void HandlePlacementFailed(Ticket ticket, MemoryStatus why, Time now);
  // The payload of the packet that PollTransmit gave with `psn` could not be
  // fetched (bad lkey, bounds, unmapped page). The packet was not sent.
  void HandleFetchFailed(Psn psn, MemoryStatus why, Time now);

  // QP to error: nothing more is sent, all WRs complete as flushed, those
  // posted later too.
  void Flush();
  // SQD: WRs begun are finished, no new ones are begun until Resume. drained()
  // becomes true when nothing is outstanding.
  void Drain() { draining_ = true; }
  void Resume();
  bool drained() const { return draining_ && retired_ == started_; }

  // The next packet to send now, or false. Respects window, fence,
  // max_rd_atomic, RNR wait. May find that the next WR fails.
  bool PollTransmit(Time now, TxPacket* packet);
  // In order. Only signalled or failed WRs give one.
  bool PollCompletion(Completion* completion);

  // When HandleTimeout must be called; Time::Never() if not at all.
  Time next_timeout() const {
    return rnr_waiting_ && rnr_deadline_ < ack_deadline_ ? rnr_deadline_ : ack_deadline_;
  }
  // Shifts the pending deadlines (the engine did not run for `gap`).
  void ShiftDeadlines(Duration gap);

  // True once a WR has failed: the owner moves the QP to error, then calls
  // Flush() (completions of the failed WR come first, then flushed ones).
  bool failed() const { return failed_; }

  Psn next_psn() const { return PsnOf(sent_high_); }  // of the next new packet
  Psn una_psn() const { return PsnOf(una_seq_); }     // oldest not acknowledged
  // WRs posted and not yet polled as completed.
  uint32_t outstanding() const { return static_cast<uint32_t>(tail_ - completed_); }
  const TransportCounters& counters() const { return counters_; }

 private:
  struct Wr;
  // MemorySegment without initialisers: arrays of it cost nothing to make.
  struct Sge {
    uint64_t address;
    uint32_t length;
    uint32_t key;
  };

  // --- requester.cc
  Wr& At(uint64_t index) const;
  Sge* SgesOf(uint64_t index) const;
  std::byte* InlineOf(uint64_t index) const;
  Psn PsnOf(uint64_t seq) const { return Psn(static_cast<uint32_t>(seq)); }
  bool Begin(Wr& wr);
  bool BeginReadOrAtomic(const Wr& wr);
  bool IsWritable(std::span<const Sge> sges) const;
  void ExecuteLocal(const Wr& wr);
  void EmitPayloadPacket(Wr& wr, TxPacket* packet);
  void EmitReadOrAtomic(Wr& wr, TxPacket* packet);
  void FillSegments(uint32_t bytes, TxPacket* packet);
  void FinishTransmit(Time now, uint32_t psns, TxPacket* packet);
  void Retire();
  void Complete(const Wr& wr, WcStatus status, Completion* completion) const;

  // --- ack_handler.cc
  void HandleAcknowledge(const PacketView& packet, uint64_t seq, Time now);
  void HandleNak(NakCode code, uint8_t syndrome, uint64_t seq, Time now);
  void HandleReadResponse(const PacketView& packet, uint64_t seq, Time now);
  void HandleAtomicResponse(const PacketView& packet, uint64_t seq, Time now);
  bool IsReadResponseAsDue(const PacketView& packet, const Wr& wr, uint64_t seq) const;
  bool PlaceReadPayload(Wr& wr, std::span<const std::byte> payload, bool last);
  bool AcknowledgeBefore(uint64_t seq, Time now);
  void FinishReadOrAtomic(Wr& wr);
  void OnProgress(Time now);

  // --- retransmit.cc
  void SeekToUna();
  void GoBack();
  void Retry();
  void HandleSequenceNak(uint64_t seq, Time now);
  void HandleRnrNak(uint8_t timer_code, uint64_t seq, Time now);
  void HandleHole();
  void Fail(uint64_t index, WcStatus status, uint32_t vendor_err);
  void ArmAckTimer(Time now);

  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

  MemoryPort& memory_;
  Capacity capacity_;
  uint64_t ring_mask_ = 0;
  std::unique_ptr<Wr[]> ring_;
  std::unique_ptr<Sge[]> sges_;
  std::unique_ptr<std::byte[]> inline_;

  bool running_ = false;
  bool draining_ = false;
  bool flushing_ = false;
  bool failed_ = false;
  bool failure_reported_ = false;
  bool tickets_void_ = false;
  bool rnr_waiting_ = false;
  uint8_t retry_cnt_ = 0;
  uint8_t rnr_retry_ = 0;
  uint8_t retries_left_ = 0;
  uint8_t rnr_retries_left_ = 0;
  uint8_t timeout_ = 0;
  uint8_t mtu_shift_ = 10;
  uint32_t max_rd_atomic_ = 0;

  // WRs are numbered from 0 on, never reused; the slot is the number modulo
  // the ring. completed_ <= retired_ <= una_wr_ <= send_wr_ <= started_ <=
  // tail_ (a failed WR's completion moves completed_ past retired_).
  uint64_t completed_ = 0;     // the next to be looked at by PollCompletion
  uint64_t retired_ = 0;       // the oldest not acknowledged and committed
  uint64_t una_wr_ = 0;        // the one that una_seq_ belongs to
  uint64_t send_wr_ = 0;       // the one that the next packet belongs to
  uint64_t started_ = 0;       // the first that has no PSNs yet
  uint64_t tail_ = 0;          // where the next is posted
  uint64_t error_wr_ = kNone;  // the oldest with an error; nothing from it on is sent

  // PSNs extended to 64 bits: a number's low 24 bits are the PSN.
  uint64_t una_seq_ = 0;        // oldest not acknowledged
  uint64_t send_seq_ = 0;       // next to send; below sent_high_ after go-back
  uint64_t sent_high_ = 0;      // one past the highest ever sent
  uint64_t next_seq_ = 0;       // one past those given to WRs
  uint64_t gone_back_ = kNone;  // una_seq_ at the last go-back

  uint32_t in_flight_ = 0;       // request packets between una_seq_ and send_seq_
  uint32_t rd_outstanding_ = 0;  // READs and atomics that lack their response
  uint32_t rd_unretired_ = 0;    // those and the ones not yet visible (fence)
  uint32_t tx_sge_ = 0;          // position of send_seq_ in its WR's SGEs
  uint32_t tx_sge_used_ = 0;
  uint32_t rx_sge_ = 0;  // position of una_seq_ in its READ's SGEs
  uint32_t rx_sge_used_ = 0;

  Ticket committed_ = 0;
  Time ack_deadline_ = Time::Never();
  Time rnr_deadline_ = Time::Never();
  TransportCounters counters_;
};

}  // namespace verbena::transport
