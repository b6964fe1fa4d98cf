// SPDX-License-Identifier: Apache-2.0
//
// Tells the failure log that a work request or QP has failed. Raised by engine
// threads, which must not wait: one write to an eventfd, and nothing while
// nobody listens. One for the process.
#pragma once

#include <sys/eventfd.h>

#include <atomic>

namespace verbena::nic {

class FailureSignal {
 public:
  static void Raise() {
    const int fd = fd_.load(std::memory_order_relaxed);
    // Nonblocking: a full counter is as good as one more.
    if (fd >= 0) (void)eventfd_write(fd, 1);
  }
  // -1: nobody listens any more. The descriptor stays the listener's.
  static void Listen(int fd) { fd_.store(fd, std::memory_order_relaxed); }

 private:
  static inline std::atomic<int> fd_{-1};
};

}  // namespace verbena::nic
