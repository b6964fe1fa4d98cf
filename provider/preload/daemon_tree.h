// SPDX-License-Identifier: Apache-2.0
//
// Which files stand in for those that a kernel with RDMA devices would have:
// the daemon writes a tree beside its socket, and absolute paths below
// /sys/class/infiniband, /dev/infiniband and a few more lead there. Without a
// daemon they lead to a tree with no device in it, so that real devices of the
// machine stay hidden.
//
// Any thread, signal handlers and forked children; no allocation; errno is
// preserved.
#pragma once

#include <cstddef>

#include "provider/run_folder.h"

namespace verbena::provider {

// The device nodes that we stand in for.
struct DeviceNode {
  enum Kind { kNone, kUverbs, kRdmaCm } kind = kNone;
  unsigned number = 0;  // N of uverbsN
};

class RewrittenPath {
 public:
  // Any path, NULL too.
  explicit RewrittenPath(const char* path);
  RewrittenPath(const RewrittenPath&) = delete;
  RewrittenPath& operator=(const RewrittenPath&) = delete;

  // What to give to the kernel: the path itself if it is none of ours.
  const char* path() const { return path_; }
  bool ours() const { return ours_; }
  // Which device node the path names; whether the tree has it is another matter.
  const DeviceNode& node() const { return node_; }
  bool is_node() const { return node_.kind != DeviceNode::kNone; }

 private:
  const char* path_;
  bool ours_ = false;
  DeviceNode node_;
  // Longest path of ours below the tree, and the tree's own.
  char buffer_[1024 + 128];
};

// The socket of the daemon whose tree is shown; false: there is none.
bool FindDaemon(SocketPath* socket);

// Takes the tree's folder away from a path that the kernel has given (a link's
// content, a resolved or globbed path). `text` holds `length` bytes; returns
// how many are left. Does not terminate.
size_t StripTree(char* text, size_t length);

// The same for a terminated string.
void StripTree(char* text);

}  // namespace verbena::provider
