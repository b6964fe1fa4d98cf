// SPDX-License-Identifier: Apache-2.0
//
// The daemon's side of opened /dev/infiniband/rdma_cm files
// (nic_sim/abi/rdma_cm.h): carries commands to the connection manager, and
// keeps as many tokens on each file's socket as it has events.
//
// Thread: any. Whatever it does it does under the connection manager's mutex, which never waits
// for an application.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "nic_sim/abi/rdma_cm.h"
#include "nic_sim/ctrl/cm_service.h"
#include "nic_sim/ctrl/hardware.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

class RdmaCmFiles {
 public:
  // Open files of one user. Programs with a file per connection exist.
  static constexpr uint32_t kMaxFilesOfUser = 4096;

  // `hardware` outlives it; it need not have a connection manager.
  explicit RdmaCmFiles(Hardware* hardware);

  // Opens a file for connection `number`, whose `socket` stays the caller's.
  // Call it with a Hello of kind kClientRdmaCm and its descriptors. 0 or errno;
  // the answer is the caller's to send.
  int Open(uint64_t number, int socket, const ucred& peer, std::span<const std::byte> hello,
           const std::vector<UniqueFd>& fds);
  // Before its socket is closed. Nothing happens if the connection is none of these.
  void Close(uint64_t number);
  // One message on it: carried out and answered.
  void Handle(uint64_t number, std::span<const std::byte> message, bool truncated,
              const std::vector<UniqueFd>& fds);

  // Sends tokens for what has happened meanwhile; the connection manager's timer.
  void Update();
  void HandleTimer();
  // MADs have arrived.
  void HandlePackets();
  // Readable when sockets that were full have room: HandleRoom() then.
  int room_fd() const { return room_.get(); }
  void HandleRoom();

 private:
  // Each event has a token: what a full socket did not take follows when it has room. Of more than
  // that the application is told. A client that lies about tokens makes only its own numbers wrong.
  struct File {
    uint64_t number = 0;
    CmFileId id = 0;
    int socket = -1;
    uint64_t cookie = 0;  // of the application's end
    uid_t uid = 0;
    bool waits_for_room = false;
    int64_t events = 0;  // that wait; below zero for a moment: fetched before its notification
    int64_t tokens = 0;  // in the socket, or taken by a thread that will ask for an event
  };

  CmReply Write(const File& file, std::vector<std::byte> bytes);
  void TakeNotifications();
  void SendTokens(File* file);
  void WatchRoom(File* file, bool watch);
  void HandleWithdrawn(File* file, std::span<const std::byte> message);
  File* FindByCookie(const File& asking, uint64_t cookie);

  Hardware& hardware_;
  UniqueFd room_;                            // epoll set of full sockets
  std::map<uint64_t, File> files_;           // by connection
  std::map<CmFileId, uint64_t> connection_;  // of a file
  std::map<uid_t, uint32_t> files_of_;
};

}  // namespace verbena::nic
