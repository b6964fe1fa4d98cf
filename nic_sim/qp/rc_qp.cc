// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/qp/rc_qp.h"

#include "nic_sim/engine/shard.h"

namespace verbena::nic {

using transport::AsyncEventType;
using transport::Completion;
using transport::MemoryStatus;
using transport::PacketView;
using transport::Pmtu;
using transport::Psn;
using transport::QpState;
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
      requester_({.max_wr = config.caps.max_send_wr,
                  .max_sge = config.caps.max_send_sge,
                  .max_inline = config.caps.max_inline},
                 requester_memory_),
      responder_(responder_memory_, receive_queue()) {
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
          .access_flags = attr_.access_flags};
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
  // Reserved codes belong to the transport of their upper three bits: 0 is RC.
  const bool is_rc = traits.is_reserved() ? static_cast<uint8_t>(packet.opcode()) < 0x20
                                          : traits.service == transport::Service::kRc;
  if (!is_rc) return DropReason::wrong_transport;
  if (!PkeyMatches(packet.bth().pkey, transport::kDefaultPkey)) return DropReason::pkey_mismatch;
  if (packet.source_gid() != peer_gid_) return DropReason::wrong_source;
  if (traits.is_reserved()) {
    responder_.HandleReservedOpcode(packet.psn(), now);
  } else if (traits.is_response()) {
    if (state_ == QpState::kRtr) return DropReason::qp_not_ready;
    requester_.HandleResponse(packet, now);
  } else {
    responder_.HandleRequest(packet, now);
  }
  return DropReason::count;
}

void RcQp::HandleTimeout(Time now) {
  if (sends()) requester_.HandleTimeout(now);
}

void RcQp::DrainOutputs(Time now) {
  Completion completion;
  while (responder_.PollCompletion(&completion)) Complete(*config_.recv_cq, completion, now);
  while (requester_.PollCompletion(&completion)) Complete(*config_.send_cq, completion, now);
  AsyncEventType event;
  while (responder_.PollEvent(&event)) {
    // COMM_EST tells that the peer was faster than our RTR→RTS.
    if (event == AsyncEventType::kCommEst && state_ != QpState::kRtr) continue;
    config_.sink->OnQpEvent(*this, event);
  }
}

uint32_t RcQp::Service(Time now, uint32_t budget) {
  CheckSrq();
  DrainOutputs(now);
  uint32_t fetched = 0;
  if (sends()) {
    FetchedSend send;
    while (fetched < budget && requester_.CanPost() && sq_.Fetch(&send)) {
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
  if ((receives() || state_ == QpState::kErr) && responder_.PollTransmit(now, packet)) return true;
  *response = false;
  return (state_ == QpState::kRts || state_ == QpState::kSqd) &&
         requester_.PollTransmit(now, packet);
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
