// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/text_output.h"

#include <algorithm>

namespace verbena::tools {

void PrintError(const std::string& sentence) { Print(stderr, "verbena: {}\n", sentence); }

std::string Table::Text() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    for (size_t i = 0; i + 1 < row.size(); ++i) {
      text += fmt::format("{:<{}}  ", row[i], widths[i]);
    }
    if (!row.empty()) text += row.back();
    text += '\n';
  }
  return text;
}

}  // namespace verbena::tools
