// SPDX-License-Identifier: Apache-2.0
//
// Descriptors of /dev/infiniband/rdma_cm. Behind each is a connected socket of
// its own (nic_sim/abi/rdma_cm.h), recognised by the name that it is bound to:
// no table of descriptors, so dup, fork, exec and close need no help.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace verbena::provider {

// open("/dev/infiniband/rdma_cm"). A descriptor, or -1 with errno.
int OpenRdmaCm(int flags);

// True if `fd` is one of those. Errno is preserved.
bool IsRdmaCm(int fd);

// False while no program text of this process can have such a descriptor;
// spares all others the question.
bool HasRdmaCm();

// write() to one of those: carries out a command. Any number of threads, also
// while others wait for events. As on Linux, a cancellation point; GET_EVENT
// waits (or does not: O_NONBLOCK) and is interrupted by signals, no other
// command is.
ssize_t WriteRdmaCm(int fd, const void* buffer, size_t bytes);

}  // namespace verbena::provider
