// SPDX-License-Identifier: Apache-2.0
//
// The text of a fault rule, of packets or of the device, and the same bytes as a TOML
// file of rules. What is accepted is accepted again, as the same rule, in the spelling
// that the listing shows.
#include "nic_sim/fabric/fault_rule.h"
#include "nic_sim/faults/device_faults.h"
#include "nic_sim/faults/rule_file.h"
#include "tests/fuzz/fuzz_target.h"

namespace verbena::nic {
namespace {

void TryPacketRule(std::string_view text) {
  FaultRule rule;
  std::string error, field;
  if (!ParseFaultRule(text, &rule, &error, &field)) {
    FUZZ_CHECK(!error.empty());
    return;
  }
  FUZZ_CHECK(!rule.text.empty());
  FUZZ_CHECK(!rule.nth || *rule.nth > 0);
  FUZZ_CHECK(!rule.every || *rule.every > 0);
  FUZZ_CHECK(!rule.probability || (*rule.probability >= 0 && *rule.probability <= 1));
  FUZZ_CHECK(!rule.opcodes || rule.opcodes->any());
  FUZZ_CHECK(rule.distance > 0);
  FUZZ_CHECK(!rule.period || (rule.duration && *rule.duration < *rule.period));
  FaultRule again;
  FUZZ_CHECK(ParseFaultRule(rule.text, &again, &error));
  FUZZ_CHECK(again.text == rule.text && again.action == rule.action);
  FUZZ_CHECK(again.opcodes == rule.opcodes && again.nth == rule.nth && again.every == rule.every);
  FUZZ_CHECK(again.app == rule.app && again.pair == rule.pair && again.syndrome == rule.syndrome);
}

void TryDeviceRule(std::string_view text) {
  DeviceRule rule;
  std::string error, field;
  if (!ParseDeviceRule(text, &rule, &error, &field)) {
    FUZZ_CHECK(!error.empty());
    return;
  }
  DeviceRule again;
  FUZZ_CHECK(ParseDeviceRule(rule.text, &again, &error));
  FUZZ_CHECK(again.text == rule.text && again.action == rule.action && again.error == rule.error);
  // Whatever it says, it can be asked.
  DeviceFaults faults;
  FUZZ_CHECK(faults.Add(rule, 1, 0));
  const FaultSubject subject{.nic = 0, .app = "a", .qpn = 1, .nth_qp = 1};
  transport::Time now = transport::Time::FromNanoseconds(1);
  for (int i = 0; i < 4; ++i, now += transport::Duration::Milliseconds(1)) {
    faults.TakeDue(now);
    faults.next_due();
    faults.OnCompletion(subject, transport::Completion(), now);
    faults.OnVerb(rule.verb.value_or(0), subject, now);
    faults.OnCm(rule.event.value_or(0), subject, now);
  }
  std::vector<DeviceRule> ended;
  FUZZ_CHECK(faults.Clear(0, &ended) == 1);
}

}  // namespace
}  // namespace verbena::nic

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace verbena::nic;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  TryPacketRule(text);
  TryDeviceRule(text);
  std::vector<FileRule> rules;
  if (ReadRuleFile(text, "f", &rules).empty()) {
    for (const FileRule& rule : rules) {
      TryPacketRule(rule.text);
      TryDeviceRule(rule.text);
    }
  }
  return 0;
}
