// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/world.h"

#include <algorithm>

#include "tests/sim/rc_qp.h"
#include "tests/sim/uc_qp.h"
#include "transport/wire/describe.h"

namespace verbena::sim {

using transport::ParseError;

namespace {

constexpr int kMaxEvents = 2'000'000;
constexpr uint32_t kFirstQpn = 0x10;
constexpr uint32_t kSrqWrIds = 0x8000'0000;

PathOptions RandomPath(const Profile& profile, Random& random) {
  PathOptions path;
  path.pmtu = static_cast<transport::Pmtu>(random.Between(1, 3));
  path.timeout = static_cast<uint8_t>(random.Between(9, 11));  // 2 to 8 ms
  // In profiles that must succeed retries never run out.
  path.retry_cnt = static_cast<uint8_t>(profile.expect_success ? 7 : random.Between(0, 7));
  path.rnr_retry = profile.rnr_retry;
  path.service = profile.service;
  path.min_rnr_timer = static_cast<uint8_t>(random.Between(1, 8));
  path.max_rd_atomic = static_cast<uint8_t>(random.Between(1, 8));
  path.access_flags = transport::kAccessRemoteWrite | transport::kAccessRemoteRead |
                      transport::kAccessRemoteAtomic | transport::kAccessFlushGlobal;
  if (profile.bad_wr > 0 && random.Chance(0.15)) {
    constexpr uint32_t kRights[] = {transport::kAccessRemoteWrite, transport::kAccessRemoteRead,
                                    transport::kAccessRemoteAtomic, transport::kAccessFlushGlobal};
    path.access_flags &= ~kRights[random.Below(std::size(kRights))];
  }
  if (profile.bad_wr > 0 && random.Chance(0.1)) path.max_rd_atomic = 0;
  return path;
}

}  // namespace

World::World(const Profile& profile, uint64_t seed, bool keep_ladder)
    : profile_(profile),
      random_(seed),
      psns_ascend_(random_.Chance(0.5)),
      keep_ladder_(keep_ladder) {
  // Often close to the wrap.
  psn_cursor_ = random_.Chance(0.5) ? 0xfffff0 : static_cast<uint32_t>(random_.Next());
  const uint64_t most = random_.Chance(0.3) ? profile.max_pairs : std::min(profile.max_pairs, 2u);
  pairs_.resize(random_.Between(1, most));
  for (int side = 0; side < 2; ++side) {
    Host& host = hosts_[side];
    host.link = std::make_unique<Link>(profile.network, frames_, random_.Next());
    for (int i = 0; i < 3; ++i) host.counters.push_back(host.memory.Allocate(8));
    // A few more than are in use, so that they are used again soon.
    host.by_qpn.resize(kFirstQpn + pairs_.size() + 2);
    for (uint32_t qpn = kFirstQpn; qpn < host.by_qpn.size(); ++qpn) host.free_qpns.push_back(qpn);
    host.scheduled.resize(pairs_.size());
    for (uint32_t i = 0; i < std::size(kSrqs); ++i) {
      host.srqs[i].queue.Reset(kSrqWrIds + i, kSrqs[i]);
      host.srqs[i].level = static_cast<uint32_t>(random_.Between(1, 8));
    }
    for (uint32_t pair = 0; pair < pairs_.size(); ++pair) {
      HostMemory& peer = hosts_[1 - side].memory;
      if (profile.service == transport::Service::kUc) {
        host.qps.push_back(std::make_unique<UcQp>(*this, host.memory, peer, side, pair));
      } else {
        host.qps.push_back(std::make_unique<RcQp>(*this, host.memory, peer, side, pair));
      }
    }
  }
  for (uint32_t pair = 0; pair < pairs_.size(); ++pair) {
    pairs_[pair].connections_left =
        static_cast<uint32_t>(random_.Between(1, profile.max_connections));
    AssignQpn(At(0, pair));
    AssignQpn(At(1, pair));
    Connect(pair);
  }
}

World::~World() = default;

Totals World::totals() const {
  Totals totals;
  totals.seeds = 1;
  totals.connections = connections_.size();
  for (const Host& host : hosts_) {
    for (const auto& qp : host.qps) {
      totals.packets += qp->packets();
      totals.errors += qp->errors();
    }
  }
  return totals;
}

void World::Note(const std::string& line) {
  if (!keep_ladder_) return;
  const int64_t ns = now_.ns();
  ladder_.push_back(std::to_string(ns / 1000) + "." + std::to_string(ns % 1000 / 100) + "us " +
                    line);
}

void World::Fail(const std::string& what) {
  if (failure_.empty()) failure_ = what;
  Note("VIOLATION " + what);
}

void World::Schedule(Duration after, EventKind kind, int side, uint32_t what, uint32_t connection) {
  events_.push({.time = now_ + after,
                .order = order_++,
                .kind = kind,
                .side = static_cast<uint8_t>(side),
                .what = what,
                .connection = connection});
}

// --- Network

void World::Send(int side, uint32_t frame) {
  for (const Link::Arrival& arrival : hosts_[side].link->Send(frame, now_)) {
    Schedule(arrival.time - now_, EventKind::kArrive, 1 - side, arrival.frame, 0);
  }
}

void World::Arrive(int side, uint32_t number) {
  Frame& frame = frames_[number];
  auto view = PacketView::Parse(frame.span());
  const bool reserved = !view.ok() && view.error() == ParseError::kReservedOpcode;
  if (reserved) view = PacketView::ParseReserved(frame.span());
  if (!view.ok() || (frame.has_icrc && !view->VerifyIcrc())) {
    if (keep_ladder_) Note("     >" + std::string(side == 0 ? "A" : "B") + " spoiled packet");
    frames_.Give(number);
    return;
  }
  const uint32_t qpn = view->dest_qpn().value();
  Qp* qp = qpn < hosts_[side].by_qpn.size() ? hosts_[side].by_qpn[qpn] : nullptr;
  if (qp != nullptr) {
    if (keep_ladder_) {
      const bool old = qp->connection() == nullptr || qp->connection()->number != frame.connection;
      Note("     >" + qp->Name() + " " +
           (reserved ? "reserved opcode, psn " + std::to_string(view->psn().value())
                     : transport::Describe(*view)) +
           (frame.forged ? " FORGED"
            : old        ? " OLD"
                         : ""));
    }
    if (reserved) {
      qp->ReceiveReserved(view->psn());
    } else {
      qp->Receive(*view, frame);
    }
    AfterEvent(*qp);
  }
  frames_.Give(number);
}

// --- SRQs

ReceiveQueue* World::Srq(int side, uint32_t number) {
  for (SharedQueue& srq : hosts_[side].srqs) {
    if (srq.queue.srq() == number) return &srq.queue;
  }
  return nullptr;
}

// The application posts to the SRQs that are in use.
void World::FillSrqs(int side) {
  if (profile_.srq == 0 && profile_.service != transport::Service::kXrc) return;
  for (uint32_t i = 0; i < std::size(kSrqs); ++i) {
    SharedQueue& srq = hosts_[side].srqs[i];
    if (srq.scheduled || srq.queue.available() >= srq.level) continue;
    srq.scheduled = true;
    Schedule(Duration::Microseconds(1) + random_.UpTo(Duration::Microseconds(60)),
             EventKind::kPostSrq, side, i, 0);
  }
}

void World::PostToSrq(int side, uint32_t index) {
  SharedQueue& srq = hosts_[side].srqs[index];
  srq.scheduled = false;
  while (srq.queue.available() < srq.level && random_.Chance(profile_.receives_posted)) {
    srq.queue.PlanAny(profile_, hosts_[side].memory, random_);
    srq.queue.Post();
  }
  FillSrqs(side);
}

// --- Connections

void World::AssignQpn(Qp& qp) {
  Host& host = hosts_[qp.side()];
  const uint64_t at = random_.Below(host.free_qpns.size());
  const uint32_t qpn = host.free_qpns[at];
  host.free_qpns.erase(host.free_qpns.begin() + static_cast<ptrdiff_t>(at));
  host.by_qpn[qpn] = &qp;
  qp.Create(qpn);
}

// Packets of earlier connections must never have a PSN that a later one comes to
// use: a real network needs TIMEWAIT for that. They may be next to them.
void World::PlaceFlow(Flow& flow) {
  const uint32_t gap = 1 + random_.Below32(30);
  if (!psns_ascend_) psn_cursor_ -= flow.total_packets() + gap;
  flow.Start(Psn(psn_cursor_));
  if (psns_ascend_) psn_cursor_ += flow.total_packets() + gap;
}

void World::Connect(uint32_t pair) {
  --pairs_[pair].connections_left;
  pairs_[pair].ending = false;
  Connection& connection = connections_.emplace_back();
  connection.number = static_cast<uint32_t>(connections_.size());
  connection.path = RandomPath(profile_, random_);
  // Few of them for many pairs.
  const auto random_srq = [this]() -> uint32_t {
    if (profile_.srq == 0 || !random_.Chance(profile_.srq)) return 0;
    return kSrqs[random_.Chance(0.8) ? 0 : random_.Below(std::size(kSrqs))];
  };
  for (int side = 0; side < 2; ++side) {
    Flow& flow = connection.flows[side];
    flow.Plan(profile_, connection.path, hosts_[side].memory, hosts_[1 - side].memory,
              hosts_[1 - side].counters, connection.number, random_srq(), random_);
    PlaceFlow(flow);
  }
  for (int side = 0; side < 2; ++side) {
    Qp& qp = At(side, pair);
    qp.Connect(&connection, At(1 - side, pair).qpn());
    const Duration to_rtr = random_.UpTo(Duration::Microseconds(30));
    // What must arrive is not sent before the other side is in RTR.
    const bool is_safe = connection.path.is_uc() && profile_.network.is_perfect();
    const Duration to_rts =
        (is_safe ? Duration::Microseconds(30) : to_rtr) + random_.UpTo(Duration::Microseconds(30));
    Schedule(to_rtr, EventKind::kRtr, side, pair, connection.number);
    Schedule(to_rts, EventKind::kRts, side, pair, connection.number);
    AfterEvent(qp);
  }
  const int side = static_cast<int>(random_.Below(2));
  if (profile_.interference > 0 && random_.Chance(profile_.interference)) {
    connection.interfered = true;
    Schedule(random_.UpTo(Duration::Microseconds(600)), EventKind::kBreak, side, pair,
             connection.number);
  }
  if (profile_.drain > 0 && random_.Chance(profile_.drain)) {
    Schedule(random_.UpTo(Duration::Microseconds(300)), EventKind::kDrain, 1 - side, pair,
             connection.number);
  }
  if (profile_.forged > 0 && random_.Chance(profile_.forged)) {
    Schedule(random_.UpTo(Duration::Microseconds(300)), EventKind::kForge, side, pair,
             connection.number);
  }
}

// Both applications give the connection up, sooner or later.
void World::BeginEnd(uint32_t pair) {
  if (pairs_[pair].ending) return;
  pairs_[pair].ending = true;
  const Connection& connection = *At(0, pair).connection();
  for (int side = 0; side < 2; ++side) {
    const Duration patience =
        random_.Chance(0.7) ? Duration::Microseconds(500) : Duration::Milliseconds(40);
    Schedule(random_.UpTo(patience), EventKind::kTearDown, side, pair, connection.number);
  }
}

// Only what failed may be given up: everything else has to complete first, and
// another connection must be wanted.
void World::CheckPairIdle(uint32_t pair) {
  Pair& p = pairs_[pair];
  if (p.ending || p.closed) return;
  Qp& a = At(0, pair);
  Qp& b = At(1, pair);
  if (a.connection() == nullptr || b.connection() == nullptr) return;
  if (a.connection()->ended) {
    BeginEnd(pair);
  } else if (a.IsIdle() && b.IsIdle()) {
    a.CheckAllDone();
    b.CheckAllDone();
    if (p.connections_left == 0) {
      p.closed = true;
    } else {
      BeginEnd(pair);
    }
  }
}

void World::TearDown(Qp& qp) {
  const uint32_t pair = qp.pair();
  Host& host = hosts_[qp.side()];
  if (random_.Chance(0.5)) {
    Note("      " + qp.Name() + " reset");
    qp.Reset();
  } else {
    Note("      " + qp.Name() + " destroyed");
    host.by_qpn[qp.qpn()] = nullptr;
    host.free_qpns.push_back(qp.qpn());
    AssignQpn(qp);
  }
  if (At(1 - qp.side(), pair).state() != QpState::kReset) return;
  if (pairs_[pair].connections_left > 0) {
    Connect(pair);
  } else {
    pairs_[pair].closed = true;
  }
}

void World::Break(Qp& qp) {
  if (qp.state() < QpState::kRtr || pairs_[qp.pair()].ending) return;
  if (random_.Chance(0.5)) {
    Note("      " + qp.Name() + " is moved to ERR");
    qp.ToError();
  } else {
    BeginEnd(qp.pair());
  }
}

// --- Events

// Works off what has become due for the QP and schedules what will be.
void World::AfterEvent(Qp& qp) {
  qp.Service();
  if (qp.connection() == nullptr) return;
  Scheduled& scheduled = hosts_[qp.side()].scheduled[qp.pair()];
  const uint32_t connection = qp.connection()->number;
  const auto schedule = [&](Duration after, EventKind kind) {
    Schedule(after, kind, qp.side(), qp.pair(), connection);
  };
  const Time timeout = std::max(qp.next_timeout(), now_);
  if (timeout < scheduled.timer) {
    scheduled.timer = timeout;
    events_.push({.time = timeout,
                  .order = order_++,
                  .kind = EventKind::kTimer,
                  .side = static_cast<uint8_t>(qp.side()),
                  .what = qp.pair(),
                  .connection = connection});
  }
  for (const bool responder : {false, true}) {
    if (!qp.HasPending(responder) || scheduled.commit[responder]) continue;
    scheduled.commit[responder] = true;
    schedule(random_.UpTo(profile_.commit_delay),
             responder ? EventKind::kCommitResponder : EventKind::kCommitRequester);
  }
  if (qp.HasMoreToPost() && !scheduled.post) {
    scheduled.post = true;
    schedule(Duration::Microseconds(1) + random_.UpTo(Duration::Microseconds(60)),
             EventKind::kPost);
  }
  if (qp.wants_transmit() && !scheduled.transmit) {
    scheduled.transmit = true;
    schedule(Duration::Microseconds(1), EventKind::kTransmit);
  }
  if (qp.state() == QpState::kSqe && !scheduled.resume) {
    scheduled.resume = true;
    schedule(random_.UpTo(Duration::Microseconds(300)), EventKind::kResume);
  }
  FillSrqs(qp.side());
  CheckPairIdle(qp.pair());
}

void World::Handle(const Event& event) {
  if (event.kind == EventKind::kArrive) return Arrive(event.side, event.what);
  if (event.kind == EventKind::kPostSrq) return PostToSrq(event.side, event.what);
  Qp& qp = At(event.side, event.what);
  Scheduled& scheduled = hosts_[event.side].scheduled[event.what];
  const bool current = qp.connection() != nullptr && qp.connection()->number == event.connection;
  switch (event.kind) {
    case EventKind::kPost:
      scheduled.post = false;
      if (current) qp.PostSome();
      break;
    case EventKind::kTransmit:
      scheduled.transmit = false;
      break;
    case EventKind::kTimer:
      if (scheduled.timer == event.time) scheduled.timer = Time::Never();
      if (current) qp.HandleTimer();
      break;
    case EventKind::kCommitRequester:
    case EventKind::kCommitResponder: {
      const bool responder = event.kind == EventKind::kCommitResponder;
      scheduled.commit[responder] = false;
      if (current) qp.CommitSome(responder);
      break;
    }
    case EventKind::kRtr:
      if (current && qp.state() == QpState::kInit) qp.ToRtr();
      break;
    case EventKind::kRts:
      if (current && qp.state() == QpState::kRtr) qp.ToRts();
      break;
    case EventKind::kBreak:
      if (current) Break(qp);
      break;
    case EventKind::kDrain:
      if (!current || qp.state() != QpState::kRts) break;
      Note("      " + qp.Name() + " SQD");
      qp.ToSqd();
      Schedule(random_.UpTo(Duration::Microseconds(500)), EventKind::kResume, event.side,
               event.what, event.connection);
      break;
    case EventKind::kResume:
      scheduled.resume = false;
      if (current && (qp.state() == QpState::kSqd || qp.state() == QpState::kSqe)) qp.Resume();
      break;
    case EventKind::kForge:
      if (current && qp.state() >= QpState::kRtr) Forge(qp);
      break;
    case EventKind::kTearDown:
      if (current) TearDown(qp);
      break;
    case EventKind::kArrive:
    case EventKind::kPostSrq:
      break;
  }
  AfterEvent(qp);
}

// The engine does not get to run for a while, as on an overloaded machine, and
// does not take that for the fault of the network.
void World::Stall() {
  const Duration gap = random_.UpTo(Duration::Milliseconds(30));
  now_ += gap;
  if (keep_ladder_) Note("      stalled for " + std::to_string(gap.us()) + "us");
  for (const Host& host : hosts_) {
    for (const auto& qp : host.qps) qp->ShiftDeadlines(gap);
  }
}

// Nothing is going to happen any more: everything must have come to its end.
void World::CheckEnd() {
  for (uint32_t pair = 0; pair < pairs_.size(); ++pair) {
    At(0, pair).CheckAtEnd();
    At(1, pair).CheckAtEnd();
    if (pairs_[pair].closed) continue;
    Fail("pair " + std::to_string(pair) + " hangs: A " + At(0, pair).Describe() + "; B " +
         At(1, pair).Describe());
  }
}

std::string World::Run() {
  int handled = 0;
  while (!events_.empty() && failure_.empty()) {
    if (profile_.stalls > 0 && random_.Chance(profile_.stalls)) Stall();
    const Event event = events_.top();
    events_.pop();
    now_ = std::max(now_, event.time);
    Handle(event);
    if (++handled == kMaxEvents) Fail("does not come to an end");
  }
  if (failure_.empty()) CheckEnd();
  return failure_;
}

std::string Report(const Profile& profile, uint64_t seed, size_t ladder_lines) {
  World again(profile, seed, true);
  const std::string failure = again.Run();
  std::string text = std::string("profile ") + profile.name + ", seed " + std::to_string(seed) +
                     ": " + (failure.empty() ? "no violation" : failure) +
                     "\nreplay: tools/simulate --profile " + profile.name + " --seed " +
                     std::to_string(seed) + " --ladder\n";
  const auto& ladder = again.ladder();
  for (size_t i = ladder.size() - std::min(ladder.size(), ladder_lines); i < ladder.size(); ++i) {
    text += ladder[i] + "\n";
  }
  return text;
}

}  // namespace verbena::sim
