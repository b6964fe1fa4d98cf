// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: what the CM protocol reports, as events of rdma_cm.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "nic_sim/cm/agent_state.h"

namespace verbena::nic {
namespace {

using transport::CmConnection;
using transport::CmEvent;
using transport::CmEventType;
using transport::CmQpType;
using transport::CmRej;
using transport::CmRep;
using transport::CmReq;
using transport::CmSidrRep;
using transport::CmSidrReq;
using transport::Gid;
using transport::RdmaIpHeader;

// enum rdma_cm_event_type.
constexpr uint32_t kConnectRequest = 4;
constexpr uint32_t kConnectResponse = 5;
constexpr uint32_t kUnreachable = 7;
constexpr uint32_t kRejected = 8;
constexpr uint32_t kEstablished = 9;
constexpr uint32_t kDisconnected = 10;
constexpr uint32_t kTimewaitExit = 15;

// While an application decides, its peer must not give up: 4.096 us * 2^24.
constexpr uint8_t kDecisionTimeout = 24;

// An event of `record`; its parameter is still zero.
CmQueuedEvent MakeEvent(const CmIdRecord& record, uint32_t type, int32_t status = 0) {
  CmQueuedEvent event{};
  event.response.uid = record.uid;
  event.response.id = record.id;
  event.response.event = type;
  event.response.status = static_cast<uint32_t>(status);
  return event;
}

// Private data is reported with the length that the message has room for.
template <typename Param>
void FillPrivateData(std::span<const std::byte> data, Param* param) {
  std::memcpy(param->private_data, data.data(), data.size());
  param->private_data_len = static_cast<uint8_t>(data.size());
}

uint32_t VendorId(const CmRep& rep) {
  return (uint32_t{rep.vendor_id_high} << 16) | (uint32_t{rep.vendor_id_middle} << 8) |
         rep.vendor_id_low;
}

CmIdQpType IdType(CmQpType type) {
  switch (type) {
    case CmQpType::kRc:
      return CmIdQpType::kRc;
    case CmQpType::kUc:
      return CmIdQpType::kUc;
    case CmQpType::kXrcInitiator:
      return CmIdQpType::kXrcSend;
    case CmQpType::kXrcTarget:
      return CmIdQpType::kXrcRecv;
  }
  return CmIdQpType::kRc;
}

}  // namespace

void CmAgent::State::DrainProtocol() {
  CmEvent event;
  while (protocol_.PollEvent(&event)) {
    if (event.type == CmEventType::kReqReceived || event.type == CmEventType::kSidrReqReceived) {
      HandleRequest(event);
      continue;
    }
    const auto it = by_cm_.find(event.id);
    if (it != by_cm_.end()) HandleEvent(*ids_.at(it->second), event);
  }
}

CmIdRecord* CmAgent::State::FindListener(uint64_t service_id, const RdmaIpHeader& header,
                                         CmIdQpType type) {
  const auto it = listeners_.find(service_id);
  if (it == listeners_.end()) return nullptr;
  const uint16_t family = header.ip_version == 4 ? kFamilyInet : kFamilyInet6;
  CmIdRecord* wildcard = nullptr;
  for (const uint32_t id : it->second) {
    CmIdRecord& listener = *ids_.at(id);
    if (listener.qp_type != type) continue;
    if (listener.source.IsAny()) {
      if (listener.source.family == family || !listener.family_only) wildcard = &listener;
    } else if (listener.source.family == family && listener.source.ip == header.destination) {
      return &listener;
    }
  }
  return wildcard;
}

// A request for a connection, or for a QP number (SIDR).
void CmAgent::State::HandleRequest(const CmEvent& event) {
  const auto* req = std::get_if<CmReq>(&event.message);
  const auto* sidr = std::get_if<CmSidrReq>(&event.message);
  const CmConnection& connection = *protocol_.Find(event.id);
  const std::span<const std::byte> data =
      req != nullptr ? std::span<const std::byte>(req->private_data) : sidr->private_data;
  const auto header = RdmaIpHeader::Load(data.data());
  const CmIdQpType type = req != nullptr ? IdType(connection.qp_type) : CmIdQpType::kUd;
  CmIdRecord* listener = header ? FindListener(connection.service_id, *header, type) : nullptr;
  if (listener == nullptr) {
    protocol_.Destroy(event.id, now_);
    return;
  }
  // Without room for it the request is as lost; the peer repeats it.
  CmIdRecord* child = listener->backlog == 0 ? nullptr : NewId(listener->file);
  if (child == nullptr) {
    protocol_.Destroy(event.id, now_, true);
    return;
  }
  --listener->backlog;
  child->port_space = listener->port_space;
  child->qp_type = listener->qp_type;
  child->state = CmIdState::kConnect;
  child->cm = event.id;
  child->tos = listener->tos;
  child->family_only = listener->family_only;
  const uint16_t family = header->ip_version == 4 ? kFamilyInet : kFamilyInet6;
  child->source.family = family;
  child->source.ip = header->destination;
  child->source.port = listener->source.port;
  child->destination.family = family;
  child->destination.ip = header->source;
  child->destination.port = header->source_port;
  child->local = LocalEnd{.nic = connection.path.nic, .sgid_index = connection.path.sgid_index};
  child->local_gid = connection.path.local_gid;
  child->remote_gid = connection.path.remote_gid;
  child->path = connection.path;
  child->has_path = req != nullptr;
  by_cm_[event.id] = child->id;

  CmQueuedEvent request = MakeEvent(*listener, kConnectRequest);
  request.child = child->id;
  request.response.id = child->id;
  const auto user = data.subspan(RdmaIpHeader::kBytes);
  if (req != nullptr) {
    rdma_ucm_conn_param& param = request.response.param.conn;
    FillPrivateData(user, &param);
    param.qp_num = connection.remote_qpn;
    param.responder_resources = connection.responder_resources;
    param.initiator_depth = connection.initiator_depth;
    param.flow_control = req->flow_control;
    param.retry_count = req->retry_count;
    param.rnr_retry_count = req->rnr_retry;
    param.srq = req->srq;
    request.response.ece.vendor_id = req->vendor_id;
    request.response.ece.attr_mod = event.modifier;
    (void)protocol_.SendMra(event.id, kDecisionTimeout, true, now_);
  } else {
    FillPrivateData(user, &request.response.param.ud);
  }
  Queue(*listener, request);
}

// Only the first sign of the end is reported.
bool CmAgent::State::EnterDisconnect(CmIdRecord& record) {
  if (record.state != CmIdState::kConnect) return false;
  record.state = CmIdState::kDisconnect;
  return true;
}

void CmAgent::State::HandleSidrAnswer(CmIdRecord& record, const CmSidrRep& rep) {
  const bool found = rep.status == static_cast<uint8_t>(transport::CmSidrStatus::kSuccess);
  CmQueuedEvent event = MakeEvent(record, found ? kEstablished : kUnreachable, rep.status);
  rdma_ucm_ud_param& param = event.response.param.ud;
  FillPrivateData(rep.private_data, &param);
  if (found) {
    record.qkey = rep.qkey;
    FillAhAttr(record.path, &param.ah_attr);
    param.qp_num = rep.qpn;
    param.qkey = rep.qkey;
  }
  Queue(record, event);
}

void CmAgent::State::HandleEvent(CmIdRecord& record, const CmEvent& event) {
  if (event.type == CmEventType::kTimewaitExit) {
    if (record.state == CmIdState::kDisconnect) QueuePlain(record, kTimewaitExit, 0);
    return;
  }
  if (record.state != CmIdState::kConnect) return;
  switch (event.type) {
    case CmEventType::kReqError:
    case CmEventType::kRepError:
    case CmEventType::kSidrReqError:
      QueuePlain(record, kUnreachable, -ETIMEDOUT);
      return;
    case CmEventType::kRepReceived: {
      const auto& rep = std::get<CmRep>(event.message);
      (void)protocol_.SendMra(event.id, kDecisionTimeout, true, now_);
      CmQueuedEvent response = MakeEvent(record, kConnectResponse);
      rdma_ucm_conn_param& param = response.response.param.conn;
      FillPrivateData(rep.private_data, &param);
      const CmConnection& connection = *protocol_.Find(event.id);
      param.qp_num = connection.remote_qpn;
      param.responder_resources = connection.responder_resources;
      param.initiator_depth = connection.initiator_depth;
      param.flow_control = rep.flow_control;
      param.rnr_retry_count = rep.rnr_retry;
      param.srq = rep.srq;
      response.response.ece.vendor_id = VendorId(rep);
      response.response.ece.attr_mod = event.modifier;
      Queue(record, response);
      return;
    }
    case CmEventType::kRtuReceived:
    case CmEventType::kUserEstablished:
      QueuePlain(record, kEstablished, 0);
      return;
    case CmEventType::kRejReceived: {
      const auto& rej = std::get<CmRej>(event.message);
      CmQueuedEvent rejected = MakeEvent(record, kRejected, rej.reason);
      FillPrivateData(rej.private_data, &rejected.response.param.conn);
      Queue(record, rejected);
      return;
    }
    case CmEventType::kDreqError:
      if (EnterDisconnect(record)) QueuePlain(record, kDisconnected, -ETIMEDOUT);
      return;
    case CmEventType::kDreqReceived:
    case CmEventType::kDrepReceived:
      if (EnterDisconnect(record)) QueuePlain(record, kDisconnected, 0);
      return;
    case CmEventType::kSidrRepReceived:
      HandleSidrAnswer(record, std::get<CmSidrRep>(event.message));
      return;
    default:
      return;
  }
}

}  // namespace verbena::nic
