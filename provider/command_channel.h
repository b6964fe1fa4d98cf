// SPDX-License-Identifier: Apache-2.0
//
// The provider's end of the command channel (nic_sim/abi/commands.h): one
// connection per ibv_context, one command at a time.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "nic_sim/abi/commands.h"

namespace verbena::provider {

inline constexpr int kMaxReplyFds = 4;

// Descriptors of a reply; those not taken are closed.
struct ReplyFds {
  int fd[kMaxReplyFds] = {-1, -1, -1, -1};
  int count = 0;
  bool lost = false;  // more came than this process may have

  ReplyFds() = default;
  ReplyFds(const ReplyFds&) = delete;
  ReplyFds& operator=(const ReplyFds&) = delete;
  ~ReplyFds();
  int Take(int index);  // -1 if there is none
};

// Commands hold a mutex across system calls that are cancellation points.
class NoCancellation {
 public:
  NoCancellation() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~NoCancellation() { pthread_setcancelstate(before_, nullptr); }
  NoCancellation(const NoCancellation&) = delete;
  NoCancellation& operator=(const NoCancellation&) = delete;

 private:
  int before_;
};

// Lives in zeroed memory of the context. Any thread; commands are serialised
// by a mutex and are no cancellation points.
class CommandChannel {
 public:
  // Takes a connected socket. 0 or an errno.
  int Init(int socket_fd);
  // Says goodbye and waits, for at most a second, until the device has freed
  // the context, so that its memory is not written to any more. A process that
  // does not own the connection (fork) only closes its descriptor.
  void Close();

  // First message; the reply arrives within some seconds or ETIMEDOUT.
  int SayHello(const abi::Hello& hello, int mem_fd, abi::HelloReply* reply, ReplyFds* fds);
  // After SayHello.
  void SetStatusPage(const abi::StatusPage* status) { status_ = status; }
  void SetContextPage(const abi::ContextPage* page) { page_ = page; }

  // Sends `request` (header.op set, the rest of the header is filled in) and
  // waits for the reply. Returns 0, the device's errno, or EIO if the device is
  // gone or this is a forked child. The contents of `reply` are valid with 0.
  // Descriptors in order; `send_fd` may be -1.
  template <typename Request, typename Reply>
  int Execute(Request* request, Reply* reply, int send_fd = -1, ReplyFds* fds = nullptr) {
    static_assert(sizeof(Request) <= abi::kMaxMessageBytes);
    static_assert(sizeof(Reply) <= abi::kMaxMessageBytes);
    request->header.size = sizeof(Request);
    return Transact(&request->header, &reply->header, sizeof(Reply), send_fd, fds);
  }

  bool DeviceDead() const {
    return (status_ != nullptr && status_->device_dead.load(std::memory_order_acquire) != 0) ||
           (page_ != nullptr && page_->removed.load(std::memory_order_acquire) != 0) ||
           hung_up_.load(std::memory_order_acquire);
  }

  // The supervisor announces the death of the engine; when it died as well, only the connection
  // tells. Its end is closed after all threads of the engine have lost their memory, so nothing is
  // written any more. A few system calls; true if the device is dead. Not before SayHello.
  bool LookForHangUp() const;

 private:
  int Transact(abi::CommandHeader* request, abi::ReplyHeader* reply, size_t reply_bytes,
               int send_fd, ReplyFds* fds);
  int TransactLocked(abi::CommandHeader* request, abi::ReplyHeader* reply, size_t reply_bytes,
                     int send_fd, ReplyFds* fds);
  int Send(const void* data, size_t bytes, int send_fd);
  // Bytes received, 0 at end of file, or -errno. `patience` is in seconds; 0:
  // as long as the device lives.
  ssize_t Receive(void* data, size_t bytes, ReplyFds* fds, int patience);
  // The application may have closed our descriptor, and the number may now be
  // a file of its own.
  bool StillOurSocket() const;

  pthread_mutex_t mutex_;
  int fd_;
  pid_t owner_;
  uint64_t socket_device_;
  uint64_t socket_inode_;
  uint32_t sequence_;
  bool broken_;
  mutable std::atomic<bool> hung_up_;
  const abi::StatusPage* status_;
  const abi::ContextPage* page_;
};

}  // namespace verbena::provider
