// SPDX-License-Identifier: Apache-2.0
#include "transport/cm/protocol.h"

#include <algorithm>

#include "transport/base/byteorder.h"
#include "transport/cm/connection.h"

namespace verbena::transport {
namespace {

uint32_t SwapBytes(uint32_t v) {
  return (v >> 24) | ((v >> 8) & 0xff00) | ((v << 8) & 0xff0000) | (v << 24);
}

uint8_t AtMost7(uint8_t v) { return std::min<uint8_t>(v, 7); }

}  // namespace

const char* CmStateName(CmState state) {
  static constexpr const char* kNames[] = {
      "IDLE",      "REQ_SENT",  "REQ_RCVD",     "MRA_REQ_SENT",  "MRA_REQ_RCVD",
      "REP_SENT",  "REP_RCVD",  "MRA_REP_SENT", "MRA_REP_RCVD",  "ESTABLISHED",
      "DREQ_SENT", "DREQ_RCVD", "TIMEWAIT",     "SIDR_REQ_SENT", "SIDR_REQ_RCVD"};
  return kNames[static_cast<size_t>(state)];
}

const char* CmEventTypeName(CmEventType type) {
  static constexpr const char* kNames[] = {
      "REQ_RECEIVED",      "REQ_ERROR",        "REP_RECEIVED",     "REP_ERROR",
      "RTU_RECEIVED",      "USER_ESTABLISHED", "REJ_RECEIVED",     "MRA_RECEIVED",
      "DREQ_RECEIVED",     "DREQ_ERROR",       "DREP_RECEIVED",    "TIMEWAIT_EXIT",
      "SIDR_REQ_RECEIVED", "SIDR_REQ_ERROR",   "SIDR_REP_RECEIVED"};
  return kNames[static_cast<size_t>(type)];
}

Duration CmTime(uint8_t code) {
  return Duration::Milliseconds(int64_t{1} << std::max(code - 8, 0));
}

uint8_t CmAckTimeout(uint8_t ack_delay, uint8_t packet_life_time) {
  // 2^(life time + 1) there and back, plus 2^delay: the next power of two.
  int timeout = packet_life_time + 1;
  if (timeout >= ack_delay) {
    timeout += ack_delay >= timeout - 1 ? 1 : 0;
  } else {
    timeout = ack_delay + (timeout >= ack_delay - 1 ? 1 : 0);
  }
  return static_cast<uint8_t>(std::min(timeout, 31));
}

CmProtocol::CmProtocol(std::vector<Nic> nics, uint32_t seed)
    : nics_(std::move(nics)), id_mask_(seed) {}

CmProtocol::~CmProtocol() = default;

void CmProtocol::SetGids(uint32_t nic, std::vector<Gid> gids) {
  auto& former = nics_[nic].former;
  const std::vector<Gid>& old = nics_[nic].gids;
  for (size_t i = 0; i < old.size(); ++i) {
    const std::pair<Gid, uint8_t> entry(old[i], static_cast<uint8_t>(i));
    if (old[i].IsZero() || std::ranges::find(gids, old[i]) != gids.end()) continue;
    if (std::ranges::find(former, entry) == former.end()) former.push_back(entry);
  }
  nics_[nic].gids = std::move(gids);
}

void CmProtocol::Listen(uint64_t service_id) { ++listeners_[service_id]; }

void CmProtocol::StopListening(uint64_t service_id) {
  const auto it = listeners_.find(service_id);
  if (it != listeners_.end() && --it->second == 0) listeners_.erase(it);
}

// --- Table

CmProtocol::Connection* CmProtocol::FindConnection(CmId id) const {
  const auto it = connections_.find(id);
  return it == connections_.end() || it->second->abandoned ? nullptr : it->second.get();
}

CmProtocol::Connection* CmProtocol::FindPair(CmId local, uint32_t remote) const {
  Connection* connection = FindConnection(local);
  return connection != nullptr && connection->remote_id == remote ? connection : nullptr;
}

const CmConnection* CmProtocol::Find(CmId id) const { return FindConnection(id); }

CmProtocol::Connection* CmProtocol::NewConnection() {
  if (connections_.size() >= kMaxConnections) {
    ++counters_.no_room;
    return nullptr;
  }
  // Ids count up behind a mask, so that one of an earlier life of this host is
  // not met soon.
  CmId id = 0;
  do {
    id = SwapBytes(next_id_++ ^ id_mask_);
  } while (id == 0 || connections_.contains(id));
  auto connection = std::make_unique<Connection>();
  connection->id = id;
  return (connections_[id] = std::move(connection)).get();
}

void CmProtocol::Remove(Connection& connection) {
  ForgetPeer(connection);
  SetDeadline(connection, Time::Never());
  connections_.erase(connection.id);
}

void CmProtocol::ForgetPeer(Connection& connection) {
  if (connection.has_remote_id) {
    remote_ids_.erase({connection.remote_ca_guid, connection.remote_id});
    connection.has_remote_id = false;
  }
  if (connection.has_remote_qpn) {
    remote_qpns_.erase({connection.remote_ca_guid, connection.remote_qpn});
    connection.has_remote_qpn = false;
  }
}

void CmProtocol::SetDeadline(Connection& connection, Time deadline) {
  if (!connection.deadline.IsNever()) {
    deadlines_.erase({connection.deadline.ns(), connection.id});
  }
  connection.deadline = deadline;
  if (!deadline.IsNever()) deadlines_.insert({deadline.ns(), connection.id});
}

Time CmProtocol::next_timeout() const {
  return deadlines_.empty() ? Time::Never() : Time::FromNanoseconds(deadlines_.begin()->first);
}

// --- Sending

uint64_t CmProtocol::OwnTid(const Connection& connection) const {
  // Linux: number of the MAD agent, then the id as a little-endian host reads it.
  return (uint64_t{2} << 32) | SwapBytes(connection.id);
}

void CmProtocol::Send(const MadPacket& mad) {
  const auto attribute = static_cast<uint16_t>(MadHeader::Load(mad.bytes.data()).attribute);
  ++counters_.sent[attribute - 0x10u];
  outgoing_.push_back(mad);
}

void CmProtocol::SendRepeated(Connection& connection, const MadPacket& mad, Time now) {
  connection.message = mad;
  connection.repeating = true;
  connection.retries_left = connection.max_retries;
  connection.interval = connection.timeout;
  SetDeadline(connection, now + connection.interval);
  Send(mad);
}

void CmProtocol::StopRepeating(Connection& connection) {
  connection.repeating = false;
  SetDeadline(connection, Time::Never());
}

void CmProtocol::Emit(CmEventType type, const Connection& connection) {
  events_.push_back(CmEvent{.type = type, .id = connection.id, .message = {}});
}

void CmProtocol::ResetToIdle(Connection& connection) {
  StopRepeating(connection);
  connection.state = CmState::kIdle;
  ForgetPeer(connection);
}

void CmProtocol::EnterTimewait(Connection& connection, Time now) {
  StopRepeating(connection);
  connection.state = CmState::kTimewait;
  SetDeadline(connection, now + CmTime(connection.ack_timeout));
}

bool CmProtocol::PollEvent(CmEvent* event) {
  if (events_.empty()) return false;
  *event = std::move(events_.front());
  events_.pop_front();
  return true;
}

bool CmProtocol::PollMad(MadPacket* mad) {
  if (outgoing_.empty()) return false;
  *mad = outgoing_.front();
  outgoing_.pop_front();
  return true;
}

// --- Requests of the owner

Result<CmId, CmError> CmProtocol::SendReq(const CmReqParameters& parameters, Time now) {
  CmReq req;
  if (parameters.path.nic >= nics_.size() || parameters.qp_type == CmQpType::kXrcTarget ||
      !CopyPrivateData(parameters.private_data, &req.private_data)) {
    return CmError::kInvalidArgument;
  }
  Connection* connection = NewConnection();
  if (connection == nullptr) return CmError::kNoRoom;
  const Nic& nic = nics_[parameters.path.nic];
  const CmPath& path = parameters.path;
  connection->state = CmState::kReqSent;
  connection->active = true;
  connection->qp_type = parameters.qp_type;
  connection->path = path;
  connection->service_id = parameters.service_id;
  connection->local_qpn = parameters.qpn & 0xffffff;
  connection->rq_psn = parameters.starting_psn & 0xffffff;
  connection->responder_resources = parameters.responder_resources;
  connection->initiator_depth = parameters.initiator_depth;
  connection->retry_count = AtMost7(parameters.retry_count);
  connection->rnr_retry = AtMost7(parameters.rnr_retry);
  connection->ack_timeout = CmAckTimeout(nic.ack_delay, path.packet_life_time);
  connection->tid = OwnTid(*connection);
  connection->timeout =
      CmTime(path.packet_life_time) * 2 + CmTime(parameters.remote_response_timeout);
  connection->max_retries = parameters.max_cm_retries & 15;

  req.local_comm_id = connection->id;
  req.vendor_id = parameters.ece_vendor_id;
  req.service_id = parameters.service_id;
  req.local_ca_guid = nic.ca_guid;
  req.local_qpn = connection->local_qpn;
  req.responder_resources = parameters.responder_resources;
  req.initiator_depth = parameters.initiator_depth;
  req.remote_response_timeout = parameters.remote_response_timeout;
  req.local_response_timeout = parameters.local_response_timeout;
  if (parameters.qp_type == CmQpType::kUc) {
    req.transport = static_cast<uint8_t>(CmTransport::kUc);
  } else if (parameters.qp_type == CmQpType::kXrcInitiator) {
    // An XRC initiator receives nothing: neither resources nor an SRQ of its own.
    req.transport = static_cast<uint8_t>(CmTransport::kExtended);
    req.extended_transport = kCmExtendedXrc;
    req.responder_resources = 0;
  }
  req.flow_control = parameters.flow_control & 1;
  req.starting_psn = connection->rq_psn;
  req.pkey = path.pkey.value();
  req.path_mtu = static_cast<uint8_t>(path.mtu);
  if (parameters.qp_type != CmQpType::kXrcInitiator) {
    req.retry_count = connection->retry_count;
    req.rnr_retry = connection->rnr_retry;
    req.srq = parameters.srq & 1;
  }
  req.max_cm_retries = connection->max_retries;
  req.primary_local_lid = 0xffff;  // RoCE has no LIDs
  req.primary_remote_lid = 0xffff;
  req.primary_local_gid = path.local_gid.bytes();
  req.primary_remote_gid = path.remote_gid.bytes();
  req.primary_flow_label = path.flow_label;
  req.primary_rate = path.rate;
  req.primary_traffic_class = path.traffic_class;
  req.primary_hop_limit = path.hop_limit;
  req.primary_sl = path.sl;
  req.primary_subnet_local = path.hop_limit <= 1 ? 1 : 0;
  req.primary_ack_timeout = connection->ack_timeout;
  SendRepeated(*connection, Make(path, connection->tid, req, parameters.ece_options), now);
  return connection->id;
}

Result<CmId, CmError> CmProtocol::SendSidrReq(const CmSidrReqParameters& parameters, Time now) {
  CmSidrReq req;
  if (parameters.path.nic >= nics_.size() ||
      !CopyPrivateData(parameters.private_data, &req.private_data)) {
    return CmError::kInvalidArgument;
  }
  Connection* connection = NewConnection();
  if (connection == nullptr) return CmError::kNoRoom;
  connection->state = CmState::kSidrReqSent;
  connection->active = true;
  connection->path = parameters.path;
  connection->service_id = parameters.service_id;
  connection->tid = OwnTid(*connection);
  connection->timeout = parameters.timeout;
  connection->max_retries = parameters.max_cm_retries;
  req.request_id = connection->id;
  req.pkey = parameters.path.pkey.value();
  req.service_id = parameters.service_id;
  SendRepeated(*connection, Make(parameters.path, connection->tid, req), now);
  return connection->id;
}

Result<void, CmError> CmProtocol::SendRep(CmId id, const CmRepParameters& parameters, Time now) {
  Connection* connection = FindConnection(id);
  CmRep rep;
  if (!CopyPrivateData(parameters.private_data, &rep.private_data)) {
    return CmError::kInvalidArgument;
  }
  if (connection == nullptr ||
      (connection->state != CmState::kReqReceived && connection->state != CmState::kMraReqSent)) {
    return CmError::kInvalidState;
  }
  const Nic& nic = nics_[connection->path.nic];
  connection->state = CmState::kRepSent;
  connection->initiator_depth = parameters.initiator_depth;
  connection->responder_resources = parameters.responder_resources;
  connection->rq_psn = parameters.starting_psn & 0xffffff;
  connection->local_qpn = parameters.qpn & 0xffffff;

  rep.local_comm_id = id;
  rep.remote_comm_id = connection->remote_id;
  rep.starting_psn = connection->rq_psn;
  rep.responder_resources = parameters.responder_resources;
  rep.target_ack_delay = nic.ack_delay;
  rep.rnr_retry = AtMost7(parameters.rnr_retry);
  rep.local_ca_guid = nic.ca_guid;
  if (connection->qp_type == CmQpType::kXrcTarget) {
    rep.srq = 1;
    rep.local_eecn = connection->local_qpn;
  } else {
    rep.initiator_depth = parameters.initiator_depth;
    rep.flow_control = parameters.flow_control & 1;
    rep.srq = parameters.srq & 1;
    rep.local_qpn = connection->local_qpn;
  }
  rep.vendor_id_high = static_cast<uint8_t>(parameters.ece_vendor_id >> 16);
  rep.vendor_id_middle = static_cast<uint8_t>(parameters.ece_vendor_id >> 8);
  rep.vendor_id_low = static_cast<uint8_t>(parameters.ece_vendor_id);
  SendRepeated(*connection, Make(connection->path, connection->tid, rep, parameters.ece_options),
               now);
  return {};
}

Result<void, CmError> CmProtocol::SendRtu(CmId id, std::span<const std::byte> private_data,
                                          Time /*now*/) {
  Connection* connection = FindConnection(id);
  CmRtu rtu;
  if (!CopyPrivateData(private_data, &rtu.private_data)) return CmError::kInvalidArgument;
  if (connection == nullptr ||
      (connection->state != CmState::kRepReceived && connection->state != CmState::kMraRepSent)) {
    return CmError::kInvalidState;
  }
  connection->state = CmState::kEstablished;
  rtu.local_comm_id = id;
  rtu.remote_comm_id = connection->remote_id;
  // Kept to answer a REP that comes again.
  connection->message = Make(connection->path, connection->tid, rtu);
  Send(connection->message);
  return {};
}

Result<void, CmError> CmProtocol::SendRej(CmId id, CmRejectReason reason,
                                          std::span<const std::byte> info,
                                          std::span<const std::byte> private_data, Time now) {
  Connection* connection = FindConnection(id);
  CmRej rej;
  if (!CopyPrivateData(info, &rej.info) || !CopyPrivateData(private_data, &rej.private_data)) {
    return CmError::kInvalidArgument;
  }
  if (connection == nullptr) return CmError::kInvalidState;
  rej.local_comm_id = id;
  rej.message = static_cast<uint8_t>(CmRejected::kOther);
  bool timewait = false;
  switch (connection->state) {
    case CmState::kReqReceived:
      rej.local_comm_id = 0;
      [[fallthrough]];
    case CmState::kMraReqSent:
      rej.message = static_cast<uint8_t>(CmRejected::kReq);
      break;
    case CmState::kRepReceived:
    case CmState::kMraRepSent:
      rej.message = static_cast<uint8_t>(CmRejected::kRep);
      break;
    case CmState::kReqSent:
    case CmState::kMraReqReceived:
      break;
    case CmState::kRepSent:
    case CmState::kMraRepReceived:
      timewait = true;
      break;
    default:
      return CmError::kInvalidState;
  }
  rej.remote_comm_id = connection->remote_id;
  rej.reason = static_cast<uint16_t>(reason);
  rej.info_length = static_cast<uint8_t>(info.size());
  const MadPacket mad = Make(connection->path, connection->tid, rej);
  if (timewait) {
    EnterTimewait(*connection, now);
  } else {
    ResetToIdle(*connection);
  }
  Send(mad);
  return {};
}

Result<void, CmError> CmProtocol::SendMra(CmId id, uint8_t service_timeout, bool delayed,
                                          Time /*now*/) {
  Connection* connection = FindConnection(id);
  if (connection == nullptr) return CmError::kInvalidState;
  CmMra mra;
  if (connection->state == CmState::kReqReceived) {
    connection->state = CmState::kMraReqSent;
    mra.message = static_cast<uint8_t>(CmRejected::kReq);
  } else if (connection->state == CmState::kRepReceived) {
    connection->state = CmState::kMraRepSent;
    mra.message = static_cast<uint8_t>(CmRejected::kRep);
  } else {
    return CmError::kInvalidState;
  }
  mra.local_comm_id = id;
  mra.remote_comm_id = connection->remote_id;
  mra.service_timeout = service_timeout & 31;
  connection->message = Make(connection->path, connection->tid, mra);
  if (!delayed) Send(connection->message);
  return {};
}

Result<void, CmError> CmProtocol::SendDreq(CmId id, Time now) {
  Connection* connection = FindConnection(id);
  if (connection == nullptr || connection->state != CmState::kEstablished) {
    return CmError::kInvalidState;
  }
  connection->state = CmState::kDreqSent;
  CmDreq dreq;
  dreq.local_comm_id = id;
  dreq.remote_comm_id = connection->remote_id;
  dreq.remote_qpn = connection->remote_qpn;
  SendRepeated(*connection, Make(connection->path, OwnTid(*connection), dreq), now);
  return {};
}

Result<void, CmError> CmProtocol::SendDrep(CmId id, Time now) {
  Connection* connection = FindConnection(id);
  if (connection == nullptr || connection->state != CmState::kDreqReceived) {
    return CmError::kInvalidState;
  }
  CmDrep drep;
  drep.local_comm_id = id;
  drep.remote_comm_id = connection->remote_id;
  const MadPacket mad = Make(connection->path, connection->tid, drep);
  EnterTimewait(*connection, now);
  Send(mad);
  return {};
}

Result<void, CmError> CmProtocol::SendSidrRep(CmId id, const CmSidrRepParameters& parameters,
                                              Time /*now*/) {
  Connection* connection = FindConnection(id);
  CmSidrRep rep;
  if (!CopyPrivateData(parameters.private_data, &rep.private_data)) {
    return CmError::kInvalidArgument;
  }
  if (connection == nullptr || connection->state != CmState::kSidrReqReceived) {
    return CmError::kInvalidState;
  }
  rep.request_id = connection->sidr_request;
  rep.status = static_cast<uint8_t>(parameters.status);
  rep.qpn = parameters.qpn & 0xffffff;
  rep.service_id = connection->service_id;
  rep.qkey = parameters.status == CmSidrStatus::kSuccess ? parameters.qkey : 0;
  connection->state = CmState::kIdle;
  sidr_requests_.erase({connection->sidr_source, connection->sidr_request});
  Send(Make(connection->path, connection->tid, rep));
  return {};
}

Result<void, CmError> CmProtocol::NotifyEstablished(CmId id, Time /*now*/) {
  Connection* connection = FindConnection(id);
  if (connection == nullptr) return CmError::kInvalidState;
  if (connection->state == CmState::kEstablished) return CmError::kIsConnected;
  if (connection->state != CmState::kRepSent && connection->state != CmState::kMraRepReceived) {
    return CmError::kInvalidState;
  }
  StopRepeating(*connection);
  connection->state = CmState::kEstablished;
  Emit(CmEventType::kUserEstablished, *connection);
  return {};
}

void CmProtocol::Destroy(CmId id, Time now, bool silently) {
  Connection* connection = FindConnection(id);
  if (connection == nullptr) return;
  switch (connection->state) {
    case CmState::kIdle:
    case CmState::kTimewait:
      break;
    case CmState::kSidrReqSent:
      ResetToIdle(*connection);
      break;
    case CmState::kSidrReqReceived:
      if (silently) {
        sidr_requests_.erase({connection->sidr_source, connection->sidr_request});
        connection->state = CmState::kIdle;
      } else {
        (void)SendSidrRep(id, {.status = CmSidrStatus::kReject, .private_data = {}}, now);
      }
      break;
    case CmState::kReqSent:
    case CmState::kMraReqReceived: {
      std::array<std::byte, 8> guid;
      StoreBe64(guid.data(), nics_[connection->path.nic].ca_guid);
      (void)SendRej(id, CmRejectReason::kTimeout, guid, {}, now);
      break;
    }
    case CmState::kReqReceived:
      if (silently) {
        ResetToIdle(*connection);
        break;
      }
      [[fallthrough]];
    case CmState::kRepSent:
    case CmState::kMraRepReceived:
    case CmState::kMraReqSent:
    case CmState::kRepReceived:
    case CmState::kMraRepSent:
      (void)SendRej(id, CmRejectReason::kConsumerDefined, {}, {}, now);
      break;
    case CmState::kEstablished:
      if (connection->qp_type == CmQpType::kXrcTarget) {
        ResetToIdle(*connection);
        break;
      }
      (void)SendDreq(id, now);
      [[fallthrough]];
    case CmState::kDreqSent:
      // Whether the peer has heard it is no longer of interest.
      EnterTimewait(*connection, now);
      break;
    case CmState::kDreqReceived:
      (void)SendDrep(id, now);
      break;
  }
  if (connection->state == CmState::kTimewait) {
    connection->abandoned = true;
  } else {
    Remove(*connection);
  }
}

// --- Timers

void CmProtocol::HandleGivenUp(Connection& connection, Time now) {
  switch (connection.state) {
    case CmState::kReqSent:
    case CmState::kMraReqReceived:
      ResetToIdle(connection);
      Emit(CmEventType::kReqError, connection);
      return;
    case CmState::kRepSent:
    case CmState::kMraRepReceived:
      ResetToIdle(connection);
      Emit(CmEventType::kRepError, connection);
      return;
    case CmState::kDreqSent:
      EnterTimewait(connection, now);
      Emit(CmEventType::kDreqError, connection);
      return;
    case CmState::kSidrReqSent:
      ResetToIdle(connection);
      Emit(CmEventType::kSidrReqError, connection);
      return;
    default:
      StopRepeating(connection);
      return;
  }
}

void CmProtocol::HandleTimeout(Time now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now.ns()) {
    Connection& connection = *connections_.at(deadlines_.begin()->second);
    if (connection.state == CmState::kTimewait) {
      if (connection.abandoned) {
        Remove(connection);
      } else {
        ResetToIdle(connection);
        Emit(CmEventType::kTimewaitExit, connection);
      }
    } else if (connection.retries_left == 0) {
      HandleGivenUp(connection, now);
    } else {
      --connection.retries_left;
      SetDeadline(connection, now + connection.interval);
      const auto attribute =
          static_cast<uint16_t>(MadHeader::Load(connection.message.bytes.data()).attribute);
      ++counters_.resent[attribute - 0x10u];
      outgoing_.push_back(connection.message);
    }
  }
}

}  // namespace verbena::transport
