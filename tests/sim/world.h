// SPDX-License-Identifier: Apache-2.0
//
// World: one seeded run of 1 to 64 pairs of RC, XRC or UC QPs on two hosts, in virtual
// time. The network loses, duplicates, delays, reorders and corrupts; memory
// commits late, out of phase or fails; applications post, drain, break, reset,
// destroy and re-use QPs (with packets of earlier connections still under way);
// a hostile peer forges packets. After every event must hold:
//   - completions: every WR exactly once, in order, none invented or lost, with
//     the status that its defect has to give; data is right when one reports it;
//   - packets: each is what its WR says, sent again alike; nothing is sent too
//     early (RNR wait, fence, SQD, max_rd_atomic);
//   - execution: every packet exactly once, in order, to the right place; no byte
//     outside the targets, nothing of an earlier connection, atomics once;
//   - receives, own ones and those of SRQs: each is taken once and completes once,
//     at the QP that took it, in order;
//   - UC: exactly what arrives in one run is delivered, everything else vanishes
//     without a trace (uc_receiver.h); nobody waits;
//   - answers: only to what was executed and is visible, with the right MSN;
//   - it comes to an end, with nothing left.
// The same profile and seed give the same run.
#pragma once

#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "tests/sim/memory.h"
#include "tests/sim/network.h"
#include "tests/sim/profile.h"
#include "tests/sim/qp.h"
#include "tests/sim/random.h"

namespace verbena::sim {

struct Totals {
  uint64_t seeds = 0;
  uint64_t packets = 0;
  uint64_t connections = 0;
  uint64_t errors = 0;  // completions with an error

  void Add(const Totals& other) {
    seeds += other.seeds;
    packets += other.packets;
    connections += other.connections;
    errors += other.errors;
  }
};

class World final : public QpHost {
 public:
  World(const Profile& profile, uint64_t seed, bool keep_ladder);
  ~World() override;

  // Empty, or the first violation.
  std::string Run();
  // One line per packet and event.
  const std::vector<std::string>& ladder() const { return ladder_; }
  Totals totals() const;

  // QpHost.
  Time now() const override { return now_; }
  Random& random() override { return random_; }
  const Profile& profile() const override { return profile_; }
  FramePool& frames() override { return frames_; }
  void Send(int side, uint32_t frame) override;
  ReceiveQueue* Srq(int side, uint32_t number) override;
  void Fail(const std::string& what) override;
  bool keeps_ladder() const override { return keep_ladder_; }
  void Note(const std::string& line) override;

 private:
  enum class EventKind : uint8_t {
    kArrive,  // frame `what` at side `side`
    kPost,    // of QP `what`, as all below
    kTransmit,
    kTimer,
    kCommitRequester,
    kCommitResponder,
    kRtr,
    kRts,
    kBreak,  // the application interferes
    kDrain,
    kResume,
    kForge,
    kTearDown,
    kPostSrq,  // `what`: index of the SRQ
  };
  struct Event {
    Time time;
    uint64_t order;
    EventKind kind;
    uint8_t side;
    uint32_t what;        // frame, or number of the pair
    uint32_t connection;  // for which it is meant; 0: any

    bool operator<(const Event& other) const {  // priority_queue: the last first
      return time != other.time ? time > other.time : order > other.order;
    }
  };
  // What is scheduled for a QP already.
  struct Scheduled {
    Time timer = Time::Never();
    bool post = false;
    bool transmit = false;
    bool commit[2] = {false, false};
    bool resume = false;
  };
  struct SharedQueue {
    ReceiveQueue queue;
    uint32_t level = 0;      // receives that the application keeps posted
    bool scheduled = false;  // kPostSrq
  };
  struct Host {
    HostMemory memory;
    std::unique_ptr<Link> link;  // to the other one
    std::vector<std::unique_ptr<Qp>> qps;
    std::vector<Scheduled> scheduled;
    std::vector<Qp*> by_qpn;
    std::vector<uint32_t> free_qpns;
    std::vector<uint64_t> counters;
    SharedQueue srqs[std::size(kSrqs)];
  };
  struct Pair {
    uint32_t connections_left = 0;
    bool ending = false;
    bool closed = false;
  };

  Qp& At(int side, uint32_t pair) { return *hosts_[side].qps[pair]; }
  void Schedule(Duration after, EventKind kind, int side, uint32_t what, uint32_t connection);
  void Handle(const Event& event);
  void Arrive(int side, uint32_t frame);
  void AfterEvent(Qp& qp);
  void AssignQpn(Qp& qp);
  void FillSrqs(int side);
  void PostToSrq(int side, uint32_t index);
  void Connect(uint32_t pair);
  void PlaceFlow(Flow& flow);
  void BeginEnd(uint32_t pair);
  void TearDown(Qp& qp);
  void Break(Qp& qp);
  void Forge(Qp& qp);
  void Stall();
  void CheckPairIdle(uint32_t pair);
  void CheckEnd();

  const Profile& profile_;
  Random random_;
  Time now_ = Time::FromNanoseconds(1'000'000);
  FramePool frames_;
  Host hosts_[2];
  std::vector<Pair> pairs_;
  std::deque<Connection> connections_;
  std::priority_queue<Event> events_;
  uint64_t order_ = 0;
  // PSNs of all flows of a world are apart from each other: those of later ones
  // are above, or below, those of earlier ones.
  bool psns_ascend_;
  uint32_t psn_cursor_;
  const bool keep_ladder_;
  std::string failure_;
  std::vector<std::string> ladder_;
};

// The run of `seed` again with a ladder: the violation, how to repeat it, and the
// last packets and events that led to it.
std::string Report(const Profile& profile, uint64_t seed, size_t ladder_lines);

}  // namespace verbena::sim
