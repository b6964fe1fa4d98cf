// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/stats/counters.h"

namespace verbena::nic {

const char* DropReasonName(DropReason reason) {
  switch (reason) {
#define X(name, meaning) \
  case DropReason::name: \
    return #name;
    VERBENA_DROP_REASONS(X)
#undef X
    case DropReason::count:
      break;
  }
  return "unknown";
}

}  // namespace verbena::nic
