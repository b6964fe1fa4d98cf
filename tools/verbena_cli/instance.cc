// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/instance.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>

#include "nic_sim/runtime/run_folder.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {
namespace {

// Sockets in a folder that somebody else controls may be anybody's.
std::string DistrustOf(const std::string& socket) {
  const std::string folder = nic::RunFolder(/*system=*/false);
  if (!socket.starts_with(folder + "/")) return {};
  bool missing = false;
  std::string problem =
      nic::CheckRunFolder(folder, /*system=*/false, static_cast<unsigned>(geteuid()), &missing);
  return missing ? std::string() : problem;
}

}  // namespace

Instance Resolve(const InstanceOptions& options) {
  Instance instance;
  const nic::PathResult name = nic::InstanceName(options.name);
  instance.name = name.value;
  instance.error = name.error;
  if (!name.ok()) return instance;
  if (options.system) return ResolveOwn(options, /*include_environment=*/false);
  // A name that was typed is meant, whatever `verbena run` put into the environment.
  instance.candidates = nic::SocketCandidates(name.value, /*use_environment=*/options.name.empty());
  return instance;
}

Instance ResolveOwn(const InstanceOptions& options, bool include_environment) {
  Instance instance;
  const nic::PathResult name = nic::InstanceName(options.name);
  instance.name = name.value;
  instance.error = name.error;
  if (!name.ok()) return instance;
  const char* socket = std::getenv("VERBENA_SOCKET");
  if (include_environment && !options.system && options.name.empty() && socket != nullptr &&
      *socket != '\0') {
    instance.candidates.emplace_back(socket);
  }
  const nic::PathResult path = nic::SocketPath(nic::RunFolder(options.system), name.value);
  instance.error = path.error;
  if (path.ok() && (instance.candidates.empty() || instance.candidates[0] != path.value)) {
    instance.candidates.push_back(path.value);
  }
  return instance;
}

std::string FindRunning(const Instance& instance, std::string* why) {
  for (const std::string& path : instance.candidates) {
    if (std::string distrust = DistrustOf(path); !distrust.empty()) {
      if (why != nullptr) *why = std::move(distrust);
      continue;
    }
    if (SomebodyListens(path)) return path;
  }
  return {};
}

std::string NotRunning(const Instance& instance) {
  return fmt::format("no daemon named {} is running (looked at {}); start one with `verbena up`",
                     instance.name, fmt::join(instance.candidates, ", "));
}

bool ConnectTo(const Instance& instance, ControlClient* client) {
  if (!instance.error.empty()) {
    PrintError(instance.error);
    return false;
  }
  std::string why;
  const std::string path = FindRunning(instance, &why);
  if (path.empty()) {
    if (!why.empty()) PrintError(why);
    PrintError(NotRunning(instance));
    return false;
  }
  const std::string problem = client->Connect(path);
  if (!problem.empty())
    PrintError(fmt::format("cannot talk to the daemon at {}: {}", path, problem));
  return problem.empty();
}

Reply Ask(const InstanceOptions& options, const Json& request) {
  ControlClient client;
  if (!ConnectTo(Resolve(options), &client)) return {};
  Reply reply = client.Request(request);
  if (!reply.ok()) PrintError(reply.error);
  return reply;
}

std::string NameOption(const InstanceOptions& options) {
  return options.name.empty() ? std::string() : " --name " + options.name;
}

}  // namespace verbena::tools
