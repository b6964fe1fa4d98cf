// SPDX-License-Identifier: Apache-2.0
//
// Interposed functions that tell what a file is. On x86-64 stat and stat64 are
// the same structure, which the one helper per kind relies on.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "provider/preload/daemon_tree.h"
#include "provider/preload/device_node.h"
#include "provider/preload/interpose.h"

namespace {

using verbena::provider::FixFdStatus;
using verbena::provider::MakeCharDevice;
using verbena::provider::RewrittenPath;

static_assert(sizeof(struct stat) == sizeof(struct stat64));
static_assert(offsetof(struct stat, st_rdev) == offsetof(struct stat64, st_rdev));
static_assert(offsetof(struct stat, st_size) == offsetof(struct stat64, st_size));

template <typename Stat>
int FixPath(const RewrittenPath& path, Stat* status, int result) {
  if (result == 0 && path.is_node()) {
    MakeCharDevice(reinterpret_cast<struct stat*>(status), path.node());
  }
  return result;
}

template <typename Stat>
int FixFd(int fd, Stat* status, int result) {
  if (result == 0) FixFdStatus(fd, reinterpret_cast<struct stat*>(status));
  return result;
}

// fstatat and statx on the descriptor itself.
bool MeansFd(const char* path, int flags) {
  return (flags & AT_EMPTY_PATH) != 0 && (path == nullptr || *path == '\0');
}

}  // namespace

#define VERBENA_STAT(name, type)                                               \
  VERBENA_INTERPOSE int name(const char* path, struct type* status) noexcept { \
    const RewrittenPath use(path);                                             \
    return FixPath(use, status, VERBENA_NEXT(name)(use.path(), status));       \
  }
VERBENA_STAT(stat, stat)
VERBENA_STAT(stat64, stat64)
VERBENA_STAT(lstat, stat)
VERBENA_STAT(lstat64, stat64)

#define VERBENA_FSTAT(name, type)                                    \
  VERBENA_INTERPOSE int name(int fd, struct type* status) noexcept { \
    return FixFd(fd, status, VERBENA_NEXT(name)(fd, status));        \
  }
VERBENA_FSTAT(fstat, stat)
VERBENA_FSTAT(fstat64, stat64)

#define VERBENA_FSTATAT(name, type)                                                             \
  VERBENA_INTERPOSE int name(int folder, const char* path, struct type* status,                 \
                             int flags) noexcept {                                              \
    const RewrittenPath use(path);                                                              \
    const int result = VERBENA_NEXT(name)(folder, use.path(), status, flags);                   \
    return MeansFd(path, flags) ? FixFd(folder, status, result) : FixPath(use, status, result); \
  }
VERBENA_FSTATAT(fstatat, stat)
VERBENA_FSTATAT(fstatat64, stat64)

VERBENA_INTERPOSE int statx(int folder, const char* path, int flags, unsigned mask,
                            struct statx* status) noexcept {
  const RewrittenPath use(path);
  const int result = VERBENA_NEXT(statx)(folder, use.path(), flags, mask, status);
  if (result != 0) return result;
  struct stat device = {};
  if (MeansFd(path, flags)) {
    device.st_mode = status->stx_mode;
    device.st_nlink = status->stx_nlink;
    device.st_size = static_cast<off_t>(status->stx_size);
    FixFdStatus(folder, &device);
  } else if (use.is_node()) {
    MakeCharDevice(&device, use.node());
  }
  if (S_ISCHR(device.st_mode) && device.st_rdev != 0) {
    status->stx_mode = static_cast<uint16_t>(device.st_mode);
    status->stx_rdev_major = major(device.st_rdev);
    status->stx_rdev_minor = minor(device.st_rdev);
    status->stx_nlink = static_cast<uint32_t>(device.st_nlink);
    status->stx_size = 0;
    status->stx_blocks = 0;
  }
  return 0;
}

#define VERBENA_STATFS(name, type)                                             \
  VERBENA_INTERPOSE int name(const char* path, struct type* status) noexcept { \
    const RewrittenPath use(path);                                             \
    return VERBENA_NEXT(name)(use.path(), status);                             \
  }
VERBENA_STATFS(statfs, statfs)
VERBENA_STATFS(statfs64, statfs64)
VERBENA_STATFS(statvfs, statvfs)
VERBENA_STATFS(statvfs64, statvfs64)

// `ls -l` asks for ACL and security label of each name that it prints.
#define VERBENA_GETXATTR(name)                                                         \
  VERBENA_INTERPOSE ssize_t name(const char* path, const char* attribute, void* value, \
                                 size_t size) noexcept {                               \
    const RewrittenPath use(path);                                                     \
    return VERBENA_NEXT(name)(use.path(), attribute, value, size);                     \
  }
VERBENA_GETXATTR(getxattr)
VERBENA_GETXATTR(lgetxattr)

#define VERBENA_LISTXATTR(name)                                                         \
  VERBENA_INTERPOSE ssize_t name(const char* path, char* names, size_t size) noexcept { \
    const RewrittenPath use(path);                                                      \
    return VERBENA_NEXT(name)(use.path(), names, size);                                 \
  }
VERBENA_LISTXATTR(listxattr)
VERBENA_LISTXATTR(llistxattr)

// Names that programs from before glibc 2.33 use. On x86-64 there is one
// layout only, whatever `version` (0 or 1) says. They are hidden in libc now
// and cannot be looked up, hence the calls of the new ones.
extern "C" {
int __xstat(int version, const char* path, struct stat* status) noexcept;
int __xstat64(int version, const char* path, struct stat64* status) noexcept;
int __lxstat(int version, const char* path, struct stat* status) noexcept;
int __lxstat64(int version, const char* path, struct stat64* status) noexcept;
int __fxstat(int version, int fd, struct stat* status) noexcept;
int __fxstat64(int version, int fd, struct stat64* status) noexcept;
int __fxstatat(int version, int folder, const char* path, struct stat* status, int flags) noexcept;
int __fxstatat64(int version, int folder, const char* path, struct stat64* status,
                 int flags) noexcept;
}

VERBENA_INTERPOSE int __xstat(int, const char* path, struct stat* status) noexcept {
  return stat(path, status);
}
VERBENA_INTERPOSE int __xstat64(int, const char* path, struct stat64* status) noexcept {
  return stat64(path, status);
}
VERBENA_INTERPOSE int __lxstat(int, const char* path, struct stat* status) noexcept {
  return lstat(path, status);
}
VERBENA_INTERPOSE int __lxstat64(int, const char* path, struct stat64* status) noexcept {
  return lstat64(path, status);
}
VERBENA_INTERPOSE int __fxstat(int, int fd, struct stat* status) noexcept {
  return fstat(fd, status);
}
VERBENA_INTERPOSE int __fxstat64(int, int fd, struct stat64* status) noexcept {
  return fstat64(fd, status);
}
VERBENA_INTERPOSE int __fxstatat(int, int folder, const char* path, struct stat* status,
                                 int flags) noexcept {
  return fstatat(folder, path, status, flags);
}
VERBENA_INTERPOSE int __fxstatat64(int, int folder, const char* path, struct stat64* status,
                                   int flags) noexcept {
  return fstatat64(folder, path, status, flags);
}
