// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/engine_process.h"

#include <fmt/format.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "nic_sim/ctrl/control_requests.h"
#include "nic_sim/ctrl/device_hardware.h"
#include "nic_sim/ctrl/failure_log.h"
#include "nic_sim/ctrl/server.h"
#include "nic_sim/ctrl/sysfs_tree.h"
#include "nic_sim/device/device.h"
#include "nic_sim/env/telemetry.h"
#include "nic_sim/supervisor/engine_link.h"

namespace verbena::nic {
namespace {

DeviceOptions MakeDeviceOptions(const DaemonOptions& options, const InstancePaths& paths) {
  DeviceOptions device;
  device.instance = options.name;
  device.run_folder = paths.folder;
  device.nics = options.nics;
  device.host = options.host;
  device.system = options.system;
  device.strict = options.strict;
  device.hugepages = options.hugepages;
  device.pci = options.pci;
  device.telemetry = options.telemetry;
  device.nic_options = options.nic_options;
  if (options.mode == "thread-per-cpu") device.mode = DeviceOptions::Mode::kThreadPerCpu;
  if (options.mode == "spinning") device.mode = DeviceOptions::Mode::kSpinning;
  return device;
}

TelemetrySource MakeTelemetrySource(Hardware* hardware) {
  TelemetrySource source;
  source.devices = [hardware] {
    std::vector<std::string> names;
    for (size_t i = 0; i < hardware->nic_count(); ++i) {
      names.push_back(hardware->nic_info(i).device);
    }
    return names;
  };
  source.counters = [hardware](const std::string& device) {
    CounterValues values;
    if (device.empty()) return values;  // of all
    values = ReadCounters(hardware, device);
    // Names have no slash in DPDK; the folders counters and hw_counters share none.
    for (auto& [name, value] : values) name.erase(0, name.rfind('/') + 1);
    return values;
  };
  return source;
}

int Fail(EngineLink* link, const std::string& error) {
  spdlog::error("{}", error);
  LinkMessage message;
  message.kind = LinkKind::kFailed;
  error.copy(message.text, sizeof(message.text) - 1);
  link->Send(message);
  link->Drain(1000);
  return 1;
}

UniqueFd OpenStopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return UniqueFd(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
}

// Until everything is ready: the device must not be used before its tree is complete.
int Run(const DaemonOptions& options, const InstancePaths& paths, EngineLink* link) {
  std::string error;
  const std::unique_ptr<Device> device = Device::Start(MakeDeviceOptions(options, paths), &error);
  if (device == nullptr) return Fail(link, error.empty() ? "the device does not start" : error);
  const std::unique_ptr<Hardware> hardware = MakeDeviceHardware(device.get());
  std::vector<NicInfo> nics;
  for (size_t i = 0; i < hardware->nic_count(); ++i) nics.push_back(hardware->nic_info(i));
  TreeOptions tree;
  tree.system = options.system;
  tree.rdma_cm = hardware->cm() != nullptr;
  for (const NicInfo& nic : nics) tree.counters.push_back(ReadCounters(hardware.get(), nic.device));
  error = WriteSysfsTree(paths.tree, nics, tree);
  if (!error.empty()) return Fail(link, error);

  for (const FileRule& rule : options.rules) {
    std::string field;
    if (hardware->AddRule(rule.text, &error, &field) == 0) {
      return Fail(link, rule.Complaint(options.config, field, error));
    }
  }

  ServerOptions server_options;
  server_options.daemon = {options.name, paths.socket, options.system, getppid()};
  server_options.tree = paths.tree;
  server_options.exit_idle_s = options.exit_idle_s;
  server_options.control_group = options.control_group;
  const UniqueFd signals = OpenStopSignals();
  Server server(hardware.get(), link, server_options);
  error = server.Listen(paths.socket, signals.get());
  if (!error.empty()) return Fail(link, error);
  spdlog::info("ready: {} NIC{}, socket {}", nics.size(), nics.size() == 1 ? "" : "s",
               paths.socket);
  std::optional<FailureLog> failures;
  failures.emplace(hardware.get(), fmt::format("{}/{}.failures", paths.folder, options.name));
  std::optional<Telemetry> telemetry;
  if (options.telemetry) telemetry.emplace(MakeTelemetrySource(hardware.get()));
  const bool all_closed = server.Run();
  telemetry.reset();
  failures.reset();
  RemoveInstanceFiles(paths);
  if (!all_closed) {
    // Threads wait for memory of applications; only the end of the process ends that.
    link->Drain(1000);
    spdlog::shutdown();
    _exit(0);
  }
  return 0;
}

}  // namespace

int RunEngineProcess(const DaemonOptions& options, const InstancePaths& paths) {
  EngineLink link{UniqueFd(options.engine_link_fd)};
  try {
    const int status = Run(options, paths, &link);
    spdlog::info("the engine process ends");
    return status;
  } catch (const std::exception& error) {
    RemoveInstanceFiles(paths);
    return Fail(&link, error.what());
  }
}

}  // namespace verbena::nic
