// SPDX-License-Identifier: Apache-2.0
#include "tools/lab/feed.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <ctime>
#include <utility>

namespace verbena::tools {
namespace {

constexpr std::chrono::milliseconds kPause(100);
// While more happens than can be shown: what is asked for costs the daemon time.
constexpr std::chrono::milliseconds kLongPause(500);
constexpr int64_t kQuietNs = 950'000'000;
constexpr int kNiceness = 10;
constexpr int kEventsPerRound = 1500;
constexpr int kEventsWhenBusy = 400;
constexpr int kEventsOfThePast = 3000;
constexpr int kRoundsPerState = 2;
constexpr int kStatesPerStatus = 16;
constexpr size_t kKeptMessages = 64;
constexpr size_t kRecentEvents = 4000;
constexpr size_t kMostObjects = 64;
constexpr size_t kBytesShown = 64;
// Rings are read one after the other: an event may be recorded with a time before one that
// another ring has shown already.
constexpr int64_t kOverlapNs = 3'000'000;

int64_t Now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Hexadecimal digits of memory of a process of our own; empty: not readable.
std::string BytesAt(int64_t pid, uint64_t address, uint64_t length) {
  struct stat owner {};
  if (pid <= 0 || stat(fmt::format("/proc/{}", pid).c_str(), &owner) != 0 ||
      owner.st_uid != geteuid()) {
    return {};
  }
  std::array<unsigned char, kBytesShown> bytes;
  iovec here = {bytes.data(), std::min<uint64_t>(length, bytes.size())};
  // NOLINTNEXTLINE: an address of the other process
  iovec there = {reinterpret_cast<void*>(address), here.iov_len};
  const ssize_t got = process_vm_readv(static_cast<pid_t>(pid), &here, 1, &there, 1, 0);
  std::string text;
  for (ssize_t i = 0; i < got; ++i) text += fmt::format("{:02x}", bytes[static_cast<size_t>(i)]);
  return text;
}

std::string ServerSent(const char* event, const Json& message) {
  return fmt::format("event: {}\ndata: {}\n\n", event, Dump(message));
}

}  // namespace

Json ForPage(Json event) {
  if (const auto id = event.find("wr_id"); id != event.end()) *id = Printable(*id);
  return event;
}

Json LookAt(ControlClient* client, const Json& status) {
  Json state = {{"t", Now()}, {"status", status}};
  for (const char* what : {"qp", "cq", "mr", "srq"}) {
    Reply reply = client->Request({{"op", "list"}, {"what", what}});
    if (!reply.ok()) return Json::object();
    Json items = ArrayField(reply.json, "items");
    state[std::string(what) + "_total"] = items.size();
    if (items.size() > kMostObjects) items.erase(items.begin() + kMostObjects, items.end());
    state[what] = std::move(items);
  }
  for (Json& region : state["mr"]) {
    region["bytes"] =
        BytesAt(IntegerField(region, "pid"), static_cast<uint64_t>(IntegerField(region, "address")),
                static_cast<uint64_t>(IntegerField(region, "length")));
  }
  const Reply rules = client->Request({{"op", "fault_list"}});
  state["rules"] = rules.ok() ? ArrayField(rules.json, "rules") : Json::array();
  const Reply counters = client->Request({{"op", "counters"}});
  state["counters"] = counters.ok() ? ObjectField(counters.json, "devices") : Json::object();
  return state;
}

Feed::Viewer::Viewer(Feed* feed) : feed_(feed) {
  const std::lock_guard lock(feed->mutex_);
  ++feed->viewers_;
  next_ = feed->first_message_ + feed->messages_.size();
  if (!feed->recent_.empty()) {
    first_ = "event: trace\ndata: {\"events\":[";
    for (const std::string& event : feed->recent_) first_ += event + ",";
    first_.back() = ']';
    first_ += "}\n\n";
  }
  first_ += feed->last_state_;
  feed->changed_.notify_all();
}

Feed::Viewer::~Viewer() {
  const std::lock_guard lock(feed_->mutex_);
  --feed_->viewers_;
}

bool Feed::Viewer::Next(std::string* text) {
  *text = std::exchange(first_, {});
  if (!text->empty()) return true;
  std::unique_lock lock(feed_->mutex_);
  const auto has_more = [this] { return next_ < feed_->first_message_ + feed_->messages_.size(); };
  feed_->changed_.wait_for(lock, std::chrono::seconds(1),
                           [&] { return feed_->ended_ || has_more(); });
  if (feed_->ended_) return false;
  if (next_ < feed_->first_message_) {
    next_ = feed_->first_message_;
    *text += "event: gap\ndata: {}\n\n";
  }
  while (has_more()) *text += *feed_->messages_[next_++ - feed_->first_message_];
  // So that a page that has gone is noticed.
  if (text->empty()) *text = ": waiting\n\n";
  return true;
}

Feed::Feed(std::string socket, std::function<void(Json*)> extra)
    : socket_(std::move(socket)), extra_(std::move(extra)), thread_([this] { Run(); }) {}

Feed::~Feed() {
  End();
  thread_.join();
}

void Feed::End() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void Feed::Hurry() {
  const std::lock_guard lock(mutex_);
  hurry_ = true;
  changed_.notify_all();
}

int Feed::viewers() const {
  const std::lock_guard lock(mutex_);
  return viewers_;
}

void Feed::Publish(const char* event, const Json& message) {
  auto text = std::make_shared<const std::string>(ServerSent(event, message));
  const std::lock_guard lock(mutex_);
  if (std::string_view(event) == "state") last_state_ = *text;
  messages_.push_back(std::move(text));
  if (messages_.size() > kKeptMessages) {
    messages_.pop_front();
    ++first_message_;
  }
  changed_.notify_all();
}

void Feed::Run() {
  // Of this thread only: who is watched goes first.
  setpriority(PRIO_PROCESS, 0, kNiceness);
  std::unique_lock lock(mutex_);
  while (!ended_) {
    if (viewers_ == 0) {
      changed_.wait(lock);
      continue;
    }
    lock.unlock();
    bool connected = client_.connected();
    if (!connected) {
      const std::string problem = client_.Connect(socket_);
      connected = problem.empty();
      if (!connected) Publish("down", {{"reason", problem}});
      status_ = Json();
    }
    if (connected) {
      connected = TakeTrace();
      const bool state_is_due = rounds_++ % kRoundsPerState == 0;
      if (connected && state_is_due) connected = TakeState();
      if (!connected) {
        client_ = ControlClient();
        Publish("down", {{"reason", "the daemon does not answer"}});
      }
    }
    const auto pause = !connected   ? std::chrono::milliseconds(1000)
                       : saturated_ ? kLongPause
                                    : kPause;
    lock.lock();
    changed_.wait_for(lock, pause, [this] { return ended_ || hurry_; });
    if (std::exchange(hurry_, false)) rounds_ -= rounds_ % kRoundsPerState;
  }
}

// The events without those that the last reply had already.
Json Feed::WithoutRepeated(const Json& events) {
  Json fresh = Json::array();
  const int64_t newest = std::max(last_ns_, IntegerField(events.back(), "time_ns"));
  std::map<std::string, int> kept;
  std::map<std::string, int> repeated = overlap_;
  for (const Json& event : events) {
    const int64_t time = IntegerField(event, "time_ns");
    const bool may_repeat = time <= last_ns_;
    const bool may_be_repeated = time > newest - kOverlapNs;
    std::string text;
    if (may_repeat || may_be_repeated) text = Dump(event);
    if (may_be_repeated) ++kept[text];
    if (may_repeat) {
      const auto found = repeated.find(text);
      if (found != repeated.end() && found->second-- > 0) continue;
    }
    fresh.push_back(ForPage(event));
  }
  overlap_ = std::move(kept);
  last_ns_ = newest;
  return fresh;
}

bool Feed::TakeTrace() {
  const bool first = last_ns_ == 0;
  const int limit = first ? kEventsOfThePast : saturated_ ? kEventsWhenBusy : kEventsPerRound;
  const Reply reply = client_.Request({{"op", "trace"},
                                       {"after_ns", std::max<int64_t>(0, last_ns_ - kOverlapNs)},
                                       {"limit", limit}});
  refused_ = reply.kind == Reply::Kind::kRefused ? reply.error : std::string();
  if (!reply.ok()) return reply.kind == Reply::Kind::kRefused;
  const Json& events = ArrayField(reply.json, "events");
  if (events.empty()) {
    saturated_ = false;
    return true;
  }
  const bool gap = !first && events.size() >= static_cast<size_t>(limit) &&
                   IntegerField(events.front(), "time_ns") > last_ns_;
  saturated_ = gap;
  Json fresh = WithoutRepeated(events);
  if (fresh.empty()) return true;
  {
    const std::lock_guard lock(mutex_);
    for (const Json& event : fresh) recent_.push_back(Dump(event));
    while (recent_.size() > kRecentEvents) recent_.pop_front();
  }
  Publish("trace", {{"events", std::move(fresh)}, {"gap", gap}});
  return true;
}

bool Feed::TakeState() {
  if (status_.is_null() || rounds_ % (kRoundsPerState * kStatesPerStatus) == 1) {
    const Reply status = client_.Request({{"op", "status"}});
    if (!status.ok()) return false;
    status_ = status.json;
  }
  Json state = LookAt(&client_, status_);
  if (state.empty()) return false;
  if (!refused_.empty()) state["refused"] = refused_;
  extra_(&state);
  // A page draws what it is sent: nothing new is said once a second.
  const int64_t now = IntegerField(state, "t");
  state.erase("t");
  if (state == shown_) {
    same_ns_ = now;
    if (now - shown_ns_ < kQuietNs) return true;
  }
  shown_ = state;
  shown_ns_ = now;
  // Rates begin where something began to change.
  if (const int64_t same = std::exchange(same_ns_, 0); same != 0 && same != now) {
    state["same_until"] = same;
  }
  state["t"] = now;
  Publish("state", state);
  return true;
}

}  // namespace verbena::tools
