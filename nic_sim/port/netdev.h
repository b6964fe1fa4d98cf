// SPDX-License-Identifier: Apache-2.0
//
// What the kernel knows of a netdev in this process's network namespace.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nic_sim/port/port_options.h"
#include "transport/types.h"

namespace verbena::nic {

struct NetdevInfo {
  int index = 0;
  transport::MacAddress mac;
  std::vector<InterfaceAddress> addresses;  // link-local ones too
};
// Empty with a sentence.
std::optional<NetdevInfo> ReadNetdev(const std::string& interface, std::string* error);

struct LinkInfo {
  uint32_t mtu = 0;
  bool up = false;  // administratively, and with a carrier
};
// All zero when it is gone.
LinkInfo ReadLink(const std::string& interface);

// Sockets that take what comes to UDP port 4791 of the netdev and forget it, so
// that the kernel, if it owns the destination address too, does not answer
// "port unreachable". Closed by the owner; empty if the kernel's own RoCE driver
// has the port, which serves as well.
std::vector<int> SilenceRoceUdpPort(const std::string& interface);

// Descriptors of this process on which poll() tells that the netdev has frames:
// packet sockets bound to it, queues of a tap. For DPDK's drivers, which do not
// name theirs. -1: none.
int FindPacketSocket(int interface_index);
int FindTapQueue(const std::string& interface);

}  // namespace verbena::nic
