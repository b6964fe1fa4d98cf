// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/runtime/run_folder.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace verbena::nic {
namespace {

std::string Environment(const char* variable) {
  const char* value = secure_getenv(variable);
  return value == nullptr ? std::string() : std::string(value);
}

bool IsNameCharacter(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '.' || c == '-';
}

// Follows links on purpose: XDG_RUNTIME_DIR itself is the user's own choice.
bool IsOwnFolder(const std::string& path) {
  struct stat info = {};
  return !path.empty() && path.front() == '/' && stat(path.c_str(), &info) == 0 &&
         S_ISDIR(info.st_mode) && info.st_uid == geteuid();
}

PathResult FileInFolder(const std::string& folder, std::string_view name, const char* suffix) {
  if (std::string problem = CheckInstanceName(name); !problem.empty()) {
    return PathResult::Error(problem);
  }
  std::string path = folder + "/" + std::string(name) + suffix;
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return PathResult::Error("the path " + path + " is too long for a socket (" +
                             std::to_string(path.size()) +
                             " bytes, at most 107): use a shorter name or XDG_RUNTIME_DIR");
  }
  return PathResult::Ok(std::move(path));
}

}  // namespace

std::string CheckInstanceName(std::string_view name) {
  const bool valid = !name.empty() && name.size() <= kMaxInstanceName && name.front() != '.' &&
                     std::all_of(name.begin(), name.end(), IsNameCharacter);
  if (valid) return {};
  return "'" + std::string(name.substr(0, 64)) +
         "' is not an instance name: 1 to 32 of A-Z a-z 0-9 _ . - and no dot in front";
}

PathResult InstanceName(std::string_view option) {
  std::string name(option);
  if (name.empty()) name = Environment("VERBENA_NAME");
  if (name.empty()) name = kDefaultInstance;
  if (std::string problem = CheckInstanceName(name); !problem.empty()) {
    return PathResult::Error(problem);
  }
  return PathResult::Ok(std::move(name));
}

std::string RunFolder(bool system) {
  if (system) return std::string(kSystemRunFolder);
  std::string runtime = Environment("XDG_RUNTIME_DIR");
  if (IsOwnFolder(runtime)) {
    while (runtime.size() > 1 && runtime.back() == '/') runtime.pop_back();
    return runtime + "/verbena";
  }
  return "/tmp/verbena-" + std::to_string(geteuid());
}

std::string CheckRunFolder(const std::string& path, bool system, unsigned owner, bool* missing) {
  if (missing != nullptr) *missing = false;
  struct stat info = {};
  if (lstat(path.c_str(), &info) != 0) {
    if (missing != nullptr) *missing = errno == ENOENT;
    return "cannot use the run folder " + path + ": " + std::strerror(errno);
  }
  if (S_ISLNK(info.st_mode)) {
    return "the run folder " + path + " is a symbolic link; somebody may have put it there. " +
           "Remove it and try again";
  }
  if (!S_ISDIR(info.st_mode)) return "the run folder " + path + " is not a folder; remove it";
  if (info.st_uid != owner) {
    return "the run folder " + path + " belongs to user " + std::to_string(info.st_uid) +
           ", not to user " + std::to_string(owner) +
           ". Set XDG_RUNTIME_DIR to a folder of your own or have it removed";
  }
  const mode_t forbidden = system ? S_IWGRP | S_IWOTH : S_IRWXG | S_IRWXO;
  if ((info.st_mode & forbidden) != 0) {
    return "the run folder " + path + (system ? " can be written" : " can be entered") +
           " by others: chmod " + (system ? "755 " : "700 ") + path;
  }
  return {};
}

PathResult CreateRunFolder(bool system) {
  std::string path = RunFolder(system);
  const mode_t mode = system ? 0755 : 0700;
  if (mkdir(path.c_str(), mode) == 0) {
    // The umask may have taken bits that other users of a system-wide daemon need. The folder
    // was made by this call; a parent with the sticky bit or of our own keeps it ours.
    if (system && chmod(path.c_str(), mode) != 0) {
      return PathResult::Error("cannot set the rights of " + path + ": " + std::strerror(errno));
    }
  } else if (errno != EEXIST) {
    return PathResult::Error("cannot make the run folder " + path + ": " + std::strerror(errno) +
                             (system ? " (--system needs root)" : ""));
  }
  if (std::string problem = CheckRunFolder(path, system, geteuid()); !problem.empty()) {
    return PathResult::Error(std::move(problem));
  }
  return PathResult::Ok(std::move(path));
}

PathResult SocketPath(const std::string& folder, std::string_view name) {
  return FileInFolder(folder, name, ".sock");
}

PathResult LockPath(const std::string& folder, std::string_view name) {
  return FileInFolder(folder, name, ".lock");
}

PathResult PidPath(const std::string& folder, std::string_view name) {
  return FileInFolder(folder, name, ".pid");
}

std::vector<std::string> SocketCandidates(std::string_view name, bool use_environment) {
  std::vector<std::string> candidates;
  const auto add = [&candidates](std::string path) {
    if (path.empty()) return;
    if (std::find(candidates.begin(), candidates.end(), path) != candidates.end()) return;
    candidates.push_back(std::move(path));
  };
  if (use_environment) add(Environment("VERBENA_SOCKET"));
  for (const bool system : {false, true}) {
    PathResult path = SocketPath(RunFolder(system), name);
    if (path.ok()) add(std::move(path.value));
  }
  return candidates;
}

bool FillAddress(const std::string& path, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address->sun_path)) return false;
  std::memcpy(address->sun_path, path.data(), path.size());
  return true;
}

}  // namespace verbena::nic
