// SPDX-License-Identifier: Apache-2.0
//
// Invariant CRC of RoCEv2: CRC-32 (polynomial 0xedb88320 reflected, as zlib's)
// over eight bytes of ones (in place of an LRH) and the packet from the IP
// header to the end of the pad, with the fields that routers change read as
// ones: IPv4 TOS, TTL and header checksum; IPv6 traffic class, flow label and
// hop limit; the UDP checksum; byte 4 of the BTH (FECN, BECN, resv6). On the
// wire the four bytes follow the pad, least significant first.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>

namespace verbena::transport {

inline constexpr size_t kIcrcBytes = 4;

// `l3_to_pad_end`: from the first byte of the IP header (without options) to
// the last pad byte, at least IP, UDP and BTH.
uint32_t Icrc(std::span<const std::byte> l3_to_pad_end, bool is_ipv6);

// The same for a packet in pieces, in order, without copying a payload:
//   IcrcAccumulator icrc(headers, is_ipv6);
//   icrc.Add(extent)...; icrc.Add(pad);  icrc.value()
class IcrcAccumulator {
 public:
  // `l3_headers`: from the first byte of the IP header, at least IP, UDP and
  // BTH; may go on into extended headers and payload.
  IcrcAccumulator(std::span<const std::byte> l3_headers, bool is_ipv6);

  void Add(std::span<const std::byte> bytes);
  uint32_t value() const { return crc_; }

 private:
  uint32_t crc_;
};

}  // namespace verbena::transport
