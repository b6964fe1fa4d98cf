// SPDX-License-Identifier: Apache-2.0
//
// What the roles of tools/chaos share. Exit status of a role: 0 all right; 1 an error of the device
// (the reason is printed), as the death of a peer or of the daemon causes; 2 a finding whatever was
// done to others: wrong data, a completion that never came, a leak in this process.
#pragma once

#include <chrono>
#include <exception>
#include <string>

namespace verbena::testing {

using Clock = std::chrono::steady_clock;

// Prints the reason. Is it one that no death of others excuses: kFinding.
int Report(const std::exception& error);
bool IsFinding(const std::exception& error);

int OpenDescriptors();
// Throws when there are more descriptors than `before`, and says which there are.
void CheckDescriptors(int before);

// From now; "1.5".
Clock::time_point After(const std::string& seconds);

}  // namespace verbena::testing
