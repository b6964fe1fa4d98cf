// SPDX-License-Identifier: Apache-2.0
//
// The engine process: device, tree, control server.
#pragma once

#include "nic_sim/supervisor/instance_guard.h"
#include "nic_sim/supervisor/options.h"

namespace verbena::nic {

// Runs until the daemon ends; SIGTERM and SIGINT must be blocked. Gives the exit status.
int RunEngineProcess(const DaemonOptions& options, const InstancePaths& paths);

}  // namespace verbena::nic
