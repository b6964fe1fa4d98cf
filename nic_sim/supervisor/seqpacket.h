// SPDX-License-Identifier: Apache-2.0
//
// Messages with descriptors over SOCK_SEQPACKET sockets, and a descriptor that closes itself.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace verbena::nic {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    reset(other.release());
    return *this;
  }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) {
    if (fd_ >= 0 && fd_ != fd) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// A received message; its bytes are in the caller's buffer.
struct ReceivedMessage {
  enum class Kind {
    kMessage,
    kNothing,  // would block
    kClosed,   // the peer is gone, or the socket is broken
  } kind = Kind::kNothing;
  size_t bytes = 0;
  bool truncated = false;     // longer than the buffer
  std::vector<UniqueFd> fds;  // at most kMaxReceivedFds; the kernel closes the rest
};
inline constexpr size_t kMaxReceivedFds = 4;

// Does not block. An empty message counts as kClosed (SEQPACKET cannot tell them apart).
ReceivedMessage ReceiveMessage(int fd, std::span<std::byte> buffer);

// Sends one message with up to 64 descriptors (which stay the caller's). 0 or errno; EAGAIN when
// the socket is full. Never raises SIGPIPE; blocks only if the socket does.
int SendMessage(int fd, std::span<const std::byte> bytes, std::span<const int> fds = {});

// Another descriptor of the same pipe whose open file description is our own, so that nobody can
// make it blocking: via /proc, else a duplicate set to O_NONBLOCK. Invalid when `fd` is no
// writable pipe.
UniqueFd OwnPipeWriteEnd(int fd);

}  // namespace verbena::nic
