// SPDX-License-Identifier: Apache-2.0
//
// Interposed functions that take or make descriptors.
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>

#include "provider/preload/interpose.h"
#include "provider/preload/netdev_ioctl.h"
#include "provider/preload/rdma_cm_fd.h"
#include "provider/preload/uverbs_fd.h"

namespace {

using verbena::provider::AppendNetdevs;
using verbena::provider::HasRdmaCm;
using verbena::provider::IsNetdevIoctl;
using verbena::provider::IsRdmaCm;
using verbena::provider::IsUverbs;
using verbena::provider::NetdevIoctl;
using verbena::provider::VerbsIoctl;
using verbena::provider::WriteRdmaCm;

constexpr unsigned long kRdmaVerbsIoctl = 0xc0181b01;

// Signal handlers may call these, and dlsym() is not for signal handlers.
template <verbena::provider::FunctionName... kNames>
void FindAll() {
  (static_cast<void>(verbena::provider::NextFunction<kNames>::Find()), ...);
}

__attribute__((constructor)) void FindSignalSafeFunctions() {
  FindAll<"chdir", "open", "open64", "openat", "openat64", "creat", "creat64", "stat", "stat64",
          "lstat", "lstat64", "fstat", "fstat64", "fstatat", "fstatat64", "access", "faccessat",
          "readlink", "readlinkat", "ioctl", "socket", "write", "bind", "getsockname", "setsockopt",
          "sendmsg", "sendto", "recvmsg", "recvfrom", "send", "recv", "readdir", "readdir64",
          "closedir", "rewinddir">();
}

}  // namespace

VERBENA_INTERPOSE int ioctl(int fd, unsigned long request, ...) noexcept {
  va_list arguments;
  va_start(arguments, request);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  if (request == kRdmaVerbsIoctl && IsUverbs(fd)) return VerbsIoctl(fd, argument);
  if (request == verbena::abi::kIoctlPassAsyncFd && IsUverbs(fd)) {
    return verbena::provider::PassAsyncFd(fd,
                                          static_cast<int>(reinterpret_cast<intptr_t>(argument)));
  }
  if (request == SIOCGIFCONF && argument != nullptr) {
    auto* const list = static_cast<ifconf*>(argument);
    const int room = list->ifc_len;
    const int result = VERBENA_NEXT(ioctl)(fd, request, argument);
    if (result == 0) AppendNetdevs(list, room);
    return result;
  }
  if (int error; IsNetdevIoctl(request) && NetdevIoctl(request, argument, &error)) {
    if (error == 0) return 0;
    errno = error;
    return -1;
  }
  return VERBENA_NEXT(ioctl)(fd, request, argument);
}

// Commands of rdma_cm.
VERBENA_INTERPOSE ssize_t write(int fd, const void* buffer, size_t bytes) {
  if (HasRdmaCm() && IsRdmaCm(fd)) return WriteRdmaCm(fd, buffer, bytes);
  return VERBENA_NEXT(write)(fd, buffer, bytes);
}
