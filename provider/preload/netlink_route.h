// SPDX-License-Identifier: Apache-2.0
//
// NETLINK_ROUTE: the simulated network interfaces beside the kernel's, as
// iproute2 and others ask for them. The socket is the kernel's own; so poll,
// blocking, dup, fork and notifications are.
//
// - Questions about one of our interfaces are sent with a message type that the
//   kernel does not know. It returns them with an error, and on the way to the
//   application that becomes the answer.
// - Dumps are the kernel's, with ours added before their end.
// - What would change one of our interfaces is left to the kernel, which knows
//   no such interface (ENODEV).
//
// Any thread; one socket may be read by one thread at a time. Allocates while a
// question of these is outstanding, and only then.
#pragma once

#include <sys/socket.h>

namespace verbena::provider {

// After socket(AF_NETLINK, ..., NETLINK_ROUTE) gave `fd`.
void NoteNetlinkRoute(int fd);
bool IsNetlinkRoute(int fd);

// setsockopt: true if the option is not to reach the kernel (success).
bool HidesNetlinkRouteOption(int level, int option);
ssize_t SendNetlinkRoute(int fd, const msghdr* message, int flags);
ssize_t ReceiveNetlinkRoute(int fd, msghdr* message, int flags);

}  // namespace verbena::provider
