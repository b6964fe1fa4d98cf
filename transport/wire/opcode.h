// SPDX-License-Identifier: Apache-2.0
//
// BTH opcodes and what follows from them. One list (VERBENA_OPCODES) gives the
// enum, the names and the ordered extended headers; header lengths and offsets
// are computed from it. A code that is not in the list is reserved.
//
// Operations of one service share their low five bits: 0x00 RC, 0x20 UC,
// 0x60 UD, 0xa0 XRC; 0x81 is the congestion notification packet of RoCEv2.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

namespace verbena::transport {

enum class Service : uint8_t { kReserved, kRc, kUc, kUd, kXrc, kCnp };

enum class OperationKind : uint8_t {
  kNone,
  kSend,
  kWrite,
  kReadRequest,
  kReadResponse,
  kAcknowledge,        // ACK, NAK and RNR NAK
  kAtomicAcknowledge,  // result of an atomic
  kCompareSwap,
  kFetchAdd,
  kFlush,        // optional operation of newer specifications
  kAtomicWrite,  // likewise
  kCongestion,
};

enum class Position : uint8_t { kFirst, kMiddle, kLast, kOnly };

// Extended transport headers. A packet carries those of its opcode in the
// order in which the opcode lists them, directly behind the BTH.
enum class ExtHeader : uint8_t {
  kXrcEth,
  kDeth,
  kReth,
  kAtomicEth,
  kAeth,
  kAtomicAckEth,
  kImmDt,
  kIeth,
  kFeth,
  kCnpReserved,  // sixteen reserved bytes of a CNP
};
inline constexpr size_t kExtHeaderCount = 10;

inline constexpr size_t kBthBytes = 12;
constexpr size_t ExtHeaderBytes(ExtHeader header) {
  constexpr std::array<uint8_t, kExtHeaderCount> kBytes = {4, 8, 16, 28, 4, 8, 4, 4, 4, 16};
  return kBytes[static_cast<size_t>(header)];
}

// clang-format off
// X(enumerator, code, name, service, kind, position, payload, headers...)
#define VERBENA_OPCODES(X)                                                                                 \
  X(kRcSendFirst,             0x00, "RC_SEND_FIRST",                 kRc, kSend,         kFirst,  true)     \
  X(kRcSendMiddle,            0x01, "RC_SEND_MIDDLE",                kRc, kSend,         kMiddle, true)     \
  X(kRcSendLast,              0x02, "RC_SEND_LAST",                  kRc, kSend,         kLast,   true)     \
  X(kRcSendLastImm,           0x03, "RC_SEND_LAST_IMM",              kRc, kSend,         kLast,   true, kImmDt) \
  X(kRcSendOnly,              0x04, "RC_SEND_ONLY",                  kRc, kSend,         kOnly,   true)     \
  X(kRcSendOnlyImm,           0x05, "RC_SEND_ONLY_IMM",              kRc, kSend,         kOnly,   true, kImmDt) \
  X(kRcWriteFirst,            0x06, "RC_RDMA_WRITE_FIRST",           kRc, kWrite,        kFirst,  true, kReth) \
  X(kRcWriteMiddle,           0x07, "RC_RDMA_WRITE_MIDDLE",          kRc, kWrite,        kMiddle, true)     \
  X(kRcWriteLast,             0x08, "RC_RDMA_WRITE_LAST",            kRc, kWrite,        kLast,   true)     \
  X(kRcWriteLastImm,          0x09, "RC_RDMA_WRITE_LAST_IMM",        kRc, kWrite,        kLast,   true, kImmDt) \
  X(kRcWriteOnly,             0x0a, "RC_RDMA_WRITE_ONLY",            kRc, kWrite,        kOnly,   true, kReth) \
  X(kRcWriteOnlyImm,          0x0b, "RC_RDMA_WRITE_ONLY_IMM",        kRc, kWrite,        kOnly,   true, kReth, kImmDt) \
  X(kRcReadRequest,           0x0c, "RC_RDMA_READ_REQUEST",          kRc, kReadRequest,  kOnly,   false, kReth) \
  X(kRcReadResponseFirst,     0x0d, "RC_RDMA_READ_RESPONSE_FIRST",   kRc, kReadResponse, kFirst,  true, kAeth) \
  X(kRcReadResponseMiddle,    0x0e, "RC_RDMA_READ_RESPONSE_MIDDLE",  kRc, kReadResponse, kMiddle, true)     \
  X(kRcReadResponseLast,      0x0f, "RC_RDMA_READ_RESPONSE_LAST",    kRc, kReadResponse, kLast,   true, kAeth) \
  X(kRcReadResponseOnly,      0x10, "RC_RDMA_READ_RESPONSE_ONLY",    kRc, kReadResponse, kOnly,   true, kAeth) \
  X(kRcAcknowledge,           0x11, "RC_ACKNOWLEDGE",                kRc, kAcknowledge,  kOnly,   false, kAeth) \
  X(kRcAtomicAcknowledge,     0x12, "RC_ATOMIC_ACKNOWLEDGE",         kRc, kAtomicAcknowledge, kOnly, false, kAeth, kAtomicAckEth) \
  X(kRcCompareSwap,           0x13, "RC_CMP_SWAP",                   kRc, kCompareSwap,  kOnly,   false, kAtomicEth) \
  X(kRcFetchAdd,              0x14, "RC_FETCH_ADD",                  kRc, kFetchAdd,     kOnly,   false, kAtomicEth) \
  X(kRcSendLastInv,           0x16, "RC_SEND_LAST_INV",              kRc, kSend,         kLast,   true, kIeth) \
  X(kRcSendOnlyInv,           0x17, "RC_SEND_ONLY_INV",              kRc, kSend,         kOnly,   true, kIeth) \
  X(kRcFlush,                 0x1c, "RC_FLUSH",                      kRc, kFlush,        kOnly,   false, kFeth, kReth) \
  X(kRcAtomicWrite,           0x1d, "RC_ATOMIC_WRITE",               kRc, kAtomicWrite,  kOnly,   true, kReth) \
  X(kUcSendFirst,             0x20, "UC_SEND_FIRST",                 kUc, kSend,         kFirst,  true)     \
  X(kUcSendMiddle,            0x21, "UC_SEND_MIDDLE",                kUc, kSend,         kMiddle, true)     \
  X(kUcSendLast,              0x22, "UC_SEND_LAST",                  kUc, kSend,         kLast,   true)     \
  X(kUcSendLastImm,           0x23, "UC_SEND_LAST_IMM",              kUc, kSend,         kLast,   true, kImmDt) \
  X(kUcSendOnly,              0x24, "UC_SEND_ONLY",                  kUc, kSend,         kOnly,   true)     \
  X(kUcSendOnlyImm,           0x25, "UC_SEND_ONLY_IMM",              kUc, kSend,         kOnly,   true, kImmDt) \
  X(kUcWriteFirst,            0x26, "UC_RDMA_WRITE_FIRST",           kUc, kWrite,        kFirst,  true, kReth) \
  X(kUcWriteMiddle,           0x27, "UC_RDMA_WRITE_MIDDLE",          kUc, kWrite,        kMiddle, true)     \
  X(kUcWriteLast,             0x28, "UC_RDMA_WRITE_LAST",            kUc, kWrite,        kLast,   true)     \
  X(kUcWriteLastImm,          0x29, "UC_RDMA_WRITE_LAST_IMM",        kUc, kWrite,        kLast,   true, kImmDt) \
  X(kUcWriteOnly,             0x2a, "UC_RDMA_WRITE_ONLY",            kUc, kWrite,        kOnly,   true, kReth) \
  X(kUcWriteOnlyImm,          0x2b, "UC_RDMA_WRITE_ONLY_IMM",        kUc, kWrite,        kOnly,   true, kReth, kImmDt) \
  X(kUdSendOnly,              0x64, "UD_SEND_ONLY",                  kUd, kSend,         kOnly,   true, kDeth) \
  X(kUdSendOnlyImm,           0x65, "UD_SEND_ONLY_IMM",              kUd, kSend,         kOnly,   true, kDeth, kImmDt) \
  X(kCnp,                     0x81, "CNP",                           kCnp, kCongestion,  kOnly,   false, kCnpReserved) \
  X(kXrcSendFirst,            0xa0, "XRC_SEND_FIRST",                kXrc, kSend,        kFirst,  true, kXrcEth) \
  X(kXrcSendMiddle,           0xa1, "XRC_SEND_MIDDLE",               kXrc, kSend,        kMiddle, true, kXrcEth) \
  X(kXrcSendLast,             0xa2, "XRC_SEND_LAST",                 kXrc, kSend,        kLast,   true, kXrcEth) \
  X(kXrcSendLastImm,          0xa3, "XRC_SEND_LAST_IMM",             kXrc, kSend,        kLast,   true, kXrcEth, kImmDt) \
  X(kXrcSendOnly,             0xa4, "XRC_SEND_ONLY",                 kXrc, kSend,        kOnly,   true, kXrcEth) \
  X(kXrcSendOnlyImm,          0xa5, "XRC_SEND_ONLY_IMM",             kXrc, kSend,        kOnly,   true, kXrcEth, kImmDt) \
  X(kXrcWriteFirst,           0xa6, "XRC_RDMA_WRITE_FIRST",          kXrc, kWrite,       kFirst,  true, kXrcEth, kReth) \
  X(kXrcWriteMiddle,          0xa7, "XRC_RDMA_WRITE_MIDDLE",         kXrc, kWrite,       kMiddle, true, kXrcEth) \
  X(kXrcWriteLast,            0xa8, "XRC_RDMA_WRITE_LAST",           kXrc, kWrite,       kLast,   true, kXrcEth) \
  X(kXrcWriteLastImm,         0xa9, "XRC_RDMA_WRITE_LAST_IMM",       kXrc, kWrite,       kLast,   true, kXrcEth, kImmDt) \
  X(kXrcWriteOnly,            0xaa, "XRC_RDMA_WRITE_ONLY",           kXrc, kWrite,       kOnly,   true, kXrcEth, kReth) \
  X(kXrcWriteOnlyImm,         0xab, "XRC_RDMA_WRITE_ONLY_IMM",       kXrc, kWrite,       kOnly,   true, kXrcEth, kReth, kImmDt) \
  X(kXrcReadRequest,          0xac, "XRC_RDMA_READ_REQUEST",         kXrc, kReadRequest, kOnly,   false, kXrcEth, kReth) \
  X(kXrcReadResponseFirst,    0xad, "XRC_RDMA_READ_RESPONSE_FIRST",  kXrc, kReadResponse, kFirst, true, kAeth) \
  X(kXrcReadResponseMiddle,   0xae, "XRC_RDMA_READ_RESPONSE_MIDDLE", kXrc, kReadResponse, kMiddle, true)    \
  X(kXrcReadResponseLast,     0xaf, "XRC_RDMA_READ_RESPONSE_LAST",   kXrc, kReadResponse, kLast,  true, kAeth) \
  X(kXrcReadResponseOnly,     0xb0, "XRC_RDMA_READ_RESPONSE_ONLY",   kXrc, kReadResponse, kOnly,  true, kAeth) \
  X(kXrcAcknowledge,          0xb1, "XRC_ACKNOWLEDGE",               kXrc, kAcknowledge, kOnly,   false, kAeth) \
  X(kXrcAtomicAcknowledge,    0xb2, "XRC_ATOMIC_ACKNOWLEDGE",        kXrc, kAtomicAcknowledge, kOnly, false, kAeth, kAtomicAckEth) \
  X(kXrcCompareSwap,          0xb3, "XRC_CMP_SWAP",                  kXrc, kCompareSwap, kOnly,   false, kXrcEth, kAtomicEth) \
  X(kXrcFetchAdd,             0xb4, "XRC_FETCH_ADD",                 kXrc, kFetchAdd,    kOnly,   false, kXrcEth, kAtomicEth) \
  X(kXrcSendLastInv,          0xb6, "XRC_SEND_LAST_INV",             kXrc, kSend,        kLast,   true, kXrcEth, kIeth) \
  X(kXrcSendOnlyInv,          0xb7, "XRC_SEND_ONLY_INV",             kXrc, kSend,        kOnly,   true, kXrcEth, kIeth)
// clang-format on

enum class Opcode : uint8_t {
#define VERBENA_OPCODE_ENUMERATOR(enumerator, code, ...) enumerator = (code),
  VERBENA_OPCODES(VERBENA_OPCODE_ENUMERATOR)
#undef VERBENA_OPCODE_ENUMERATOR
};

// What an opcode means. Of a reserved opcode: service kReserved, no headers.
struct OpcodeTraits {
  Service service = Service::kReserved;
  OperationKind kind = OperationKind::kNone;
  Position position = Position::kOnly;
  bool carries_payload = false;
  // BTH and all extended headers.
  uint8_t header_bytes = kBthBytes;
  // Where each extended header begins, from the BTH's first byte; 0 = absent.
  std::array<uint8_t, kExtHeaderCount> offsets{};

  constexpr bool is_reserved() const { return service == Service::kReserved; }
  constexpr uint8_t OffsetOf(ExtHeader header) const {
    return offsets[static_cast<size_t>(header)];
  }
  constexpr bool Has(ExtHeader header) const { return OffsetOf(header) != 0; }

  constexpr bool has_xrceth() const { return Has(ExtHeader::kXrcEth); }
  constexpr bool has_deth() const { return Has(ExtHeader::kDeth); }
  constexpr bool has_reth() const { return Has(ExtHeader::kReth); }
  constexpr bool has_atomic_eth() const { return Has(ExtHeader::kAtomicEth); }
  constexpr bool has_aeth() const { return Has(ExtHeader::kAeth); }
  constexpr bool has_atomic_ack_eth() const { return Has(ExtHeader::kAtomicAckEth); }
  constexpr bool has_imm() const { return Has(ExtHeader::kImmDt); }
  constexpr bool has_ieth() const { return Has(ExtHeader::kIeth); }
  constexpr bool has_feth() const { return Has(ExtHeader::kFeth); }

  constexpr bool is_first() const { return position == Position::kFirst; }
  constexpr bool is_middle() const { return position == Position::kMiddle; }
  constexpr bool is_last() const { return position == Position::kLast; }
  constexpr bool is_only() const { return position == Position::kOnly; }
  constexpr bool begins_message() const { return is_first() || is_only(); }
  constexpr bool ends_message() const { return is_last() || is_only(); }

  constexpr bool is_send() const { return kind == OperationKind::kSend; }
  constexpr bool is_write() const { return kind == OperationKind::kWrite; }
  constexpr bool is_read_request() const { return kind == OperationKind::kReadRequest; }
  constexpr bool is_read_response() const { return kind == OperationKind::kReadResponse; }
  constexpr bool is_acknowledge() const { return kind == OperationKind::kAcknowledge; }
  constexpr bool is_atomic_acknowledge() const { return kind == OperationKind::kAtomicAcknowledge; }
  // CMP_SWAP or FETCH_ADD.
  constexpr bool is_atomic() const {
    return kind == OperationKind::kCompareSwap || kind == OperationKind::kFetchAdd;
  }
  // For the requester half of a connected QP: read responses, (N)ACKs.
  constexpr bool is_response() const {
    return is_read_response() || is_acknowledge() || is_atomic_acknowledge();
  }
  // For the responder half of a QP.
  constexpr bool is_request() const {
    return !is_reserved() && !is_response() && service != Service::kCnp;
  }
};

namespace internal {

constexpr OpcodeTraits MakeTraits(Service service, OperationKind kind, Position position,
                                  bool payload, std::initializer_list<ExtHeader> headers) {
  OpcodeTraits traits{service, kind, position, payload};
  for (ExtHeader header : headers) {
    traits.offsets[static_cast<size_t>(header)] = traits.header_bytes;
    traits.header_bytes = static_cast<uint8_t>(traits.header_bytes + ExtHeaderBytes(header));
  }
  return traits;
}

constexpr std::array<OpcodeTraits, 256> MakeTraitsTable() {
  using enum ExtHeader;
  std::array<OpcodeTraits, 256> table{};
#define VERBENA_OPCODE_TRAITS(enumerator, code, name, service, kind, position, payload, ...)   \
  table[code] = MakeTraits(Service::service, OperationKind::kind, Position::position, payload, \
                           {__VA_ARGS__});
  VERBENA_OPCODES(VERBENA_OPCODE_TRAITS)
#undef VERBENA_OPCODE_TRAITS
  return table;
}

constexpr size_t LargestHeaders(const std::array<OpcodeTraits, 256>& table) {
  size_t most = 0;
  for (const OpcodeTraits& traits : table) {
    if (traits.header_bytes > most) most = traits.header_bytes;
  }
  return most;
}

inline constexpr std::array<OpcodeTraits, 256> kTraits = MakeTraitsTable();

}  // namespace internal

// Never fails: reserved opcodes have a row too.
constexpr const OpcodeTraits& TraitsOf(Opcode opcode) {
  return internal::kTraits[static_cast<uint8_t>(opcode)];
}

// BTH plus the longest list of extended headers.
inline constexpr size_t kMaxTransportHeaderBytes = internal::LargestHeaders(internal::kTraits);
static_assert(kMaxTransportHeaderBytes == 44);  // XRC atomics: 12 + 4 + 28

// "RC_SEND_FIRST"; "RESERVED" when the code is not in the list.
std::string_view OpcodeName(Opcode opcode);

// The opcode with this name, in any case, with '_', '-' or ' ' between words;
// empty if there is none.
std::optional<Opcode> ParseOpcodeName(std::string_view name);

std::string_view ToString(Service service);
std::string_view ToString(OperationKind kind);

}  // namespace verbena::transport
