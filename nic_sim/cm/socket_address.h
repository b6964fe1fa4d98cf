// SPDX-License-Identifier: Apache-2.0
//
// The socket addresses of rdma_cm: IPv4, IPv6 and AF_IB, as values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "transport/types.h"

namespace verbena::nic {

inline constexpr uint16_t kFamilyInet = 2;    // AF_INET
inline constexpr uint16_t kFamilyInet6 = 10;  // AF_INET6
inline constexpr uint16_t kFamilyIb = 27;     // AF_IB

struct SocketAddress {
  uint16_t family = 0;  // 0: none
  transport::Gid ip;    // IPv4 v4-mapped; AF_IB: the GID
  uint16_t port = 0;    // host order; AF_IB: the low bits of the service id
  uint32_t flow_info = 0;
  uint32_t scope_id = 0;
  // AF_IB only.
  uint16_t pkey = 0;
  uint64_t service_id = 0;
  uint64_t service_mask = 0;

  static SocketAddress Inet(const transport::Gid& ip, uint16_t port);

  // Reads a struct sockaddr_in, sockaddr_in6 or sockaddr_ib (the kernel's
  // layout) at the front of `bytes`. Empty: other family, or cut short.
  static std::optional<SocketAddress> Load(std::span<const std::byte> bytes);
  // Writes size() bytes; `to` has room for a sockaddr_storage (128).
  void Store(std::byte* to) const;
  // 16, 28, 48, or 0 without a family.
  uint16_t size() const;

  bool IsAny() const;       // the wildcard address
  bool IsLoopback() const;  // 127.0.0.0/8, ::1
  bool IsMulticast() const { return family != kFamilyIb && ip.IsMulticast(); }
  bool SameIp(const SocketAddress& other) const { return family == other.family && ip == other.ip; }
  void SetPort(uint16_t value);

  // "10.0.0.1:7174", "[fe80::1]:7174"; empty without a family.
  std::string ToString() const;
};

}  // namespace verbena::nic
