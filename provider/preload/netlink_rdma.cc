// SPDX-License-Identifier: Apache-2.0
#include "provider/preload/netlink_rdma.h"

#include <fcntl.h>
#include <linux/netlink.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "nic_sim/abi/commands.h"
#include "provider/preload/daemon_connection.h"
#include "provider/preload/interpose.h"

namespace verbena::provider {
namespace {

constexpr char kPrefix[] = "verbena-netlink-";

// Descriptors that may be ours, one bit each. Programs hold few; one beyond the
// table is not recognised.
constexpr int kTableFds = 1024;
std::atomic<uint64_t> g_table[kTableFds / 64];

int Fail(int error) {
  errno = error;
  return -1;
}

uint64_t BitOf(int fd) { return uint64_t{1} << (fd % 64); }

// 0 or errno.
int Connect(int fd) {
  if (const int error = BindName(fd, kPrefix); error != 0) return error;
  if (const int error = ConnectToDaemon(fd); error != 0) return error;
  const uint32_t hello[2] = {abi::kMagic, abi::kClientNetlink};
  const ssize_t sent = syscall(SYS_sendto, fd, hello, sizeof(hello), MSG_NOSIGNAL, nullptr, 0);
  return sent == sizeof(hello) ? 0 : ENODEV;
}

}  // namespace

int OpenNetlinkRdma(int type) {
  const int flags = type & (SOCK_CLOEXEC | SOCK_NONBLOCK);
  const int fd =
      static_cast<int>(syscall(SYS_socket, AF_UNIX, SOCK_SEQPACKET | (flags & SOCK_CLOEXEC), 0));
  if (fd < 0) return -1;
  // As a kernel without RDMA would say.
  if (Connect(fd) != 0 || fd >= kTableFds) {
    syscall(SYS_close, fd);
    return Fail(EPROTONOSUPPORT);
  }
  if ((flags & SOCK_NONBLOCK) != 0) syscall(SYS_fcntl, fd, F_SETFL, O_RDWR | O_NONBLOCK);
  g_table[fd / 64].fetch_or(BitOf(fd), std::memory_order_relaxed);
  return fd;
}

bool IsNetlinkRdma(int fd) {
  if (fd < 0 || fd >= kTableFds) return false;
  if ((g_table[fd / 64].load(std::memory_order_relaxed) & BitOf(fd)) == 0) return false;
  if (HasName(fd, kPrefix)) return true;
  // Closed, and something else has the number.
  g_table[fd / 64].fetch_and(~BitOf(fd), std::memory_order_relaxed);
  return false;
}

int BindNetlinkRdma(const sockaddr* address, socklen_t size) {
  if (address == nullptr) return Fail(EFAULT);
  if (size < sizeof(sockaddr_nl) || address->sa_family != AF_NETLINK) return Fail(EINVAL);
  return 0;
}

int NameOfNetlinkRdma(sockaddr* address, socklen_t* size) {
  if (address == nullptr || size == nullptr) return Fail(EFAULT);
  sockaddr_nl name = {};
  name.nl_family = AF_NETLINK;
  name.nl_pid = static_cast<uint32_t>(getpid());
  memcpy(address, &name, *size < sizeof(name) ? *size : sizeof(name));
  *size = sizeof(name);
  return 0;
}

int SetNetlinkRdmaOption(int fd, int level, int option, const void* value, socklen_t size) {
  if (level == SOL_NETLINK) return 0;  // more or less detail in errors
  return static_cast<int>(syscall(SYS_setsockopt, fd, level, option, value, size));
}

ssize_t SendNetlinkRdma(int fd, const msghdr* message, int flags) {
  msghdr plain = *message;
  plain.msg_name = nullptr;
  plain.msg_namelen = 0;
  plain.msg_control = nullptr;
  plain.msg_controllen = 0;
  return VERBENA_NEXT(sendmsg)(fd, &plain, flags | MSG_NOSIGNAL);
}

ssize_t ReceiveNetlinkRdma(int fd, msghdr* message, int flags) {
  void* const name = message->msg_name;
  const socklen_t room = message->msg_namelen;
  message->msg_name = nullptr;
  message->msg_namelen = 0;
  const ssize_t got = VERBENA_NEXT(recvmsg)(fd, message, flags);
  message->msg_name = name;
  message->msg_namelen = room;
  if (got >= 0 && name != nullptr) {
    sockaddr_nl kernel = {};
    kernel.nl_family = AF_NETLINK;
    memcpy(name, &kernel, room < sizeof(kernel) ? room : sizeof(kernel));
    message->msg_namelen = sizeof(kernel);
  }
  return got;
}

}  // namespace verbena::provider
