// SPDX-License-Identifier: Apache-2.0
//
// Which daemon a command talks to, and how it is found.
#pragma once

#include <string>
#include <vector>

#include "tools/verbena_cli/control_client.h"

namespace verbena::tools {

// From the command line.
struct InstanceOptions {
  std::string name;     // --name; empty = $VERBENA_NAME or "default"
  bool system = false;  // --system: only /run/verbena
};

// Where a daemon of these options may be found.
struct Instance {
  std::string name;
  std::vector<std::string> candidates;  // socket paths in look-up order
  std::string error;                    // not empty: the options are wrong
};

// Resolve: by the look-up order of clients. ResolveOwn: only the one place where `up` starts it,
// and, for commands that end something, $VERBENA_SOCKET (include_environment) before it.
Instance Resolve(const InstanceOptions& options);
Instance ResolveOwn(const InstanceOptions& options, bool include_environment);

// First candidate where somebody listens; empty = none. A candidate in a run folder of our own
// that others could have written is skipped (`*why` says so, may be null).
std::string FindRunning(const Instance& instance, std::string* why = nullptr);

// "no daemon named X is running (looked at …); start one with `verbena up`"
std::string NotRunning(const Instance& instance);

// Connects to the running daemon; on failure prints why on stderr and returns false.
bool ConnectTo(const Instance& instance, ControlClient* client);

// One request to it. On failure prints why on stderr and returns a reply that is not ok().
Reply Ask(const InstanceOptions& options, const Json& request);

// " --name X" when the name must be said to reach this instance again, else "".
std::string NameOption(const InstanceOptions& options);

}  // namespace verbena::tools
