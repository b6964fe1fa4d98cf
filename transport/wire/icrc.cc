// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/icrc.h"

#include <isa-l/crc.h>

#include <array>
#include <cassert>

#include "transport/wire/bth.h"
#include "transport/wire/ip_udp.h"

namespace verbena::transport {
namespace {

// CRC-32 of eight bytes of ones, the seed for what follows them.
consteval uint32_t LrhSeed() {
  uint32_t crc = ~uint32_t{0};
  for (int byte = 0; byte < 8; ++byte) {
    crc ^= 0xff;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
    }
  }
  return ~crc;
}

// ISA-L takes and gives the CRC as zlib does, so values chain. It reads only;
// its prototype lacks the const in some versions.
uint32_t Crc32(uint32_t seed, const std::byte* data, size_t bytes) {
  if (bytes == 0) return seed;
  return crc32_gzip_refl(seed, reinterpret_cast<const unsigned char*>(data), bytes);
}

// Ones where the header byte counts as ones; IP, UDP and BTH.
template <bool kIsIpv6>
constexpr auto MakeMask() {
  constexpr std::byte kOnes{0xff};
  constexpr size_t kIpBytes = kIsIpv6 ? Ipv6Header::kBytes : Ipv4Header::kBytes;
  std::array<std::byte, kIpBytes + UdpHeader::kBytes + Bth::kBytes> mask{};
  if (kIsIpv6) {
    mask[0] = std::byte{0x0f};
    mask[1] = mask[2] = mask[3] = kOnes;  // traffic class, flow label
    mask[7] = kOnes;                      // hop limit
  } else {
    mask[1] = kOnes;              // TOS
    mask[8] = kOnes;              // TTL
    mask[10] = mask[11] = kOnes;  // header checksum
  }
  mask[kIpBytes + 6] = mask[kIpBytes + 7] = kOnes;  // UDP checksum
  mask[kIpBytes + UdpHeader::kBytes + 4] = kOnes;   // FECN, BECN, resv6
  return mask;
}

// CRC of the masked headers at the front of `l3`.
template <bool kIsIpv6>
uint32_t MaskedHeaderCrc(std::span<const std::byte> l3) {
  static constexpr auto kMask = MakeMask<kIsIpv6>();
  assert(l3.size() >= kMask.size());
  // Whole vectors are written: patching single bytes would stall the CRC's loads.
  alignas(16) std::array<std::byte, kMask.size()> masked;
  for (size_t i = 0; i < kMask.size(); ++i) masked[i] = l3[i] | kMask[i];
  return Crc32(LrhSeed(), masked.data(), masked.size());
}

}  // namespace

IcrcAccumulator::IcrcAccumulator(std::span<const std::byte> l3_headers, bool is_ipv6)
    : crc_(is_ipv6 ? MaskedHeaderCrc<true>(l3_headers) : MaskedHeaderCrc<false>(l3_headers)) {
  constexpr size_t kBehindIp = UdpHeader::kBytes + Bth::kBytes;
  Add(l3_headers.subspan((is_ipv6 ? Ipv6Header::kBytes : Ipv4Header::kBytes) + kBehindIp));
}

void IcrcAccumulator::Add(std::span<const std::byte> bytes) {
  crc_ = Crc32(crc_, bytes.data(), bytes.size());
}

uint32_t Icrc(std::span<const std::byte> l3_to_pad_end, bool is_ipv6) {
  return IcrcAccumulator(l3_to_pad_end, is_ipv6).value();
}

}  // namespace verbena::transport
