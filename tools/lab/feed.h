// SPDX-License-Identifier: Apache-2.0
//
// What the lab page sees of a daemon: its trace and the state of its objects, as server-sent
// events. One thread asks the daemon while at least one page watches, and nothing otherwise. It
// asks for a bounded number of events per second: of faster applications the page shows pieces,
// each without a hole, and says so.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "tools/verbena_cli/control_client.h"

namespace verbena::tools {

// The objects of a daemon at one moment, with the first bytes of registered memory that this
// user may read: {"t","status","qp","cq","mr","srq","rules","counters"}. Thread: any, one at a
// time for each client. An empty object: the daemon did not answer.
Json LookAt(ControlClient* client, const Json& status);

// An event as the page takes it: a 64-bit wr_id becomes text, since numbers of JavaScript have
// 53 bits.
Json ForPage(Json event);

class Feed {
 public:
  // `extra` adds to each state message (called on the feed's thread).
  Feed(std::string socket, std::function<void(Json*)> extra);
  ~Feed();
  Feed(const Feed&) = delete;
  Feed& operator=(const Feed&) = delete;

  // A page. Several may watch; one that is too slow loses messages, not the others.
  class Viewer {
   public:
    explicit Viewer(Feed* feed);
    ~Viewer();
    Viewer(const Viewer&) = delete;
    Viewer& operator=(const Viewer&) = delete;
    // Waits at most a second for something to send: text of server-sent events, a comment if
    // there is nothing. False: the feed has ended.
    bool Next(std::string* text);

   private:
    Feed* feed_;
    uint64_t next_ = 0;
    std::string first_;  // what happened before
  };

  // Pages that watch.
  int viewers() const;
  // The next state is taken at once: something was changed by a command.
  void Hurry();
  void End();

 private:
  void Run();
  // False: the connection is broken.
  bool TakeTrace();
  bool TakeState();
  void Publish(const char* event, const Json& message);
  Json WithoutRepeated(const Json& events);

  const std::string socket_;
  const std::function<void(Json*)> extra_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<const std::string>> messages_;
  uint64_t first_message_ = 0;      // number of messages_.front()
  std::deque<std::string> recent_;  // events for pages that come later
  std::string last_state_;
  int viewers_ = 0;
  bool hurry_ = false;
  bool ended_ = false;

  // Of the thread.
  ControlClient client_;
  Json status_;
  Json shown_;  // the last state, without its time
  int64_t shown_ns_ = 0;
  int64_t same_ns_ = 0;  // when a state was last like it, but not shown; 0: never
  int rounds_ = 0;
  int64_t last_ns_ = 0;
  bool saturated_ = false;
  std::string refused_;                 // why the daemon shows this user no packets
  std::map<std::string, int> overlap_;  // events near last_ns_, and how many of each
  std::thread thread_;
};

}  // namespace verbena::tools
