// SPDX-License-Identifier: Apache-2.0
//
// A trace event as people and programs read it: {"time_ns", "event", "device",
// "qpn", ...}; docs/CONTROL.md has the fields.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "nic_sim/trace/trace_ring.h"

namespace verbena::nic {

nlohmann::json ToJson(const TraceEvent& event, const std::string& device);

}  // namespace verbena::nic
