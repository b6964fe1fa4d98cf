// SPDX-License-Identifier: Apache-2.0
//
// What a Device is made of; shared by its parts in this folder.
#pragma once

#include <unistd.h>

#include <memory>
#include <vector>

#include "nic_sim/device/device.h"
#include "nic_sim/device/device_context.h"
#include "nic_sim/engine/engine.h"
#include "nic_sim/qp/nic.h"
#include "nic_sim/queues/shared_memory.h"

namespace verbena::nic {

struct Device::State {
  ~State();

  SharedMemory status;
  int status_readonly = -1;
  std::unique_ptr<Engine> engine;
  std::vector<std::unique_ptr<Nic>> nics;
  std::vector<std::unique_ptr<DeviceContext>> contexts;
};

}  // namespace verbena::nic
