// SPDX-License-Identifier: Apache-2.0
//
// NETLINK_RDMA sockets, with which iproute2's `rdma` asks for devices and their
// objects. Behind each is a connection to the daemon, which answers as the
// kernel would; here the addresses are made those of netlink.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

namespace verbena::provider {

// socket(AF_NETLINK, type, NETLINK_RDMA). A descriptor, or -1 with errno.
int OpenNetlinkRdma(int type);

// True if `fd` is one of those that this process has opened, or inherited by
// fork. Cheap for all others. Errno is preserved.
bool IsNetlinkRdma(int fd);

// The calls on one of those.
int BindNetlinkRdma(const sockaddr* address, socklen_t size);
int NameOfNetlinkRdma(sockaddr* address, socklen_t* size);
int SetNetlinkRdmaOption(int fd, int level, int option, const void* value, socklen_t size);
ssize_t SendNetlinkRdma(int fd, const msghdr* message, int flags);
ssize_t ReceiveNetlinkRdma(int fd, msghdr* message, int flags);

}  // namespace verbena::provider
