// SPDX-License-Identifier: Apache-2.0
//
// A scenario: programs over a private instance, faults and actions at their
// times, and what has to come of it. docs/SCENARIOS.md describes the file.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace verbena::tools {

using Milliseconds = std::chrono::milliseconds;

// When something happens: as soon as all that is said here is so, and then
// delay later. Nothing said: at the start.
struct Condition {
  std::optional<Milliseconds> at;       // since the scenario's start
  std::string line;                     // a regular expression, in the output ...
  std::string of;                       // ... of this program
  int port = 0;                         // somebody listens on this TCP port
  std::optional<int64_t> cm_listeners;  // so many rdma_cm ids listen
  std::string exit;                     // this program has ended
  std::string hit;                      // this rule has hit ...
  int64_t hits = 1;                     // ... so often
  Milliseconds delay{0};
  int source_line = 0;
};

struct ProgramSpec {
  std::string name;
  std::vector<std::string> command;
  std::vector<std::pair<std::string, std::string>> environment;
  bool verbena = true;  // under `verbena run`; else it sees no device
  Condition when;
};

// Both ends included.
struct Range {
  int64_t min = 0;
  int64_t max = INT64_MAX;
  bool Contains(int64_t value) const { return min <= value && value <= max; }
};

struct RuleSpec {
  std::string name;
  std::string fault;  // docs/FAULTS.md
  Condition when;
  std::optional<Condition> clear;
  Range hits{1, INT64_MAX};
};

struct ActionSpec {
  enum class Kind { kSignal, kKillDevice, kClearRules };
  Kind kind = Kind::kSignal;
  std::string text;  // as it was written
  int signal = 0;
  std::string program;  // kSignal: its whole process group
  Condition when;
};

// Fields of a trace event and the text of their values.
using Fields = std::map<std::string, std::string>;

struct Expectations {
  // Program -> statuses that are right (128 + signal for a death by signal); empty: any.
  // One that is not named must end with 0.
  struct Exit {
    std::vector<int> statuses;
    bool not_zero = false;
    bool still_runs = false;  // until the scenario ends it
  };
  std::map<std::string, Exit> exits;

  struct Output {
    std::string of, matches;
    bool absent = false;
  };
  std::vector<Output> outputs;

  struct Trace {
    Fields match;
    Range count{1, INT64_MAX};
  };
  std::vector<Trace> traces;  // also [[expect.event]] and [[expect.completion]]

  struct Counter {
    std::string device, name;
    Range value;
  };
  std::vector<Counter> counters;

  struct Explain {
    std::string qp = "last";
    std::optional<std::string> status;  // "" : nothing has failed
    std::vector<std::string> mentions;  // regular expressions
  };
  std::vector<Explain> explains;

  // How long a program ran, or from an event to the first `to` after it.
  struct Time {
    std::string of;
    Fields from, to;
    double min_ms = 0, max_ms = 1e12;
  };
  std::vector<Time> times;

  // From the first transmission of what was never acknowledged to RETRY_EXC_ERR:
  // (retry_cnt + 1) * 4.096 us * 2^timeout.
  struct Retry {
    int timeout = 0, retry_cnt = 7;
    double tolerance_percent = 20;
    double slack_ms = 0;  // besides, upwards: of a busy machine
  };
  std::vector<Retry> retries;
};

struct Scenario {
  std::string path;
  std::string name;  // of the file, and of the variant: "lost_ack", "timeouts[timeout=8]"
  std::string title;
  std::vector<std::string> cites;
  Milliseconds limit{30'000};
  int nics = 2;
  bool strict = false;
  std::string config;  // text of the daemon's configuration file
  std::vector<ProgramSpec> programs;
  std::vector<RuleSpec> rules;
  std::vector<ActionSpec> actions;
  Expectations expect;
};

// One per variant. `folder`: what {programs} stands for. On failure `error` is
// "PATH:LINE: field: sentence" and the list is empty.
std::vector<Scenario> LoadScenario(const std::string& path, const std::string& folder,
                                   std::string* error);

// Title and citations only, for lists.
struct ScenarioHead {
  std::string path, name, title;
  std::vector<std::string> cites;
};
std::optional<ScenarioHead> LoadScenarioHead(const std::string& path, std::string* error);

// --- What came of one.

struct ScenarioFinding {
  bool good = false;
  std::string text;  // "client ended with 0"
};

struct ScenarioResult {
  std::string name, title;
  bool started = false;  // false: `trouble` says why it could not run at all
  std::string trouble;
  std::vector<ScenarioFinding> findings;
  std::string detail;  // outputs of the programs, explain, last events
  double seconds = 0;

  bool good() const {
    if (!started || findings.empty()) return false;
    for (const ScenarioFinding& finding : findings) {
      if (!finding.good) return false;
    }
    return true;
  }
};

// Starts a private instance, runs it, ends everything. Bounded by its limit and
// the time that an instance takes to start and end.
ScenarioResult RunScenario(const Scenario& scenario);

std::string JUnitXml(const std::vector<ScenarioResult>& results);

}  // namespace verbena::tools
