// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/qp/rc_qp.h"

#include "nic_sim/engine/shard.h"
#include "nic_sim/qp/xrc_domain.h"

namespace verbena::nic {

using transport::AsyncEventType;
using transport::Completion;
using transport::MemoryStatus;
using transport::PacketView;
using transport::Pmtu;
using transport::Psn;
using transport::QpState;
using transport::QpType;
using transport::Service;
using transport::Ticket;
using transport::Time;

void RcQp::RequesterSide::OnPlaced(Ticket ticket) {
  qp_.requester_.HandleCommitted(ticket, qp_.config_.shard->now());
  qp_.config_.shard->MarkReady(qp_);
}
void RcQp::RequesterSide::OnAtomic(Ticket, uint64_t) {}  // requesters place, they do not execute
void RcQp::RequesterSide::OnPlaceFailed(Ticket ticket) {
  qp_.requester_.HandlePlacementFailed(ticket, MemoryStatus::kFault, qp_.config_.shard->now());
  qp_.config_.shard->MarkReady(qp_);
}
void RcQp::ResponderSide::OnPlaced(Ticket ticket) {
  qp_.responder_.HandleCommitted(ticket, qp_.config_.shard->now());
  qp_.config_.shard->MarkReady(qp_);
}
void RcQp::ResponderSide::OnAtomic(Ticket ticket, uint64_t original) {
  qp_.responder_.HandleAtomicCommitted(ticket, original, qp_.config_.shard->now());
  qp_.config_.shard->MarkReady(qp_);
}
void RcQp::ResponderSide::OnPlaceFailed(Ticket ticket) {
  qp_.responder_.HandlePlacementFailed(ticket, MemoryStatus::kFault, qp_.config_.shard->now());
  qp_.config_.shard->MarkReady(qp_);
}

RcQp::RcQp(const Config& config)
    : Qp(config),
      requester_side_(*this),
      responder_side_(*this),
      requester_memory_(config.share->regions, config.shard->dma(), config.pd, &requester_side_,
                        &qpn_),
      responder_memory_(config.share->regions, config.shard->dma(), config.pd, &responder_side_,
                        &qpn_),
      xrc_port_(*this),
      requester_({.max_wr = config.caps.max_send_wr,
                  .max_sge = config.caps.max_send_sge,
                  .max_inline = config.caps.max_inline},
                 requester_memory_),
      responder_(responder_memory_, config.type == QpType::kXrcRecv ? xrc_port_ : receive_queue()) {
  responder_memory_.set_receive_pd(receive_pd());
}

RcQp::~RcQp() {
  config_.shard->dma().Forget(&requester_side_);
  config_.shard->dma().Forget(&responder_side_);
}

transport::RcRequesterConfig RcQp::RequesterConfig() const {
  return {.pmtu = Pmtu{static_cast<uint8_t>(attr_.path_mtu)},
          .first_psn = Psn(attr_.sq_psn),
          .timeout = attr_.timeout,
          .retry_cnt = attr_.retry_cnt,
          .rnr_retry = attr_.rnr_retry,
          .max_rd_atomic = attr_.max_rd_atomic};
}

transport::RcResponderConfig RcQp::ResponderConfig() const {
  return {.pmtu = Pmtu{static_cast<uint8_t>(attr_.path_mtu)},
          .expected_psn = Psn(attr_.rq_psn),
          .max_dest_rd_atomic = attr_.max_dest_rd_atomic,
          .min_rnr_timer = attr_.min_rnr_timer,
          .access_flags = attr_.access_flags,
          .service = is_xrc() ? Service::kXrc : Service::kRc};
}

void RcQp::OnTransition(QpState from, QpState to) {
  if (from == QpState::kInit && to == QpState::kRtr) {
    responder_.Start(ResponderConfig());
  } else if (from == QpState::kRtr && to == QpState::kRts) {
    requester_.Start(RequesterConfig());
    responder_.Reconfigure(ResponderConfig());
  } else if (to != QpState::kInit) {
    requester_.Reconfigure(RequesterConfig());
    responder_.Reconfigure(ResponderConfig());
    if (from == QpState::kRts && to == QpState::kSqd) {
      requester_.Drain();
    } else if (from == QpState::kSqd && to == QpState::kRts) {
      requester_.Resume();
    }
  }
}

void RcQp::ResetMachines() {
  config_.shard->dma().Forget(&requester_side_);
  config_.shard->dma().Forget(&responder_side_);
  requester_.Reset();
  responder_.Reset();
}

void RcQp::OnMigration() {
  requester_.Reconfigure(RequesterConfig());
  requester_.set_alternate_armed(attr_.path_mig_state == kMigArmed);
}

void RcQp::FlushMachines() {
  requester_.Flush();
  responder_.Flush();
}

Qp::Progress RcQp::progress() const {
  return {.sq_psn = requester_.next_psn(),
          .rq_psn = responder_.expected_psn(),
          .una_psn = requester_.una_psn(),
          .outstanding = requester_.outstanding(),
          .msn = responder_.msn()};
}

DropReason RcQp::HandlePacket(const PacketView& packet, Time now) {
  if (!receives()) return DropReason::qp_not_ready;
  const transport::OpcodeTraits& traits = packet.traits();
  // Reserved codes belong to the transport of their upper three bits.
  const bool is_ours = traits.is_reserved()
                           ? (static_cast<uint8_t>(packet.opcode()) & 0xe0) == OpcodeBase()
                           : traits.service == (is_xrc() ? Service::kXrc : Service::kRc);
  // Each half of an XRC connection is a QP of its own.
  const bool is_response = traits.is_response();
  if (!is_ours || config_.type == (is_response ? QpType::kXrcRecv : QpType::kXrcSend)) {
    return DropReason::wrong_transport;
  }
  if (!PkeyMatches(packet.bth().pkey, transport::kDefaultPkey)) return DropReason::pkey_mismatch;
  if (!IsFromPeer(packet)) return DropReason::wrong_source;
  if (traits.is_reserved()) {
    responder_.HandleReservedOpcode(packet.psn(), now);
  } else if (is_response) {
    if (state_ == QpState::kRtr) return DropReason::qp_not_ready;
    requester_.HandleResponse(packet, now);
  } else {
    responder_.HandleRequest(packet, now);
  }
  return DropReason::count;
}

bool RcQp::XrcPort::Select(transport::SrqNumber number) {
  srq_ = qp_.config_.xrc_domain->Find(number);
  if (srq_ == nullptr) return false;
  qp_.responder_memory_.set_pd(srq_->config().pd);
  return true;
}

// Nothing is flushed: what is posted stays for others.
bool RcQp::XrcPort::Take(transport::RecvRequest* request) {
  if (qp_.state_ == QpState::kErr || srq_ == nullptr || !srq_->Take(request)) return false;
  request->srq = transport::SrqNumber(srq_->config().number);
  srq_->Publish();
  return true;
}

// The CQ is that of the SRQ, which may be another process's, and gone. One that
// is full ends the QP, as it does where the CQ is the QP's own.
void RcQp::CompleteXrc(const Completion& completion, Time now) {
  SharedReceiveQueue* srq = config_.xrc_domain->Find(completion.srq);
  if (srq == nullptr) return;
  CompletionQueue& cq = *srq->config().cq;
  const CqeOrigin origin{.qpn = qpn_.value(),
                         .qp_slot = static_cast<uint16_t>(srq->config().slot),
                         .qp_generation = srq->config().generation,
                         .src_qpn = attr_.dest_qpn,
                         .of_xrc_srq = true};
  const bool was_in_error = cq.in_error();
  if (!was_in_error && WriteCqe(cq, completion, origin, now)) return;
  if (!was_in_error) srq->config().sink->OnCqOverrun(cq);
  if (state_ == QpState::kErr) return;
  MoveToError();
  config_.sink->OnQpEvent(*this, AsyncEventType::kQpFatal);
}

PdId RcQp::PayloadPd(const transport::TxPacket& packet) const {
  if (config_.type != QpType::kXrcRecv) return config_.pd;
  const SharedReceiveQueue* srq = config_.xrc_domain->Find(packet.srq);
  return srq != nullptr ? srq->config().pd : 0;
}

void RcQp::HandleTimeout(Time now) {
  if (sends()) requester_.HandleTimeout(now);
}

void RcQp::DrainOutputs(Time now) {
  Completion completion;
  while (responder_.PollCompletion(&completion)) {
    if (is_xrc()) {
      CompleteXrc(completion, now);
    } else {
      Complete(*config_.recv_cq, completion, now);
    }
  }
  while (requester_.PollCompletion(&completion)) Complete(*config_.send_cq, completion, now);
  AsyncEventType event;
  while (responder_.PollEvent(&event)) {
    // COMM_EST tells that the peer was faster than our RTR→RTS.
    if (event == AsyncEventType::kCommEst && state_ != QpState::kRtr) continue;
    config_.sink->OnQpEvent(*this, event);
  }
}

uint32_t RcQp::Service(Time now, uint32_t budget) {
  if (requester_.TakeMigration() && attr_.path_mig_state == kMigArmed) Migrate();
  CheckSrq();
  DrainOutputs(now);
  uint32_t fetched = 0;
  if (sends()) {
    FetchedSend send;
    while (fetched < budget && requester_.CanPost() && FetchSend(&send)) {
      requester_.Post(send.request, now);
      ++fetched;
    }
    if (fetched != 0) sq_.Publish();
  }
  if (wants_error()) MoveToError();
  DrainOutputs(now);
  ReportDrained();
  ReportLastWqe();
  return fetched;
}

bool RcQp::PollTransmit(Time now, transport::TxPacket* packet, bool* response) {
  // Responses first: the peer's window waits for them. In ERR the NAK that
  // ended the connection still goes out.
  *response = true;
  bool polled = (receives() || state_ == QpState::kErr) && responder_.PollTransmit(now, packet);
  if (!polled) {
    *response = false;
    polled = (state_ == QpState::kRts || state_ == QpState::kSqd) &&
             requester_.PollTransmit(now, packet);
  }
  if (polled && is_xrc()) {
    packet->opcode =
        static_cast<transport::Opcode>(static_cast<uint8_t>(packet->opcode) | OpcodeBase());
  }
  return polled;
}

void RcQp::HandleFetchFailed(Psn psn, bool response, MemoryStatus why, Time now) {
  if (response) {
    responder_.HandleFetchFailed(psn, why, now);
  } else {
    requester_.HandleFetchFailed(psn, why, now);
  }
  config_.shard->MarkReady(*this);
}

}  // namespace verbena::nic
