// SPDX-License-Identifier: Apache-2.0
//
// Completion channels and the async event descriptor are pipes with records of
// 8 and 16 bytes; the first 8 name the object.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace verbena::provider {

// A second open file description of the pipe behind `fd`, with O_NONBLOCK of
// its own. `access` is O_WRONLY or O_RDWR. Returns it or -errno.
int ReopenPipe(int fd, int access);

// Descriptors that a context keeps free for the pipes that it drains. Each is a
// duplicate of the command descriptor. Zeroed memory holds none.
struct ReserveFds {
  static constexpr int kCount = 2;  // channel and async pipe of one CQ
  int fd[kCount];                   // 0: none (standard descriptors are never taken)
};
void FillReserve(ReserveFds* reserve, int cmd_fd);
void FreeReserve(ReserveFds* reserve, int cmd_fd);

// What destroying an object needs of a pipe: a description of its own, opened
// before the device is told, so that a process which has no descriptor left
// hears that in time. After the command it is too late to fail: events that
// cannot be taken out would have to be waited for.
class EventDrain {
 public:
  EventDrain(pthread_mutex_t* turn, ReserveFds* reserve, int cmd_fd)
      : turn_(turn), reserve_(reserve), cmd_fd_(cmd_fd) {}
  ~EventDrain();
  EventDrain(const EventDrain&) = delete;
  EventDrain& operator=(const EventDrain&) = delete;

  // 0 or an errno. Takes a descriptor of the reserve if there is no other.
  int Open(int pipe_fd);

  // Takes the unread records of `element` out of the pipe, so that nobody gets a
  // pointer to a destroyed object, and returns how many there were. Other
  // records stay, behind those that arrive meanwhile; `turn` keeps threads apart
  // that drain one pipe, because while one holds the others' records these seem
  // to be gone. The device writes no more records of `element`.
  uint32_t Take(size_t record_bytes, uint64_t element);

 private:
  pthread_mutex_t* turn_;
  ReserveFds* reserve_;
  int cmd_fd_;
  int pipe_ = -1;
  int from_reserve_ = -1;  // index
};

}  // namespace verbena::provider
