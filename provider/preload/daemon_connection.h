// SPDX-License-Identifier: Apache-2.0
//
// Connections of the preload to the daemon. Those that stand for a descriptor
// of the kernel's are bound to a name that says so, which survives dup, fork
// and exec. System calls directly, errno is preserved where not said otherwise.
#pragma once

#include <sys/types.h>

namespace verbena::provider {

// Binds an unconnected unix socket to an unused abstract name: `prefix` and 16
// hex digits. 0 or errno.
int BindName(int fd, const char* prefix);

// True if `fd` is a socket that BindName() has named so.
bool HasName(int fd, const char* prefix);

// Connects a SOCK_SEQPACKET socket to the daemon whose tree is shown. 0 or
// errno; ENODEV: there is none, or none any more.
int ConnectToDaemon(int fd);

}  // namespace verbena::provider
