// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include "nic_sim/ctrl/command_dispatch.h"
#include "nic_sim/ctrl/hello.h"
#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/runtime/run_folder.h"
#include "nic_sim/supervisor/death_notices.h"

namespace verbena::nic {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using Guard = std::lock_guard<ShardLock>;

constexpr int kBacklog = 256;
constexpr size_t kMaxUnknown = 128;  // connections that have not said Hello
constexpr size_t kMaxControl = 64;
constexpr int kMessagesInARow = 16;
constexpr Milliseconds kCapturePoll(20);        // of captures with a count
constexpr Milliseconds kCaptureErrorPoll(500);  // of others: they end when a write fails
constexpr Milliseconds kCaptureEnd(3000);
constexpr int kLinkDrainMs = 1000;
constexpr int kPeerPidfd = 77;  // SO_PEERPIDFD, Linux 6.5; not in Debian 12's headers

// Epoll tags: connections have numbers from kFirstNumber on; bit 0 says "its pidfd".
constexpr uint64_t kTagListen = 0;
constexpr uint64_t kTagWake = 2;
constexpr uint64_t kTagSignal = 4;
constexpr uint64_t kTagLink = 6;
constexpr uint64_t kFirstNumber = 16;

struct Outgoing {
  std::vector<std::byte> bytes;
  std::vector<UniqueFd> fds;
};

struct Connection {
  enum class Kind { kUnknown, kDevice, kControl } kind = Kind::kUnknown;
  uint64_t number = 0;
  UniqueFd socket;
  UniqueFd pidfd;  // device connections
  ucred peer = {};
  Clock::time_point born;
  Context* context = nullptr;
  std::deque<Outgoing> out;
  bool close_when_sent = false;
  uint32_t interest = EPOLLIN;   // what epoll looks for
  uint32_t capture = 0;          // id, 0: none
  bool capture_counted = false;  // ends by itself
  bool capture_ending = false;   // requests wait until its last word
};

// A capture that is being written to its end by a thread of its own.
struct EndingCapture {
  uint64_t connection = 0;
  CaptureCounts counts;
  std::atomic<bool> done{false};
};

UniqueFd PidfdOf(int socket, pid_t pid) {
  int fd = -1;
  socklen_t size = sizeof(fd);
  if (getsockopt(socket, SOL_SOCKET, kPeerPidfd, &fd, &size) == 0) return UniqueFd(fd);
  if (pid <= 0) return UniqueFd();  // of another pid namespace: the socket must do
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

std::vector<std::byte> ToBytes(const void* data, size_t size) {
  const std::byte* begin = static_cast<const std::byte*>(data);
  return {begin, begin + size};
}

std::string CaptureEndText(const CaptureCounts& counts) {
  if (counts.error == 0) {
    return JsonText({{"done", true}, {"packets", counts.packets}, {"missed", counts.missed}});
  }
  return ErrorText(fmt::format("cannot write the capture: {}; {} packets are in it",
                               std::strerror(counts.error), counts.packets));
}

bool IsWritable(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && (flags & O_PATH) == 0;
}

}  // namespace

class Server::Impl {
 public:
  Impl(Hardware* hardware, EngineLink* link, ServerOptions options)
      : hardware_(hardware), link_(link), options_(std::move(options)) {
    wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
    reserve_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
    buffer_.resize(abi::kMaxControlRequestBytes);
  }

  std::string Listen(const std::string& path, int signal_fd);
  void Run();
  void Stop() {
    const uint64_t one = 1;
    stop_.store(true, std::memory_order_relaxed);
    [[maybe_unused]] const ssize_t ignored = write(wake_.get(), &one, sizeof(one));
  }

 private:
  using Table = std::map<uint64_t, std::unique_ptr<Connection>>;

  // Events.
  void Watch(int fd, uint64_t tag, uint32_t events, int op = EPOLL_CTL_ADD);
  int WaitMilliseconds() const;
  void Handle(uint64_t tag, uint32_t events);
  void HandleTimeouts();
  void HandleLink();
  void Accept();
  void HandleConnection(Connection* c, uint32_t events);

  // Messages. Each may close the connection; false: it is gone.
  bool HandleMessage(Connection* c, ReceivedMessage message);
  bool HandleHello(Connection* c, ReceivedMessage message);
  bool HandleCommand(Connection* c, ReceivedMessage message);
  bool HandleControl(Connection* c, ReceivedMessage message);
  bool OpenDevice(Connection* c, const abi::Hello& hello, std::vector<UniqueFd> fds);
  int OpenContext(Connection* c, const abi::Hello& hello, std::vector<UniqueFd> fds,
                  abi::HelloReply* reply, std::vector<UniqueFd>* reply_fds);
  bool RefuseDevice(Connection* c, const abi::HelloReply& reply);
  int ContextLimit(const Connection& c) const;
  bool StartCapture(Connection* c, const ControlAnswer& answer, std::vector<UniqueFd> fds);
  void EndCapture(Connection* c);
  void ReapCaptures();

  bool SendBytes(Connection* c, std::vector<std::byte> bytes, std::vector<UniqueFd> fds = {});
  bool SendText(Connection* c, std::string_view text);
  bool Flush(Connection* c);
  void UpdateInterest(Connection* c);
  void Close(Connection* c);
  void Tell(const LinkMessage& message, int fd = -1);

  size_t CountKind(Connection::Kind kind) const;
  void Finish();

  Hardware* hardware_;
  EngineLink* link_;
  ServerOptions options_;
  UniqueFd epoll_;
  UniqueFd wake_;
  UniqueFd listen_;
  UniqueFd reserve_;  // given up to refuse a connection when descriptors have run out
  std::string path_;
  std::atomic<bool> stop_{false};
  bool supervisor_gone_ = false;
  bool link_wants_output_ = false;
  Table connections_;
  uint64_t next_number_ = kFirstNumber;
  size_t contexts_ = 0;
  bool contexts_ever_ = false;
  std::map<uid_t, uint32_t> contexts_of_others_;
  DeathNotices notices_;
  std::vector<std::byte> buffer_;
  std::list<std::shared_ptr<EndingCapture>> ending_;
  Clock::time_point idle_end_;  // with exit_idle_s, while there is no connection
  Clock::time_point last_refusal_log_;
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
      chmod(path.c_str(), options_.daemon.system ? 0666 : 0600) != 0 ||
      listen(listen_.get(), kBacklog) != 0) {
    return fmt::format("cannot listen at {}: {}", path, std::strerror(errno));
  }
  path_ = path;
  Watch(listen_.get(), kTagListen, EPOLLIN);
  Watch(wake_.get(), kTagWake, EPOLLIN);
  if (signal_fd >= 0) Watch(signal_fd, kTagSignal, EPOLLIN);
  if (link_ != nullptr) Watch(link_->fd(), kTagLink, EPOLLIN);
  LinkMessage ready;
  ready.kind = LinkKind::kReady;
  notices_.Apply(ready, UniqueFd(fcntl(hardware_->status_page_fd(), F_DUPFD_CLOEXEC, 3)));
  if (link_ != nullptr) link_->Send(ready, hardware_->status_page_fd());
  idle_end_ =
      Clock::now() + std::chrono::seconds(std::max(options_.first_client_s, options_.exit_idle_s));
  return {};
}

void Server::Impl::Run() {
  epoll_event events[64];
  while (!stop_.load(std::memory_order_relaxed)) {
    const int count = epoll_wait(epoll_.get(), events, std::size(events), WaitMilliseconds());
    if (count < 0 && errno != EINTR) {
      spdlog::error("epoll_wait: {}", std::strerror(errno));
      break;
    }
    for (int i = 0; i < count; ++i) Handle(events[i].data.u64, events[i].events);
    HandleTimeouts();
    HandleLink();
  }
  Finish();
}

int Server::Impl::WaitMilliseconds() const {
  auto end = Clock::time_point::max();
  for (const auto& [number, c] : connections_) {
    if (c->kind == Connection::Kind::kUnknown) {
      end = std::min(end, c->born + Milliseconds(options_.hello_ms));
    }
    if (c->capture != 0 && !c->capture_ending) {
      end = std::min(end, Clock::now() + (c->capture_counted ? kCapturePoll : kCaptureErrorPoll));
    }
  }
  if (options_.exit_idle_s > 0 && connections_.empty()) end = std::min(end, idle_end_);
  if (end == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 3'600'000));
}

void Server::Impl::Handle(uint64_t tag, uint32_t events) {
  switch (tag) {
    case kTagListen:
      Accept();
      return;
    case kTagWake: {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t ignored = read(wake_.get(), &count, sizeof(count));
      ReapCaptures();
      return;
    }
    case kTagSignal:
      stop_.store(true, std::memory_order_relaxed);
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
          stop_.store(true, std::memory_order_relaxed);
      }
      return;
    default:
      break;
  }
  const auto found = connections_.find(tag >> 1);
  if (found == connections_.end()) return;  // closed by an earlier event of this round
  if ((tag & 1) != 0) {
    Close(found->second.get());  // its process has ended
  } else {
    HandleConnection(found->second.get(), events);
  }
}

void Server::Impl::HandleTimeouts() {
  const Clock::time_point now = Clock::now();
  for (auto next = connections_.begin(); next != connections_.end();) {
    Connection* c = (next++)->second.get();
    if (c->kind == Connection::Kind::kUnknown && now >= c->born + Milliseconds(options_.hello_ms)) {
      Close(c);
    } else if (c->capture != 0 && !c->capture_ending) {
      bool done = false;
      {
        const Guard guard(hardware_->lock());
        done = hardware_->CaptureDone(c->capture);
      }
      if (done) EndCapture(c);
    }
  }
  if (options_.exit_idle_s > 0 && connections_.empty() && now >= idle_end_) {
    spdlog::info("no client for a while, ending");
    stop_.store(true, std::memory_order_relaxed);
  }
}

void Server::Impl::HandleLink() {
  if (link_ == nullptr || supervisor_gone_) return;
  link_->Flush();
  if (link_->has_pending() != link_wants_output_) {
    link_wants_output_ = link_->has_pending();
    Watch(link_->fd(), kTagLink, link_wants_output_ ? EPOLLIN | EPOLLOUT : EPOLLIN, EPOLL_CTL_MOD);
  }
}

void Server::Impl::Accept() {
  for (int i = 0; i < kMessagesInARow; ++i) {
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
    auto c = std::make_unique<Connection>();
    socklen_t size = sizeof(c->peer);
    if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &c->peer, &size) != 0) continue;
    if (CountKind(Connection::Kind::kUnknown) >= kMaxUnknown) {
      // The oldest has had most time to say what it is.
      const auto oldest = std::find_if(connections_.begin(), connections_.end(), [](auto& entry) {
        return entry.second->kind == Connection::Kind::kUnknown;
      });
      Close(oldest->second.get());
    }
    c->number = next_number_++;
    c->socket = std::move(socket);
    c->born = Clock::now();
    Watch(c->socket.get(), c->number << 1, EPOLLIN);
    connections_.emplace(c->number, std::move(c));
  }
}

void Server::Impl::HandleConnection(Connection* c, uint32_t events) {
  if (!c->out.empty() && !Flush(c)) return;
  // A control client that left while its capture ends: nobody waits for the last word.
  if (c->capture_ending && (events & (EPOLLHUP | EPOLLERR)) != 0) return Close(c);
  for (int i = 0; i < kMessagesInARow; ++i) {
    if (!c->out.empty() || c->capture_ending || c->close_when_sent) return;
    ReceivedMessage message = ReceiveMessage(c->socket.get(), buffer_);
    if (message.kind == ReceivedMessage::Kind::kNothing) return;
    if (message.kind == ReceivedMessage::Kind::kClosed) return Close(c);
    if (!HandleMessage(c, std::move(message))) return;
  }
}

bool Server::Impl::HandleMessage(Connection* c, ReceivedMessage message) {
  switch (c->kind) {
    case Connection::Kind::kUnknown:
      return HandleHello(c, std::move(message));
    case Connection::Kind::kDevice:
      return HandleCommand(c, std::move(message));
    case Connection::Kind::kControl:
      return HandleControl(c, std::move(message));
  }
  return false;
}

bool Server::Impl::HandleHello(Connection* c, ReceivedMessage message) {
  const CheckedHello checked =
      CheckHello(std::span(buffer_).first(message.bytes), message.truncated);
  switch (checked.kind) {
    case HelloKind::kGarbage:
      Close(c);
      return false;
    case HelloKind::kIncompatible:
      return RefuseDevice(c, MakeHelloReply(EPROTO));
    case HelloKind::kDevice:
      return OpenDevice(c, checked.hello, std::move(message.fds));
    case HelloKind::kControl:
      break;
  }
  const bool allowed = c->peer.uid == 0 || c->peer.uid == geteuid();
  const bool full = CountKind(Connection::Kind::kControl) >= kMaxControl;
  c->kind = Connection::Kind::kControl;
  if (allowed && !full) return true;
  c->close_when_sent = true;
  return SendText(c, ErrorText(!allowed ? "only the daemon's user and root may do that"
                                        : "too many control connections"));
}

// 0, or why this client may not have one more context.
int Server::Impl::ContextLimit(const Connection& c) const {
  if (contexts_ >= kMaxContexts) return ENOMEM;
  if (c.peer.uid == 0 || c.peer.uid == geteuid()) return 0;
  const auto others = contexts_of_others_.find(c.peer.uid);
  const bool full =
      others != contexts_of_others_.end() && others->second >= options_.max_contexts_of_others;
  return full ? ENOMEM : 0;
}

bool Server::Impl::OpenDevice(Connection* c, const abi::Hello& hello, std::vector<UniqueFd> fds) {
  abi::HelloReply reply = MakeHelloReply(0);
  reply.version = std::min(hello.version_max, abi::kVersionMax);
  std::vector<UniqueFd> reply_fds;
  const int error = OpenContext(c, hello, std::move(fds), &reply, &reply_fds);
  if (error != 0) return RefuseDevice(c, MakeHelloReply(error));
  spdlog::debug("{} (pid {}) opened verbena{}", CommOf(hello), c->peer.pid, hello.device_index);
  return SendBytes(c, ToBytes(&reply, sizeof(reply)), std::move(reply_fds));
}

int Server::Impl::OpenContext(Connection* c, const abi::Hello& hello, std::vector<UniqueFd> fds,
                              abi::HelloReply* reply, std::vector<UniqueFd>* reply_fds) {
  if (const int error = ContextLimit(*c); error != 0) return error;
  if (hello.device_index >= hardware_->nic_count()) return ENODEV;
  if (fds.size() > 1 || (fds.size() == 1 && !IsProcMem(fds[0].get()))) return EINVAL;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return ENOMEM;
  UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  fcntl(write_end.get(), F_SETFL, O_WRONLY | O_NONBLOCK);
  // The client opens it again to take out what it will not read: it must own it.
  if (c->peer.uid != geteuid() && fchown(write_end.get(), c->peer.uid, c->peer.gid) != 0) {
    spdlog::debug("fchown of an event pipe: {}", std::strerror(errno));
  }
  UniqueFd notice_end(fcntl(write_end.get(), F_DUPFD_CLOEXEC, 3));
  c->pidfd = PidfdOf(c->socket.get(), c->peer.pid);
  if (!c->pidfd.valid() && errno == ESRCH) return ESRCH;

  ClientIdentity client;
  client.pid = c->peer.pid;
  client.uid = c->peer.uid;
  client.comm = CommOf(hello);
  if (!fds.empty()) client.mem_fd = fds[0].release();
  client.async_write_fd = write_end.release();
  int context_fd = -1;
  std::string why;
  int error = 0;
  {
    const Guard guard(hardware_->lock());
    error = hardware_->OpenContext(hello, std::move(client), reply, &context_fd, &c->context, &why);
  }
  UniqueFd context_memory(context_fd);
  if (error != 0) {
    c->context = nullptr;
    if (Clock::now() - last_refusal_log_ > std::chrono::seconds(1)) {
      last_refusal_log_ = Clock::now();
      spdlog::warn("{} (pid {}, user {}) may not open verbena{}: {}", CommOf(hello), c->peer.pid,
                   c->peer.uid, hello.device_index, why);
    }
    return error;
  }
  c->kind = Connection::Kind::kDevice;
  ++contexts_;
  contexts_ever_ = true;
  if (c->peer.uid != 0 && c->peer.uid != geteuid()) ++contexts_of_others_[c->peer.uid];
  reply->error = 0;
  reply_fds->push_back(std::move(context_memory));
  for (const int fd : {hardware_->wake_page_fd(), hardware_->status_page_readonly_fd()}) {
    reply_fds->emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 3));
  }
  reply_fds->push_back(std::move(read_end));
  LinkMessage news;
  news.kind = LinkKind::kAddContext;
  news.context = c->number;
  Tell(news, notice_end.get());
  if (c->pidfd.valid()) Watch(c->pidfd.get(), c->number << 1 | 1, EPOLLIN);
  return 0;
}

bool Server::Impl::RefuseDevice(Connection* c, const abi::HelloReply& reply) {
  c->close_when_sent = true;
  return SendBytes(c, ToBytes(&reply, sizeof(reply)));
}

bool Server::Impl::HandleCommand(Connection* c, ReceivedMessage message) {
  const bool truncated = message.truncated || message.bytes > abi::kMaxMessageBytes;
  CommandResult result;
  {
    const Guard guard(hardware_->lock());
    result = DispatchCommand(c->context, std::span(buffer_).first(message.bytes), truncated,
                             std::move(message.fds));
  }
  LinkMessage news;
  news.context = c->number;
  news.handle = result.cq;
  news.user_handle = result.cq_user_handle;
  switch (result.cq_change) {
    case CommandResult::CqChange::kNone:
      break;
    case CommandResult::CqChange::kChannelAdded:
      news.kind = LinkKind::kAddChannel;
      Tell(news, result.channel.get());
      break;
    case CommandResult::CqChange::kRemoved:
      news.kind = LinkKind::kRemoveCq;
      Tell(news);
      break;
  }
  return SendBytes(c, std::move(result.reply), std::move(result.fds));
}

bool Server::Impl::HandleControl(Connection* c, ReceivedMessage message) {
  if (message.truncated) return SendText(c, ErrorText("the request is longer than 64 KiB"));
  const std::string_view text(reinterpret_cast<const char*>(buffer_.data()), message.bytes);
  const ControlAnswer answer = AnswerControlRequest(text, hardware_, options_.daemon, contexts_);
  switch (answer.action) {
    case ControlAnswer::Action::kReply:
      return SendText(c, answer.text);
    case ControlAnswer::Action::kCapture:
      return StartCapture(c, answer, std::move(message.fds));
    case ControlAnswer::Action::kCaptureStop:
      if (c->capture == 0) return SendText(c, ErrorText("no capture runs on this connection"));
      EndCapture(c);
      return true;
    case ControlAnswer::Action::kShutdown:
      break;
  }
  spdlog::info("asked to end by pid {}", c->peer.pid);
  stop_.store(true, std::memory_order_relaxed);
  // The supervisor closes it when all is over.
  LinkMessage hold;
  hold.kind = LinkKind::kHold;
  if (link_ != nullptr) link_->Send(hold, c->socket.get());
  return SendText(c, R"({"ok":true})");
}

bool Server::Impl::StartCapture(Connection* c, const ControlAnswer& answer,
                                std::vector<UniqueFd> fds) {
  if (c->capture != 0) return SendText(c, ErrorText("this connection has a capture already"));
  if (fds.size() != 1 || !IsWritable(fds[0].get())) {
    return SendText(c, ErrorText("capture needs one descriptor, open for writing"));
  }
  std::string error;
  {
    const Guard guard(hardware_->lock());
    c->capture = hardware_->StartCapture(fds[0].release(), answer.device, answer.before_faults,
                                         answer.count, &error);
  }
  if (c->capture == 0) return SendText(c, ErrorText(error));
  c->capture_counted = answer.count > 0;
  return SendText(c, R"({"ok":true})");
}

void Server::Impl::EndCapture(Connection* c) {
  if (c->capture == 0 || c->capture_ending) return;
  c->capture_ending = true;
  UpdateInterest(c);
  std::function<CaptureCounts()> finish;
  {
    const Guard guard(hardware_->lock());
    finish = hardware_->DetachCapture(c->capture);
  }
  auto ending = std::make_shared<EndingCapture>();
  ending->connection = c->number;
  ending_.push_back(ending);
  // The output may be a pipe that nobody reads: not in this thread.
  std::thread([ending, finish = std::move(finish), wake = fcntl(wake_.get(), F_DUPFD_CLOEXEC, 3)] {
    ending->counts = finish();
    ending->done.store(true, std::memory_order_release);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = write(wake, &one, sizeof(one));
    close(wake);
  }).detach();
}

void Server::Impl::ReapCaptures() {
  for (auto next = ending_.begin(); next != ending_.end();) {
    const std::shared_ptr<EndingCapture> ending = *next;
    if (!ending->done.load(std::memory_order_acquire)) {
      ++next;
      continue;
    }
    next = ending_.erase(next);
    const auto found = connections_.find(ending->connection);
    if (found == connections_.end()) continue;
    Connection* c = found->second.get();
    c->capture = 0;
    c->capture_counted = false;
    c->capture_ending = false;
    SendText(c, CaptureEndText(ending->counts));
  }
}

bool Server::Impl::SendText(Connection* c, std::string_view text) {
  constexpr size_t kPiece = abi::kControlChunkBytes - 1;
  do {
    const std::string_view piece = text.substr(0, kPiece);
    text.remove_prefix(piece.size());
    std::vector<std::byte> bytes(piece.size() + 1);
    bytes[0] = static_cast<std::byte>(text.empty() ? 'L' : 'M');
    std::memcpy(bytes.data() + 1, piece.data(), piece.size());
    c->out.push_back({std::move(bytes), {}});
  } while (!text.empty());
  return Flush(c);
}

bool Server::Impl::SendBytes(Connection* c, std::vector<std::byte> bytes,
                             std::vector<UniqueFd> fds) {
  c->out.push_back({std::move(bytes), std::move(fds)});
  return Flush(c);
}

// False: the connection is gone.
bool Server::Impl::Flush(Connection* c) {
  while (!c->out.empty()) {
    const Outgoing& next = c->out.front();
    std::vector<int> fds;
    for (const UniqueFd& fd : next.fds) fds.push_back(fd.get());
    const int error = SendMessage(c->socket.get(), next.bytes, fds);
    if (error == EAGAIN) break;
    if (error != 0) {
      Close(c);
      return false;
    }
    c->out.pop_front();
  }
  if (c->out.empty() && c->close_when_sent) {
    Close(c);
    return false;
  }
  UpdateInterest(c);
  return true;
}

// A connection is read only when nothing of its last request is still to be done.
void Server::Impl::UpdateInterest(Connection* c) {
  const uint32_t interest = !c->out.empty() ? EPOLLOUT : c->capture_ending ? 0u : EPOLLIN;
  if (interest == c->interest) return;
  c->interest = interest;
  Watch(c->socket.get(), c->number << 1, interest, EPOLL_CTL_MOD);
}

void Server::Impl::Close(Connection* c) {
  if (c->context != nullptr) {
    {
      const Guard guard(hardware_->lock());
      hardware_->CloseContext(c->context);
    }
    --contexts_;
    const auto others = contexts_of_others_.find(c->peer.uid);
    if (others != contexts_of_others_.end() && --others->second == 0) {
      contexts_of_others_.erase(others);
    }
    LinkMessage news;
    news.kind = LinkKind::kRemoveContext;
    news.context = c->number;
    Tell(news);
  }
  EndCapture(c);
  connections_.erase(c->number);  // descriptors leave the epoll set by being closed
  if (connections_.empty()) {
    idle_end_ = std::max(contexts_ever_ ? Clock::time_point() : idle_end_,
                         Clock::now() + std::chrono::seconds(options_.exit_idle_s));
  }
}

void Server::Impl::Tell(const LinkMessage& message, int fd) {
  notices_.Apply(message, UniqueFd(fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3)));
  if (link_ != nullptr) link_->Send(message, fd);
}

size_t Server::Impl::CountKind(Connection::Kind kind) const {
  return static_cast<size_t>(
      std::count_if(connections_.begin(), connections_.end(),
                    [&](auto& entry) { return entry.second->kind == kind; }));
}

void Server::Impl::Finish() {
  // Nobody new; whoever is there learns it from the supervisor, or from us if that has died.
  unlink(path_.c_str());
  listen_.reset();
  if (link_ != nullptr && !supervisor_gone_) {
    LinkMessage stopping;
    stopping.kind = LinkKind::kStopping;
    link_->Send(stopping);
    link_->Drain(kLinkDrainMs);
  } else {
    notices_.Announce();
  }
  for (const auto& [number, c] : connections_) EndCapture(c.get());
  const Clock::time_point end = Clock::now() + kCaptureEnd;
  while (!ending_.empty() && Clock::now() < end) {
    std::this_thread::sleep_for(Milliseconds(5));
    ReapCaptures();
  }
  while (!connections_.empty()) Close(connections_.begin()->second.get());
}

Server::Server(Hardware* hardware, EngineLink* link, ServerOptions options)
    : impl_(std::make_unique<Impl>(hardware, link, std::move(options))) {}
Server::~Server() = default;

std::string Server::Listen(const std::string& path, int signal_fd) {
  return impl_->Listen(path, signal_fd);
}
void Server::Run() { impl_->Run(); }
void Server::Stop() { impl_->Stop(); }

}  // namespace verbena::nic
