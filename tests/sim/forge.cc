// SPDX-License-Identifier: Apache-2.0
//
// World: packets of a hostile peer. Their form and ICRC are right, their content
// is not. What can still be demanded of the QP: no crash, no byte outside of what
// its keys allow, completions in order, and an end.
#include <algorithm>
#include <iterator>

#include "tests/sim/world.h"

namespace verbena::sim {

using transport::Opcode;
using transport::OpcodeTraits;

namespace {

constexpr Opcode kOpcodes[] = {
#define VERBENA_SIM_OPCODE(enumerator, ...) Opcode::enumerator,
    VERBENA_OPCODES(VERBENA_SIM_OPCODE)
#undef VERBENA_SIM_OPCODE
};
constexpr size_t kRcOpcodes = 25;
static_assert(kOpcodes[kRcOpcodes - 1] == Opcode::kRcAtomicWrite);

// From here on they are those of RC.
constexpr uint8_t kXrcOpcodes = 0xa0;
constexpr uint8_t kUcOpcodes = 0x20;

constexpr uint32_t kKeys[] = {kPatternKey, kTargetKey, kLocalKey, kForeignKey, kUnknownKey, 0};

}  // namespace

void World::Forge(Qp& qp) {
  qp.connection()->flows[0].tainted = true;
  qp.connection()->flows[1].tainted = true;
  const auto address = [this] {
    switch (random_.Below(3)) {
      case 0:
        return kPatternBase + random_.Below(kPatternBytes + 8);
      case 1:
        return kTargetBase + 8 * random_.Below(600);
      default:
        return random_.Next();
    }
  };
  transport::PacketAddress path;
  path.source_gid = transport::Gid::FromIpv4(0x0a000001);
  path.destination_gid = transport::Gid::FromIpv4(0x0a000002);
  const transport::PacketTemplate headers_of(path);
  for (uint64_t count = random_.Between(1, 6); count > 0; --count) {
    transport::TransportHeaders headers;
    headers.bth.opcode =
        kOpcodes[random_.Below(random_.Chance(0.95) ? kRcOpcodes : std::size(kOpcodes))];
    const PathOptions& path_options = qp.connection()->path;
    if (path_options.is_uc() && headers.bth.opcode <= Opcode::kRcWriteOnlyImm) {
      headers.bth.opcode =
          static_cast<Opcode>(static_cast<uint8_t>(headers.bth.opcode) | kUcOpcodes);
    }
    const bool xrc = path_options.is_xrc() && headers.bth.opcode <= Opcode::kRcSendOnlyInv;
    if (xrc) {
      headers.bth.opcode =
          static_cast<Opcode>(static_cast<uint8_t>(headers.bth.opcode) | kXrcOpcodes);
      headers.xrceth.srq = transport::SrqNumber(
          random_.Chance(0.8) ? kSrqs[random_.Below(std::size(kSrqs))] : random_.Below32(16));
    }
    const OpcodeTraits& traits = transport::TraitsOf(headers.bth.opcode);
    headers.bth.dest_qpn = transport::Qpn(qp.qpn());
    headers.bth.ack_req = random_.Chance(0.5);
    headers.bth.solicited = random_.Chance(0.2);
    if (traits.is_response()) {
      const uint32_t open = Psn(qp.next_psn().value() - qp.una_psn().value()).value();
      headers.bth.psn = qp.una_psn() + random_.Below32(uint64_t{open} + 2);
    } else {
      headers.bth.psn =
          random_.Chance(0.6) ? qp.expected_psn() : qp.expected_psn() - 8 + random_.Below32(16);
    }
    headers.reth = {
        address(), transport::Rkey(kKeys[random_.Below(std::size(kKeys))]),
        random_.Chance(0.8) ? random_.Below32(1500) : static_cast<uint32_t>(random_.Next())};
    headers.atomic_eth = {address(), transport::Rkey(kKeys[random_.Below(std::size(kKeys))]),
                          random_.Next(), random_.Next()};
    const uint32_t key =
        traits.has_atomic_eth() ? headers.atomic_eth.rkey.value() : headers.reth.rkey.value();
    if (key == kTargetKey) hosts_[qp.side()].memory.Spoil();
    headers.aeth = {static_cast<uint8_t>(random_.Chance(0.4) ? 31 : random_.Next()),
                    transport::Msn(static_cast<uint32_t>(random_.Next()))};
    headers.atomic_ack_eth = {random_.Next()};
    headers.imm = {static_cast<uint32_t>(random_.Next())};
    headers.ieth = {transport::Rkey(kTargetKey)};
    headers.feth = {random_.Below32(64)};
    const uint32_t mtu = qp.connection()->path.mtu();
    uint32_t bytes = 0;
    if (traits.carries_payload) {
      bytes = random_.Chance(0.6) ? mtu : random_.Below32(std::min(mtu + 8, 1024u) + 1);
      if (traits.has_reth() && random_.Chance(0.5)) headers.reth.dma_length = bytes;
    }
    const uint32_t number = frames_.Take();
    Frame& frame = frames_[number];
    frame.data.fill(std::byte{0x5a});
    const size_t header_bytes = headers_of.WriteHeaders(headers, bytes, frame.data.data());
    frame.bytes = static_cast<uint32_t>(transport::FinishFrame(
        frame.data.data(), headers_of.l3_offset(), false, header_bytes, bytes));
    frame.connection = qp.connection()->number;
    frame.has_icrc = false;
    frame.forged = true;
    // A reserved opcode: only the byte differs.
    if (random_.Chance(0.05)) {
      frame.data[headers_of.prefix_bytes()] = static_cast<std::byte>(0x18 + random_.Below(4));
    }
    Schedule(random_.UpTo(Duration::Microseconds(20)), EventKind::kArrive, qp.side(), number, 0);
  }
  if (random_.Chance(0.7)) {
    Schedule(random_.UpTo(Duration::Microseconds(100)), EventKind::kForge, qp.side(), qp.pair(),
             qp.connection()->number);
  }
}

}  // namespace verbena::sim
