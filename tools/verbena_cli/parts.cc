// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/parts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

namespace verbena::tools {
namespace {

constexpr std::string_view kDeleted = " (deleted)";
constexpr std::string_view kProviderSuffix = "-rdmav34.so";

std::string ThisProgram() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  if (length <= 0) return {};
  std::string program(path, static_cast<size_t>(length));
  // A rebuild may have replaced the file under this process.
  if (program.ends_with(kDeleted)) program.resize(program.size() - kDeleted.size());
  return program;
}

std::string RealPath(const std::string& path) {
  char* real = realpath(path.c_str(), nullptr);
  if (real == nullptr) return {};
  std::string result = real;
  free(real);
  return result;
}

// The first of the folders (relative to `base`) that has the file. The folder's links are
// resolved, the file's are not: a library keeps the name that its loader expects.
std::string Find(const std::string& base, std::initializer_list<const char*> folders,
                 std::string_view file, int access_mode) {
  for (const char* folder : folders) {
    const std::string real = RealPath(base + "/" + folder);
    if (real.empty()) continue;
    std::string path = fmt::format("{}/{}", real, file);
    if (access(path.c_str(), access_mode) == 0) return path;
  }
  return {};
}

std::string Missing(std::string_view file, const std::string& base, const char* folders) {
  return fmt::format(
      "{} is missing (looked in {} seen from {}). Build all parts: bazel build //..., or stage a "
      "complete tree: tools/stage DIR",
      file, folders, base);
}

}  // namespace

Parts FindParts(const std::string& program) {
  Parts parts;
  parts.program = RealPath(program.empty() ? ThisProgram() : program);
  const std::string base = parts.program.substr(0, parts.program.rfind('/'));
  parts.daemon = Find(base, {".", "../nic_sim"}, "verbenad", X_OK);
  if (parts.daemon.empty()) parts.missing_daemon = Missing("verbenad", base, "., ../nic_sim");
  const auto library = [&base](std::string_view file) {
    return Find(base, {"../lib", "../lib/verbena", "../provider"}, file, R_OK);
  };
  const std::string provider_file = fmt::format("libverbena{}", kProviderSuffix);
  parts.provider = library(provider_file);
  parts.preload = library("libverbena-preload.so");
  if (parts.provider.empty() || parts.preload.empty()) {
    parts.missing_libraries =
        Missing(parts.provider.empty() ? provider_file : "libverbena-preload.so", base,
                "../lib, ../lib/verbena, ../provider");
  } else {
    parts.driver_name = parts.provider.substr(0, parts.provider.size() - kProviderSuffix.size());
  }
  return parts;
}

}  // namespace verbena::tools
