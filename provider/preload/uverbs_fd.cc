// SPDX-License-Identifier: Apache-2.0
#include "provider/preload/uverbs_fd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace verbena::provider {
namespace {

// Layout of struct ib_uverbs_ioctl_hdr and ib_uverbs_attr.
struct IoctlHeader {
  uint16_t length;
  uint16_t object_id;
  uint16_t method_id;
  uint16_t num_attrs;
  uint64_t reserved1;
  uint32_t driver_id;
  uint32_t reserved2;
};
static_assert(sizeof(IoctlHeader) == 24);

struct IoctlAttr {
  uint16_t attr_id;
  uint16_t len;
  uint16_t flags;
  uint16_t attr_data;
  uint64_t data;
};
static_assert(sizeof(IoctlAttr) == 16);

constexpr uint16_t kObjectDevice = 0;
constexpr uint16_t kMethodInvokeWrite = 0;
constexpr uint16_t kAttrCoreOut = 1;
constexpr uint16_t kAttrWriteCommand = 2;
constexpr uint64_t kCommandCreateCompChannel = 17;
constexpr uint16_t kObjectAsyncEvent = 16;
constexpr uint16_t kMethodAlloc = 0;

// What PassAsyncFd left for the allocation that follows on the same descriptor:
// its number + 1 above the event descriptor's, 0 where free. As many imports at a
// time as there are places.
std::atomic<uint64_t> g_async_fds[16];

// The descriptor that was left for `fd`, or -1.
int TakeAsyncFd(int fd) {
  for (std::atomic<uint64_t>& place : g_async_fds) {
    uint64_t value = place.load(std::memory_order_acquire);
    if (value >> 32 == static_cast<uint64_t>(fd) + 1 && place.compare_exchange_strong(value, 0)) {
      return static_cast<int>(value & 0xffffffff);
    }
  }
  return -1;
}

// Reads without moving anybody's file position.
bool ReadContent(int fd, abi::CommandFdContent* content) {
  return syscall(SYS_pread64, fd, content, sizeof(*content), 0) == sizeof(*content) &&
         content->magic == abi::kCommandFdMagic && content->kind == 0;
}

int Fail(int error) {
  errno = error;
  return -1;
}

// A completion channel: a pipe of which one descriptor is both ends, so that a
// reader never sees its end and the provider can open writers from it.
int CreateCompChannel() {
  int ends[2];
  if (syscall(SYS_pipe2, ends, O_CLOEXEC) != 0) return -1;
  char path[32];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", ends[0]);
  const int both = static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC));
  const int error = errno;
  syscall(SYS_close, ends[0]);
  syscall(SYS_close, ends[1]);
  return both < 0 ? Fail(error) : both;
}

}  // namespace

int OpenUverbs(unsigned number, int flags) {
  char name[32];
  snprintf(name, sizeof(name), "verbena-uverbs%u", number);
  const unsigned cloexec = (flags & O_CLOEXEC) != 0 ? MFD_CLOEXEC : 0u;
  const int fd = static_cast<int>(syscall(SYS_memfd_create, name, MFD_ALLOW_SEALING | cloexec));
  if (fd < 0) return -1;
  abi::CommandFdContent content = {};
  content.magic = abi::kCommandFdMagic;
  content.device_index = number;
  if (syscall(SYS_pwrite64, fd, &content, sizeof(content), 0) != sizeof(content)) {
    syscall(SYS_close, fd);
    return Fail(EIO);
  }
  return fd;
}

bool IsUverbs(int fd, const struct stat& status, unsigned* number) {
  // Spares nearly every other file the read.
  if (!S_ISREG(status.st_mode) || status.st_nlink != 0 ||
      status.st_size != sizeof(abi::CommandFdContent)) {
    return false;
  }
  const int before = errno;
  abi::CommandFdContent content;
  const bool ours = ReadContent(fd, &content);
  if (ours) *number = content.device_index;
  errno = before;
  return ours;
}

bool IsUverbs(int fd) {
  const int before = errno;
  struct stat status;
  unsigned number;
  const bool ours = syscall(SYS_fstat, fd, &status) == 0 && IsUverbs(fd, status, &number);
  errno = before;
  return ours;
}

int PassAsyncFd(int fd, int async_fd) {
  const uint64_t value = (static_cast<uint64_t>(fd) + 1) << 32 | static_cast<uint32_t>(async_fd);
  for (std::atomic<uint64_t>& place : g_async_fds) {
    uint64_t free_place = 0;
    if (place.compare_exchange_strong(free_place, value)) return 0;
  }
  return Fail(EBUSY);
}

int VerbsIoctl(int fd, void* argument) {
  if (argument == nullptr) return Fail(EFAULT);
  const IoctlHeader* header = static_cast<const IoctlHeader*>(argument);
  IoctlAttr* attrs = reinterpret_cast<IoctlAttr*>(static_cast<char*>(argument) + sizeof(*header));
  if (header->length != sizeof(*header) + header->num_attrs * sizeof(IoctlAttr)) {
    return Fail(EINVAL);
  }
  if (header->object_id == kObjectAsyncEvent && header->method_id == kMethodAlloc &&
      header->num_attrs >= 1) {
    const int async_fd = TakeAsyncFd(fd);
    if (async_fd < 0) return Fail(EPROTONOSUPPORT);
    attrs[0].data = static_cast<uint64_t>(async_fd);
    attrs[0].flags |= 2;
    return 0;
  }
  if (header->object_id != kObjectDevice || header->method_id != kMethodInvokeWrite) {
    return Fail(EPROTONOSUPPORT);
  }
  uint64_t command = 0;
  IoctlAttr* out = nullptr;
  for (uint16_t i = 0; i < header->num_attrs; ++i) {
    if (attrs[i].attr_id == kAttrWriteCommand) command = attrs[i].data;
    if (attrs[i].attr_id == kAttrCoreOut) out = &attrs[i];
  }
  if (command != kCommandCreateCompChannel) {
    // libibverbs' probe sends a command without room for an answer and takes
    // ENOSPC, which the kernel gives too, for "such ioctls exist".
    return Fail(out == nullptr ? ENOSPC : EPROTONOSUPPORT);
  }
  if (out == nullptr || out->len < sizeof(uint32_t) || out->data == 0) return Fail(ENOSPC);
  const int channel = CreateCompChannel();
  if (channel < 0) return -1;
  const uint32_t answer = static_cast<uint32_t>(channel);
  memcpy(reinterpret_cast<void*>(out->data), &answer, sizeof(answer));
  out->flags |= 2;  // "output is valid", as the kernel marks it
  return 0;
}

}  // namespace verbena::provider
