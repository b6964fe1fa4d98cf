// SPDX-License-Identifier: Apache-2.0
#include "provider/event_pipe.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "provider/command_channel.h"
#include "provider/run_folder.h"

namespace verbena::provider {
namespace {

// More than a pipe holds; a limit for pipes that fill as fast as they drain.
constexpr uint32_t kMaxRecords = 1 << 16;
constexpr int kMaxWriteTries = 10000;

struct Records {
  uint8_t* bytes = nullptr;
  size_t used = 0;
  size_t room = 0;

  ~Records() { free(bytes); }

  bool Add(const uint8_t* record, size_t size) {
    if (used + size > room) {
      const size_t more = room == 0 ? 4096 : room * 2;
      void* grown = realloc(bytes, more);
      if (grown == nullptr) return false;
      bytes = static_cast<uint8_t*>(grown);
      room = more;
    }
    memcpy(bytes + used, record, size);
    used += size;
    return true;
  }
};

bool WriteBack(int fd, const uint8_t* record, size_t size) {
  for (int i = 0; i < kMaxWriteTries; ++i) {
    if (write(fd, record, size) == static_cast<ssize_t>(size)) return true;
    if (errno != EAGAIN && errno != EINTR) return false;
    sched_yield();
  }
  return false;
}

uint32_t DrainInTurn(int pipe, size_t record_bytes, uint64_t element) {
  uint32_t drained = 0;
  Records others;
  uint8_t record[16];
  for (uint32_t i = 0; i < kMaxRecords; ++i) {
    if (read(pipe, record, record_bytes) != static_cast<ssize_t>(record_bytes)) break;
    uint64_t found;
    memcpy(&found, record, sizeof(found));
    if (found == element) {
      ++drained;
    } else if (!others.Add(record, record_bytes)) {
      WriteBack(pipe, record, record_bytes);
      break;
    }
  }
  for (size_t at = 0; at < others.used; at += record_bytes) {
    WriteBack(pipe, others.bytes + at, record_bytes);
  }
  return drained;
}

// The application may have closed a descriptor of ours, and the number may now
// be a file of its own. fstat() is interposed by our preload.
bool IsSameFile(int a, int b) {
  struct stat of_a;
  struct stat of_b;
  return syscall(SYS_fstat, a, &of_a) == 0 && syscall(SYS_fstat, b, &of_b) == 0 &&
         of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}

}  // namespace

int ReopenPipe(int fd, int access) {
  char path[32];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  const int opened =
      static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, access | O_NONBLOCK | O_CLOEXEC));
  return KeepOffStandardFds(opened < 0 ? -errno : opened);
}

void FillReserve(ReserveFds* reserve, int cmd_fd) {
  for (int& fd : reserve->fd) {
    const int duplicate =
        static_cast<int>(syscall(SYS_fcntl, cmd_fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
    fd = duplicate < 0 ? 0 : duplicate;
  }
}

void FreeReserve(ReserveFds* reserve, int cmd_fd) {
  for (int& fd : reserve->fd) {
    if (fd != 0 && IsSameFile(fd, cmd_fd)) close(fd);
    fd = 0;
  }
}

int EventDrain::Open(int pipe_fd) {
  const NoCancellation no_cancellation;
  pipe_ = ReopenPipe(pipe_fd, O_RDWR);
  if (pipe_ >= 0) return 0;
  if (pipe_ != -EMFILE && pipe_ != -ENFILE) {
    // No way to the pipe at all (no /proc): fine as long as nothing is unread.
    int unread = 0;
    return ioctl(pipe_fd, FIONREAD, &unread) == 0 && unread == 0 ? 0 : -pipe_;
  }
  pthread_mutex_lock(turn_);
  for (int i = 0; i < ReserveFds::kCount && pipe_ < 0; ++i) {
    const int spare = reserve_->fd[i];
    reserve_->fd[i] = 0;
    if (spare == 0 || !IsSameFile(spare, cmd_fd_)) continue;
    close(spare);
    pipe_ = ReopenPipe(pipe_fd, O_RDWR);
    from_reserve_ = i;
  }
  pthread_mutex_unlock(turn_);
  return pipe_ < 0 ? -pipe_ : 0;
}

EventDrain::~EventDrain() {
  if (pipe_ < 0) return;
  if (from_reserve_ < 0) {
    close(pipe_);
    return;
  }
  // In one step, so that no other thread gets the number meanwhile.
  const bool back = syscall(SYS_dup3, cmd_fd_, pipe_, O_CLOEXEC) == pipe_;
  if (!back) close(pipe_);
  pthread_mutex_lock(turn_);
  reserve_->fd[from_reserve_] = back ? pipe_ : 0;
  pthread_mutex_unlock(turn_);
}

uint32_t EventDrain::Take(size_t record_bytes, uint64_t element) {
  if (pipe_ < 0) return 0;
  const NoCancellation no_cancellation;
  pthread_mutex_lock(turn_);
  const uint32_t drained = DrainInTurn(pipe_, record_bytes, element);
  pthread_mutex_unlock(turn_);
  return drained;
}

}  // namespace verbena::provider
