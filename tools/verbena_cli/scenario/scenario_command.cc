// SPDX-License-Identifier: Apache-2.0
//
// scenario run, scenario list.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/parts.h"
#include "tools/verbena_cli/scenario/scenario.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {

bool ScenarioInterrupted();

namespace {

namespace fs = std::filesystem;

constexpr int kFailed = 1;
constexpr int kNotRun = 2;

std::string FolderOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

// Installed, or in the tree where this command was called.
std::string LibraryFolder() {
  const std::string here = FolderOf(FindParts().program);
  std::error_code ignored;
  for (const std::string& folder :
       {here + "/../share/verbena/scenarios", std::string("tests/scenarios")}) {
    if (fs::is_directory(folder, ignored)) return fs::canonical(folder, ignored).string();
  }
  return {};
}

// Where the program is that scenarios use beside stock ones.
std::string ProgramsFolder() {
  const std::string here = FolderOf(FindParts().program);
  std::error_code ignored;
  for (const char* folder : {"/../lib/verbena", "/../lib", "/../tests/scenarios"}) {
    const fs::path path = fs::weakly_canonical(here + folder, ignored);
    if (access((path / "verbena-probe").c_str(), X_OK) == 0) return path.string();
  }
  return here;
}

std::vector<std::string> FilesOf(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".toml") files.push_back(entry.path().string());
  }
  std::ranges::sort(files);
  return files;
}

// A file, a folder with files, or a name of the library.
std::vector<std::string> Named(const std::string& word) {
  std::error_code ignored;
  if (fs::is_directory(word, ignored)) return FilesOf(word);
  if (fs::exists(word, ignored) || word.find('/') != std::string::npos) return {word};
  const std::string library = LibraryFolder();
  const std::string path = fmt::format("{}/{}.toml", library, word);
  if (!library.empty() && fs::exists(path, ignored)) return {path};
  return {word};
}

void PrintResult(const ScenarioResult& result, bool verbose) {
  const bool good = result.good();
  Print(stdout, "{}  {}: {} ({:.1f} s)\n", good ? "ok    " : "FAILED", result.name, result.title,
        result.seconds);
  if (!result.started) Print(stdout, "        could not be run: {}\n", result.trouble);
  for (const ScenarioFinding& finding : result.findings) {
    if (finding.good && good && !verbose) continue;
    Print(stdout, "        {} {}\n", finding.good ? "ok  " : "BAD ", finding.text);
  }
  if (verbose || !good) Print(stdout, "{}", result.detail);
  std::fflush(stdout);
}

}  // namespace

int ScenarioRun(const ScenarioOptions& options) {
  std::vector<Scenario> scenarios;
  for (const std::string& word : options.files) {
    for (const std::string& path : Named(word)) {
      std::string error;
      std::vector<Scenario> more = LoadScenario(path, ProgramsFolder(), &error);
      if (more.empty()) {
        PrintError(error.empty() ? path + ": nothing in it" : error);
        return kNotRun;
      }
      for (Scenario& scenario : more) scenarios.push_back(std::move(scenario));
    }
  }
  if (scenarios.empty()) {
    PrintError("there is no scenario; see `verbena scenario list`");
    return kNotRun;
  }
  std::vector<ScenarioResult> results;
  for (int round = 0; round < options.repeat && !ScenarioInterrupted(); ++round) {
    for (const Scenario& scenario : scenarios) {
      if (ScenarioInterrupted()) break;
      results.push_back(RunScenario(scenario));
      PrintResult(results.back(), options.verbose);
    }
  }
  const auto good = std::ranges::count_if(results, &ScenarioResult::good);
  const auto ran = std::ranges::count_if(results, &ScenarioResult::started);
  const auto count = static_cast<long>(results.size());
  Print(stdout, "{} of {} scenarios as expected\n", good, count);
  if (!options.junit.empty()) {
    std::ofstream file(options.junit);
    file << JUnitXml(results);
    if (!file.flush()) {
      PrintError(fmt::format("cannot write {}", options.junit));
      return kNotRun;
    }
  }
  if (ran != count || ScenarioInterrupted()) return kNotRun;
  return good == count ? 0 : kFailed;
}

int ScenarioList(bool json) {
  const std::string library = LibraryFolder();
  if (library.empty()) {
    PrintError("no scenarios are installed beside this command");
    return 1;
  }
  Json list = Json::array();
  for (const std::string& path : FilesOf(library)) {
    std::string error;
    const std::optional<ScenarioHead> head = LoadScenarioHead(path, &error);
    if (!head) {
      PrintError(error);
      return 1;
    }
    list.push_back({{"name", head->name},
                    {"title", head->title},
                    {"cites", head->cites},
                    {"path", head->path}});
  }
  if (json) {
    Print(stdout, "{}\n", Dump(list, 2));
    return 0;
  }
  Table table;
  table.AddRow({"NAME", "WHAT IT SHOWS"});
  for (const Json& each : list) {
    table.AddRow({TextField(each, "name"), TextField(each, "title")});
  }
  Print(stdout, "{}", table.Text());
  return 0;
}

}  // namespace verbena::tools
