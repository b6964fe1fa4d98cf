// SPDX-License-Identifier: Apache-2.0
#include "transport/rc/responder.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace verbena::transport {

namespace {

constexpr uint8_t kEventReqErr = 1 << 0;
constexpr uint8_t kEventAccessErr = 1 << 1;
constexpr uint8_t kEventCommEst = 1 << 2;

// A READ takes as many PSNs as its response has packets, at least one.
constexpr uint32_t ReadPackets(uint32_t bytes, uint32_t mtu) {
  return bytes == 0 ? 1 : (bytes - 1) / mtu + 1;
}

// READs, atomics, FLUSHes and atomic writes; the others are acknowledged.
constexpr bool IsAnsweredByResponse(const OpcodeTraits& traits) {
  return !traits.carries_payload || traits.kind == OperationKind::kAtomicWrite;
}

constexpr uint32_t ToWire(uint32_t host) {
  return std::endian::native == std::endian::little ? __builtin_bswap32(host) : host;
}

}  // namespace

RcResponder::RcResponder(MemoryPort& memory, ReceiveQueuePort& receive_queue)
    : memory_(memory), receive_queue_(receive_queue) {}

RcResponder::~RcResponder() = default;

void RcResponder::Reset() {
  running_ = failing_ = flushing_ = established_ = nak_pending_ = tickets_void_ = false;
  events_ = 0;
  msn_ = Msn();
  committed_ = last_ticket_ = 0;
  message_ = MessageState();
  has_receive_ = false;
  responses_.clear();
  placements_.clear();
  completions_.clear();
}

void RcResponder::Start(const RcResponderConfig& config) {
  Reset();
  assert(IsValid(config.pmtu));
  mtu_ = PmtuBytes(config.pmtu);
  service_ = config.service;
  expected_psn_ = config.expected_psn;
  replay_queue_.Reset(config.max_dest_rd_atomic);
  Reconfigure(config);
  running_ = true;
}

void RcResponder::Reconfigure(const RcResponderConfig& config) {
  min_rnr_timer_ = config.min_rnr_timer & 31;
  access_flags_ = config.access_flags;
  max_dest_rd_atomic_ = std::min<uint32_t>(config.max_dest_rd_atomic, ReplayQueue::kMaxRecords);
  replay_queue_.Resize(max_dest_rd_atomic_);
}

void RcResponder::HandleRequest(const PacketView& packet, Time /*now*/) {
  const OpcodeTraits& traits = packet.traits();
  if (!running_ || failing_ || traits.service != service_ || !traits.is_request() ||
      IsQueueFull()) {
    ++counters_.dropped;
    return;
  }
  if (!established_) {
    established_ = true;
    events_ |= kEventCommEst;
  }
  switch (CheckPsn(expected_psn_, packet.psn())) {
    case Verdict::kSequenceNak:
      HandleGap();
      return;
    case Verdict::kDuplicate:
      HandleDuplicate(packet);
      return;
    default:
      break;
  }
  nak_pending_ = false;
  Verdict verdict = Check(packet);
  if (verdict == Verdict::kNext) verdict = Execute(packet);
  if (verdict != Verdict::kNext) {
    Reject(verdict, packet.psn());
    return;
  }
  // READs and atomics are answered by their response.
  if (packet.bth().ack_req && !IsAnsweredByResponse(traits)) AddAck();
}

void RcResponder::HandleReservedOpcode(Psn psn, Time /*now*/) {
  if (!running_ || failing_ || IsQueueFull() || psn != expected_psn_) {
    ++counters_.dropped;
    return;
  }
  Reject(Verdict::kInvalidRequest, psn);
}

Verdict RcResponder::Check(const PacketView& packet) {
  const OpcodeTraits& traits = packet.traits();
  Verdict verdict = CheckOpcodeSequence(traits, message_);
  if (verdict == Verdict::kNext && traits.has_xrceth()) verdict = CheckXrcSrq(packet);
  if (verdict != Verdict::kNext) return verdict;
  verdict = CheckAccess(traits, access_flags_);
  if (verdict != Verdict::kNext) return verdict;
  if (traits.kind == OperationKind::kFlush) {
    verdict = CheckFlush(packet, access_flags_);
    if (verdict != Verdict::kNext) return verdict;
  }
  if (IsAnsweredByResponse(traits)) {
    verdict = CheckReadAtomicLimit(responses_.outstanding_requests(), max_dest_rd_atomic_);
    if (verdict != Verdict::kNext) return verdict;
  }
  verdict = CheckLength(packet, message_, mtu_);
  if (verdict != Verdict::kNext) return verdict;
  // A message of one packet is checked by its placement, which comes next,
  // unless a receive is taken in between.
  if (traits.has_reth() &&
      (traits.position != Position::kOnly || traits.has_imm() || traits.is_read_request())) {
    verdict = CheckRkey(packet, memory_);
    if (verdict != Verdict::kNext) return verdict;
  }
  return CheckReceive(packet);
}

// All packets of a message name the same SRQ, and it exists (IBTA Vol 1, annex
// A14). It stands for the protection domain too.
Verdict RcResponder::CheckXrcSrq(const PacketView& packet) {
  const SrqNumber srq = packet.xrceth().srq;
  if (message_.kind != OperationKind::kNone && srq != message_.srq) {
    return Verdict::kInvalidRequest;
  }
  if (!receive_queue_.Select(srq)) return Verdict::kInvalidRequest;
  message_.srq = srq;
  return Verdict::kNext;
}

// Takes a receive if the packet needs one: a SEND with its first packet, a
// WRITE with immediate with its last.
Verdict RcResponder::CheckReceive(const PacketView& packet) {
  const OpcodeTraits& traits = packet.traits();
  const bool takes = traits.is_send() ? traits.begins_message() : traits.has_imm();
  if (takes) {
    if (!receive_queue_.Take(&receive_)) return Verdict::kRnrNak;
    assert(!has_receive_);
    has_receive_ = true;
    if (traits.begins_message()) message_psn_ = packet.psn();
    rx_sge_ = rx_sge_used_ = 0;
    receive_bytes_ = 0;
    if (receive_.malformed || receive_.sge_count > kMaxSge) return Verdict::kReceiveFault;
    for (uint32_t i = 0; i < receive_.sge_count; ++i) receive_bytes_ += receive_.sges[i].length;
  }
  if (!traits.is_send()) return Verdict::kNext;
  return CheckReceiveLength(receive_bytes_, message_.done + packet.payload_bytes());
}

Verdict RcResponder::Execute(const PacketView& packet) {
  switch (packet.traits().kind) {
    case OperationKind::kSend:
      return ExecuteSend(packet);
    case OperationKind::kWrite:
      return ExecuteWrite(packet);
    case OperationKind::kReadRequest:
      return ExecuteRead(packet);
    case OperationKind::kAtomicWrite:
      return ExecuteAtomicWrite(packet);
    case OperationKind::kFlush:
      return ExecuteFlush(packet);
    default:
      return ExecuteAtomic(packet);
  }
}

void RcResponder::NotePlacement(Psn psn, Ticket ticket) {
  if (ticket == 0) return;
  last_ticket_ = ticket;
  if (ticket > committed_) placements_.Add({psn, msn_}, ticket);
}

MemoryStatus RcResponder::PlaceIntoReceive(std::span<const std::byte> payload, bool last) {
  Ticket ticket = 0;
  while (!payload.empty()) {
    const MemorySegment& sge = receive_.sges[rx_sge_];
    const uint32_t take =
        static_cast<uint32_t>(std::min<size_t>(payload.size(), sge.length - rx_sge_used_));
    if (take != 0) {
      const MemoryStatus status =
          memory_.Place({sge.address + rx_sge_used_, take, sge.key}, payload.first(take),
                        MemoryAccess::kLocalWrite, last && take == payload.size(), &ticket);
      if (status != MemoryStatus::kOk) {
        NotePlacement(expected_psn_, ticket);  // of the pieces before
        return status;
      }
      payload = payload.subspan(take);
      rx_sge_used_ += take;
    }
    if (rx_sge_used_ == sge.length) {
      ++rx_sge_;
      rx_sge_used_ = 0;
    }
  }
  NotePlacement(expected_psn_, ticket);
  return MemoryStatus::kOk;
}

Verdict RcResponder::ExecuteSend(const PacketView& packet) {
  const OpcodeTraits& traits = packet.traits();
  if (PlaceIntoReceive(packet.payload(), traits.ends_message()) != MemoryStatus::kOk) {
    return Verdict::kReceiveFault;
  }
  message_.kind = OperationKind::kSend;
  message_.done += static_cast<uint32_t>(packet.payload_bytes());
  if (traits.has_ieth() && memory_.Invalidate(packet.ieth().rkey.value()) != MemoryStatus::kOk) {
    return Verdict::kInvalidateNotAllowed;
  }
  expected_psn_ = expected_psn_.Next();
  if (traits.ends_message()) EndMessage(packet, WcOpcode::kRecv);
  return Verdict::kNext;
}

Verdict RcResponder::ExecuteWrite(const PacketView& packet) {
  const OpcodeTraits& traits = packet.traits();
  if (traits.begins_message()) {
    const Reth reth = packet.reth();
    message_psn_ = packet.psn();
    message_.done = 0;
    message_.length = reth.dma_length;
    message_.address = reth.va;
    message_.rkey = reth.rkey.value();
  }
  const uint32_t bytes = static_cast<uint32_t>(packet.payload_bytes());
  if (bytes != 0) {
    Ticket ticket = 0;
    const MemoryStatus status =
        memory_.Place({message_.address + message_.done, bytes, message_.rkey}, packet.payload(),
                      MemoryAccess::kRemoteWrite, traits.ends_message(), &ticket);
    if (status != MemoryStatus::kOk) return RemoteVerdict(status);
    NotePlacement(expected_psn_, ticket);
  }
  message_.kind = OperationKind::kWrite;
  message_.done += bytes;
  expected_psn_ = expected_psn_.Next();
  if (traits.ends_message()) EndMessage(packet, WcOpcode::kRecvRdmaWithImm);
  return Verdict::kNext;
}

// Counts the message and completes its receive, if it took one.
void RcResponder::EndMessage(const PacketView& packet, WcOpcode opcode) {
  msn_ = msn_.Next();
  ++counters_.rdma_recvs;
  if (has_receive_) {
    const OpcodeTraits& traits = packet.traits();
    RecvCompletion& completion = completions_.push_back();
    completion.wr_id = receive_.wr_id;
    completion.ticket = last_ticket_;
    completion.wqe_index = receive_.wqe_index;
    completion.byte_len = message_.done;
    completion.first_psn = message_psn_;
    completion.srq = receive_.srq;
    completion.status = WcStatus::kSuccess;
    completion.opcode = opcode;
    completion.has_imm = traits.has_imm();
    completion.has_inv = traits.has_ieth();
    completion.imm_or_inv = traits.has_imm()    ? ToWire(packet.imm().value)
                            : traits.has_ieth() ? packet.ieth().rkey.value()
                                                : 0;
    completion.solicited = packet.bth().solicited;
    has_receive_ = false;
  }
  message_.kind = OperationKind::kNone;
  message_.done = 0;
}

Verdict RcResponder::ExecuteRead(const PacketView& packet) {
  const Reth reth = packet.reth();
  msn_ = msn_.Next();
  const Psn end = expected_psn_ + ReadPackets(reth.dma_length, mtu_);
  Response response;
  response.kind = Response::Kind::kRead;
  response.psn = response.first_psn = expected_psn_;
  response.end_psn = end;
  response.msn = msn_;
  response.left = reth.dma_length;
  response.rkey = reth.rkey.value();
  response.address = reth.va;
  response.srq = message_.srq;
  response.ticket = last_ticket_;
  responses_.Add(response);
  expected_psn_ = end;
  ++counters_.rdma_recvs;
  return Verdict::kNext;
}

Verdict RcResponder::ExecuteAtomic(const PacketView& packet) {
  const AtomicEth eth = packet.atomic_eth();
  const bool swap = packet.traits().kind == OperationKind::kCompareSwap;
  const AtomicOperation operation{
      .kind = swap ? AtomicKind::kCompareSwap : AtomicKind::kFetchAdd,
      .swap_or_add = eth.swap_add,
      .compare = eth.compare,
  };
  Ticket ticket = 0;
  const MemoryStatus status = memory_.Atomic(eth.rkey.value(), eth.va, operation, &ticket);
  if (status != MemoryStatus::kOk) return RemoteVerdict(status);
  NotePlacement(expected_psn_, ticket);
  replay_queue_.Add(expected_psn_, operation.kind, eth.rkey.value(), eth.va, ticket);
  msn_ = msn_.Next();
  Response response;
  response.kind = Response::Kind::kAtomic;
  response.psn = expected_psn_;
  response.end_psn = expected_psn_.Next();
  response.msn = msn_;
  response.ticket = last_ticket_;
  responses_.Add(response);
  expected_psn_ = expected_psn_.Next();
  ++counters_.rdma_recvs;
  return Verdict::kNext;
}

// A response that carries nothing answers an atomic write or a FLUSH, as Linux
// rxe has it.
Response RcResponder::EmptyReadResponse(Psn psn) const {
  Response response;
  response.kind = Response::Kind::kRead;
  response.psn = response.first_psn = psn;
  response.end_psn = psn.Next();
  response.msn = msn_;
  response.ticket = last_ticket_;
  return response;
}

// Eight aligned bytes that are never seen in part.
Verdict RcResponder::ExecuteAtomicWrite(const PacketView& packet) {
  const Reth reth = packet.reth();
  Ticket ticket = 0;
  const MemoryStatus status =
      memory_.Place({reth.va, reth.dma_length, reth.rkey.value()}, packet.payload(),
                    MemoryAccess::kRemoteWrite, true, &ticket);
  if (status != MemoryStatus::kOk) return RemoteVerdict(status);
  NotePlacement(expected_psn_, ticket);
  RespondWithoutPayload();
  return Verdict::kNext;
}

// What is committed is visible to all: the response waits for every placement
// before it, whatever the range.
Verdict RcResponder::ExecuteFlush(const PacketView& packet) {
  const Reth reth = packet.reth();
  const MemoryStatus status =
      packet.feth().level() == Feth::kLevelRegion
          ? memory_.CheckKey(reth.rkey.value(), MemoryAccess::kRemoteFlush)
          : memory_.Check(reth.rkey.value(), reth.va, reth.dma_length, MemoryAccess::kRemoteFlush);
  if (status != MemoryStatus::kOk) return RemoteVerdict(status);
  RespondWithoutPayload();
  return Verdict::kNext;
}

void RcResponder::RespondWithoutPayload() {
  msn_ = msn_.Next();
  responses_.Add(EmptyReadResponse(expected_psn_));
  expected_psn_ = expected_psn_.Next();
  ++counters_.rdma_recvs;
}

// A packet is missing: one NAK until it arrives.
void RcResponder::HandleGap() {
  ++counters_.out_of_seq_request;
  if (nak_pending_) return;
  nak_pending_ = true;
  AddNak(Response::Kind::kTransientNak, expected_psn_,
         Aeth::Nak(msn_, NakCode::kPsnSequenceError).syndrome);
}

void RcResponder::HandleDuplicate(const PacketView& packet) {
  ++counters_.duplicate_request;
  const OpcodeTraits& traits = packet.traits();
  if (traits.has_xrceth() && !receive_queue_.Select(packet.xrceth().srq)) {
    ++counters_.dropped;
    return;
  }
  if (traits.is_send() || traits.is_write()) {
    AddAck();
  } else if (traits.is_read_request()) {
    ReplayRead(packet);
  } else if (traits.is_atomic()) {
    ReplayAtomic(packet);
  } else if (traits.kind == OperationKind::kAtomicWrite || traits.kind == OperationKind::kFlush) {
    // Written before; what is there now may be newer. What is visible stays so.
    Response response = EmptyReadResponse(packet.psn());
    response.replay = response.restarted = true;
    responses_.Replay(response);
  } else {
    ++counters_.dropped;
  }
}

// Executed again from the address that is asked for. What is wrong with a
// duplicate is no violation: it may be old, and its key long gone.
void RcResponder::ReplayRead(const PacketView& packet) {
  const Reth reth = packet.reth();
  const uint32_t packets = ReadPackets(reth.dma_length, mtu_);
  const uint32_t behind = Psn(expected_psn_.value() - packet.psn().value()).value();
  if (CheckAccess(packet.traits(), access_flags_) != Verdict::kNext || packets > behind ||
      CheckLength(packet, message_, mtu_) != Verdict::kNext ||
      CheckRkey(packet, memory_) != Verdict::kNext) {
    ++counters_.dropped;
    return;
  }
  Response response;
  response.kind = Response::Kind::kRead;
  response.replay = response.restarted = true;
  response.psn = response.first_psn = packet.psn();
  response.end_psn = packet.psn() + packets;
  response.msn = msn_;
  response.left = reth.dma_length;
  response.rkey = reth.rkey.value();
  response.address = reth.va;
  if (packet.traits().has_xrceth()) response.srq = packet.xrceth().srq;
  response.ticket = last_ticket_;
  responses_.Replay(response);
}

void RcResponder::ReplayAtomic(const PacketView& packet) {
  const AtomicEth eth = packet.atomic_eth();
  const AtomicKind kind = packet.traits().kind == OperationKind::kCompareSwap
                              ? AtomicKind::kCompareSwap
                              : AtomicKind::kFetchAdd;
  if (replay_queue_.Find(packet.psn(), kind, eth.rkey.value(), eth.va) == nullptr) {
    ++counters_.dropped;
    return;
  }
  Response response;
  response.kind = Response::Kind::kAtomic;
  response.replay = true;
  response.psn = packet.psn();
  response.end_psn = packet.psn().Next();
  response.msn = msn_;
  response.ticket = last_ticket_;
  responses_.Replay(response);
}

void RcResponder::AddAck() {
  if (last_ticket_ > committed_) ++counters_.ack_deferred;
  responses_.AddAck(expected_psn_.Previous(), msn_, last_ticket_, committed_);
}

// A NAK acknowledges everything before it, so it waits like an ACK.
void RcResponder::AddNak(Response::Kind kind, Psn psn, uint8_t syndrome) {
  Response response;
  response.kind = kind;
  response.syndrome = syndrome;
  response.psn = psn;
  response.msn = msn_;
  response.ticket = last_ticket_;
  responses_.Add(response);
}

void RcResponder::Reject(Verdict verdict, Psn psn) {
  switch (verdict) {
    case Verdict::kRnrNak:
      ++counters_.send_rnr_err;
      // What is in flight behind it needs no sequence NAK.
      nak_pending_ = true;
      AddNak(Response::Kind::kTransientNak, psn, Aeth::RnrNak(msn_, min_rnr_timer_).syndrome);
      return;
    case Verdict::kInvalidRequest:
      events_ |= kEventReqErr;
      EndConnection(psn, NakCode::kInvalidRequest);
      return;
    case Verdict::kRemoteAccess:
      events_ |= kEventAccessErr;
      EndConnection(psn, NakCode::kRemoteAccessError);
      return;
    case Verdict::kRemoteOperational:
      events_ |= kEventAccessErr;
      EndConnection(psn, NakCode::kRemoteOperationalError);
      return;
    case Verdict::kReceiveTooSmall:
      FailReceive(WcStatus::kLocLenErr);
      EndConnection(psn, NakCode::kInvalidRequest);
      return;
    case Verdict::kReceiveFault:
      FailReceive(WcStatus::kLocProtErr);
      EndConnection(psn, NakCode::kRemoteOperationalError);
      return;
    case Verdict::kInvalidateNotAllowed:
      FailReceive(WcStatus::kLocAccessErr);
      failing_ = true;
      return;
    case Verdict::kNext:
    case Verdict::kDrop:
    case Verdict::kDuplicate:
    case Verdict::kSequenceNak:
      break;
  }
  ++counters_.dropped;
}

void RcResponder::EndConnection(Psn psn, NakCode code) {
  failing_ = true;
  AddNak(Response::Kind::kFatalNak, psn, Aeth::Nak(msn_, code).syndrome);
}

// The receive in progress ends with an error.
void RcResponder::FailReceive(WcStatus status) {
  if (!has_receive_ || completions_.full()) return;
  has_receive_ = false;
  RecvCompletion& completion = completions_.push_back();
  completion = RecvCompletion{};
  completion.wr_id = receive_.wr_id;
  completion.wqe_index = receive_.wqe_index;
  completion.ticket = last_ticket_;
  completion.first_psn = message_psn_;
  completion.srq = receive_.srq;
  completion.status = status;
  completion.opcode = WcOpcode::kRecv;
}

void RcResponder::HandleCommitted(Ticket ticket, Time /*now*/) {
  if (ticket <= committed_) return;
  committed_ = ticket;
  placements_.Commit(ticket);
}

void RcResponder::HandleAtomicCommitted(Ticket ticket, uint64_t original, Time now) {
  if (AtomicRecord* record = replay_queue_.FindByTicket(ticket); record != nullptr) {
    record->original = original;
    record->done = true;
  }
  HandleCommitted(ticket, now);
}

// Receives that wait for `ticket` or a later one do not succeed: LOC_PROT_ERR
// for the one that `psn` belongs to, flush for those behind it.
void RcResponder::FailUncommittedReceives(Ticket ticket, Psn psn, bool* is_receive_fault) {
  *is_receive_fault = false;
  for (uint32_t i = 0; i < completions_.size(); ++i) {
    RecvCompletion& completion = completions_[i];
    if (completion.ticket < ticket) continue;
    const bool mine = !*is_receive_fault && completion.opcode == WcOpcode::kRecv &&
                      completion.status != WcStatus::kWrFlushErr &&
                      Psn::Distance(completion.first_psn, psn) >= 0;
    completion.status = mine ? WcStatus::kLocProtErr : WcStatus::kWrFlushErr;
    completion.ticket = committed_;
    *is_receive_fault |= mine;
  }
  if (!*is_receive_fault && has_receive_ && message_.kind == OperationKind::kSend &&
      Psn::Distance(message_psn_, psn) >= 0) {
    *is_receive_fault = true;
    last_ticket_ = committed_;
    FailReceive(WcStatus::kLocProtErr);
  }
}

void RcResponder::HandlePlacementFailed(Ticket ticket, MemoryStatus why, Time now) {
  if (ticket == 0) return;
  HandleCommitted(ticket - 1, now);
  tickets_void_ = true;
  const std::optional<PlacementLog::Packet> failed = placements_.FirstNotPlaced(ticket);
  if (!failed.has_value()) return;
  const Psn psn = failed->psn;
  placements_.clear();
  bool is_receive_fault = false;
  FailUncommittedReceives(ticket, psn, &is_receive_fault);
  last_ticket_ = committed_;
  if (flushing_) return;
  for (uint32_t i = 0; i < responses_.size(); ++i) {
    if (responses_[i].ticket >= ticket) responses_.Truncate(i);
  }
  msn_ = failed->msn;  // the NAK counts what was placed
  if (is_receive_fault) {
    EndConnection(psn, NakCode::kRemoteOperationalError);
  } else {
    Reject(RemoteVerdict(why == MemoryStatus::kOk ? MemoryStatus::kFault : why), psn);
  }
}

void RcResponder::HandleFetchFailed(Psn psn, MemoryStatus why, Time /*now*/) {
  if (!running_ || failing_) return;
  for (uint32_t i = 0; i < responses_.size(); ++i) {
    if (Psn::Distance(psn, responses_[i].psn) >= 0) responses_.Truncate(i);
  }
  Reject(RemoteVerdict(why == MemoryStatus::kOk ? MemoryStatus::kFault : why), psn);
  // What was fetched before it is committed by nature.
  responses_[responses_.size() - 1].ticket = 0;
}

void RcResponder::Flush() {
  running_ = false;
  flushing_ = true;
  responses_.KeepFatalNak();
}

void RcResponder::FlushReceive(Completion* completion) {
  *completion = Completion{};
  completion->wr_id = receive_.wr_id;
  completion->wqe_index = receive_.wqe_index;
  completion->srq = receive_.srq;
  completion->status = WcStatus::kWrFlushErr;
  completion->opcode = WcOpcode::kRecv;
}

bool RcResponder::PollCompletion(Completion* completion) {
  if (!completions_.empty()) {
    const RecvCompletion& front = completions_.front();
    if (front.ticket > committed_) return false;
    *completion = Completion{};
    completion->wr_id = front.wr_id;
    completion->wqe_index = front.wqe_index;
    completion->srq = front.srq;
    completion->status = front.status;
    completion->opcode = front.opcode;
    completion->has_imm = front.has_imm;
    completion->has_inv = front.has_inv;
    completion->solicited = front.solicited;
    completion->imm_or_inv = front.imm_or_inv;
    completion->byte_len = front.byte_len;
    completions_.pop_front();
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
  FlushReceive(completion);
  return true;
}

bool RcResponder::PollEvent(AsyncEventType* event) {
  if (events_ == 0) return false;
  if ((events_ & kEventCommEst) != 0) {
    events_ &= static_cast<uint8_t>(~kEventCommEst);
    *event = AsyncEventType::kCommEst;
  } else if ((events_ & kEventReqErr) != 0) {
    events_ &= static_cast<uint8_t>(~kEventReqErr);
    *event = AsyncEventType::kQpReqErr;
  } else {
    events_ &= static_cast<uint8_t>(~kEventAccessErr);
    *event = AsyncEventType::kQpAccessErr;
  }
  return true;
}

}  // namespace verbena::transport
