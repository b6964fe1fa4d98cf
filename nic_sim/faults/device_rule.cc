// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/faults/device_rule.h"

#include <string.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <initializer_list>
#include <utility>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/faults/rule_text.h"

namespace verbena::nic {
namespace {

using transport::Duration;
using transport::WcOpcode;
using enum DeviceAction;

constexpr std::array<std::pair<std::string_view, DeviceAction>, 12> kActions = {{
    {"complete", kComplete},
    {"lose_completion", kLoseCompletion},
    {"duplicate_completion", kDuplicateCompletion},
    {"delay_completion", kDelayCompletion},
    {"cq_overrun", kCqOverrun},
    {"fail", kFail},
    {"qp_error", kQpError},
    {"event", kEvent},
    {"remove", kRemove},
    {"addr_change", kAddrChange},
    {"cm_error", kCmError},
    {"gid_change", kGidChange},
}};

// By number, as in ibv_wc_status and ibv_event_type.
constexpr std::string_view kStatusNames[] = {"SUCCESS",
                                             "LOC_LEN_ERR",
                                             "LOC_QP_OP_ERR",
                                             "LOC_EEC_OP_ERR",
                                             "LOC_PROT_ERR",
                                             "WR_FLUSH_ERR",
                                             "MW_BIND_ERR",
                                             "BAD_RESP_ERR",
                                             "LOC_ACCESS_ERR",
                                             "REM_INV_REQ_ERR",
                                             "REM_ACCESS_ERR",
                                             "REM_OP_ERR",
                                             "RETRY_EXC_ERR",
                                             "RNR_RETRY_EXC_ERR",
                                             "LOC_RDD_VIOL_ERR",
                                             "REM_INV_RD_REQ_ERR",
                                             "REM_ABORT_ERR",
                                             "INV_EECN_ERR",
                                             "INV_EEC_STATE_ERR",
                                             "FATAL_ERR",
                                             "RESP_TIMEOUT_ERR",
                                             "GENERAL_ERR",
                                             "TM_ERR",
                                             "TM_RNDV_INCOMPLETE"};
constexpr std::string_view kEventNames[] = {"CQ_ERR",
                                            "QP_FATAL",
                                            "QP_REQ_ERR",
                                            "QP_ACCESS_ERR",
                                            "COMM_EST",
                                            "SQ_DRAINED",
                                            "PATH_MIG",
                                            "PATH_MIG_ERR",
                                            "DEVICE_FATAL",
                                            "PORT_ACTIVE",
                                            "PORT_ERR",
                                            "LID_CHANGE",
                                            "PKEY_CHANGE",
                                            "SM_CHANGE",
                                            "SRQ_ERR",
                                            "SRQ_LIMIT_REACHED",
                                            "QP_LAST_WQE_REACHED",
                                            "CLIENT_REREGISTER",
                                            "GID_CHANGE",
                                            "WQ_FATAL"};
constexpr std::pair<std::string_view, uint8_t> kCmEvents[] = {{"ADDR_ERROR", 1},
                                                              {"ROUTE_ERROR", 3},
                                                              {"CONNECT_ERROR", 6},
                                                              {"UNREACHABLE", 7},
                                                              {"REJECTED", 8}};

struct Verb {
  std::string_view name;
  uint16_t number;
};
constexpr Verb kVerbs[] = {
    {"open_device", kVerbOpenDevice},
    {"alloc_pd", abi::kCmdAllocPd},
    {"dealloc_pd", abi::kCmdDeallocPd},
    {"reg_mr", abi::kCmdRegMr},
    {"dereg_mr", abi::kCmdDeregMr},
    {"rereg_mr", abi::kCmdReregMr},
    {"alloc_null_mr", abi::kCmdAllocNullMr},
    {"alloc_mw", abi::kCmdAllocMw},
    {"dealloc_mw", abi::kCmdDeallocMw},
    {"alloc_dm", abi::kCmdAllocDm},
    {"free_dm", abi::kCmdFreeDm},
    {"import_pd", abi::kCmdImportPd},
    {"import_mr", abi::kCmdImportMr},
    {"import_dm", abi::kCmdImportDm},
    {"create_cq", abi::kCmdCreateCq},
    {"destroy_cq", abi::kCmdDestroyCq},
    {"resize_cq", abi::kCmdResizeCq},
    {"modify_cq", abi::kCmdModifyCq},
    {"create_qp", abi::kCmdCreateQp},
    {"modify_qp", abi::kCmdModifyQp},
    {"query_qp", abi::kCmdQueryQp},
    {"destroy_qp", abi::kCmdDestroyQp},
    {"open_qp", abi::kCmdOpenQp},
    {"create_srq", abi::kCmdCreateSrq},
    {"modify_srq", abi::kCmdModifySrq},
    {"query_srq", abi::kCmdQuerySrq},
    {"destroy_srq", abi::kCmdDestroySrq},
    {"open_xrcd", abi::kCmdOpenXrcd},
    {"close_xrcd", abi::kCmdCloseXrcd},
    {"create_ah", abi::kCmdCreateAh},
    {"destroy_ah", abi::kCmdDestroyAh},
    {"attach_mcast", abi::kCmdAttachMcast},
    {"detach_mcast", abi::kCmdDetachMcast},
    {"query_port", abi::kCmdQueryPort},
    {"post_send", kVerbPostSend},
    {"post_recv", kVerbPostRecv},
    {"post_srq_recv", kVerbPostSrqRecv},
    {"poll_cq", kVerbPollCq},
    {"req_notify_cq", kVerbReqNotifyCq},
    // Commands of rdma_user_cm.h.
    {"rdma_create_id", kVerbRdmaCm + 0},
    {"rdma_destroy_id", kVerbRdmaCm + 1},
    {"rdma_bind_ip", kVerbRdmaCm + 2},
    {"rdma_resolve_ip", kVerbRdmaCm + 3},
    {"rdma_resolve_route", kVerbRdmaCm + 4},
    {"rdma_query_route", kVerbRdmaCm + 5},
    {"rdma_connect", kVerbRdmaCm + 6},
    {"rdma_listen", kVerbRdmaCm + 7},
    {"rdma_accept", kVerbRdmaCm + 8},
    {"rdma_reject", kVerbRdmaCm + 9},
    {"rdma_disconnect", kVerbRdmaCm + 10},
    {"rdma_init_qp_attr", kVerbRdmaCm + 11},
    {"rdma_set_option", kVerbRdmaCm + 14},
    {"rdma_notify", kVerbRdmaCm + 15},
    {"rdma_leave_multicast", kVerbRdmaCm + 17},
    {"rdma_migrate_id", kVerbRdmaCm + 18},
    {"rdma_query", kVerbRdmaCm + 19},
    {"rdma_bind_addr", kVerbRdmaCm + 20},
    {"rdma_resolve_addr", kVerbRdmaCm + 21},
    {"rdma_join_multicast", kVerbRdmaCm + 22},
};

constexpr uint64_t kLastGidIndex = 15;  // entry 0 stays link-local

// Of ibv_wc_opcode, and classes.
std::optional<uint32_t> OpcodesOf(std::string_view name) {
  constexpr uint32_t kAtomics = OpcodeBit(WcOpcode::kCompSwap) | OpcodeBit(WcOpcode::kFetchAdd);
  static constexpr std::pair<std::string_view, uint32_t> kNames[] = {
      {"SEND", OpcodeBit(WcOpcode::kSend)},
      {"RDMA_WRITE", OpcodeBit(WcOpcode::kRdmaWrite)},
      {"WRITE", OpcodeBit(WcOpcode::kRdmaWrite)},
      {"RDMA_READ", OpcodeBit(WcOpcode::kRdmaRead)},
      {"READ", OpcodeBit(WcOpcode::kRdmaRead)},
      {"COMP_SWAP", OpcodeBit(WcOpcode::kCompSwap)},
      {"FETCH_ADD", OpcodeBit(WcOpcode::kFetchAdd)},
      {"ATOMIC", kAtomics},
      {"BIND_MW", OpcodeBit(WcOpcode::kBindMw)},
      {"LOCAL_INV", OpcodeBit(WcOpcode::kLocalInv)},
      {"RECV", OpcodeBit(WcOpcode::kRecv)},
  };
  const std::string wanted = UpperCase(name);
  for (const auto& [known, bits] : kNames) {
    if (wanted == known) return bits;
  }
  return std::nullopt;
}

// "ENOMEM" or a number; 0: neither.
int ErrnoOf(std::string_view text) {
  constexpr int kLast = 133;
  for (int number = 1; number <= kLast; ++number) {
    const char* name = strerrorname_np(number);
    if (name != nullptr && text == name) return number;
  }
  return static_cast<int>(ParseRuleNumber(text, 1, kLast).value_or(0));
}

class Reader {
 public:
  Reader(DeviceRule* rule, std::string* expected) : rule_(*rule), expected_(*expected) {}

  // Empty: there is no such key.
  std::optional<bool> Read(std::string_view key, std::string_view value) {
    if (key == "dev") return Text(value, "the name of a device", &rule_.device);
    if (key == "app")
      return Text(value.substr(0, kMaxAppName), "the name of a process", &rule_.app);
    if (key == "qpn") return Number(value, 0, 0xffffff, &rule_.qpn);
    if (key == "nth_qp") return Number(value, 1, UINT32_MAX, &rule_.nth_qp);
    if (key == "queue") return Queue(value);
    if (key == "opcode") return Opcode(value);
    if (key == "wr_id") return Number(value, 0, UINT64_MAX, &rule_.wr_id);
    if (key == "nth") return Number(value, 1, UINT64_MAX, &rule_.nth);
    if (key == "every") return Number(value, 1, UINT64_MAX, &rule_.every);
    if (key == "count") return Number(value, 1, UINT64_MAX, &rule_.count);
    if (key == "seed") return Number(value, 0, UINT64_MAX, &rule_.seed);
    if (key == "prob") return Probability(value);
    if (key == "after") return Microseconds(value, 0, &rule_.after);
    if (key == "until") return Microseconds(value, 1, &rule_.until.emplace());
    if (key == "us") return Microseconds(value, 1, &rule_.duration.emplace());
    if (key == "status") return Status(value);
    if (key == "vendor_err") return Number(value, 0, UINT32_MAX, &rule_.vendor_err);
    if (key == "qp") return OneOf(value, "keep", &rule_.keeps_qp);
    if (key == "on") return OneOf(value, "completion", &rule_.on_completion);
    if (key == "verb") return VerbOf(value);
    if (key == "errno") return Errno(value);
    if (key == "type") return Type(value);
    if (key == "index") return Number(value, 1, kLastGidIndex, &rule_.gid_index);
    if (key == "gid") return GidOf(value);
    if (key == "reason") return Number(value, 0, 0xffff, &rule_.reason);
    return std::nullopt;
  }

 private:
  bool Text(std::string_view value, const char* what, std::optional<std::string>* to) {
    expected_ = what;
    *to = std::string(value);
    return !value.empty();
  }
  template <typename T>
  bool Number(std::string_view value, uint64_t low, uint64_t high, std::optional<T>* to) {
    expected_ = "a number from " + std::to_string(low) + " to " + std::to_string(high);
    const std::optional<uint64_t> number = ParseRuleNumber(value, low, high);
    if (number) *to = static_cast<T>(*number);
    return number.has_value();
  }
  bool Microseconds(std::string_view value, uint64_t low, Duration* to) {
    std::optional<uint64_t> us;
    if (!Number(value, low, kMaxRuleMicroseconds, &us)) return false;
    *to = Duration::Microseconds(static_cast<int64_t>(*us));
    return true;
  }
  bool OneOf(std::string_view value, std::string_view word, bool* to) {
    expected_ = Quoted(word);
    return *to = value == word;
  }
  bool Probability(std::string_view value) {
    expected_ = "a number from 0 to 1";
    rule_.probability = ParseProbability(value);
    return rule_.probability.has_value();
  }
  bool Queue(std::string_view value) {
    expected_ = "send or recv";
    if (value == "send") rule_.send_queue = true;
    if (value == "recv") rule_.send_queue = false;
    return rule_.send_queue.has_value();
  }
  bool Opcode(std::string_view value) {
    expected_ =
        "one of SEND, RDMA_WRITE, RDMA_READ, COMP_SWAP, FETCH_ADD, BIND_MW, LOCAL_INV, RECV, "
        "write, read, atomic";
    rule_.opcodes = OpcodesOf(value);
    return rule_.opcodes.has_value();
  }
  bool Status(std::string_view value) {
    expected_ = "a status as in ibv_wc_status without IBV_WC_, for example REM_OP_ERR";
    const std::string wanted = UpperCase(value);
    for (size_t i = 0; i < std::size(kStatusNames); ++i) {
      if (wanted == kStatusNames[i]) rule_.status = static_cast<uint8_t>(i);
    }
    return rule_.status.has_value();
  }
  bool VerbOf(std::string_view value) {
    expected_ = "a verb such as reg_mr, create_qp, post_send, rdma_resolve_addr";
    for (const Verb& verb : kVerbs) {
      if (value == verb.name) rule_.verb = verb.number;
    }
    return rule_.verb.has_value();
  }
  bool GidOf(std::string_view value) {
    expected_ = "a unicast address such as 10.0.0.1 or fd00::1";
    rule_.gid = transport::Gid::Parse(value);
    return rule_.gid && !rule_.gid->IsZero() && !rule_.gid->IsMulticast();
  }
  bool Errno(std::string_view value) {
    expected_ = "an error such as ENOMEM";
    rule_.error = ErrnoOf(value);
    return rule_.error != 0;
  }
  bool Type(std::string_view value) {
    const std::string wanted = UpperCase(value);
    if (rule_.action == kCmError) {
      expected_ = "one of ADDR_ERROR, ROUTE_ERROR, CONNECT_ERROR, UNREACHABLE, REJECTED";
      for (const auto& [name, number] : kCmEvents) {
        if (wanted == name) rule_.event = number;
      }
    } else {
      expected_ = "an event as in ibv_event_type without IBV_EVENT_, for example PORT_ERR";
      for (size_t i = 0; i < std::size(kEventNames); ++i) {
        if (wanted == kEventNames[i]) rule_.event = static_cast<uint8_t>(i);
      }
    }
    return rule_.event.has_value();
  }

  DeviceRule& rule_;
  std::string& expected_;
};

bool IsOneOf(std::string_view key, std::initializer_list<std::string_view> keys) {
  return std::ranges::find(keys, key) != keys.end();
}

// Whether a key has a meaning with the action.
bool GoesWith(std::string_view key, DeviceAction action) {
  const bool completion = action <= kCqOverrun || action == kQpError || action == kEvent;
  if (IsOneOf(key, {"status", "vendor_err", "qp"})) return action == kComplete;
  if (IsOneOf(key, {"queue", "opcode", "wr_id"})) return completion;
  if (key == "on") return action == kQpError || action == kEvent;
  if (key == "us") {
    return action == kDelayCompletion || action == kRemove || action == kGidChange;
  }
  if (IsOneOf(key, {"index", "gid"})) return action == kGidChange;
  if (key == "verb") return action == kFail;
  if (key == "errno") return action == kFail || action == kCmError;
  if (key == "reason") return action == kCmError;
  if (key == "type") return action == kEvent || action == kCmError;
  if (key == "app") return completion || action == kFail || action == kCmError;
  if (IsOneOf(key, {"qpn", "nth_qp"})) return completion || action == kFail;
  if (IsOneOf(key, {"nth", "every", "prob", "seed", "count", "until"})) {
    return completion || action == kFail || action == kCmError;
  }
  return true;
}

bool CheckKeys(const DeviceRule& rule, std::string* error) {
  const DeviceAction action = rule.action;
  if (action == kComplete && !rule.status && !rule.vendor_err) {
    *error = "'complete' needs 'status=' or 'vendor_err='";
  } else if (action == kDelayCompletion && !rule.duration) {
    *error = "'delay_completion' needs 'us=', the microseconds to wait";
  } else if (action == kFail && !rule.verb) {
    *error = "'fail' needs 'verb=', for example 'fail verb=reg_mr errno=ENOMEM'";
  } else if (action == kFail && rule.error == 0) {
    *error = "'fail' needs 'errno=', for example 'errno=ENOMEM'";
  } else if (action == kFail && (rule.qpn || rule.nth_qp) && *rule.verb != kVerbPostSend &&
             *rule.verb != kVerbPostRecv) {
    *error = "'qpn=' and 'nth_qp=' go with 'verb=post_send' and 'verb=post_recv' only";
  } else if ((action == kEvent || action == kCmError) && !rule.event) {
    *error = Quoted(NameOf(action)) + " needs 'type=', the event";
  } else if (action == kGidChange && !rule.gid_index) {
    *error = "'gid_change' needs 'index=', the entry of the GID table";
  } else if ((action == kRemove || action == kAddrChange || action == kGidChange) && !rule.device) {
    *error = Quoted(NameOf(action)) + " needs 'dev=', the device";
  } else if (rule.reason && rule.event != 8) {
    *error = "'reason=' is for 'type=REJECTED'";
  } else if (rule.nth && rule.every) {
    *error = "'nth=' and 'every=' exclude each other";
  } else if (rule.until && *rule.until <= rule.after) {
    *error = "'until=' must be later than 'after='";
  } else {
    return true;
  }
  return false;
}

}  // namespace

bool IsDeviceAction(std::string_view action) {
  return std::ranges::any_of(kActions, [&](const auto& known) { return known.first == action; });
}

std::string DeviceActionNames() {
  std::string names;
  for (const auto& known : kActions) {
    if (!names.empty()) names += ", ";
    names += known.first;
  }
  return names;
}

std::string_view NameOf(DeviceAction action) { return kActions[static_cast<size_t>(action)].first; }

std::string_view VerbName(uint16_t number) {
  for (const Verb& verb : kVerbs) {
    if (verb.number == number) return verb.name;
  }
  return {};
}

bool ParseDeviceRule(std::string_view text, DeviceRule* rule, std::string* error,
                     std::string* field) {
  *rule = DeviceRule();
  std::string unused;
  std::string& bad = field != nullptr ? *field : unused;
  bad.clear();
  if (text.size() > kMaxRuleBytes) {
    *error = "the rule is longer than " + std::to_string(kMaxRuleBytes) + " characters";
    return false;
  }
  const std::vector<std::string_view> words = SplitWords(text, " \t\n");
  const auto action = std::ranges::find_if(
      kActions, [&](const auto& known) { return !words.empty() && known.first == words[0]; });
  if (action == kActions.end()) {
    *error = "no action of a device: " + DeviceActionNames();
    bad = "action";
    return false;
  }
  rule->action = action->second;
  std::string expected;
  Reader reader(rule, &expected);
  const RuleKeys keys = {
      .names =
          "dev, app, qpn, nth_qp, queue, opcode, wr_id, nth, every, count, prob, seed, "
          "after, until, us, status, vendor_err, qp, on, verb, errno, type, reason, index or gid",
      .read =
          [&](std::string_view key, std::string_view value, std::string* wanted) {
            const std::optional<bool> good = reader.Read(key, value);
            *wanted = expected;
            return good;
          },
      .goes_with_action = [&](std::string_view key) { return GoesWith(key, rule->action); }};
  if (!ReadRuleWords(words, keys, &rule->text, error, &bad)) return false;
  return CheckKeys(*rule, error);
}

}  // namespace verbena::nic
