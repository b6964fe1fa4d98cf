// SPDX-License-Identifier: Apache-2.0
//
// The device's side of doorbells and of waking (nic_sim/abi/shared_memory.h has
// the protocol): which queues have news, and how an engine thread sleeps without
// missing any.
//
// Thread: TakeDoorbells under the lock of the QPs; the others any.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "nic_sim/abi/shared_memory.h"
#include "transport/base/time.h"

namespace verbena::nic {

// Clears the bits that are set and calls visit(slot) for each: any number below
// the next multiple of 64 behind `slots`, whatever the application rang. What is
// posted afterwards rings again, what was posted before is seen by who reads the
// producers now.
template <typename Visit>
void TakeDoorbells(abi::ContextPage& page, size_t slots, Visit visit) {
  // Bits without a QP cost no more than clearing the summary.
  const size_t used_words = (slots + 63) / 64;
  for (uint32_t s = 0; s < std::size(page.doorbell_summary); ++s) {
    if (page.doorbell_summary[s].load(std::memory_order_relaxed) == 0) continue;
    uint64_t words = page.doorbell_summary[s].exchange(0, std::memory_order_seq_cst);
    const size_t first = s * 64;
    const size_t usable = used_words > first ? used_words - first : 0;
    if (usable < 64) words &= (uint64_t{1} << usable) - 1;
    for (; words != 0; words &= words - 1) {
      const uint32_t word = s * 64 + static_cast<uint32_t>(std::countr_zero(words));
      uint64_t bits = page.doorbell_bits[word].exchange(0, std::memory_order_seq_cst);
      for (; bits != 0; bits &= bits - 1) {
        visit(word * 64 + static_cast<uint32_t>(std::countr_zero(bits)));
      }
    }
  }
}

// The last look before sleep; after Arm.
inline bool HasDoorbell(const abi::ContextPage& page) {
  for (const auto& word : page.doorbell_summary) {
    if (word.load(std::memory_order_acquire) != 0) return true;
  }
  return false;
}

// From here on who rings also wakes. Look for work once more before Wait.
inline void Arm(abi::WakeWord& word) {
  word.armed.store(1, std::memory_order_seq_cst);
  abi::FullFence();
}
inline void Disarm(abi::WakeWord& word) { word.armed.store(0, std::memory_order_seq_cst); }

// Sleeps until woken, but not if that has happened already. False: `limit` is
// over.
inline bool Wait(abi::WakeWord& word, transport::Duration limit) {
  const timespec ts{.tv_sec = limit.ns() / 1'000'000'000, .tv_nsec = limit.ns() % 1'000'000'000};
  // Shared, not private: applications wake it through their own mapping.
  const bool is_over =
      syscall(SYS_futex, &word.armed, FUTEX_WAIT, 1, &ts, nullptr, 0) != 0 && errno == ETIMEDOUT;
  Disarm(word);
  return !is_over;
}

// Wakes a thread that sleeps or is about to.
inline void Wake(abi::WakeWord& word) {
  if (word.armed.exchange(0, std::memory_order_seq_cst) != 1) return;
  syscall(SYS_futex, &word.armed, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace verbena::nic
