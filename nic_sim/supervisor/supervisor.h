// SPDX-License-Identifier: Apache-2.0
//
// The supervisor: a small process that starts the engine process, tells whoever started the
// daemon when it is ready, and outlives the engine, so that applications learn that their device
// is dead. It knows no DPDK and parses nothing that comes from applications.
#pragma once

#include <functional>
#include <string>

#include "nic_sim/supervisor/instance_guard.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

struct SupervisorOptions {
  InstancePaths paths;
  InstanceGuard* guard = nullptr;  // released when all is over
  // Runs in the forked child and does not return: executes the engine with its end of the link.
  std::function<void(UniqueFd link)> run_engine;
  // Called once: with "" when the engine is ready, else with the reason that it is not.
  std::function<void(const std::string& error)> report;
  // Called once when the end was asked for, may be empty.
  std::function<void()> stopping;
  int stop_seconds = 10;  // then an engine that was asked to end is killed
};

// Runs the daemon's life. SIGTERM and SIGINT end it (they must be blocked in this process, and
// SIGCHLD too). Gives the exit status: 0 after a clean end.
int RunSupervisor(SupervisorOptions options);

}  // namespace verbena::nic
