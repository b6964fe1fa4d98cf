// SPDX-License-Identifier: Apache-2.0
//
// The sub-commands of `verbena`. Each takes its parsed options and returns the exit status:
// 0 done, 1 it could not be done (a sentence is on stderr). `run` returns only when COMMAND was
// not started: 125 (Verbena's fault), 126 (found, not executable), 127 (not found).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/verbena_cli/instance.h"

namespace verbena::tools {

inline constexpr int kExitRunFailed = 125;
inline constexpr int kExitNotExecutable = 126;
inline constexpr int kExitNotFound = 127;

// lifecycle_commands.cc
struct UpOptions {
  InstanceOptions instance;
  int nics = 0;  // 0 = not said
  bool strict = false;
  bool telemetry = false;
  std::string group;  // that may control a --system daemon
  bool foreground = false;
  std::string config;
  std::string log_level;
  // verbenad's options of single NICs: DEVICE=VALUE each.
  std::vector<std::string> ports;
  std::vector<std::string> addresses;
  std::vector<std::string> gateways;
  std::vector<std::string> macs;
};
int Up(const UpOptions& options);
int Down(const InstanceOptions& options);
// The daemon that runs, or one of `nics` NICs that is started (then *started). Empty = it is at
// *socket, else a sentence.
std::string EnsureDaemon(const InstanceOptions& options, int nics, std::string* socket,
                         bool* started);

struct RunOptions {
  InstanceOptions instance;
  int nics = 0;  // for a daemon that this command starts
  std::vector<std::string> command;
};
int Run(const RunOptions& options);
int Env(const InstanceOptions& options);
int Version(const InstanceOptions& options, bool json);

// observe_commands.cc
int Status(const InstanceOptions& options, bool json);
int List(const InstanceOptions& options, const std::string& what, bool json);

// counters_command.cc
struct CountersOptions {
  InstanceOptions instance;
  std::string device;           // empty: all
  std::optional<uint32_t> qpn;  // of this QP instead
  bool json = false;
  bool watch = false;   // what changes, until Ctrl-C
  double interval = 1;  // seconds
  uint64_t rounds = 0;  // of --watch; 0: no end
};
int Counters(const CountersOptions& options);

// metrics_command.cc. `listen_on`: loopback IPV4:PORT; empty: once on stdout.
int Metrics(const InstanceOptions& options, const std::string& listen_on);

// capture_command.cc
struct CaptureOptions {
  InstanceOptions instance;
  std::string file;  // "-" = stdout
  std::string device;
  std::string stage = "after";
  std::optional<uint32_t> qpn;  // only packets from or to this QP
  double seconds = 0;           // 0 = no limit
  uint64_t count = 0;           // 0 = no limit
};
int Capture(const CaptureOptions& options);

// fault_commands.cc
int FaultAdd(const InstanceOptions& options, const std::vector<std::string>& rule);
// Those of a TOML file, all or none.
int FaultAddFile(const InstanceOptions& options, const std::string& file);
int FaultList(const InstanceOptions& options, bool json);
// Lets `count` (none: all) of the packets go that rules `hold` (rule `id`) have.
int FaultRelease(const InstanceOptions& options, std::optional<int64_t> count,
                 std::optional<int64_t> id);
int FaultHeld(const InstanceOptions& options, bool json);
int FaultClear(const InstanceOptions& options, std::optional<int64_t> id);

// trace_command.cc
struct TraceOptions {
  InstanceOptions instance;
  std::optional<uint32_t> qpn;
  std::string device;
  uint64_t last = 1000;  // at most so many events of the past
  bool follow = false;   // until it is ended
  bool json = false;     // an array, or with `follow` a line each
};
int Trace(const TraceOptions& options);
// Without a QPN: of the last failure.
int Explain(const InstanceOptions& options, std::optional<uint32_t> qpn, bool json);

// timeline_command.cc
struct TimelineOptions {
  InstanceOptions instance;
  std::optional<uint32_t> qpn;    // none: of the last failure, else of what was posted last
  std::optional<uint64_t> wr_id;  // none: that which failed or was sent again, else the last
  bool json = false;
};
int Timeline(const TimelineOptions& options);
// "-": stdout.
int TraceToPerfetto(const InstanceOptions& options, const std::string& path);

// scenario/scenario_command.cc. run: 0 all as expected, 1 something was not, 2 not run.
struct ScenarioOptions {
  std::vector<std::string> files;  // files, folders, names of the library
  std::string junit;               // file for the results; empty: none
  bool verbose = false;
  int repeat = 1;
};
int ScenarioRun(const ScenarioOptions& options);
int ScenarioList(bool json);

// doctor_command.cc
int Doctor(const InstanceOptions& options, bool json);

// lab_command.cc
// Becomes verbena-lab with these arguments; returns only when it cannot be started.
int RunLabProgram(std::vector<std::string> words);

// decode_command.cc
struct DecodeOptions {
  std::string file;
  bool json = false;
  bool check = false;
};
int Decode(const DecodeOptions& options);

}  // namespace verbena::tools
