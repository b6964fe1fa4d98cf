// SPDX-License-Identifier: Apache-2.0
//
// The environment in which a stock application sees the simulated devices.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/verbena_cli/parts.h"

namespace verbena::tools {

// NAME, value.
using Variables = std::vector<std::pair<std::string, std::string>>;

// IBV_DRIVERS and LD_PRELOAD (ours appended to what others have in them) and VERBENA_SOCKET.
// RDMAV_DRIVERS too when it is set, because libibverbs then ignores IBV_DRIVERS. `error` is set
// when the parts lie under a path that LD_PRELOAD cannot express.
Variables ApplicationEnvironment(const Parts& parts, const std::string& socket, std::string* error);

// In single quotes for sh.
std::string ShellQuote(std::string_view text);

}  // namespace verbena::tools
