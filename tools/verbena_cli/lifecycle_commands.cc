// SPDX-License-Identifier: Apache-2.0
//
// up, down, run, env, version: starting and ending daemons, and programs over them.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "nic_sim/runtime/run_folder.h"
#include "nic_sim/runtime/version.h"
#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/environment.h"
#include "tools/verbena_cli/launcher.h"
#include "tools/verbena_cli/parts.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {
namespace {

// A daemon that `run` started ends this long after its last client.
constexpr int kExitIdleSeconds = 10;
// A daemon that is just ending is still in the way of the next one.
constexpr int kStartAttempts = 20;
constexpr int kRetryMilliseconds = 250;

int Fail(const std::string& sentence, int status = 1) {
  PrintError(sentence);
  return status;
}

std::string FirstGids(const Json& nic) {
  std::string text;
  const Json& gids = ArrayField(nic, "gids");
  for (size_t i = 0; i < gids.size() && i < 2; ++i)
    text += (i > 0 ? "  " : "") + Printable(gids[i]);
  return text;
}

void PrintStarted(const Json& status, const InstanceOptions& options, const std::string& socket) {
  Print(stdout, "Verbena is up: instance {}, pid {}, socket {}\n\n", TextField(status, "name", "?"),
        TextField(status, "pid", "?"), socket);
  Table table;
  table.AddRow({"DEVICE", "HOST", "STATE", "IPV4", "GIDS 0 AND 1"});
  std::string address = "127.88.0.1";
  for (const Json& nic : ArrayField(status, "nics")) {
    if (&nic == &ArrayField(status, "nics").front()) address = TextField(nic, "ipv4", address);
    table.AddRow({TextField(nic, "device"), TextField(nic, "host"), TextField(nic, "state"),
                  TextField(nic, "ipv4"), FirstGids(nic)});
  }
  const std::string name = NameOption(options);
  Print(stdout, "{}\n", table.Text());
  Print(stdout,
        "What to do next:\n"
        "  verbena run{0} -- ibv_devinfo                       any verbs program, unmodified\n"
        "  verbena run{0} -- ibv_rc_pingpong -g 1              a server, and in another terminal\n"
        "  verbena run{0} -- ibv_rc_pingpong -g 1 {1:<12} its client\n"
        "  eval \"$(verbena env{0})\"                          all programs of this shell\n"
        "  verbena status{0} | verbena doctor | verbena down{0}\n",
        name, address);
}

enum class Life { kNone, kAnswers, kSilent };

// Ours or root's daemon is asked for a word: one that is just ending still has its socket, and
// one that ends by itself when idle starts its time anew, so that it does not end before COMMAND
// connects.
Life Probe(const std::string& socket) {
  ControlClient client;
  if (!client.Connect(socket).empty()) {
    return SomebodyListens(socket) ? Life::kAnswers : Life::kNone;
  }
  const Reply reply = client.Request({{"op", "version"}});
  if (reply.kind == Reply::Kind::kClosed) return Life::kNone;
  return reply.kind == Reply::Kind::kTimeout ? Life::kSilent : Life::kAnswers;
}

std::string Silent(const std::string& socket) {
  return fmt::format("the daemon at {} does not answer; `verbena doctor` says more", socket);
}

// Starts the daemon where `socket` says, unless somebody else did meanwhile. Empty = it runs.
std::string StartOrFind(const Parts& parts, const DaemonOptions& daemon, const std::string& socket,
                        bool* already) {
  *already = false;
  const nic::PathResult folder = nic::CreateRunFolder(daemon.system);
  if (!folder.ok()) return folder.error;
  const nic::PathResult lock_path = nic::LockPath(folder.value, daemon.name);
  if (!lock_path.ok()) return lock_path.error;
  StartLock lock;
  if (std::string problem = lock.Take(lock_path.value); !problem.empty()) return problem;
  std::string problem;
  for (int attempt = 0; attempt < kStartAttempts; ++attempt) {
    const Life life = Probe(socket);
    if (life == Life::kSilent) return Silent(socket);
    if (life == Life::kAnswers) {
      *already = true;
      return {};
    }
    problem = StartDaemon(parts, daemon);
    if (problem.empty() || problem.find("already") == std::string::npos) break;
    usleep(kRetryMilliseconds * 1000);
  }
  return problem;
}

void SetEnvironment(const Variables& variables) {
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
}

int Execute(const std::vector<std::string>& command) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  const int error = errno;
  if (error == ENOENT || error == ENOTDIR) {
    return Fail(fmt::format("{}: {}", command[0],
                            command[0].find('/') == std::string::npos ? "command not found"
                                                                      : std::strerror(error)),
                kExitNotFound);
  }
  return Fail(fmt::format("cannot execute {}: {}", command[0], std::strerror(error)),
              kExitNotExecutable);
}

int Foreground(const Parts& parts, const DaemonOptions& daemon) {
  if (!parts.missing_daemon.empty()) return Fail(parts.missing_daemon);
  std::vector<std::string> arguments = DaemonArguments(parts, daemon);
  arguments.emplace_back("--foreground");
  return Execute(arguments);
}

}  // namespace

int Up(const UpOptions& options) {
  const Instance instance = ResolveOwn(options.instance, /*include_environment=*/false);
  if (!instance.error.empty()) return Fail(instance.error);
  const std::string& socket = instance.candidates.front();
  const std::string running = fmt::format(
      "a daemon named {} is already running at {}; see `verbena status{}`, or end it with "
      "`verbena down{}`, or start another one with --name",
      instance.name, socket, NameOption(options.instance), NameOption(options.instance));
  if (SomebodyListens(socket)) return Fail(running);

  const Parts parts = FindParts();
  DaemonOptions daemon;
  daemon.name = instance.name;
  daemon.nics = options.nics;
  daemon.strict = options.strict;
  daemon.telemetry = options.telemetry;
  daemon.group = options.group;
  daemon.system = options.instance.system;
  daemon.config = options.config;
  daemon.log_level = options.log_level;
  const auto pass_on = [&daemon](const char* option, const std::vector<std::string>& values) {
    for (const std::string& value : values) {
      daemon.nic_arguments.insert(daemon.nic_arguments.end(), {option, value});
    }
  };
  pass_on("--port", options.ports);
  pass_on("--address", options.addresses);
  pass_on("--gateway", options.gateways);
  pass_on("--mac", options.macs);
  if (options.foreground) return Foreground(parts, daemon);
  bool already = false;
  const std::string problem = StartOrFind(parts, daemon, socket, &already);
  if (!problem.empty()) return Fail(problem);
  if (already) return Fail(running);

  ControlClient client;
  const std::string unreachable = client.Connect(socket);
  if (!unreachable.empty()) {
    return Fail(
        fmt::format("the daemon started, but does not listen at {}: {}", socket, unreachable));
  }
  const Reply status = client.Request({{"op", "status"}});
  if (!status.ok()) return Fail("the daemon started, but: " + status.error);
  PrintStarted(status.json, options.instance, socket);
  if (!parts.missing_libraries.empty()) PrintError("note: " + parts.missing_libraries);
  return 0;
}

int Down(const InstanceOptions& options) {
  const Instance instance = ResolveOwn(options, /*include_environment=*/true);
  if (!instance.error.empty()) return Fail(instance.error);
  if (FindRunning(instance).empty()) {
    Print(stderr, "verbena: no daemon named {} is running (looked at {}); nothing to end\n",
          instance.name, fmt::join(instance.candidates, ", "));
    return 0;
  }
  ControlClient client;
  if (!ConnectTo(instance, &client)) return 1;
  if (const std::string error = client.ShutDown(); !error.empty()) {
    return Fail(fmt::format("instance {}: {}", instance.name, error));
  }
  Print(stdout, "Verbena is down: instance {}\n", instance.name);
  return 0;
}

std::string EnsureDaemon(const InstanceOptions& options, int nics, std::string* socket,
                         bool* started) {
  *started = false;
  const Instance instance = Resolve(options);
  if (!instance.error.empty()) return instance.error;
  std::string why;
  *socket = FindRunning(instance, &why);
  if (!why.empty()) return why;
  const Life life = socket->empty() ? Life::kNone : Probe(*socket);
  if (life == Life::kSilent) return Silent(*socket);
  if (life == Life::kAnswers) return {};
  const Instance own = ResolveOwn(options, /*include_environment=*/false);
  if (!own.error.empty()) return own.error;
  *socket = own.candidates.front();
  DaemonOptions daemon;
  daemon.name = own.name;
  daemon.nics = nics;
  daemon.system = options.system;
  bool already = false;
  std::string problem = StartOrFind(FindParts(), daemon, *socket, &already);
  *started = problem.empty() && !already;
  return problem;
}

int Run(const RunOptions& options) {
  if (options.command.empty()) {
    return Fail("which command? Example: verbena run -- ibv_devinfo", kExitRunFailed);
  }
  const Parts parts = FindParts();
  const Instance instance = Resolve(options.instance);
  if (!instance.error.empty()) return Fail(instance.error, kExitRunFailed);
  std::string why;
  std::string socket = FindRunning(instance, &why);
  if (!why.empty()) return Fail(why, kExitRunFailed);
  // Before a daemon is started for nothing.
  std::string problem;
  ApplicationEnvironment(parts, "", &problem);
  if (!problem.empty()) return Fail(problem, kExitRunFailed);

  const Life life = socket.empty() ? Life::kNone : Probe(socket);
  if (life == Life::kSilent) return Fail(Silent(socket), kExitRunFailed);
  if (life == Life::kNone) {
    const Instance own = ResolveOwn(options.instance, /*include_environment=*/false);
    if (!own.error.empty()) return Fail(own.error, kExitRunFailed);
    socket = own.candidates.front();
    bool already = false;
    DaemonOptions daemon;
    daemon.name = own.name;
    daemon.nics = options.nics;
    daemon.system = options.instance.system;
    daemon.exit_idle_s = kExitIdleSeconds;
    problem = StartOrFind(parts, daemon, socket, &already);
    if (!problem.empty()) return Fail(problem, kExitRunFailed);
  }
  SetEnvironment(ApplicationEnvironment(parts, socket, &problem));
  return Execute(options.command);
}

int Env(const InstanceOptions& options) {
  const Instance instance = Resolve(options);
  if (!instance.error.empty()) return Fail(instance.error);
  std::string socket = FindRunning(instance);
  if (socket.empty()) {
    const Instance own = ResolveOwn(options, /*include_environment=*/false);
    if (!own.error.empty()) return Fail(own.error);
    socket = own.candidates.front();
    Print(stderr,
          "verbena: no daemon named {} is running yet; start it with `verbena up{}`, until then "
          "programs see no device\n",
          own.name, NameOption(options));
  }
  std::string problem;
  const Variables variables = ApplicationEnvironment(FindParts(), socket, &problem);
  if (!problem.empty()) return Fail(problem);
  for (const auto& [name, value] : variables) {
    Print(stdout, "export {}={}\n", name, ShellQuote(value));
  }
  return 0;
}

int Version(const InstanceOptions& options, bool json) {
  Json answer = {{"version", nic::kVersion}, {"daemon", nullptr}};
  const Instance instance = Resolve(options);
  const std::string socket = FindRunning(instance);
  ControlClient client;
  if (!socket.empty() && client.Connect(socket).empty()) {
    const Reply reply = client.Request({{"op", "version"}});
    if (reply.ok()) answer["daemon"] = reply.json;
  }
  if (json) {
    Print(stdout, "{}\n", Dump(answer, 2));
    return 0;
  }
  Print(stdout, "verbena {}\n", nic::kVersion);
  const Json& daemon = ObjectField(answer, "daemon");
  if (daemon.empty()) {
    Print(stdout, "daemon: none named {} is running\n", instance.name);
  } else {
    Print(stdout, "daemon {} (pid {}, interface {})\n", TextField(daemon, "version", "?"),
          TextField(daemon, "pid", "?"), TextField(daemon, "abi", "?"));
  }
  return 0;
}

}  // namespace verbena::tools
