// SPDX-License-Identifier: Apache-2.0
//
// DPDK's environment: EAL without hugepages and root by default.
#pragma once

#include <rte_mempool.h>

#include <cstdint>
#include <string>

namespace verbena::nic {

struct DpdkOptions {
  std::string instance = "default";  // --file-prefix verbena-INSTANCE
  std::string run_folder;            // EAL's own run-time files go here
  bool hugepages = false;
  bool pci = false;
  uint32_t memory_mib = 256;  // without hugepages
};

// Once per process, in the first engine thread: EAL binds the calling thread to
// a core; its affinity is restored afterwards. False with a sentence.
bool InitDpdk(const DpdkOptions& options, std::string* error);
// For every further thread that touches mbufs.
bool RegisterDpdkThread();
void CleanUpDpdk();

// Pool of packets with PacketMeta and room for the largest frame. nullptr with
// a sentence.
rte_mempool* CreatePacketPool(const char* name, uint32_t packets,
                              std::string* error);

}  // namespace verbena::nic
