// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/control_client.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "nic_sim/runtime/read_file.h"
#include "nic_sim/runtime/run_folder.h"

namespace verbena::tools {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = ControlClient::Milliseconds;

// docs/CONTROL.md: "VRBN", kind 2 = control, little-endian.
constexpr std::array<unsigned char, 8> kHello = {'V', 'R', 'B', 'N', 2, 0, 0, 0};
static_assert(('V' | 'R' << 8 | 'B' << 16 | 'N' << 24) == 0x4e425256);

// Supervisors kill an engine that does not end within 10 s.
constexpr Milliseconds kStopPatience{15'000};
constexpr size_t kMaxRequest = 64 * 1024;
constexpr size_t kMaxPiece = 1 << 20;
constexpr size_t kMaxReply = 64 << 20;

class Deadline {
 public:
  explicit Deadline(Milliseconds timeout)
      : forever_(timeout.count() < 0),
        end_(Clock::now() + (forever_ ? Milliseconds(0) : timeout)) {}
  // For poll(2).
  int Left() const {
    if (forever_) return -1;
    const auto left = std::chrono::ceil<Milliseconds>(end_ - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, std::numeric_limits<int>::max()));
  }

 private:
  bool forever_;
  Clock::time_point end_;
};

enum class Wait { kReady, kTimeout, kCancelled };

Wait WaitFor(int fd, short events, int cancel_fd, const Deadline& deadline) {
  for (;;) {
    pollfd fds[2] = {{fd, events, 0}, {cancel_fd, POLLIN, 0}};
    const int ready = poll(fds, cancel_fd >= 0 ? 2 : 1, deadline.Left());
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return Wait::kTimeout;
    if (fds[0].revents != 0) return Wait::kReady;
    return Wait::kCancelled;
  }
}

Reply Failure(Reply::Kind kind, std::string error) { return {kind, {}, std::move(error)}; }
Reply Timeout() { return Failure(Reply::Kind::kTimeout, "the daemon does not answer"); }
Reply Closed() { return Failure(Reply::Kind::kClosed, "the daemon closed the connection"); }
Reply BadReply(const char* what) {
  return Failure(Reply::Kind::kBadReply, fmt::format("the daemon's answer is {}", what));
}

Reply ParseReply(const std::string& text) {
  Reply reply;
  reply.json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!reply.json.is_object()) return BadReply("no JSON object");
  if (const auto error = reply.json.find("error"); error != reply.json.end()) {
    Reply refused = Failure(Reply::Kind::kRefused, Printable(*error));
    refused.json = std::move(reply.json);  // which field is wrong
    return refused;
  }
  reply.kind = Reply::Kind::kOk;
  return reply;
}

// Puts the descriptor into the message's ancillary data. `control` must outlive the message.
void AttachDescriptor(msghdr* message, int descriptor, char* control, size_t size) {
  std::memset(control, 0, size);
  message->msg_control = control;
  message->msg_controllen = size;
  cmsghdr* header = CMSG_FIRSTHDR(message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
}

// The peer may copy what we send and write into files we pass: only our own daemon or root's.
std::string CheckPeer(int fd) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::strerror(errno);
  if (geteuid() == 0 || peer.uid == geteuid() || peer.uid == 0) return {};
  return fmt::format("that daemon belongs to user {}", peer.uid);
}

int OpenConnection(const std::string& path, std::string* error) {
  sockaddr_un address;
  if (!nic::FillAddress(path, &address)) {
    *error = "the path is empty or too long for a socket";
    return -1;
  }
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    *error = std::strerror(errno);
    return -1;
  }
  // Non-blocking connect on a unix socket gives EAGAIN when the backlog is full.
  const Deadline deadline(Milliseconds(2000));
  while (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EAGAIN && deadline.Left() > 0) {
      poll(nullptr, 0, 5);
      continue;
    }
    if (errno == EINTR) continue;
    *error = std::strerror(errno);
    close(fd);
    return -1;
  }
  return fd;
}

}  // namespace

ControlClient::~ControlClient() { Close(); }

ControlClient& ControlClient::operator=(ControlClient&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void ControlClient::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

std::string ControlClient::Connect(const std::string& path) {
  Close();
  std::string error;
  fd_ = OpenConnection(path, &error);
  if (fd_ < 0) return error;
  error = CheckPeer(fd_);
  if (error.empty() &&
      send(fd_, kHello.data(), kHello.size(), MSG_NOSIGNAL) != ssize_t{kHello.size()}) {
    error = std::strerror(errno);
  }
  if (!error.empty()) Close();
  return error;
}

Reply ControlClient::Send(const Json& request, int descriptor, Milliseconds timeout) {
  if (fd_ < 0) return Closed();
  std::string text = Dump(request);
  if (text.size() > kMaxRequest) {
    return Failure(Reply::Kind::kRefused, "the request is longer than 64 KiB");
  }
  iovec vector = {text.data(), text.size()};
  msghdr message = {};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  if (descriptor >= 0) AttachDescriptor(&message, descriptor, control, sizeof(control));
  const Deadline deadline(timeout);
  while (sendmsg(fd_, &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) {
      if (WaitFor(fd_, POLLOUT, -1, deadline) != Wait::kReady) return Timeout();
      continue;
    }
    return Closed();
  }
  return {Reply::Kind::kOk, {}, {}};
}

Reply ControlClient::Receive(Milliseconds timeout, int cancel_fd) {
  if (fd_ < 0) return Closed();
  const Deadline deadline(timeout);
  std::string text;
  std::vector<char> piece;
  for (;;) {
    // A reply that has begun is read to its end: else the next one would be misread.
    switch (WaitFor(fd_, POLLIN, text.empty() ? cancel_fd : -1, deadline)) {
      case Wait::kTimeout:
        return Timeout();
      case Wait::kCancelled:
        return Failure(Reply::Kind::kCancelled, "interrupted");
      case Wait::kReady:
        break;
    }
    const ssize_t length = recv(fd_, nullptr, 0, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT);
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (length <= 0) return Closed();
    if (static_cast<size_t>(length) > kMaxPiece) return BadReply("too long in one message");
    piece.resize(static_cast<size_t>(length));
    if (recv(fd_, piece.data(), piece.size(), MSG_DONTWAIT) != length) return Closed();
    if (piece[0] != 'M' && piece[0] != 'L') return BadReply("not in the form M… L…");
    text.append(piece.begin() + 1, piece.end());
    if (text.size() > kMaxReply) return BadReply("longer than 64 MiB");
    if (piece[0] == 'L') return ParseReply(text);
  }
}

Reply ControlClient::Request(const Json& request, int descriptor, Milliseconds timeout) {
  Reply sent = Send(request, descriptor, timeout);
  if (!sent.ok()) {
    // A daemon that refuses the connection says why before it closes.
    if (sent.kind != Reply::Kind::kClosed) return sent;
    Reply last_words = Receive(Milliseconds(0));
    return last_words.kind == Reply::Kind::kRefused ? last_words : sent;
  }
  return Receive(timeout);
}

bool ControlClient::WaitClosed(Milliseconds timeout) {
  const Deadline deadline(timeout);
  while (fd_ >= 0) {
    if (WaitFor(fd_, POLLIN, -1, deadline) != Wait::kReady) return false;
    char byte;
    const ssize_t length = recv(fd_, &byte, sizeof(byte), MSG_DONTWAIT);
    if (length > 0 || (length < 0 && (errno == EAGAIN || errno == EINTR))) continue;
    Close();
  }
  return true;
}

// A pidfd of the supervisor, or -1 where it is not to be seen. The engine listens, so it is the
// peer, in numbers of our PID namespace; its parent must be who the daemon says that it is, or,
// when it says nothing, a verbenad.
int ControlClient::OpenSupervisor(bool* silent) {
  ucred engine = {};
  socklen_t size = sizeof(engine);
  if (getsockopt(fd_, SOL_SOCKET, SO_PEERCRED, &engine, &size) != 0 || engine.pid <= 0) return -1;
  const pid_t supervisor = ParentOf(engine.pid);
  if (supervisor <= 1) return -1;
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, supervisor, 0));
  const Reply reply = Request({{"op", "status"}});
  *silent = reply.kind == Reply::Kind::kTimeout;
  const bool right = *silent
                         ? nic::ReadFile(fmt::format("/proc/{}/comm", supervisor)) == "verbenad\n"
                         : IntegerField(reply.json, "pid") == supervisor;
  if (right || pidfd < 0) return pidfd;
  close(pidfd);
  return -1;
}

std::string ControlClient::ShutDown(Milliseconds timeout) {
  bool silent = false;
  const int supervisor = OpenSupervisor(&silent);
  Reply reply;
  if (silent) {
    reply = Timeout();
  } else {
    reply = Request({{"op", "shutdown"}}, -1, timeout);
  }
  const Deadline deadline(timeout);
  std::string error;
  if (reply.kind == Reply::Kind::kTimeout && supervisor >= 0 &&
      syscall(SYS_pidfd_send_signal, supervisor, SIGTERM, nullptr, 0) == 0) {
    // It gives the engine some seconds, then kills it.
    if (WaitFor(supervisor, POLLIN, -1, Deadline(kStopPatience)) != Wait::kReady) {
      error = reply.error + ", and neither does its supervisor end";
    }
  } else if (!reply.ok() && reply.kind != Reply::Kind::kClosed) {
    error = reply.error;
  } else if (!WaitClosed(timeout) ||
             (supervisor >= 0 && WaitFor(supervisor, POLLIN, -1, deadline) != Wait::kReady)) {
    error = fmt::format("the daemon was asked to end, but still runs after {} s",
                        timeout.count() / 1000);
  }
  if (supervisor >= 0) close(supervisor);
  return error;
}

pid_t ParentOf(pid_t pid) {
  const std::string text = nic::ReadFile(fmt::format("/proc/{}/stat", pid)).value_or("");
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 4 > text.size()) return 0;
  return static_cast<pid_t>(std::atoi(text.c_str() + name_end + 4));
}

bool SomebodyListens(const std::string& path) {
  std::string error;
  const int fd = OpenConnection(path, &error);
  if (fd < 0) return false;
  close(fd);
  return true;
}

}  // namespace verbena::tools
