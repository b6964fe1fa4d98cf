// SPDX-License-Identifier: Apache-2.0
//
// AddressSpace: the memory of one application process, as far as the device can
// reach it (docs/ARCHITECTURE.md, "Memory"). Backends: process_vm_readv/writev,
// or /proc/PID/mem through a descriptor that the application passed. Both touch
// the application's guard page first, so that a reused pid or a process that
// has called exec gives an error and no byte.
//
// Owner: one Context. Thread: one at a time (the shard's lock).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace verbena::nic {

class AddressSpace {
 public:
  struct Identity {
    pid_t pid = 0;    // 0: not visible from here (other pid namespace)
    int mem_fd = -1;  // owned from now on; -1: not passed
    uint64_t guard_address = 0;
    uint64_t guard_magic = 0;
  };
  enum class Backend { kProcessVm, kProcMem };

  // Tries the backends on the guard page, in the order above or only `force`.
  // nullptr: none works; *why says so in a sentence.
  static std::unique_ptr<AddressSpace> Open(const Identity& identity, std::string* why,
                                            const Backend* force = nullptr);
  virtual ~AddressSpace() = default;

  // Copies between `local` and `remote` (addresses in the application), piece
  // by piece in order; both lists hold the same number of bytes. Returns the
  // number of *remote pieces* that were copied whole, from the front; fewer
  // than remote.size() means that the next one failed (EFAULT or process gone)
  // and may have been copied in part. Any list length.
  virtual size_t Read(std::span<const iovec> local, std::span<const iovec> remote) = 0;
  virtual size_t Write(std::span<const iovec> local, std::span<const iovec> remote) = 0;

  virtual Backend backend() const = 0;

  // True once the guard was not found: every later copy fails without a system
  // call, so that a process which gets the same pid later is never touched.
  bool gone() const { return gone_; }
  // Of Read and Write so far.
  uint64_t system_calls() const { return system_calls_; }

 protected:
  bool gone_ = false;
  uint64_t system_calls_ = 0;
};

}  // namespace verbena::nic
