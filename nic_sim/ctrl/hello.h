// SPDX-License-Identifier: Apache-2.0
//
// The first message of a connection.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "nic_sim/abi/commands.h"

namespace verbena::nic {

enum class HelloKind {
  kGarbage,       // close without a word
  kControl,       //
  kRdmaCm,        // of nic_sim/abi/rdma_cm.h, still to be looked at
  kNetlink,       //
  kRefresh,       // `device` is good
  kDevice,        // `hello` is good
  kIncompatible,  // answer EPROTO with our numbers, then close
};

struct CheckedHello {
  HelloKind kind = HelloKind::kGarbage;
  abi::Hello hello{};
  std::string device;
};

CheckedHello CheckHello(std::span<const std::byte> message, bool truncated);

// Our numbers and `error`.
abi::HelloReply MakeHelloReply(int error);

// The process name of a Hello: printable, whatever the client sent.
std::string CommOf(const abi::Hello& hello);

// Is `fd` a /proc/PID/mem, opened for reading and writing?
bool IsProcMem(int fd);

}  // namespace verbena::nic
