// SPDX-License-Identifier: Apache-2.0
//
// Interposed functions of sockets, for NETLINK_RDMA and NETLINK_ROUTE only.
#include <dlfcn.h>
#include <linux/netlink.h>
#include <rdma/rdma_netlink.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "provider/preload/interpose.h"
#include "provider/preload/netlink_rdma.h"
#include "provider/preload/netlink_route.h"

namespace {

using verbena::provider::BindNetlinkRdma;
using verbena::provider::IsNetlinkRdma;
using verbena::provider::IsNetlinkRoute;
using verbena::provider::NameOfNetlinkRdma;
using verbena::provider::OpenNetlinkRdma;
using verbena::provider::ReceiveNetlinkRdma;
using verbena::provider::ReceiveNetlinkRoute;
using verbena::provider::SendNetlinkRdma;
using verbena::provider::SendNetlinkRoute;
using verbena::provider::SetNetlinkRdmaOption;

constexpr int kNetlinkRoute = 0;
constexpr int kNetlinkRdma = 20;

// libibverbs and librdmacm ask through libnl for devices and character devices, and
// prefer what they hear to /sys. They are to take /sys, where more of the devices is
// shown. What they may hear is that memory need not be kept from forked children.
bool IsLibnl(void* caller) {
  Dl_info info = {};
  return dladdr(caller, &info) != 0 && info.dli_fname != nullptr &&
         strstr(info.dli_fname, "libnl-3") != nullptr;
}
bool IsForLibnl(const msghdr& message) {
  nlmsghdr header;
  if (message.msg_iovlen != 1 || message.msg_iov[0].iov_len < sizeof(header)) return false;
  memcpy(&header, message.msg_iov[0].iov_base, sizeof(header));
  return header.nlmsg_type == RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_SYS_GET);
}

}  // namespace

VERBENA_INTERPOSE int socket(int domain, int type, int protocol) noexcept {
  if (domain != AF_NETLINK || protocol != kNetlinkRdma) {
    const int fd = VERBENA_NEXT(socket)(domain, type, protocol);
    if (domain == AF_NETLINK && protocol == kNetlinkRoute) verbena::provider::NoteNetlinkRoute(fd);
    return fd;
  }
  return OpenNetlinkRdma(type);
}

VERBENA_INTERPOSE int bind(int fd, const sockaddr* address, socklen_t size) noexcept {
  if (IsNetlinkRdma(fd)) return BindNetlinkRdma(address, size);
  return VERBENA_NEXT(bind)(fd, address, size);
}

VERBENA_INTERPOSE int getsockname(int fd, sockaddr* address, socklen_t* size) noexcept {
  if (IsNetlinkRdma(fd)) return NameOfNetlinkRdma(address, size);
  return VERBENA_NEXT(getsockname)(fd, address, size);
}

VERBENA_INTERPOSE int setsockopt(int fd, int level, int option, const void* value,
                                 socklen_t size) noexcept {
  if (IsNetlinkRdma(fd)) return SetNetlinkRdmaOption(fd, level, option, value, size);
  if (verbena::provider::HidesNetlinkRouteOption(level, option) && IsNetlinkRoute(fd)) return 0;
  return VERBENA_NEXT(setsockopt)(fd, level, option, value, size);
}

VERBENA_INTERPOSE ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  if (message != nullptr) {
    if (IsNetlinkRdma(fd)) {
      if (IsLibnl(__builtin_return_address(0)) && !IsForLibnl(*message)) {
        errno = EOPNOTSUPP;
        return -1;
      }
      return SendNetlinkRdma(fd, message, flags);
    }
    if (IsNetlinkRoute(fd)) return SendNetlinkRoute(fd, message, flags);
  }
  return VERBENA_NEXT(sendmsg)(fd, message, flags);
}

VERBENA_INTERPOSE ssize_t sendto(int fd, const void* data, size_t bytes, int flags,
                                 const sockaddr* address, socklen_t size) {
  const bool rdma = IsNetlinkRdma(fd);
  if (!rdma && !IsNetlinkRoute(fd)) {
    return VERBENA_NEXT(sendto)(fd, data, bytes, flags, address, size);
  }
  iovec part = {const_cast<void*>(data), bytes};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (rdma) return SendNetlinkRdma(fd, &message, flags);
  message.msg_name = const_cast<sockaddr*>(address);
  message.msg_namelen = size;
  return SendNetlinkRoute(fd, &message, flags);
}

VERBENA_INTERPOSE ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  if (IsNetlinkRdma(fd) || IsNetlinkRoute(fd)) return sendto(fd, data, bytes, flags, nullptr, 0);
  return VERBENA_NEXT(send)(fd, data, bytes, flags);
}

VERBENA_INTERPOSE ssize_t recvmsg(int fd, msghdr* message, int flags) {
  if (message != nullptr) {
    if (IsNetlinkRdma(fd)) return ReceiveNetlinkRdma(fd, message, flags);
    if (IsNetlinkRoute(fd)) return ReceiveNetlinkRoute(fd, message, flags);
  }
  return VERBENA_NEXT(recvmsg)(fd, message, flags);
}

VERBENA_INTERPOSE ssize_t recvfrom(int fd, void* data, size_t bytes, int flags, sockaddr* address,
                                   socklen_t* size) {
  const bool rdma = IsNetlinkRdma(fd);
  if (!rdma && !IsNetlinkRoute(fd)) {
    return VERBENA_NEXT(recvfrom)(fd, data, bytes, flags, address, size);
  }
  iovec part = {data, bytes};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_name = address;
  message.msg_namelen = size == nullptr ? 0 : *size;
  const ssize_t got =
      rdma ? ReceiveNetlinkRdma(fd, &message, flags) : ReceiveNetlinkRoute(fd, &message, flags);
  if (got >= 0 && size != nullptr) *size = message.msg_namelen;
  return got;
}

VERBENA_INTERPOSE ssize_t recv(int fd, void* data, size_t bytes, int flags) {
  if (IsNetlinkRdma(fd) || IsNetlinkRoute(fd)) {
    return recvfrom(fd, data, bytes, flags, nullptr, nullptr);
  }
  return VERBENA_NEXT(recv)(fd, data, bytes, flags);
}
