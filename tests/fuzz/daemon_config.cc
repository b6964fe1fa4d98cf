// SPDX-License-Identifier: Apache-2.0
//
// The daemon's configuration file (first byte even) and its command line (first
// byte odd; arguments are divided by zero bytes).
#include <vector>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/supervisor/options.h"
#include "tests/fuzz/fuzz_target.h"

namespace verbena::fuzz {
namespace {

void CheckOptions(const nic::DaemonOptions& options) {
  FUZZ_CHECK(options.nics >= 1 && options.nics <= nic::kMaxNics);
  FUZZ_CHECK(options.host <= 254);
  FUZZ_CHECK(options.nic_options.size() == options.nics);
  for (const nic::NicOptions& nic : options.nic_options) {
    FUZZ_CHECK(nic.addresses.size() < nic::kGidTableLen);
    for (const nic::InterfaceAddress& address : nic.addresses) {
      FUZZ_CHECK(!address.gid.IsZero() && !address.gid.IsMulticast());
      FUZZ_CHECK(address.prefix_bits >= 1 && address.prefix_bits <= 128);
    }
    FUZZ_CHECK(nic.gateways.size() <= 2);
    FUZZ_CHECK(!nic.mac || !nic.mac->IsGroup());
    FUZZ_CHECK(!nic.port || (!nic.port->interface.empty() && nic.port->interface.size() < 16));
  }
}

void ConfigFile(Input& input) {
  nic::DaemonOptions options;
  options.nics = 1 + input.Below(3);
  const bool nics_given = (input.U8() & 1) != 0;
  if (ParseConfig(input.Text(), "file", nics_given, &options).empty()) CheckOptions(options);
}

void CommandLine(Input& input) {
  std::vector<std::string> words = {"verbenad"};
  std::string rest(input.Text());
  while (!rest.empty() && words.size() < 20) {
    const size_t end = rest.find('\0');
    words.push_back(rest.substr(0, end));
    rest.erase(0, end == std::string::npos ? end : end + 1);
  }
  // What a file holds is the other half; which file is opened is not our business here.
  for (const std::string& word : words) {
    if (word.starts_with("--c") || word.find('/') != std::string::npos) return;
  }
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  argv.push_back(nullptr);
  const nic::OptionsResult result = nic::ParseOptions(static_cast<int>(words.size()), argv.data());
  FUZZ_CHECK(!result.failed || !result.text.empty());
  if (!result.failed && !result.done) {
    CheckOptions(result.options);
    FUZZ_CHECK(!nic::EngineArguments(result.options, 3).empty());
  }
}

}  // namespace
}  // namespace verbena::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  verbena::fuzz::Input input(data, size);
  if ((input.U8() & 1) == 0) {
    verbena::fuzz::ConfigFile(input);
  } else {
    verbena::fuzz::CommandLine(input);
  }
  return 0;
}
