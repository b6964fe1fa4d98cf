// SPDX-License-Identifier: Apache-2.0
//
// Telemetry: the NICs' counters as commands of DPDK's telemetry socket
// (DPDK programmer's guide, "Telemetry Library"; `dpdk-telemetry.py -f
// verbena-INSTANCE`), which EAL has opened because the daemon was told so:
//
//   /verbena/list               names of the NICs
//   /verbena/counters,verbena0  its counters by name
//
// Threads of EAL call in; who may connect is whoever may enter the run folder.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace verbena::nic {

// Where the answers come from; called by threads of EAL, one at a time.
struct TelemetrySource {
  std::function<std::vector<std::string>()> devices;
  // Nothing: no such device.
  std::function<std::vector<std::pair<std::string, uint64_t>>(const std::string& device)> counters;
};

class Telemetry {
 public:
  // One at a time. Without telemetry in EAL it does nothing.
  explicit Telemetry(TelemetrySource source);
  // Commands that come from now on are answered with nothing; one that is being
  // answered is waited for.
  ~Telemetry();
  Telemetry(const Telemetry&) = delete;
  Telemetry& operator=(const Telemetry&) = delete;
};

}  // namespace verbena::nic
