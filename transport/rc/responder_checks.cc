// SPDX-License-Identifier: Apache-2.0
#include "transport/rc/responder_checks.h"

namespace verbena::transport {

namespace {

constexpr uint32_t kMaxDmaLength = uint32_t{1} << 31;
constexpr uint64_t kAtomicBytes = 8;

// IBTA Vol 1 C9-92: FIRST and MIDDLE carry exactly the path MTU, LAST 1 to path
// MTU, ONLY 0 to path MTU.
bool IsPayloadLengthValid(const OpcodeTraits& traits, size_t payload, uint32_t mtu) {
  switch (traits.position) {
    case Position::kFirst:
    case Position::kMiddle:
      return payload == mtu;
    case Position::kLast:
      return payload >= 1 && payload <= mtu;
    case Position::kOnly:
      break;
  }
  return payload <= mtu;
}

// The payload of a WRITE against the length that its RETH announced.
bool IsWriteLengthValid(const PacketView& packet, const MessageState& message) {
  const OpcodeTraits& traits = packet.traits();
  uint64_t left = message.length - message.done;
  if (traits.begins_message()) {
    const uint32_t dma_length = packet.reth().dma_length;
    if (dma_length > kMaxDmaLength) return false;  // C9-94
    left = dma_length;
  }
  return traits.ends_message() ? packet.payload_bytes() == left : packet.payload_bytes() < left;
}

}  // namespace

Verdict CheckLength(const PacketView& packet, const MessageState& message, uint32_t mtu) {
  const OpcodeTraits& traits = packet.traits();
  bool valid = true;
  switch (traits.kind) {
    case OperationKind::kSend:
      valid = IsPayloadLengthValid(traits, packet.payload_bytes(), mtu) &&
              message.done + packet.payload_bytes() <= kMaxDmaLength;
      break;
    case OperationKind::kWrite:
      valid = IsPayloadLengthValid(traits, packet.payload_bytes(), mtu) &&
              IsWriteLengthValid(packet, message);
      break;
    case OperationKind::kReadRequest:
      valid = packet.reth().dma_length <= kMaxDmaLength;
      break;
    case OperationKind::kAtomicWrite:
      valid = packet.payload_bytes() == kAtomicBytes && packet.reth().dma_length == kAtomicBytes &&
              packet.reth().va % kAtomicBytes == 0;
      break;
    case OperationKind::kFlush:
      break;
    default:
      valid = packet.atomic_eth().va % kAtomicBytes == 0;
      break;
  }
  return valid ? Verdict::kNext : Verdict::kInvalidRequest;
}

Verdict CheckFlush(const PacketView& packet, uint32_t access_flags) {
  const Feth feth = packet.feth();
  // Memory that survives a loss of power cannot be registered.
  const bool valid = feth.type() == Feth::kGlobal &&
                     (feth.level() == Feth::kLevelRange || feth.level() == Feth::kLevelRegion);
  return valid && (access_flags & kAccessFlushGlobal) != 0 ? Verdict::kNext
                                                           : Verdict::kInvalidRequest;
}

Verdict CheckRkey(const PacketView& packet, MemoryPort& memory) {
  const Reth reth = packet.reth();
  if (reth.dma_length == 0) return Verdict::kNext;  // IBTA Vol 1 C9-88
  return RemoteVerdict(memory.Check(
      reth.rkey.value(), reth.va, reth.dma_length,
      packet.traits().is_write() ? MemoryAccess::kRemoteWrite : MemoryAccess::kRemoteRead));
}

}  // namespace verbena::transport
