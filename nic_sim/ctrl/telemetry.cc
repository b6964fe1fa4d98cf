// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/telemetry.h"

#include <rte_telemetry.h>
#include <spdlog/spdlog.h>

#include <mutex>
#include <string>

#include "nic_sim/ctrl/control_requests.h"

namespace verbena::nic {
namespace {

// EAL keeps commands until the process ends and gives them no context.
std::mutex g_mutex;
Hardware* g_hardware = nullptr;

int List(const char*, const char*, rte_tel_data* answer) {
  const std::lock_guard guard(g_mutex);
  if (g_hardware == nullptr) return -1;
  rte_tel_data_start_array(answer, RTE_TEL_STRING_VAL);
  for (size_t i = 0; i < g_hardware->nic_count(); ++i) {
    rte_tel_data_add_array_string(answer, g_hardware->nic_info(i).device.c_str());
  }
  return 0;
}

int Counters(const char*, const char* device, rte_tel_data* answer) {
  const std::lock_guard guard(g_mutex);
  if (g_hardware == nullptr || device == nullptr || *device == '\0') return -1;
  const CounterValues values = ReadCounters(g_hardware, device);
  if (values.empty()) return -1;  // no such NIC
  rte_tel_data_start_dict(answer);
  for (const auto& [path, value] : values) {
    // Names have no slash in DPDK. "counters/" and "hw_counters/" share none.
    rte_tel_data_add_dict_u64(answer, path.substr(path.rfind('/') + 1).c_str(), value);
  }
  return 0;
}

}  // namespace

Telemetry::Telemetry(Hardware* hardware) {
  const std::lock_guard guard(g_mutex);
  g_hardware = hardware;
  const bool registered =
      rte_telemetry_register_cmd("/verbena/list", List, "Names of the NICs. No parameter") == 0 &&
      rte_telemetry_register_cmd("/verbena/counters", Counters,
                                 "Counters of a NIC. Parameter: its name") == 0;
  if (!registered) spdlog::warn("DPDK takes no more telemetry commands");
}

Telemetry::~Telemetry() {
  const std::lock_guard guard(g_mutex);
  g_hardware = nullptr;
}

}  // namespace verbena::nic
