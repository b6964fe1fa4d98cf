// SPDX-License-Identifier: Apache-2.0
//
// The text form of a fault rule: 'ACTION [key=value ...]'.
//
//   drop       the packet vanishes
//   duplicate  a copy follows the packet
//   corrupt    one random bit behind the fields that lead a packet to its QP is
//              flipped; with at=N the bits of xor= (default 1) of byte N, counted
//              from the BTH's first. The ICRC stays: the receiver drops it as
//              bad_icrc; with icrc=right it is computed anew
//   truncate   the last bytes=N of the frame are cut off, the lengths in its
//              headers stay: the receiver drops it as malformed
//   set        FIELD=VALUE ... header fields get other values; names as in
//              transport/wire/header_field.h; +N and -N count from the present
//              value. The ICRC is computed anew unless icrc=wrong
//   reorder    the packet waits until by= (default 1) later packets of the same
//              flow went ahead, at most kReorderLimit; one of a flow at a time
//   delay      the packet waits us= microseconds, and up to jitter= more: evenly, or as
//              dist= says, normal (us= the mean, jitter= the deviation), exponential
//              or pareto (jitter= the scale). Packets of one rule stay in order
//   rate       packets wait until a link of mbps= (10^6 bit/s of frames) has sent
//              those before; kRateQueue wait, what comes on top is dropped
//   stall      the NIC of dev= stands still (neither sends nor takes, timers wait), for
//              us= or while the rule exists, or at the packet that keys select, as down
//   slow_dma   each packet with payload that the NIC of dev= sends or takes holds it up
//              for us=, or as long as mbps= needs for the payload
//   forge      the packet goes on, and its sender gets an answer that nobody sent:
//              kind=ack, rnr (rnr_timer=, IBTA code, default 1), nak_sequence,
//              nak_request, nak_access, nak_operation, each for the packet's PSN (RC
//              and XRC requests), or cnp
//   mark       ECN becomes Congestion Experienced
//   hold       the packet waits, in order with the others that the rule holds, until
//              FaultStage::Release lets it go or the rule is removed; of more than
//              kHoldQueue the oldest goes on
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
//   app=NAME, nth_qp=N   as qpn=, the QP is of a process of that name, its N-th
//   pair=A-B      between the QPs A and B, both ways
//   msg=N         of the requester's N-th message (or of the answers to it), counted from
//                 the first rule with this key on
//   sqpn=N, dqpn=N   its source QP, its destination QP, on either side
//   size=N, size=N-M bytes from the IP header to the ICRC
//   transmission=N   it is sent for the N-th time (1: no retransmission), counted
//                 from the first rule with this key on
//   after=US, until=US   microseconds since the rule was added
//   opcode=NAME   "RC_SEND_ONLY", "rdma_write_first" (of any service), or a
//                 class: send, write, read (requests and responses), atomic
//                 (requests and results), ack (ACK, NAK, RNR NAK), request, response,
//                 first, middle, last, only, imm, any; several with commas: any of them
//   psn=N         PacketMeta::psn_offset
//   mad=NAME      a message of the connection manager: req, mra, rej, rep, rtu,
//                 dreq, drep, sidr_req, sidr_rep, lap, apr
// Which of the packets that have all that:
//   nth=N         the N-th only (from 1)
//   every=N       each N-th
//   prob=P        each with probability P (0..1), by the rule's own generator
//   burst=N       with prob=: what prob= starts is a burst (Gilbert-Elliott): it
//                 goes on with the packets that follow, N of them on average
//   seed=N        start of the generator, for prob=, burst=, jitter= and corrupt;
//                 default: the rule's id
//   count=N       at most N hits
// Numbers are decimal, or hexadecimal with 0x.
#pragma once

#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nic_sim/fabric/packet_queue.h"
#include "transport/wire/header_field.h"

namespace verbena::nic {

enum class FaultAction : uint8_t {
  kDrop,
  kDuplicate,
  kCorrupt,
  kTruncate,
  kSet,
  kReorder,
  kDelay,
  kRate,
  kMark,
  kDown,
  kHold,
  kStall,
  kSlowDma,
  kForge
};

enum class DelayDistribution : uint8_t { kUniform, kNormal, kExponential, kPareto };

// One FIELD=VALUE of `set`.
struct FieldChange {
  const transport::HeaderField* field = nullptr;
  uint64_t value = 0;
  bool relative = false;  // added, modulo the field's width
};

struct FaultRule {
  FaultAction action = FaultAction::kDrop;
  std::optional<std::string> device;
  std::optional<Direction> direction;
  std::optional<uint32_t> qpn;
  std::optional<std::bitset<256>> opcodes;  // empty: any, also what has no BTH
  std::optional<uint32_t> source_qpn;
  std::optional<uint32_t> dest_qpn;
  std::optional<uint32_t> psn_offset;
  std::optional<uint16_t> mad;  // attribute id
  std::optional<uint32_t> transmission;
  std::optional<std::string> app;
  std::optional<uint32_t> nth_qp;
  std::optional<std::pair<uint32_t, uint32_t>> pair;
  std::optional<uint32_t> message;
  uint32_t min_size = 0;
  uint32_t max_size = UINT32_MAX;
  transport::Duration after;                 // since it was added
  std::optional<transport::Duration> until;  // likewise
  std::optional<uint64_t> nth;
  std::optional<uint64_t> every;
  std::optional<double> probability;
  std::optional<uint32_t> burst;
  std::optional<uint64_t> seed;
  std::optional<uint64_t> count;
  std::optional<transport::Duration> duration;  // us=
  std::optional<transport::Duration> period;    // of kDown and kStall
  transport::Duration jitter;
  DelayDistribution distribution = DelayDistribution::kUniform;
  std::optional<uint8_t> syndrome;  // of kForge; none: CNP
  bool has_kind = false;
  std::optional<uint8_t> rnr_timer;
  uint32_t distance = 1;          // by=
  std::optional<uint32_t> mbps;   // of kRate
  std::optional<uint32_t> bytes;  // of kTruncate
  std::optional<uint32_t> at;     // of kCorrupt
  uint8_t flipped = 1;            // xor=
  std::optional<bool> right_icrc;
  std::vector<FieldChange> changes;  // of kSet
  std::string text;                  // as given, with single spaces

  // It begins or ends by the clock, which starts when the rule is added.
  bool has_times() const {
    return after > transport::Duration() || until || (is_down_like() && duration);
  }
  // It has a state of its own that packets or the clock change.
  bool is_down_like() const {
    return action == FaultAction::kDown || action == FaultAction::kStall;
  }
  bool names_qp() const { return app || nth_qp; }
  // A packet can be singled out, so `down` waits for it.
  bool has_trigger() const {
    return qpn || source_qpn || dest_qpn || opcodes || psn_offset || mad || transmission || nth ||
           every || probability || app || nth_qp || pair || message || min_size > 0 ||
           max_size < UINT32_MAX;
  }
};

// False with a sentence in *error that quotes the bad word, and in *field the key that
// is wrong (empty: the rule).
bool ParseFaultRule(std::string_view text, FaultRule* rule, std::string* error,
                    std::string* field = nullptr);

// The opcodes of names or classes as in opcode=; empty if one is not known.
std::optional<std::bitset<256>> ParseOpcodeSet(std::string_view name);

}  // namespace verbena::nic
