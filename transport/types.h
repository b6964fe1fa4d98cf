// SPDX-License-Identifier: Apache-2.0
//
// Strong types of the names that verbs and the wire use. They do not convert
// into each other or into integers; `.value()` is the number in host order.
// Values wider than the field are cut to the field's width at construction.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "transport/base/byteorder.h"

namespace verbena::transport {

// An identifier of `kBits` bits. Ordered only so that it can be a map key.
template <typename Tag, typename Rep, unsigned kBits>
class Identifier {
 public:
  using rep = Rep;
  static constexpr Rep kMask = static_cast<Rep>(~uint64_t{0} >> (64 - kBits));

  constexpr Identifier() = default;
  explicit constexpr Identifier(Rep value) : value_(static_cast<Rep>(value & kMask)) {}
  constexpr Rep value() const { return value_; }
  constexpr auto operator<=>(const Identifier&) const = default;

 private:
  Rep value_ = 0;
};

using Qpn = Identifier<struct QpnTag, uint32_t, 24>;
using SrqNumber = Identifier<struct SrqNumberTag, uint32_t, 24>;
using Lkey = Identifier<struct LkeyTag, uint32_t, 32>;
using Rkey = Identifier<struct RkeyTag, uint32_t, 32>;
using Qkey = Identifier<struct QkeyTag, uint32_t, 32>;
using Pkey = Identifier<struct PkeyTag, uint16_t, 16>;

inline constexpr Qpn kManagementQpn{1};        // QP1, the GSI
inline constexpr Qpn kMulticastQpn{0xffffff};  // destination of UD multicast
inline constexpr Pkey kDefaultPkey{0xffff};

// Message sequence number: messages completed at the responder, modulo 2^24.
class Msn {
 public:
  constexpr Msn() = default;
  explicit constexpr Msn(uint32_t value) : value_(value & 0xffffff) {}
  constexpr uint32_t value() const { return value_; }
  constexpr Msn Next() const { return Msn(value_ + 1); }
  constexpr bool operator==(const Msn&) const = default;
  friend constexpr Msn operator+(Msn m, uint32_t n) { return Msn(m.value_ + n); }

 private:
  uint32_t value_ = 0;
};

// Path MTU: payload bytes of a full packet. Values are those of the IBTA
// encoding and of enum ibv_mtu.
enum class Pmtu : uint8_t {
  k256 = 1,
  k512 = 2,
  k1024 = 3,
  k2048 = 4,
  k4096 = 5,
};

constexpr bool IsValid(Pmtu mtu) { return mtu >= Pmtu::k256 && mtu <= Pmtu::k4096; }

constexpr uint32_t PmtuBytes(Pmtu mtu) { return uint32_t{128} << static_cast<uint8_t>(mtu); }

// Empty unless `bytes` is exactly one of the five path MTUs.
constexpr std::optional<Pmtu> PmtuFromBytes(uint32_t bytes) {
  for (uint8_t code = 1; code <= 5; ++code) {
    if (PmtuBytes(Pmtu{code}) == bytes) return Pmtu{code};
  }
  return std::nullopt;
}

// A RoCEv2 GID is an IPv6 address; IPv4 addresses stand as ::ffff:a.b.c.d.
class Gid {
 public:
  static constexpr size_t kBytes = 16;
  using Bytes = std::array<std::byte, kBytes>;

  constexpr Gid() = default;
  explicit constexpr Gid(const Bytes& bytes) : bytes_(bytes) {}

  // `address` in host order: 10.0.0.1 is 0x0a000001.
  static constexpr Gid FromIpv4(uint32_t address) {
    Gid gid;
    gid.bytes_[10] = gid.bytes_[11] = std::byte{0xff};
    StoreBe32(&gid.bytes_[12], address);
    return gid;
  }
  // Reads 16 bytes in network order.
  static constexpr Gid Load(const std::byte* p) {
    Gid gid;
    for (size_t i = 0; i < kBytes; ++i) gid.bytes_[i] = p[i];
    return gid;
  }
  // IPv6 or dotted IPv4 text (the latter gives a v4-mapped GID).
  static std::optional<Gid> Parse(std::string_view text);

  constexpr void Store(std::byte* p) const {
    for (size_t i = 0; i < kBytes; ++i) p[i] = bytes_[i];
  }
  constexpr const Bytes& bytes() const { return bytes_; }

  constexpr bool IsV4Mapped() const {
    return LoadBe64(&bytes_[0]) == 0 && LoadBe32(&bytes_[8]) == 0xffff;
  }
  // The IPv4 address in host order; meaningful when IsV4Mapped().
  constexpr uint32_t Ipv4() const { return LoadBe32(&bytes_[12]); }
  constexpr bool IsLinkLocal() const { return (LoadBe16(&bytes_[0]) & 0xffc0) == 0xfe80; }
  // IPv6 ff00::/8, or a mapped 224.0.0.0/4.
  constexpr bool IsMulticast() const {
    return bytes_[0] == std::byte{0xff} || (IsV4Mapped() && (LoadBe8(&bytes_[12]) & 0xf0) == 0xe0);
  }
  constexpr bool IsZero() const { return *this == Gid(); }

  // Address text: "fe80::1", "::ffff:10.0.0.1".
  std::string ToString() const;

  constexpr auto operator<=>(const Gid&) const = default;

 private:
  Bytes bytes_{};
};

class MacAddress {
 public:
  static constexpr size_t kBytes = 6;
  using Bytes = std::array<std::byte, kBytes>;

  constexpr MacAddress() = default;
  explicit constexpr MacAddress(const Bytes& bytes) : bytes_(bytes) {}
  // The low 48 bits, most significant byte first on the wire.
  static constexpr MacAddress FromUint64(uint64_t v) {
    MacAddress mac;
    StoreBe16(&mac.bytes_[0], static_cast<uint16_t>(v >> 32));
    StoreBe32(&mac.bytes_[2], static_cast<uint32_t>(v));
    return mac;
  }
  static constexpr MacAddress Load(const std::byte* p) {
    MacAddress mac;
    for (size_t i = 0; i < kBytes; ++i) mac.bytes_[i] = p[i];
    return mac;
  }
  static constexpr MacAddress Broadcast() { return FromUint64(0xffff'ffff'ffff); }
  // "02:00:00:00:00:01".
  static std::optional<MacAddress> Parse(std::string_view text);

  constexpr void Store(std::byte* p) const {
    for (size_t i = 0; i < kBytes; ++i) p[i] = bytes_[i];
  }
  constexpr const Bytes& bytes() const { return bytes_; }
  // Group bit: multicast or broadcast.
  constexpr bool IsGroup() const { return (bytes_[0] & std::byte{1}) != std::byte{0}; }

  std::string ToString() const;

  constexpr auto operator<=>(const MacAddress&) const = default;

 private:
  Bytes bytes_{};
};

}  // namespace verbena::transport

template <typename Tag, typename Rep, unsigned kBits>
struct std::hash<verbena::transport::Identifier<Tag, Rep, kBits>> {
  size_t operator()(verbena::transport::Identifier<Tag, Rep, kBits> id) const noexcept {
    return std::hash<Rep>{}(id.value());
  }
};

template <>
struct std::hash<verbena::transport::Gid> {
  size_t operator()(const verbena::transport::Gid& gid) const noexcept {
    const std::byte* p = gid.bytes().data();
    return std::hash<uint64_t>{}(verbena::transport::LoadBe64(p) * 0x9e3779b97f4a7c15u ^
                                 verbena::transport::LoadBe64(p + 8));
  }
};
