// SPDX-License-Identifier: Apache-2.0
//
// Where a daemon's files live and how it is found: instance names, run folder, socket path and
// the clients' look-up order. One set of rules for verbenad and for the tools.
//
// Run folder: $XDG_RUNTIME_DIR/verbena when $XDG_RUNTIME_DIR is an absolute path of a folder
// owned by the effective user, else /tmp/verbena-UID; of a system-wide daemon /run/verbena.
// In it NAME.sock (control and provider socket), NAME.lock (flock held by `verbena up` and
// `verbena run` while they start NAME, released when it is ready: the daemon must not lock it)
// and NAME.pid (the daemon's own: pid as text, flock held for its life).
// /tmp is writable by everyone, so a folder that is a link, that someone else owns or that
// others may enter is refused, by the daemon and by clients alike.
//
// Thread: any; reads the environment, so not concurrent with setenv. Start-up code only.
// Errors are sentences for people, without a final newline.
#pragma once

#include <sys/un.h>

#include <string>
#include <string_view>
#include <vector>

namespace verbena::nic {

// A path (or name), or the sentence that says why there is none.
struct PathResult {
  std::string value;
  std::string error;
  bool ok() const { return error.empty(); }

  static PathResult Ok(std::string value) { return {std::move(value), {}}; }
  static PathResult Error(std::string error) { return {{}, std::move(error)}; }
};

inline constexpr std::string_view kDefaultInstance = "default";
inline constexpr std::string_view kSystemRunFolder = "/run/verbena";
inline constexpr size_t kMaxInstanceName = 32;

// [A-Za-z0-9_.-]{1,32}, not starting with a dot. Empty result = valid, else a sentence.
std::string CheckInstanceName(std::string_view name);

// `option` (from --name) if it is not empty, else $VERBENA_NAME, else "default"; validated.
PathResult InstanceName(std::string_view option);

// The folder's path; nothing is created or looked at.
std::string RunFolder(bool system);

// Is `path` usable as a run folder by this user: a folder, no link, owned by `owner`, no entry
// for others (system: no write for others)? Empty = yes. `*missing` (may be null) says that
// nothing is there at all.
std::string CheckRunFolder(const std::string& path, bool system, unsigned owner,
                           bool* missing = nullptr);

// Makes the run folder (0700, system 0755) or checks the existing one. Gives its path.
PathResult CreateRunFolder(bool system);

// <folder>/NAME.sock: validates the name and that the path fits into sockaddr_un.
PathResult SocketPath(const std::string& folder, std::string_view name);
// <folder>/NAME.lock and <folder>/NAME.pid
PathResult LockPath(const std::string& folder, std::string_view name);
PathResult PidPath(const std::string& folder, std::string_view name);

// Paths a client tries in this order: $VERBENA_SOCKET (if set and `use_environment`), own run
// folder, /run/verbena. The name must be valid. No path twice.
std::vector<std::string> SocketCandidates(std::string_view name, bool use_environment);

// Fills a socket address; false when the path is empty or does not fit.
bool FillAddress(const std::string& path, sockaddr_un* address);

}  // namespace verbena::nic
