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
// its own. `access` is O_RDONLY or O_WRONLY. Returns it or -errno.
int ReopenPipe(int fd, int access);

// Takes the unread records of `element` out of the pipe behind `fd`, so that
// nobody gets a pointer to a destroyed object, and returns how many there were.
// Other records stay, behind those that arrive meanwhile; `turn` keeps threads
// apart that drain one pipe, because while one holds the others' records these
// seem to be gone. The device writes no more records of `element`.
uint32_t DrainEvents(pthread_mutex_t* turn, int fd, size_t record_bytes, uint64_t element);

}  // namespace verbena::provider
