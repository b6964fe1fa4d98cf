// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/hello.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cstring>

namespace verbena::nic {
namespace {

// Magic and kind: all that a control client sends, and what every version begins with.
constexpr size_t kHeadBytes = offsetof(abi::Hello, version_min);
static_assert(kHeadBytes == 8);

}  // namespace

CheckedHello CheckHello(std::span<const std::byte> message, bool truncated) {
  CheckedHello result;
  abi::Hello& hello = result.hello;
  std::memcpy(&hello, message.data(), std::min(message.size(), sizeof(hello)));
  if (message.size() < kHeadBytes || hello.magic != abi::kMagic) return result;
  if (hello.kind == abi::kClientControl) {
    result.kind = HelloKind::kControl;
    return result;
  }
  if (hello.kind == abi::kClientRdmaCm) {
    result.kind = HelloKind::kRdmaCm;
    return result;
  }
  if (hello.kind == abi::kClientNetlink) {
    result.kind = HelloKind::kNetlink;
    return result;
  }
  if (hello.kind == abi::kClientRefresh) {
    abi::RefreshHello refresh;
    if (message.size() != sizeof(refresh)) return result;
    std::memcpy(&refresh, message.data(), sizeof(refresh));
    result.device.assign(refresh.device, strnlen(refresh.device, sizeof(refresh.device)));
    result.kind = HelloKind::kRefresh;
    return result;
  }
  if (hello.kind != abi::kClientDevice) return result;
  const bool fits = message.size() == sizeof(hello) && !truncated &&
                    hello.version_min <= abi::kVersionMax &&
                    hello.version_max >= abi::kVersionMin && hello.sizes == abi::kAbiSizes;
  result.kind = fits ? HelloKind::kDevice : HelloKind::kIncompatible;
  return result;
}

abi::HelloReply MakeHelloReply(int error) {
  abi::HelloReply reply{};
  reply.magic = abi::kMagic;
  reply.error = error;
  reply.version_min = abi::kVersionMin;
  reply.version_max = abi::kVersionMax;
  reply.sizes = abi::kAbiSizes;
  return reply;
}

std::string CommOf(const abi::Hello& hello) {
  std::string comm(hello.comm, strnlen(hello.comm, sizeof(hello.comm)));
  for (char& c : comm) {
    if (c < ' ' || c > '~') c = '?';
  }
  return comm;
}

bool IsProcMem(int fd) {
  struct statfs filesystem = {};
  struct stat info = {};
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_ACCMODE) == O_RDWR && (flags & O_PATH) == 0 &&
         fstatfs(fd, &filesystem) == 0 && filesystem.f_type == PROC_SUPER_MAGIC &&
         fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

}  // namespace verbena::nic
