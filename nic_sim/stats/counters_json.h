// SPDX-License-Identifier: Apache-2.0
//
// Port counters as JSON objects, name to number; every name is always there.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "nic_sim/stats/counters.h"

namespace verbena::nic {

nlohmann::json CountersJson(const PortCounters& counters);
nlohmann::json DropsJson(const PortCounters& counters);

}  // namespace verbena::nic
