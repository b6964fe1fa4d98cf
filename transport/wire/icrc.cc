// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/icrc.h"

#include <isa-l/crc.h>

#include <array>
#include <cstring>

#include "transport/wire/bth.h"
#include "transport/wire/ip_udp.h"

namespace verbena::transport {
namespace {

constexpr std::byte kOnes{0xff};

// CRC-32 of eight bytes of ones, the seed for what follows them.
constexpr uint32_t LrhSeed() {
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

}  // namespace

IcrcAccumulator::IcrcAccumulator(std::span<const std::byte> l3_headers, bool is_ipv6)
    : crc_(LrhSeed()) {
  const size_t ip_bytes = is_ipv6 ? Ipv6Header::kBytes : Ipv4Header::kBytes;
  const size_t masked_bytes = ip_bytes + UdpHeader::kBytes + Bth::kBytes;
  assert(l3_headers.size() >= masked_bytes);

  std::array<std::byte, Ipv6Header::kBytes + UdpHeader::kBytes + Bth::kBytes> masked;
  std::memcpy(masked.data(), l3_headers.data(), masked_bytes);
  if (is_ipv6) {
    masked[0] |= std::byte{0x0f};
    masked[1] = masked[2] = masked[3] = kOnes;  // traffic class, flow label
    masked[7] = kOnes;                          // hop limit
  } else {
    masked[1] = kOnes;                // TOS
    masked[8] = kOnes;                // TTL
    masked[10] = masked[11] = kOnes;  // header checksum
  }
  masked[ip_bytes + 6] = masked[ip_bytes + 7] = kOnes;  // UDP checksum
  masked[ip_bytes + UdpHeader::kBytes + 4] = kOnes;     // FECN, BECN, resv6

  crc_ = Crc32(crc_, masked.data(), masked_bytes);
  Add(l3_headers.subspan(masked_bytes));
}

void IcrcAccumulator::Add(std::span<const std::byte> bytes) {
  crc_ = Crc32(crc_, bytes.data(), bytes.size());
}

uint32_t Icrc(std::span<const std::byte> l3_to_pad_end, bool is_ipv6) {
  return IcrcAccumulator(l3_to_pad_end, is_ipv6).value();
}

}  // namespace verbena::transport
