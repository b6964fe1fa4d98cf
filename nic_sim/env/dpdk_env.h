// SPDX-License-Identifier: Apache-2.0
//
// DPDK's environment: EAL without hugepages and root by default.
#pragma once

#include <rte_mempool.h>

#include <cstdint>
#include <string>

#include "nic_sim/fabric/packet.h"

namespace verbena::nic {

struct DpdkOptions {
  std::string instance = "default";  // --file-prefix verbena-INSTANCE
  std::string run_folder;            // EAL's own run-time files go here
  bool hugepages = false;
  bool pci = false;
  bool telemetry = false;     // EAL's socket, dpdk/verbena-INSTANCE/dpdk_telemetry.v2 there
  uint32_t memory_mib = 256;  // without hugepages; touched only as it is used
  bool debug_log = false;     // all of DPDK's log on stderr, else only errors
};

// Once per process, in the first engine thread: EAL binds the calling thread to
// a core; its affinity is restored afterwards. False with a sentence.
bool InitDpdk(const DpdkOptions& options, std::string* error);
// For every further thread that touches mbufs; more than about 120 fail. A
// thread that ends calls UnregisterDpdkThread before.
bool RegisterDpdkThread();
void UnregisterDpdkThread();
// In the thread that called InitDpdk, when all others are gone. EAL cannot be
// started again in the same process.
void CleanUpDpdk();

// Pool of packets with PacketMeta and room for the largest frame, or frames of
// `frame_bytes`; 4.6 KiB of memory each (8192 fit into 48 MiB of 4 KiB pages).
// nullptr with a sentence.
rte_mempool* CreatePacketPool(const char* name, uint32_t packets, std::string* error,
                              uint32_t frame_bytes = kMaxFrameBytes);

}  // namespace verbena::nic
