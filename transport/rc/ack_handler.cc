// SPDX-License-Identifier: Apache-2.0
//
// RcRequester: what a response packet means. The rules:
// - A response for PSN n acknowledges everything before n, except READs and
//   atomics, which only their own response acknowledges. If one of those stands
//   before n, its response was lost or is late ("hole").
// - After that only a response for the oldest unacknowledged PSN means
//   anything; responses outside [una, highest sent] are ghosts of earlier
//   transmissions and ignored.
#include <algorithm>

#include "transport/rc/requester.h"
#include "transport/rc/requester_wr.h"
#include "transport/wire/aeth.h"

namespace verbena::transport {

namespace {

constexpr WcStatus StatusOf(NakCode code) {
  switch (code) {
    case NakCode::kInvalidRequest:
      return WcStatus::kRemInvReqErr;
    case NakCode::kRemoteAccessError:
      return WcStatus::kRemAccessErr;
    case NakCode::kRemoteOperationalError:
      return WcStatus::kRemOpErr;
    case NakCode::kPsnSequenceError:
    case NakCode::kInvalidRdRequest:
      break;
  }
  return WcStatus::kBadRespErr;
}

}  // namespace

void RcRequester::HandleResponse(const PacketView& packet, Time now) {
  if (!running_ || failed_) return;
  const uint64_t ahead =
      static_cast<uint64_t>(Psn(packet.psn().value() - una_psn().value()).value());
  if (ahead >= sent_high_ - una_seq_) {
    ++counters_.dropped;
    return;
  }
  const uint64_t seq = una_seq_ + ahead;
  switch (packet.traits().kind) {
    case OperationKind::kAcknowledge:
      HandleAcknowledge(packet, seq, now);
      break;
    case OperationKind::kReadResponse:
      HandleReadResponse(packet, seq, now);
      break;
    case OperationKind::kAtomicAcknowledge:
      HandleAtomicResponse(packet, seq, now);
      break;
    default:
      ++counters_.dropped;
      return;
  }
  Retire();
}

void RcRequester::HandleAcknowledge(const PacketView& packet, uint64_t seq, Time now) {
  const Aeth aeth = packet.aeth();
  switch (aeth.kind()) {
    case AethKind::kAck:
      // A plain ACK of a READ's or atomic's PSN is legal: an ACK repeated for a
      // duplicate carries the newest PSN. It tells that a response is missing.
      if (!AcknowledgeBefore(seq + 1, now)) HandleHole();
      return;
    case AethKind::kRnrNak:
      HandleRnrNak(aeth.code(), seq, now);
      return;
    case AethKind::kNak:
      HandleNak(aeth.nak_code(), aeth.syndrome, seq, now);
      return;
    case AethKind::kReserved:
      break;
  }
  if (AcknowledgeBefore(seq, now)) Fail(una_wr_, WcStatus::kBadRespErr, aeth.syndrome);
}

void RcRequester::HandleNak(NakCode code, uint8_t syndrome, uint64_t seq, Time now) {
  if (code == NakCode::kPsnSequenceError) {
    HandleSequenceNak(seq, now);
    return;
  }
  if (!AcknowledgeBefore(seq, now)) {
    HandleHole();
    return;
  }
  ++counters_.send_err;
  Fail(una_wr_, StatusOf(code), syndrome);
}

// Acknowledges every PSN before `seq`. False if a READ or atomic without its
// response stands in the way.
bool RcRequester::AcknowledgeBefore(uint64_t seq, Time now) {
  bool progress = false;
  while (una_seq_ < seq) {
    const Wr& wr = At(una_wr_);
    if (wr.is_read_or_atomic()) break;
    const uint64_t upto = std::min(seq, wr.end_seq());
    if (una_seq_ < send_seq_) {
      in_flight_ -= static_cast<uint32_t>(std::min(upto, send_seq_) - una_seq_);
    }
    una_seq_ = upto;
    if (upto == wr.end_seq()) ++una_wr_;
    rx_sge_ = rx_sge_used_ = 0;
    progress = true;
  }
  if (progress) OnProgress(now);
  return una_seq_ >= seq;
}

void RcRequester::OnProgress(Time now) {
  retries_left_ = retry_cnt_;
  rnr_retries_left_ = rnr_retry_;
  rnr_waiting_ = false;
  ack_deadline_ = Time::Never();
  if (send_seq_ < una_seq_) SeekToUna();
  if (una_seq_ < send_seq_) ArmAckTimer(now);
}

// Is this the response packet that is due at una_seq_, in position, syndrome
// and length?
bool RcRequester::IsReadResponseAsDue(const PacketView& packet, const Wr& wr, uint64_t seq) const {
  const OpcodeTraits& traits = packet.traits();
  const uint64_t mtu = uint64_t{1} << mtu_shift_;
  const uint64_t left = wr.length - ((seq - wr.first_seq) << mtu_shift_);
  const bool last = seq + 1 == wr.end_seq();
  if (traits.ends_message() != last) return false;
  if (packet.payload_bytes() != (last ? left : mtu)) return false;
  if (traits.has_aeth() && !packet.aeth().is_ack()) return false;
  // FIRST and ONLY answer the packet that asked for this PSN.
  if (traits.begins_message()) return seq == wr.request_seq;
  // Linux rxe answers a READ that was repeated from its middle by resuming the
  // old stream: MIDDLE or LAST where FIRST or ONLY is due.
  return seq != wr.first_seq;
}

bool RcRequester::PlaceReadPayload(Wr& wr, std::span<const std::byte> payload, bool last) {
  const Sge* sges = SgesOf(una_wr_);
  while (!payload.empty()) {
    const Sge& sge = sges[rx_sge_];
    const uint32_t take =
        static_cast<uint32_t>(std::min<size_t>(payload.size(), sge.length - rx_sge_used_));
    if (take != 0) {
      Ticket ticket = 0;
      const MemoryStatus status =
          memory_.Place({sge.address + rx_sge_used_, take, sge.key}, payload.first(take),
                        MemoryAccess::kLocalWrite, last && take == payload.size(), &ticket);
      if (status != MemoryStatus::kOk) return false;
      if (ticket != 0) {
        if (wr.first_ticket == 0) wr.first_ticket = ticket;
        wr.last_ticket = ticket;
      }
      payload = payload.subspan(take);
      rx_sge_used_ += take;
    }
    if (rx_sge_used_ == sge.length) {
      ++rx_sge_;
      rx_sge_used_ = 0;
    }
  }
  return true;
}

void RcRequester::HandleReadResponse(const PacketView& packet, uint64_t seq, Time now) {
  if (!AcknowledgeBefore(seq, now)) {
    HandleHole();
    return;
  }
  Wr& wr = At(una_wr_);
  if (wr.error != WcStatus::kSuccess) return;
  if ((wr.is_atomic_write() || wr.is_flush()) && packet.opcode() == Opcode::kRcReadResponseOnly &&
      packet.payload_bytes() == 0 && packet.aeth().is_ack()) {
    ++una_seq_;
    FinishReadOrAtomic(wr);
    OnProgress(now);
    return;
  }
  if (!wr.is_read() || !IsReadResponseAsDue(packet, wr, seq)) {
    Fail(una_wr_, WcStatus::kBadRespErr, static_cast<uint32_t>(packet.opcode()));
    return;
  }
  if (!PlaceReadPayload(wr, packet.payload(), seq + 1 == wr.end_seq())) {
    Fail(una_wr_, WcStatus::kLocProtErr, 0);
    return;
  }
  ++una_seq_;
  if (una_seq_ == wr.end_seq()) FinishReadOrAtomic(wr);
  OnProgress(now);
}

void RcRequester::HandleAtomicResponse(const PacketView& packet, uint64_t seq, Time now) {
  if (!AcknowledgeBefore(seq, now)) {
    HandleHole();
    return;
  }
  Wr& wr = At(una_wr_);
  if (wr.error != WcStatus::kSuccess) return;
  if (!wr.is_atomic() || !packet.aeth().is_ack()) {
    Fail(una_wr_, WcStatus::kBadRespErr, static_cast<uint32_t>(packet.opcode()));
    return;
  }
  wr.atomic_result = packet.atomic_ack_eth().original;
  if (!PlaceReadPayload(wr, std::as_bytes(std::span(&wr.atomic_result, 1)), true)) {
    Fail(una_wr_, WcStatus::kLocProtErr, 0);
    return;
  }
  ++una_seq_;
  FinishReadOrAtomic(wr);
  OnProgress(now);
}

void RcRequester::FinishReadOrAtomic(Wr& wr) {
  if (send_seq_ >= wr.end_seq()) --in_flight_;
  --rd_outstanding_;
  ++una_wr_;
  rx_sge_ = rx_sge_used_ = 0;
}

}  // namespace verbena::transport
