// SPDX-License-Identifier: Apache-2.0
//
// ioctl()s that ask for network interfaces, answered for those of the NICs.
#pragma once

#include <net/if.h>
#include <sys/ioctl.h>

#include "nic_sim/abi/commands.h"

namespace verbena::provider {

// Requests that NetdevIoctl() may know.
bool IsNetdevIoctl(unsigned long request);

// True if `argument`, a struct ifreq, is about one of our interfaces; then it
// is answered, *error is 0 or errno.
bool NetdevIoctl(unsigned long request, void* argument, int* error);

// Adds our interfaces to the kernel's answer to SIOCGIFCONF, as far as `room`,
// the bytes of its buffer, allows.
void AppendNetdevs(ifconf* list, int room);

}  // namespace verbena::provider
