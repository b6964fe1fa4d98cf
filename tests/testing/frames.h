// SPDX-License-Identifier: Apache-2.0
//
// Frames as bytes, for tests of parsers.
#pragma once

#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string_view>
#include <vector>

#include "transport/wire/packet_builder.h"
#include "transport/wire/packet_view.h"

namespace verbena::testing {

using ByteVector = std::vector<std::byte>;

inline ByteVector BytesOf(std::initializer_list<int> values) {
  ByteVector bytes;
  for (int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

// "0a 0b0c": hexadecimal digits, spaces ignored.
inline ByteVector FromHex(std::string_view text) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10; };
  ByteVector bytes;
  int high = -1;
  for (char c : text) {
    if (c == ' ' || c == '\n') continue;
    if (high < 0) {
      high = digit(c);
    } else {
      bytes.push_back(static_cast<std::byte>(high * 16 + digit(c)));
      high = -1;
    }
  }
  return bytes;
}

// 0, 1, 2, ... modulo 251.
inline ByteVector CountingBytes(size_t count) {
  ByteVector bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i % 251);
  return bytes;
}

inline transport::PacketAddress Ipv4Address() {
  transport::PacketAddress address;
  address.source_mac = transport::MacAddress::FromUint64(0x020000000001);
  address.destination_mac = transport::MacAddress::FromUint64(0x020000000002);
  address.source_gid = transport::Gid::FromIpv4(0x0a000001);
  address.destination_gid = transport::Gid::FromIpv4(0x0a000002);
  return address;
}

inline transport::PacketAddress Ipv6Address() {
  transport::PacketAddress address = Ipv4Address();
  address.is_ipv6 = true;
  address.source_gid = *transport::Gid::Parse("fd00::1");
  address.destination_gid = *transport::Gid::Parse("fd00::2");
  return address;
}

// A whole frame, pad and ICRC included, exactly as long as it is.
inline ByteVector BuildFrame(const transport::PacketAddress& address,
                             const transport::TransportHeaders& headers,
                             std::span<const std::byte> payload = {}) {
  ByteVector frame(transport::kMaxOverheadBytes + payload.size(), std::byte{0xa5});
  const transport::PacketTemplate path(address);
  const size_t header_bytes = path.WriteHeaders(headers, payload.size(), frame.data());
  if (!payload.empty()) std::memcpy(frame.data() + header_bytes, payload.data(), payload.size());
  frame.resize(transport::FinishFrame(frame.data(), path.l3_offset(), path.is_ipv6(), header_bytes,
                                      payload.size()));
  return frame;
}

inline ByteVector BuildFrame(const transport::PacketAddress& address, transport::Opcode opcode,
                             std::span<const std::byte> payload = {}) {
  transport::TransportHeaders headers;
  headers.bth.opcode = opcode;
  return BuildFrame(address, headers, payload);
}

// Cuts an untagged frame to `udp_length` bytes of UDP and makes IP and UDP
// lengths and the IPv4 checksum agree with that.
inline void CutConsistently(ByteVector& frame, bool is_ipv6, uint16_t udp_length) {
  std::byte* l3 = frame.data() + transport::EthernetHeader::kBytes;
  const size_t ip_bytes = is_ipv6 ? transport::Ipv6Header::kBytes : transport::Ipv4Header::kBytes;
  transport::StoreBe16(l3 + ip_bytes + 4, udp_length);
  if (is_ipv6) {
    transport::StoreBe16(l3 + 4, udp_length);
  } else {
    transport::StoreBe16(l3 + 2, static_cast<uint16_t>(ip_bytes + udp_length));
    transport::StoreBe16(l3 + 10, transport::Ipv4HeaderChecksum(l3));
  }
  frame.resize(transport::EthernetHeader::kBytes + ip_bytes + udp_length);
}

}  // namespace verbena::testing
