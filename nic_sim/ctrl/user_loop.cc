// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/user_loop.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "nic_sim/ctrl/command_dispatch.h"
#include "nic_sim/ctrl/hello.h"
#include "nic_sim/ctrl/rdma_netlink.h"
#include "nic_sim/ctrl/resource_limits.h"

namespace verbena::nic {
namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr size_t kMaxUnknown = 128;  // connections that have not said Hello
constexpr size_t kMaxControl = 64;
constexpr int kMessagesInARow = 16;
constexpr Milliseconds kCapturePoll(20);        // of captures with a count
constexpr Milliseconds kCaptureErrorPoll(500);  // of others: they end when a write fails
constexpr Milliseconds kCaptureEnd(3000);
constexpr int kPeerPidfd = 77;  // SO_PEERPIDFD, Linux 6.5; not in Debian 12's headers

// Epoll tags: connections have numbers from 1 on, shifted; bit 0 says "its pidfd".
constexpr uint64_t kTagWake = 0;

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

UserLoop::UserLoop(ServerShared* shared, uint32_t max_contexts)
    : shared_(*shared),
      hardware_(*shared->hardware),
      max_contexts_(max_contexts),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      buffer_(abi::kMaxControlRequestBytes) {
  Watch(wake_.get(), kTagWake, EPOLLIN, EPOLL_CTL_ADD);
  thread_ = std::thread(&UserLoop::Run, this);
}

UserLoop::~UserLoop() {
  if (!thread_.joinable()) return;
  Stop();
  thread_.join();
}

bool UserLoop::Adopt(std::unique_ptr<Connection> connection) {
  // Room for one more that says nothing yet: the oldest of those makes room for it.
  constexpr uint32_t kOthers = kMaxControl + 2 * kMaxUnknown + RdmaCmFiles::kMaxFilesOfUser;
  if (count_ >= max_contexts_ + kOthers) return false;
  ++count_;
  ++shared_.connections;
  {
    const std::lock_guard guard(mutex_);
    adopted_.push_back(std::move(connection));
  }
  Wake();
  return true;
}

void UserLoop::Stop() {
  stop_.store(true);
  Wake();
}

bool UserLoop::Join(Milliseconds limit) {
  const Clock::time_point end = Clock::now() + limit;
  while (!ended_ && Clock::now() < end) std::this_thread::sleep_for(Milliseconds(1));
  if (!ended_) return false;
  thread_.join();
  return true;
}

void UserLoop::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = write(wake_.get(), &one, sizeof(one));
}

void UserLoop::Run() {
  pthread_setname_np(pthread_self(), "verbena-user");
  epoll_event events[64];
  while (!stop_) {
    const int count = epoll_wait(epoll_.get(), events, std::size(events), WaitMilliseconds());
    if (count < 0 && errno != EINTR) {
      spdlog::error("epoll_wait: {}", std::strerror(errno));
      break;
    }
    for (int i = 0; i < count; ++i) Handle(events[i].data.u64, events[i].events);
    HandleTimeouts();
  }
  Finish();
  ended_ = true;
}

void UserLoop::Finish() {
  TakeAdopted();
  for (const auto& [number, c] : connections_) EndCapture(c.get());
  const Clock::time_point end = Clock::now() + kCaptureEnd;
  while (!ending_.empty() && Clock::now() < end) {
    std::this_thread::sleep_for(Milliseconds(5));
    ReapCaptures();
  }
  while (!connections_.empty()) Close(connections_.begin()->second.get());
}

// ------------------------------------------------------------------- events

void UserLoop::Watch(int fd, uint64_t tag, uint32_t events, int op) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = tag;
  if (epoll_ctl(epoll_.get(), op, fd, &event) != 0) {
    spdlog::error("epoll_ctl: {}", std::strerror(errno));
  }
}

int UserLoop::WaitMilliseconds() const {
  auto end = Clock::time_point::max();
  for (const auto& [number, c] : connections_) {
    if (c->kind == Connection::Kind::kUnknown) {
      end = std::min(end, c->born + Milliseconds(shared_.options.hello_ms));
    }
    if (c->capture != 0 && !c->capture_ending) {
      end = std::min(end, Clock::now() + (c->capture_counted ? kCapturePoll : kCaptureErrorPoll));
    }
  }
  if (end == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 3'600'000));
}

void UserLoop::Handle(uint64_t tag, uint32_t events) {
  if (tag == kTagWake) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t ignored = read(wake_.get(), &count, sizeof(count));
    TakeAdopted();
    ReapCaptures();
    CloseRemoved();
    return;
  }
  const auto found = connections_.find(tag >> 1);
  if (found == connections_.end()) return;  // closed by an earlier event of this round
  if ((tag & 1) != 0) {
    Close(found->second.get());  // its process has ended
  } else {
    HandleConnection(found->second.get(), events);
  }
}

void UserLoop::HandleTimeouts() {
  const Clock::time_point now = Clock::now();
  for (auto next = connections_.begin(); next != connections_.end();) {
    Connection* c = (next++)->second.get();
    if (c->kind == Connection::Kind::kUnknown &&
        now >= c->born + Milliseconds(shared_.options.hello_ms)) {
      Close(c);
    } else if (c->capture != 0 && !c->capture_ending && hardware_.CaptureDone(c->capture)) {
      EndCapture(c);
    }
  }
}

void UserLoop::TakeAdopted() {
  std::vector<std::unique_ptr<Connection>> adopted;
  {
    const std::lock_guard guard(mutex_);
    adopted.swap(adopted_);
  }
  for (std::unique_ptr<Connection>& c : adopted) {
    if (CountKind(Connection::Kind::kUnknown) >= kMaxUnknown) {
      // The oldest has had most time to say what it is.
      const auto oldest = std::find_if(connections_.begin(), connections_.end(), [](auto& entry) {
        return entry.second->kind == Connection::Kind::kUnknown;
      });
      Close(oldest->second.get());
    }
    Watch(c->socket.get(), c->number << 1, EPOLLIN, EPOLL_CTL_ADD);
    connections_.emplace(c->number, std::move(c));
  }
}

void UserLoop::HandleConnection(Connection* c, uint32_t events) {
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

bool UserLoop::HandleMessage(Connection* c, ReceivedMessage message) {
  switch (c->kind) {
    case Connection::Kind::kUnknown:
      return HandleHello(c, std::move(message));
    case Connection::Kind::kDevice:
      return HandleCommand(c, std::move(message));
    case Connection::Kind::kControl:
      return HandleControl(c, std::move(message));
    case Connection::Kind::kRdmaCm:
      shared_.rdma_cm.Handle(c->number, std::span(buffer_).first(message.bytes), message.truncated,
                             message.fds);
      return true;
    case Connection::Kind::kNetlink:
      return HandleNetlink(c, message.bytes);
    case Connection::Kind::kRefresh:
      break;  // one message is all
  }
  Close(c);
  return false;
}

// ----------------------------------------------------------------- messages

bool UserLoop::HandleHello(Connection* c, ReceivedMessage message) {
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
    case HelloKind::kRdmaCm:
      return OpenRdmaCm(c, std::move(message));
    case HelloKind::kNetlink:
      c->kind = Connection::Kind::kNetlink;
      return true;
    case HelloKind::kRefresh:
      return Refresh(c, checked.device);
    case HelloKind::kControl:
      break;
  }
  const bool full = CountKind(Connection::Kind::kControl) >= kMaxControl;
  c->kind = Connection::Kind::kControl;
  if (!full) return true;
  c->close_when_sent = true;
  return SendText(c, ErrorText("too many control connections"));
}

bool UserLoop::OpenDevice(Connection* c, const abi::Hello& hello, std::vector<UniqueFd> fds) {
  abi::HelloReply reply = MakeHelloReply(0);
  reply.version = std::min(hello.version_max, abi::kVersionMax);
  std::vector<UniqueFd> reply_fds;
  const int error = OpenContext(c, hello, std::move(fds), &reply, &reply_fds);
  if (error != 0) return RefuseDevice(c, MakeHelloReply(error));
  spdlog::debug("{} (pid {}) opened verbena{}", CommOf(hello), c->peer.pid, hello.device_index);
  return SendBytes(c, ToBytes(&reply, sizeof(reply)), std::move(reply_fds));
}

int UserLoop::OpenContext(Connection* c, const abi::Hello& hello, std::vector<UniqueFd> fds,
                          abi::HelloReply* reply, std::vector<UniqueFd>* reply_fds) {
  if (contexts_ >= max_contexts_ || shared_.contexts >= kMaxContexts) return ENOMEM;
  if (hello.device_index >= hardware_.nic_count()) return ENODEV;
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
  const int error =
      hardware_.OpenContext(hello, std::move(client), reply, &context_fd, &c->context, &why);
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
  ++shared_.contexts;
  shared_.contexts_ever = true;
  reply->error = 0;
  reply_fds->push_back(std::move(context_memory));
  for (const int fd : {c->context->wake_page_fd(), hardware_.status_page_readonly_fd()}) {
    reply_fds->emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 3));
  }
  reply_fds->push_back(std::move(read_end));
  LinkMessage news;
  news.kind = LinkKind::kAddContext;
  news.context = c->number;
  shared_.Tell(news, notice_end.get());
  if (c->pidfd.valid()) Watch(c->pidfd.get(), c->number << 1 | 1, EPOLLIN, EPOLL_CTL_ADD);
  return 0;
}

bool UserLoop::RefuseDevice(Connection* c, const abi::HelloReply& reply) {
  c->close_when_sent = true;
  return SendBytes(c, ToBytes(&reply, sizeof(reply)));
}

bool UserLoop::OpenRdmaCm(Connection* c, ReceivedMessage message) {
  abi::RdmaCmHelloReply reply{};
  reply.magic = abi::kMagic;
  reply.error = message.truncated
                    ? EINVAL
                    : shared_.rdma_cm.Open(c->number, c->socket.get(), c->peer,
                                           std::span(buffer_).first(message.bytes), message.fds);
  c->kind = Connection::Kind::kRdmaCm;
  c->close_when_sent = reply.error != 0;
  return SendBytes(c, ToBytes(&reply, sizeof(reply)));
}

bool UserLoop::HandleNetlink(Connection* c, size_t bytes) {
  std::optional<uid_t> user;
  if (!c->privileged) user = c->peer.uid;
  for (auto& answer : AnswerNetlink(std::span(buffer_).first(bytes), &hardware_, user)) {
    c->out.push_back({std::move(answer), {}});
  }
  return Flush(c);
}

bool UserLoop::Refresh(Connection* c, const std::string& device) {
  const std::string& tree = shared_.options.tree;
  for (size_t nic = 0; nic < hardware_.nic_count() && !tree.empty(); ++nic) {
    if (hardware_.nic_info(nic).device != device) continue;
    UpdateCounters(tree, nic, device, ReadCounters(&hardware_, device));
  }
  c->kind = Connection::Kind::kRefresh;
  c->close_when_sent = true;
  return SendBytes(c, std::vector<std::byte>(1));
}

// Contexts whose device was taken out.
void UserLoop::CloseRemoved() {
  for (auto next = connections_.begin(); next != connections_.end();) {
    Connection* c = (next++)->second.get();
    if (c->context != nullptr && c->context->removed()) Close(c);
  }
}

bool UserLoop::HandleCommand(Connection* c, ReceivedMessage message) {
  if (c->context->removed()) {
    Close(c);
    return false;
  }
  const bool truncated = message.truncated || message.bytes > abi::kMaxMessageBytes;
  CommandResult result;
  {
    const std::lock_guard guard(c->context->lock());
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
      shared_.Tell(news, result.channel.get());
      break;
    case CommandResult::CqChange::kRemoved:
      news.kind = LinkKind::kRemoveCq;
      shared_.Tell(news);
      break;
  }
  return SendBytes(c, std::move(result.reply), std::move(result.fds));
}

bool UserLoop::HandleControl(Connection* c, ReceivedMessage message) {
  if (message.truncated) return SendText(c, ErrorText("the request is longer than 64 KiB"));
  const std::string_view text(reinterpret_cast<const char*>(buffer_.data()), message.bytes);
  const ControlAsker asker = {c->peer.uid, c->privileged};
  const ControlAnswer answer =
      AnswerControlRequest(text, &hardware_, shared_.options.daemon, shared_.contexts, asker);
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
  // The supervisor closes it when all is over.
  LinkMessage hold;
  hold.kind = LinkKind::kHold;
  shared_.news.TellSupervisor(hold, c->socket.get());
  const bool here = SendText(c, R"({"ok":true})");
  shared_.Stop();
  return here;
}

bool UserLoop::StartCapture(Connection* c, const ControlAnswer& answer, std::vector<UniqueFd> fds) {
  if (c->capture != 0) return SendText(c, ErrorText("this connection has a capture already"));
  if (fds.size() != 1 || !IsWritable(fds[0].get())) {
    return SendText(c, ErrorText("capture needs one descriptor, open for writing"));
  }
  std::string error;
  c->capture = hardware_.StartCapture(fds[0].release(), answer.device, answer.before_faults,
                                      answer.count, answer.qpn, &error);
  if (c->capture == 0) return SendText(c, ErrorText(error));
  c->capture_counted = answer.count > 0;
  return SendText(c, R"({"ok":true})");
}

void UserLoop::EndCapture(Connection* c) {
  if (c->capture == 0 || c->capture_ending) return;
  c->capture_ending = true;
  UpdateInterest(c);
  std::function<CaptureCounts()> finish = hardware_.DetachCapture(c->capture);
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

void UserLoop::ReapCaptures() {
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

// ------------------------------------------------------------------- sending

bool UserLoop::SendText(Connection* c, std::string_view text) {
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

bool UserLoop::SendBytes(Connection* c, std::vector<std::byte> bytes, std::vector<UniqueFd> fds) {
  c->out.push_back({std::move(bytes), std::move(fds)});
  return Flush(c);
}

// False: the connection is gone.
bool UserLoop::Flush(Connection* c) {
  while (!c->out.empty()) {
    const OutgoingMessage& next = c->out.front();
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
void UserLoop::UpdateInterest(Connection* c) {
  const uint32_t interest = !c->out.empty() ? EPOLLOUT : c->capture_ending ? 0u : EPOLLIN;
  if (interest == c->interest) return;
  c->interest = interest;
  Watch(c->socket.get(), c->number << 1, interest, EPOLL_CTL_MOD);
}

void UserLoop::Close(Connection* c) {
  if (c->context != nullptr) {
    const bool removed = c->context->removed();
    hardware_.CloseContext(c->context);
    // Nothing of it is used any more: now its application may know.
    if (removed) shared_.news.AnnounceRemoval(c->number);
    --contexts_;
    --shared_.contexts;
    LinkMessage news;
    news.kind = LinkKind::kRemoveContext;
    news.context = c->number;
    shared_.Tell(news);
  }
  shared_.rdma_cm.Close(c->number);
  EndCapture(c);
  connections_.erase(c->number);  // descriptors leave the epoll set by being closed
  --count_;
  --shared_.connections;
  shared_.Wake();
}

size_t UserLoop::CountKind(Connection::Kind kind) const {
  return static_cast<size_t>(
      std::count_if(connections_.begin(), connections_.end(),
                    [&](auto& entry) { return entry.second->kind == kind; }));
}

}  // namespace verbena::nic
