// SPDX-License-Identifier: Apache-2.0
//
// lab, report: verbena-lab does them.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/parts.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {

int RunLabProgram(std::vector<std::string> words) {
  const Parts parts = FindParts();
  const std::string program =
      fmt::format("{}/verbena-lab", parts.program.substr(0, parts.program.rfind('/')));
  words.insert(words.begin(), program);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execv(program.c_str(), argv.data());
  PrintError(fmt::format("cannot start {}: {}; it is built by bazel build //tools:verbena-lab",
                         program, std::strerror(errno)));
  return 1;
}

}  // namespace verbena::tools
