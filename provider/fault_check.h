// SPDX-License-Identifier: Apache-2.0
//
// Verbs that go past the device, made to fail by a fault rule of it: as long as there is
// such a rule, the device is asked before each call.
#pragma once

#include "provider/provider.h"

namespace verbena::provider {

// fault_check.cc
int AskForFault(Context* context, abi::FaultCheckVerb verb, uint32_t handle);

// The errno with which this call is to fail; 0: it goes on. No lock is held.
inline int InjectedError(Context* context, abi::FaultCheckVerb verb, uint32_t handle) {
  const uint32_t checked = context->page->checked_verbs.load(std::memory_order_relaxed);
  if (checked == 0) [[likely]]
    return 0;
  if ((checked >> verb & 1) == 0) return 0;
  return AskForFault(context, verb, handle);
}

}  // namespace verbena::provider
