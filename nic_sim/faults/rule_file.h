// SPDX-License-Identifier: Apache-2.0
//
// Fault rules as TOML:
//
//   [[rule]]
//   action = "drop"
//   opcode = "write"
//   psn = 100
//   count = 1
//
// Each table becomes the one-line form: its keys are the same, values are texts or
// numbers, and a header field is "bth.psn" or a dotted key. What the words mean is not
// looked at here.
#pragma once

#include <toml++/toml.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace verbena::nic {

struct FileRule {
  std::string text;
  uint32_t line = 0;                      // of the table
  std::map<std::string, uint32_t> lines;  // of its keys

  // "PATH:LINE: FIELD: what is wrong", of an answer to the rule's text. `field`: the key
  // that is wrong; empty: the rule.
  std::string Complaint(const std::string& path, const std::string& field,
                        const std::string& error) const;
};

// Of the node with the key `rule`. Empty = good, else "PATH:LINE: ...".
std::string ReadRuleTables(const toml::node& node, const std::string& path,
                           std::vector<FileRule>* rules);
// Of a file that holds nothing else.
std::string ReadRuleFile(std::string_view text, const std::string& path,
                         std::vector<FileRule>* rules);

}  // namespace verbena::nic
