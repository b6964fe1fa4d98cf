// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/qp/ud_qp.h"

#include <utility>

#include "nic_sim/engine/shard.h"

namespace verbena::nic {

using transport::Completion;
using transport::MemoryStatus;
using transport::PacketView;
using transport::Psn;
using transport::Qkey;
using transport::Qpn;
using transport::QpState;
using transport::Ticket;
using transport::Time;
using Verdict = transport::UdReceiver::Verdict;

void UdQp::ReceiverSide::OnPlaced(Ticket ticket) {
  qp_.receiver_.HandleCommitted(ticket);
  qp_.config_.shard->MarkReady(qp_);
}
void UdQp::ReceiverSide::OnPlaceFailed(Ticket ticket) {
  qp_.receiver_.HandlePlacementFailed(ticket);
  qp_.config_.shard->MarkReady(qp_);
}

UdQp::UdQp(const Config& config)
    : Qp(config),
      receiver_side_(*this),
      memory_(config.share->regions, config.shard->dma(), config.pd, &receiver_side_),
      receiver_(memory_, receive_queue()) {
  memory_.set_receive_pd(receive_pd());
}

UdQp::~UdQp() { config_.shard->dma().Forget(&receiver_side_); }

void UdQp::OnTransition(QpState from, QpState to) {
  const Qkey qkey(attr_.qkey);
  if (from == QpState::kInit && to == QpState::kRtr) receiver_.Start(qkey);
  if (from == QpState::kRtr && to == QpState::kRts) {
    sender_.Start({.first_psn = Psn(attr_.sq_psn), .qkey = qkey});
  }
  if (from == QpState::kSqe) sender_.Resume();
  receiver_.set_qkey(qkey);
  sender_.set_qkey(qkey);
}

void UdQp::ResetMachines() {
  config_.shard->dma().Forget(&receiver_side_);
  sender_.Reset();
  receiver_.Reset();
}

void UdQp::FlushMachines() {
  sender_.Flush();
  receiver_.Flush();
}

Qp::Progress UdQp::progress() const {
  Progress progress;
  progress.sq_psn = progress.una_psn = sender_.next_psn();
  return progress;
}

DropReason UdQp::HandlePacket(const PacketView& packet, Time) {
  if (!receives()) return DropReason::qp_not_ready;
  if (!PkeyMatches(packet.bth().pkey, transport::kDefaultPkey)) return DropReason::pkey_mismatch;
  switch (receiver_.HandlePacket(packet)) {
    case Verdict::kNotUd:
      return DropReason::wrong_transport;
    case Verdict::kWrongQkey:
      return DropReason::qkey_mismatch;
    case Verdict::kNoReceive:
      return DropReason::no_receive;
    case Verdict::kTooLong:
      return DropReason::receive_too_small;
    case Verdict::kAccepted:
      break;
  }
  return DropReason::count;
}

void UdQp::DrainOutputs(Time now) {
  Completion completion;
  while (receiver_.PollCompletion(&completion)) Complete(*config_.recv_cq, completion, now);
  while (sender_.PollCompletion(&completion)) Complete(*config_.send_cq, completion, now);
}

uint32_t UdQp::Service(Time now, uint32_t budget) {
  CheckSrq();
  DrainOutputs(now);
  if (state_ == QpState::kRts && sender_.failed()) SetState(QpState::kSqe);
  if (state_ != QpState::kErr && receiver_.failed()) MoveToError();
  uint32_t flushed = 0;
  transport::TxPacket none;
  while (flushes_sends() && flushed < budget && sender_.CanSend() && FetchSend(&current_)) {
    sender_.Send(current_.request, /*has_path=*/false, &none);
    ++flushed;
  }
  if (flushed != 0) sq_.Publish();
  DrainOutputs(now);
  ReportDrained();
  ReportLastWqe();
  return flushed + std::exchange(fetched_, 0);
}

bool UdQp::PollTransmit(Time, transport::TxPacket* packet, bool* response) {
  *response = false;
  if (state_ != QpState::kRts || sender_.failed()) return false;
  if (!sender_.CanSend() || !FetchSend(&current_)) return false;
  sq_.Publish();
  ++fetched_;
  const transport::SendRequest& request = current_.request;
  const AddressHandle* ah = config_.sink->FindAh(request.ah);
  const bool has_path = ah != nullptr && ah->pd == config_.pd;
  // Only a failure has no packet, and it ends sending.
  if (!sender_.Send(request, has_path, packet)) return false;
  path_ = ah->path;
  path_.set_udp_source_port(transport::UdUdpSourcePort(qpn_, ah->flow_label));
  return true;
}

void UdQp::HandleFetched(Psn psn) {
  sender_.HandleFetched(psn);
  config_.shard->MarkReady(*this);
}

void UdQp::HandleFetchFailed(Psn psn, bool, MemoryStatus, Time) {
  sender_.HandleFetchFailed(psn);
  config_.shard->MarkReady(*this);
}

}  // namespace verbena::nic
