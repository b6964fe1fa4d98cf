// SPDX-License-Identifier: Apache-2.0
//
// The control server's view of the real device.
#pragma once

#include <memory>

#include "nic_sim/ctrl/hardware.h"

namespace verbena::nic {

class Device;

// `device` outlives it.
std::unique_ptr<Hardware> MakeDeviceHardware(Device* device);

}  // namespace verbena::nic
