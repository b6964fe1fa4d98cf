// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/scenario/scenario_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/verbena_cli/explain.h"
#include "tools/verbena_cli/scenario/scenario_program.h"

namespace verbena::tools {
namespace {

constexpr size_t kEventsShown = 60;
constexpr size_t kOutputShown = 4000;

std::string Text(const Fields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) {
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value);
  }
  return text;
}

std::string Text(const Range& range) {
  if (range.min == range.max) return fmt::to_string(range.min);
  if (range.max == INT64_MAX) return fmt::format("at least {}", range.min);
  return fmt::format("{} to {}", range.min, range.max);
}

bool Matches(const Json& event, const Fields& fields) {
  for (const auto& [name, value] : fields) {
    const auto field = event.find(name);
    // What is not said is false: "retransmission".
    const std::string is = field == event.end()  ? "false"
                           : field->is_boolean() ? (field->get<bool>() ? "true" : "false")
                                                 : Printable(*field);
    if (is != value) return false;
  }
  return true;
}

double MillisecondsBetween(const Json& from, const Json& to) {
  return static_cast<double>(IntegerField(to, "time_ns") - IntegerField(from, "time_ns")) / 1e6;
}

class Judging {
 public:
  Judging(const Scenario& scenario, const Outcome& outcome)
      : expect_(scenario.expect), scenario_(scenario), outcome_(outcome) {}

  std::vector<ScenarioFinding> All() {
    for (const std::string& problem : outcome_.problems) Add(false, problem);
    for (const ProgramSpec& program : scenario_.programs) JudgeExit(program.name);
    for (size_t i = 0; i < scenario_.rules.size(); ++i) JudgeRule(i);
    for (const auto& output : expect_.outputs) {
      const bool has = ScenarioProgram::HasLine(Of(output.of).output, output.matches);
      Add(has != output.absent,
          fmt::format("{} {} '{}'", output.of, has ? "printed" : "did not print", output.matches));
    }
    for (const auto& trace : expect_.traces) JudgeTrace(trace);
    for (const auto& counter : expect_.counters) JudgeCounter(counter);
    for (const auto& explain : expect_.explains) JudgeExplain(explain);
    for (const auto& time : expect_.times) JudgeTime(time);
    for (const auto& retry : expect_.retries) JudgeRetry(retry);
    return std::move(findings_);
  }

 private:
  void Add(bool good, std::string text) { findings_.push_back({good, std::move(text)}); }
  const Outcome::Program& Of(const std::string& name) const { return outcome_.programs.at(name); }

  void JudgeExit(const std::string& name) {
    const Outcome::Program& program = Of(name);
    if (!program.started) return;  // a problem already
    Expectations::Exit expected;
    expected.statuses = {0};
    if (const auto said = expect_.exits.find(name); said != expect_.exits.end()) {
      expected = said->second;
    }
    if (program.ran_on) {
      Add(expected.still_runs, fmt::format("{} ran until the end of the scenario", name));
      return;
    }
    const int status = program.status.value_or(-1);
    const bool good = !expected.still_runs && (!expected.not_zero || status != 0) &&
                      (expected.statuses.empty() ||
                       std::ranges::find(expected.statuses, status) != expected.statuses.end());
    std::string wanted;
    if (expected.still_runs) wanted = "; it should have gone on";
    if (expected.not_zero) wanted = "; not 0 is right";
    if (!expected.statuses.empty() && !good) {
      wanted = fmt::format("; {} is right", fmt::join(expected.statuses, " or "));
    }
    Add(good,
        fmt::format("{} ended with {} after {:.2f} s{}", name, status, program.seconds, wanted));
  }

  void JudgeRule(size_t index) {
    const RuleSpec& rule = scenario_.rules[index];
    if (IntegerField(outcome_.rules[index], "id") == 0) return;
    const int64_t hits = IntegerField(outcome_.rules[index], "hits");
    const bool good = rule.hits.Contains(hits);
    Add(good, fmt::format("{} ('{}') has hit {}{}", rule.name, rule.fault, hits,
                          good ? "" : "; right is " + Text(rule.hits)));
  }

  bool NeedsTrace(const std::string& what) {
    if (outcome_.has_trace) return true;
    Add(false, what + ": the device is gone, and its trace");
    return false;
  }

  void JudgeTrace(const Expectations::Trace& trace) {
    if (!NeedsTrace(Text(trace.match))) return;
    const int64_t count = std::ranges::count_if(
        outcome_.events, [&](const Json& event) { return Matches(event, trace.match); });
    const bool good = trace.count.Contains(count);
    Add(good, fmt::format("{} of {}{}", count, Text(trace.match),
                          good ? "" : "; right is " + Text(trace.count)));
  }

  void JudgeCounter(const Expectations::Counter& counter) {
    const Json& device = ObjectField(outcome_.counters, counter.device.c_str());
    for (const char* group : {"counters", "hw_counters", "drops", "wire"}) {
      const Json& values = ObjectField(device, group);
      if (!values.contains(counter.name)) continue;
      const int64_t value = IntegerField(values, counter.name.c_str());
      const bool good = counter.value.Contains(value);
      Add(good, fmt::format("{} of {} is {}{}", counter.name, counter.device, value,
                            good ? "" : "; right is " + Text(counter.value)));
      return;
    }
    Add(false, fmt::format("there is no counter {} of {}", counter.name, counter.device));
  }

  void JudgeExplain(const Expectations::Explain& explain) {
    if (!NeedsTrace("explain")) return;
    const Explanation found = Explain(outcome_.events, outcome_.rules, {});
    if (explain.status) {
      Add(found.status == *explain.status,
          fmt::format(
              "explain: the status is '{}'{}", found.status,
              found.status == *explain.status ? "" : "; right is '" + *explain.status + "'"));
    }
    const std::string text = ExplanationText(found);
    for (const std::string& pattern : explain.mentions) {
      const bool has = ScenarioProgram::HasLine(text, pattern);
      Add(has, fmt::format("explain {} '{}'", has ? "says" : "does not say", pattern));
    }
  }

  void JudgeTime(const Expectations::Time& time) {
    const auto add = [&](double ms, const std::string& what) {
      const bool good = time.min_ms <= ms && ms <= time.max_ms;
      Add(good,
          fmt::format("{} {:.3f} ms{}", what, ms,
                      good ? std::string()
                           : fmt::format("; right is {} to {} ms", time.min_ms, time.max_ms)));
    };
    if (!time.of.empty()) return add(Of(time.of).seconds * 1000, time.of + " ran");
    const std::string what = fmt::format("from {} to {}", Text(time.from), Text(time.to));
    if (!NeedsTrace(what)) return;
    const Json* from = nullptr;
    for (const Json& event : outcome_.events) {
      if (from == nullptr) {
        if (Matches(event, time.from)) from = &event;
      } else if (Matches(event, time.to)) {
        return add(MillisecondsBetween(*from, event), what);
      }
    }
    Add(false, what + ": there are no such events");
  }

  void JudgeRetry(const Expectations::Retry& retry) {
    const double formula =
        (retry.retry_cnt + 1) * 4.096e-3 * std::pow(2.0, static_cast<double>(retry.timeout));
    if (!NeedsTrace("retries")) return;
    const Json& events = outcome_.events;
    const auto failure = std::ranges::find_if(events, [](const Json& event) {
      return TextField(event, "event") == "completion" &&
             TextField(event, "status") == "RETRY_EXC_ERR";
    });
    if (failure == events.end()) return Add(false, "no completion is RETRY_EXC_ERR");
    // What was sent most often is what was never acknowledged.
    std::map<int64_t, std::pair<const Json*, int>> sent;  // PSN -> the first time, how often
    for (auto event = events.begin(); event != failure; ++event) {
      if (IntegerField(*event, "qpn") != IntegerField(*failure, "qpn") ||
          TextField(*event, "event") != "sent" || event->contains("syndrome")) {
        continue;
      }
      auto& [first, count] = sent[IntegerField(*event, "psn")];
      if (first == nullptr) first = &*event;
      ++count;
    }
    const Json* first = nullptr;
    int most = 0;
    for (const auto& [psn, each] : sent) {
      if (each.second > most ||
          (each.second == most && first != nullptr &&
           IntegerField(*each.first, "time_ns") < IntegerField(*first, "time_ns"))) {
        most = each.second;
        first = each.first;
      }
    }
    if (first == nullptr) return Add(false, "nothing was sent before RETRY_EXC_ERR");
    const double ms = MillisecondsBetween(*first, *failure);
    const double tolerance = formula * retry.tolerance_percent / 100;
    const bool good = formula - tolerance <= ms && ms <= formula + tolerance + retry.slack_ms;
    Add(good,
        fmt::format("RETRY_EXC_ERR after {:.3f} ms; formula ({} + 1) * 4.096 us * 2^{} = "
                    "{:.3f} ms ({:+.1f} %)",
                    ms, retry.retry_cnt, retry.timeout, formula, (ms - formula) / formula * 100));
    Add(most == retry.retry_cnt + 1,
        fmt::format("it was sent {} times; retry_cnt + 1 = {}", most, retry.retry_cnt + 1));
  }

  const Expectations& expect_;
  const Scenario& scenario_;
  const Outcome& outcome_;
  std::vector<ScenarioFinding> findings_;
};

}  // namespace

std::vector<ScenarioFinding> Judge(const Scenario& scenario, const Outcome& outcome) {
  return Judging(scenario, outcome).All();
}

std::string Describe(const Scenario& scenario, const Outcome& outcome) {
  std::string text;
  for (const ProgramSpec& program : scenario.programs) {
    const std::string& output = outcome.programs.at(program.name).output;
    const size_t from = output.size() > kOutputShown ? output.size() - kOutputShown : 0;
    text += fmt::format("--- {}: {}\n{}{}\n", program.name, fmt::join(program.command, " "),
                        from != 0 ? "...\n" : "", output.substr(from));
  }
  if (!outcome.has_trace) return text;
  text += "--- explain\n" + ExplanationText(Explain(outcome.events, outcome.rules, {}));
  const size_t count = outcome.events.size();
  const size_t from = count > kEventsShown ? count - kEventsShown : 0;
  text += fmt::format("--- trace, the last {} of {} events\n", count - from, count);
  for (size_t i = from; i < count; ++i) {
    text += EventLine(outcome.events[i], IntegerField(outcome.events[0], "time_ns")) + "\n";
  }
  return text;
}

}  // namespace verbena::tools
