// SPDX-License-Identifier: Apache-2.0
//
// Interposed functions that take or make descriptors.
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdarg>

#include "provider/preload/interpose.h"
#include "provider/preload/uverbs_fd.h"

namespace {

using verbena::provider::IsUverbs;
using verbena::provider::VerbsIoctl;

constexpr unsigned long kRdmaVerbsIoctl = 0xc0181b01;
constexpr int kNetlinkRdma = 20;

// Signal handlers may call these, and dlsym() is not for signal handlers.
template <verbena::provider::FunctionName... kNames>
void FindAll() {
  (static_cast<void>(verbena::provider::NextFunction<kNames>::Find()), ...);
}

__attribute__((constructor)) void FindSignalSafeFunctions() {
  FindAll<"open", "open64", "openat", "openat64", "creat", "creat64", "stat", "stat64", "lstat",
          "lstat64", "fstat", "fstat64", "fstatat", "fstatat64", "access", "faccessat", "readlink",
          "readlinkat", "ioctl", "socket">();
}

}  // namespace

VERBENA_INTERPOSE int ioctl(int fd, unsigned long request, ...) noexcept {
  va_list arguments;
  va_start(arguments, request);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  if (request == kRdmaVerbsIoctl && IsUverbs(fd)) return VerbsIoctl(argument);
  return VERBENA_NEXT(ioctl)(fd, request, argument);
}

// The kernel's own list of RDMA devices comes before sysfs: hidden, so that
// libibverbs looks where we answer.
VERBENA_INTERPOSE int socket(int domain, int type, int protocol) noexcept {
  if (domain == AF_NETLINK && protocol == kNetlinkRdma) {
    errno = EPROTONOSUPPORT;
    return -1;
  }
  return VERBENA_NEXT(socket)(domain, type, protocol);
}
