// SPDX-License-Identifier: Apache-2.0
//
// A daemon's control socket for tests, written from docs/CONTROL.md and sharing no code with the
// client. One connection at a time; the caller's thread serves.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

namespace verbena::tools {

// What the fake sends for a request: whole messages, 'M'/'L' included, so that tests can send
// wrong ones. `descriptor` came with the request (or is -1) and belongs to the handler.
struct FakeAnswer {
  std::vector<std::string> messages;
  bool close_connection = false;
  bool end_server = false;  // closes the listening socket, then the connection
};
using FakeHandler = std::function<FakeAnswer(const std::string& request, int descriptor)>;

class FakeControlServer {
 public:
  // Listens at once; asserts that it can.
  explicit FakeControlServer(const std::string& path);
  ~FakeControlServer();

  // Serves until a handler says end_server, Stop() is called or `seconds` have passed.
  void Serve(const FakeHandler& handler, int seconds);
  void Stop() { stop_ = true; }

  bool hello_seen() const { return hello_seen_; }

 private:
  // True = go on with the next connection.
  bool ServeConnection(int connection, const FakeHandler& handler);
  bool Readable(int fd) const;

  std::string path_;
  int listener_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> hello_seen_{false};
  int64_t end_ns_ = 0;
};

}  // namespace verbena::tools
