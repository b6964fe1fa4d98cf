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
inline constexpr uint32_t kMaxPd = 16384;
inline constexpr uint32_t kMaxAh = 131072;
inline constexpr uint32_t kMaxQpWr = 16384;
inline constexpr uint32_t kMaxCqe = 1u << 20;
inline constexpr uint32_t kMaxSge = 32;
inline constexpr uint32_t kMaxInline = 512;
inline constexpr uint32_t kMaxRdAtomic = 16;
inline constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 31;
inline constexpr uint16_t kGidTableLen = 16;
inline constexpr uint16_t kPkeyTableLen = 1;
inline constexpr uint8_t kPortCount = 1;

// `node_guid` as in memory, network byte order.
abi::DeviceAttributes MakeDeviceAttributes(uint64_t node_guid);

// Port attributes; header and state are the caller's.
abi::QueryPortReply MakePortAttributes();

}  // namespace verbena::nic
