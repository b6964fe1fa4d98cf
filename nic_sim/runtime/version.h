// SPDX-License-Identifier: Apache-2.0
//
// The version that `verbena version`, `verbenad --version` and the control interface print.
#pragma once

namespace verbena::nic {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace verbena::nic
