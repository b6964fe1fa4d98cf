// SPDX-License-Identifier: Apache-2.0
//
// Scenario files: TOML to Scenario, with errors that name line and field.
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <regex>
#include <set>
#include <string_view>

#include "tools/verbena_cli/scenario/scenario.h"

namespace verbena::tools {
namespace {

constexpr size_t kMostPrograms = 64;
constexpr size_t kMostVariants = 64;
constexpr int64_t kLongest = 3'600'000;  // ms

struct Failure {
  int line = 0;
  std::string text;
};

// {word} -> value.
using Words = std::map<std::string, std::string>;

std::string FileName(const std::string& path) {
  std::string name = path.substr(path.rfind('/') + 1);
  if (name.ends_with(".toml")) name.resize(name.size() - 5);
  return name;
}

// A TCP port that nobody has now.
int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  socklen_t length = sizeof(address);
  int port = 0;
  if (fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0) {
    port = ntohs(address.sin_port);
  }
  if (fd >= 0) close(fd);
  return port;
}

int LineOf(const toml::node& node) { return static_cast<int>(node.source().begin.line); }

// Words of a shell-like command: blanks separate, ' and " hold together.
std::vector<std::string> SplitCommand(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  bool in_word = false;
  char quote = 0;
  for (const char c : text) {
    if (quote != 0) {
      if (c == quote) {
        quote = 0;
      } else {
        word += c;
      }
    } else if (c == '\'' || c == '"') {
      quote = c;
      in_word = true;
    } else if (c == ' ' || c == '\n' || c == '\t') {
      if (in_word) words.push_back(std::move(word));
      word.clear();
      in_word = false;
    } else {
      word += c;
      in_word = true;
    }
  }
  if (in_word) words.push_back(std::move(word));
  return words;
}

class Reader {
 public:
  Reader(const Words& words, Scenario* out) : words_(words), out_(*out) {}

  void Read(const toml::table& file) {
    Known(file, {"title", "cites", "limit_s", "topology", "variants", "program", "rule", "action",
                 "expect"});
    out_.title = Text(file, "title", true);
    out_.cites = Texts(file, "cites");
    if (out_.cites.empty())
      Fail(file, "cites", "say what this is about: a section, a paper, a need");
    out_.limit = Milliseconds(std::llround(Real(file, "limit_s", 30, 0.1, 3600) * 1000));
    if (const toml::table* topology = Table(file, "topology")) ReadTopology(*topology);
    ForEach(file, "program", [this](const toml::table& t) { ReadProgram(t); });
    if (out_.programs.empty()) Fail(file, "program", "there is none");
    ForEach(file, "rule", [this](const toml::table& t) { ReadRule(t); });
    ForEach(file, "action", [this](const toml::table& t) { ReadAction(t); });
    if (const toml::table* expect = Table(file, "expect")) ReadExpect(*expect);
    Check(file);
  }

 private:
  [[noreturn]] static void Fail(const toml::node& node, std::string_view field,
                                std::string_view what) {
    throw Failure{LineOf(node), fmt::format("{}: {}", field, what)};
  }

  static void Known(const toml::table& table, std::initializer_list<std::string_view> keys) {
    for (const auto& [key, node] : table) {
      if (std::ranges::find(keys, key.str()) == keys.end()) {
        Fail(node, key.str(), fmt::format("no such field; there are {}", fmt::join(keys, ", ")));
      }
    }
  }

  std::string Filled(const toml::node& node, std::string_view field, std::string text) const {
    for (size_t at = 0; (at = text.find('{', at)) != std::string::npos;) {
      const size_t end = text.find('}', at);
      const auto word =
          end == std::string::npos ? words_.end() : words_.find(text.substr(at + 1, end - at - 1));
      if (word == words_.end()) {
        // Regular expressions have {2}: only words are names.
        if (at + 1 < text.size() && std::islower(static_cast<unsigned char>(text[at + 1])) != 0) {
          Fail(node, field, fmt::format("nothing stands for '{}'", text.substr(at, end - at + 1)));
        }
        ++at;
        continue;
      }
      text.replace(at, end - at + 1, word->second);
      at += word->second.size();
    }
    return text;
  }

  std::string TextOf(const toml::node& node, std::string_view field) const {
    const auto text = node.value<std::string>();
    if (!node.is_string() || !text) Fail(node, field, "a text is wanted");
    return Filled(node, field, *text);
  }

  std::string Text(const toml::table& table, std::string_view key, bool needed = false) const {
    const toml::node* node = table.get(key);
    if (node == nullptr) {
      if (needed) Fail(table, key, "is missing");
      return {};
    }
    return TextOf(*node, key);
  }

  // A text or a list of texts.
  std::vector<std::string> Texts(const toml::table& table, std::string_view key) const {
    std::vector<std::string> texts;
    const toml::node* node = table.get(key);
    if (node == nullptr) return texts;
    if (const toml::array* list = node->as_array()) {
      for (const toml::node& item : *list) texts.push_back(TextOf(item, key));
    } else {
      texts.push_back(TextOf(*node, key));
    }
    return texts;
  }

  int64_t IntegerOf(const toml::node& node, std::string_view key, int64_t low, int64_t high) const {
    int64_t number = 0;
    if (const auto value = node.value<int64_t>(); node.is_integer() && value) {
      number = *value;
    } else if (node.is_string()) {  // "{timeout}" of a variant
      const std::string text = TextOf(node, key);
      char* end = nullptr;
      number = std::strtoll(text.c_str(), &end, 10);
      if (text.empty() || *end != '\0') Fail(node, key, "a number is wanted");
    } else {
      Fail(node, key, "a whole number is wanted");
    }
    if (number < low || number > high) {
      Fail(node, key, fmt::format("{} is not between {} and {}", number, low, high));
    }
    return number;
  }

  int64_t Integer(const toml::table& table, std::string_view key, int64_t fallback, int64_t low,
                  int64_t high) const {
    const toml::node* node = table.get(key);
    return node == nullptr ? fallback : IntegerOf(*node, key, low, high);
  }

  double Real(const toml::table& table, std::string_view key, double fallback, double low,
              double high) const {
    const toml::node* node = table.get(key);
    if (node == nullptr) return fallback;
    const auto value = node->value<double>();
    if (!node->is_number() || !value || !(*value >= low && *value <= high)) {
      Fail(*node, key, fmt::format("a number between {} and {} is wanted", low, high));
    }
    return *value;
  }

  bool Boolean(const toml::table& table, std::string_view key, bool fallback) const {
    const toml::node* node = table.get(key);
    if (node == nullptr) return fallback;
    if (!node->is_boolean()) Fail(*node, key, "true or false is wanted");
    return node->value<bool>().value_or(fallback);
  }

  const toml::table* Table(const toml::table& table, std::string_view key) const {
    const toml::node* node = table.get(key);
    if (node == nullptr) return nullptr;
    if (!node->is_table()) Fail(*node, key, "a table is wanted");
    return node->as_table();
  }

  template <typename Visit>
  void ForEach(const toml::table& table, std::string_view key, Visit visit) const {
    const toml::node* node = table.get(key);
    if (node == nullptr) return;
    const toml::array* list = node->as_array();
    if (list == nullptr) Fail(*node, key, fmt::format("write [[{}]]", key));
    for (const toml::node& item : *list) {
      if (!item.is_table()) Fail(item, key, fmt::format("write [[{}]]", key));
      visit(*item.as_table());
    }
  }

  std::string Pattern(const toml::table& table, std::string_view key, bool needed) const {
    std::string text = Text(table, key, needed);
    CheckPattern(table, key, text);
    return text;
  }
  static void CheckPattern(const toml::node& where, std::string_view key, const std::string& text) {
    try {
      std::regex probe(text);
    } catch (const std::regex_error& error) {
      Fail(where, key, fmt::format("not a regular expression: {}", error.what()));
    }
  }

  // min/max, or count/value for both.
  Range ReadRange(const toml::table& table, std::string_view exact, int64_t least) const {
    Range range{Integer(table, "min", least, 0, INT64_MAX),
                Integer(table, "max", INT64_MAX, 0, INT64_MAX)};
    if (const toml::node* node = table.get(exact)) {
      range.min = range.max = IntegerOf(*node, exact, 0, INT64_MAX);
    } else if (range.max < range.min && !table.contains("min")) {
      range.min = 0;
    }
    if (range.max < range.min) Fail(table, "max", "is less than min");
    return range;
  }

  Fields ReadFields(const toml::table& table, std::string_view key) const {
    Fields fields;
    const toml::table* match = Table(table, key);
    if (match == nullptr) Fail(table, key, "is missing");
    for (const auto& [name, node] : *match) {
      std::string value;
      if (node.is_boolean()) {
        value = *node.value<bool>() ? "true" : "false";
      } else if (node.is_integer()) {
        value = fmt::to_string(*node.value<int64_t>());
      } else {
        value = TextOf(node, name.str());
      }
      fields.emplace(name.str(), value);
    }
    if (fields.empty()) Fail(*match, key, "is empty");
    return fields;
  }

  Condition ReadCondition(const toml::table& table, std::string_view key) const {
    Condition when;
    const toml::table* t = Table(table, key);
    if (t == nullptr) return when;
    Known(*t, {"at_ms", "line", "of", "port", "cm_listeners", "exit", "hit", "hits", "delay_ms"});
    when.source_line = LineOf(*t);
    if (t->contains("at_ms")) when.at = Milliseconds(Integer(*t, "at_ms", 0, 0, kLongest));
    when.line = Pattern(*t, "line", false);
    when.of = Text(*t, "of");
    if (when.line.empty() != when.of.empty()) Fail(*t, "line", "line and of come together");
    when.port = static_cast<int>(Integer(*t, "port", 0, 1, 65535));
    if (t->contains("cm_listeners")) when.cm_listeners = Integer(*t, "cm_listeners", 1, 0, 1000);
    when.exit = Text(*t, "exit");
    when.hit = Text(*t, "hit");
    when.hits = Integer(*t, "hits", 1, 1, INT64_MAX);
    when.delay = Milliseconds(Integer(*t, "delay_ms", 0, 0, kLongest));
    return when;
  }

  void ReadTopology(const toml::table& t) {
    Known(t, {"nics", "strict", "config"});
    out_.nics = static_cast<int>(Integer(t, "nics", 2, 1, 64));
    out_.strict = Boolean(t, "strict", false);
    out_.config = Text(t, "config");
  }

  void ReadProgram(const toml::table& t) {
    Known(t, {"name", "command", "env", "verbena", "when"});
    ProgramSpec program;
    program.name = Text(t, "name", true);
    const toml::node* command = t.get("command");
    if (command == nullptr) Fail(t, "command", "is missing");
    program.command = command->is_array() ? Texts(t, "command") : SplitCommand(Text(t, "command"));
    if (program.command.empty() || program.command[0].empty())
      Fail(*command, "command", "is empty");
    if (const toml::table* environment = Table(t, "env")) {
      for (const auto& [key, node] : *environment) {
        program.environment.emplace_back(key.str(), TextOf(node, key.str()));
      }
    }
    program.verbena = Boolean(t, "verbena", true);
    program.when = ReadCondition(t, "when");
    if (!program_names_.insert(program.name).second) Fail(t, "name", "two programs have it");
    if (out_.programs.size() == kMostPrograms) Fail(t, "program", "too many");
    out_.programs.push_back(std::move(program));
  }

  void ReadRule(const toml::table& t) {
    Known(t, {"name", "fault", "when", "clear", "hits", "min", "max"});
    RuleSpec rule;
    rule.fault = Text(t, "fault", true);
    rule.name = Text(t, "name");
    if (rule.name.empty()) rule.name = fmt::format("rule {}", out_.rules.size() + 1);
    rule.when = ReadCondition(t, "when");
    if (t.contains("clear")) rule.clear = ReadCondition(t, "clear");
    rule.hits = ReadRange(t, "hits", 1);
    if (!rule_names_.insert(rule.name).second) Fail(t, "name", "two rules have it");
    if (out_.rules.size() == kMostPrograms) Fail(t, "rule", "too many");
    out_.rules.push_back(std::move(rule));
  }

  void ReadAction(const toml::table& t) {
    Known(t, {"do", "program", "when"});
    ActionSpec action;
    const std::string what = Text(t, "do", true);
    action.program = Text(t, "program");
    const std::map<std::string, int> signals = {{"kill", SIGKILL},
                                                {"stop", SIGSTOP},
                                                {"continue", SIGCONT},
                                                {"interrupt", SIGINT},
                                                {"terminate", SIGTERM}};
    if (const auto found = signals.find(what); found != signals.end()) {
      action.signal = found->second;
      if (!program_names_.contains(action.program)) Fail(t, "program", "no program has that name");
      action.text = fmt::format("{} {}", what, action.program);
    } else if (what == "kill_device") {
      action.kind = ActionSpec::Kind::kKillDevice;
      action.text = "kill the device";
    } else if (what == "clear_rules") {
      action.kind = ActionSpec::Kind::kClearRules;
      action.text = "clear all rules";
    } else {
      Fail(t, "do",
           "there are kill, stop, continue, interrupt, terminate, kill_device, clear_rules");
    }
    action.when = ReadCondition(t, "when");
    if (out_.actions.size() == kMostPrograms) Fail(t, "action", "too many");
    out_.actions.push_back(std::move(action));
  }

  void ReadExit(const toml::table& t) {
    for (const auto& [key, node] : t) {
      if (!program_names_.contains(std::string(key.str()))) {
        Fail(node, key.str(), "no program has that name");
      }
      Expectations::Exit exit;
      if (const toml::array* list = node.as_array()) {
        for (const toml::node& item : *list) {
          exit.statuses.push_back(static_cast<int>(IntegerOf(item, key.str(), 0, 255)));
        }
      } else if (node.is_integer()) {
        exit.statuses.push_back(static_cast<int>(IntegerOf(node, key.str(), 0, 255)));
      } else {
        const std::string text = TextOf(node, key.str());
        if (text == "killed") {
          exit.statuses.push_back(128 + SIGKILL);
        } else if (text == "failure") {
          exit.not_zero = true;
        } else if (text == "runs") {
          exit.still_runs = true;
        } else if (text != "any") {
          Fail(node, key.str(), "a status, or failure, killed, runs, any");
        }
      }
      out_.expect.exits.emplace(key.str(), exit);
    }
  }

  void ReadExpect(const toml::table& t) {
    Known(t, {"exit", "output", "trace", "event", "completion", "counter", "explain", "time",
              "retry"});
    if (const toml::table* exits = Table(t, "exit")) ReadExit(*exits);
    ForEach(t, "output", [this](const toml::table& e) {
      Known(e, {"of", "matches", "absent"});
      const bool absent = e.contains("absent");
      const std::string of = Text(e, "of", true);
      if (!program_names_.contains(of)) Fail(e, "of", "no program has that name");
      out_.expect.outputs.push_back({of, Pattern(e, absent ? "absent" : "matches", true), absent});
    });
    ForEach(t, "trace", [this](const toml::table& e) {
      Known(e, {"match", "min", "max", "count"});
      out_.expect.traces.push_back({ReadFields(e, "match"), ReadRange(e, "count", 1)});
    });
    ForEach(t, "event", [this](const toml::table& e) {
      Known(e, {"type", "dev", "min", "max", "count"});
      Fields match = {{"event", "async_event"}, {"type", Text(e, "type", true)}};
      if (e.contains("dev")) match.emplace("device", Text(e, "dev"));
      out_.expect.traces.push_back({std::move(match), ReadRange(e, "count", 1)});
    });
    ForEach(t, "completion", [this](const toml::table& e) {
      Known(e, {"status", "dev", "queue", "opcode", "min", "max", "count"});
      Fields match = {{"event", "completion"}, {"status", Text(e, "status", true)}};
      for (const char* key : {"queue", "opcode"}) {
        if (e.contains(key)) match.emplace(key, Text(e, key));
      }
      if (e.contains("dev")) match.emplace("device", Text(e, "dev"));
      out_.expect.traces.push_back({std::move(match), ReadRange(e, "count", 1)});
    });
    ForEach(t, "counter", [this](const toml::table& e) {
      Known(e, {"dev", "name", "min", "max", "value"});
      out_.expect.counters.push_back(
          {Text(e, "dev", true), Text(e, "name", true), ReadRange(e, "value", 1)});
    });
    ForEach(t, "explain", [this](const toml::table& e) {
      Known(e, {"status", "mentions"});
      Expectations::Explain explain;
      if (e.contains("status")) explain.status = Text(e, "status");
      explain.mentions = Texts(e, "mentions");
      for (const std::string& pattern : explain.mentions) CheckPattern(e, "mentions", pattern);
      out_.expect.explains.push_back(std::move(explain));
    });
    ForEach(t, "time", [this](const toml::table& e) {
      Known(e, {"of", "from", "to", "min_ms", "max_ms"});
      Expectations::Time time;
      time.of = Text(e, "of");
      if (time.of.empty()) {
        time.from = ReadFields(e, "from");
        time.to = ReadFields(e, "to");
      } else if (!program_names_.contains(time.of)) {
        Fail(e, "of", "no program has that name");
      }
      time.min_ms = Real(e, "min_ms", 0, 0, 1e12);
      time.max_ms = Real(e, "max_ms", 1e12, 0, 1e12);
      out_.expect.times.push_back(std::move(time));
    });
    ForEach(t, "retry", [this](const toml::table& e) {
      Known(e, {"timeout", "retry_cnt", "tolerance_percent", "slack_ms"});
      out_.expect.retries.push_back({static_cast<int>(Integer(e, "timeout", 0, 1, 31)),
                                     static_cast<int>(Integer(e, "retry_cnt", 7, 0, 7)),
                                     Real(e, "tolerance_percent", 20, 0, 1000),
                                     Real(e, "slack_ms", 0, 0, 1e6)});
    });
  }

  // Names in conditions, which may be of programs and rules further down.
  void Check(const toml::table& file) const {
    const auto check = [&](const Condition& when) {
      for (const std::string& name : {when.of, when.exit}) {
        if (!name.empty() && !program_names_.contains(name)) {
          throw Failure{when.source_line, fmt::format("when: no program is named '{}'", name)};
        }
      }
      if (!when.hit.empty() && !rule_names_.contains(when.hit)) {
        throw Failure{when.source_line, fmt::format("when: no rule is named '{}'", when.hit)};
      }
    };
    for (const ProgramSpec& program : out_.programs) check(program.when);
    for (const ActionSpec& action : out_.actions) check(action.when);
    for (const RuleSpec& rule : out_.rules) {
      check(rule.when);
      if (rule.clear) check(*rule.clear);
    }
    (void)file;
  }

  const Words& words_;
  Scenario& out_;
  std::set<std::string> program_names_, rule_names_;
};

// The combinations of [variants]: one empty one without.
std::vector<std::vector<std::pair<std::string, std::string>>> Variants(const toml::table& file) {
  std::vector<std::vector<std::pair<std::string, std::string>>> variants(1);
  const toml::node* node = file.get("variants");
  if (node == nullptr) return variants;
  if (!node->is_table()) throw Failure{LineOf(*node), "variants: a table is wanted"};
  for (const auto& [key, values] : *node->as_table()) {
    const toml::array* list = values.as_array();
    if (list == nullptr || list->empty()) {
      throw Failure{LineOf(values), fmt::format("{}: a list of values is wanted", key.str())};
    }
    std::vector<std::vector<std::pair<std::string, std::string>>> more;
    for (const auto& variant : variants) {
      for (const toml::node& value : *list) {
        std::string text;
        if (value.is_integer()) {
          text = fmt::to_string(*value.value<int64_t>());
        } else if (value.is_string()) {
          text = *value.value<std::string>();
        } else {
          throw Failure{LineOf(value), fmt::format("{}: texts or whole numbers", key.str())};
        }
        more.push_back(variant);
        more.back().emplace_back(key.str(), text);
      }
    }
    if (more.size() > kMostVariants) throw Failure{LineOf(values), "variants: too many"};
    variants = std::move(more);
  }
  return variants;
}

std::optional<toml::table> ParseFile(const std::string& path, std::string* error) {
  try {
    return toml::parse_file(path);
  } catch (const toml::parse_error& failure) {
    const int line = static_cast<int>(failure.source().begin.line);
    *error = line > 0 ? fmt::format("{}:{}: {}", path, line, failure.description())
                      : fmt::format("{}: {}", path, failure.description());
  }
  return {};
}

}  // namespace

std::vector<Scenario> LoadScenario(const std::string& path, const std::string& folder,
                                   std::string* error) {
  const std::optional<toml::table> file = ParseFile(path, error);
  if (!file) return {};
  std::vector<Scenario> scenarios;
  try {
    for (const auto& variant : Variants(*file)) {
      Words words = {{"programs", folder}};
      for (const char* port : {"port", "port2", "port3", "port4"}) {
        words[port] = fmt::to_string(FreePort());
      }
      Scenario scenario;
      scenario.path = path;
      scenario.name = FileName(path);
      std::string suffix;
      for (const auto& [key, value] : variant) {
        words[key] = value;
        suffix += fmt::format("{}{}={}", suffix.empty() ? "" : ",", key, value);
      }
      if (!suffix.empty()) scenario.name += "[" + suffix + "]";
      Reader(words, &scenario).Read(*file);
      scenarios.push_back(std::move(scenario));
    }
  } catch (const Failure& failure) {
    *error = fmt::format("{}:{}: {}", path, failure.line, failure.text);
    return {};
  }
  return scenarios;
}

std::optional<ScenarioHead> LoadScenarioHead(const std::string& path, std::string* error) {
  const std::optional<toml::table> file = ParseFile(path, error);
  if (!file) return {};
  ScenarioHead head;
  head.path = path;
  head.name = FileName(path);
  head.title = (*file)["title"].value_or(std::string());
  if (const toml::array* cites = (*file)["cites"].as_array()) {
    for (const toml::node& cite : *cites) head.cites.push_back(cite.value_or(std::string()));
  } else if (const auto cite = (*file)["cites"].value<std::string>()) {
    head.cites.push_back(*cite);
  }
  return head;
}

}  // namespace verbena::tools
