// SPDX-License-Identifier: Apache-2.0
#include "transport/types.h"

#include <arpa/inet.h>

#include <cstdio>

namespace verbena::transport {
namespace {

// Value of a hexadecimal digit, or -1.
int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

std::optional<Gid> Gid::Parse(std::string_view text) {
  const std::string terminated(text);
  Bytes bytes{};
  if (inet_pton(AF_INET6, terminated.c_str(), bytes.data()) == 1) return Gid(bytes);
  std::array<std::byte, 4> ipv4{};
  if (inet_pton(AF_INET, terminated.c_str(), ipv4.data()) == 1) {
    return FromIpv4(LoadBe32(ipv4.data()));
  }
  return std::nullopt;
}

std::string Gid::ToString() const {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(AF_INET6, bytes_.data(), text, sizeof(text));
  return text;
}

std::optional<MacAddress> MacAddress::Parse(std::string_view text) {
  if (text.size() != 3 * kBytes - 1) return std::nullopt;
  Bytes bytes{};
  for (size_t i = 0; i < kBytes; ++i) {
    const int high = HexDigit(text[3 * i]);
    const int low = HexDigit(text[3 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    if (i + 1 < kBytes && text[3 * i + 2] != ':') return std::nullopt;
    bytes[i] = static_cast<std::byte>(high * 16 + low);
  }
  return MacAddress(bytes);
}

std::string MacAddress::ToString() const {
  char text[3 * kBytes];
  for (size_t i = 0; i < kBytes; ++i) {
    std::snprintf(text + 3 * i, sizeof(text) - 3 * i, "%02x%s", LoadBe8(&bytes_[i]),
                  i + 1 < kBytes ? ":" : "");
  }
  return text;
}

}  // namespace verbena::transport
