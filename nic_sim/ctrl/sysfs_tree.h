// SPDX-License-Identifier: Apache-2.0
//
// Writes the fake /sys and /dev of a daemon: what the kernel would show of the simulated devices.
// The preload leads applications to it. Layout below `path`:
//
//   sys/devices/virtual/verbena/nicN/{numa_node,local_cpus,local_cpulist,uevent}
//                              nicN/infiniband/verbenaN/…         the device
//                              nicN/infiniband_verbs/uverbsN/…
//                              nicN/infiniband_mad/umadN/…
//                              nicN/net/verbenaN/…               its network interface
//   sys/class/infiniband/verbenaN, sys/class/infiniband_verbs/uverbsN   links to those
//   sys/class/misc/rdma_cm/{abi_version,dev}   with a connection manager
//   dev/infiniband/{uverbsN,rdma_cm}     markers: empty files (system: links to /dev/null)
//
//   verbena/netdevs                      the interfaces' addresses, for the preload
//
// Links are relative. Modification times stay as they are written: libibverbs takes that of
// class/infiniband/verbenaN for the identity of the device.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "nic_sim/device/context.h"

namespace verbena::nic {

// Of one port: names below ports/1, as "counters/port_xmit_data", with values.
using CounterValues = std::vector<std::pair<std::string, uint64_t>>;

struct TreeOptions {
  bool system = false;                       // other users may read it
  bool rdma_cm = false;                      // there is a connection manager
  std::vector<CounterValues> counters = {};  // by NIC
};

// Builds the tree beside `path` and renames it into place; an older one is replaced. Empty = done,
// else a sentence.
std::string WriteSysfsTree(const std::string& path, const std::vector<NicInfo>& nics,
                           const TreeOptions& options);

// Shows, or hides, NIC `index` in a tree that is in use: in the class folders and in /dev, as
// when a device is plugged in or pulled out. What cannot be changed stays.
void ShowNic(const std::string& path, size_t index, const std::string& device, bool system,
             bool shown);

// Writes the GID table of NIC `index`, and the interfaces' addresses, into a tree that is in use.
void UpdateGids(const std::string& path, size_t index, const std::vector<NicInfo>& nics,
                bool system);

// Writes new values into the files of a tree that is in use. What cannot be written stays as it
// was.
void UpdateCounters(const std::string& path, size_t nic, const std::string& device,
                    const CounterValues& values);

}  // namespace verbena::nic
