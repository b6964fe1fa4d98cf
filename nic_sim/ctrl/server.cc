// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <system_error>
#include <vector>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/ctrl/server_shared.h"
#include "nic_sim/ctrl/sysfs_tree.h"
#include "nic_sim/ctrl/user_loop.h"
#include "nic_sim/runtime/run_folder.h"

namespace verbena::nic {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr int kBacklog = 256;
constexpr int kConnectionsInARow = 16;
// Connections that are taken: so many at once, then so many per second. A flood waits in connect().
constexpr double kMaxConnectionBurst = 1024;
constexpr double kConnectionsPerSecond = 1000;
constexpr int kAcceptPauseMs = 5;
constexpr size_t kMaxUsers = 64;
constexpr int kLinkDrainMs = 1000;
constexpr Milliseconds kLoopEnd(4500);  // a capture may take 3 s of it
constexpr size_t kMaxGroups = 65536;    // NGROUPS_MAX of Linux

constexpr uint64_t kTagListen = 0;
constexpr uint64_t kTagWake = 1;
constexpr uint64_t kTagSignal = 2;
constexpr uint64_t kTagLink = 3;
constexpr uint64_t kTagCm = 4;
constexpr uint64_t kTagCmTimer = 5;
constexpr uint64_t kTagCmPackets = 6;
constexpr uint64_t kTagCmRoom = 7;

// The peer was in the group when it connected.
bool IsMember(int socket, gid_t primary, gid_t group) {
  if (primary == group) return true;
  std::vector<gid_t> groups(64);
  socklen_t size = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  int error = getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size);
  if (error != 0 && errno == ERANGE && size <= kMaxGroups * sizeof(gid_t)) {
    groups.resize(size / sizeof(gid_t));
    error = getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size);
  }
  if (error != 0) return false;
  groups.resize(size / sizeof(gid_t));
  return std::find(groups.begin(), groups.end(), group) != groups.end();
}

}  // namespace

class Server::Impl {
 public:
  Impl(Hardware* hardware, EngineLink* link, ServerOptions options)
      : shared_(hardware, link, std::move(options)), link_(link) {
    epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
    reserve_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
  }

  std::string Listen(const std::string& path, int signal_fd);
  bool Run();
  void Stop() { shared_.Stop(); }

 private:
  void Watch(int fd, uint64_t tag, uint32_t events, int op = EPOLL_CTL_ADD);
  int WaitMilliseconds();
  void Handle(uint64_t tag);
  void HandleLink();
  void OnNic(uint32_t nic, NicChange change);
  void CheckIdle();
  void Accept();
  void ResumeAccepting();
  UserLoop* LoopOf(uid_t uid);
  bool Finish();

  ServerShared shared_;
  EngineLink* link_;
  UniqueFd epoll_;
  UniqueFd listen_;
  UniqueFd reserve_;  // given up to refuse a connection when descriptors have run out
  std::string path_;
  bool supervisor_gone_ = false;
  bool link_wants_output_ = false;
  uint64_t next_number_ = 1;
  double accept_credit_ = kMaxConnectionBurst;
  Clock::time_point accept_credit_time_ = Clock::now();
  bool accept_paused_ = false;
  std::map<uid_t, std::unique_ptr<UserLoop>> loops_;  // root's are the daemon's own user's
  bool idle_ = true;                                  // no connection, since the last look
  Clock::time_point idle_end_;
};

void Server::Impl::Watch(int fd, uint64_t tag, uint32_t events, int op) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = tag;
  if (epoll_ctl(epoll_.get(), op, fd, &event) != 0) {
    spdlog::error("epoll_ctl: {}", std::strerror(errno));
  }
}

std::string Server::Impl::Listen(const std::string& path, int signal_fd) {
  sockaddr_un address;
  if (!FillAddress(path, &address)) return "the socket's path is too long";
  listen_.reset(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // Of a dead daemon: the instance's lock is ours.
  unlink(path.c_str());
  // The file gets its rights before anybody can connect: listen() comes after chmod().
  if (!listen_.valid() ||
      bind(listen_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      chmod(path.c_str(), shared_.options.daemon.system ? 0666 : 0600) != 0 ||
      listen(listen_.get(), kBacklog) != 0) {
    return fmt::format("cannot listen at {}: {}", path, std::strerror(errno));
  }
  path_ = path;
  Watch(listen_.get(), kTagListen, EPOLLIN);
  Watch(shared_.wake_fd(), kTagWake, EPOLLIN);
  if (signal_fd >= 0) Watch(signal_fd, kTagSignal, EPOLLIN);
  if (link_ != nullptr) Watch(link_->fd(), kTagLink, EPOLLIN);
  if (const CmService* cm = shared_.hardware->cm(); cm != nullptr) {
    Watch(cm->notification_fd(), kTagCm, EPOLLIN);
    if (cm->timer_fd() >= 0) Watch(cm->timer_fd(), kTagCmTimer, EPOLLIN);
    Watch(shared_.rdma_cm.room_fd(), kTagCmRoom, EPOLLIN);
    if (cm->packet_fd() >= 0) Watch(cm->packet_fd(), kTagCmPackets, EPOLLIN);
  }
  shared_.hardware->WatchNics([this](uint32_t nic, NicChange change) { OnNic(nic, change); });
  LinkMessage ready;
  ready.kind = LinkKind::kReady;
  shared_.Tell(ready, shared_.hardware->status_page_fd());
  idle_end_ = Clock::now() + std::chrono::seconds(std::max(shared_.options.first_client_s,
                                                           shared_.options.exit_idle_s));
  return {};
}

// From any thread.
void Server::Impl::OnNic(uint32_t nic, NicChange change) {
  const std::string& tree = shared_.options.tree;
  if (change == NicChange::kGids && !tree.empty()) {
    std::vector<NicInfo> nics;
    for (size_t i = 0; i < shared_.hardware->nic_count(); ++i) {
      nics.push_back(shared_.hardware->nic_info(i));
    }
    UpdateGids(tree, nic, nics, shared_.options.daemon.system);
  } else if (change != NicChange::kAddress && !tree.empty()) {
    ShowNic(tree, nic, shared_.hardware->nic_info(nic).device, shared_.options.daemon.system,
            change == NicChange::kReturned);
  }
  shared_.nics_changed = true;
  shared_.Wake();
}

bool Server::Impl::Run() {
  epoll_event events[8];
  while (!shared_.stop.load(std::memory_order_relaxed)) {
    const int count = epoll_wait(epoll_.get(), events, std::size(events), WaitMilliseconds());
    if (count < 0 && errno != EINTR) {
      spdlog::error("epoll_wait: {}", std::strerror(errno));
      break;
    }
    for (int i = 0; i < count; ++i) Handle(events[i].data.u64);
    ResumeAccepting();
    CheckIdle();
    HandleLink();
  }
  return Finish();
}

int Server::Impl::WaitMilliseconds() {
  if (accept_paused_) return kAcceptPauseMs;
  if (shared_.options.exit_idle_s == 0 || shared_.connections != 0) return -1;
  const auto left = std::chrono::ceil<Milliseconds>(idle_end_ - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 3'600'000));
}

// Loops wake us when a connection is gone.
void Server::Impl::CheckIdle() {
  if (shared_.options.exit_idle_s == 0) return;
  const bool idle = shared_.connections == 0;
  const Clock::time_point now = Clock::now();
  if (idle && !idle_) {
    idle_end_ = std::max(shared_.contexts_ever ? Clock::time_point() : idle_end_,
                         now + std::chrono::seconds(shared_.options.exit_idle_s));
  }
  idle_ = idle;
  if (idle && now >= idle_end_) {
    spdlog::info("no client for a while, ending");
    shared_.Stop();
  }
}

void Server::Impl::Handle(uint64_t tag) {
  switch (tag) {
    case kTagListen:
      Accept();
      return;
    case kTagWake: {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t ignored = read(shared_.wake_fd(), &count, sizeof(count));
      if (shared_.nics_changed.exchange(false)) {
        for (const auto& [uid, loop] : loops_) loop->Nudge();
      }
      return;
    }
    case kTagCm: {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t ignored =
          read(shared_.hardware->cm()->notification_fd(), &count, sizeof(count));
      shared_.rdma_cm.Update();
      return;
    }
    case kTagCmTimer:
      shared_.rdma_cm.HandleTimer();
      return;
    case kTagCmRoom:
      shared_.rdma_cm.HandleRoom();
      return;
    case kTagCmPackets:
      shared_.rdma_cm.HandlePackets();
      return;
    case kTagSignal:
      shared_.Stop();
      return;
    case kTagLink:
      switch (link_->Poll()) {
        case EngineLink::News::kNone:
          return;
        case EngineLink::News::kSupervisorGone:
          spdlog::error("the supervisor process is gone, ending");
          supervisor_gone_ = true;
          [[fallthrough]];
        case EngineLink::News::kStop:
          shared_.Stop();
      }
      return;
    default:
      return;
  }
}

void Server::Impl::HandleLink() {
  if (link_ == nullptr || supervisor_gone_) return;
  const bool pending = shared_.news.Flush();
  if (pending != link_wants_output_) {
    link_wants_output_ = pending;
    Watch(link_->fd(), kTagLink, pending ? EPOLLIN | EPOLLOUT : EPOLLIN, EPOLL_CTL_MOD);
  }
}

void Server::Impl::ResumeAccepting() {
  const Clock::time_point now = Clock::now();
  const std::chrono::duration<double> passed = now - accept_credit_time_;
  accept_credit_time_ = now;
  accept_credit_ =
      std::min(kMaxConnectionBurst, accept_credit_ + passed.count() * kConnectionsPerSecond);
  if (!accept_paused_ || accept_credit_ < 1) return;
  accept_paused_ = false;
  Watch(listen_.get(), kTagListen, EPOLLIN, EPOLL_CTL_MOD);
}

void Server::Impl::Accept() {
  for (int i = 0; i < kConnectionsInARow; ++i) {
    if (accept_credit_ < 1) {
      accept_paused_ = true;
      Watch(listen_.get(), kTagListen, 0, EPOLL_CTL_MOD);
      return;
    }
    UniqueFd socket(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno != EMFILE && errno != ENFILE) return;
      // Refuse it, else it would stay readable for ever.
      reserve_.reset();
      socket.reset(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      socket.reset();
      reserve_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
      return;
    }
    accept_credit_ -= 1;
    auto c = std::make_unique<Connection>();
    socklen_t size = sizeof(c->peer);
    if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &c->peer, &size) != 0) continue;
    UserLoop* loop = LoopOf(c->peer.uid);
    if (loop == nullptr) continue;  // closed without a word
    const int group = shared_.options.control_group;
    c->privileged = c->peer.uid == 0 || c->peer.uid == geteuid() ||
                    (group >= 0 && IsMember(socket.get(), c->peer.gid, static_cast<gid_t>(group)));
    c->number = next_number_++;
    c->socket = std::move(socket);
    c->born = Clock::now();
    idle_ = false;
    loop->Adopt(std::move(c));
  }
}

UserLoop* Server::Impl::LoopOf(uid_t uid) {
  const bool owner = uid == 0 || uid == geteuid();
  if (owner) uid = geteuid();
  const auto found = loops_.find(uid);
  if (found != loops_.end()) return found->second.get();
  if (loops_.size() >= kMaxUsers) {
    std::erase_if(loops_, [](const auto& entry) { return entry.second->empty(); });
    if (loops_.size() >= kMaxUsers && !owner) return nullptr;
  }
  try {
    auto loop = std::make_unique<UserLoop>(
        &shared_, owner ? kOwnerLimits.contexts : shared_.options.max_contexts_of_others);
    return loops_.emplace(uid, std::move(loop)).first->second.get();
  } catch (const std::system_error& error) {
    spdlog::error("no thread for user {}: {}", uid, error.what());
    return nullptr;
  }
}

bool Server::Impl::Finish() {
  shared_.hardware->WatchNics({});
  // Nobody new; whoever is there learns it from the supervisor, or from us if that has died.
  unlink(path_.c_str());
  listen_.reset();
  if (link_ != nullptr && !supervisor_gone_) {
    LinkMessage stopping;
    stopping.kind = LinkKind::kStopping;
    shared_.news.TellSupervisor(stopping);
    shared_.news.Drain(kLinkDrainMs);
  } else {
    shared_.news.Announce();
  }
  for (const auto& [uid, loop] : loops_) loop->Stop();
  const Clock::time_point end = Clock::now() + kLoopEnd;
  bool all = true;
  for (const auto& [uid, loop] : loops_) {
    const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now());
    if (loop->Join(std::max(left, Milliseconds(0)))) continue;
    spdlog::error("memory of user {} does not answer", uid);
    all = false;
  }
  return all;
}

Server::Server(Hardware* hardware, EngineLink* link, ServerOptions options)
    : impl_(std::make_unique<Impl>(hardware, link, std::move(options))) {}
Server::~Server() = default;

std::string Server::Listen(const std::string& path, int signal_fd) {
  return impl_->Listen(path, signal_fd);
}
bool Server::Run() { return impl_->Run(); }
void Server::Stop() { impl_->Stop(); }

}  // namespace verbena::nic
