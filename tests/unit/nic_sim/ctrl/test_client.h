// SPDX-License-Identifier: Apache-2.0
//
// An application or a `verbena` command on the daemon's socket, reduced to its messages. All
// waiting has a limit.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

// Far beyond what a daemon takes to start under a sanitizer on a busy machine.
inline constexpr int kLimitMs = 30000;

inline bool Readable(int fd, int milliseconds = kLimitMs) {
  pollfd descriptor = {fd, POLLIN, 0};
  int ready = 0;
  do {
    ready = poll(&descriptor, 1, milliseconds);
  } while (ready < 0 && errno == EINTR);  // libFuzzer's alarm, for one
  return ready == 1;
}

template <typename Predicate>
bool Eventually(Predicate predicate, int milliseconds = kLimitMs) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  while (!predicate()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

inline abi::Hello GoodHello(uint32_t device = 0) {
  abi::Hello hello{};
  hello.magic = abi::kMagic;
  hello.kind = abi::kClientDevice;
  hello.version_min = abi::kVersionMin;
  hello.version_max = abi::kVersionMax;
  hello.device_index = device;
  hello.sizes = abi::kAbiSizes;
  std::strncpy(hello.comm, "tester", sizeof(hello.comm));
  return hello;
}

// One connection, blocking with a time limit.
class Client {
 public:
  explicit Client(const std::string& path) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    socket_.reset(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      socket_.reset();
    }
  }
  bool connected() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }
  void Close() { socket_.reset(); }

  template <typename T>
  int Send(const T& message, std::span<const int> fds = {}) {
    return SendMessage(fd(), std::as_bytes(std::span(&message, 1)), fds);
  }
  int SendText(std::string_view text, std::span<const int> fds = {}) {
    return SendMessage(fd(), std::as_bytes(std::span(text.data(), text.size())), fds);
  }

  // The next message; its bytes are in `bytes`.
  ReceivedMessage Receive(std::vector<std::byte>* bytes) {
    bytes->resize(abi::kControlChunkBytes);
    if (!Readable(fd())) return {};
    ReceivedMessage message = ReceiveMessage(fd(), *bytes);
    bytes->resize(message.bytes);
    return message;
  }
  template <typename T>
  T ReceiveAs(std::vector<UniqueFd>* fds = nullptr) {
    std::vector<std::byte> bytes;
    ReceivedMessage message = Receive(&bytes);
    T result{};
    EXPECT_EQ(bytes.size(), sizeof(result));
    std::memcpy(&result, bytes.data(), std::min(bytes.size(), sizeof(result)));
    if (fds != nullptr) *fds = std::move(message.fds);
    return result;
  }
  bool Closed() {
    std::vector<std::byte> bytes;
    return Receive(&bytes).kind == ReceivedMessage::Kind::kClosed;
  }

  abi::HelloReply Open(const abi::Hello& hello = GoodHello(),
                       std::vector<UniqueFd>* fds = nullptr) {
    EXPECT_EQ(Send(hello), 0);
    return ReceiveAs<abi::HelloReply>(fds);
  }
  template <typename Reply = abi::HandleReply, typename Request>
  Reply Command(Request request, uint16_t op, std::span<const int> fds = {},
                std::vector<UniqueFd>* reply_fds = nullptr) {
    request.header = {op, sizeof(request), ++sequence_};
    EXPECT_EQ(Send(request, fds), 0);
    const auto reply = ReceiveAs<Reply>(reply_fds);
    EXPECT_EQ(reply.header.sequence, sequence_);
    return reply;
  }

  void OpenControl() {
    const uint32_t hello[2] = {abi::kMagic, abi::kClientControl};
    EXPECT_EQ(Send(hello), 0);
  }
  nlohmann::json ReadReply() {
    std::string text;
    for (int pieces = 0; pieces < 1000; ++pieces) {
      std::vector<std::byte> bytes;
      Receive(&bytes);
      if (bytes.empty()) return nullptr;
      text.append(reinterpret_cast<const char*>(bytes.data()) + 1, bytes.size() - 1);
      if (bytes[0] == std::byte{'L'}) return nlohmann::json::parse(text, nullptr, false);
    }
    return nullptr;
  }
  nlohmann::json Ask(std::string_view request, std::span<const int> fds = {}) {
    EXPECT_EQ(SendText(request, fds), 0);
    return ReadReply();
  }

 private:
  UniqueFd socket_;
  uint32_t sequence_ = 100;
};

}  // namespace verbena::nic
