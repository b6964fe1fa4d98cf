// SPDX-License-Identifier: Apache-2.0
//
// verbenad's command line and configuration file. Errors are sentences; those of the file name
// file and line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "nic_sim/faults/rule_file.h"
#include "nic_sim/port/port_options.h"
#include "transport/types.h"

namespace verbena::nic {

struct DaemonOptions {
  std::string name;  // validated
  uint32_t nics = 1;
  uint32_t host = 0;
  bool system = false;
  int control_group = -1;  // whose members may control a --system daemon; -1: none
  bool strict = false;
  bool hugepages = false;
  bool pci = false;
  bool telemetry = false;
  bool foreground = false;
  std::string mode = "auto";  // thread-per-cpu, spinning
  std::string log_level = "info";
  std::string config;           // absolute path, or empty
  int ready_fd = -1;            // -1: none
  uint32_t exit_idle_s = 0;     // 0: stay
  int engine_link_fd = -1;      // set: this is the engine process
  std::vector<FileRule> rules;  // fault rules to start with
  // Of NIC n, from the configuration file and then the command line.
  std::vector<NicOptions> nic_options;
  // --port, --address, --gateway and --mac as they were given, for the engine.
  std::vector<std::string> nic_arguments;
};

struct OptionsResult {
  DaemonOptions options;
  bool done = false;    // --help or --version: `text` is for stdout, exit 0
  bool failed = false;  // `text` is the error
  std::string text;
};

// Parses the command line and then the configuration file that it names.
OptionsResult ParseOptions(int argc, const char* const* argv);

// Reads `text` of the file `path` into `options`; what the command line said (`nics_given`) wins.
// Empty = good.
//
//   nics = 2
//   host = 0                          # 0 to 254: default addresses are 127.88.HOST.(n+1)
//   [verbena0]
//   addresses = ["10.0.0.1/24", "fd00::1/64"]  # GIDs 1, 2, …; GID 0 stays link-local
//   gateways = ["10.0.0.254"]
//   mac = "02:00:00:00:00:01"
//   port = "af_packet:veth0"                   # or "tap:NETDEV"
//   [[rule]]                                   # a fault rule, see rule_file.h
//   action = "drop"
std::string ParseConfig(std::string_view text, const std::string& path, bool nics_given,
                        DaemonOptions* options);

// Arguments (without the program's name) that give the engine process the same options.
std::vector<std::string> EngineArguments(const DaemonOptions& options, int link_fd);

}  // namespace verbena::nic
