// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/tools/fake_control_server.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cassert>
#include <chrono>
#include <cstring>

namespace verbena::tools {
namespace {

int64_t NowNs() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

}  // namespace

FakeControlServer::FakeControlServer(const std::string& path) : path_(path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  assert(path.size() < sizeof(address.sun_path));
  std::memcpy(address.sun_path, path.data(), path.size());
  unlink(path.c_str());
  listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  [[maybe_unused]] const int bound =
      bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  assert(bound == 0);
  [[maybe_unused]] const int listening = listen(listener_, 64);
  assert(listening == 0);
}

FakeControlServer::~FakeControlServer() {
  if (listener_ < 0) return;  // ended: by now the path may be somebody else's
  close(listener_);
  unlink(path_.c_str());
}

bool FakeControlServer::Readable(int fd) const {
  while (!stop_ && NowNs() < end_ns_) {
    pollfd descriptor = {fd, POLLIN, 0};
    if (poll(&descriptor, 1, 20) > 0) return true;
  }
  return false;
}

void FakeControlServer::Serve(const FakeHandler& handler, int seconds) {
  end_ns_ = NowNs() + int64_t{seconds} * 1'000'000'000;
  bool go_on = true;
  while (go_on && Readable(listener_)) {
    const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0) continue;
    go_on = ServeConnection(connection, handler);
    close(connection);
  }
}

bool FakeControlServer::ServeConnection(int connection, const FakeHandler& handler) {
  char hello[9];
  if (!Readable(connection)) return true;
  const ssize_t length = recv(connection, hello, sizeof(hello), 0);
  if (length == 0) return true;  // only looked whether somebody listens
  if (length != 8 || std::memcmp(hello, "VRBN\x02\0\0\0", 8) != 0) return true;
  hello_seen_ = true;
  std::vector<char> buffer(64 * 1024);
  while (Readable(connection)) {
    iovec vector = {buffer.data(), buffer.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t size = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
    if (size <= 0) return true;
    int descriptor = -1;
    if (const cmsghdr* header = CMSG_FIRSTHDR(&message);
        header != nullptr && header->cmsg_type == SCM_RIGHTS) {
      std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
    }
    const FakeAnswer answer =
        handler(std::string(buffer.data(), static_cast<size_t>(size)), descriptor);
    for (const std::string& piece : answer.messages) {
      if (send(connection, piece.data(), piece.size(), MSG_NOSIGNAL) < 0) return true;
    }
    if (answer.end_server) {
      close(listener_);
      listener_ = -1;
      unlink(path_.c_str());
      return false;
    }
    if (answer.close_connection) return true;
  }
  return true;
}

}  // namespace verbena::tools
