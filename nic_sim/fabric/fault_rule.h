// SPDX-License-Identifier: Apache-2.0
//
// The text form of a fault rule: 'ACTION [key=value ...]'.
//
//   drop       the packet vanishes
//   duplicate  a copy follows the packet
//   corrupt    one random bit behind the fields that lead a packet to its QP is
//              flipped and the ICRC stays: the receiver drops it as bad_icrc
//   reorder    the packet waits until by= (default 1) later packets of the same
//              flow went ahead, at most kReorderLimit; one of a flow at a time
//   delay      the packet waits us= microseconds
//   mark       ECN becomes Congestion Experienced
//   down       the link is down: both directions, or the one of dir=, drop. For
//              us=, or while the rule exists. With opcode=, qpn=, psn=, nth=,
//              every= or prob= it goes down at the packet that these select.
//
// Keys: what a packet must have.
//   dev=D         it is sent or received by D
//   dir=tx|rx     sending or receiving side of D (of any device without dev=).
//                 Without dir= a packet is looked at once on its way: where it
//                 is sent, or, if D only receives it, there.
//   qpn=N         dir=tx: its source QP; dir=rx: its destination QP; without
//                 dir=: the QP of D, or any of the two without dev=
//   opcode=NAME   "RC_SEND_ONLY", "rdma_write_first" (of any service), or a
//                 class: send, write, read (requests and responses), atomic
//                 (requests and results), ack (ACK, NAK, RNR NAK), any
//   psn=N         PacketMeta::psn_offset
// Which of the packets that have all that:
//   nth=N         the N-th only (from 1)
//   every=N       each N-th
//   prob=P        each with probability P (0..1), by the rule's own generator
//   seed=N        start of the generator, for prob= and corrupt; default: the
//                 rule's id
//   count=N       at most N hits
// Numbers are decimal, or hexadecimal with 0x.
#pragma once

#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "nic_sim/fabric/packet_queue.h"

namespace verbena::nic {

enum class FaultAction : uint8_t { kDrop, kDuplicate, kCorrupt, kReorder, kDelay, kMark, kDown };

struct FaultRule {
  FaultAction action = FaultAction::kDrop;
  std::optional<std::string> device;
  std::optional<Direction> direction;
  std::optional<uint32_t> qpn;
  std::optional<std::bitset<256>> opcodes;  // empty: any, also what has no BTH
  std::optional<uint32_t> psn_offset;
  std::optional<uint64_t> nth;
  std::optional<uint64_t> every;
  std::optional<double> probability;
  std::optional<uint64_t> seed;
  std::optional<uint64_t> count;
  std::optional<transport::Duration> duration;  // us=
  uint32_t distance = 1;                        // by=
  std::string text;                             // as given, with single spaces

  // A packet can be singled out, so `down` waits for it.
  bool has_trigger() const { return qpn || opcodes || psn_offset || nth || every || probability; }
};

// False with a sentence in *error that quotes the bad word.
bool ParseFaultRule(std::string_view text, FaultRule* rule, std::string* error);

// The opcodes of a name or class as in opcode=; empty if there is none.
std::optional<std::bitset<256>> ParseOpcodeSet(std::string_view name);

}  // namespace verbena::nic
