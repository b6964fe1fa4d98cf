// SPDX-License-Identifier: Apache-2.0
//
// Descriptors of /dev/infiniband/uverbsN. Behind each is a memfd of 64 bytes
// (abi::CommandFdContent): a kernel object that survives dup, fork and passing
// on, and that is recognised by its content alone; no table of descriptors.
#pragma once

#include <sys/stat.h>

#include "nic_sim/abi/commands.h"

namespace verbena::provider {

// open("/dev/infiniband/uverbsN"). A descriptor, or -1 with errno.
int OpenUverbs(unsigned number, int flags);

// True if `fd`, about which the kernel says `status`, is one of those; then
// *number is N. Errno is preserved.
bool IsUverbs(int fd, const struct stat& status, unsigned* number);
bool IsUverbs(int fd);

// kIoctlPassAsyncFd on one of our descriptors.
int PassAsyncFd(int fd, int async_fd);

// RDMA_VERBS_IOCTL on one of our descriptors: what libibverbs itself asks for.
// Returns 0, or -1 with errno.
int VerbsIoctl(int fd, void* header);

}  // namespace verbena::provider
