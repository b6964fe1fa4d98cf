// SPDX-License-Identifier: Apache-2.0
//
// Files of the lab page, embedded by embed.py when Verbena is built.
#pragma once

#include <string_view>

namespace verbena::tools {

extern const std::string_view kLabPage;    // index.html
extern const std::string_view kLabScript;  // all of web/*.js as one module
extern const std::string_view kLabStyle;
// The page as one file that needs no other; kRunMark stands where its run belongs.
extern const std::string_view kStandalonePage;
inline constexpr std::string_view kRunMark = "{\"verbena_run\":null}";

}  // namespace verbena::tools
