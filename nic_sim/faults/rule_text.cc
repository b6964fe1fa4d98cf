// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/faults/rule_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace verbena::nic {

std::vector<std::string_view> SplitWords(std::string_view text, std::string_view separators) {
  std::vector<std::string_view> words;
  size_t at = 0;
  while ((at = text.find_first_not_of(separators, at)) != std::string_view::npos) {
    const size_t end = text.find_first_of(separators, at);
    words.push_back(text.substr(at, end == std::string_view::npos ? end : end - at));
    if (end == std::string_view::npos) break;
    at = end;
  }
  return words;
}

std::string UpperCase(std::string_view text) {
  std::string upper(text);
  for (char& c : upper) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return upper;
}

std::string Quoted(std::string_view word) { return "'" + std::string(word) + "'"; }

std::optional<uint64_t> ParseRuleNumber(std::string_view text, uint64_t low, uint64_t high) {
  int base = 10;
  if (text.starts_with("0x") || text.starts_with("0X")) {
    base = 16;
    text.remove_prefix(2);
  }
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value, base);
  if (result.ec != std::errc() || result.ptr != end || value < low || value > high) return {};
  return value;
}

std::optional<double> ParseProbability(std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end) return {};
  if (!std::isfinite(value) || value < 0 || value > 1) return {};
  return value;
}

std::string_view ActionWord(std::string_view text) {
  const std::vector<std::string_view> words = SplitWords(text, " \t\n");
  return words.empty() ? std::string_view() : words[0];
}

bool ReadRuleWords(std::span<const std::string_view> words, const RuleKeys& keys, std::string* text,
                   std::string* error, std::string* field, std::vector<std::string_view>* seen) {
  std::vector<std::string_view> own;
  if (seen == nullptr) seen = &own;
  *text = words[0];
  for (const std::string_view word : words.subspan(1)) {
    const size_t equals = word.find('=');
    const std::string_view key = word.substr(0, equals);
    *field = key;
    if (equals == std::string_view::npos) {
      *error = "bad word " + Quoted(word) + ": key=value is expected";
      return false;
    }
    if (std::ranges::find(*seen, key) != seen->end()) {
      *error = "the key " + Quoted(key) + " is given twice";
      return false;
    }
    seen->push_back(key);
    std::string expected;
    const std::optional<bool> good = keys.read(key, word.substr(equals + 1), &expected);
    if (!good) {
      *error = "unknown key " + Quoted(key) + ": " + std::string(keys.names);
      return false;
    }
    if (!*good) {
      *error = "bad value in " + Quoted(word) + ": " + expected + " is expected";
      return false;
    }
    if (!keys.goes_with_action(key)) {
      *error = Quoted(std::string(key) + "=") + " is not for " + Quoted(words[0]);
      return false;
    }
    *text += ' ';
    *text += word;
  }
  field->clear();
  return true;
}

uint64_t NextRandom(uint64_t* state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

bool Chance(uint64_t* state, double probability) {
  constexpr double kUnit = 0x1p-53;
  return static_cast<double>(NextRandom(state) >> 11) * kUnit < probability;  // of [0, 1)
}

}  // namespace verbena::nic
