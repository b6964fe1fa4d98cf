// SPDX-License-Identifier: Apache-2.0
//
// Runs one scenario: a private instance, the loop that lets things happen when
// their condition is met, and the end of everything that was started.
#include <dirent.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "nic_sim/runtime/run_folder.h"
#include "tools/verbena_cli/control_client.h"
#include "tools/verbena_cli/environment.h"
#include "tools/verbena_cli/launcher.h"
#include "tools/verbena_cli/scenario/scenario.h"
#include "tools/verbena_cli/scenario/scenario_check.h"
#include "tools/verbena_cli/scenario/scenario_program.h"

namespace verbena::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kInstance[] = "scenario";
constexpr int kPauseMs = 4;
constexpr Milliseconds kAskPause(10);  // between questions to the daemon
constexpr Milliseconds kEndLimit(10'000);
constexpr int64_t kMostEvents = 100'000;

volatile sig_atomic_t g_interrupted = 0;
void Interrupted(int) { g_interrupted = 1; }

// A folder of its own for the daemon; what the environment said is put back.
class PrivateFolder {
 public:
  PrivateFolder() {
    for (const char* name : {"XDG_RUNTIME_DIR", "VERBENA_SOCKET", "VERBENA_NAME"}) {
      const char* value = getenv(name);
      saved_.emplace_back(name,
                          value != nullptr ? std::optional<std::string>(value) : std::nullopt);
      unsetenv(name);
    }
    const char* const parent = getenv("TMPDIR");
    std::string path(parent != nullptr && *parent == '/' ? parent : "/tmp");
    path += "/verbena-scenario.XXXXXX";
    if (mkdtemp(path.data()) == nullptr) return;
    path_ = path;
    setenv("XDG_RUNTIME_DIR", path_.c_str(), 1);
  }
  ~PrivateFolder() {
    for (const auto& [name, value] : saved_) {
      if (value) {
        setenv(name, value->c_str(), 1);
      } else {
        unsetenv(name);
      }
    }
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::vector<std::pair<const char*, std::optional<std::string>>> saved_;
  std::string path_;
};

std::vector<pid_t> ChildrenOf(pid_t parent) {
  std::vector<pid_t> children;
  DIR* proc = opendir("/proc");
  if (proc == nullptr) return children;
  while (const dirent* entry = readdir(proc)) {
    const pid_t pid = static_cast<pid_t>(std::atoi(entry->d_name));
    if (pid > 0 && ParentOf(pid) == parent) children.push_back(pid);
  }
  closedir(proc);
  return children;
}

std::string ProgramOf(pid_t pid) {
  std::error_code ignored;
  return std::filesystem::read_symlink(fmt::format("/proc/{}/exe", pid), ignored).string();
}

bool ListensOn(int port) {
  const std::string wanted = fmt::format(":{:04X}", port);
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string number, local, remote, state, rest;
    std::getline(file, rest);
    while (file >> number >> local >> remote >> state && std::getline(file, rest)) {
      if (state == "0A" && local.ends_with(wanted)) return true;
    }
  }
  return false;
}

class Run {
 public:
  Run(const Scenario& scenario, const Parts& parts) : scenario_(scenario), parts_(parts) {}

  // Empty, or why nothing could be started.
  std::string Start(const std::string& folder) {
    for (const ProgramSpec& program : scenario_.programs) {
      if (std::string problem = ScenarioProgram::Missing(program.command); !problem.empty()) {
        return fmt::format("program {}: {}", program.name, problem);
      }
    }
    const nic::PathResult run_folder = nic::CreateRunFolder(/*system=*/false);
    if (!run_folder.ok()) return run_folder.error;
    DaemonOptions daemon;
    daemon.name = kInstance;
    daemon.nics = scenario_.nics;
    daemon.strict = scenario_.strict;
    // If this process is killed.
    daemon.exit_idle_s = static_cast<int>(scenario_.limit.count() / 1000) + 30;
    if (!scenario_.config.empty()) {
      daemon.config = folder + "/config.toml";
      std::ofstream(daemon.config) << scenario_.config;
    }
    if (std::string problem = StartDaemon(parts_, daemon); !problem.empty()) return problem;
    const nic::PathResult socket = nic::SocketPath(nic::RunFolder(/*system=*/false), kInstance);
    if (!socket.ok()) return socket.error;
    socket_ = socket.value;
    if (std::string problem = client_.Connect(socket_); !problem.empty()) return problem;
    std::string problem;
    environment_ = ApplicationEnvironment(parts_, socket_, &problem);
    return problem;
  }

  void Loop() {
    begin_ = Clock::now();
    programs_.resize(scenario_.programs.size());
    program_due_.resize(programs_.size());
    rules_.resize(scenario_.rules.size());
    action_due_.resize(scenario_.actions.size());
    for (auto& program : programs_) program = std::make_unique<ScenarioProgram>();
    while (Step()) {
      if (g_interrupted != 0) {
        outcome_.problems.emplace_back("interrupted");
        break;
      }
      if (Clock::now() - begin_ > scenario_.limit) {
        for (size_t i = 0; i < programs_.size(); ++i) {
          if (programs_[i]->running() && !StaysOn(scenario_.programs[i].name)) {
            outcome_.problems.push_back(fmt::format(
                "{} still runs after {} ms", scenario_.programs[i].name, scenario_.limit.count()));
          }
        }
        if (outcome_.problems.empty()) outcome_.problems.emplace_back("its time is over");
        break;
      }
      poll(nullptr, 0, kPauseMs);
    }
    AddMissing();
  }

  // What the daemon knows, then the end of all programs.
  Outcome Collect() {
    outcome_.seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    AskHits();
    outcome_.rules = Json::array();
    for (size_t i = 0; i < rules_.size(); ++i) {
      outcome_.rules.push_back(
          {{"id", rules_[i].id}, {"rule", scenario_.rules[i].fault}, {"hits", rules_[i].hits}});
    }
    // Tens of thousands of events: a busy machine may take long over them.
    const Reply trace =
        client_.Request({{"op", "trace"}, {"limit", kMostEvents}}, -1, 6 * ControlClient::kTimeout);
    outcome_.has_trace = trace.ok();
    outcome_.events = trace.ok() ? ArrayField(trace.json, "events") : Json::array();
    const Reply counters = client_.Request({{"op", "counters"}});
    outcome_.counters = counters.ok() ? ObjectField(counters.json, "devices") : Json::object();
    for (size_t i = 0; i < programs_.size(); ++i) {
      ScenarioProgram& program = *programs_[i];
      Outcome::Program end;
      end.started = program.started();
      end.ran_on = program.running();
      program.Kill();
      end.status = program.status();
      end.output = program.output();
      end.seconds = program.seconds();
      outcome_.programs.emplace(scenario_.programs[i].name, std::move(end));
    }
    return std::move(outcome_);
  }

  // Nothing that was started is left.
  void End() {
    programs_.clear();
    if (client_.connected() && client_.Request({{"op", "shutdown"}}).ok()) {
      client_.WaitClosed(kEndLimit);
    }
    // The daemon and what programs have left: all children of this process now.
    const Clock::time_point patience = Clock::now() + kEndLimit;
    while (true) {
      const std::vector<pid_t> children = ChildrenOf(getpid());
      if (children.empty()) break;
      const bool late = Clock::now() > patience;
      for (const pid_t child : children) {
        int status = 0;
        if (waitpid(child, &status, WNOHANG) == child) continue;
        const bool is_daemon = ProgramOf(child) == parts_.daemon;
        if (!is_daemon || late) kill(child, SIGKILL);
        if (is_daemon && !late && !asked_to_end_) kill(child, SIGTERM);
      }
      asked_to_end_ = true;
      poll(nullptr, 0, kPauseMs);
    }
  }

 private:
  struct Due {
    std::optional<Clock::time_point> met;  // when the condition was
    bool done = false;
  };
  struct RuleState {
    int64_t id = 0;
    int64_t hits = 0;
    Due add, clear;
  };

  bool StaysOn(const std::string& name) const {
    const auto exit = scenario_.expect.exits.find(name);
    return exit != scenario_.expect.exits.end() && exit->second.still_runs;
  }

  ScenarioProgram* Find(const std::string& name) const {
    for (size_t i = 0; i < programs_.size(); ++i) {
      if (scenario_.programs[i].name == name) return programs_[i].get();
    }
    return nullptr;
  }

  Json Ask(const Json& request) {
    const Reply reply = client_.Request(request);
    return reply.ok() ? reply.json : Json::object();
  }

  void AskHits() {
    const Json reply = Ask({{"op", "fault_list"}});
    for (const Json& rule : ArrayField(reply, "rules")) {
      for (RuleState& state : rules_) {
        if (state.id != 0 && state.id == IntegerField(rule, "id")) {
          state.hits = IntegerField(rule, "hits");
        }
      }
    }
  }

  // At most every kAskPause: what conditions want to know from the daemon.
  void AskDaemon() {
    if (Clock::now() < next_question_) return;
    next_question_ = Clock::now() + kAskPause;
    if (wants_hits_) AskHits();
    if (wants_listeners_) {
      listeners_ = 0;
      const Json ids = Ask({{"op", "list"}, {"what", "cm_id"}});
      for (const Json& id : ArrayField(ids, "items")) {
        listeners_ += TextField(id, "state") == "listen";
      }
    }
    wants_hits_ = wants_listeners_ = false;
  }

  bool IsMet(const Condition& when) {
    if (when.at && Clock::now() - begin_ < *when.at) return false;
    if (!when.line.empty() && !ScenarioProgram::HasLine(Find(when.of)->output(), when.line)) {
      return false;
    }
    if (when.port != 0 && !ListensOn(when.port)) return false;
    if (!when.exit.empty() && !Find(when.exit)->status()) return false;
    if (when.cm_listeners) {
      wants_listeners_ = true;
      if (listeners_ < *when.cm_listeners) return false;
    }
    if (!when.hit.empty()) {
      wants_hits_ = true;
      for (size_t i = 0; i < rules_.size(); ++i) {
        if (scenario_.rules[i].name == when.hit && rules_[i].hits < when.hits) return false;
      }
    }
    return true;
  }

  bool IsDue(const Condition& when, Due* due) {
    if (due->done) return false;
    if (!due->met && IsMet(when)) due->met = Clock::now();
    if (!due->met || Clock::now() < *due->met + when.delay) return false;
    due->done = true;
    return true;
  }

  // False: there is nothing more to wait for.
  bool Step() {
    for (const auto& program : programs_) program->Look();
    AskDaemon();
    for (size_t i = 0; i < rules_.size(); ++i) StepRule(scenario_.rules[i], &rules_[i]);
    for (size_t i = 0; i < programs_.size(); ++i) {
      if (IsDue(scenario_.programs[i].when, &program_due_[i])) StartProgram(i);
    }
    for (size_t i = 0; i < scenario_.actions.size(); ++i) {
      if (IsDue(scenario_.actions[i].when, &action_due_[i])) Act(scenario_.actions[i]);
    }
    for (size_t i = 0; i < programs_.size(); ++i) {
      if (StaysOn(scenario_.programs[i].name) && programs_[i]->started()) continue;
      if (!programs_[i]->status()) return true;
    }
    return false;
  }

  void StepRule(const RuleSpec& rule, RuleState* state) {
    if (IsDue(rule.when, &state->add)) {
      const Reply reply = client_.Request({{"op", "fault_add"}, {"rule", rule.fault}});
      if (reply.ok()) {
        state->id = IntegerField(reply.json, "id");
      } else {
        outcome_.problems.push_back(
            fmt::format("{}: '{}': {}", rule.name, rule.fault, reply.error));
      }
    }
    if (rule.clear && state->id != 0 && IsDue(*rule.clear, &state->clear)) {
      AskHits();
      client_.Request({{"op", "fault_clear"}, {"id", state->id}});
    }
  }

  void StartProgram(size_t index) {
    const ProgramSpec& spec = scenario_.programs[index];
    Variables variables = spec.verbena ? environment_ : Variables();
    variables.emplace_back("LC_ALL", "C");
    for (const auto& each : spec.environment) variables.push_back(each);
    const std::string problem = programs_[index]->Start(spec.command, variables);
    if (!problem.empty()) outcome_.problems.push_back(spec.name + ": " + problem);
  }

  void Act(const ActionSpec& action) {
    switch (action.kind) {
      case ActionSpec::Kind::kSignal:
        Find(action.program)->Signal(action.signal);
        return;
      case ActionSpec::Kind::kClearRules:
        AskHits();
        client_.Request({{"op", "fault_clear"}});
        return;
      case ActionSpec::Kind::kKillDevice:
        AskHits();
        KillDevice();
        return;
    }
  }

  // The engine process; the supervisor stays and tells the programs.
  void KillDevice() {
    pid_t pid = static_cast<pid_t>(IntegerField(Ask({{"op", "status"}}), "pid"));
    if (pid <= 1) return outcome_.problems.emplace_back("the device has no process"), void();
    if (ProgramOf(ParentOf(pid)) != ProgramOf(pid)) {
      const std::vector<pid_t> children = ChildrenOf(pid);
      if (!children.empty()) pid = children.front();
    }
    kill(pid, SIGKILL);
  }

  void AddMissing() {
    for (size_t i = 0; i < programs_.size(); ++i) {
      if (!program_due_[i].done) {
        outcome_.problems.push_back(scenario_.programs[i].name + " was never started");
      }
    }
    for (size_t i = 0; i < rules_.size(); ++i) {
      if (!rules_[i].add.done) {
        outcome_.problems.push_back(scenario_.rules[i].name + ": its time never came");
      }
    }
    for (size_t i = 0; i < action_due_.size(); ++i) {
      if (!action_due_[i].done) {
        outcome_.problems.push_back("the time to " + scenario_.actions[i].text + " never came");
      }
    }
  }

  const Scenario& scenario_;
  const Parts& parts_;
  std::string socket_;
  ControlClient client_;
  Variables environment_;
  Clock::time_point begin_, next_question_;
  std::vector<std::unique_ptr<ScenarioProgram>> programs_;
  std::vector<Due> program_due_, action_due_;
  std::vector<RuleState> rules_;
  int64_t listeners_ = 0;
  bool wants_hits_ = false, wants_listeners_ = false;
  bool asked_to_end_ = false;
  Outcome outcome_;
};

}  // namespace

ScenarioResult RunScenario(const Scenario& scenario) {
  ScenarioResult result;
  result.name = scenario.name;
  result.title = scenario.title;
  const Parts parts = FindParts();
  result.trouble = !parts.missing_daemon.empty() ? parts.missing_daemon : parts.missing_libraries;
  if (!result.trouble.empty()) return result;
  // What programs and the daemon leave behind becomes this process's child.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  signal(SIGINT, &Interrupted);
  signal(SIGTERM, &Interrupted);
  signal(SIGHUP, &Interrupted);
  const PrivateFolder folder;
  if (folder.path().empty()) {
    result.trouble = fmt::format("no folder for the daemon: {}", std::strerror(errno));
    return result;
  }
  Run run(scenario, parts);
  result.trouble = run.Start(folder.path());
  if (result.trouble.empty()) {
    run.Loop();
    const Outcome outcome = run.Collect();
    result.started = true;
    result.seconds = outcome.seconds;
    result.findings = Judge(scenario, outcome);
    result.detail = Describe(scenario, outcome);
  }
  run.End();
  return result;
}

bool ScenarioInterrupted() { return g_interrupted != 0; }

}  // namespace verbena::tools
