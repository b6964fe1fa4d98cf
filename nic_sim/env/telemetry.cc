// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/env/telemetry.h"

#include <rte_telemetry.h>

#include <mutex>
#include <optional>
#include <string>

namespace verbena::nic {
namespace {

// EAL keeps commands until the process ends and gives them no context.
std::mutex g_mutex;
std::optional<TelemetrySource> g_source;

int List(const char*, const char*, rte_tel_data* answer) {
  const std::lock_guard guard(g_mutex);
  if (!g_source) return -1;
  rte_tel_data_start_array(answer, RTE_TEL_STRING_VAL);
  for (const std::string& device : g_source->devices()) {
    rte_tel_data_add_array_string(answer, device.c_str());
  }
  return 0;
}

int Counters(const char*, const char* device, rte_tel_data* answer) {
  const std::lock_guard guard(g_mutex);
  if (!g_source || device == nullptr) return -1;
  const auto values = g_source->counters(device);
  if (values.empty()) return -1;
  rte_tel_data_start_dict(answer);
  for (const auto& [name, value] : values) {
    rte_tel_data_add_dict_u64(answer, name.c_str(), value);
  }
  return 0;
}

}  // namespace

Telemetry::Telemetry(TelemetrySource source) {
  const std::lock_guard guard(g_mutex);
  g_source = std::move(source);
  rte_telemetry_register_cmd("/verbena/list", List, "Names of the NICs. No parameter");
  rte_telemetry_register_cmd("/verbena/counters", Counters,
                             "Counters of a NIC. Parameter: its name");
}

Telemetry::~Telemetry() {
  const std::lock_guard guard(g_mutex);
  g_source.reset();
}

}  // namespace verbena::nic
