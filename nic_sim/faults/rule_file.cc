// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/faults/rule_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace verbena::nic {
namespace {

std::string At(const std::string& path, const toml::source_region& where) {
  return path + ":" + std::to_string(where.begin.line) + ": ";
}

// Appends " KEY=VALUE" for each key; what is wrong, or nothing.
std::string AddKeys(const toml::table& table, const std::string& prefix, const std::string& path,
                    FileRule* rule) {
  for (const auto& [key, value] : table) {
    const std::string name = prefix + std::string(key.str());
    if (name == "action") continue;
    const std::string where = At(path, key.source()) + name + ": ";
    if (name.find_first_of(" \t\r\n=") != std::string::npos || name.empty()) {
      return where + "no key of a rule";
    }
    rule->lines[name] = key.source().begin.line;
    std::string word;
    if (const toml::table* inner = value.as_table(); inner != nullptr && prefix.empty()) {
      std::string error = AddKeys(*inner, name + ".", path, rule);
      if (!error.empty()) return error;
      continue;
    }
    if (const auto text = value.value_exact<std::string>()) {
      word = *text;
      if (word.empty() || word.find_first_of(" \t\r\n") != std::string::npos) {
        return where + "a text without spaces is expected";
      }
    } else if (const auto number = value.value_exact<int64_t>()) {
      word = std::to_string(*number);
    } else if (const auto real = value.value_exact<double>(); real && std::isfinite(*real)) {
      char digits[32];
      const auto end = std::to_chars(digits, digits + sizeof(digits), *real).ptr;
      word.assign(digits, end);
    } else {
      return where + "a text or a number is expected";
    }
    rule->text += " " + name + "=" + word;
  }
  return {};
}

}  // namespace

std::string FileRule::Complaint(const std::string& path, const std::string& field,
                                const std::string& error) const {
  const auto found = lines.find(field);
  const uint32_t at = found == lines.end() ? line : found->second;
  return path + ":" + std::to_string(at) + ": " + (field.empty() ? "" : field + ": ") + error;
}

std::string ReadRuleTables(const toml::node& node, const std::string& path,
                           std::vector<FileRule>* rules) {
  const toml::array* list = node.as_array();
  if (list == nullptr) return At(path, node.source()) + "rules are tables [[rule]]";
  for (const toml::node& item : *list) {
    const toml::table* table = item.as_table();
    if (table == nullptr) return At(path, item.source()) + "rules are tables [[rule]]";
    FileRule& rule = rules->emplace_back();
    rule.line = table->source().begin.line;
    const toml::node* action = table->get("action");
    if (action == nullptr) {
      return At(path, table->source()) + "action: a rule needs one, for example action = \"drop\"";
    }
    const auto name = action->value_exact<std::string>();
    rule.lines["action"] = action->source().begin.line;
    if (!name || name->empty() || name->find_first_of(" \t\r\n=") != std::string::npos) {
      return At(path, action->source()) + "action: a word is expected, for example \"drop\"";
    }
    rule.text = *name;
    if (std::string error = AddKeys(*table, "", path, &rule); !error.empty()) return error;
  }
  return {};
}

std::string ReadRuleFile(std::string_view text, const std::string& path,
                         std::vector<FileRule>* rules) {
  toml::table file;
  try {
    file = toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    return At(path, error.source()) + std::string(error.description());
  }
  for (const auto& [key, value] : file) {
    if (key != "rule") {
      return At(path, key.source()) + std::string(key.str()) +
             ": unknown key; rules are tables [[rule]]";
    }
    if (std::string error = ReadRuleTables(value, path, rules); !error.empty()) return error;
  }
  return {};
}

}  // namespace verbena::nic
