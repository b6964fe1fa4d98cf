// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/describe.h"

#include <cinttypes>
#include <cstdarg>
#include <cstdio>

namespace verbena::transport {
namespace {

// Appends " " and the formatted text.
[[gnu::format(printf, 2, 3)]] void Append(std::string& line, const char* format, ...) {
  char text[160];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  if (!line.empty()) line += ' ';
  line += text;
}

std::string AddressText(const Gid& gid, bool is_ipv6) {
  std::string text = gid.ToString();
  constexpr std::string_view kMapped = "::ffff:";
  if (!is_ipv6 && text.starts_with(kMapped)) text.erase(0, kMapped.size());
  return text;
}

void AppendAddresses(std::string& line, const PacketView& packet) {
  const std::string source = AddressText(packet.source_gid(), packet.is_ipv6());
  const std::string destination = AddressText(packet.destination_gid(), packet.is_ipv6());
  Append(line, packet.is_ipv6() ? "[%s]:%u > %s" : "%s:%u > %s", source.c_str(),
         packet.udp().source_port, destination.c_str());
}

void AppendBth(std::string& line, const PacketView& packet) {
  const Bth& bth = packet.bth();
  line += ' ';
  line += OpcodeName(bth.opcode);
  Append(line, "qp=0x%06x psn=0x%06x", bth.dest_qpn.value(), bth.psn.value());
  if (bth.ack_req) line += " A";
  if (bth.solicited) line += " SE";
  if (bth.fecn) line += " FECN";
  if (bth.becn) line += " BECN";
  if (bth.pkey != kDefaultPkey) Append(line, "pkey=0x%04x", bth.pkey.value());
}

void AppendExtended(std::string& line, const PacketView& packet) {
  const OpcodeTraits& traits = packet.traits();
  if (traits.has_xrceth()) Append(line, "srq=0x%06x", packet.xrceth().srq.value());
  if (traits.has_deth()) {
    const Deth deth = packet.deth();
    Append(line, "qkey=0x%08x src_qp=0x%06x", deth.qkey.value(), deth.source_qpn.value());
  }
  if (traits.has_feth()) Append(line, "flush=0x%08x", packet.feth().value);
  if (traits.has_reth()) {
    const Reth reth = packet.reth();
    Append(line, "va=0x%" PRIx64 " rkey=0x%08x dma_len=%u", reth.va, reth.rkey.value(),
           reth.dma_length);
  }
  if (traits.has_atomic_eth()) {
    const AtomicEth atomic = packet.atomic_eth();
    Append(line, "va=0x%" PRIx64 " rkey=0x%08x swap_add=0x%" PRIx64 " compare=0x%" PRIx64,
           atomic.va, atomic.rkey.value(), atomic.swap_add, atomic.compare);
  }
  if (traits.has_aeth()) line += ' ' + Describe(packet.aeth());
  if (traits.has_atomic_ack_eth()) {
    Append(line, "original=0x%" PRIx64, packet.atomic_ack_eth().original);
  }
  if (traits.has_imm()) Append(line, "imm=0x%08x", packet.imm().value);
  if (traits.has_ieth()) Append(line, "inv_rkey=0x%08x", packet.ieth().rkey.value());
}

}  // namespace

std::string Describe(const PacketView& packet) {
  std::string line;
  AppendAddresses(line, packet);
  if (packet.has_vlan()) Append(line, "vlan=%u", packet.vlan_tci() & 0x0fffu);
  if (packet.traffic_class() != 0) {
    Append(line, "dscp=%u ecn=%s", packet.dscp(), ToString(packet.ecn()).data());
  }
  AppendBth(line, packet);
  AppendExtended(line, packet);
  if (packet.traits().carries_payload) Append(line, "len=%zu", packet.payload_bytes());
  if (packet.pad() != 0) Append(line, "pad=%u", packet.pad());
  return line;
}

std::string Describe(ParseError error) {
  switch (error) {
#define VERBENA_PARSE_ERROR_TEXT(enumerator, name, text) \
  case ParseError::enumerator:                           \
    return name ": " text;
    VERBENA_PARSE_ERRORS(VERBENA_PARSE_ERROR_TEXT)
#undef VERBENA_PARSE_ERROR_TEXT
  }
  return "unknown";
}

std::string Describe(const Aeth& aeth) {
  std::string text;
  switch (aeth.kind()) {
    case AethKind::kAck:
      if (const auto credits = CreditCount(aeth.code())) {
        Append(text, "ACK credits=%u", *credits);
      } else {
        Append(text, "ACK credits=none");
      }
      break;
    case AethKind::kRnrNak: {
      const int64_t us = RnrTimerDelay(aeth.code()).us();
      Append(text, "RNR_NAK timer=%u (%" PRId64 ".%02" PRId64 " ms)", aeth.code(), us / 1000,
             us % 1000 / 10);
      break;
    }
    case AethKind::kNak:
      Append(text, "NAK %s", ToString(aeth.nak_code()).data());
      break;
    case AethKind::kReserved:
      Append(text, "reserved syndrome 0x%02x", aeth.syndrome);
      break;
  }
  Append(text, "msn=%u", aeth.msn.value());
  return text;
}

std::string_view ToString(NakCode code) {
  switch (code) {
    case NakCode::kPsnSequenceError:
      return "psn_sequence_error";
    case NakCode::kInvalidRequest:
      return "invalid_request";
    case NakCode::kRemoteAccessError:
      return "remote_access_error";
    case NakCode::kRemoteOperationalError:
      return "remote_operational_error";
    case NakCode::kInvalidRdRequest:
      return "invalid_rd_request";
  }
  return "reserved";
}

std::string_view ToString(AethKind kind) {
  switch (kind) {
    case AethKind::kAck:
      return "ACK";
    case AethKind::kRnrNak:
      return "RNR_NAK";
    case AethKind::kReserved:
      return "reserved";
    case AethKind::kNak:
      return "NAK";
  }
  return "reserved";
}

std::string_view ToString(Ecn ecn) {
  switch (ecn) {
    case Ecn::kNotEct:
      return "not-ect";
    case Ecn::kEct1:
      return "ect1";
    case Ecn::kEct0:
      return "ect0";
    case Ecn::kCe:
      return "ce";
  }
  return "not-ect";
}

}  // namespace verbena::transport
