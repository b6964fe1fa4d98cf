// SPDX-License-Identifier: Apache-2.0
//
// Every maximum of the device in one table, and the attributes that verbs
// report for them. What is not built yet reports 0.
#pragma once

#include <cstdint>

#include "nic_sim/abi/commands.h"

namespace verbena::nic {

inline constexpr uint32_t kMaxContexts = 1024;  // of one daemon
inline constexpr uint32_t kMaxNics = 64;
inline constexpr uint32_t kMaxQp = 16384;
inline constexpr uint32_t kMaxCq = 16384;
inline constexpr uint32_t kMaxMr = 131072;
inline constexpr uint32_t kMaxMw = 131072;
inline constexpr uint32_t kMaxPd = 16384;
inline constexpr uint32_t kMaxAh = 131072;
inline constexpr uint32_t kMaxSrq = 16384;
inline constexpr uint32_t kMaxSrqWr = 16384;
// Multicast: groups of a NIC, its QPs in one group, in all groups.
inline constexpr uint32_t kMaxMcastGroups = 8192;
inline constexpr uint32_t kMaxMcastQpAttach = 256;
inline constexpr uint32_t kMaxTotalMcastQpAttach = kMaxMcastGroups * kMaxMcastQpAttach;
inline constexpr uint32_t kMaxQpWr = 16384;
inline constexpr uint32_t kMaxCqe = 1u << 20;
inline constexpr uint32_t kMaxCqModeration = 0xffff;  // CQEs, microseconds
inline constexpr uint64_t kMaxDmBytes = uint64_t{16} << 20;
inline constexpr uint32_t kMaxDm = 4096;
inline constexpr uint32_t kMaxSge = 32;
inline constexpr uint32_t kMaxInline = 512;
inline constexpr uint32_t kMaxRdAtomic = 16;
inline constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 31;
inline constexpr uint16_t kGidTableLen = 16;
inline constexpr uint16_t kPkeyTableLen = 1;
inline constexpr uint8_t kPortCount = 1;

// What the contexts of one user may have together, of each NIC where nothing
// else is said. Beyond it: ENOMEM to that user.
struct UserLimits {
  uint32_t contexts;  // of the daemon
  uint32_t pds;
  uint32_t qps;
  uint32_t cqs;
  uint32_t mrs;
  uint32_t mws;
  uint32_t dms;  // pieces of device memory, a descriptor each
  uint64_t dm_bytes;
  uint32_t ahs;
  uint32_t srqs;
  uint32_t mcast_attachments;
  uint32_t channels;    // completion channels, a descriptor or two each; of the daemon
  uint64_t ring_bytes;  // shared memory for queues; of the daemon
};
// The daemon's own user and root may have all that there is.
inline constexpr UserLimits kOwnerLimits = {
    .contexts = kMaxContexts,
    .pds = kMaxPd,
    .qps = kMaxQp,
    .cqs = kMaxCq,
    .mrs = kMaxMr,
    .mws = kMaxMw,
    .dms = kMaxDm,
    .dm_bytes = kMaxDmBytes,
    .ahs = kMaxAh,
    .srqs = kMaxSrq,
    .mcast_attachments = kMaxTotalMcastQpAttach,
    .channels = 1u << 20,
    .ring_bytes = uint64_t{1} << 40,
};
// Others of a system-wide daemon: no one can take the most part of anything.
inline constexpr UserLimits kOtherUserLimits = {
    .contexts = kMaxContexts / 4,
    .pds = kMaxPd / 4,
    .qps = kMaxQp / 4,
    .cqs = kMaxCq / 4,
    .mrs = kMaxMr / 4,
    .mws = kMaxMw / 4,
    .dms = kMaxDm / 16,
    .dm_bytes = kMaxDmBytes / 4,
    .ahs = kMaxAh / 4,
    .srqs = kMaxSrq / 4,
    .mcast_attachments = kMaxMcastGroups / 4,
    .channels = 1024,
    .ring_bytes = uint64_t{1} << 30,
};

// `node_guid` as in memory, network byte order.
abi::DeviceAttributes MakeDeviceAttributes(uint64_t node_guid);

// Port attributes; header and state are the caller's.
abi::QueryPortReply MakePortAttributes();

}  // namespace verbena::nic
