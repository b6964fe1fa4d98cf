// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/supervisor/engine_link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

namespace verbena::nic {
namespace {

int TrySend(int socket, const LinkMessage& message, int fd) {
  const std::span<const int> fds = fd < 0 ? std::span<const int>() : std::span(&fd, 1);
  return SendMessage(socket, BytesOf(message), fds);
}

// Conditions that pass: the socket is full, or too many descriptors are on their way.
bool IsTemporary(int error) {
  return error == EAGAIN || error == ENOBUFS || error == ETOOMANYREFS || error == ENOMEM;
}

}  // namespace

EngineLink::EngineLink(UniqueFd socket) : socket_(std::move(socket)) {
  fcntl(socket_.get(), F_SETFL, fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  fcntl(socket_.get(), F_SETFD, FD_CLOEXEC);
}

void EngineLink::Send(const LinkMessage& message, int fd) {
  Flush();
  if (pending_.empty() && !IsTemporary(TrySend(socket_.get(), message, fd))) return;
  pending_.push_back({message, UniqueFd(fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3))});
}

void EngineLink::Flush() {
  while (!pending_.empty()) {
    const Pending& next = pending_.front();
    if (IsTemporary(TrySend(socket_.get(), next.message, next.fd.get()))) return;
    pending_.pop_front();
  }
}

void EngineLink::Drain(int milliseconds) {
  Flush();
  for (; milliseconds > 0 && has_pending(); milliseconds -= 10) {
    pollfd descriptor = {socket_.get(), POLLOUT, 0};
    poll(&descriptor, 1, 10);
    Flush();
  }
}

EngineLink::News EngineLink::Poll() {
  std::array<std::byte, sizeof(LinkMessage)> buffer;
  const ReceivedMessage got = ReceiveMessage(socket_.get(), buffer);
  switch (got.kind) {
    case ReceivedMessage::Kind::kNothing:
      return News::kNone;
    case ReceivedMessage::Kind::kClosed:
      return News::kSupervisorGone;
    case ReceivedMessage::Kind::kMessage:
      return News::kStop;  // the only message
  }
  return News::kNone;
}

}  // namespace verbena::nic
