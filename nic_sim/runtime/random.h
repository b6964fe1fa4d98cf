// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace verbena::nic {

// 64 bits that nobody outside can guess. Any thread.
uint64_t RandomNumber();

}  // namespace verbena::nic
