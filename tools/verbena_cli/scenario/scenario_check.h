// SPDX-License-Identifier: Apache-2.0
//
// What came of a scenario, beside what should have.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/verbena_cli/control_client.h"
#include "tools/verbena_cli/scenario/scenario.h"

namespace verbena::tools {

struct Outcome {
  struct Program {
    bool started = false;
    bool ran_on = false;  // until the scenario ended it
    std::optional<int> status;
    std::string output;
    double seconds = 0;
  };
  std::map<std::string, Program> programs;
  std::vector<std::string> problems;  // what never happened, what took too long
  bool has_trace = false;             // false: the device is gone
  Json events = Json::array();
  Json rules = Json::array();  // {id, rule, hits}, in the scenario's order
  Json counters = Json::object();
  double seconds = 0;
};

std::vector<ScenarioFinding> Judge(const Scenario& scenario, const Outcome& outcome);

// Outputs, explanation and the last events, for people.
std::string Describe(const Scenario& scenario, const Outcome& outcome);

}  // namespace verbena::tools
