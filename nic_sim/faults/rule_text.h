// SPDX-License-Identifier: Apache-2.0
//
// Words of fault rules: what the texts of packet rules (nic_sim/fabric/fault_rule.h)
// and device rules (device_rule.h) have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace verbena::nic {

inline constexpr size_t kMaxRuleBytes = 1024;
// What Linux keeps of a process name.
inline constexpr size_t kMaxAppName = 15;
inline constexpr uint64_t kMaxRuleMicroseconds = 3'600'000'000;  // an hour

std::vector<std::string_view> SplitWords(std::string_view text, std::string_view separators);
std::string UpperCase(std::string_view text);
std::string Quoted(std::string_view word);

// A whole number in [low, high], decimal or hexadecimal with 0x.
std::optional<uint64_t> ParseRuleNumber(std::string_view text, uint64_t low, uint64_t high);
// 0 to 1.
std::optional<double> ParseProbability(std::string_view text);

// Of `ACTION key=value ...`: "ACTION". Empty: there is no word.
std::string_view ActionWord(std::string_view text);

// What a kind of rules knows of keys.
struct RuleKeys {
  std::string_view names;  // "dev, dir or count": for who wrote another
  // Takes the value in. Empty: there is no such key; false: *expected is what it should be.
  std::function<std::optional<bool>(std::string_view key, std::string_view value,
                                    std::string* expected)>
      read;
  std::function<bool(std::string_view key)> goes_with_action;
};

// Of the words of `ACTION key=value ...` all but the first: each key once, in *seen too unless
// it is nullptr. *text becomes the rule with single spaces. False with a sentence in *error and
// the wrong key in *field, which is empty otherwise.
bool ReadRuleWords(std::span<const std::string_view> words, const RuleKeys& keys, std::string* text,
                   std::string* error, std::string* field,
                   std::vector<std::string_view>* seen = nullptr);

// SplitMix64: what is random about a rule. Advances *state.
uint64_t NextRandom(uint64_t* state);
// With `probability`, 0 to 1.
bool Chance(uint64_t* state, double probability);

}  // namespace verbena::nic
