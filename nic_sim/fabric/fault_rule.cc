// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/fault_rule.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "nic_sim/fabric/packet.h"
#include "nic_sim/faults/device_rule.h"
#include "nic_sim/faults/rule_text.h"
#include "transport/wire/opcode.h"

namespace verbena::nic {
namespace {

using transport::Duration;
using transport::Opcode;
using transport::OpcodeName;
using transport::OpcodeTraits;
using transport::TraitsOf;

constexpr uint64_t kMaxUs = kMaxRuleMicroseconds;
constexpr uint64_t kMaxDistance = 1024;
constexpr uint64_t kMaxMbps = 1'000'000;

constexpr std::array<std::pair<std::string_view, FaultAction>, 14> kActions = {{
    {"drop", FaultAction::kDrop},
    {"duplicate", FaultAction::kDuplicate},
    {"corrupt", FaultAction::kCorrupt},
    {"truncate", FaultAction::kTruncate},
    {"set", FaultAction::kSet},
    {"reorder", FaultAction::kReorder},
    {"delay", FaultAction::kDelay},
    {"rate", FaultAction::kRate},
    {"mark", FaultAction::kMark},
    {"down", FaultAction::kDown},
    {"hold", FaultAction::kHold},
    {"stall", FaultAction::kStall},
    {"slow_dma", FaultAction::kSlowDma},
    {"forge", FaultAction::kForge},
}};

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
  const std::string upper = UpperCase(name);
  std::string canonical;
  for (std::string_view word : SplitWords(upper, "_- ")) {
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
  if (name == "REQUEST") return !traits.is_response();
  if (name == "RESPONSE") return traits.is_response();
  if (name == "FIRST") return traits.begins_message() && !traits.ends_message();
  if (name == "MIDDLE") return !traits.begins_message() && !traits.ends_message();
  if (name == "LAST") return traits.ends_message() && !traits.begins_message();
  if (name == "ONLY") return traits.begins_message() && traits.ends_message();
  if (name == "IMM") return traits.has_imm();
  return false;
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
    if (key == "mad") return ReadMad(value);
    if (key == "prob") return ReadProbability(value);
    if (key == "qpn") return Number(value, 0, 0xffffff, &rule_.qpn);
    if (key == "sqpn") return Number(value, 0, 0xffffff, &rule_.source_qpn);
    if (key == "dqpn") return Number(value, 0, 0xffffff, &rule_.dest_qpn);
    if (key == "size") return ReadSize(value);
    if (key == "transmission") return Number(value, 1, UINT32_MAX, &rule_.transmission);
    if (key == "after") return ReadMicroseconds(value, 0, &rule_.after);
    if (key == "until") return ReadMicroseconds(value, 1, &rule_.until.emplace());
    if (key == "burst") return Number(value, 1, UINT32_MAX, &rule_.burst);
    if (key == "jitter") return ReadMicroseconds(value, 1, &rule_.jitter);
    if (key == "mbps") return Number(value, 1, kMaxMbps, &rule_.mbps);
    if (key == "bytes") return Number(value, 1, kMaxFrameBytes, &rule_.bytes);
    if (key == "at") return Number(value, 0, kMaxFrameBytes, &rule_.at);
    if (key == "xor") return ReadFlippedBits(value);
    if (key == "icrc") return ReadIcrc(value);
    if (key.find('.') != std::string_view::npos) return ReadChange(key, value);
    if (key == "app") return ReadApp(value);
    if (key == "nth_qp") return Number(value, 1, UINT32_MAX, &rule_.nth_qp);
    if (key == "pair") return ReadPair(value);
    if (key == "msg") return Number(value, 1, UINT32_MAX, &rule_.message);
    if (key == "dist") return ReadDistribution(value);
    if (key == "kind") return ReadKind(value);
    if (key == "rnr_timer") return Number(value, 0, 31, &rule_.rnr_timer);
    if (key == "period") return ReadMicroseconds(value, 1, &rule_.period.emplace());
    if (key == "psn") return Number(value, 0, 0xffffff, &rule_.psn_offset);
    if (key == "nth") return Number(value, 1, UINT64_MAX, &rule_.nth);
    if (key == "every") return Number(value, 1, UINT64_MAX, &rule_.every);
    if (key == "count") return Number(value, 1, UINT64_MAX, &rule_.count);
    if (key == "seed") return Number(value, 0, UINT64_MAX, &rule_.seed);
    if (key == "us") return ReadMicroseconds(value, 1, &rule_.duration.emplace());
    if (key == "by") return ReadDistance(value);
    return std::nullopt;
  }

 private:
  bool ReadDevice(std::string_view value) {
    expected_ = "the name of a device";
    rule_.device = std::string(value);
    return !value.empty();
  }
  bool ReadApp(std::string_view value) {
    expected_ = "the name of a process";
    rule_.app = std::string(value.substr(0, kMaxAppName));
    return !value.empty();
  }
  bool ReadPair(std::string_view value) {
    const size_t dash = value.find('-');
    std::optional<uint32_t> a, b;
    const bool good = dash != std::string_view::npos &&
                      Number(value.substr(0, dash), 0, 0xffffff, &a) &&
                      Number(value.substr(dash + 1), 0, 0xffffff, &b);
    expected_ = "two QP numbers, A-B,";
    if (good) rule_.pair = {*a, *b};
    return good;
  }
  bool ReadDistribution(std::string_view value) {
    expected_ = "uniform, normal, exponential or pareto";
    using enum DelayDistribution;
    static constexpr std::pair<std::string_view, DelayDistribution> kNames[] = {
        {"uniform", kUniform},
        {"normal", kNormal},
        {"exponential", kExponential},
        {"pareto", kPareto}};
    for (const auto& [name, distribution] : kNames) {
      if (value != name) continue;
      rule_.distribution = distribution;
      return true;
    }
    return false;
  }
  // Syndromes: IBTA Vol 1 §9.7.5.1.1, tables 45 to 47.
  bool ReadKind(std::string_view value) {
    expected_ = "ack, rnr, nak_sequence, nak_request, nak_access, nak_operation or cnp";
    static constexpr std::pair<std::string_view, std::optional<uint8_t>> kNames[] = {
        {"ack", 0x1f},         {"rnr", 0x20},        {"nak_sequence", 0x60},
        {"nak_request", 0x61}, {"nak_access", 0x62}, {"nak_operation", 0x63},
        {"cnp", std::nullopt}};
    for (const auto& [name, syndrome] : kNames) {
      if (value != name) continue;
      rule_.syndrome = syndrome;
      return rule_.has_kind = true;
    }
    return false;
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
        "ack, request, response, first, middle, last, only, imm, any";
    if (UpperCase(value) == "ANY") return true;
    rule_.opcodes = ParseOpcodeSet(value);
    return rule_.opcodes.has_value();
  }
  bool ReadMad(std::string_view value) {
    // Attribute ids from 0x10 on, in order.
    static constexpr std::string_view kNames[] = {
        "req", "mra", "rej", "rep", "rtu", "dreq", "drep", "sidr_req", "sidr_rep", "lap", "apr"};
    expected_ = "one of req, mra, rej, rep, rtu, dreq, drep, sidr_req, sidr_rep, lap, apr";
    for (size_t i = 0; i < std::size(kNames); ++i) {
      if (value == kNames[i]) rule_.mad = static_cast<uint16_t>(0x10 + i);
    }
    return rule_.mad.has_value();
  }
  bool ReadProbability(std::string_view value) {
    expected_ = "a number from 0 to 1";
    rule_.probability = ParseProbability(value);
    return rule_.probability.has_value();
  }
  bool ReadMicroseconds(std::string_view value, uint64_t low, Duration* duration) {
    std::optional<uint64_t> us;
    if (!Number(value, low, kMaxUs, &us)) return false;
    *duration = Duration::Microseconds(static_cast<int64_t>(*us));
    return true;
  }
  bool ReadSize(std::string_view value) {
    const size_t dash = value.find('-');
    std::optional<uint32_t> low, high;
    if (!Number(value.substr(0, dash), 0, kMaxFrameBytes, &low)) return false;
    high = low;
    if (dash != std::string_view::npos &&
        !Number(value.substr(dash + 1), *low, kMaxFrameBytes, &high)) {
      return false;
    }
    rule_.min_size = *low;
    rule_.max_size = *high;
    return true;
  }
  bool ReadFlippedBits(std::string_view value) {
    std::optional<uint8_t> bits;
    if (!Number(value, 1, 0xff, &bits)) return false;
    rule_.flipped = *bits;
    return true;
  }
  bool ReadIcrc(std::string_view value) {
    expected_ = "right or wrong";
    if (value != "right" && value != "wrong") return false;
    rule_.right_icrc = value == "right";
    return true;
  }
  std::optional<bool> ReadChange(std::string_view key, std::string_view value) {
    FieldChange change;
    change.field = transport::FindHeaderField(key);
    if (change.field == nullptr) return std::nullopt;
    const bool minus = value.starts_with('-');
    change.relative = minus || value.starts_with('+');
    if (change.relative) value.remove_prefix(1);
    std::optional<uint64_t> number;
    if (!Number(value, 0, change.field->max(), &number)) return false;
    change.value = minus ? uint64_t{0} - *number : *number;
    rule_.changes.push_back(change);
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
    const std::optional<uint64_t> value = ParseRuleNumber(text, low, high);
    if (value) *out = static_cast<T>(*value);
    return value.has_value();
  }

  FaultRule& rule_;
  std::string& expected_;
};

bool ParseAction(std::string_view word, FaultRule* rule, std::string* error) {
  for (const auto& [name, action] : kActions) {
    if (word == name) {
      rule->action = action;
      return true;
    }
  }
  *error = "unknown action " + Quoted(word) +
           ": drop, duplicate, corrupt, truncate, set, reorder, delay, rate, mark, down, hold, "
           "stall, slow_dma, forge, " +
           DeviceActionNames();
  return false;
}

// Whether a key of some actions only goes with `action`; true for all others.
bool GoesWith(std::string_view key, FaultAction action) {
  using enum FaultAction;
  const bool down_like = action == kDown || action == kStall;
  if (key == "us") return action == kDelay || down_like || action == kSlowDma;
  if (key == "period") return down_like;
  if (key == "jitter" || key == "dist") return action == kDelay;
  if (key == "kind" || key == "rnr_timer") return action == kForge;
  if (key == "by") return action == kReorder;
  if (key == "mbps") return action == kRate || action == kSlowDma;
  if (key == "bytes") return action == kTruncate;
  if (key == "at" || key == "xor") return action == kCorrupt;
  if (key == "icrc") return action == kCorrupt || action == kSet;
  return key.find('.') == std::string_view::npos || action == kSet;
}

// Keys that an action needs, and those that go with each other.
bool CheckKeys(const FaultRule& rule, bool has_flipped, std::string* error) {
  if (rule.action == FaultAction::kDelay && !rule.duration) {
    *error = "'delay' needs 'us=', the microseconds to wait";
  } else if (rule.action == FaultAction::kRate && !rule.mbps) {
    *error = "'rate' needs 'mbps=', millions of bits in a second";
  } else if (rule.action == FaultAction::kTruncate && !rule.bytes) {
    *error = "'truncate' needs 'bytes=', the bytes to cut off";
  } else if (rule.action == FaultAction::kSet && rule.changes.empty()) {
    *error = "'set' needs a header field, for example 'bth.psn=+1'";
  } else if (rule.action == FaultAction::kStall && !rule.device) {
    *error = "'stall' needs 'dev=', the device that stands still";
  } else if (rule.action == FaultAction::kSlowDma && !rule.device) {
    *error = "'slow_dma' needs 'dev=', the device that is slow";
  } else if (rule.action == FaultAction::kSlowDma && !rule.duration && !rule.mbps) {
    *error = "'slow_dma' needs 'us=', for each packet, or 'mbps='";
  } else if (rule.action == FaultAction::kForge && !rule.has_kind) {
    *error = "'forge' needs 'kind=', for example 'forge kind=rnr opcode=send nth=1'";
  } else if (rule.rnr_timer && rule.syndrome != 0x20) {
    *error = "'rnr_timer=' is for 'kind=rnr'";
  } else if (rule.distribution != DelayDistribution::kUniform && rule.jitter == Duration()) {
    *error = "'dist=' needs 'jitter=', its width";
  } else if (rule.period && (!rule.duration || *rule.duration >= *rule.period)) {
    *error = "'period=' needs 'us=', a shorter time";
  } else if (rule.period && rule.has_trigger()) {
    *error = "'period=' does not go with keys that select packets";
  } else if (has_flipped && !rule.at) {
    *error = "'xor=' needs 'at=', the byte's place";
  } else if (rule.nth && rule.every) {
    *error = "'nth=' and 'every=' exclude each other";
  } else if (rule.burst && !rule.probability) {
    *error = "'burst=' needs 'prob=', with which a burst begins";
  } else if (rule.until && *rule.until <= rule.after) {
    *error = "'until=' must be later than 'after='";
  } else {
    return true;
  }
  return false;
}

// Of one name or class.
std::optional<std::bitset<256>> ParseOpcode(std::string_view name) {
  std::bitset<256> set;
  const std::string class_name = UpperCase(name);
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

}  // namespace

std::optional<std::bitset<256>> ParseOpcodeSet(std::string_view names) {
  std::bitset<256> set;
  for (const std::string_view name : SplitWords(names, ",")) {
    const std::optional<std::bitset<256>> one = ParseOpcode(name);
    if (!one) return std::nullopt;
    set |= *one;
  }
  if (set.none()) return std::nullopt;
  return set;
}

bool ParseFaultRule(std::string_view text, FaultRule* rule, std::string* error,
                    std::string* field) {
  *rule = FaultRule();
  std::string unused;
  std::string& bad = field != nullptr ? *field : unused;
  bad.clear();
  if (text.size() > kMaxRuleBytes) {
    *error = "the rule is longer than " + std::to_string(kMaxRuleBytes) + " characters";
    return false;
  }
  const std::vector<std::string_view> words = SplitWords(text, " \t\n");
  if (words.empty()) {
    *error = "a rule is 'ACTION [key=value ...]', for example 'drop opcode=send nth=3'";
    return false;
  }
  if (!ParseAction(words[0], rule, error)) {
    bad = "action";
    return false;
  }
  std::string expected;
  KeyReader reader(rule, &expected);
  std::vector<std::string_view> seen;
  const RuleKeys keys = {
      .names =
          "dev, dir, app, nth_qp, qpn, sqpn, dqpn, pair, opcode, psn, msg, mad, size, "
          "transmission, after, until, nth, every, prob, burst, seed, count, us, period, "
          "jitter, dist, by, mbps, bytes, at, xor, icrc, kind, rnr_timer or a header field "
          "such as bth.psn",
      .read =
          [&](std::string_view key, std::string_view value, std::string* wanted) {
            const std::optional<bool> good = reader.Read(key, value);
            *wanted = expected;
            return good;
          },
      .goes_with_action = [&](std::string_view key) { return GoesWith(key, rule->action); }};
  if (!ReadRuleWords(words, keys, &rule->text, error, &bad, &seen)) return false;
  return CheckKeys(*rule, std::ranges::find(seen, "xor") != seen.end(), error);
}

}  // namespace verbena::nic
