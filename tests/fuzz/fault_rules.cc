// SPDX-License-Identifier: Apache-2.0
//
// The text of a fault rule. What is accepted is accepted again, as the same
// rule, in the spelling that the listing shows.
#include "nic_sim/fabric/fault_rule.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace verbena::nic;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  FaultRule rule;
  std::string error;
  if (!ParseFaultRule(text, &rule, &error)) {
    FUZZ_CHECK(!error.empty());
    return 0;
  }
  FUZZ_CHECK(!rule.text.empty());
  FUZZ_CHECK(!rule.nth || *rule.nth > 0);
  FUZZ_CHECK(!rule.every || *rule.every > 0);
  FUZZ_CHECK(!rule.probability || (*rule.probability >= 0 && *rule.probability <= 1));
  FUZZ_CHECK(!rule.opcodes || rule.opcodes->any());
  FUZZ_CHECK(rule.distance > 0);
  FaultRule again;
  FUZZ_CHECK(ParseFaultRule(rule.text, &again, &error));
  FUZZ_CHECK(again.text == rule.text && again.action == rule.action);
  FUZZ_CHECK(again.opcodes == rule.opcodes && again.nth == rule.nth && again.every == rule.every);
  return 0;
}
