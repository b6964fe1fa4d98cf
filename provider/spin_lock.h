// SPDX-License-Identifier: Apache-2.0
//
// The lock around a queue. Held for some tens of nanoseconds; a waiter yields
// soon, because on few CPUs the holder may have been preempted.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace verbena::provider {

class SpinLock {
 public:
  void Lock() {
    if (word_.exchange(1, std::memory_order_acquire) == 0) return;
    uint32_t tries = 0;
    do {
      while (word_.load(std::memory_order_relaxed) != 0) {
        if (++tries % kSpins == 0) {
          sched_yield();
        } else {
          __builtin_ia32_pause();
        }
      }
    } while (word_.exchange(1, std::memory_order_acquire) != 0);
  }
  void Unlock() { word_.store(0, std::memory_order_release); }

 private:
  static constexpr uint32_t kSpins = 64;
  std::atomic<uint32_t> word_{0};
};

class SpinGuard {
 public:
  explicit SpinGuard(SpinLock& lock) : lock_(lock) { lock_.Lock(); }
  ~SpinGuard() { lock_.Unlock(); }
  SpinGuard(const SpinGuard&) = delete;
  SpinGuard& operator=(const SpinGuard&) = delete;

 private:
  SpinLock& lock_;
};

}  // namespace verbena::provider
