// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/transport/cm/protocol_pair.h"

#include <algorithm>

namespace verbena::transport {

ProtocolPair::ProtocolPair()
    : sides_{{{0xa, Address(0), 0x11223344}, {0xb, Address(1), 0x55667788}}} {
  passive().protocol.Listen(kTestServiceId);
}

CmPath ProtocolPair::Path(size_t side) {
  CmPath path;
  path.sgid_index = 1;
  path.local_gid = Address(side);
  path.remote_gid = Address(1 - side);
  path.flow_label = 0x12345;
  path.mtu = Pmtu::k4096;
  return path;
}

CmReqParameters ProtocolPair::Request(uint32_t qpn) {
  CmReqParameters req;
  req.path = Path(kActive);
  req.service_id = kTestServiceId;
  req.qpn = qpn;
  req.starting_psn = 0x777777;
  req.responder_resources = 3;
  req.initiator_depth = 5;
  return req;
}

size_t ProtocolPair::CountSeen(CmAttribute attribute) const {
  return static_cast<size_t>(std::count_if(
      seen_.begin(), seen_.end(), [&](const SeenMad& m) { return m.attribute == attribute; }));
}

void ProtocolPair::Connect(uint32_t qpn) {
  active().id = *active().protocol.SendReq(Request(qpn), now_);
  Drain();
}

void ProtocolPair::HandleEvent(Side& side, const CmEvent& event) {
  side.events.push_back(event.type);
  side.when[event.type] = now_;
  CmProtocol& protocol = side.protocol;
  switch (event.type) {
    case CmEventType::kReqReceived:
      side.id = event.id;
      (void)protocol.SendMra(event.id, 24, true, now_);
      if (side.rejects) {
        (void)protocol.SendRej(event.id, CmRejectReason::kConsumerDefined, {}, {}, now_);
      } else if (side.accepts) {
        CmRepParameters rep;
        rep.qpn = 0x200 + static_cast<uint32_t>(side.events.size());
        rep.starting_psn = 0x555555;
        rep.responder_resources = 5;
        rep.initiator_depth = 3;
        (void)protocol.SendRep(event.id, rep, now_);
      }
      break;
    case CmEventType::kRepReceived:
      (void)protocol.SendMra(event.id, 24, true, now_);
      if (side.answers) (void)protocol.SendRtu(event.id, {}, now_);
      break;
    case CmEventType::kDreqReceived:
      if (side.obeys) (void)protocol.SendDrep(event.id, now_);
      break;
    case CmEventType::kRejReceived:
      side.rej = std::get<CmRej>(event.message);
      break;
    default:
      break;
  }
}

void ProtocolPair::Drain() {
  for (size_t i = 0; i < 2; ++i) {
    CmEvent event;
    while (sides_[i].protocol.PollEvent(&event)) HandleEvent(sides_[i], event);
    MadPacket mad;
    while (sides_[i].protocol.PollMad(&mad)) {
      SeenMad seen{now_, i, MadHeader::Load(mad.bytes.data()).attribute, mad};
      const Fate what = fate ? fate(seen_.size(), seen) : Fate{};
      seen_.push_back(seen);
      const Time arrival = now_ + kLatency + what.delay;
      if (!what.drop) in_flight_.emplace(arrival.ns(), std::pair(1 - i, mad));
      if (what.duplicate) {
        in_flight_.emplace((arrival + kLatency).ns(), std::pair(1 - i, mad));
      }
    }
  }
}

void ProtocolPair::Inject(size_t side, const MadPacket& mad) {
  sides_[side].protocol.HandleMad(mad, now_);
  Drain();
}

void ProtocolPair::RunUntil(Time end) {
  for (;;) {
    Drain();
    Time next = std::min(sides_[0].protocol.next_timeout(), sides_[1].protocol.next_timeout());
    if (!in_flight_.empty()) {
      next = std::min(next, Time::FromNanoseconds(in_flight_.begin()->first));
    }
    if (next > end) break;
    now_ = std::max(now_, next);
    while (!in_flight_.empty() && in_flight_.begin()->first <= now_.ns()) {
      const auto [receiver, mad] = in_flight_.begin()->second;
      in_flight_.erase(in_flight_.begin());
      sides_[receiver].protocol.HandleMad(mad, now_);
      Drain();
    }
    for (Side& side : sides_) {
      if (side.protocol.next_timeout() <= now_) side.protocol.HandleTimeout(now_);
    }
  }
  now_ = end;
}

}  // namespace verbena::transport
