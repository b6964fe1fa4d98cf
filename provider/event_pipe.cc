// SPDX-License-Identifier: Apache-2.0
#include "provider/event_pipe.h"

#include <fcntl.h>
#include <sched.h>
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

uint32_t DrainInTurn(int fd, size_t record_bytes, uint64_t element) {
  const int reader = ReopenPipe(fd, O_RDONLY);
  if (reader < 0) return 0;
  const int writer = ReopenPipe(fd, O_WRONLY);
  if (writer < 0) {
    close(reader);
    return 0;
  }
  uint32_t drained = 0;
  Records others;
  uint8_t record[16];
  for (uint32_t i = 0; i < kMaxRecords; ++i) {
    if (read(reader, record, record_bytes) != static_cast<ssize_t>(record_bytes)) break;
    uint64_t found;
    memcpy(&found, record, sizeof(found));
    if (found == element) {
      ++drained;
    } else if (!others.Add(record, record_bytes)) {
      WriteBack(writer, record, record_bytes);
      break;
    }
  }
  for (size_t at = 0; at < others.used; at += record_bytes) {
    WriteBack(writer, others.bytes + at, record_bytes);
  }
  close(reader);
  close(writer);
  return drained;
}

}  // namespace

int ReopenPipe(int fd, int access) {
  char path[32];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  const int opened =
      static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, access | O_NONBLOCK | O_CLOEXEC));
  return KeepOffStandardFds(opened < 0 ? -errno : opened);
}

uint32_t DrainEvents(pthread_mutex_t* turn, int fd, size_t record_bytes, uint64_t element) {
  const NoCancellation no_cancellation;
  pthread_mutex_lock(turn);
  const uint32_t drained = DrainInTurn(fd, record_bytes, element);
  pthread_mutex_unlock(turn);
  return drained;
}

}  // namespace verbena::provider
