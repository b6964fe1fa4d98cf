// SPDX-License-Identifier: Apache-2.0
//
// Device nodes without a kernel driver: opening them, and what stat says of
// them and of their descriptors.
#pragma once

#include <sys/stat.h>

#include "provider/preload/daemon_tree.h"

namespace verbena::provider {

// open() of a path that names a node. A descriptor, or -1 with errno.
int OpenNode(const RewrittenPath& path, int flags);

// Makes `status` that of a character device.
void MakeCharDevice(struct stat* status, const DeviceNode& node);

// fstat's answer for `fd`, given the kernel's.
void FixFdStatus(int fd, struct stat* status);

}  // namespace verbena::provider
