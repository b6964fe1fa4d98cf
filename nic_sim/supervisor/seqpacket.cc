// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/supervisor/seqpacket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace verbena::nic {
namespace {

constexpr size_t kMaxSentFds = 64;

void TakeDescriptors(msghdr* message, std::vector<UniqueFd>* fds) {
  for (cmsghdr* item = CMSG_FIRSTHDR(message); item != nullptr; item = CMSG_NXTHDR(message, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
      fds->emplace_back(fd);
    }
  }
}

}  // namespace

ReceivedMessage ReceiveMessage(int fd, std::span<std::byte> buffer) {
  iovec part = {buffer.data(), buffer.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxReceivedFds)];
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got = 0;
  do {
    got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  ReceivedMessage result;
  if (got < 0) {
    const bool nothing = errno == EAGAIN || errno == EWOULDBLOCK;
    result.kind = nothing ? ReceivedMessage::Kind::kNothing : ReceivedMessage::Kind::kClosed;
    return result;
  }
  TakeDescriptors(&message, &result.fds);
  result.kind = got == 0 ? ReceivedMessage::Kind::kClosed : ReceivedMessage::Kind::kMessage;
  result.bytes = static_cast<size_t>(got);
  result.truncated = (message.msg_flags & MSG_TRUNC) != 0;
  return result;
}

int SendMessage(int fd, std::span<const std::byte> bytes, std::span<const int> fds) {
  if (fds.size() > kMaxSentFds) return EINVAL;
  iovec part = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxSentFds)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* item = CMSG_FIRSTHDR(&message);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(item), fds.data(), fds.size_bytes());
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(fd, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? errno : 0;
}

UniqueFd OwnPipeWriteEnd(int fd) {
  struct stat info = {};
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY || (flags & O_PATH) != 0 ||
      fstat(fd, &info) != 0 || !S_ISFIFO(info.st_mode)) {
    return UniqueFd();
  }
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  UniqueFd own(open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC));
  if (own.valid()) return own;
  if (fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) return UniqueFd();
  return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 3));
}

}  // namespace verbena::nic
