// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/rdma_cm_files.h"

#include <rdma/rdma_user_cm.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <mutex>
#include <utility>

namespace verbena::nic {
namespace {

using Guard = std::lock_guard<std::mutex>;

// Names a socket, whoever holds a descriptor of it; 0: no unix socket.
uint64_t CookieOf(int fd) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0 || domain != AF_UNIX) return 0;
  uint64_t cookie = 0;
  size = sizeof(cookie);
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

// 0 or errno, EAGAIN if the socket is full; never blocks, whatever the client made of the socket.
int SendNow(int socket, std::span<const std::byte> bytes) {
  const ssize_t sent = send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent == static_cast<ssize_t>(bytes.size()) ? 0 : sent < 0 ? errno : EIO;
}

void Answer(int socket, int error, int64_t surplus, std::span<const std::byte> response) {
  abi::RdmaCmReply head{};
  head.error = error;
  head.surplus = static_cast<uint32_t>(std::clamp<int64_t>(surplus, 0, UINT32_MAX));
  head.response_bytes = static_cast<uint32_t>(response.size());
  std::vector<std::byte> bytes(sizeof(head) + response.size());
  std::memcpy(bytes.data(), &head, sizeof(head));
  std::copy(response.begin(), response.end(), bytes.begin() + sizeof(head));
  SendNow(socket, bytes);  // who does not take its answer does not get it
}

}  // namespace

RdmaCmFiles::RdmaCmFiles(Hardware* hardware)
    : hardware_(*hardware), room_(epoll_create1(EPOLL_CLOEXEC)) {}

int RdmaCmFiles::Open(uint64_t number, int socket, const ucred& peer,
                      std::span<const std::byte> hello, const std::vector<UniqueFd>& fds) {
  abi::RdmaCmHello request{};
  if (hello.size() != sizeof(request) || fds.size() != 1) return EINVAL;
  std::memcpy(&request, hello.data(), sizeof(request));
  if (request.version_min > abi::kVersionMax || request.version_max < abi::kVersionMin) {
    return EPROTO;
  }
  CmService* const cm = hardware_.cm();
  if (cm == nullptr) return ENODEV;
  const uint64_t cookie = CookieOf(fds[0].get());
  if (cookie == 0) return EINVAL;
  const Guard guard(cm->mutex());
  if (files_of_[peer.uid] >= kMaxFilesOfUser) return ENOMEM;
  CmClient client;
  client.pid = peer.pid;
  client.uid = peer.uid;
  client.may_bind_low_ports = peer.uid == 0;
  const CmFileId id = cm->OpenFile(client);
  if (id == 0) return ENOMEM;
  ++files_of_[peer.uid];
  File file;
  file.number = number;
  file.id = id;
  file.socket = socket;
  file.cookie = cookie;
  file.uid = peer.uid;
  files_.emplace(number, file);
  connection_.emplace(id, number);
  return 0;
}

void RdmaCmFiles::Close(uint64_t number) {
  if (hardware_.cm() == nullptr) return;
  const Guard guard(hardware_.cm()->mutex());
  const auto found = files_.find(number);
  if (found == files_.end()) return;
  WatchRoom(&found->second, false);
  const File file = found->second;
  files_.erase(found);
  connection_.erase(file.id);
  if (--files_of_[file.uid] == 0) files_of_.erase(file.uid);
  hardware_.cm()->CloseFile(file.id);
  TakeNotifications();  // its peers may be here
}

void RdmaCmFiles::Handle(uint64_t number, std::span<const std::byte> message, bool truncated,
                         const std::vector<UniqueFd>& fds) {
  if (hardware_.cm() == nullptr) return;
  const Guard guard(hardware_.cm()->mutex());
  const auto found = files_.find(number);
  if (found == files_.end()) return;
  File& file = found->second;
  if (fds.empty()) return HandleWithdrawn(&file, message);
  if (CookieOf(fds[0].get()) == 0) return;
  const int answer = fds[0].get();
  rdma_ucm_cmd_hdr header{};
  if (truncated || message.size() < sizeof(header) || message.size() > abi::kMaxRdmaCmRequest) {
    return Answer(answer, EINVAL, 0, {});
  }
  std::vector<std::byte> bytes(message.begin(), message.end());
  std::memcpy(&header, bytes.data(), sizeof(header));
  File* emptied = &file;
  if (header.cmd == RDMA_USER_CM_CMD_MIGRATE_ID) {
    constexpr size_t kFdOffset = sizeof(header) + offsetof(rdma_ucm_migrate_id, fd);
    emptied = fds.size() == 2 ? FindByCookie(file, CookieOf(fds[1].get())) : nullptr;
    if (emptied == nullptr || bytes.size() < kFdOffset + sizeof(CmFileId)) {
      return Answer(answer, EINVAL, 0, {});
    }
    std::memcpy(bytes.data() + kFdOffset, &emptied->id, sizeof(CmFileId));
  }
  CmReply reply = Write(file, std::move(bytes));
  if (header.cmd == RDMA_USER_CM_CMD_GET_EVENT && (reply.error == 0 || reply.error == EAGAIN)) {
    // Who asks without a token leaves one too many.
    file.tokens = std::max<int64_t>(file.tokens - 1, 0);
    if (reply.error == 0) --file.events;
  }
  TakeNotifications();
  SendTokens(&file);
  const size_t room = std::min<size_t>(header.out, abi::kMaxRdmaCmResponse);
  if (reply.response.size() > room) reply.response.resize(room);
  Answer(answer, reply.error, emptied->tokens - emptied->events, reply.response);
}

CmReply RdmaCmFiles::Write(const File& file, std::vector<std::byte> bytes) {
  return hardware_.cm()->Write(file.id, bytes);
}

void RdmaCmFiles::Update() {
  if (hardware_.cm() == nullptr) return;
  const Guard guard(hardware_.cm()->mutex());
  TakeNotifications();
}

void RdmaCmFiles::HandleTimer() {
  if (hardware_.cm() == nullptr) return;
  const Guard guard(hardware_.cm()->mutex());
  hardware_.cm()->HandleTimer();
  TakeNotifications();
}

void RdmaCmFiles::HandlePackets() {
  if (hardware_.cm() == nullptr) return;
  const Guard guard(hardware_.cm()->mutex());
  hardware_.cm()->HandlePackets();
  TakeNotifications();
}

void RdmaCmFiles::TakeNotifications() {
  std::vector<CmNotification> news;
  CmNotification next;
  while (hardware_.cm()->PollNotification(&next)) news.push_back(next);
  for (const CmNotification& each : news) {
    const auto found = connection_.find(each.file);
    if (found == connection_.end()) continue;  // closed meanwhile
    files_.at(found->second).events += each.delta;
  }
  for (const CmNotification& each : news) {
    const auto found = connection_.find(each.file);
    if (found != connection_.end()) SendTokens(&files_.at(found->second));
  }
}

void RdmaCmFiles::SendTokens(File* file) {
  constexpr std::byte kToken{1};
  while (file->tokens < file->events) {
    if (SendNow(file->socket, {&kToken, 1}) == EAGAIN) return WatchRoom(file, true);
    // A broken socket is closed by whoever reads it.
    ++file->tokens;
  }
}

void RdmaCmFiles::WatchRoom(File* file, bool watch) {
  if (file->waits_for_room == watch) return;
  epoll_event event = {};
  event.events = EPOLLOUT;
  event.data.u64 = file->number;
  const int op = watch ? EPOLL_CTL_ADD : EPOLL_CTL_DEL;
  if (epoll_ctl(room_.get(), op, file->socket, &event) == 0 || !watch) {
    file->waits_for_room = watch;
  }
}

void RdmaCmFiles::HandleRoom() {
  if (hardware_.cm() == nullptr) return;
  const Guard guard(hardware_.cm()->mutex());
  epoll_event events[16];
  const int count = epoll_wait(room_.get(), events, std::size(events), 0);
  for (int i = 0; i < count; ++i) {
    const auto found = files_.find(events[i].data.u64);
    if (found == files_.end()) continue;
    WatchRoom(&found->second, false);
    SendTokens(&found->second);
  }
}

void RdmaCmFiles::HandleWithdrawn(File* file, std::span<const std::byte> message) {
  abi::RdmaCmWithdrawn withdrawn;
  if (message.size() != sizeof(withdrawn)) return;
  std::memcpy(&withdrawn, message.data(), sizeof(withdrawn));
  if (withdrawn.command != abi::kRdmaCmWithdrawn) return;
  file->tokens = std::max<int64_t>(file->tokens - withdrawn.tokens, 0);
  SendTokens(file);  // one that was needed after all
}

// A file of the same user: descriptors of others may have been passed on, but ids stay theirs.
RdmaCmFiles::File* RdmaCmFiles::FindByCookie(const File& asking, uint64_t cookie) {
  if (cookie == 0) return nullptr;
  for (auto& [number, file] : files_) {
    if (file.cookie == cookie && file.uid == asking.uid) return &file;
  }
  return nullptr;
}

}  // namespace verbena::nic
