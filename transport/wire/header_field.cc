// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/header_field.h"

#include <algorithm>
#include <array>

#include "transport/base/byteorder.h"
#include "transport/wire/ip_udp.h"

namespace verbena::transport {
namespace {

using Header = HeaderField::Header;

constexpr HeaderField Ip(std::string_view name, uint8_t v4, uint8_t v6, uint8_t bits) {
  return {name, Header::kIp, {}, v4, v6, bits};
}
constexpr HeaderField Udp(std::string_view name, uint8_t bit, uint8_t bits) {
  return {name, Header::kUdp, {}, bit, bit, bits};
}
constexpr HeaderField Base(std::string_view name, uint8_t bit, uint8_t bits) {
  return {name, Header::kBth, {}, bit, bit, bits};
}
constexpr HeaderField Ext(std::string_view name, ExtHeader header, uint8_t bit, uint8_t bits) {
  return {name, Header::kExtended, header, bit, bit, bits};
}

// RFC 791, 8200, 768; IBTA Vol 1, 9.2 and 9.3.
constexpr auto kFields = std::to_array<HeaderField>({
    Ip("ip.dscp", 8, 4, 6),
    Ip("ip.ecn", 14, 10, 2),
    Ip("ip.ttl", 64, 56, 8),
    Ip("ip.flow_label", HeaderField::kAbsent, 12, 20),
    Udp("udp.sport", 0, 16),
    Udp("udp.dport", 16, 16),
    Base("bth.opcode", 0, 8),
    Base("bth.se", 8, 1),
    Base("bth.migreq", 9, 1),
    Base("bth.pad", 10, 2),
    Base("bth.tver", 12, 4),
    Base("bth.pkey", 16, 16),
    Base("bth.fecn", 32, 1),
    Base("bth.becn", 33, 1),
    Base("bth.dest_qpn", 40, 24),
    Base("bth.ack_req", 64, 1),
    Base("bth.psn", 72, 24),
    Ext("xrceth.srqn", ExtHeader::kXrcEth, 8, 24),
    Ext("deth.qkey", ExtHeader::kDeth, 0, 32),
    Ext("deth.src_qpn", ExtHeader::kDeth, 40, 24),
    Ext("reth.va", ExtHeader::kReth, 0, 64),
    Ext("reth.rkey", ExtHeader::kReth, 64, 32),
    Ext("reth.length", ExtHeader::kReth, 96, 32),
    Ext("atomiceth.va", ExtHeader::kAtomicEth, 0, 64),
    Ext("atomiceth.rkey", ExtHeader::kAtomicEth, 64, 32),
    Ext("atomiceth.swap_add", ExtHeader::kAtomicEth, 96, 64),
    Ext("atomiceth.compare", ExtHeader::kAtomicEth, 160, 64),
    Ext("aeth.syndrome", ExtHeader::kAeth, 0, 8),
    Ext("aeth.msn", ExtHeader::kAeth, 8, 24),
    Ext("atomicacketh.original", ExtHeader::kAtomicAckEth, 0, 64),
    Ext("immdt.value", ExtHeader::kImmDt, 0, 32),
    Ext("ieth.rkey", ExtHeader::kIeth, 0, 32),
});

// Bits from the frame's first to the field's first.
std::optional<size_t> FirstBit(std::span<const std::byte> frame, size_t l3,
                               const HeaderField& field) {
  const bool is_ipv6 = LoadBe16(&frame[l3 - 2]) == kEtherTypeIpv6;
  const size_t udp = l3 + (is_ipv6 ? Ipv6Header::kBytes : Ipv4Header::kBytes);
  const size_t bth = udp + UdpHeader::kBytes;
  size_t header = bth;
  uint8_t bit = field.bit;
  switch (field.header) {
    case Header::kIp:
      header = l3;
      if (is_ipv6) bit = field.bit_in_ipv6;
      if (bit == HeaderField::kAbsent) return std::nullopt;
      break;
    case Header::kUdp:
      header = udp;
      break;
    case Header::kBth:
      break;
    case Header::kExtended: {
      const OpcodeTraits& traits = TraitsOf(static_cast<Opcode>(LoadBe8(&frame[bth])));
      if (!traits.Has(field.extended)) return std::nullopt;
      header += traits.OffsetOf(field.extended);
      break;
    }
  }
  const size_t first = header * 8 + bit;
  if (first + field.bits > frame.size() * 8) return std::nullopt;
  return first;
}

bool BitAt(std::span<const std::byte> frame, size_t bit) {
  return (frame[bit / 8] >> static_cast<int>(7 - bit % 8) & std::byte{1}) != std::byte{0};
}

}  // namespace

std::span<const HeaderField> HeaderFields() { return kFields; }

const HeaderField* FindHeaderField(std::string_view name) {
  const auto found = std::ranges::find(kFields, name, &HeaderField::name);
  return found == kFields.end() ? nullptr : &*found;
}

std::optional<uint64_t> ReadHeaderField(std::span<const std::byte> frame, size_t l3,
                                        const HeaderField& field) {
  const std::optional<size_t> first = FirstBit(frame, l3, field);
  if (!first) return std::nullopt;
  uint64_t value = 0;
  for (size_t i = 0; i < field.bits; ++i) value = value << 1 | (BitAt(frame, *first + i) ? 1 : 0);
  return value;
}

bool WriteHeaderField(std::span<std::byte> frame, size_t l3, const HeaderField& field,
                      uint64_t value) {
  const std::optional<size_t> first = FirstBit(frame, l3, field);
  if (!first) return false;
  for (size_t i = 0; i < field.bits; ++i) {
    const size_t bit = *first + i;
    const std::byte mask = std::byte{0x80} >> static_cast<int>(bit % 8);
    const bool set = (value >> (field.bits - 1 - i) & 1) != 0;
    frame[bit / 8] = set ? frame[bit / 8] | mask : frame[bit / 8] & ~mask;
  }
  std::byte* ip = &frame[l3];
  if (field.header == Header::kIp && LoadBe16(ip - 2) != kEtherTypeIpv6) {
    StoreBe16(ip + 10, Ipv4HeaderChecksum(ip));
  }
  return true;
}

}  // namespace verbena::transport
