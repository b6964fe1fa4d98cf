// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/control_requests.h"

#include <fmt/format.h>

#include <limits>
#include <mutex>
#include <optional>

#include "nic_sim/ctrl/cm_service.h"
#include "nic_sim/runtime/version.h"

namespace verbena::nic {
namespace {

using nlohmann::json;
using Action = ControlAnswer::Action;

constexpr size_t kMaxRuleText = 1024;

// The request's fields, checked. The first thing that is wrong becomes the answer.
class Fields {
 public:
  explicit Fields(const json& request) : request_(request) {}

  std::string Text(const char* key, bool required) {
    const auto field = request_.find(key);
    if (field == request_.end()) {
      if (required) Fail(fmt::format("'{}' is missing", key));
      return {};
    }
    if (const auto* text = field->get_ptr<const std::string*>()) return *text;
    Fail(fmt::format("'{}' must be a text", key));
    return {};
  }

  std::optional<uint64_t> Number(const char* key, uint64_t low, uint64_t high) {
    const auto field = request_.find(key);
    if (field == request_.end()) return std::nullopt;
    const auto* number = field->get_ptr<const json::number_unsigned_t*>();
    if (number != nullptr && *number >= low && *number <= high) return *number;
    Fail(fmt::format("'{}' must be a number from {} to {}", key, low, high));
    return std::nullopt;
  }

  // Every key must be one of `known` (or "op").
  void Only(std::initializer_list<std::string_view> known) {
    for (const auto& [key, value] : request_.items()) {
      bool found = key == "op";
      for (const std::string_view name : known) found = found || key == name;
      if (!found) Fail(fmt::format("unknown field '{}'", key.substr(0, 64)));
    }
  }

  // `field`: of a rule, the key that is wrong.
  void Fail(std::string error, std::string field = {}) {
    if (!error_.empty()) return;
    error_ = std::move(error);
    field_ = std::move(field);
  }
  bool ok() const { return error_.empty(); }
  const std::string& error() const { return error_; }
  const std::string& field() const { return field_; }

 private:
  const json& request_;
  std::string error_;
  std::string field_;
};

struct Request {
  Hardware* hardware;
  const DaemonInfo& daemon;
  size_t clients;
  ControlAsker asker;
  Fields& fields;
  ControlAnswer* answer;
};

json NicJson(const NicInfo& nic) {
  json gids = json::array();
  for (const transport::Gid& gid : nic.gids) gids.push_back(gid.ToString());
  json port = nullptr;
  if (!nic.port.empty()) port = nic.port;
  return {
      {"device", nic.device}, {"host", nic.host},
      {"mac", nic.mac},       {"ipv4", nic.ipv4},
      {"gids", gids},         {"state", !nic.present ? "REMOVED" : nic.active ? "ACTIVE" : "DOWN"},
      {"port", port},         {"active_mtu", nic.active_mtu}};
}

json Version(Request& request) {
  return {{"version", kVersion},
          {"abi", {abi::kVersionMin, abi::kVersionMax}},
          {"pid", request.daemon.pid}};
}

json Status(Request& request) {
  Hardware& hardware = *request.hardware;
  std::vector<NicInfo> nics;
  for (size_t i = 0; i < hardware.nic_count(); ++i) nics.push_back(hardware.nic_info(i));
  json list = json::array();
  for (const NicInfo& nic : nics) list.push_back(NicJson(nic));
  const bool spinning = hardware.mode() == abi::kEngineSpinning;
  return {{"name", request.daemon.name},
          {"pid", request.daemon.pid},
          {"socket", request.daemon.socket},
          {"system", request.daemon.system},
          {"mode", spinning ? "spinning" : "thread-per-cpu"},
          {"threads", hardware.thread_count()},
          {"nics", std::move(list)},
          {"clients", request.clients}};
}

json List(Request& request) {
  const std::string what = request.fields.Text("what", true);
  if (!request.fields.ok()) return {};
  json items = request.hardware->List(
      what, request.asker.privileged ? std::nullopt : std::optional(request.asker.uid));
  if (items.is_null()) {
    request.fields.Fail(
        fmt::format("cannot list '{}': context, pd, mr, mw, dm, cq, qp, srq, ah, xrcd, flow and "
                    "cm_id are known",
                    what.substr(0, 64)));
  }
  return items;
}

json Counters(Request& request) {
  const std::string device = request.fields.Text("dev", false);
  if (!request.fields.ok()) return {};
  json devices = request.hardware->Counters(device);
  if (devices.is_null()) {
    request.fields.Fail(fmt::format("there is no device '{}'", device.substr(0, 64)));
  }
  return devices;
}

json FaultAdd(Request& request) {
  const std::string rule = request.fields.Text("rule", true);
  if (rule.size() > kMaxRuleText) request.fields.Fail("the rule is too long");
  if (!request.fields.ok()) return {};
  std::string error, field;
  const uint32_t id = request.hardware->AddRule(rule, &error, &field);
  if (id == 0) request.fields.Fail(error.empty() ? "the rule was refused" : error, field);
  return {{"id", id}};
}

json FaultList(Request& request) { return {{"rules", request.hardware->ListRules()}}; }

json FaultClear(Request& request) {
  const auto id = request.fields.Number("id", 1, std::numeric_limits<uint32_t>::max());
  if (!request.fields.ok()) return {};
  return {{"removed", request.hardware->ClearRules(static_cast<uint32_t>(id.value_or(0)))}};
}

json FaultHeld(Request& request) { return {{"packets", request.hardware->ListHeld()}}; }

// `step` lets count= packets go (1), `release` all.
json ReleaseHeld(Request& request, size_t count) {
  const auto id = request.fields.Number("id", 1, std::numeric_limits<uint32_t>::max());
  if (!request.fields.ok()) return {};
  return {
      {"released", request.hardware->ReleaseHeld(static_cast<uint32_t>(id.value_or(0)), count)}};
}
json FaultStep(Request& request) {
  const auto count = request.fields.Number("count", 1, std::numeric_limits<uint32_t>::max());
  return ReleaseHeld(request, count.value_or(1));
}
json FaultRelease(Request& request) {
  return ReleaseHeld(request, std::numeric_limits<size_t>::max());
}

json Trace(Request& request) {
  constexpr uint64_t kMostEvents = 100'000;
  const auto qpn = request.fields.Number("qpn", 0, 0xffffff);
  const auto after = request.fields.Number("after_ns", 0, std::numeric_limits<int64_t>::max());
  const auto limit = request.fields.Number("limit", 1, kMostEvents);
  if (!request.fields.ok()) return {};
  return request.hardware->Trace(qpn ? std::optional(static_cast<uint32_t>(*qpn)) : std::nullopt,
                                 static_cast<int64_t>(after.value_or(0)),
                                 limit.value_or(kMostEvents));
}

json Dump(Request& request) { return request.hardware->Dump(); }

// What is to be told to the applications that have rdma_cm ids on a NIC.
json CmAnnounce(Request& request) {
  const std::string device = request.fields.Text("dev", true);
  const std::string event = request.fields.Text("event", true);
  Hardware& hardware = *request.hardware;
  std::optional<uint32_t> nic;
  for (size_t i = 0; i < hardware.nic_count(); ++i) {
    if (hardware.nic_info(i).device == device) nic = static_cast<uint32_t>(i);
  }
  using Announce = void (CmService::*)(uint32_t);
  const Announce announce = event == "device_removal"  ? &CmService::RemoveNic
                            : event == "device_return" ? &CmService::RestoreNic
                            : event == "addr_change"   ? &CmService::AnnounceAddressChange
                                                       : nullptr;
  if (!nic) {
    request.fields.Fail(fmt::format("there is no device '{}'", device.substr(0, 64)));
  } else if (announce == nullptr) {
    request.fields.Fail("'event' is device_removal, device_return or addr_change");
  } else if (hardware.cm() == nullptr) {
    request.fields.Fail("there is no connection manager");
  }
  if (!request.fields.ok()) return {};
  CmService& cm = *hardware.cm();
  const std::lock_guard guard(cm.mutex());
  (cm.*announce)(*nic);
  return json::object();
}

json Capture(Request& request) {
  ControlAnswer& answer = *request.answer;
  answer.action = Action::kCapture;
  answer.device = request.fields.Text("dev", false);
  const std::string stage = request.fields.Text("stage", true);
  answer.before_faults = stage == "before";
  if (stage != "before" && stage != "after") request.fields.Fail("'stage' is before or after");
  answer.count = request.fields.Number("count", 1, std::numeric_limits<int64_t>::max()).value_or(0);
  answer.qpn = static_cast<uint32_t>(request.fields.Number("qpn", 1, 0xffffff).value_or(0));
  return {};
}

json CaptureStop(Request& request) {
  request.answer->action = Action::kCaptureStop;
  return {};
}

json Shutdown(Request& request) {
  request.answer->action = Action::kShutdown;
  return {};
}

struct Op {
  const char* name;
  std::initializer_list<std::string_view> fields;
  json (*run)(Request& request);
  bool anyone = false;  // else only who is privileged
};

const Op kOps[] = {
    {"version", {}, &Version, true},
    {"status", {}, &Status, true},
    {"list", {"what"}, &List, true},
    {"counters", {"dev"}, &Counters},
    {"fault_add", {"rule"}, &FaultAdd},
    {"fault_list", {}, &FaultList},
    {"fault_clear", {"id"}, &FaultClear},
    {"fault_held", {}, &FaultHeld},
    {"fault_step", {"count", "id"}, &FaultStep},
    {"fault_release", {"id"}, &FaultRelease},
    {"capture", {"dev", "stage", "count", "qpn"}, &Capture},
    {"capture_stop", {}, &CaptureStop},
    {"dump", {}, &Dump},
    {"trace", {"qpn", "after_ns", "limit"}, &Trace},
    {"shutdown", {}, &Shutdown},
    {"cm_announce", {"dev", "event"}, &CmAnnounce},
};

ControlAnswer Refusal(std::string_view sentence, const char* errno_name = nullptr) {
  ControlAnswer answer;
  answer.text = ErrorText(sentence, errno_name);
  return answer;
}

}  // namespace

std::string JsonText(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string ErrorText(std::string_view sentence, const char* errno_name) {
  json error = {{"error", sentence}};
  if (errno_name != nullptr) error["errno"] = errno_name;
  return JsonText(error);
}

ControlAnswer AnswerControlRequest(std::string_view text, Hardware* hardware,
                                   const DaemonInfo& daemon, size_t clients, ControlAsker asker) {
  const json request = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!request.is_object()) return Refusal("the request is no JSON object");
  Fields fields(request);
  const std::string name = fields.Text("op", true);
  if (!fields.ok()) return Refusal(fields.error());
  for (const Op& op : kOps) {
    if (name != op.name) continue;
    if (!op.anyone && !asker.privileged) {
      return Refusal("only the daemon's user, root and members of its group may do that", "EPERM");
    }
    fields.Only(op.fields);
    if (!fields.ok()) return Refusal(fields.error());
    ControlAnswer answer;
    Request call = {hardware, daemon, clients, asker, fields, &answer};
    const json result = op.run(call);
    if (!fields.ok() && !fields.field().empty()) {
      answer.text = JsonText({{"error", fields.error()}, {"field", fields.field()}});
      answer.action = Action::kReply;
      return answer;
    }
    if (!fields.ok()) return Refusal(fields.error());
    if (answer.action == Action::kReply) answer.text = JsonText(result);
    return answer;
  }
  return Refusal(fmt::format("unknown op '{}'", name.substr(0, 64)));
}

CounterValues ReadCounters(Hardware* hardware, const std::string& device) {
  const json all = hardware->Counters(device);
  CounterValues values;
  // By find, not by a JSON pointer: a name may come from outside, and '~' would be an escape there.
  const auto devices = all.find("devices");
  if (devices == all.end()) return values;
  const auto found = devices->find(device);
  if (found == devices->end()) return values;
  for (const char* group : {"counters", "hw_counters"}) {
    const auto counters = found->find(group);
    if (counters == found->end()) continue;
    for (const auto& [name, value] : counters->items()) {
      values.emplace_back(std::string(group) + "/" + name, value.get<uint64_t>());
    }
  }
  return values;
}

}  // namespace verbena::nic
