// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/stats/counters_json.h"

#include <nlohmann/json.hpp>

namespace verbena::nic {

nlohmann::json CountersJson(const PortCounters& counters) {
  nlohmann::json json = nlohmann::json::object();
#define X(name, meaning) json[#name] = counters.name;
  VERBENA_PORT_COUNTERS(X)
#undef X
  return json;
}

nlohmann::json DropsJson(const PortCounters& counters) {
  nlohmann::json json = nlohmann::json::object();
  for (size_t i = 0; i < counters.drops.size(); ++i) {
    json[DropReasonName(static_cast<DropReason>(i))] = counters.drops[i];
  }
  return json;
}

}  // namespace verbena::nic
