// SPDX-License-Identifier: Apache-2.0
//
// Descriptors of /dev/infiniband/uverbsN. Behind each is a memfd of 64 bytes
// (abi::CommandFdContent): a kernel object that survives dup, fork and passing
// on, and that is recognised by its content alone; no table of descriptors.
#pragma once

#include <sys/stat.h>

#include "nic_sim/abi/commands.h"

namespace verbena::provider {

// open("/dev/infiniband/uverbsN"), if `marker`, the tree's file for it, exists.
int OpenUverbs(const char* marker, int number, int flags);

// True if `fd`, about which the kernel says `status`, is one of those.
bool IsUverbs(int fd, const struct stat& status);
bool IsUverbs(int fd);

// Makes `status` that of a character device.
void MakeCharDevice(struct stat* status, unsigned number);

// fstat's answer for `fd`, given the kernel's.
void FixFdStatus(int fd, struct stat* status);

// RDMA_VERBS_IOCTL on one of our descriptors: what libibverbs itself asks for.
// Returns 0, or -1 with errno.
int VerbsIoctl(void* header);

}  // namespace verbena::provider
