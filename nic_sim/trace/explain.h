// SPDX-License-Identifier: Apache-2.0
//
// Reads the daemon's trace (docs/CONTROL.md) for people: one line per event, and
// why a QP's completion failed. Pure; whatever the JSON holds, nothing throws.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nic_sim/trace/json_fields.h"

namespace verbena::nic {

// "-> RC_SEND_ONLY psn 100, 64 bytes, again"; without time, device and QP.
std::string EventText(const Json& event);
// The whole line; times are from `start_ns` on.
std::string EventLine(const Json& event, int64_t start_ns);

struct Explanation {
  // Empty: nothing has failed as far as the trace goes back.
  std::string status;  // "RETRY_EXC_ERR", ...
  uint32_t qpn = 0;
  std::string what;                  // a sentence
  std::vector<std::string> because;  // what the trace shows, the surest first
  std::vector<std::string> look_at;  // what to do next
  std::vector<Json> events;          // that led to it, oldest first
};

// `events`: of all QPs, oldest first; `rules`: `verbena fault list`. Without a
// QPN: the last QP of which a completion failed.
// Nothing failed: `because` tells what went less than smoothly (losses, repeats,
// waits), if anything.
Explanation Explain(const Json& events, const Json& rules, std::optional<uint32_t> qpn);

// As `verbena explain` prints it. `qpn`: what was asked for.
std::string ExplanationText(const Explanation& found, std::optional<uint32_t> qpn = {});

}  // namespace verbena::nic
