// SPDX-License-Identifier: Apache-2.0
//
// GoogleMock matchers over a parsed packet, so that a test reads as what it
// expects on the wire: EXPECT_THAT(packet, IsAck(Psn(7), Msn(3))). A failure
// prints the packet with Describe().
#pragma once

#include <gmock/gmock.h>

#include <ostream>
#include <string>
#include <vector>

#include "transport/wire/describe.h"
#include "transport/wire/packet_view.h"

namespace verbena::transport {

// Found by GoogleTest through argument-dependent lookup.
inline void PrintTo(const PacketView& packet, std::ostream* out) { *out << Describe(packet); }
inline void PrintTo(ParseError error, std::ostream* out) { *out << Describe(error); }
inline void PrintTo(Opcode opcode, std::ostream* out) { *out << OpcodeName(opcode); }
inline void PrintTo(Psn psn, std::ostream* out) { *out << "psn " << psn.value(); }
inline void PrintTo(Msn msn, std::ostream* out) { *out << "msn " << msn.value(); }
inline void PrintTo(const Aeth& aeth, std::ostream* out) { *out << Describe(aeth); }
inline void PrintTo(const Gid& gid, std::ostream* out) { *out << gid.ToString(); }
inline void PrintTo(const MacAddress& mac, std::ostream* out) { *out << mac.ToString(); }

}  // namespace verbena::transport

namespace verbena::testing {

using transport::Aeth;
using transport::Msn;
using transport::NakCode;
using transport::Opcode;
using transport::PacketView;
using transport::Psn;
using transport::Qpn;

MATCHER_P2(IsPacket, opcode, psn,
           std::string(OpcodeName(opcode)) + " with PSN " + std::to_string(psn.value())) {
  return arg.opcode() == opcode && arg.psn() == psn;
}

MATCHER_P(HasOpcode, opcode, std::string(OpcodeName(opcode))) { return arg.opcode() == opcode; }
MATCHER_P(HasPsn, psn, "PSN " + std::to_string(psn.value())) { return arg.psn() == psn; }
MATCHER_P(IsTo, qpn, "for QP " + std::to_string(qpn.value())) { return arg.dest_qpn() == qpn; }
MATCHER(AsksForAck, "with AckReq set") { return arg.bth().ack_req; }
MATCHER(IsSolicited, "with the solicited event bit") { return arg.bth().solicited; }

MATCHER_P(HasPayloadBytes, bytes, std::to_string(bytes) + " bytes of payload") {
  return arg.payload_bytes() == static_cast<size_t>(bytes);
}
// `bytes` is a container of std::byte.
MATCHER_P(HasPayload, bytes, "payload " + ::testing::PrintToString(bytes)) {
  const auto payload = arg.payload();
  return std::vector<std::byte>(payload.begin(), payload.end()) ==
         std::vector<std::byte>(bytes.begin(), bytes.end());
}

// Any packet with an AETH that says exactly this: an ACK packet, a READ
// response or an atomic acknowledge.
MATCHER_P(HasAeth, aeth, Describe(aeth)) { return arg.traits().has_aeth() && arg.aeth() == aeth; }

// ACK packets of an RC or XRC responder without end-to-end credits.
inline ::testing::Matcher<const PacketView&> IsAck(Psn psn, Msn msn) {
  return ::testing::AllOf(IsPacket(Opcode::kRcAcknowledge, psn), HasAeth(Aeth::Ack(msn)));
}
inline ::testing::Matcher<const PacketView&> IsNak(Psn psn, Msn msn, NakCode code) {
  return ::testing::AllOf(IsPacket(Opcode::kRcAcknowledge, psn), HasAeth(Aeth::Nak(msn, code)));
}
inline ::testing::Matcher<const PacketView&> IsRnrNak(Psn psn, Msn msn, uint8_t timer_code) {
  return ::testing::AllOf(IsPacket(Opcode::kRcAcknowledge, psn),
                          HasAeth(Aeth::RnrNak(msn, timer_code)));
}

}  // namespace verbena::testing
