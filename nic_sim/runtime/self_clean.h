// SPDX-License-Identifier: Apache-2.0
//
// Our own programs must not see the simulated devices that our own preload shows: verbenad
// (DPDK opens libmlx5 and libibverbs) and verbena drop our entries of LD_PRELOAD and
// IBV_DRIVERS / RDMAV_DRIVERS for themselves. Entries of others stay.
//
// An entry is ours when its file name is libverbena-preload.so (LD_PRELOAD), or libverbena or
// libverbena-rdmavNN.so (drivers).
#pragma once

#include <string>
#include <string_view>

namespace verbena::nic {

inline constexpr std::string_view kPreloadFile = "libverbena-preload.so";
inline constexpr std::string_view kDriverName = "libverbena";

// The list without our entries; separators of LD_PRELOAD are blank and colon, of driver lists
// colon and semicolon. What stays is joined by colons.
std::string WithoutOurPreload(std::string_view list);
std::string WithoutOurDrivers(std::string_view list);

// To be called first in main(), before any thread and any descriptor that matters. Removes our
// drivers from the environment; when our preload is loaded, also removes it from LD_PRELOAD and
// executes this program again with the same arguments (does not return then). When that fails
// the program goes on with the preload.
void CleanSelf(char** argv);

}  // namespace verbena::nic
