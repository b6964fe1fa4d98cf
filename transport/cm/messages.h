// SPDX-License-Identifier: Apache-2.0
//
// The messages of the communication manager (management class 7) as plain
// values, and the header that Linux' rdma_cm puts in front of private data.
// Offsets are those of the captures of Linux (tests/vectors, cm_*).
//
// Load reads, Store writes all kCmDataBytes bytes behind the MAD header; bits
// that no field names are zero. Values wider than their field are cut. GIDs and
// private data are the bytes of the wire, all numbers are in host order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "transport/cm/mad_packet.h"
#include "transport/types.h"

namespace verbena::transport {

inline constexpr size_t kMadHeaderBytes = 24;
inline constexpr size_t kCmDataBytes = kMadBytes - kMadHeaderBytes;
inline constexpr uint8_t kCmManagementClass = 0x07;
inline constexpr uint8_t kCmClassVersion = 2;
inline constexpr uint8_t kMadMethodSend = 0x03;

// X(name, attribute id)
#define VERBENA_CM_ATTRIBUTES(X) \
  X(Req, 0x10)                   \
  X(Mra, 0x11)                   \
  X(Rej, 0x12)                   \
  X(Rep, 0x13)                   \
  X(Rtu, 0x14)                   \
  X(Dreq, 0x15)                  \
  X(Drep, 0x16)                  \
  X(SidrReq, 0x17)               \
  X(SidrRep, 0x18)               \
  X(Lap, 0x19)                   \
  X(Apr, 0x1a)

enum class CmAttribute : uint16_t {
#define X(name, id) k##name = id,
  VERBENA_CM_ATTRIBUTES(X)
#undef X
};

// "Req", "SidrRep", ...; "?" for none of them.
std::string_view CmAttributeName(CmAttribute attribute);

struct MadHeader {
  uint8_t base_version = 1;
  uint8_t management_class = kCmManagementClass;
  uint8_t class_version = kCmClassVersion;
  uint8_t method = kMadMethodSend;
  uint16_t status = 0;
  uint16_t class_specific = 0;
  uint64_t tid = 0;
  CmAttribute attribute = CmAttribute::kReq;
  uint16_t reserved = 0;
  uint32_t modifier = 0;  // REQ: ECE options of the sender

  static MadHeader Load(const std::byte* p);
  void Store(std::byte* p) const;
  bool operator==(const MadHeader&) const = default;
};

// Why a UD packet at QP1 is no CM message.
enum class CmParseError { kTruncated, kVersion, kClass, kMethod, kAttribute };
std::string_view CmParseErrorName(CmParseError error);

// Checks the header of a received MAD; empty *error on success.
std::optional<MadHeader> ParseCmHeader(std::span<const std::byte> mad, CmParseError* error);

// Fields: X(name, type, first bit, bits). Bit 0 is the most significant bit of
// byte 0 behind the MAD header. B(name, first byte, bytes) are byte arrays.

#define VERBENA_CM_REQ_PATH_FIELDS(X, B, path, at)       \
  X(path##local_lid, uint16_t, (at)*8, 16)               \
  X(path##remote_lid, uint16_t, ((at) + 2) * 8, 16)      \
  B(path##local_gid, (at) + 4, 16)                       \
  B(path##remote_gid, (at) + 20, 16)                     \
  X(path##flow_label, uint32_t, ((at) + 36) * 8, 20)     \
  X(path##rate, uint8_t, ((at) + 39) * 8 + 2, 6)         \
  X(path##traffic_class, uint8_t, ((at) + 40) * 8, 8)    \
  X(path##hop_limit, uint8_t, ((at) + 41) * 8, 8)        \
  X(path##sl, uint8_t, ((at) + 42) * 8, 4)               \
  X(path##subnet_local, uint8_t, ((at) + 42) * 8 + 4, 1) \
  X(path##ack_timeout, uint8_t, ((at) + 43) * 8, 5)

#define VERBENA_CM_REQ_FIELDS(X, B)                \
  X(local_comm_id, uint32_t, 0, 32)                \
  X(vendor_id, uint32_t, 5 * 8, 24)                \
  X(service_id, uint64_t, 8 * 8, 64)               \
  X(local_ca_guid, uint64_t, 16 * 8, 64)           \
  X(local_qkey, uint32_t, 28 * 8, 32)              \
  X(local_qpn, uint32_t, 32 * 8, 24)               \
  X(responder_resources, uint8_t, 35 * 8, 8)       \
  X(local_eecn, uint32_t, 36 * 8, 24)              \
  X(initiator_depth, uint8_t, 39 * 8, 8)           \
  X(remote_eecn, uint32_t, 40 * 8, 24)             \
  X(remote_response_timeout, uint8_t, 43 * 8, 5)   \
  X(transport, uint8_t, 43 * 8 + 5, 2)             \
  X(flow_control, uint8_t, 43 * 8 + 7, 1)          \
  X(starting_psn, uint32_t, 44 * 8, 24)            \
  X(local_response_timeout, uint8_t, 47 * 8, 5)    \
  X(retry_count, uint8_t, 47 * 8 + 5, 3)           \
  X(pkey, uint16_t, 48 * 8, 16)                    \
  X(path_mtu, uint8_t, 50 * 8, 4)                  \
  X(rdc_exists, uint8_t, 50 * 8 + 4, 1)            \
  X(rnr_retry, uint8_t, 50 * 8 + 5, 3)             \
  X(max_cm_retries, uint8_t, 51 * 8, 4)            \
  X(srq, uint8_t, 51 * 8 + 4, 1)                   \
  X(extended_transport, uint8_t, 51 * 8 + 5, 3)    \
  VERBENA_CM_REQ_PATH_FIELDS(X, B, primary_, 52)   \
  VERBENA_CM_REQ_PATH_FIELDS(X, B, alternate_, 96) \
  B(private_data, 140, 92)

#define VERBENA_CM_REP_FIELDS(X, B)            \
  X(local_comm_id, uint32_t, 0, 32)            \
  X(remote_comm_id, uint32_t, 4 * 8, 32)       \
  X(local_qkey, uint32_t, 8 * 8, 32)           \
  X(local_qpn, uint32_t, 12 * 8, 24)           \
  X(vendor_id_high, uint8_t, 15 * 8, 8)        \
  X(local_eecn, uint32_t, 16 * 8, 24)          \
  X(vendor_id_middle, uint8_t, 19 * 8, 8)      \
  X(starting_psn, uint32_t, 20 * 8, 24)        \
  X(vendor_id_low, uint8_t, 23 * 8, 8)         \
  X(responder_resources, uint8_t, 24 * 8, 8)   \
  X(initiator_depth, uint8_t, 25 * 8, 8)       \
  X(target_ack_delay, uint8_t, 26 * 8, 5)      \
  X(failover_accepted, uint8_t, 26 * 8 + 5, 2) \
  X(flow_control, uint8_t, 26 * 8 + 7, 1)      \
  X(rnr_retry, uint8_t, 27 * 8, 3)             \
  X(srq, uint8_t, 27 * 8 + 3, 1)               \
  X(local_ca_guid, uint64_t, 28 * 8, 64)       \
  B(private_data, 36, 196)

#define VERBENA_CM_MRA_FIELDS(X, B)      \
  X(local_comm_id, uint32_t, 0, 32)      \
  X(remote_comm_id, uint32_t, 4 * 8, 32) \
  X(message, uint8_t, 8 * 8, 2)          \
  X(service_timeout, uint8_t, 9 * 8, 5)  \
  B(private_data, 10, 222)

#define VERBENA_CM_REJ_FIELDS(X, B)      \
  X(local_comm_id, uint32_t, 0, 32)      \
  X(remote_comm_id, uint32_t, 4 * 8, 32) \
  X(message, uint8_t, 8 * 8, 2)          \
  X(info_length, uint8_t, 9 * 8, 7)      \
  X(reason, uint16_t, 10 * 8, 16)        \
  B(info, 12, 72)                        \
  B(private_data, 84, 148)

#define VERBENA_CM_RTU_FIELDS(X, B)      \
  X(local_comm_id, uint32_t, 0, 32)      \
  X(remote_comm_id, uint32_t, 4 * 8, 32) \
  B(private_data, 8, 224)

#define VERBENA_CM_DREQ_FIELDS(X, B)     \
  X(local_comm_id, uint32_t, 0, 32)      \
  X(remote_comm_id, uint32_t, 4 * 8, 32) \
  X(remote_qpn, uint32_t, 8 * 8, 24)     \
  B(private_data, 12, 220)

#define VERBENA_CM_DREP_FIELDS(X, B) VERBENA_CM_RTU_FIELDS(X, B)

#define VERBENA_CM_SIDR_REQ_FIELDS(X, B) \
  X(request_id, uint32_t, 0, 32)         \
  X(pkey, uint16_t, 4 * 8, 16)           \
  X(service_id, uint64_t, 8 * 8, 64)     \
  B(private_data, 16, 216)

#define VERBENA_CM_SIDR_REP_FIELDS(X, B) \
  X(request_id, uint32_t, 0, 32)         \
  X(status, uint8_t, 4 * 8, 8)           \
  X(info_length, uint8_t, 5 * 8, 8)      \
  X(qpn, uint32_t, 8 * 8, 24)            \
  X(service_id, uint64_t, 12 * 8, 64)    \
  X(qkey, uint32_t, 20 * 8, 32)          \
  B(info, 24, 72)                        \
  B(private_data, 96, 136)

#define VERBENA_CM_FIELD(name, type, bit, bits) type name = 0;
#define VERBENA_CM_BYTES(name, at, size) std::array<std::byte, size> name{};
#define VERBENA_CM_MESSAGE(Name, attribute, FIELDS)                   \
  struct Name {                                                       \
    static constexpr CmAttribute kAttribute = CmAttribute::attribute; \
    FIELDS(VERBENA_CM_FIELD, VERBENA_CM_BYTES)                        \
    static Name Load(const std::byte* p);                             \
    void Store(std::byte* p) const;                                   \
    bool operator==(const Name&) const = default;                     \
  };

VERBENA_CM_MESSAGE(CmReq, kReq, VERBENA_CM_REQ_FIELDS)
VERBENA_CM_MESSAGE(CmRep, kRep, VERBENA_CM_REP_FIELDS)
VERBENA_CM_MESSAGE(CmMra, kMra, VERBENA_CM_MRA_FIELDS)
VERBENA_CM_MESSAGE(CmRej, kRej, VERBENA_CM_REJ_FIELDS)
VERBENA_CM_MESSAGE(CmRtu, kRtu, VERBENA_CM_RTU_FIELDS)
VERBENA_CM_MESSAGE(CmDreq, kDreq, VERBENA_CM_DREQ_FIELDS)
VERBENA_CM_MESSAGE(CmDrep, kDrep, VERBENA_CM_DREP_FIELDS)
VERBENA_CM_MESSAGE(CmSidrReq, kSidrReq, VERBENA_CM_SIDR_REQ_FIELDS)
VERBENA_CM_MESSAGE(CmSidrRep, kSidrRep, VERBENA_CM_SIDR_REP_FIELDS)

#undef VERBENA_CM_FIELD
#undef VERBENA_CM_BYTES
#undef VERBENA_CM_MESSAGE

// `message` of MRA and REJ: which one is meant.
enum class CmRejected : uint8_t { kReq = 0, kRep = 1, kOther = 2 };

// Reasons of REJ that this code sends or knows.
enum class CmRejectReason : uint16_t {
  kNoQp = 1,
  kNoResources = 3,
  kTimeout = 4,
  kUnsupportedRequest = 5,
  kInvalidCommId = 6,
  kInvalidServiceId = 8,
  kInvalidTransportType = 9,
  kStaleConnection = 10,
  kConsumerDefined = 28,
  kVendorOptionNotSupported = 35,
};

// `status` of SIDR_REP.
enum class CmSidrStatus : uint8_t {
  kSuccess = 0,
  kUnsupported = 1,  // nobody listens
  kReject = 2,
  kNoQp = 3,
  kRedirect = 4,
  kUnsupportedVersion = 5,
};

// `transport` of REQ; kExtended: `extended_transport` says which (1: XRC).
enum class CmTransport : uint8_t { kRc = 0, kUc = 1, kRd = 2, kExtended = 3 };
inline constexpr uint8_t kCmExtendedXrc = 1;

// The first bytes of the private data of REQ and SIDR_REQ of rdma_cm: who
// connects and to which address.
struct RdmaIpHeader {
  static constexpr size_t kBytes = 36;

  uint8_t version = 0;
  uint8_t ip_version = 4;  // 4 or 6; 4 bits
  uint16_t source_port = 0;
  Gid source;       // IPv4 addresses are v4-mapped here
  Gid destination;  // and the last 4 of 16 bytes on the wire

  // `p` has kBytes bytes. Empty: a version or family that nobody speaks.
  static std::optional<RdmaIpHeader> Load(const std::byte* p);
  void Store(std::byte* p) const;
  bool operator==(const RdmaIpHeader&) const = default;
};

// Service ids of the port spaces: 0x0000000001060000 | port and so on.
constexpr uint64_t CmServiceId(uint16_t port_space, uint16_t port) {
  return (uint64_t{port_space} << 16) | port;
}

}  // namespace verbena::transport
