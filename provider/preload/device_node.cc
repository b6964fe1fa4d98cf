// SPDX-License-Identifier: Apache-2.0
#include "provider/preload/device_node.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>

#include "nic_sim/abi/rdma_cm.h"
#include "provider/preload/rdma_cm_fd.h"
#include "provider/preload/uverbs_fd.h"

namespace verbena::provider {
namespace {

int Fail(int error) {
  errno = error;
  return -1;
}

}  // namespace

int OpenNode(const RewrittenPath& path, int flags) {
  if (syscall(SYS_faccessat, AT_FDCWD, path.path(), F_OK) != 0) return -1;
  if ((flags & O_DIRECTORY) != 0) return Fail(ENOTDIR);
  if ((flags & O_CREAT) != 0 && (flags & O_EXCL) != 0) return Fail(EEXIST);
  switch (path.node().kind) {
    case DeviceNode::kUverbs:
      return OpenUverbs(path.node().number, flags);
    case DeviceNode::kRdmaCm:
      return OpenRdmaCm(flags);
    case DeviceNode::kNone:
      break;
  }
  return Fail(ENXIO);
}

void MakeCharDevice(struct stat* status, const DeviceNode& node) {
  status->st_mode = S_IFCHR | 0666;
  status->st_rdev = node.kind == DeviceNode::kRdmaCm
                        ? makedev(abi::kMiscMajor, abi::kRdmaCmMinor)
                        : makedev(abi::kUverbsMajor, abi::kUverbsFirstMinor + node.number);
  status->st_nlink = 1;
  status->st_size = 0;
  status->st_blocks = 0;
}

void FixFdStatus(int fd, struct stat* status) {
  DeviceNode node;
  if (S_ISSOCK(status->st_mode)) {
    if (!IsRdmaCm(fd)) return;
    node.kind = DeviceNode::kRdmaCm;
  } else {
    if (!IsUverbs(fd, *status, &node.number)) return;
    node.kind = DeviceNode::kUverbs;
  }
  MakeCharDevice(status, node);
}

}  // namespace verbena::provider
