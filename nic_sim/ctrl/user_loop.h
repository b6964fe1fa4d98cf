// SPDX-License-Identifier: Apache-2.0
//
// UserLoop: the thread that serves all connections of one user: opens devices, carries out
// commands, answers control requests. It waits where that user's memory does not answer; nobody
// else waits with it, and the kernel shares the CPU between the threads of two users.
//
// A client that is slow, silent, hostile or dead costs the user's others nothing: sockets do not
// block, a connection is read only while its last reply has been taken, it gets few messages in a
// row, and one that does not say what it is goes away. Death of an application comes from its
// pidfd: a forked child may keep the socket open.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/ctrl/connection.h"
#include "nic_sim/ctrl/control_requests.h"
#include "nic_sim/ctrl/server_shared.h"

namespace verbena::nic {

class UserLoop {
 public:
  // `limit` of opened devices.
  UserLoop(ServerShared* shared, uint32_t max_contexts);
  // Closes all, as Stop and Join.
  ~UserLoop();
  UserLoop(const UserLoop&) = delete;
  UserLoop& operator=(const UserLoop&) = delete;

  // --- Any thread
  // False: the user has too many.
  bool Adopt(std::unique_ptr<Connection> connection);
  bool empty() const { return count_ == 0; }
  // Captures are finished, contexts closed, the thread ends.
  void Stop();
  // Lets it look at its contexts: one may have lost its device. Any thread.
  void Nudge() { Wake(); }
  // False: it has not ended within this time: it waits for memory. Then the process must end.
  bool Join(std::chrono::milliseconds limit);

 private:
  using Clock = std::chrono::steady_clock;
  using Table = std::map<uint64_t, std::unique_ptr<Connection>>;
  // A capture that is being written to its end by a thread of its own.
  struct EndingCapture {
    uint64_t connection = 0;
    CaptureCounts counts;
    std::atomic<bool> done{false};
  };

  void Run();
  void Wake();

  // Events.
  void Watch(int fd, uint64_t tag, uint32_t events, int op);
  int WaitMilliseconds() const;
  void Handle(uint64_t tag, uint32_t events);
  void HandleTimeouts();
  void TakeAdopted();
  void HandleConnection(Connection* c, uint32_t events);

  // Messages. Each may close the connection; false: it is gone.
  bool HandleMessage(Connection* c, ReceivedMessage message);
  bool HandleHello(Connection* c, ReceivedMessage message);
  void CloseRemoved();
  bool HandleCommand(Connection* c, ReceivedMessage message);
  bool HandleControl(Connection* c, ReceivedMessage message);
  bool OpenDevice(Connection* c, const abi::Hello& hello, std::vector<UniqueFd> fds);
  int OpenContext(Connection* c, const abi::Hello& hello, std::vector<UniqueFd> fds,
                  abi::HelloReply* reply, std::vector<UniqueFd>* reply_fds);
  bool OpenRdmaCm(Connection* c, ReceivedMessage message);
  bool HandleNetlink(Connection* c, size_t bytes);
  bool Refresh(Connection* c, const std::string& device);
  bool RefuseDevice(Connection* c, const abi::HelloReply& reply);
  bool StartCapture(Connection* c, const ControlAnswer& answer, std::vector<UniqueFd> fds);
  void EndCapture(Connection* c);
  void ReapCaptures();

  bool SendBytes(Connection* c, std::vector<std::byte> bytes, std::vector<UniqueFd> fds = {});
  bool SendText(Connection* c, std::string_view text);
  bool Flush(Connection* c);
  void UpdateInterest(Connection* c);
  void Close(Connection* c);
  size_t CountKind(Connection::Kind kind) const;
  void Finish();

  ServerShared& shared_;
  Hardware& hardware_;
  const uint32_t max_contexts_;
  UniqueFd epoll_;
  UniqueFd wake_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> ended_{false};
  std::atomic<size_t> count_{0};  // of connections, adopted ones included
  std::mutex mutex_;
  std::vector<std::unique_ptr<Connection>> adopted_;  // under mutex_

  // Of the thread.
  Table connections_;
  uint32_t contexts_ = 0;
  std::vector<std::byte> buffer_;
  std::list<std::shared_ptr<EndingCapture>> ending_;
  Clock::time_point last_refusal_log_;

  std::thread thread_;
};

}  // namespace verbena::nic
