// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/cm/socket_address.h"

#include <cstring>

#include "transport/base/byteorder.h"

namespace verbena::nic {
namespace {

using transport::Gid;
using transport::LoadBe16;
using transport::LoadBe32;
using transport::LoadBe64;
using transport::StoreBe16;
using transport::StoreBe32;
using transport::StoreBe64;

template <typename T>
T LoadHost(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

template <typename T>
void StoreHost(std::byte* p, T value) {
  std::memcpy(p, &value, sizeof(value));
}

uint16_t SizeOf(uint16_t family) {
  switch (family) {
    case kFamilyInet:
      return 16;
    case kFamilyInet6:
      return 28;
    case kFamilyIb:
      return 48;
    default:
      return 0;
  }
}

}  // namespace

SocketAddress SocketAddress::Inet(const Gid& ip, uint16_t port) {
  SocketAddress address;
  address.family = ip.IsV4Mapped() ? kFamilyInet : kFamilyInet6;
  address.ip = ip;
  address.port = port;
  return address;
}

std::optional<SocketAddress> SocketAddress::Load(std::span<const std::byte> bytes) {
  if (bytes.size() < 2) return std::nullopt;
  SocketAddress address;
  address.family = LoadHost<uint16_t>(bytes.data());
  const uint16_t size = SizeOf(address.family);
  if (size == 0 || bytes.size() < size) return std::nullopt;
  const std::byte* p = bytes.data();
  switch (address.family) {
    case kFamilyInet:
      address.port = LoadBe16(p + 2);
      address.ip = Gid::FromIpv4(LoadBe32(p + 4));
      break;
    case kFamilyInet6:
      address.port = LoadBe16(p + 2);
      address.flow_info = LoadBe32(p + 4);
      address.ip = Gid::Load(p + 8);
      address.scope_id = LoadHost<uint32_t>(p + 24);
      break;
    default:
      address.pkey = LoadBe16(p + 2);
      address.flow_info = LoadBe32(p + 4);
      address.ip = Gid::Load(p + 8);
      address.service_id = LoadBe64(p + 24);
      address.service_mask = LoadBe64(p + 32);
      address.scope_id = static_cast<uint32_t>(LoadHost<uint64_t>(p + 40));
      address.port = static_cast<uint16_t>(address.service_id);
      break;
  }
  return address;
}

uint16_t SocketAddress::size() const { return SizeOf(family); }

void SocketAddress::Store(std::byte* to) const {
  std::memset(to, 0, size());
  if (family == 0) return;
  StoreHost(to, family);
  switch (family) {
    case kFamilyInet:
      StoreBe16(to + 2, port);
      StoreBe32(to + 4, ip.Ipv4());
      break;
    case kFamilyInet6:
      StoreBe16(to + 2, port);
      StoreBe32(to + 4, flow_info);
      ip.Store(to + 8);
      StoreHost(to + 24, scope_id);
      break;
    default:
      StoreBe16(to + 2, pkey);
      StoreBe32(to + 4, flow_info);
      ip.Store(to + 8);
      StoreBe64(to + 24, service_id);
      StoreBe64(to + 32, service_mask);
      StoreHost(to + 40, uint64_t{scope_id});
      break;
  }
}

bool SocketAddress::IsAny() const { return family == kFamilyInet ? ip.Ipv4() == 0 : ip.IsZero(); }

bool SocketAddress::IsLoopback() const {
  if (family == kFamilyInet) return ip.Ipv4() >> 24 == 127;
  return family == kFamilyInet6 && LoadBe64(ip.bytes().data()) == 0 &&
         LoadBe64(ip.bytes().data() + 8) == 1;
}

void SocketAddress::SetPort(uint16_t value) {
  port = value;
  if (family == kFamilyIb) service_id = (service_id & ~uint64_t{0xffff}) | value;
}

std::string SocketAddress::ToString() const {
  if (family == 0) return "";
  const std::string number = ":" + std::to_string(port);
  if (family != kFamilyInet) return "[" + ip.ToString() + "]" + number;
  const uint32_t v4 = ip.Ipv4();
  std::string text;
  for (int shift = 24; shift >= 0; shift -= 8) {
    text += std::to_string((v4 >> shift) & 255);
    if (shift > 0) text += '.';
  }
  return text + number;
}

}  // namespace verbena::nic
