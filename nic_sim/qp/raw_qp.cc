// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/qp/raw_qp.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "nic_sim/engine/shard.h"
#include "nic_sim/fabric/packet.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using transport::Completion;
using transport::Duration;
using transport::MemoryStatus;
using transport::Psn;
using transport::QpState;
using transport::Ticket;
using transport::Time;
using transport::WcStatus;
using transport::WrOpcode;
using Verdict = transport::UdReceiver::Verdict;

namespace {

// Nothing that is shorter than its header leaves a NIC.
void Check(transport::SendRequest* request) {
  if (request->malformed != WcStatus::kSuccess) return;
  size_t bytes = request->inline_data.size();
  for (const transport::MemorySegment& sge : request->sges) bytes += sge.length;
  if (request->opcode != WrOpcode::kSend) request->malformed = WcStatus::kLocQpOpErr;
  if (bytes < transport::EthernetHeader::kBytes) request->malformed = WcStatus::kLocLenErr;
}

// How long so many bytes take.
Duration TimeOf(uint64_t bytes, uint32_t kbps) {
  return Duration::Nanoseconds(static_cast<int64_t>(bytes * 8 * 1'000'000 / kbps));
}

}  // namespace

void RawQp::ReceiverSide::OnPlaced(Ticket ticket) {
  qp_.receiver_.HandleCommitted(ticket);
  qp_.config_.shard->MarkReady(qp_);
}
void RawQp::ReceiverSide::OnPlaceFailed(Ticket ticket) {
  qp_.receiver_.HandlePlacementFailed(ticket);
  qp_.config_.shard->MarkReady(qp_);
}

RawQp::RawQp(const Config& config)
    : Qp(config),
      receiver_side_(*this),
      memory_(config.share->regions, config.shard->dma(), config.pd, &receiver_side_),
      receiver_(memory_, receive_queue()) {
  memory_.set_receive_pd(receive_pd());
}

RawQp::~RawQp() { config_.shard->dma().Forget(&receiver_side_); }

void RawQp::OnTransition(QpState from, QpState to) {
  if (from == QpState::kInit && to == QpState::kRtr) receiver_.Start(transport::Qkey());
  if (from == QpState::kRtr && to == QpState::kRts) {
    sender_.Start(
        {.first_psn = Psn(), .qkey = transport::Qkey(), .max_payload_bytes = kMaxRawFrameBytes});
  }
}

int RawQp::LimitRate(uint32_t kbps, uint32_t burst_bytes) {
  if (state_ != QpState::kRts) return EINVAL;
  rate_kbps_ = kbps;
  attr_.rate_limit = kbps;
  burst_ = kbps == 0 ? Duration::Zero() : TimeOf(std::max(burst_bytes, kMaxRawFrameBytes), kbps);
  next_send_ = config_.shard->now();
  config_.shard->MarkReady(*this);
  return 0;
}

void RawQp::ResetMachines() {
  rate_kbps_ = 0;
  config_.shard->dma().Forget(&receiver_side_);
  sender_.Reset();
  receiver_.Reset();
}

void RawQp::FlushMachines() {
  sender_.Flush();
  receiver_.Flush();
}

DropReason RawQp::HandleFrame(std::span<const std::byte> frame, uint32_t flow_tag) {
  if (!receives()) return DropReason::qp_not_ready;
  switch (receiver_.HandleFrame(frame, flow_tag)) {
    case Verdict::kTooLong:
      return DropReason::receive_too_small;
    case Verdict::kAccepted:
      return DropReason::count;
    default:
      return DropReason::no_receive;
  }
}

void RawQp::DrainOutputs(Time now) {
  Completion completion;
  while (receiver_.PollCompletion(&completion)) Complete(*config_.recv_cq, completion, now);
  while (sender_.PollCompletion(&completion)) Complete(*config_.send_cq, completion, now);
}

uint32_t RawQp::Service(Time now, uint32_t budget) {
  CheckSrq();
  DrainOutputs(now);
  if (wants_error()) MoveToError();
  uint32_t flushed = 0;
  transport::TxPacket none;
  while (state_ == QpState::kErr && flushed < budget && sender_.CanSend() && FetchSend(&current_)) {
    sender_.Send(current_.request, /*has_path=*/false, &none);
    ++flushed;
  }
  if (flushed != 0) sq_.Publish();
  DrainOutputs(now);
  ReportDrained();
  ReportLastWqe();
  return flushed + std::exchange(fetched_, 0);
}

bool RawQp::PollTransmit(Time now, transport::TxPacket* packet, bool* response) {
  *response = false;
  if (state_ != QpState::kRts || sender_.failed()) return false;
  due_ = false;
  if (rate_kbps_ != 0 && now < next_send_) return false;
  if (!sender_.CanSend() || !FetchSend(&current_)) return false;
  sq_.Publish();
  ++fetched_;
  Check(&current_.request);
  // Only a failure has no packet, and it ends sending.
  if (!sender_.Send(current_.request, /*has_path=*/true, packet)) return false;
  if (rate_kbps_ != 0) {
    next_send_ = std::max(next_send_, now - burst_) + TimeOf(packet->payload_bytes, rate_kbps_);
  }
  return true;
}

void RawQp::HandleFetched(Psn psn) {
  sender_.HandleFetched(psn);
  config_.shard->MarkReady(*this);
}

void RawQp::HandleFetchFailed(Psn psn, bool, MemoryStatus, Time) {
  sender_.HandleFetchFailed(psn);
  config_.shard->MarkReady(*this);
}

}  // namespace verbena::nic
