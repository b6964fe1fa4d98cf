// SPDX-License-Identifier: Apache-2.0
//
// CmProtocol: what received messages mean.
#include <optional>

#include "transport/base/byteorder.h"
#include "transport/cm/connection.h"
#include "transport/cm/protocol.h"

namespace verbena::transport {
namespace {

template <typename Message>
Message LoadMessage(const MadPacket& mad) {
  return Message::Load(mad.bytes.data() + kMadHeaderBytes);
}

// The QP type at the receiver of a REQ. False: nothing we know.
bool QpTypeOf(const CmReq& req, CmQpType* type) {
  switch (CmTransport{req.transport}) {
    case CmTransport::kRc:
      *type = CmQpType::kRc;
      return true;
    case CmTransport::kUc:
      *type = CmQpType::kUc;
      return true;
    case CmTransport::kExtended:
      *type = CmQpType::kXrcTarget;
      return req.extended_transport == kCmExtendedXrc;
    case CmTransport::kRd:
      return false;
  }
  return false;
}

}  // namespace

void CmProtocol::CountDuplicate(CmAttribute attribute) {
  ++counters_.duplicates[static_cast<uint16_t>(attribute) - 0x10u];
}

// Where an answer to `mad` goes. False: it was not sent to this NIC.
bool CmProtocol::PathBack(const MadPacket& mad, CmPath* path) const {
  const Nic& nic = nics_[mad.nic];
  std::optional<uint8_t> index;
  for (size_t i = 0; i < nic.gids.size() && !index; ++i) {
    if (nic.gids[i] == mad.destination && !nic.gids[i].IsZero()) index = static_cast<uint8_t>(i);
  }
  for (const auto& [gid, at] : nic.former) {
    if (!index && gid == mad.destination) index = at;
  }
  if (!index) return false;
  path->nic = mad.nic;
  path->sgid_index = *index;
  path->local_gid = mad.destination;
  path->remote_gid = mad.source;
  path->traffic_class = mad.traffic_class;
  path->flow_label = mad.flow_label;
  path->pkey = mad.pkey;
  return true;
}

void CmProtocol::HandleMad(const MadPacket& mad, Time now) {
  CmParseError error;
  const auto header = ParseCmHeader(mad.bytes, &error);
  if (!header || mad.nic >= nics_.size()) {
    ++counters_.malformed;
    return;
  }
  ++counters_.received[static_cast<uint16_t>(header->attribute) - 0x10u];
  switch (header->attribute) {
    case CmAttribute::kReq:
      return HandleReq(mad, *header, now);
    case CmAttribute::kMra:
      return HandleMra(mad, now);
    case CmAttribute::kRej:
      return HandleRej(mad, now);
    case CmAttribute::kRep:
      return HandleRep(mad, *header, now);
    case CmAttribute::kRtu:
      return HandleRtu(mad, now);
    case CmAttribute::kDreq:
      return HandleDreq(mad, *header, now);
    case CmAttribute::kDrep:
      return HandleDrep(mad, now);
    case CmAttribute::kSidrReq:
      return HandleSidrReq(mad, *header, now);
    case CmAttribute::kSidrRep:
      return HandleSidrRep(mad, *header, now);
    case CmAttribute::kLap:  // alternate paths do not exist on RoCE
    case CmAttribute::kApr:
      return;
  }
}

void CmProtocol::AnswerRej(const CmPath& back, uint64_t tid, uint32_t local_id, uint32_t remote_id,
                           CmRejected message, CmRejectReason reason) {
  CmRej rej;
  rej.local_comm_id = local_id;
  rej.remote_comm_id = remote_id;
  rej.message = static_cast<uint8_t>(message);
  rej.reason = static_cast<uint16_t>(reason);
  Send(Make(back, tid, rej));
}

// A new connection uses a QP of the peer that an old one believed to have: the
// peer has lost the old one.
void CmProtocol::DisconnectStale(const PeerKey& qpn, Time now) {
  const auto it = remote_qpns_.find(qpn);
  if (it == remote_qpns_.end()) return;
  (void)SendDreq(it->second, now);
}

void CmProtocol::HandleReq(const MadPacket& mad, const MadHeader& header, Time now) {
  const auto req = LoadMessage<CmReq>(mad);
  CmPath back;
  CmQpType qp_type;
  if (!PathBack(mad, &back)) {
    ++counters_.malformed;
    return;
  }
  const PeerKey id_key{req.local_ca_guid, req.local_comm_id};
  if (const auto it = remote_ids_.find(id_key); it != remote_ids_.end()) {
    CountDuplicate(CmAttribute::kReq);
    if (Connection* old = FindConnection(it->second)) HandleDuplicateReq(*old, mad, header, req);
    return;
  }
  if (!QpTypeOf(req, &qp_type) || !IsValid(Pmtu{req.path_mtu})) {
    AnswerRej(back, header.tid, 0, req.local_comm_id, CmRejected::kReq,
              CmRejectReason::kInvalidTransportType);
    return;
  }
  const PeerKey qpn_key{req.local_ca_guid, req.local_qpn};
  if (remote_qpns_.contains(qpn_key)) {
    AnswerRej(back, header.tid, 0, req.local_comm_id, CmRejected::kReq,
              CmRejectReason::kStaleConnection);
    DisconnectStale(qpn_key, now);
    return;
  }
  if (!listeners_.contains(req.service_id)) {
    AnswerRej(back, header.tid, 0, req.local_comm_id, CmRejected::kReq,
              CmRejectReason::kInvalidServiceId);
    return;
  }
  Connection* connection = NewConnection();
  if (connection == nullptr) return;
  connection->state = CmState::kReqReceived;
  connection->qp_type = qp_type;
  connection->path = back;
  connection->path.remote_gid = Gid(req.primary_local_gid);
  connection->path.flow_label = req.primary_flow_label;
  connection->path.traffic_class = req.primary_traffic_class;
  connection->path.hop_limit = req.primary_hop_limit;
  connection->path.sl = req.primary_sl;
  connection->path.rate = req.primary_rate;
  connection->path.mtu = Pmtu{req.path_mtu};
  connection->path.pkey = Pkey(req.pkey);
  connection->path.packet_life_time =
      static_cast<uint8_t>(req.primary_ack_timeout - (req.primary_ack_timeout > 0 ? 1 : 0));
  connection->service_id = req.service_id;
  connection->remote_id = req.local_comm_id;
  connection->remote_ca_guid = req.local_ca_guid;
  connection->remote_qpn = req.local_qpn;
  connection->sq_psn = req.starting_psn;
  // What one side asks as initiator the other serves as responder.
  connection->initiator_depth = req.responder_resources;
  connection->responder_resources = req.initiator_depth;
  connection->retry_count = req.retry_count;
  connection->rnr_retry = req.rnr_retry;
  connection->ack_timeout =
      CmAckTimeout(nics_[mad.nic].ack_delay, connection->path.packet_life_time);
  connection->tid = header.tid;
  connection->timeout = CmTime(req.local_response_timeout);
  connection->max_retries = req.max_cm_retries;
  remote_ids_[id_key] = connection->id;
  remote_qpns_[qpn_key] = connection->id;
  connection->has_remote_id = connection->has_remote_qpn = true;
  events_.push_back(CmEvent{.type = CmEventType::kReqReceived,
                            .id = connection->id,
                            .message = req,
                            .modifier = header.modifier});
}

void CmProtocol::HandleDuplicateReq(Connection& connection, const MadPacket& mad,
                                    const MadHeader& header, const CmReq& req) {
  if (connection.state == CmState::kMraReqSent) {
    Send(connection.message);
  } else if (connection.state == CmState::kTimewait) {
    CmPath back;
    if (!PathBack(mad, &back)) return;
    AnswerRej(back, header.tid, connection.id, req.local_comm_id, CmRejected::kReq,
              CmRejectReason::kStaleConnection);
  }
  // REP has its own timer.
}

void CmProtocol::HandleRep(const MadPacket& mad, const MadHeader& header, Time now) {
  const auto rep = LoadMessage<CmRep>(mad);
  Connection* connection = FindConnection(rep.remote_comm_id);
  if (connection == nullptr || connection->remote_id != 0) return HandleDuplicateRep(rep, header);
  if (connection->state != CmState::kReqSent && connection->state != CmState::kMraReqReceived) {
    return;
  }
  const uint32_t remote_qpn =
      connection->qp_type == CmQpType::kXrcInitiator ? rep.local_eecn : rep.local_qpn;
  const PeerKey id_key{rep.local_ca_guid, rep.local_comm_id};
  const PeerKey qpn_key{rep.local_ca_guid, remote_qpn};
  if (rep.local_comm_id == 0 || remote_ids_.contains(id_key)) return;
  if (remote_qpns_.contains(qpn_key)) {
    AnswerRej(connection->path, header.tid, connection->id, rep.local_comm_id, CmRejected::kRep,
              CmRejectReason::kStaleConnection);
    DisconnectStale(qpn_key, now);
    return;
  }
  StopRepeating(*connection);
  connection->state = CmState::kRepReceived;
  connection->remote_id = rep.local_comm_id;
  connection->remote_ca_guid = rep.local_ca_guid;
  connection->remote_qpn = remote_qpn;
  connection->sq_psn = rep.starting_psn;
  connection->initiator_depth = rep.responder_resources;
  connection->responder_resources = rep.initiator_depth;
  connection->rnr_retry = rep.rnr_retry;
  connection->ack_timeout = CmAckTimeout(
      rep.target_ack_delay,
      static_cast<uint8_t>(connection->ack_timeout - (connection->ack_timeout > 0 ? 1 : 0)));
  remote_ids_[id_key] = connection->id;
  remote_qpns_[qpn_key] = connection->id;
  connection->has_remote_id = connection->has_remote_qpn = true;
  events_.push_back(CmEvent{.type = CmEventType::kRepReceived,
                            .id = connection->id,
                            .message = rep,
                            .modifier = header.modifier});
}

// The RTU or the MRA did not get through.
void CmProtocol::HandleDuplicateRep(const CmRep& rep, const MadHeader& header) {
  Connection* connection = FindPair(rep.remote_comm_id, rep.local_comm_id);
  if (connection == nullptr) return;
  CountDuplicate(CmAttribute::kRep);
  if (!connection->active) return;
  if (connection->state == CmState::kEstablished || connection->state == CmState::kMraRepSent) {
    MadHeader answer = MadHeader::Load(connection->message.bytes.data());
    answer.tid = header.tid;
    answer.Store(connection->message.bytes.data());
    Send(connection->message);
  }
}

void CmProtocol::HandleRtu(const MadPacket& mad, Time /*now*/) {
  const auto rtu = LoadMessage<CmRtu>(mad);
  Connection* connection = FindPair(rtu.remote_comm_id, rtu.local_comm_id);
  if (connection == nullptr) return;
  if (connection->state != CmState::kRepSent && connection->state != CmState::kMraRepReceived) {
    CountDuplicate(CmAttribute::kRtu);
    return;
  }
  StopRepeating(*connection);
  connection->state = CmState::kEstablished;
  Emit(CmEventType::kRtuReceived, *connection);
}

void CmProtocol::HandleRej(const MadPacket& mad, Time now) {
  const auto rej = LoadMessage<CmRej>(mad);
  Connection* connection = nullptr;
  if (rej.reason == static_cast<uint16_t>(CmRejectReason::kTimeout)) {
    // From a peer that never got an answer and so does not know our id.
    const auto it = remote_ids_.find({LoadBe64(rej.info.data()), rej.local_comm_id});
    if (it != remote_ids_.end()) connection = FindConnection(it->second);
  } else if (rej.message == static_cast<uint8_t>(CmRejected::kReq)) {
    connection = FindPair(rej.remote_comm_id, 0);
  } else {
    connection = FindPair(rej.remote_comm_id, rej.local_comm_id);
  }
  if (connection == nullptr) return;
  switch (connection->state) {
    case CmState::kReqSent:
    case CmState::kMraReqReceived:
    case CmState::kRepSent:
    case CmState::kMraRepReceived:
    case CmState::kReqReceived:
    case CmState::kMraReqSent:
      if (rej.reason == static_cast<uint16_t>(CmRejectReason::kStaleConnection)) {
        EnterTimewait(*connection, now);
      } else {
        ResetToIdle(*connection);
      }
      break;
    case CmState::kDreqSent:
    case CmState::kRepReceived:
    case CmState::kMraRepSent:
    case CmState::kEstablished:
      EnterTimewait(*connection, now);
      break;
    default:
      return;
  }
  events_.push_back(
      CmEvent{.type = CmEventType::kRejReceived, .id = connection->id, .message = rej});
}

void CmProtocol::HandleMra(const MadPacket& mad, Time now) {
  const auto mra = LoadMessage<CmMra>(mad);
  Connection* connection = nullptr;
  CmState next = CmState::kIdle;
  if (mra.message == static_cast<uint8_t>(CmRejected::kReq)) {
    connection = FindPair(mra.remote_comm_id, 0);
    if (connection == nullptr) return;
    if (connection->state == CmState::kReqSent) next = CmState::kMraReqReceived;
  } else if (mra.message == static_cast<uint8_t>(CmRejected::kRep)) {
    connection = FindPair(mra.remote_comm_id, mra.local_comm_id);
    if (connection == nullptr) return;
    if (connection->state == CmState::kRepSent) next = CmState::kMraRepReceived;
  } else {
    return;
  }
  if (next == CmState::kIdle) {
    CountDuplicate(CmAttribute::kMra);
    return;
  }
  connection->state = next;
  connection->interval = CmTime(mra.service_timeout) + CmTime(connection->ack_timeout);
  SetDeadline(*connection, now + connection->interval);
  Emit(CmEventType::kMraReceived, *connection);
}

void CmProtocol::HandleDreq(const MadPacket& mad, const MadHeader& header, Time /*now*/) {
  const auto dreq = LoadMessage<CmDreq>(mad);
  Connection* connection = FindPair(dreq.remote_comm_id, dreq.local_comm_id);
  CmPath back;
  const bool answerable = PathBack(mad, &back);
  const auto answer = [&] {
    CmDrep drep;
    drep.local_comm_id = dreq.remote_comm_id;
    drep.remote_comm_id = dreq.local_comm_id;
    if (answerable) Send(Make(back, header.tid, drep));
  };
  if (connection == nullptr) {
    // Unknown here, or destroyed: the peer may stop asking.
    answer();
    return;
  }
  if (connection->local_qpn != dreq.remote_qpn) return;
  switch (connection->state) {
    case CmState::kRepSent:
    case CmState::kMraRepReceived:
    case CmState::kDreqSent:
    case CmState::kEstablished:
      StopRepeating(*connection);
      connection->state = CmState::kDreqReceived;
      connection->tid = header.tid;
      Emit(CmEventType::kDreqReceived, *connection);
      return;
    case CmState::kTimewait:
    case CmState::kIdle:  // timewait is over before the peer asks again (Linux: silence)
      CountDuplicate(CmAttribute::kDreq);
      answer();
      return;
    case CmState::kDreqReceived:
      CountDuplicate(CmAttribute::kDreq);
      return;
    default:
      return;
  }
}

void CmProtocol::HandleDrep(const MadPacket& mad, Time now) {
  const auto drep = LoadMessage<CmDrep>(mad);
  Connection* connection = FindPair(drep.remote_comm_id, drep.local_comm_id);
  if (connection == nullptr) return;
  if (connection->state != CmState::kDreqSent && connection->state != CmState::kDreqReceived) {
    CountDuplicate(CmAttribute::kDrep);
    return;
  }
  EnterTimewait(*connection, now);
  Emit(CmEventType::kDrepReceived, *connection);
}

void CmProtocol::HandleSidrReq(const MadPacket& mad, const MadHeader& header, Time /*now*/) {
  const auto req = LoadMessage<CmSidrReq>(mad);
  CmPath back;
  if (!PathBack(mad, &back)) {
    ++counters_.malformed;
    return;
  }
  const std::pair<Gid, uint32_t> key{mad.source, req.request_id};
  if (sidr_requests_.contains(key)) {
    CountDuplicate(CmAttribute::kSidrReq);
    return;
  }
  if (!listeners_.contains(req.service_id)) {
    CmSidrRep rep;
    rep.request_id = req.request_id;
    rep.status = static_cast<uint8_t>(CmSidrStatus::kUnsupported);
    rep.service_id = req.service_id;
    Send(Make(back, header.tid, rep));
    return;
  }
  Connection* connection = NewConnection();
  if (connection == nullptr) return;
  connection->state = CmState::kSidrReqReceived;
  connection->path = back;
  connection->service_id = req.service_id;
  connection->tid = header.tid;
  connection->sidr_source = mad.source;
  connection->sidr_request = req.request_id;
  sidr_requests_[key] = connection->id;
  events_.push_back(
      CmEvent{.type = CmEventType::kSidrReqReceived, .id = connection->id, .message = req});
}

void CmProtocol::HandleSidrRep(const MadPacket& mad, const MadHeader& header, Time /*now*/) {
  const auto rep = LoadMessage<CmSidrRep>(mad);
  Connection* connection = FindConnection(rep.request_id);
  if (connection == nullptr || connection->state != CmState::kSidrReqSent) return;
  ResetToIdle(*connection);
  events_.push_back(CmEvent{.type = CmEventType::kSidrRepReceived,
                            .id = connection->id,
                            .message = rep,
                            .modifier = header.modifier});
}

}  // namespace verbena::transport
