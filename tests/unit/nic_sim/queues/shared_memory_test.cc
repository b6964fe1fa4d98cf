// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/queues/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace verbena::nic {
namespace {

// Runs `check` in a child that has no privilege over files; its result.
template <typename Check>
int InUnprivilegedChild(Check check) {
  const pid_t child = fork();
  if (child == 0) {
    __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    const __user_cap_data_struct none[2] = {};
    if (syscall(SYS_capset, &header, none) != 0) _exit(255);
    _exit(check());
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST(SharedMemory, AReadOnlyDescriptorCannotBeMadeWritable) {
  const SharedMemory memory = SharedMemory::Create("test", 4096);
  ASSERT_NE(memory.data(), nullptr);
  memory.data()[7] = std::byte{42};
  const int fd = memory.OpenReadOnly();
  ASSERT_GE(fd, 0);
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  void* seen = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(seen, MAP_FAILED);
  EXPECT_EQ(static_cast<const std::byte*>(seen)[7], std::byte{42});
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  EXPECT_EQ(InUnprivilegedChild([&path] { return open(path.c_str(), O_RDWR) < 0 ? errno : 0; }),
            EACCES);
  EXPECT_EQ(munmap(seen, 4096), 0);
  close(fd);
}

}  // namespace
}  // namespace verbena::nic
