// SPDX-License-Identifier: Apache-2.0
//
// Telemetry: the NICs' counters as commands of DPDK's telemetry socket
// (DPDK programmer's guide, "Telemetry Library"; `dpdk-telemetry.py -f
// verbena-INSTANCE`), which EAL has opened because the daemon was told so:
//
//   /verbena/list               names of the NICs
//   /verbena/counters,verbena0  its counters, as /sys has them below ports/1
//
// Threads of EAL call in; who may connect is whoever may enter the run folder.
#pragma once

#include "nic_sim/ctrl/hardware.h"

namespace verbena::nic {

class Telemetry {
 public:
  // One at a time; `hardware` must live longer. Without telemetry in EAL it
  // does nothing.
  explicit Telemetry(Hardware* hardware);
  // Commands that come from now on are answered with nothing; one that is being
  // answered is waited for.
  ~Telemetry();
  Telemetry(const Telemetry&) = delete;
  Telemetry& operator=(const Telemetry&) = delete;
};

}  // namespace verbena::nic
