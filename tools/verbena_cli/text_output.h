// SPDX-License-Identifier: Apache-2.0
//
// Output of the verbena command: formatted lines and tables. Nothing here throws when the
// stream is closed or full; main() looks at the stream's error at the end.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace verbena::tools {

template <typename... Args>
void Print(std::FILE* stream, fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = fmt::format(format, std::forward<Args>(args)...);
  std::fwrite(text.data(), 1, text.size(), stream);
}

// "verbena: …\n" on stderr.
void PrintError(const std::string& sentence);

// Columns as wide as their widest cell, two blanks apart; the first row is the heading.
class Table {
 public:
  void AddRow(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string Text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace verbena::tools
