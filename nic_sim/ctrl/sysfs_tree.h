// SPDX-License-Identifier: Apache-2.0
//
// Writes the fake /sys and /dev of a daemon: what the kernel would show of the simulated devices.
// The preload leads applications to it. Layout below `path`:
//
//   sys/devices/virtual/verbena/nicN/{numa_node,local_cpus,local_cpulist,uevent}
//                              nicN/infiniband/verbenaN/…         the device
//                              nicN/infiniband_verbs/uverbsN/…
//   sys/class/infiniband/verbenaN, sys/class/infiniband_verbs/uverbsN   links to those
//   dev/infiniband/uverbsN               markers: empty files (system: links to /dev/null)
//
// Links are relative. Modification times stay as they are written: libibverbs takes that of
// class/infiniband/verbenaN for the identity of the device.
#pragma once

#include <string>
#include <vector>

#include "nic_sim/device/context.h"

namespace verbena::nic {

// Builds the tree beside `path` and renames it into place; an older one is replaced. `system`:
// other users may read it. Empty = done, else a sentence.
std::string WriteSysfsTree(const std::string& path, const std::vector<NicInfo>& nics, bool system);

}  // namespace verbena::nic
