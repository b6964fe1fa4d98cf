// SPDX-License-Identifier: Apache-2.0
//
// RcResponder: what goes out: ACKs, NAKs, READ and atomic responses.
#include <algorithm>

#include "transport/rc/responder.h"

namespace verbena::transport {

// May the entry at `position` go out?
bool RcResponder::IsReady(uint32_t position) {
  const Response& response = responses_[position];
  if (response.ticket > committed_) return false;
  if (response.kind != Response::Kind::kAtomic) return true;
  const AtomicRecord* record = replay_queue_.FindByPsn(response.psn);
  return record == nullptr || record->done;
}

void RcResponder::EmitAeth(Opcode opcode, Psn psn, uint8_t syndrome, Msn msn, TxPacket* packet) {
  packet->opcode = opcode;
  packet->psn = psn;
  packet->syndrome = syndrome;
  packet->msn = msn;
  packet->ack_request = false;
  packet->solicited = false;
  packet->retransmission = false;
  packet->payload_bytes = 0;
  packet->segment_count = 0;
  packet->inline_payload = nullptr;
}

// The next packet of a READ's response. False: the key is not valid any more
// for a stream that answers a duplicate, which may be an old one.
bool RcResponder::EmitRead(Response& response, TxPacket* packet) {
  if (service_ == Service::kXrc && !receive_queue_.Select(response.srq) && response.replay) {
    return false;
  }
  if (response.restarted && response.replay && response.left != 0 &&
      memory_.Check(response.rkey, response.address, response.left, MemoryAccess::kRemoteRead) !=
          MemoryStatus::kOk) {
    return false;
  }
  const bool first = response.psn == response.first_psn;
  const bool last = response.left <= mtu_;
  const Opcode opcode = first
                            ? (last ? Opcode::kRcReadResponseOnly : Opcode::kRcReadResponseFirst)
                            : (last ? Opcode::kRcReadResponseLast : Opcode::kRcReadResponseMiddle);
  const uint32_t bytes = std::min(response.left, mtu_);
  EmitAeth(opcode, response.psn, Aeth::Ack(response.msn).syndrome, response.msn, packet);
  packet->retransmission = response.restarted;
  packet->srq = response.srq;
  packet->payload_bytes = bytes;
  packet->payload_access = MemoryAccess::kRemoteRead;
  if (bytes != 0) {
    packet->segment_count = 1;
    packet->segments[0] = {response.address, bytes, response.rkey};
  }
  response.psn = response.psn.Next();
  response.address += bytes;
  response.left -= bytes;
  return true;
}

bool RcResponder::PollTransmit(Time /*now*/, TxPacket* packet) {
  while (!responses_.empty() && IsReady(0)) {
    Response& response = responses_.front();
    switch (response.kind) {
      case Response::Kind::kAck:
        // What follows acknowledges this too: a later ACK, or the response to a
        // later READ or atomic.
        if (responses_.size() > 1 && IsReady(1) && !responses_[1].replay &&
            responses_[1].kind != Response::Kind::kTransientNak) {
          break;
        }
        EmitAeth(Opcode::kRcAcknowledge, response.psn, Aeth::Ack(response.msn).syndrome,
                 response.msn, packet);
        responses_.pop_front();
        return true;
      case Response::Kind::kTransientNak:
        if (response.psn != expected_psn_) break;
        [[fallthrough]];
      case Response::Kind::kFatalNak:
        EmitAeth(Opcode::kRcAcknowledge, response.psn, response.syndrome, response.msn, packet);
        responses_.pop_front();
        return true;
      case Response::Kind::kRead: {
        if (!EmitRead(response, packet)) break;
        if (response.psn == response.end_psn) responses_.pop_front();
        return true;
      }
      case Response::Kind::kAtomic: {
        const AtomicRecord* record = replay_queue_.FindByPsn(response.psn);
        if (record == nullptr) break;
        EmitAeth(Opcode::kRcAtomicAcknowledge, response.psn, Aeth::Ack(response.msn).syndrome,
                 response.msn, packet);
        packet->original = record->original;
        packet->retransmission = response.replay;
        responses_.pop_front();
        return true;
      }
    }
    responses_.pop_front();
  }
  return false;
}

}  // namespace verbena::transport
