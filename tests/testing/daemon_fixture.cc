// SPDX-License-Identifier: Apache-2.0
#include "tests/testing/daemon_fixture.h"

#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "nic_sim/runtime/read_file.h"

namespace verbena::testing {
namespace {

// A child that is not ours to observe must not see the simulated devices of an outer run.
void DropPreload(std::map<std::string, std::optional<std::string>>* environment) {
  (*environment)["LD_PRELOAD"] = std::nullopt;
  (*environment)["IBV_DRIVERS"] = std::nullopt;
}

std::optional<pid_t> ParentOf(pid_t pid) {
  const std::string text = nic::ReadFile("/proc/" + std::to_string(pid) + "/stat").value_or("");
  const size_t end = text.rfind(')');
  if (end == std::string::npos) return std::nullopt;
  char state = 0;
  int parent = 0;
  if (sscanf(text.c_str() + end + 1, " %c %d", &state, &parent) != 2) return std::nullopt;
  if (state == 'Z' || state == 'X') return std::nullopt;
  return parent;
}

std::vector<pid_t> ChildrenOf(pid_t pid) {
  std::vector<pid_t> result;
  DIR* proc = opendir("/proc");
  if (proc == nullptr) return result;
  while (const dirent* entry = readdir(proc)) {
    const pid_t candidate = atoi(entry->d_name);
    if (candidate > 0 && ParentOf(candidate) == pid) result.push_back(candidate);
  }
  closedir(proc);
  return result;
}

std::string ProgramOf(pid_t pid) {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/exe", error).string();
}

}  // namespace

std::string VerbenaCommand() {
  if (const char* given = getenv("VERBENA_BIN")) return given;
  if (const char* runfiles = getenv("TEST_SRCDIR")) {
    const char* workspace = getenv("TEST_WORKSPACE");
    const std::string path =
        std::string(runfiles) + "/" + (workspace ? workspace : "verbena") + "/tools/verbena";
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  throw std::runtime_error("no verbena command: run by Bazel or set VERBENA_BIN");
}

PrivateDaemon::PrivateDaemon(int nics, const std::vector<std::string>& more) {
  char folder[] = "/tmp/vtest.XXXXXX";
  if (mkdtemp(folder) == nullptr) throw std::runtime_error("mkdtemp");
  folder_ = folder;
  name_ = "t";
  std::vector<std::string> arguments = {"up", "--nics", std::to_string(nics)};
  arguments.insert(arguments.end(), more.begin(), more.end());
  if (getenv("VERBENA_TEST_PID_NAMESPACE") != nullptr) {
    StartInNamespaces(arguments);
    return;
  }
  const Finished up = Verbena(arguments, Milliseconds(60000));
  if (up.status != 0) {
    std::filesystem::remove_all(folder_);
    throw std::runtime_error("verbena up: status " + std::to_string(up.status) + "\n" + up.output);
  }
  const Finished status = Verbena({"status", "--json"});
  const auto json = nlohmann::json::parse(status.output, nullptr, false);
  if (json.is_discarded() || !json.contains("pid")) {
    Verbena({"down"});
    throw std::runtime_error("verbena status --json gave: " + status.output);
  }
  pid_ = json["pid"].get<pid_t>();
  const std::vector<pid_t> processes = Processes();
  if (processes.size() > 1) engine_ = processes[1];
}

void PrivateDaemon::StartInNamespaces(std::vector<std::string> arguments) {
  ProcessOptions options;
  options.argv = {"unshare", "--user",       "--map-root-user", "--pid",
                  "--fork",  "--kill-child", "--mount-proc",    VerbenaCommand()};
  options.argv.insert(options.argv.end(), arguments.begin(), arguments.end());
  options.argv.push_back("--foreground");
  options.environment = Environment();
  DropPreload(&options.environment);
  options.limit = std::chrono::hours(1);
  namespaces_ = std::make_unique<Process>(options);
  for (int i = 0; i < 600 && namespaces_->Running(); ++i) {
    if (Verbena({"status"}).status == 0) return;
    usleep(50000);
  }
  const std::string output = namespaces_->Output();
  namespaces_.reset();
  std::filesystem::remove_all(folder_);
  throw std::runtime_error("verbena up --foreground in namespaces:\n" + output);
}

PrivateDaemon::~PrivateDaemon() {
  const std::vector<pid_t> processes = Processes();
  Verbena({"down"}, Milliseconds(15000));
  for (const pid_t pid : processes) {
    if (ProgramOf(pid).ends_with("/verbenad")) kill(pid, SIGKILL);
  }
  namespaces_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::map<std::string, std::optional<std::string>> PrivateDaemon::Environment() const {
  return {{"XDG_RUNTIME_DIR", folder_}, {"VERBENA_NAME", name_}, {"VERBENA_SOCKET", std::nullopt}};
}

Finished PrivateDaemon::Verbena(const std::vector<std::string>& arguments,
                                Milliseconds limit) const {
  ProcessOptions options;
  options.argv = {VerbenaCommand()};
  options.argv.insert(options.argv.end(), arguments.begin(), arguments.end());
  options.environment = Environment();
  DropPreload(&options.environment);
  options.limit = limit;
  return RunProcess(options);
}

ProcessOptions PrivateDaemon::Run(const std::vector<std::string>& argv) const {
  ProcessOptions options;
  options.argv = {VerbenaCommand(), "run", "--"};
  options.argv.insert(options.argv.end(), argv.begin(), argv.end());
  options.environment = Environment();
  DropPreload(&options.environment);
  return options;
}

std::vector<pid_t> PrivateDaemon::Processes() const {
  if (pid_ <= 1) return {};
  pid_t top = pid_;
  for (std::optional<pid_t> parent = ParentOf(top);
       parent && ProgramOf(*parent).ends_with("/verbenad"); parent = ParentOf(top)) {
    top = *parent;
  }
  std::vector<pid_t> result;
  if (ParentOf(top)) result.push_back(top);
  if (engine_ > 0 && ParentOf(engine_) && ParentOf(engine_) != top) result.push_back(engine_);
  for (size_t i = 0; i < result.size(); ++i) {
    for (const pid_t child : ChildrenOf(result[i])) result.push_back(child);
  }
  return result;
}

pid_t PrivateDaemon::EnginePid() const {
  if (engine_ <= 0) throw std::runtime_error("no supervisor and engine process found");
  return engine_;
}

std::string PrivateDaemon::Dump() const {
  std::string result;
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"status", "--json"},
                                             {"counters", "--json"},
                                             {"list", "qp", "--json"},
                                             {"list", "cq", "--json"},
                                             {"fault", "list", "--json"}}) {
    result += "--- verbena";
    for (const std::string& argument : arguments) result += " " + argument;
    result += "\n" + Verbena(arguments, Milliseconds(5000)).output + "\n";
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(
           folder_, std::filesystem::directory_options::skip_permission_denied)) {
    if (entry.path().extension() != ".log" || !entry.is_regular_file()) continue;
    std::string text = nic::ReadFile(entry.path().string()).value_or("");
    if (text.size() > 8000) text.erase(0, text.size() - 8000);
    result += "--- " + entry.path().string() + "\n" + text + "\n";
  }
  return result;
}

Finished VerbenaHere(const std::vector<std::string>& arguments, Milliseconds limit) {
  ProcessOptions options;
  options.argv = {VerbenaCommand()};
  options.argv.insert(options.argv.end(), arguments.begin(), arguments.end());
  DropPreload(&options.environment);
  options.limit = limit;
  return RunProcess(options);
}

std::vector<int64_t> FaultHits() {
  const Finished list = VerbenaHere({"fault", "list", "--json"});
  const auto json = nlohmann::json::parse(list.output, nullptr, false);
  if (list.status != 0 || json.is_discarded()) {
    throw std::runtime_error("verbena fault list --json gave: " + list.output);
  }
  std::vector<int64_t> hits;
  for (const auto& rule : json.is_object() ? json.at("rules") : json) {
    hits.push_back(rule.at("hits").get<int64_t>());
  }
  return hits;
}

}  // namespace verbena::testing
