// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>

#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/doctor.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {

int Doctor(const InstanceOptions& options, bool json) {
  std::vector<Finding> findings = ExamineInstance(options);
  std::ranges::move(ExamineMachine(FindParts()), std::back_inserter(findings));
  const auto problems = std::ranges::count(findings, Finding::Level::kProblem, &Finding::level);
  if (json) {
    Json checks = Json::array();
    for (const Finding& f : findings) {
      checks.push_back({{"name", f.name},
                        {"level", LevelName(f.level)},
                        {"finding", f.finding},
                        {"means", f.means}});
    }
    Print(stdout, "{}\n", Dump({{"problems", problems}, {"checks", checks}}, 2));
    return problems == 0 ? 0 : 1;
  }
  size_t width = 0;
  for (const Finding& f : findings) width = std::max(width, f.name.size());
  for (const Finding& f : findings) {
    Print(stdout, "{:<7}  {:<{}}  {}{}{}\n", LevelName(f.level), f.name, width,
          Printable(f.finding), f.means.empty() ? "" : "\n                           -> ", f.means);
  }
  Print(stdout, "\n{}\n",
        problems == 0 ? "No problem." : fmt::format("{} to solve, see above.", problems));
  return problems == 0 ? 0 : 1;
}

}  // namespace verbena::tools
