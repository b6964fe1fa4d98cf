// SPDX-License-Identifier: Apache-2.0
//
// Text for traces, tests and tools. Allocates: not for the packet path.
#pragma once

#include <string>
#include <string_view>

#include "transport/wire/aeth.h"
#include "transport/wire/packet_view.h"

namespace verbena::transport {

// One line: addresses, opcode, QPN, PSN, flags, extended headers, lengths, e.g.
// "10.0.0.1:49152 > 10.0.0.2 RC_SEND_ONLY qp=0x000011 psn=0x222222 A len=10".
std::string Describe(const PacketView& packet);

// "reserved_opcode: the opcode is not defined".
std::string Describe(ParseError error);

// "ACK credits=none msn=3", "RNR_NAK timer=12 (0.64 ms) msn=3",
// "NAK remote_access_error msn=3".
std::string Describe(const Aeth& aeth);

std::string_view ToString(NakCode code);
std::string_view ToString(AethKind kind);
std::string_view ToString(Ecn ecn);

}  // namespace verbena::transport
