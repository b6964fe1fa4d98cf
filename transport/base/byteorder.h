// SPDX-License-Identifier: Apache-2.0
//
// Big-endian loads and stores of unaligned wire fields. Every multi-byte field
// of Ethernet, IP, UDP and the IBTA transport headers is big-endian; the only
// exception is the ICRC, which has its own little-endian pair here.
// The caller guarantees that the named number of bytes exists.
#pragma once

#include <cstddef>
#include <cstdint>

namespace verbena::transport {

constexpr uint8_t LoadBe8(const std::byte* p) { return std::to_integer<uint8_t>(p[0]); }

constexpr uint16_t LoadBe16(const std::byte* p) {
  return static_cast<uint16_t>((LoadBe8(p) << 8) | LoadBe8(p + 1));
}

constexpr uint32_t LoadBe24(const std::byte* p) {
  return (uint32_t{LoadBe8(p)} << 16) | LoadBe16(p + 1);
}

constexpr uint32_t LoadBe32(const std::byte* p) {
  return (uint32_t{LoadBe16(p)} << 16) | LoadBe16(p + 2);
}

constexpr uint64_t LoadBe64(const std::byte* p) {
  return (uint64_t{LoadBe32(p)} << 32) | LoadBe32(p + 4);
}

constexpr uint32_t LoadLe32(const std::byte* p) {
  return uint32_t{LoadBe8(p)} | (uint32_t{LoadBe8(p + 1)} << 8) | (uint32_t{LoadBe8(p + 2)} << 16) |
         (uint32_t{LoadBe8(p + 3)} << 24);
}

constexpr void StoreBe8(std::byte* p, uint8_t v) { p[0] = std::byte{v}; }

constexpr void StoreBe16(std::byte* p, uint16_t v) {
  StoreBe8(p, static_cast<uint8_t>(v >> 8));
  StoreBe8(p + 1, static_cast<uint8_t>(v));
}

// Stores the low 24 bits of `v`.
constexpr void StoreBe24(std::byte* p, uint32_t v) {
  StoreBe8(p, static_cast<uint8_t>(v >> 16));
  StoreBe16(p + 1, static_cast<uint16_t>(v));
}

constexpr void StoreBe32(std::byte* p, uint32_t v) {
  StoreBe16(p, static_cast<uint16_t>(v >> 16));
  StoreBe16(p + 2, static_cast<uint16_t>(v));
}

constexpr void StoreBe64(std::byte* p, uint64_t v) {
  StoreBe32(p, static_cast<uint32_t>(v >> 32));
  StoreBe32(p + 4, static_cast<uint32_t>(v));
}

constexpr void StoreLe32(std::byte* p, uint32_t v) {
  StoreBe8(p, static_cast<uint8_t>(v));
  StoreBe8(p + 1, static_cast<uint8_t>(v >> 8));
  StoreBe8(p + 2, static_cast<uint8_t>(v >> 16));
  StoreBe8(p + 3, static_cast<uint8_t>(v >> 24));
}

}  // namespace verbena::transport
