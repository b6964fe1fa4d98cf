// SPDX-License-Identifier: Apache-2.0
#include "transport/uc/responder.h"

#include <algorithm>

namespace verbena::transport {
namespace {

constexpr uint32_t kMaxDmaLength = uint32_t{1} << 31;

// IBTA Vol 1 C9-92, as for RC: FIRST and MIDDLE carry exactly the path MTU.
bool IsPayloadLengthValid(const OpcodeTraits& traits, size_t payload, uint32_t mtu) {
  if (traits.is_first() || traits.is_middle()) return payload == mtu;
  return payload <= mtu && (traits.is_only() || payload != 0);
}

}  // namespace

void UcResponder::Reset() {
  running_ = failed_ = flushing_ = established_ = tickets_void_ = false;
  event_comm_est_ = event_access_err_ = false;
  committed_ = last_ticket_ = 0;
  kind_ = OperationKind::kNone;
  has_receive_ = false;
  received_.clear();
}

void UcResponder::Start(const UcResponderConfig& config) {
  Reset();
  mtu_ = PmtuBytes(config.pmtu);
  expected_psn_ = config.expected_psn;
  access_flags_ = config.access_flags;
  running_ = true;
}

// The message in progress is over; its receive stays for the next.
UcResponder::Verdict UcResponder::Drop(Verdict verdict) {
  kind_ = OperationKind::kNone;
  ++counters_.dropped;
  return verdict;
}

UcResponder::Verdict UcResponder::HandleRequest(const PacketView& packet) {
  const OpcodeTraits& traits = packet.traits();
  if (!running_ || failed_ || flushing_ || traits.service != Service::kUc || received_.full()) {
    return Drop(Verdict::kLostMessage);
  }
  if (!established_) established_ = event_comm_est_ = true;
  const bool in_sequence = packet.psn() == expected_psn_;
  if (!in_sequence) {
    ++counters_.out_of_seq_request;
    kind_ = OperationKind::kNone;
  }
  expected_psn_ = packet.psn().Next();
  Verdict verdict = Verdict::kAccepted;
  if (traits.begins_message()) {
    verdict = Begin(packet);
  } else if (kind_ != traits.kind) {
    verdict = Verdict::kLostMessage;
  }
  if (verdict == Verdict::kAccepted) verdict = Check(packet);
  if (verdict == Verdict::kAccepted && traits.has_imm() && !TakeReceive()) {
    verdict = Verdict::kNoReceive;
  }
  if (verdict == Verdict::kAccepted) verdict = Place(packet);
  if (verdict != Verdict::kAccepted) return Drop(verdict);
  if (traits.ends_message()) EndMessage(packet);
  return Verdict::kAccepted;
}

// A FIRST or ONLY ends whatever was in progress.
UcResponder::Verdict UcResponder::Begin(const PacketView& packet) {
  const OpcodeTraits& traits = packet.traits();
  kind_ = OperationKind::kNone;
  before_ = last_ticket_;
  done_ = 0;
  if (traits.is_send()) {
    if (!TakeReceive()) return Verdict::kNoReceive;
    sge_ = sge_used_ = 0;
  } else {
    if ((access_flags_ & kAccessRemoteWrite) == 0) return Verdict::kAccess;
    const Reth reth = packet.reth();
    if (reth.dma_length > kMaxDmaLength) return Verdict::kOutOfSequence;
    // IBTA Vol 1 C9-88: without bytes the key is not looked at.
    if (reth.dma_length != 0 && memory_.Check(reth.rkey.value(), reth.va, reth.dma_length,
                                              MemoryAccess::kRemoteWrite) != MemoryStatus::kOk) {
      return Verdict::kAccess;
    }
    length_ = reth.dma_length;
    address_ = reth.va;
    rkey_ = reth.rkey.value();
  }
  kind_ = traits.kind;
  return Verdict::kAccepted;
}

UcResponder::Verdict UcResponder::Check(const PacketView& packet) const {
  const OpcodeTraits& traits = packet.traits();
  const size_t payload = packet.payload_bytes();
  if (!IsPayloadLengthValid(traits, payload, mtu_)) return Verdict::kOutOfSequence;
  if (traits.is_send()) {
    return done_ + payload <= receive_bytes_ ? Verdict::kAccepted : Verdict::kReceiveTooSmall;
  }
  const uint32_t left = length_ - done_;
  const bool fits = traits.ends_message() ? payload == left : payload < left;
  return fits ? Verdict::kAccepted : Verdict::kOutOfSequence;
}

bool UcResponder::TakeReceive() {
  if (has_receive_) return true;
  if (!receive_queue_.Take(&receive_)) return false;
  has_receive_ = true;
  receive_bytes_ = 0;
  if (receive_.malformed || receive_.sge_count > kMaxSge) {
    FailReceive(WcStatus::kLocProtErr);
    return false;
  }
  for (uint32_t i = 0; i < receive_.sge_count; ++i) receive_bytes_ += receive_.sges[i].length;
  return true;
}

UcResponder::Verdict UcResponder::Place(const PacketView& packet) {
  const OpcodeTraits& traits = packet.traits();
  const std::span<const std::byte> payload = packet.payload();
  if (!payload.empty()) {
    if (traits.is_send()) {
      if (Scatter(payload, traits.ends_message()) != MemoryStatus::kOk) {
        FailReceive(WcStatus::kLocProtErr);
        return Verdict::kAccess;
      }
    } else if (memory_.Place({address_ + done_, static_cast<uint32_t>(payload.size()), rkey_},
                             payload, MemoryAccess::kRemoteWrite, traits.ends_message(),
                             &last_ticket_) != MemoryStatus::kOk) {
      return Verdict::kAccess;
    }
  }
  done_ += static_cast<uint32_t>(payload.size());
  return Verdict::kAccepted;
}

MemoryStatus UcResponder::Scatter(std::span<const std::byte> bytes, bool last) {
  while (!bytes.empty()) {
    const MemorySegment& sge = receive_.sges[sge_];
    const uint32_t take =
        static_cast<uint32_t>(std::min<size_t>(bytes.size(), sge.length - sge_used_));
    if (take != 0) {
      const MemoryStatus status =
          memory_.Place({sge.address + sge_used_, take, sge.key}, bytes.first(take),
                        MemoryAccess::kLocalWrite, last && take == bytes.size(), &last_ticket_);
      if (status != MemoryStatus::kOk) return status;
      bytes = bytes.subspan(take);
      sge_used_ += take;
    }
    if (sge_used_ == sge.length) {
      ++sge_;
      sge_used_ = 0;
    }
  }
  return MemoryStatus::kOk;
}

void UcResponder::EndMessage(const PacketView& packet) {
  const OpcodeTraits& traits = packet.traits();
  kind_ = OperationKind::kNone;
  ++counters_.rdma_recvs;
  if (!traits.is_send() && !traits.has_imm()) return;
  Received& received = received_.push_back();
  received = {.wr_id = receive_.wr_id,
              .ticket = last_ticket_,
              .before = before_,
              .wqe_index = receive_.wqe_index,
              .imm = 0,
              .byte_len = done_,
              .status = WcStatus::kSuccess,
              .opcode = traits.is_send() ? WcOpcode::kRecv : WcOpcode::kRecvRdmaWithImm,
              .has_imm = traits.has_imm(),
              .solicited = packet.bth().solicited};
  if (received.has_imm) StoreBe32(reinterpret_cast<std::byte*>(&received.imm), packet.imm().value);
  has_receive_ = false;
}

// The receive that was taken ends with an error, and with it the connection.
void UcResponder::FailReceive(WcStatus status) {
  failed_ = true;
  if (!has_receive_ || received_.full()) return;
  has_receive_ = false;
  received_.push_back() = {.wr_id = receive_.wr_id,
                           .ticket = last_ticket_,
                           .before = before_,
                           .wqe_index = receive_.wqe_index,
                           .imm = 0,
                           .byte_len = 0,
                           .status = status,
                           .opcode = WcOpcode::kRecv,
                           .has_imm = false,
                           .solicited = false};
}

void UcResponder::HandleCommitted(Ticket ticket) { committed_ = std::max(committed_, ticket); }

// LOC_PROT_ERR for the receive whose message was not placed; those behind it are
// flushed, and all of them if it was a WRITE.
void UcResponder::HandlePlacementFailed(Ticket ticket) {
  if (ticket == 0 || last_ticket_ < ticket) return;
  committed_ = std::max(committed_, ticket - 1);
  bool is_receive_fault = false;
  for (uint32_t i = 0; i < received_.size(); ++i) {
    Received& received = received_[i];
    if (received.ticket < ticket) continue;
    const bool mine = ticket > received.before && received.opcode == WcOpcode::kRecv;
    received.status = mine ? WcStatus::kLocProtErr : WcStatus::kWrFlushErr;
    is_receive_fault |= mine;
    received.ticket = committed_;  // nothing will be heard of the later ones
  }
  last_ticket_ = committed_;
  tickets_void_ = true;
  if (!is_receive_fault && kind_ == OperationKind::kSend && ticket > before_) {
    is_receive_fault = true;
    FailReceive(WcStatus::kLocProtErr);
  }
  event_access_err_ |= !is_receive_fault;
  kind_ = OperationKind::kNone;
  failed_ = true;
}

bool UcResponder::PollCompletion(Completion* completion) {
  if (!received_.empty()) {
    const Received received = received_.front();
    if (received.ticket > committed_) return false;
    received_.pop_front();
    const bool ok = received.status == WcStatus::kSuccess;
    *completion = {};
    completion->wr_id = received.wr_id;
    completion->wqe_index = received.wqe_index;
    completion->status = received.status;
    completion->opcode = received.opcode;
    completion->has_imm = ok && received.has_imm;
    completion->solicited = received.solicited;
    completion->imm_or_inv = received.imm;
    completion->byte_len = received.byte_len;
    return true;
  }
  if (!flushing_) return false;
  if (has_receive_) {
    // The buffer may still be written to.
    if (last_ticket_ > committed_ && !tickets_void_) return false;
    has_receive_ = false;
  } else if (!receive_queue_.Take(&receive_)) {
    return false;
  }
  *completion = {};
  completion->wr_id = receive_.wr_id;
  completion->wqe_index = receive_.wqe_index;
  completion->status = WcStatus::kWrFlushErr;
  completion->opcode = WcOpcode::kRecv;
  return true;
}

bool UcResponder::PollEvent(AsyncEventType* event) {
  if (event_comm_est_) {
    event_comm_est_ = false;
    *event = AsyncEventType::kCommEst;
    return true;
  }
  if (!event_access_err_) return false;
  event_access_err_ = false;
  *event = AsyncEventType::kQpAccessErr;
  return true;
}

}  // namespace verbena::transport
