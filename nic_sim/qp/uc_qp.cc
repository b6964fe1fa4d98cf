// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/qp/uc_qp.h"

#include <utility>

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
using Verdict = transport::UcResponder::Verdict;

void UcQp::ResponderSide::OnPlaced(Ticket ticket) {
  qp_.responder_.HandleCommitted(ticket);
  qp_.config_.shard->MarkReady(qp_);
}
void UcQp::ResponderSide::OnPlaceFailed(Ticket ticket) {
  qp_.responder_.HandlePlacementFailed(ticket);
  qp_.config_.shard->MarkReady(qp_);
}

UcQp::UcQp(const Config& config)
    : Qp(config),
      responder_side_(*this),
      memory_(config.share->regions, config.shard->dma(), config.pd, &responder_side_, &qpn_),
      requester_(memory_),
      responder_(memory_, receive_queue()) {
  memory_.set_receive_pd(receive_pd());
}

UcQp::~UcQp() { config_.shard->dma().Forget(&responder_side_); }

void UcQp::OnTransition(QpState from, QpState to) {
  const Pmtu pmtu{static_cast<uint8_t>(attr_.path_mtu)};
  if (from == QpState::kInit && to == QpState::kRtr) {
    responder_.Start(
        {.pmtu = pmtu, .expected_psn = Psn(attr_.rq_psn), .access_flags = attr_.access_flags});
  }
  if (from == QpState::kRtr && to == QpState::kRts) {
    requester_.Start({.pmtu = pmtu, .first_psn = Psn(attr_.sq_psn)});
  }
  if (from == QpState::kSqe) requester_.Resume();
  responder_.set_access_flags(attr_.access_flags);
}

void UcQp::ResetMachines() {
  config_.shard->dma().Forget(&responder_side_);
  requester_.Reset();
  responder_.Reset();
}

void UcQp::FlushMachines() {
  requester_.Flush();
  responder_.Flush();
}

Qp::Progress UcQp::progress() const {
  Progress progress;
  progress.sq_psn = progress.una_psn = requester_.next_psn();
  progress.rq_psn = responder_.expected_psn();
  progress.outstanding = requester_.outstanding();
  return progress;
}

DropReason UcQp::HandlePacket(const PacketView& packet, Time) {
  if (!receives()) return DropReason::qp_not_ready;
  if (packet.traits().service != transport::Service::kUc) return DropReason::wrong_transport;
  if (!PkeyMatches(packet.bth().pkey, transport::kDefaultPkey)) return DropReason::pkey_mismatch;
  if (!IsFromPeer(packet)) return DropReason::wrong_source;
  switch (responder_.HandleRequest(packet)) {
    case Verdict::kNoReceive:
      config_.shard->MarkReady(*this);  // it may have been a bad one
      return DropReason::no_receive;
    case Verdict::kReceiveTooSmall:
      config_.shard->MarkReady(*this);
      return DropReason::receive_too_small;
    default:
      break;
  }
  return DropReason::count;
}

void UcQp::DrainOutputs(Time now) {
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

uint32_t UcQp::Service(Time now, uint32_t budget) {
  CheckSrq();
  DrainOutputs(now);
  const bool sends = state_ == QpState::kRts || state_ == QpState::kSqd;
  if (sends && requester_.failed()) SetState(QpState::kSqe);
  if (state_ != QpState::kErr && responder_.failed()) MoveToError();
  uint32_t flushed = 0;
  while (flushes_sends() && flushed < budget && requester_.CanPost() && FetchSend(&current_)) {
    requester_.Post(current_.request);
    ++flushed;
  }
  if (flushed != 0) sq_.Publish();
  DrainOutputs(now);
  ReportDrained();
  ReportLastWqe();
  return flushed + std::exchange(fetched_, 0);
}

bool UcQp::PollTransmit(Time, transport::TxPacket* packet, bool* response) {
  *response = false;
  for (;;) {
    const bool sends = state_ == QpState::kRts || state_ == QpState::kSqd;
    if (!sends || requester_.failed()) return false;
    if (requester_.PollTransmit(packet)) return true;
    // In SQD what was begun is finished, nothing new begins.
    if (state_ != QpState::kRts || !requester_.CanPost() || !FetchSend(&current_)) return false;
    sq_.Publish();
    ++fetched_;
    requester_.Post(current_.request);
    // Of a local operation no packet tells.
    if (requester_.has_completion()) config_.shard->MarkReady(*this);
  }
}

void UcQp::HandleFetched(Psn psn) {
  requester_.HandleFetched(psn);
  config_.shard->MarkReady(*this);
}

void UcQp::HandleFetchFailed(Psn psn, bool, MemoryStatus, Time) {
  requester_.HandleFetchFailed(psn);
  config_.shard->MarkReady(*this);
}

}  // namespace verbena::nic
