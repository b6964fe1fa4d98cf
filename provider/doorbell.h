// SPDX-License-Identifier: Apache-2.0
//
// The application side of doorbells: tells the device which QP has news, and
// wakes an engine thread if all of them sleep (nic_sim/abi/shared_memory.h).
#pragma once

#include "provider/provider.h"

namespace verbena::provider {

// Sets the QP's doorbell bit and, if it was clear, the summary bit. Between
// the caller's store of a producer index (release) and the look at the bit
// there is a full fence; its partner is the device's fence between clearing
// the bits and reading the producers.
inline void SetDoorbellBit(abi::ContextPage* page, uint32_t slot) {
  abi::FullFence();
  const uint32_t word = slot / 64;
  const uint64_t bit = 1ull << (slot % 64);
  if ((page->doorbell_bits[word].load(std::memory_order_relaxed) & bit) != 0) return;
  page->doorbell_bits[word].fetch_or(bit, std::memory_order_seq_cst);
  page->doorbell_summary[word / 64].fetch_or(1ull << (word % 64), std::memory_order_seq_cst);
}

// After SetDoorbellBit for WQE number `producer` - 1 of the SQ. `outstanding`
// counts the WQEs that were posted and whose completion was not polled yet.
void WakeForSend(const Context* context, const Qp* qp, uint32_t producer, uint32_t outstanding);

// Wakes any one engine thread unless one is awake.
void WakeAnyEngine(const Context* context);

}  // namespace verbena::provider
