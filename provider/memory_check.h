// SPDX-License-Identifier: Apache-2.0
//
// What pinning pages does on real hardware: finds out at registration whether a
// range can be used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace verbena::provider {

// 0 if every page of [address, address + length) is mapped and readable and,
// with `write`, writable; else EFAULT. length >= 1 and the range does not wrap.
// `ask_kernel` allows PROCMAP_QUERY; without it, or on kernels before 6.11,
// /proc/self/maps is read. Without /proc every range passes: the device then
// reports bad pages when it touches them.
int CheckRange(uint64_t address, uint64_t length, bool write, bool ask_kernel);

}  // namespace verbena::provider
