// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/qp/qp.h"

#include <cerrno>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/engine/engine.h"

namespace verbena::nic {

using transport::AsyncEventType;
using transport::Completion;
using transport::Gid;
using transport::MemoryStatus;
using transport::PacketView;
using transport::Pmtu;
using transport::Psn;
using transport::Qpn;
using transport::QpState;
using transport::Ticket;
using transport::Time;

namespace {

// Two P_Keys match when their low 15 bits do and one is a full member.
bool PkeyMatches(transport::Pkey a, transport::Pkey b) {
  const uint16_t both = a.value() ^ b.value();
  return (both & 0x7fff) == 0 && ((a.value() | b.value()) & 0x8000) != 0;
}

Gid GidOf(const abi::AhAttr& ah) { return Gid::Load(reinterpret_cast<const std::byte*>(ah.dgid)); }

}  // namespace

void Qp::RequesterSide::OnPlaced(Ticket ticket) {
  qp_.requester_.HandleCommitted(ticket, qp_.config_.engine->now());
  qp_.config_.engine->MarkReady(qp_);
}
void Qp::RequesterSide::OnAtomic(Ticket, uint64_t) {}  // requesters place, they do not execute
void Qp::RequesterSide::OnPlaceFailed(Ticket ticket) {
  qp_.requester_.HandlePlacementFailed(ticket, MemoryStatus::kFault, qp_.config_.engine->now());
  qp_.config_.engine->MarkReady(qp_);
}
void Qp::ResponderSide::OnPlaced(Ticket ticket) {
  qp_.responder_.HandleCommitted(ticket, qp_.config_.engine->now());
  qp_.config_.engine->MarkReady(qp_);
}
void Qp::ResponderSide::OnAtomic(Ticket ticket, uint64_t original) {
  qp_.responder_.HandleAtomicCommitted(ticket, original, qp_.config_.engine->now());
  qp_.config_.engine->MarkReady(qp_);
}
void Qp::ResponderSide::OnPlaceFailed(Ticket ticket) {
  qp_.responder_.HandlePlacementFailed(ticket, MemoryStatus::kFault, qp_.config_.engine->now());
  qp_.config_.engine->MarkReady(qp_);
}

Qp::Qp(const Config& config)
    : config_(config),
      sq_(config.sq_ring, config.record,
          {.max_sge = config.caps.max_send_sge,
           .max_inline = config.caps.max_inline,
           .signal_all = config.signal_all}),
      rq_(config.rq_ring, config.record, config.caps.max_recv_sge),
      requester_side_(*this),
      responder_side_(*this),
      requester_memory_(config.nic->regions(), config.engine->dma(), config.pd, &requester_side_),
      responder_memory_(config.nic->regions(), config.engine->dma(), config.pd, &responder_side_),
      requester_({.max_wr = config.caps.max_send_wr,
                  .max_sge = config.caps.max_send_sge,
                  .max_inline = config.caps.max_inline},
                 requester_memory_),
      responder_(responder_memory_, rq_) {
  ++config_.send_cq->qp_references;
  ++config_.recv_cq->qp_references;
  ResetQueues();
  SetState(QpState::kReset);
}

Qp::~Qp() {
  config_.engine->dma().Forget(&requester_side_);
  config_.engine->dma().Forget(&responder_side_);
  --config_.send_cq->qp_references;
  --config_.recv_cq->qp_references;
}

void Qp::SetState(QpState state) {
  state_ = state;
  config_.record->state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

void Qp::ResetQueues() {
  sq_.Reset();
  rq_.Reset();
}

// --- Control commands ---

int Qp::CheckPath(const abi::AhAttr& ah) const {
  const auto& gids = nic().gids();
  if (ah.is_global == 0 || ah.port_num != 1) return EINVAL;  // RoCE needs a GRH
  if (ah.sgid_index >= gids.size() || gids[ah.sgid_index].IsZero()) return EINVAL;
  const Gid dgid = GidOf(ah);
  if (dgid.IsZero() || dgid.IsMulticast()) return EINVAL;
  if (dgid.IsV4Mapped() != gids[ah.sgid_index].IsV4Mapped()) return EINVAL;
  if (config_.engine->fabric().Resolve(dgid) == nullptr) return EHOSTUNREACH;
  return 0;
}

int Qp::CheckValues(const abi::QpAttr& attr, uint32_t mask) const {
  using namespace transport;  // QpAttrMask bits
  const auto has = [mask](uint32_t bit) { return (mask & bit) != 0; };
  const abi::DeviceAttributes& limits = nic().attributes();
  constexpr uint32_t kAccess = kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead |
                               kAccessRemoteAtomic | kAccessMwBind;
  if (has(kQpAttrPkeyIndex) && attr.pkey_index >= limits.max_pkeys) return EINVAL;
  if (has(kQpAttrPort) && attr.port_num != 1) return EINVAL;
  if (has(kQpAttrAccessFlags) && (attr.access_flags & ~kAccess) != 0) return EINVAL;
  if (has(kQpAttrPathMtu) && !IsValid(Pmtu{static_cast<uint8_t>(attr.path_mtu)})) return EINVAL;
  if (has(kQpAttrPathMtu) && attr.path_mtu > 255) return EINVAL;
  if (has(kQpAttrTimeout) && attr.timeout > 31) return EINVAL;
  if (has(kQpAttrRetryCnt) && attr.retry_cnt > 7) return EINVAL;
  if (has(kQpAttrRnrRetry) && attr.rnr_retry > 7) return EINVAL;
  if (has(kQpAttrMinRnrTimer) && attr.min_rnr_timer > 31) return EINVAL;
  if (has(kQpAttrMaxQpRdAtomic) && attr.max_rd_atomic > limits.max_qp_init_rd_atom) return EINVAL;
  if (has(kQpAttrMaxDestRdAtomic) && attr.max_dest_rd_atomic > limits.max_qp_rd_atom) {
    return EINVAL;
  }
  if (has(kQpAttrDestQpn) && attr.dest_qpn > Psn::kMask) return EINVAL;
  if (has(kQpAttrAltPath)) return EOPNOTSUPP;  // automatic path migration
  if (has(kQpAttrAv)) return CheckPath(attr.ah);
  return 0;
}

void Qp::CopyAttributes(const abi::QpAttr& attr, uint32_t mask) {
  using namespace transport;
  const auto has = [mask](uint32_t bit) { return (mask & bit) != 0; };
  if (has(kQpAttrEnSqdAsyncNotify)) attr_.en_sqd_async_notify = attr.en_sqd_async_notify;
  if (has(kQpAttrAccessFlags)) attr_.access_flags = attr.access_flags;
  if (has(kQpAttrPkeyIndex)) attr_.pkey_index = attr.pkey_index;
  if (has(kQpAttrPort)) attr_.port_num = attr.port_num;
  if (has(kQpAttrQkey)) attr_.qkey = attr.qkey;
  if (has(kQpAttrAv)) attr_.ah = attr.ah;
  if (has(kQpAttrPathMtu)) attr_.path_mtu = attr.path_mtu;
  if (has(kQpAttrTimeout)) attr_.timeout = attr.timeout;
  if (has(kQpAttrRetryCnt)) attr_.retry_cnt = attr.retry_cnt;
  if (has(kQpAttrRnrRetry)) attr_.rnr_retry = attr.rnr_retry;
  if (has(kQpAttrRqPsn)) attr_.rq_psn = attr.rq_psn & Psn::kMask;
  if (has(kQpAttrMaxQpRdAtomic)) attr_.max_rd_atomic = attr.max_rd_atomic;
  if (has(kQpAttrMinRnrTimer)) attr_.min_rnr_timer = attr.min_rnr_timer;
  if (has(kQpAttrSqPsn)) attr_.sq_psn = attr.sq_psn & Psn::kMask;
  if (has(kQpAttrMaxDestRdAtomic)) attr_.max_dest_rd_atomic = attr.max_dest_rd_atomic;
  if (has(kQpAttrDestQpn)) attr_.dest_qpn = attr.dest_qpn;
}

void Qp::BuildPath() {
  const Gid source = nic().gids()[attr_.ah.sgid_index];
  peer_gid_ = GidOf(attr_.ah);
  transport::PacketAddress address;
  address.source_mac = nic().config().mac;
  if (const auto* mac = config_.engine->fabric().Resolve(peer_gid_)) {
    address.destination_mac = *mac;
  }
  address.is_ipv6 = !source.IsV4Mapped();
  address.source_gid = source;
  address.destination_gid = peer_gid_;
  address.traffic_class = attr_.ah.traffic_class;
  if (attr_.ah.hop_limit != 0) address.hop_limit = attr_.ah.hop_limit;
  address.flow_label = attr_.ah.flow_label & 0xfffff;
  address.udp_source_port =
      transport::RoceUdpSourcePort(address.flow_label, qpn_, Qpn(attr_.dest_qpn));
  path_ = transport::PacketTemplate(address);
}

transport::RcRequesterConfig Qp::RequesterConfig() const {
  return {.pmtu = Pmtu{static_cast<uint8_t>(attr_.path_mtu)},
          .first_psn = Psn(attr_.sq_psn),
          .timeout = attr_.timeout,
          .retry_cnt = attr_.retry_cnt,
          .rnr_retry = attr_.rnr_retry,
          .max_rd_atomic = attr_.max_rd_atomic};
}

transport::RcResponderConfig Qp::ResponderConfig() const {
  return {.pmtu = Pmtu{static_cast<uint8_t>(attr_.path_mtu)},
          .expected_psn = Psn(attr_.rq_psn),
          .max_dest_rd_atomic = attr_.max_dest_rd_atomic,
          .min_rnr_timer = attr_.min_rnr_timer,
          .access_flags = attr_.access_flags};
}

int Qp::Modify(const abi::QpAttr& attr, uint32_t mask, uint32_t new_generation) {
  using namespace transport;
  if ((mask & kQpAttrCurState) != 0 && attr.cur_state != static_cast<uint32_t>(state_)) {
    return EINVAL;
  }
  if ((mask & kQpAttrState) != 0 && attr.state > static_cast<uint32_t>(QpState::kErr)) {
    return EINVAL;
  }
  const QpState to =
      (mask & kQpAttrState) != 0 ? QpState{static_cast<uint8_t>(attr.state)} : state_;
  if (!IsModifyAllowed(config_.type, state_, to, mask)) return EINVAL;
  if (const int error = CheckValues(attr, mask); error != 0) return error;

  const QpState from = state_;
  CopyAttributes(attr, mask);
  if ((mask & kQpAttrAv) != 0) BuildPath();
  Engine& engine = *config_.engine;
  if (to == QpState::kReset) {
    engine.dma().Forget(&requester_side_);
    engine.dma().Forget(&responder_side_);
    requester_.Reset();
    responder_.Reset();
    ResetQueues();
    attr_ = {};
    config_.generation = new_generation;
  } else if (to == QpState::kErr) {
    MoveToError();
    return 0;
  } else if (from == QpState::kInit && to == QpState::kRtr) {
    responder_.Start(ResponderConfig());
  } else if (from == QpState::kRtr && to == QpState::kRts) {
    requester_.Start(RequesterConfig());
    responder_.Reconfigure(ResponderConfig());
  } else if (to != QpState::kInit) {
    requester_.Reconfigure(RequesterConfig());
    responder_.Reconfigure(ResponderConfig());
    if (from == QpState::kRts && to == QpState::kSqd) {
      requester_.Drain();
      drained_reported_ = false;
    } else if (from == QpState::kSqd && to == QpState::kRts) {
      requester_.Resume();
    }
  }
  SetState(to);
  engine.MarkReady(*this);
  return 0;
}

abi::QpAttr Qp::Query() const {
  abi::QpAttr attr = attr_;
  attr.state = attr.cur_state = static_cast<uint32_t>(state_);
  attr.sq_draining = state_ == QpState::kSqd && !requester_.drained();
  return attr;
}

// --- Engine steps ---

DropReason Qp::HandlePacket(const PacketView& packet, Time now) {
  if (!receives()) return DropReason::qp_not_ready;
  const transport::OpcodeTraits& traits = packet.traits();
  if (traits.service != transport::Service::kRc) return DropReason::wrong_transport;
  if (!PkeyMatches(packet.bth().pkey, transport::kDefaultPkey)) return DropReason::pkey_mismatch;
  if (packet.source_gid() != peer_gid_) return DropReason::wrong_source;
  if (traits.is_response()) {
    if (state_ == QpState::kRtr) return DropReason::qp_not_ready;
    requester_.HandleResponse(packet, now);
  } else {
    responder_.HandleRequest(packet, now);
  }
  return DropReason::count;
}

void Qp::HandleTimeout(Time now) {
  if (sends()) requester_.HandleTimeout(now);
}

void Qp::Complete(CompletionQueue& cq, const Completion& completion, Time now) {
  if (cq.in_error()) return;
  const CqeOrigin origin{.qpn = qpn_.value(),
                         .qp_slot = static_cast<uint16_t>(config_.slot),
                         .qp_generation = config_.generation,
                         .src_qpn = attr_.dest_qpn};
  if (cq.Write(completion, origin, static_cast<uint64_t>(now.ns()))) {
    config_.engine->MarkDirty(cq);
  } else {
    config_.sink->OnCqOverrun(cq);
  }
}

void Qp::DrainOutputs(Time now) {
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

uint32_t Qp::Service(Time now, uint32_t budget) {
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
  if (state_ == QpState::kSqd && !drained_reported_ && requester_.drained()) {
    drained_reported_ = true;
    if (attr_.en_sqd_async_notify != 0) {
      config_.sink->OnQpEvent(*this, AsyncEventType::kSqDrained);
    }
  }
  return fetched;
}

bool Qp::PollTransmit(Time now, transport::TxPacket* packet, bool* response) {
  // Responses first: the peer's window waits for them. In ERR the NAK that
  // ended the connection still goes out.
  *response = true;
  if ((receives() || state_ == QpState::kErr) && responder_.PollTransmit(now, packet)) return true;
  *response = false;
  return (state_ == QpState::kRts || state_ == QpState::kSqd) &&
         requester_.PollTransmit(now, packet);
}

void Qp::HandleFetchFailed(Psn psn, bool response, MemoryStatus why, Time now) {
  if (response) {
    responder_.HandleFetchFailed(psn, why, now);
  } else {
    requester_.HandleFetchFailed(psn, why, now);
  }
  config_.engine->MarkReady(*this);
}

void Qp::MoveToError() {
  if (state_ == QpState::kErr) return;
  // Shown before the RQ is emptied: what is posted later rings the doorbell.
  SetState(QpState::kErr);
  abi::FullFence();
  requester_.Flush();
  responder_.Flush();
  config_.engine->MarkReady(*this);
}

}  // namespace verbena::nic
