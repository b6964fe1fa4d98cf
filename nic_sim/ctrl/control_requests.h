// SPDX-License-Identifier: Apache-2.0
//
// The JSON requests of docs/CONTROL.md. Captures and the end of the daemon belong to the
// connection and are only recognised here.
//
// Thread: the control thread, without the lock: it is taken for each look at the device, and JSON
// text is made after it was released.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "nic_sim/ctrl/hardware.h"

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
};

// `clients`: opened contexts. Never throws; whatever the text is, there is an answer.
ControlAnswer AnswerControlRequest(std::string_view text, Hardware* hardware,
                                   const DaemonInfo& daemon, size_t clients);

// {"error": sentence}
std::string ErrorText(std::string_view sentence);
// Never throws: bytes that are no UTF-8 (names of processes) are replaced.
std::string JsonText(const nlohmann::json& value);

}  // namespace verbena::nic
