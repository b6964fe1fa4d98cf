// SPDX-License-Identifier: Apache-2.0
#include "transport/cm/messages.h"

#include <algorithm>
#include <cstring>

#include "transport/base/byteorder.h"

namespace verbena::transport {
namespace {

// Fields are at most 64 bits and, if not whole bytes, within eight bytes.
uint64_t LoadBits(const std::byte* p, size_t bit, size_t bits) {
  uint64_t value = 0;
  size_t done = 0;
  while (done < bits) {
    const size_t at = bit + done;
    const size_t in_byte = std::min(8 - at % 8, bits - done);
    const unsigned byte = std::to_integer<unsigned>(p[at / 8]) >> (8 - at % 8 - in_byte);
    value = (value << in_byte) | (byte & ((1u << in_byte) - 1));
    done += in_byte;
  }
  return value;
}

void StoreBits(std::byte* p, size_t bit, size_t bits, uint64_t value) {
  size_t done = 0;
  while (done < bits) {
    const size_t at = bit + done;
    const size_t in_byte = std::min(8 - at % 8, bits - done);
    const size_t shift = 8 - at % 8 - in_byte;
    const unsigned mask = ((1u << in_byte) - 1) << shift;
    const unsigned part = static_cast<unsigned>(value >> (bits - done - in_byte)) << shift;
    p[at / 8] = (p[at / 8] & ~std::byte(mask)) | std::byte(part & mask);
    done += in_byte;
  }
}

}  // namespace

std::string_view CmAttributeName(CmAttribute attribute) {
  switch (attribute) {
#define X(name, id)          \
  case CmAttribute::k##name: \
    return #name;
    VERBENA_CM_ATTRIBUTES(X)
#undef X
  }
  return "?";
}

MadHeader MadHeader::Load(const std::byte* p) {
  MadHeader header;
  header.base_version = LoadBe8(p);
  header.management_class = LoadBe8(p + 1);
  header.class_version = LoadBe8(p + 2);
  header.method = LoadBe8(p + 3);
  header.status = LoadBe16(p + 4);
  header.class_specific = LoadBe16(p + 6);
  header.tid = LoadBe64(p + 8);
  header.attribute = CmAttribute{LoadBe16(p + 16)};
  header.reserved = LoadBe16(p + 18);
  header.modifier = LoadBe32(p + 20);
  return header;
}

void MadHeader::Store(std::byte* p) const {
  StoreBe8(p, base_version);
  StoreBe8(p + 1, management_class);
  StoreBe8(p + 2, class_version);
  StoreBe8(p + 3, method);
  StoreBe16(p + 4, status);
  StoreBe16(p + 6, class_specific);
  StoreBe64(p + 8, tid);
  StoreBe16(p + 16, static_cast<uint16_t>(attribute));
  StoreBe16(p + 18, reserved);
  StoreBe32(p + 20, modifier);
}

std::string_view CmParseErrorName(CmParseError error) {
  switch (error) {
    case CmParseError::kTruncated:
      return "truncated";
    case CmParseError::kVersion:
      return "version";
    case CmParseError::kClass:
      return "class";
    case CmParseError::kMethod:
      return "method";
    case CmParseError::kAttribute:
      return "attribute";
  }
  return "?";
}

std::optional<MadHeader> ParseCmHeader(std::span<const std::byte> mad, CmParseError* error) {
  const auto fail = [error](CmParseError why) {
    *error = why;
    return std::nullopt;
  };
  if (mad.size() < kMadBytes) return fail(CmParseError::kTruncated);
  const MadHeader header = MadHeader::Load(mad.data());
  if (header.base_version != 1) return fail(CmParseError::kVersion);
  if (header.management_class != kCmManagementClass) return fail(CmParseError::kClass);
  if (header.class_version != kCmClassVersion) return fail(CmParseError::kVersion);
  if (header.method != kMadMethodSend) return fail(CmParseError::kMethod);
  if (CmAttributeName(header.attribute) == "?") return fail(CmParseError::kAttribute);
  return header;
}

#define VERBENA_CM_LOAD_FIELD(name, type, bit, bits) \
  message.name = static_cast<type>(LoadBits(p, bit, bits));
#define VERBENA_CM_LOAD_BYTES(name, at, size) std::memcpy(message.name.data(), p + (at), size);
#define VERBENA_CM_STORE_FIELD(name, type, bit, bits) StoreBits(p, bit, bits, name);
#define VERBENA_CM_STORE_BYTES(name, at, size) std::memcpy(p + (at), name.data(), size);
#define VERBENA_CM_DEFINE(Name, FIELDS)                    \
  Name Name::Load(const std::byte* p) {                    \
    Name message;                                          \
    FIELDS(VERBENA_CM_LOAD_FIELD, VERBENA_CM_LOAD_BYTES)   \
    return message;                                        \
  }                                                        \
  void Name::Store(std::byte* p) const {                   \
    std::memset(p, 0, kCmDataBytes);                       \
    FIELDS(VERBENA_CM_STORE_FIELD, VERBENA_CM_STORE_BYTES) \
  }

VERBENA_CM_DEFINE(CmReq, VERBENA_CM_REQ_FIELDS)
VERBENA_CM_DEFINE(CmRep, VERBENA_CM_REP_FIELDS)
VERBENA_CM_DEFINE(CmMra, VERBENA_CM_MRA_FIELDS)
VERBENA_CM_DEFINE(CmRej, VERBENA_CM_REJ_FIELDS)
VERBENA_CM_DEFINE(CmRtu, VERBENA_CM_RTU_FIELDS)
VERBENA_CM_DEFINE(CmDreq, VERBENA_CM_DREQ_FIELDS)
VERBENA_CM_DEFINE(CmDrep, VERBENA_CM_DREP_FIELDS)
VERBENA_CM_DEFINE(CmSidrReq, VERBENA_CM_SIDR_REQ_FIELDS)
VERBENA_CM_DEFINE(CmSidrRep, VERBENA_CM_SIDR_REP_FIELDS)

std::optional<RdmaIpHeader> RdmaIpHeader::Load(const std::byte* p) {
  RdmaIpHeader header;
  header.version = LoadBe8(p);
  header.ip_version = LoadBe8(p + 1) >> 4;
  header.source_port = LoadBe16(p + 2);
  if (header.version != 0) return std::nullopt;
  if (header.ip_version == 4) {
    header.source = Gid::FromIpv4(LoadBe32(p + 16));
    header.destination = Gid::FromIpv4(LoadBe32(p + 32));
  } else if (header.ip_version == 6) {
    header.source = Gid::Load(p + 4);
    header.destination = Gid::Load(p + 20);
  } else {
    return std::nullopt;
  }
  return header;
}

void RdmaIpHeader::Store(std::byte* p) const {
  std::memset(p, 0, kBytes);
  StoreBe8(p, version);
  StoreBe8(p + 1, static_cast<uint8_t>(ip_version << 4));
  StoreBe16(p + 2, source_port);
  if (ip_version == 4) {
    StoreBe32(p + 16, source.Ipv4());
    StoreBe32(p + 32, destination.Ipv4());
  } else {
    source.Store(p + 4);
    destination.Store(p + 20);
  }
}

}  // namespace verbena::transport
