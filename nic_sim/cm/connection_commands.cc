// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: listen, connect, accept, reject, disconnect, QP attributes.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "nic_sim/cm/agent_state.h"

namespace verbena::nic {
namespace {

using transport::CmError;
using transport::CmQpType;
using transport::CmRejectReason;
using transport::CmState;
using transport::RdmaIpHeader;

// enum ibv_qp_state.
constexpr uint32_t kQpInit = 1;
constexpr uint32_t kQpRtr = 2;
constexpr uint32_t kQpRts = 3;
constexpr uint32_t kQpErr = 6;

// enum ibv_qp_attr_mask.
constexpr uint32_t kMaskState = 1 << 0;
constexpr uint32_t kMaskAccessFlags = 1 << 3;
constexpr uint32_t kMaskPkeyIndex = 1 << 4;
constexpr uint32_t kMaskPort = 1 << 5;
constexpr uint32_t kMaskQkey = 1 << 6;
constexpr uint32_t kMaskAv = 1 << 7;
constexpr uint32_t kMaskPathMtu = 1 << 8;
constexpr uint32_t kMaskTimeout = 1 << 9;
constexpr uint32_t kMaskRetryCount = 1 << 10;
constexpr uint32_t kMaskRnrRetry = 1 << 11;
constexpr uint32_t kMaskRqPsn = 1 << 12;
constexpr uint32_t kMaskMaxQpRdAtomic = 1 << 13;
constexpr uint32_t kMaskMinRnrTimer = 1 << 15;
constexpr uint32_t kMaskSqPsn = 1 << 16;
constexpr uint32_t kMaskMaxDestRdAtomic = 1 << 17;
constexpr uint32_t kMaskDestQpn = 1 << 20;

// enum ibv_access_flags.
constexpr uint32_t kAccessRemoteWrite = 1 << 1;
constexpr uint32_t kAccessRemoteRead = 1 << 2;
constexpr uint32_t kAccessRemoteAtomic = 1 << 3;

constexpr uint8_t kPort = 1;

int ErrnoOf(CmError error) {
  switch (error) {
    case CmError::kInvalidState:
    case CmError::kInvalidArgument:
      return EINVAL;
    case CmError::kNoRoom:
      return ENOMEM;
    case CmError::kIsConnected:
      return EISCONN;
  }
  return EINVAL;
}

template <typename R>
int ErrnoOf(const R& result) {
  return result.ok() ? 0 : ErrnoOf(result.error());
}

bool Carries(CmQpType type, bool as_initiator) {
  if (type == CmQpType::kRc) return true;
  return type == (as_initiator ? CmQpType::kXrcInitiator : CmQpType::kXrcTarget);
}

}  // namespace

// --- Listen

int CmAgent::State::Listen(const Request& request) {
  const auto command = Load<rdma_ucm_listen>(request);
  CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  if (record->state == CmIdState::kIdle) {
    SocketAddress any;
    any.family = kFamilyInet;
    if (const int error = BindRecord(*record, any)) return error;
  }
  if (record->state != CmIdState::kAddrBound) return EINVAL;
  // Ports may be shared, but one listens.
  if (record->reuse_address) {
    if (const int error = ports_.CheckListen(record->port_space, *record)) return error;
  }
  record->backlog =
      command.backlog > 0 && command.backlog < kMaxBacklog ? command.backlog : kMaxBacklog;
  record->state = CmIdState::kListen;
  const uint64_t service_id = transport::CmServiceId(record->port_space, record->source.port);
  listeners_[service_id].insert(record->id);
  protocol_.Listen(service_id);
  ReleaseHeld(service_id);
  return 0;
}

void CmAgent::State::StopListening(CmIdRecord& record) {
  if (record.state != CmIdState::kListen) return;
  const uint64_t service_id = transport::CmServiceId(record.port_space, record.source.port);
  const auto it = listeners_.find(service_id);
  it->second.erase(record.id);
  if (it->second.empty()) listeners_.erase(it);
  protocol_.StopListening(service_id);
  ended_listeners_.emplace_back(service_id, now_ + kListenAgain);
  if (ended_listeners_.size() > kMaxHeldRequests) ended_listeners_.pop_front();
  record.state = CmIdState::kIdle;
}

// --- Connect

namespace {

// Header and user data of a request. False: too long for `room` bytes.
bool RequestData(const CmIdRecord& record, const rdma_ucm_conn_param& param, size_t room,
                 std::vector<std::byte>* data) {
  if (RdmaIpHeader::kBytes + param.private_data_len > room) return false;
  RdmaIpHeader header;
  header.ip_version = record.destination.family == kFamilyInet ? 4 : 6;
  header.source_port = record.source.port;
  header.source = record.source.ip;
  header.destination = record.destination.ip;
  data->resize(RdmaIpHeader::kBytes);
  header.Store(data->data());
  const auto user = BytesOf(param.private_data, param.private_data_len);
  data->insert(data->end(), user.begin(), user.end());
  return true;
}

}  // namespace

int CmAgent::State::ConnectReliable(CmIdRecord& record, const rdma_ucm_conn_param& param,
                                    const rdma_ucm_ece& ece) {
  transport::CmReqParameters req;
  std::vector<std::byte> data;
  if (!RequestData(record, param, sizeof(transport::CmReq::private_data), &data)) return EINVAL;
  switch (record.qp_type) {
    case CmIdQpType::kRc:
      req.qp_type = CmQpType::kRc;
      break;
    case CmIdQpType::kUc:
      req.qp_type = CmQpType::kUc;
      break;
    case CmIdQpType::kXrcSend:
      req.qp_type = CmQpType::kXrcInitiator;
      break;
    default:
      return EINVAL;
  }
  req.path = record.path;
  req.service_id = transport::CmServiceId(record.port_space, record.destination.port);
  req.qpn = record.qpn;
  req.starting_psn = record.starting_psn;
  req.responder_resources = param.responder_resources;
  req.initiator_depth = param.initiator_depth;
  req.flow_control = param.flow_control;
  req.retry_count = param.retry_count;
  req.rnr_retry = param.rnr_retry_count;
  req.srq = param.srq;
  req.ece_vendor_id = ece.vendor_id;
  req.ece_options = ece.attr_mod;
  req.private_data = data;
  const auto id = protocol_.SendReq(req, now_);
  if (!id.ok()) return ErrnoOf(id.error());
  record.cm = *id;
  return 0;
}

int CmAgent::State::ConnectDatagram(CmIdRecord& record, const rdma_ucm_conn_param& param) {
  transport::CmSidrReqParameters req;
  std::vector<std::byte> data;
  if (!RequestData(record, param, sizeof(transport::CmSidrReq::private_data), &data)) {
    return EINVAL;
  }
  req.path = record.path;
  req.service_id = transport::CmServiceId(record.port_space, record.destination.port);
  req.private_data = data;
  const auto id = protocol_.SendSidrReq(req, now_);
  if (!id.ok()) return ErrnoOf(id.error());
  record.cm = *id;
  return 0;
}

int CmAgent::State::Connect(const Request& request) {
  const auto command = Load<rdma_ucm_connect>(request);
  if (command.conn_param.valid == 0) return EINVAL;
  CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  if (record->state != CmIdState::kRouteResolved || record->cm != 0) return EINVAL;
  // CONNECT_ERROR, UNREACHABLE, REJECTED: the id may try again.
  for (const uint8_t event : {uint8_t{6}, uint8_t{7}, uint8_t{8}}) {
    const auto status = platform_.InjectedStatus(record->file, event, record->local->nic);
    if (!status) continue;
    QueuePlain(*record, event, *status);
    return 0;
  }
  record->qpn = command.conn_param.qp_num & 0xffffff;
  record->srq = command.conn_param.srq;
  const int error = record->datagram() ? ConnectDatagram(*record, command.conn_param)
                                       : ConnectReliable(*record, command.conn_param, command.ece);
  if (error != 0) return error;
  by_cm_[record->cm] = record->id;
  record->state = CmIdState::kConnect;
  return 0;
}

// --- Answers

int CmAgent::State::AcceptRecord(CmIdRecord& record, const rdma_ucm_conn_param& param,
                                 const rdma_ucm_ece& ece) {
  record.qpn = param.qp_num & 0xffffff;
  record.srq = param.srq;
  const auto data = BytesOf(param.private_data, param.private_data_len);
  if (record.datagram()) {
    record.qkey = kUdpQkey;
    return ErrnoOf(protocol_.SendSidrRep(
        record.cm, {.qpn = record.qpn, .qkey = record.qkey, .private_data = data}, now_));
  }
  transport::CmRepParameters rep;
  rep.qpn = record.qpn;
  rep.starting_psn = record.starting_psn;
  rep.responder_resources = param.responder_resources;
  rep.initiator_depth = param.initiator_depth;
  rep.flow_control = param.flow_control;
  rep.rnr_retry = param.rnr_retry_count;
  rep.srq = param.srq;
  rep.ece_vendor_id = ece.vendor_id;
  rep.ece_options = ece.attr_mod;
  rep.private_data = data;
  return ErrnoOf(protocol_.SendRep(record.cm, rep, now_));
}

int CmAgent::State::Accept(const Request& request) {
  const auto command = Load<rdma_ucm_accept>(request);
  CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  if (record->state != CmIdState::kConnect || record->cm == 0) return EINVAL;
  int error;
  if (command.conn_param.valid != 0) {
    error = AcceptRecord(*record, command.conn_param, command.ece);
    // Set together with the answer: events that follow it find their owner.
    if (error == 0) record->uid = command.uid;
  } else if (record->datagram()) {
    error = AcceptRecord(*record, command.conn_param, command.ece);
  } else {
    error = ErrnoOf(protocol_.SendRtu(record->cm, {}, now_));
  }
  // The peer need not wait for an answer that never comes.
  if (error != 0) {
    (void)protocol_.SendRej(record->cm, CmRejectReason::kConsumerDefined, {}, {}, now_);
  }
  return error;
}

int CmAgent::State::Reject(const Request& request) {
  const auto command = Load<rdma_ucm_reject>(request);
  CmIdRecord* record = FindId(request, command.id);
  auto reason = CmRejectReason{command.reason};
  if (command.reason == 0) reason = CmRejectReason::kConsumerDefined;
  if (reason != CmRejectReason::kConsumerDefined &&
      reason != CmRejectReason::kVendorOptionNotSupported) {
    return EINVAL;
  }
  if (record == nullptr) return ENOENT;
  if (record->cm == 0) return EINVAL;
  const auto data = BytesOf(command.private_data, command.private_data_len);
  if (record->datagram()) {
    return ErrnoOf(protocol_.SendSidrRep(
        record->cm, {.status = transport::CmSidrStatus::kReject, .private_data = data}, now_));
  }
  return ErrnoOf(protocol_.SendRej(record->cm, reason, {}, data, now_));
}

int CmAgent::State::Disconnect(const Request& request) {
  const auto command = Load<rdma_ucm_disconnect>(request);
  CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  if (record->cm == 0) return EINVAL;
  if (!protocol_.SendDreq(record->cm, now_).ok()) (void)protocol_.SendDrep(record->cm, now_);
  return 0;
}

int CmAgent::State::NotifyId(const Request& request) {
  const auto command = Load<rdma_ucm_notify>(request);
  CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  constexpr uint32_t kCommEstablished = 4;
  if (record->cm == 0 || command.event != kCommEstablished) return EINVAL;
  return ErrnoOf(protocol_.NotifyEstablished(record->cm, now_));
}

// --- QP attributes

void CmAgent::State::FillAhAttr(const transport::CmPath& path, ib_uverbs_ah_attr* attr) const {
  std::memcpy(attr->grh.dgid, path.remote_gid.bytes().data(), transport::Gid::kBytes);
  attr->grh.flow_label = path.flow_label;
  attr->grh.sgid_index = path.sgid_index;
  attr->grh.hop_limit = path.hop_limit;
  attr->grh.traffic_class = path.traffic_class;
  attr->sl = path.sl;
  attr->static_rate = path.rate;
  attr->is_global = 1;
  attr->port_num = kPort;
}

int CmAgent::State::FillQpAttr(const CmIdRecord& record, uint32_t qp_state,
                               ib_uverbs_qp_attr* attr) const {
  attr->qp_state = qp_state;
  attr->port_num = kPort;
  if (record.cm == 0 || record.datagram()) {
    attr->qp_attr_mask = kMaskState | kMaskPkeyIndex | kMaskPort;
    if (record.datagram()) {
      attr->qkey = kUdpQkey;
      attr->qp_attr_mask |= kMaskQkey;
    } else {
      attr->qp_attr_mask |= kMaskAccessFlags;
    }
    return 0;
  }
  const transport::CmConnection* connection = protocol_.Find(record.cm);
  if (connection == nullptr) return EINVAL;
  const bool answered =
      connection->state >= CmState::kReqReceived && connection->state <= CmState::kEstablished;
  switch (qp_state) {
    case kQpInit:
      if (connection->state == CmState::kIdle || connection->state > CmState::kEstablished) {
        return EINVAL;
      }
      attr->qp_attr_mask = kMaskState | kMaskAccessFlags | kMaskPkeyIndex | kMaskPort;
      attr->qp_access_flags = kAccessRemoteWrite;
      if (connection->responder_resources != 0) {
        attr->qp_access_flags |= kAccessRemoteRead | kAccessRemoteAtomic;
      }
      return 0;
    case kQpRtr:
      if (!answered || connection->state == CmState::kMraReqReceived) return EINVAL;
      attr->qp_attr_mask = kMaskState | kMaskAv | kMaskPathMtu | kMaskDestQpn | kMaskRqPsn;
      FillAhAttr(connection->path, &attr->ah_attr);
      attr->path_mtu = static_cast<uint32_t>(connection->path.mtu);
      attr->dest_qp_num = connection->remote_qpn;
      attr->rq_psn = record.starting_psn;
      if (Carries(connection->qp_type, false)) {
        attr->qp_attr_mask |= kMaskMaxDestRdAtomic | kMaskMinRnrTimer;
        attr->max_dest_rd_atomic = connection->responder_resources;
      }
      return 0;
    case kQpRts:
      if (!answered || connection->state == CmState::kMraReqReceived) return EINVAL;
      attr->qp_attr_mask = kMaskState | kMaskSqPsn;
      attr->sq_psn = connection->sq_psn;
      if (Carries(connection->qp_type, true)) {
        attr->qp_attr_mask |= kMaskRetryCount | kMaskRnrRetry | kMaskMaxQpRdAtomic;
        attr->retry_cnt = connection->retry_count;
        attr->rnr_retry = connection->rnr_retry;
        attr->max_rd_atomic = connection->initiator_depth;
      }
      if (connection->qp_type != CmQpType::kUc) {
        attr->qp_attr_mask |= kMaskTimeout;
        attr->timeout = connection->ack_timeout;
        if (record.ack_timeout) attr->timeout = *record.ack_timeout;
      }
      return 0;
    default:
      return EINVAL;
  }
}

int CmAgent::State::InitQpAttr(const Request& request) {
  const auto command = Load<rdma_ucm_init_qp_attr>(request);
  if (command.qp_state > kQpErr) return EINVAL;
  const CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  if (!record->local) return EINVAL;
  ib_uverbs_qp_attr attr{};
  if (const int error = FillQpAttr(*record, command.qp_state, &attr)) return error;
  Answer(request, attr);
  return 0;
}

}  // namespace verbena::nic
