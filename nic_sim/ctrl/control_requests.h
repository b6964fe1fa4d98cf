// SPDX-License-Identifier: Apache-2.0
//
// The JSON requests of docs/CONTROL.md. Captures and the end of the daemon belong to the
// connection and are only recognised here.
//
// Thread: any.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "nic_sim/ctrl/hardware.h"
#include "nic_sim/ctrl/sysfs_tree.h"

namespace verbena::nic {

// What the daemon knows of itself.
struct DaemonInfo {
  std::string name;
  std::string socket;
  bool system = false;
  pid_t pid = 0;  // of the supervisor: the one that ends the daemon
};

struct ControlAnswer {
  enum class Action { kReply, kCapture, kCaptureStop, kShutdown } action = Action::kReply;
  std::string text;  // kReply: JSON
  // kCapture
  std::string device;
  bool before_faults = false;
  uint64_t count = 0;
  uint32_t qpn = 0;  // 0: all
};

// Who asks. Without privilege: what is public, and one's own objects.
struct ControlAsker {
  uid_t uid = 0;
  bool privileged = true;
};

// `clients`: opened contexts. Never throws; whatever the text is, there is an answer.
ControlAnswer AnswerControlRequest(std::string_view text, Hardware* hardware,
                                   const DaemonInfo& daemon, size_t clients,
                                   ControlAsker asker = {});

// Values of the files below ports/1 of `device`; empty: unknown device.
CounterValues ReadCounters(Hardware* hardware, const std::string& device);

// {"error": sentence}, with "errno": the error's name if there is one.
std::string ErrorText(std::string_view sentence, const char* errno_name = nullptr);
// Never throws: bytes that are no UTF-8 (names of processes) are replaced.
std::string JsonText(const nlohmann::json& value);

}  // namespace verbena::nic
