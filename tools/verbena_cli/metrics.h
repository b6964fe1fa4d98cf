// SPDX-License-Identifier: Apache-2.0
//
// Counters of the daemon in the text format of Prometheus.
#pragma once

#include <string>

#include "tools/verbena_cli/control_client.h"

namespace verbena::tools {

// `counters`: the answer to {"op":"counters"}.
std::string MetricsText(const Json& counters);

}  // namespace verbena::tools
