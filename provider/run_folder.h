// SPDX-License-Identifier: Apache-2.0
//
// Where clients look for the daemon's socket. Shared by provider and preload:
// no allocation, and system calls directly, since libc's names for them are
// interposed.
#pragma once

#include <sys/un.h>

#include <cstddef>

namespace verbena::provider {

struct SocketPath {
  char text[sizeof(sockaddr_un::sun_path)];
};
inline constexpr int kMaxSocketPaths = 2;

// Fills `paths` in order of preference and returns how many there are:
// $VERBENA_SOCKET alone, or NAME.sock in the own run folder, then in
// /run/verbena. Folders that another user could have made are left out.
int FindSocketPaths(SocketPath paths[kMaxSocketPaths]);

// The own run folder: $XDG_RUNTIME_DIR/verbena, or /tmp/verbena-UID. False if
// it does not fit. The folder need not exist.
bool OwnRunFolder(char* text, size_t size);

// True if `path` is a folder (no link) that belongs to `uid` and that nobody
// else may write to.
bool IsPrivateFolder(const char* path, unsigned uid);

// Returns a connected SOCK_SEQPACKET socket (close on exec, never 0, 1 or 2) or
// -errno. Waits while the daemon's backlog is full.
int ConnectTo(const SocketPath& path);

// Moves a descriptor that took the place of a closed stdin, stdout or stderr
// out of the way; the result closes on exec. Takes and gives negative errors.
int KeepOffStandardFds(int fd);

}  // namespace verbena::provider
