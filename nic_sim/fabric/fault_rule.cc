// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/fault_rule.h"

#include <array>
#include <charconv>
#include <cmath>
#include <utility>
#include <vector>

#include "transport/wire/opcode.h"

namespace verbena::nic {
namespace {

using transport::Duration;
using transport::Opcode;
using transport::OpcodeName;
using transport::OpcodeTraits;
using transport::TraitsOf;

constexpr uint64_t kMaxUs = 3'600'000'000;  // an hour
constexpr uint64_t kMaxDistance = 1024;
constexpr size_t kMaxTextBytes = 1024;

constexpr std::array<std::pair<std::string_view, FaultAction>, 7> kActions = {{
    {"drop", FaultAction::kDrop},
    {"duplicate", FaultAction::kDuplicate},
    {"corrupt", FaultAction::kCorrupt},
    {"reorder", FaultAction::kReorder},
    {"delay", FaultAction::kDelay},
    {"mark", FaultAction::kMark},
    {"down", FaultAction::kDown},
}};

std::vector<std::string_view> Split(std::string_view text, std::string_view separators) {
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

std::string Upper(std::string_view text) {
  std::string upper(text);
  for (char& c : upper) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return upper;
}

// One spelling for the names that the specification, tshark and this code use:
// "SEND Last with Immediate", "SEND_LAST_IMM" -> SEND_LAST_IMM.
std::string CanonicalOpcode(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 9> kSame = {{
      {"IMMEDIATE", "IMM"},
      {"INVALIDATE", "INV"},
      {"ACK", "ACKNOWLEDGE"},
      {"CMPSWAP", "CMP_SWAP"},
      {"COMPARE", "CMP"},
      {"FETCHADD", "FETCH_ADD"},
      {"WITH", ""},
      {"AND", ""},
      {"RDMA", ""},
  }};
  const std::string upper = Upper(name);
  std::string canonical;
  for (std::string_view word : Split(upper, "_- ")) {
    for (const auto& [other, ours] : kSame) {
      if (word == other) word = ours;
    }
    if (word.empty()) continue;
    if (!canonical.empty()) canonical += '_';
    canonical += word;
  }
  return canonical;
}

bool InClass(std::string_view name, const OpcodeTraits& traits) {
  if (name == "SEND") return traits.is_send();
  if (name == "WRITE") return traits.is_write();
  if (name == "READ") return traits.is_read_request() || traits.is_read_response();
  if (name == "ATOMIC") return traits.is_atomic() || traits.is_atomic_acknowledge();
  if (name == "ACK") return traits.is_acknowledge();
  return false;
}

// A whole number in [low, high].
std::optional<uint64_t> ParseNumber(std::string_view text, uint64_t low, uint64_t high) {
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

// Reads the value of one key; false, with what it should be, if it is bad.
class KeyReader {
 public:
  KeyReader(FaultRule* rule, std::string* expected) : rule_(*rule), expected_(*expected) {}

  // Empty: there is no such key.
  std::optional<bool> Read(std::string_view key, std::string_view value) {
    if (key == "dev") return ReadDevice(value);
    if (key == "dir") return ReadDirection(value);
    if (key == "opcode") return ReadOpcode(value);
    if (key == "prob") return ReadProbability(value);
    if (key == "qpn") return Number(value, 0, 0xffffff, &rule_.qpn);
    if (key == "psn") return Number(value, 0, 0xffffff, &rule_.psn_offset);
    if (key == "nth") return Number(value, 1, UINT64_MAX, &rule_.nth);
    if (key == "every") return Number(value, 1, UINT64_MAX, &rule_.every);
    if (key == "count") return Number(value, 1, UINT64_MAX, &rule_.count);
    if (key == "seed") return Number(value, 0, UINT64_MAX, &rule_.seed);
    if (key == "us") return ReadDuration(value);
    if (key == "by") return ReadDistance(value);
    return std::nullopt;
  }

 private:
  bool ReadDevice(std::string_view value) {
    expected_ = "the name of a device";
    rule_.device = std::string(value);
    return !value.empty();
  }
  bool ReadDirection(std::string_view value) {
    expected_ = "tx or rx";
    if (value == "tx") rule_.direction = Direction::kTx;
    if (value == "rx") rule_.direction = Direction::kRx;
    return rule_.direction.has_value();
  }
  bool ReadOpcode(std::string_view value) {
    expected_ =
        "an opcode such as RC_SEND_ONLY or RDMA_WRITE_FIRST, or one of send, write, read, atomic, "
        "ack, any";
    if (Upper(value) == "ANY") return true;
    rule_.opcodes = ParseOpcodeSet(value);
    return rule_.opcodes.has_value();
  }
  bool ReadProbability(std::string_view value) {
    expected_ = "a number from 0 to 1";
    rule_.probability = ParseProbability(value);
    return rule_.probability.has_value();
  }
  bool ReadDuration(std::string_view value) {
    std::optional<uint64_t> us;
    if (!Number(value, 1, kMaxUs, &us)) return false;
    rule_.duration = Duration::Microseconds(static_cast<int64_t>(*us));
    return true;
  }
  bool ReadDistance(std::string_view value) {
    std::optional<uint64_t> distance;
    if (!Number(value, 1, kMaxDistance, &distance)) return false;
    rule_.distance = static_cast<uint32_t>(*distance);
    return true;
  }

  template <typename T>
  bool Number(std::string_view text, uint64_t low, uint64_t high, std::optional<T>* out) {
    expected_ = high == UINT64_MAX
                    ? "a whole number, at least " + std::to_string(low)
                    : "a whole number from " + std::to_string(low) + " to " + std::to_string(high);
    const std::optional<uint64_t> value = ParseNumber(text, low, high);
    if (value) *out = static_cast<T>(*value);
    return value.has_value();
  }

  FaultRule& rule_;
  std::string& expected_;
};

std::string Quoted(std::string_view word) { return "'" + std::string(word) + "'"; }

bool ParseAction(std::string_view word, FaultRule* rule, std::string* error) {
  for (const auto& [name, action] : kActions) {
    if (word == name) {
      rule->action = action;
      return true;
    }
  }
  *error =
      "unknown action " + Quoted(word) + ": drop, duplicate, corrupt, reorder, delay, mark or down";
  return false;
}

// Keys that go with some actions only, and with each other.
bool CheckKeys(std::string_view action, const FaultRule& rule, bool has_distance,
               std::string* error) {
  if (rule.action == FaultAction::kDelay && !rule.duration) {
    *error = "'delay' needs 'us=', the microseconds to wait";
  } else if (rule.duration && rule.action != FaultAction::kDelay &&
             rule.action != FaultAction::kDown) {
    *error = "'us=' is for delay and down, not for " + Quoted(action);
  } else if (has_distance && rule.action != FaultAction::kReorder) {
    *error = "'by=' is for reorder, not for " + Quoted(action);
  } else if (rule.nth && rule.every) {
    *error = "'nth=' and 'every=' exclude each other";
  } else {
    return true;
  }
  return false;
}

}  // namespace

std::optional<std::bitset<256>> ParseOpcodeSet(std::string_view name) {
  std::bitset<256> set;
  const std::string class_name = Upper(name);
  const std::string wanted = CanonicalOpcode(name);
  for (unsigned code = 0; code < 256; ++code) {
    const auto opcode = static_cast<Opcode>(code);
    if (TraitsOf(opcode).is_reserved()) continue;
    const std::string full = CanonicalOpcode(OpcodeName(opcode));
    // Without the service ("RC_") a name means the operation of any service.
    const std::string_view bare = std::string_view(full).substr(full.find('_') + 1);
    if (wanted == full || wanted == bare || InClass(class_name, TraitsOf(opcode))) set.set(code);
  }
  if (set.none()) return std::nullopt;
  return set;
}

bool ParseFaultRule(std::string_view text, FaultRule* rule, std::string* error) {
  *rule = FaultRule();
  if (text.size() > kMaxTextBytes) {
    *error = "the rule is longer than " + std::to_string(kMaxTextBytes) + " characters";
    return false;
  }
  const std::vector<std::string_view> words = Split(text, " \t\n");
  if (words.empty()) {
    *error = "a rule is 'ACTION [key=value ...]', for example 'drop opcode=send nth=3'";
    return false;
  }
  if (!ParseAction(words[0], rule, error)) return false;
  rule->text = words[0];

  std::string expected;
  KeyReader reader(rule, &expected);
  std::vector<std::string_view> seen;
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string_view word = words[i];
    const size_t equals = word.find('=');
    const std::string_view key = word.substr(0, equals);
    if (equals == std::string_view::npos) {
      *error = "bad word " + Quoted(word) + ": key=value is expected";
      return false;
    }
    for (std::string_view earlier : seen) {
      if (key == earlier) {
        *error = "the key " + Quoted(key) + " is given twice";
        return false;
      }
    }
    seen.push_back(key);
    const std::optional<bool> good = reader.Read(key, word.substr(equals + 1));
    if (!good) {
      *error = "unknown key " + Quoted(key) +
               ": dev, dir, qpn, opcode, psn, nth, every, prob, seed, count, us or by";
      return false;
    }
    if (!*good) {
      *error = "bad value in " + Quoted(word) + ": " + expected + " is expected";
      return false;
    }
    rule->text += ' ';
    rule->text += word;
  }
  bool has_distance = false;
  for (std::string_view key : seen) has_distance |= key == "by";
  return CheckKeys(words[0], *rule, has_distance, error);
}

}  // namespace verbena::nic
