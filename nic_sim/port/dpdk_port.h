// SPDX-License-Identifier: Apache-2.0
//
// A DPDK port on a Linux netdev: net_af_packet on one that exists, net_tap with
// one that it makes.
#pragma once

#include <rte_mempool.h>

#include <cstdint>
#include <memory>
#include <string>

#include "nic_sim/port/frame_port.h"
#include "nic_sim/port/port_options.h"

namespace verbena::nic {

// Bytes of the largest frame that a port takes whole: the packet driver's
// frames, which cut longer ones without an error.
inline constexpr uint32_t kPortFrameBytes = 8192;
// What net_tap can send, whatever the netdev's MTU: path MTU 1024. The packet
// driver has no such limit.
inline constexpr uint32_t kTapMtu = 1500;

// After InitDpdk. `number`: unique among the ports. `pool`: for frames received,
// with room for kPortFrameBytes. nullptr with a sentence.
std::unique_ptr<FramePort> OpenDpdkPort(const PortSpec& spec, uint32_t number, rte_mempool* pool,
                                        std::string* error);

}  // namespace verbena::nic
