// SPDX-License-Identifier: Apache-2.0
//
// Parts of the engine that the builds --config=without_trace and --config=without_faults leave
// out, so that `tools/bench --only cost` can say what they cost. Every other build has them.
#pragma once

namespace verbena::nic {

#ifdef VERBENA_WITHOUT_TRACE
inline constexpr bool kHasTrace = false;
#else
inline constexpr bool kHasTrace = true;
#endif

#ifdef VERBENA_WITHOUT_FAULTS
inline constexpr bool kHasFaults = false;
#else
inline constexpr bool kHasFaults = true;
#endif

}  // namespace verbena::nic
