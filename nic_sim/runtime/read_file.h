// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace verbena::nic {

// More is refused: files that people write, and those of /proc, are small.
inline constexpr size_t kMostFileBytes = size_t{256} << 20;

// All of a file. Nothing: errno says why, also for a folder (EISDIR), a process
// that ends meanwhile (/proc, ESRCH) and what is too long (EFBIG).
std::optional<std::string> ReadFile(const std::string& path);

}  // namespace verbena::nic
