// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/qp/qp.h"

#include <cerrno>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/engine/shard.h"
#include "nic_sim/qp/lid.h"
#include "nic_sim/qp/path.h"
#include "nic_sim/qp/raw_qp.h"
#include "nic_sim/qp/rc_qp.h"
#include "nic_sim/qp/uc_qp.h"
#include "nic_sim/qp/ud_qp.h"
#include "nic_sim/trace/failure_signal.h"

namespace verbena::nic {

using transport::AsyncEventType;
using transport::Completion;
using transport::Pmtu;
using transport::Psn;
using transport::Qpn;
using transport::QpState;
using transport::QpType;
using transport::Time;

bool PkeyMatches(transport::Pkey a, transport::Pkey b) {
  const uint16_t both = a.value() ^ b.value();
  return (both & 0x7fff) == 0 && ((a.value() | b.value()) & 0x8000) != 0;
}

std::unique_ptr<Qp> Qp::Create(const Config& config) {
  if (config.type == QpType::kRawPacket) return std::make_unique<RawQp>(config);
  if (config.type == QpType::kUd) return std::make_unique<UdQp>(config);
  if (config.type == QpType::kUc) return std::make_unique<UcQp>(config);
  return std::make_unique<RcQp>(config);
}

Qp::Qp(const Config& config)
    : config_(config),
      sq_(config.sq_ring, config.record,
          {.max_sge = config.caps.max_send_sge,
           .max_inline = config.caps.max_inline,
           .signal_all = config.signal_all,
           .datagrams = config.type == QpType::kUd,
           .xrc = config.type == QpType::kXrcSend}),
      rq_(config.rq_ring, config.record, config.caps.max_recv_sge),
      srq_port_(config.srq) {
  if (config_.send_cq != nullptr) ++config_.send_cq->qp_references;
  if (config_.recv_cq != nullptr) ++config_.recv_cq->qp_references;
  if (config_.srq != nullptr) ++config_.srq->qp_references;
  ResetQueues();
  SetState(QpState::kReset);
}

Qp::~Qp() {
  if (config_.send_cq != nullptr) --config_.send_cq->qp_references;
  if (config_.recv_cq != nullptr) --config_.recv_cq->qp_references;
  if (config_.srq != nullptr) --config_.srq->qp_references;
}

inline void Qp::Trace(const TraceEvent& event) {
  TraceEvent whole = event;
  whole.time_ns = config_.shard->now().ns();
  whole.qpn = qpn_.value();
  whole.port = config_.nic->port();
  config_.shard->trace().Record(whole);
}

void Qp::SetState(QpState state) {
  if (state != state_) {
    Trace({.kind = TraceKind::kState,
           .opcode = static_cast<uint8_t>(state_),
           .code = static_cast<uint8_t>(state)});
  }
  state_ = state;
  config_.record->state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

bool Qp::FetchSend(FetchedSend* send) {
  if (!sq_.Fetch(send)) return false;
  const transport::SendRequest& request = send->request;
  size_t bytes = request.inline_data.size();
  for (const transport::MemorySegment& sge : request.sges) bytes += sge.length;
  Trace({.wr_id = request.wr_id,
         .bytes = static_cast<uint32_t>(bytes),
         .kind = TraceKind::kPosted,
         .code = static_cast<uint8_t>(request.opcode)});
  return true;
}

void Qp::ResetQueues() {
  flushes_all_ = false;
  sq_.Reset();
  rq_.Reset();
}

// --- Control commands ---

int Qp::CheckValues(const abi::QpAttr& attr, uint32_t mask) const {
  using namespace transport;  // QpAttrMask bits
  const auto has = [mask](uint32_t bit) { return (mask & bit) != 0; };
  const abi::DeviceAttributes& limits = nic().attributes();
  // Flags of regions that mean nothing for a QP, which applications give it along
  // with the others: ON_DEMAND, ZERO_BASED, HUGETLB, the optional ones.
  constexpr uint32_t kRegionOnlyRights = kAccessOnDemand | kAccessZeroBased | 1u << 7 | 0x3ff00000u;
  constexpr uint32_t kAccess = kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead |
                               kAccessRemoteAtomic | kAccessMwBind | kAccessFlushGlobal |
                               kRegionOnlyRights;
  if (has(kQpAttrPkeyIndex) && attr.pkey_index >= limits.max_pkeys) return EINVAL;
  if (has(kQpAttrPort) && attr.port_num != 1) return EINVAL;
  if (has(kQpAttrAccessFlags) && (attr.access_flags & ~kAccess) != 0) return EINVAL;
  if (has(kQpAttrPathMtu) && !IsValid(Pmtu{static_cast<uint8_t>(attr.path_mtu)})) return EINVAL;
  if (has(kQpAttrPathMtu) && attr.path_mtu > 255) return EINVAL;
  if (has(kQpAttrPathMtu) && Pmtu{static_cast<uint8_t>(attr.path_mtu)} >
                                 config_.shard->fabric().active_mtu(nic().port())) {
    return EINVAL;
  }
  if (has(kQpAttrTimeout) && attr.timeout > 31) return EINVAL;
  if (has(kQpAttrRetryCnt) && attr.retry_cnt > 7) return EINVAL;
  if (has(kQpAttrRnrRetry) && attr.rnr_retry > 7) return EINVAL;
  if (has(kQpAttrMinRnrTimer) && attr.min_rnr_timer > 31) return EINVAL;
  if (has(kQpAttrMaxQpRdAtomic) && attr.max_rd_atomic > limits.max_qp_init_rd_atom) return EINVAL;
  if (has(kQpAttrMaxDestRdAtomic) && attr.max_dest_rd_atomic > limits.max_qp_rd_atom) {
    return EINVAL;
  }
  if (has(kQpAttrDestQpn) && attr.dest_qpn > Psn::kMask) return EINVAL;
  if (const int error = CheckAlternatePath(attr, mask); error != 0) return error;
  if (has(kQpAttrAv)) return CheckPath(*config_.nic, config_.shard->fabric(), attr.ah);
  return 0;
}

int Qp::CheckAlternatePath(const abi::QpAttr& attr, uint32_t mask) const {
  using namespace transport;
  const bool loads = (mask & kQpAttrAltPath) != 0;
  if ((mask & kQpAttrPathMigState) != 0) {
    // ARMED is what the two ends find together.
    if (attr.path_mig_state > kMigRearm) return EINVAL;
    if (attr.path_mig_state == kMigRearm && !loads && !has_alternate_) return EINVAL;
  }
  if (!loads) return 0;
  if (attr.alt_port_num != 1 || attr.alt_timeout > 31) return EINVAL;
  if (attr.alt_pkey_index >= nic().attributes().max_pkeys) return EINVAL;
  return CheckPath(*config_.nic, config_.shard->fabric(), attr.alt_ah);
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
  if (has(kQpAttrAltPath)) {
    attr_.alt_ah = attr.alt_ah;
    attr_.alt_pkey_index = attr.alt_pkey_index;
    attr_.alt_port_num = attr.alt_port_num;
    attr_.alt_timeout = attr.alt_timeout;
    has_alternate_ = true;
  }
}

void Qp::BuildPath() {
  transport::PacketAddress address = AddressFor(*config_.nic, config_.shard->fabric(), attr_.ah);
  address.udp_source_port =
      transport::RoceUdpSourcePort(address.flow_label, qpn_, Qpn(attr_.dest_qpn));
  peer_gid_ = address.destination_gid;
  path_ = transport::PacketTemplate(address);
  config_.shard->fabric().Prepare(nic().port(), peer_gid_, config_.shard->now());
}

int Qp::Modify(const abi::QpAttr& requested, uint32_t mask, uint32_t new_generation) {
  using namespace transport;
  abi::QpAttr attr = requested;
  if ((mask & kQpAttrAv) != 0) attr.ah = WithGids(nic(), config_.shard->fabric(), attr.ah);
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
  if (to == QpState::kReset) {
    ResetMachines();
    ResetQueues();
    srq_port_.set_open(true);
    last_wqe_reported_ = has_alternate_ = false;
    attr_ = {};
    config_.generation = new_generation;
  } else if (to == QpState::kErr) {
    MoveToError();
    return 0;
  } else {
    if ((mask & kQpAttrPathMigState) != 0) SetMigration(attr.path_mig_state);
    if (to == QpState::kSqd && from != QpState::kSqd) drained_reported_ = false;
    OnTransition(from, to);
  }
  SetState(to);
  config_.shard->MarkReady(*this);
  return 0;
}

// --- Path migration ---

void Qp::SetMigration(uint32_t state) {
  if (state == kMigMigrated && attr_.path_mig_state == kMigArmed) return Migrate();
  attr_.path_mig_state = state;
  migration_error_reported_ = false;
  OnMigration();
}

void Qp::Migrate() {
  attr_.ah = attr_.alt_ah;
  attr_.pkey_index = attr_.alt_pkey_index;
  attr_.port_num = attr_.alt_port_num;
  attr_.timeout = attr_.alt_timeout;
  attr_.path_mig_state = kMigMigrated;
  has_alternate_ = false;  // another one has to be loaded before REARM
  BuildPath();
  OnMigration();
  config_.sink->OnQpEvent(*this, AsyncEventType::kPathMig);
  config_.shard->MarkReady(*this);
}

bool Qp::IsFromPeer(const transport::PacketView& packet) {
  const transport::Gid source = packet.source_gid();
  const bool peer_has_migrated = packet.bth().mig_req;
  if (attr_.path_mig_state == kMigArmed && peer_has_migrated) [[unlikely]] {
    if (source == DestinationOf(attr_.alt_ah)) {
      Migrate();
    } else if (!migration_error_reported_) {
      migration_error_reported_ = true;
      config_.sink->OnQpEvent(*this, AsyncEventType::kPathMigErr);
    }
  } else if (attr_.path_mig_state == kMigRearm && !peer_has_migrated && source == peer_gid_)
      [[unlikely]] {
    attr_.path_mig_state = kMigArmed;
    OnMigration();
  }
  return source == peer_gid_;
}

abi::QpAttr Qp::Query() const {
  abi::QpAttr attr = attr_;
  attr.state = attr.cur_state = static_cast<uint32_t>(state_);
  attr.sq_draining = state_ == QpState::kSqd && !drained();
  return attr;
}

// --- Engine steps ---

void Qp::TraceCompletion(const Completion& completion, uint32_t peer_qpn) {
  // Of a process that has ended: nobody sees it, and it is no failure to explain.
  if (config_.space != nullptr && config_.space->gone()) [[unlikely]]
    return;
  if (completion.status != transport::WcStatus::kSuccess &&
      completion.status != transport::WcStatus::kWrFlushErr) [[unlikely]] {
    FailureSignal::Raise();
  }
  Trace({.wr_id = completion.wr_id,
         .peer_qpn = peer_qpn,
         .bytes = completion.byte_len,
         .detail = completion.vendor_err,
         .kind = TraceKind::kCompletion,
         .opcode = static_cast<uint8_t>(completion.opcode),
         .code = static_cast<uint8_t>(completion.status),
         .flags = static_cast<uint8_t>(completion.is_send ? TraceEvent::kSendQueue : 0)});
}

void Qp::Complete(CompletionQueue& cq, const Completion& completion, Time now) {
  if (cq.in_error()) return;
  const CqeOrigin origin{
      .qpn = qpn_.value(),
      .qp_slot = static_cast<uint16_t>(config_.slot),
      .qp_generation = config_.generation,
      .src_qpn = config_.type == QpType::kUd ? completion.src_qpn.value() : attr_.dest_qpn};
  if (!WriteCqe(cq, completion, origin, now)) config_.sink->OnCqOverrun(cq);
}

bool Qp::WriteCqe(CompletionQueue& cq, const Completion& completion, const CqeOrigin& origin,
                  Time now) {
  if (config_.shard->touches_completions() | flushes_all_) [[unlikely]]
    return WriteWithFaults(cq, completion, origin, now);
  TraceCompletion(completion, origin.src_qpn);
  if (!cq.Write(completion, origin, static_cast<uint64_t>(now.ns()))) return false;
  config_.shard->MarkDirty(cq);
  return true;
}

void Qp::ReportDrained() {
  if (state_ != QpState::kSqd || drained_reported_ || !drained()) return;
  drained_reported_ = true;
  if (attr_.en_sqd_async_notify != 0) config_.sink->OnQpEvent(*this, AsyncEventType::kSqDrained);
}

void Qp::CheckSrq() {
  if (config_.srq == nullptr) return;
  config_.srq->Publish();
  if (!config_.srq->in_error() || !receives()) return;
  MoveToError();
  config_.sink->OnQpEvent(*this, AsyncEventType::kQpFatal);
}

// IBTA Vol 1 §11.5.2 ("Last WQE Reached"): the application may destroy the QP
// when it has polled what is in the CQ.
void Qp::ReportLastWqe() {
  if (config_.srq == nullptr || state_ != QpState::kErr || last_wqe_reported_) return;
  if (!receives_flushed()) return;
  last_wqe_reported_ = true;
  config_.sink->OnQpEvent(*this, AsyncEventType::kQpLastWqeReached);
}

void Qp::MoveToError() {
  if (state_ == QpState::kErr) return;
  srq_port_.set_open(false);
  // Shown before the RQ is emptied: what is posted later rings the doorbell.
  SetState(QpState::kErr);
  abi::FullFence();
  FlushMachines();
  config_.shard->MarkReady(*this);
}

}  // namespace verbena::nic
