// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/opcode.h"

namespace verbena::transport {
namespace {

constexpr std::array<std::string_view, 256> MakeNames() {
  std::array<std::string_view, 256> names{};
  for (std::string_view& name : names) name = "RESERVED";
#define VERBENA_OPCODE_NAME(enumerator, code, name, ...) names[code] = name;
  VERBENA_OPCODES(VERBENA_OPCODE_NAME)
#undef VERBENA_OPCODE_NAME
  return names;
}
constexpr std::array<std::string_view, 256> kNames = MakeNames();

constexpr char Canonical(char c) {
  if (c >= 'a' && c <= 'z') return static_cast<char>(c - 'a' + 'A');
  return c == '-' || c == ' ' ? '_' : c;
}

bool SameName(std::string_view name, std::string_view text) {
  if (name.size() != text.size()) return false;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] != Canonical(text[i])) return false;
  }
  return true;
}

}  // namespace

std::string_view OpcodeName(Opcode opcode) { return kNames[static_cast<uint8_t>(opcode)]; }

std::optional<Opcode> ParseOpcodeName(std::string_view name) {
  for (size_t code = 0; code < kNames.size(); ++code) {
    const auto opcode = static_cast<Opcode>(code);
    if (!TraitsOf(opcode).is_reserved() && SameName(kNames[code], name)) return opcode;
  }
  return std::nullopt;
}

std::string_view ToString(Service service) {
  switch (service) {
    case Service::kReserved:
      return "reserved";
    case Service::kRc:
      return "RC";
    case Service::kUc:
      return "UC";
    case Service::kUd:
      return "UD";
    case Service::kXrc:
      return "XRC";
    case Service::kCnp:
      return "CNP";
  }
  return "reserved";
}

std::string_view ToString(OperationKind kind) {
  switch (kind) {
    case OperationKind::kNone:
      return "none";
    case OperationKind::kSend:
      return "send";
    case OperationKind::kWrite:
      return "write";
    case OperationKind::kReadRequest:
      return "read_request";
    case OperationKind::kReadResponse:
      return "read_response";
    case OperationKind::kAcknowledge:
      return "acknowledge";
    case OperationKind::kAtomicAcknowledge:
      return "atomic_acknowledge";
    case OperationKind::kCompareSwap:
      return "compare_swap";
    case OperationKind::kFetchAdd:
      return "fetch_add";
    case OperationKind::kFlush:
      return "flush";
    case OperationKind::kAtomicWrite:
      return "atomic_write";
    case OperationKind::kCongestion:
      return "congestion";
  }
  return "none";
}

}  // namespace verbena::transport
