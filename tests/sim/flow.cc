// SPDX-License-Identifier: Apache-2.0
//
// Flow: what has to be true.
#include "tests/sim/flow.h"

#include <algorithm>
#include <utility>

#include "transport/wire/aeth.h"

namespace verbena::sim {

using transport::Aeth;
using transport::Msn;
using transport::NakCode;
using transport::Opcode;
using transport::OpcodeTraits;
using transport::TraitsOf;
using transport::TxPacket;

namespace {

transport::OperationKind KindOf(const Wr& wr) {
  using transport::OperationKind;
  if (wr.is_send()) return OperationKind::kSend;
  if (wr.is_write()) return OperationKind::kWrite;
  if (wr.is_read()) return OperationKind::kReadRequest;
  if (wr.is_atomic_write()) return OperationKind::kAtomicWrite;
  if (wr.is_flush()) return OperationKind::kFlush;
  return wr.opcode == WrOpcode::kCompareSwap ? OperationKind::kCompareSwap
                                             : OperationKind::kFetchAdd;
}

// The fatal NAK that a WR with this expectation draws; -1: none.
int ExpectedNak(WcStatus status) {
  switch (status) {
    case WcStatus::kRemInvReqErr:
      return static_cast<int>(NakCode::kInvalidRequest);
    case WcStatus::kRemAccessErr:
      return static_cast<int>(NakCode::kRemoteAccessError);
    case WcStatus::kRemOpErr:
      return static_cast<int>(NakCode::kRemoteOperationalError);
    default:
      return -1;
  }
}

bool Equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace

Wr* Flow::Find(uint64_t sequence) {
  auto after =
      std::upper_bound(begun_.begin(), begun_.end(), sequence,
                       [this](uint64_t value, uint32_t index) { return value < wrs[index].first; });
  if (after == begun_.begin()) return nullptr;
  Wr& wr = wrs[*(after - 1)];
  return sequence < wr.end() ? &wr : nullptr;
}

Msn Flow::MessagesUpTo(uint64_t sequence) const {
  auto after =
      std::upper_bound(begun_.begin(), begun_.end(), sequence + 1,
                       [this](uint64_t value, uint32_t index) { return value < wrs[index].end(); });
  return Msn(static_cast<uint32_t>(after - begun_.begin()));
}

uint32_t Flow::OutstandingReads(uint64_t una) const {
  uint32_t count = 0;
  for (size_t i = begun_.size(); i-- > 0;) {
    const Wr& wr = wrs[begun_[i]];
    if (wr.end() <= una) break;
    if (wr.is_answered()) ++count;
  }
  return count;
}

std::pair<uint64_t, uint32_t> Flow::PlaceOf(std::span<const MemorySegment> sges, uint32_t offset) {
  for (const MemorySegment& sge : sges) {
    if (offset < sge.length) return {sge.address + offset, sge.length - offset};
    offset -= sge.length;
  }
  return {0, 0};
}

bool Flow::IsContent(const Wr& wr, uint32_t offset, std::span<const std::byte> bytes) const {
  if (wr.is_read()) return Equal(Pattern(wr.remote + offset - kPatternBase, bytes.size()), bytes);
  while (!bytes.empty()) {
    const auto [address, rest] = PlaceOf(wr.sges, offset);
    if (rest == 0) return false;
    const size_t take = std::min<size_t>(rest, bytes.size());
    if (!Equal(Pattern(address - kPatternBase, take), bytes.first(take))) return false;
    bytes = bytes.subspan(take);
    offset += static_cast<uint32_t>(take);
  }
  return true;
}

// The WR that has to come next on the wire gets its sequence numbers.
Wr* Flow::BeginNext() {
  while (begun_wrs_ < wrs.size() && (wrs[begun_wrs_].is_local() || wrs[begun_wrs_].over)) {
    ++begun_wrs_;
  }
  if (begun_wrs_ == wrs.size() || wrs[begun_wrs_].packets == 0) return nullptr;
  Wr& wr = wrs[begun_wrs_];
  wr.first = next;
  wr.sequences = wr.packets;
  begun_.push_back(static_cast<uint32_t>(begun_wrs_++));
  return &wr;
}

std::string Flow::CheckFields(const Wr& wr, const TxPacket& packet, uint64_t sequence) const {
  const OpcodeTraits& traits = TraitsOf(packet.opcode);
  if (traits.kind != KindOf(wr)) return "opcode of another operation";
  const uint32_t index = static_cast<uint32_t>(sequence - wr.first);
  const uint32_t offset = index * path_.mtu();
  if (wr.is_atomic()) {
    const bool swap = wr.opcode == WrOpcode::kCompareSwap;
    const bool right = packet.remote_address == wr.remote && packet.rkey == wr.rkey &&
                       packet.swap_or_add == (swap ? wr.swap : wr.compare_add) &&
                       packet.compare == (swap ? wr.compare_add : 0) && packet.ack_request;
    return right ? "" : "atomic differs from its WR";
  }
  if (wr.is_read()) {
    const bool right = packet.remote_address == wr.remote + offset && packet.rkey == wr.rkey &&
                       packet.dma_length == wr.bytes - offset && packet.ack_request;
    return right ? "" : "READ request differs from its WR";
  }
  if (wr.is_flush()) {
    const bool right = packet.remote_address == wr.remote && packet.rkey == wr.rkey &&
                       packet.dma_length == wr.compare_add && packet.imm_or_inv == wr.imm_or_inv &&
                       packet.payload_bytes == 0 && packet.ack_request;
    return right ? "" : "FLUSH differs from its WR";
  }
  const bool last = index + 1 == wr.packets;
  if (traits.begins_message() != (index == 0) || traits.ends_message() != last) {
    return "wrong position in the message";
  }
  if (packet.payload_bytes != (last ? wr.bytes - offset : path_.mtu()))
    return "wrong payload length";
  if (path_.is_uc() ? packet.ack_request : last && !packet.ack_request) {
    return "end of a message without AckReq, or UC with it";
  }
  if (traits.has_imm() != (last && wr.has_imm())) return "immediate lost or invented";
  if (traits.has_ieth() != (last && wr.opcode == WrOpcode::kSendInv))
    return "IETH lost or invented";
  if ((traits.has_imm() || traits.has_ieth()) && packet.imm_or_inv != wr.imm_or_inv) {
    return "wrong immediate";
  }
  if (packet.solicited != (last && wr.solicited && (wr.is_send() || wr.has_imm()))) {
    return "wrong solicited bit";
  }
  if (traits.has_reth() && (packet.remote_address != wr.remote || packet.rkey != wr.rkey ||
                            packet.dma_length != wr.bytes)) {
    return "RETH differs from its WR";
  }
  return "";
}

std::string Flow::CheckRequest(const TxPacket& packet, const std::span<const std::byte>* payload,
                               uint64_t una) {
  const uint64_t sequence = ToSequence(packet.psn, next);
  if (sequence > next) return "PSN skipped";
  if (packet.retransmission != (sequence < next)) return "retransmission flag is wrong";
  Wr* wr = nullptr;
  if (sequence == next) {
    wr = Find(sequence);
    if (wr == nullptr) {
      wr = BeginNext();
      if (wr == nullptr) return "packet of no WR";
    }
    // A READ takes the PSNs of its response with its one request.
    next = wr->is_read_or_atomic() ? wr->end() : next + 1;
    if (OutstandingReads(una) > path_.max_rd_atomic && wr->is_answered()) {
      return "more READs and atomics than max_rd_atomic";
    }
  } else {
    wr = Find(sequence);
    if (wr == nullptr) return "PSN of no WR";
    if (sequence < una) return "sends again what was acknowledged";
  }
  std::string wrong = CheckFields(*wr, packet, sequence);
  if (!wrong.empty()) return wrong;
  if (wr->is_read_or_atomic() || wr->is_flush() || payload == nullptr) return "";
  const auto offset = static_cast<uint32_t>(sequence - wr->first) * path_.mtu();
  return IsContent(*wr, offset, *payload) ? "" : "payload differs from its WR";
}

std::string Flow::CheckReadResponse(const TxPacket& packet, std::span<const std::byte> payload,
                                    uint64_t sequence) {
  // A READ of an earlier connection looks like a duplicate: executed, and ignored
  // by the peer.
  if (sequence < first_) return "";
  const Wr* wr = Find(sequence);
  if (wr != nullptr && (wr->is_flush() || wr->is_atomic_write())) {
    const bool right = packet.opcode == Opcode::kRcReadResponseOnly && packet.payload_bytes == 0;
    return right ? "" : "atomic write or FLUSH answered by more than it should be";
  }
  if (wr == nullptr || !wr->is_read()) return "READ response to something else";
  const uint32_t offset = static_cast<uint32_t>(sequence - wr->first) * path_.mtu();
  const bool last = sequence + 1 == wr->end();
  const OpcodeTraits& traits = TraitsOf(packet.opcode);
  if (traits.ends_message() != last) return "READ response at a wrong position";
  if (sequence == wr->first && !traits.begins_message()) return "READ response without a beginning";
  if (packet.payload_bytes != (last ? wr->bytes - offset : path_.mtu())) {
    return "READ response of wrong length";
  }
  return IsContent(*wr, offset, payload) ? "" : "READ response with wrong data";
}

std::string Flow::CheckResponse(const TxPacket& packet, std::span<const std::byte> payload,
                                const Port& port, bool memory_failed) {
  const OpcodeTraits& traits = TraitsOf(packet.opcode);
  const uint64_t sequence = ToSequence(packet.psn, expected);
  const Aeth aeth{packet.syndrome, packet.msn};
  const bool nak = traits.is_acknowledge() && !aeth.is_ack();
  if (sequence > expected || (sequence == expected && !nak)) {
    return "answers what was not executed";
  }
  if (!port.IsVisibleUpTo(nak ? sequence - 1 : sequence)) {
    return "answers before the placement is visible";
  }
  if (traits.is_read_response()) return CheckReadResponse(packet, payload, sequence);
  if (traits.is_atomic_acknowledge()) {
    const Wr* wr = Find(sequence);
    if (wr == nullptr || !wr->is_atomic() || !wr->executed) return "result of no atomic";
    return packet.original == wr->original ? "" : "atomic answered with a wrong original value";
  }
  const bool fatal = aeth.is_nak() && aeth.nak_code() != NakCode::kPsnSequenceError;
  // A READ counts when it is accepted, though its memory may fail later.
  const Wr* refused = Find(sequence);
  const bool counts_itself = fatal && memory_failed && refused != nullptr && refused->is_read();
  if (!counts_itself && aeth.msn != MessagesUpTo(sequence - (nak ? 1 : 0))) {
    return "MSN " + std::to_string(aeth.msn.value()) + " is not the number of messages";
  }
  if (aeth.is_ack()) return "";
  const Wr* wr = Find(sequence);
  if (aeth.is_rnr_nak()) {
    if (aeth.code() != path_.min_rnr_timer) return "RNR NAK with a wrong timer";
    return wr != nullptr && wr->takes_receive() ? "" : "RNR NAK for what takes no receive";
  }
  if (!fatal || memory_failed) return "";
  if (wr == nullptr || ExpectedNak(wr->expected) != static_cast<int>(aeth.nak_code())) {
    return "NAK " + std::to_string(aeth.code()) + " without a reason";
  }
  return "";
}

std::string Flow::CheckRequestPlacement(uint64_t sequence, const MemorySegment& to,
                                        std::span<const std::byte> bytes, MemoryAccess access) {
  if (sequence != expected) return "places a packet that is not the next";
  Wr* wr = Find(sequence);
  if (wr == nullptr || !(wr->is_send() || wr->writes())) return "places what is no payload";
  if (wr->received < (sequence - wr->first) * path_.mtu()) return "places with a gap";
  uint64_t address = wr->remote + wr->received;
  uint32_t room = wr->bytes - wr->received;
  if (wr->is_send()) {
    if (wr->receive == nullptr) return "places without a receive";
    std::tie(address, room) = PlaceOf(wr->receive->sges, wr->received);
  }
  const bool right = wr->is_send() ? access == MemoryAccess::kLocalWrite
                                   : access == MemoryAccess::kRemoteWrite && to.key == wr->rkey;
  if (to.address != address || bytes.size() > room || !right) return "places at a wrong address";
  if (!IsContent(*wr, wr->received, bytes)) return "places wrong bytes";
  wr->received += static_cast<uint32_t>(bytes.size());
  return "";
}

std::string Flow::CheckResponsePlacement(const MemorySegment& to,
                                         std::span<const std::byte> bytes) {
  for (uint32_t index : begun_) {
    Wr& wr = wrs[index];
    if (!wr.is_read_or_atomic() || wr.placed == wr.bytes) continue;
    const auto [address, room] = PlaceOf(wr.sges, wr.placed);
    if (to.address != address || bytes.size() > room) return "response placed at a wrong address";
    if (wr.is_read() ? !IsContent(wr, wr.placed, bytes) : !wr.executed) {
      return "response placed with wrong bytes";
    }
    wr.placed += static_cast<uint32_t>(bytes.size());
    return "";
  }
  return "response placed for no READ or atomic";
}

std::string Flow::CheckExecuted(uint64_t sequence, uint64_t expected_after) {
  if (sequence != expected) return "executed a packet that is not the next";
  const Wr* wr = Find(sequence);
  if (wr == nullptr) return "executed what was not sent";
  const uint64_t after = wr->is_read() ? wr->end() : sequence + 1;
  if (expected_after != after) return "expects a wrong PSN after a packet";
  if (wr->is_send() || wr->writes()) {
    const uint64_t upto = std::min<uint64_t>((after - wr->first) * path_.mtu(), wr->bytes);
    if (wr->received != upto) return "executed a packet without all of its payload";
  }
  expected = after;
  return "";
}

std::string Flow::CheckData(const Wr& wr, const HostMemory& sender,
                            const HostMemory& receiver) const {
  if (wr.is_atomic()) {
    if (!wr.executed) return "atomic completes that was never executed";
    if (sender.spoiled()) return "";
    uint64_t result = 0;
    auto* out = reinterpret_cast<std::byte*>(&result);
    for (const MemorySegment& sge : wr.sges) {
      const auto bytes = sender.Read(sge.address, sge.length);
      out = std::copy(bytes.begin(), bytes.end(), out);
    }
    return result == wr.original ? "" : "atomic gives a wrong result";
  }
  if ((wr.is_read() ? sender : receiver).spoiled()) return "";
  if (wr.is_read()) {
    uint32_t offset = 0;
    for (const MemorySegment& sge : wr.sges) {
      if (!IsContent(wr, offset, sender.Read(sge.address, sge.length))) return "READ data is wrong";
      offset += sge.length;
    }
    return "";
  }
  if (wr.writes()) {
    return IsContent(wr, 0, receiver.Read(wr.remote, wr.bytes)) ? "" : "WRITE data is wrong";
  }
  if (!wr.is_send()) return "";
  return wr.receive == nullptr ? "SEND without a receive"
                               : CheckReceived(wr, *wr.receive, receiver);
}

std::string Flow::CheckReceived(const Wr& wr, const PlannedReceive& receive,
                                const HostMemory& receiver) const {
  if (!wr.is_send() || receiver.spoiled()) return "";
  uint32_t offset = 0;
  for (const MemorySegment& sge : receive.sges) {
    const uint32_t bytes = std::min(sge.length, wr.bytes - offset);
    if (bytes == 0) continue;
    if (!IsContent(wr, offset, receiver.Read(sge.address, bytes))) return "SEND data is wrong";
    offset += bytes;
  }
  return "";
}

void Flow::TakeReceive(Wr& wr, const PlannedReceive& receive) {
  wr.receive = &receive;
  if (receive.malformed) {
    wr.expected = WcStatus::kRemOpErr;
  } else if (wr.is_send() && wr.bytes > receive.bytes) {
    wr.expected = WcStatus::kRemInvReqErr;
  } else if (wr.is_send() && wr.bytes > 0 && receive.bad_key) {
    wr.expected = WcStatus::kRemOpErr;
  }
}

WcStatus Flow::ExpectedOf(const Wr& wr) const {
  const bool lacks_key = wr.bound_by >= 0 && !wrs[static_cast<size_t>(wr.bound_by)].executed;
  return lacks_key && wr.expected == WcStatus::kSuccess ? WcStatus::kLocQpOpErr : wr.expected;
}

void Flow::GiveUp() {
  if (begun_.empty()) return;
  Wr& wr = wrs[begun_.back()];
  if (wr.end() > next) wr.sequences = static_cast<uint32_t>(next - wr.first);
}

}  // namespace verbena::sim
