// SPDX-License-Identifier: Apache-2.0
//
// `verbena lab` and `verbena report`: their options, for the command and for the program that
// does the work (verbena-lab).
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "tools/verbena_cli/instance.h"

namespace verbena::tools {

struct LabOptions {
  InstanceOptions instance;
  int port = 0;  // 0: any
  bool demo = false;
  bool open = true;  // a browser, if there is a display
};

struct ReportOptions {
  InstanceOptions instance;
  std::string file;       // "-" = stdout
  std::string trace;      // of `verbena trace --json`; empty: of the daemon
  uint64_t last = 20000;  // events
};

// Both sub-commands.
void AddLabCommands(CLI::App* app, LabOptions* lab, ReportOptions* report);

}  // namespace verbena::tools
