// SPDX-License-Identifier: Apache-2.0
//
// One frame to the packet parser. The first byte says what is repaired before:
// bit 0 the IPv4 header checksum, bit 1 the lengths of IP and UDP (and then the
// checksum), bit 2: only a head of the frame is there (the second byte cuts).
#include <vector>

#include "tests/fuzz/fuzz_target.h"
#include "transport/base/byteorder.h"
#include "transport/wire/describe.h"
#include "transport/wire/packet_builder.h"
#include "transport/wire/packet_view.h"

namespace verbena::fuzz {
namespace {

using namespace transport;
using Frame = std::vector<std::byte>;

void Repair(uint8_t what, Frame* frame) {
  if (frame->size() < 14) return;
  const bool vlan = frame->size() >= 18 && LoadBe16(&(*frame)[12]) == kEtherTypeVlan;
  const size_t l3 = vlan ? 18 : 14;
  const uint16_t type = LoadBe16(&(*frame)[l3 - 2]);
  const size_t ip_bytes = type == kEtherTypeIpv4 ? Ipv4Header::kBytes : Ipv6Header::kBytes;
  if (frame->size() < l3 + ip_bytes + UdpHeader::kBytes) return;
  std::byte* ip = frame->data() + l3;
  if ((what & 2) != 0) {
    const auto behind = static_cast<uint16_t>(frame->size() - l3 - ip_bytes);
    StoreBe16(ip + ip_bytes + 4, behind);
    if (type == kEtherTypeIpv4) {
      StoreBe16(ip + 2, static_cast<uint16_t>(behind + ip_bytes));
    } else {
      StoreBe16(ip + 4, behind);
    }
  }
  if ((what & 3) != 0 && type == kEtherTypeIpv4) StoreBe16(ip + 10, Ipv4HeaderChecksum(ip));
}

// Everything that a parsed packet offers agrees with itself and with the frame.
void Use(const PacketView& packet, size_t frame_bytes) {
  FUZZ_CHECK(!Describe(packet).empty());
  FUZZ_CHECK(packet.frame_bytes() <= frame_bytes);
  FUZZ_CHECK(packet.frame_bytes() ==
             packet.headers().size() + packet.payload_bytes() + packet.pad() + kIcrcBytes);
  FUZZ_CHECK(!packet.traits().is_reserved());
  std::vector<std::byte> rebuilt(kMaxHeaderBytes, std::byte{0xa5});
  rebuilt.resize(
      WriteHeaders(AddressOf(packet), HeadersOf(packet), packet.payload_bytes(), rebuilt.data()));
  // The reserved bytes of a CNP are ignored on receipt.
  const size_t compared = rebuilt.size() - (packet.opcode() == Opcode::kCnp ? 16 : 0);
  FUZZ_CHECK(rebuilt.size() == packet.headers().size());
  FUZZ_CHECK(std::memcmp(rebuilt.data(), packet.headers().data(), compared) == 0);
  if (!packet.has_contiguous_payload()) return;
  const auto payload = packet.payload();
  uint64_t sum = 0;
  for (const std::byte byte : payload) sum += std::to_integer<uint64_t>(byte);
  FUZZ_CHECK(sum <= payload.size() * 255);
  FUZZ_CHECK(packet.VerifyIcrc() == (packet.ComputeIcrc() == packet.icrc()));
}

}  // namespace
}  // namespace verbena::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace verbena::fuzz;
  Input input(data, size);
  const uint8_t what = input.U8();
  const size_t cut = (what & 4) != 0 ? input.U8() : SIZE_MAX;
  const auto bytes = input.Rest();
  Frame frame(bytes.size());
  if (!bytes.empty()) std::memcpy(frame.data(), bytes.data(), bytes.size());
  Repair(what, &frame);
  PeekBth(frame);
  if (const auto packet = PacketView::Parse(frame); packet.ok()) {
    FUZZ_CHECK(packet->has_contiguous_payload());
    Use(*packet, frame.size());
  } else {
    FUZZ_CHECK(!Describe(packet.error()).empty());
  }
  if (cut < frame.size()) {
    const Frame head(frame.begin(), frame.begin() + static_cast<ptrdiff_t>(cut));
    if (const auto packet = PacketView::ParseHead(head, frame.size()); packet.ok()) {
      Use(*packet, frame.size());
    }
  }
  return 0;
}
