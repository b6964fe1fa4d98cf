// SPDX-License-Identifier: Apache-2.0
#include "provider/command_channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "provider/run_folder.h"

namespace verbena::provider {
namespace {

constexpr int kHelloSeconds = 10;

// The kernel's own answer: fstat() is interposed by our preload.
bool StatFd(int fd, struct stat* status) { return syscall(SYS_fstat, fd, status) == 0; }

// Collects descriptors; those that nobody expects are closed at once.
void CollectFds(msghdr* message, ReplyFds* fds) {
  for (cmsghdr* item = CMSG_FIRSTHDR(message); item != nullptr; item = CMSG_NXTHDR(message, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
      fd = KeepOffStandardFds(fd);
      if (fd < 0) {
        if (fds != nullptr) fds->lost = true;
        continue;
      }
      // They are known by their order: nothing good comes behind a gap.
      if (fds != nullptr && !fds->lost && fds->count < kMaxReplyFds) {
        fds->fd[fds->count++] = fd;
      } else {
        close(fd);
      }
    }
  }
}

}  // namespace

ReplyFds::~ReplyFds() {
  for (int i = 0; i < count; ++i) {
    if (fd[i] >= 0) close(fd[i]);
  }
}

int ReplyFds::Take(int index) {
  if (index >= count) return -1;
  const int taken = fd[index];
  fd[index] = -1;
  return taken;
}

int CommandChannel::Init(int socket_fd) {
  struct stat status;
  if (!StatFd(socket_fd, &status)) return errno;
  // The receive loop looks once a second whether the device still lives.
  const timeval second = {1, 0};
  if (setsockopt(socket_fd, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof(second)) != 0) return errno;
  const int error = pthread_mutex_init(&mutex_, nullptr);
  if (error != 0) return error;
  fd_ = socket_fd;
  owner_ = getpid();
  socket_device_ = status.st_dev;
  socket_inode_ = status.st_ino;
  sequence_ = 0;
  broken_ = false;
  hung_up_.store(false, std::memory_order_relaxed);
  status_ = nullptr;
  return 0;
}

void CommandChannel::Close() {
  if (!StillOurSocket()) return;
  if (owner_ == getpid() && !broken_ && shutdown(fd_, SHUT_WR) == 0) {
    const NoCancellation no_cancellation;
    char byte;
    Receive(&byte, sizeof(byte), nullptr, 1);
  }
  close(fd_);
  fd_ = -1;
  pthread_mutex_destroy(&mutex_);
}

bool CommandChannel::StillOurSocket() const {
  struct stat status;
  return fd_ >= 0 && StatFd(fd_, &status) && status.st_dev == socket_device_ &&
         status.st_ino == socket_inode_;
}

bool CommandChannel::LookForHangUp() const {
  if (DeviceDead()) return true;
  if (owner_ != getpid() || !StillOurSocket()) return false;
  pollfd connection = {fd_, 0, 0};
  if (poll(&connection, 1, 0) == 1 && (connection.revents & (POLLHUP | POLLERR)) != 0) {
    hung_up_.store(true, std::memory_order_release);
  }
  return DeviceDead();
}

int CommandChannel::Send(const void* data, size_t bytes, int send_fd) {
  iovec part = {const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (send_fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* item = CMSG_FIRSTHDR(&message);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(item), &send_fd, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes) ? 0 : EIO;
}

ssize_t CommandChannel::Receive(void* data, size_t bytes, ReplyFds* fds, int patience) {
  int seconds = 0;
  while (true) {
    iovec part = {data, bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * (kMaxReplyFds + 4))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(fd_, &message, MSG_CMSG_CLOEXEC);
    if (got >= 0) {
      CollectFds(&message, fds);
      if ((message.msg_flags & MSG_TRUNC) != 0) return -EPROTO;
      // The bytes are all there: only descriptors had no room in this process.
      if ((message.msg_flags & MSG_CTRUNC) != 0) {
        if (fds == nullptr) return -EPROTO;
        fds->lost = true;
      }
      return got;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return -errno;
    if (DeviceDead()) return -EIO;
    if (patience != 0 && ++seconds >= patience) return -ETIMEDOUT;
  }
}

int CommandChannel::SayHello(const abi::Hello& hello, int mem_fd, abi::HelloReply* reply,
                             ReplyFds* fds) {
  const NoCancellation no_cancellation;
  if (Send(&hello, sizeof(hello), mem_fd) != 0) return EIO;
  memset(reply, 0, sizeof(*reply));
  const ssize_t got = Receive(reply, sizeof(*reply), fds, kHelloSeconds);
  if (got < 0) return static_cast<int>(-got);
  if (got == 0) return EIO;
  // A device of another version may have attributes of another size: its
  // numbers, which come first, are still good for the message.
  if (static_cast<size_t>(got) < offsetof(abi::HelloReply, cookie) || reply->magic != abi::kMagic) {
    return EPROTO;
  }
  if (reply->error != 0) return reply->error > 0 ? reply->error : EPROTO;
  if (got != sizeof(*reply)) return EPROTO;
  return fds->lost ? EMFILE : 0;
}

int CommandChannel::Transact(abi::CommandHeader* request, abi::ReplyHeader* reply,
                             size_t reply_bytes, int send_fd, ReplyFds* fds) {
  // The owner is checked before the mutex: a forked child may have inherited it
  // locked.
  if (owner_ != getpid() || DeviceDead()) return EIO;
  const NoCancellation no_cancellation;
  pthread_mutex_lock(&mutex_);
  const int error = TransactLocked(request, reply, reply_bytes, send_fd, fds);
  pthread_mutex_unlock(&mutex_);
  return error;
}

int CommandChannel::TransactLocked(abi::CommandHeader* request, abi::ReplyHeader* reply,
                                   size_t reply_bytes, int send_fd, ReplyFds* fds) {
  if (broken_ || !StillOurSocket()) return EIO;
  request->sequence = ++sequence_;
  // What follows is a conversation: after any surprise neither side knows what
  // the next message means.
  broken_ = true;
  if (Send(request, request->size, send_fd) != 0) return EIO;
  const ssize_t got = Receive(reply, reply_bytes, fds, 0);
  if (got < static_cast<ssize_t>(sizeof(abi::ReplyHeader))) return EIO;
  if (reply->sequence != request->sequence || reply->error < 0) return EIO;
  if (reply->error == 0 && static_cast<size_t>(got) != reply_bytes) return EIO;
  broken_ = false;
  return reply->error;
}

}  // namespace verbena::provider
