// SPDX-License-Identifier: Apache-2.0
//
// TargetProcess: a child that plays an application: it has private memory and a
// guard page, and does what it is told over a socket. Its memory is looked at
// only by itself, so that no test checks a remote copy with another one.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nic_sim/mem/address_space.h"

namespace verbena::nic::testing {

class TargetProcess {
 public:
  // `bytes` of zeroed memory, rounded up to pages.
  explicit TargetProcess(size_t bytes);
  ~TargetProcess();  // kills the child
  TargetProcess(const TargetProcess&) = delete;
  TargetProcess& operator=(const TargetProcess&) = delete;

  // Call first in main(): runs the command loop in a program that Exec started.
  static void MaybeServeAfterExec(int argc, char** argv);

  pid_t pid() const { return pid_; }
  uint64_t address() const { return address_; }
  size_t bytes() const { return bytes_; }
  // With a new duplicate of the child's /proc/self/mem.
  AddressSpace::Identity identity() const;
  std::unique_ptr<AddressSpace> Open(AddressSpace::Backend backend) const;

  std::vector<std::byte> Get(uint64_t address, size_t bytes);
  void Set(uint64_t address, std::span<const std::byte> bytes);
  void Unmap(uint64_t address, size_t bytes);
  // Replaces the program by this test's own, which maps the same memory (not the
  // guard) filled with `fill`.
  void Exec(uint8_t fill);
  void MakeNonDumpable();
  void Kill();
  // Runs `body` in the child (as it was when the child was forked: only what is
  // captured by value or shared) and returns when it is started.
  void Start(int body);
  // Waits until the body ends; its result.
  int64_t Join();

  // Bodies for Start, by number; set before the first TargetProcess.
  static std::vector<std::function<int64_t()>>& bodies();

 private:
  void Command(char what, uint64_t address, uint64_t bytes);

  size_t bytes_;
  uint64_t address_ = 0;
  uint64_t guard_address_ = 0;
  uint64_t guard_magic_ = 0;
  pid_t pid_ = -1;
  int socket_ = -1;
  int mem_fd_ = -1;
};

}  // namespace verbena::nic::testing
