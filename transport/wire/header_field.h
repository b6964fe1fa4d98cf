// SPDX-License-Identifier: Apache-2.0
//
// Header fields by name, for what alters packets on purpose:
//   ip.dscp ip.ecn ip.ttl ip.flow_label (IPv6)       udp.sport udp.dport
//   bth.opcode bth.se bth.migreq bth.pad bth.tver bth.pkey bth.fecn bth.becn
//   bth.dest_qpn bth.ack_req bth.psn
//   xrceth.srqn  deth.qkey deth.src_qpn  reth.va reth.rkey reth.length
//   atomiceth.va atomiceth.rkey atomiceth.swap_add atomiceth.compare
//   aeth.syndrome aeth.msn  atomicacketh.original  immdt.value  ieth.rkey
// Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "transport/wire/opcode.h"

namespace verbena::transport {

struct HeaderField {
  enum class Header : uint8_t { kIp, kUdp, kBth, kExtended };

  std::string_view name;
  Header header;
  ExtHeader extended;  // of kExtended
  // Where it begins, from the header's most significant bit; kIp: in IPv4, and in IPv6.
  uint8_t bit;
  uint8_t bit_in_ipv6;
  uint8_t bits;  // 1 to 64

  static constexpr uint8_t kAbsent = 0xff;

  uint64_t max() const { return bits == 64 ? UINT64_MAX : (uint64_t{1} << bits) - 1; }
};

std::span<const HeaderField> HeaderFields();
// nullptr: there is no such field.
const HeaderField* FindHeaderField(std::string_view name);

// A frame whose IP header begins at `l3` and that is long enough for IP, UDP
// and BTH. Nothing, or false, if the packet has no such field.
std::optional<uint64_t> ReadHeaderField(std::span<const std::byte> frame, size_t l3,
                                        const HeaderField& field);
// The value is cut to the field's width. Keeps the IPv4 checksum right; ICRC
// and lengths are the caller's.
bool WriteHeaderField(std::span<std::byte> frame, size_t l3, const HeaderField& field,
                      uint64_t value);

}  // namespace verbena::transport
