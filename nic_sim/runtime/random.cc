// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/runtime/random.h"

#include <sys/random.h>

namespace verbena::nic {

uint64_t RandomNumber() {
  uint64_t value = 0;
  if (getrandom(&value, sizeof value, 0) != sizeof value) {
    value = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&value)) * 0x9e3779b97f4a7c15u;
  }
  return value;
}

}  // namespace verbena::nic
