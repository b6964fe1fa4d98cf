// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/rc_simulation.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "transport/wire/describe.h"

namespace verbena::testing {

using transport::Completion;
using transport::Duration;
using transport::MemorySegment;
using transport::PacketView;
using transport::Psn;
using transport::Time;
using transport::TxPacket;
using transport::WcOpcode;
using transport::WcStatus;
using transport::WrOpcode;

namespace {

constexpr uint32_t kLocalKey = 0x11;
constexpr uint32_t kRemoteKey = 0x22;
constexpr uint32_t kBadKey = 0x99;
constexpr uint64_t kLocalBase = 0x100000;
constexpr uint64_t kRemoteBase = 0x7000'0000'0000;
constexpr size_t kRegionBytes = 1 << 18;
constexpr int kMaxEvents = 400'000;

RcOptions OptionsFor(const SimulationProfile& profile, uint64_t seed) {
  Random random(seed ^ 0x5eed);
  RcOptions options;
  options.pmtu = static_cast<transport::Pmtu>(random.Between(1, 2));
  // Often close to the wrap.
  options.psn = Psn(random.Chance(0.5) ? 0xfffff0 : static_cast<uint32_t>(random.Next()));
  options.timeout = 10;  // 4.19 ms
  options.rnr_retry = profile.rnr_retry;
  options.max_rd_atomic = static_cast<uint8_t>(random.Between(1, 8));
  options.min_rnr_timer = static_cast<uint8_t>(random.Between(1, 6));
  options.capacity = {
      .max_wr = static_cast<uint32_t>(random.Between(1, 40)), .max_sge = 8, .max_inline = 256};
  return options;
}

bool ConsumesReceive(WrOpcode opcode) {
  return opcode == WrOpcode::kSend || opcode == WrOpcode::kSendImm ||
         opcode == WrOpcode::kSendInv || opcode == WrOpcode::kRdmaWriteImm;
}

std::string Text(const Completion& c) {
  return "wr_id " + std::to_string(c.wr_id) + " status " +
         std::to_string(static_cast<int>(c.status)) + " bytes " + std::to_string(c.byte_len);
}

}  // namespace

struct RcSimulation::PlannedWr {
  WrOpcode opcode = WrOpcode::kSend;
  bool signaled = false;
  bool fence = false;
  bool solicited = false;
  uint32_t bytes = 0;
  uint32_t imm = 0;
  uint64_t remote = 0;
  std::vector<MemorySegment> sges;
  std::vector<std::byte> inline_data;
  uint64_t compare_add = 0;
  uint64_t swap = 0;
  std::vector<std::byte> expected;     // the bytes that arrive
  std::vector<MemorySegment> receive;  // of the receive that it consumes
};

struct RcSimulation::Side {
  Side(const char* side_name, const RcOptions& options) : name(side_name), qp(options) {}

  const char* name;
  RcSide qp;
  Side* peer = nullptr;
  NetworkSimulator* out = nullptr;

  std::vector<PlannedWr> wrs;
  size_t posted = 0;   // of wrs
  size_t next_wr = 0;  // the next that may complete
  bool send_failed = false;
  std::deque<std::vector<MemorySegment>> receives;  // to be posted
  uint64_t receives_posted = 0;
  uint64_t next_receive = 0;
  size_t next_message = 0;  // of the peer's wrs: next that consumes a receive
  bool recv_failed = false;
  uint64_t counter_address = 0;
  uint64_t counter = 0;  // what it will be at the end
  uint64_t atomics = 0;
  uint64_t local_used = 0;
  uint64_t remote_used = 0;
  std::vector<std::byte> local_before;
  std::vector<std::byte> remote_before;
  std::vector<bool> local_target;
  std::vector<bool> remote_target;
  Time commit_at = Time::Never();
  Time post_at = Time::Zero();
};

RcSimulation::RcSimulation(const SimulationProfile& profile, uint64_t seed, bool keep_ladder)
    : profile_(profile),
      random_(seed),
      a_to_b_(profile.network, seed ^ 0xab),
      b_to_a_(profile.network, seed ^ 0xba),
      a_(std::make_unique<Side>("a", OptionsFor(profile, seed))),
      b_(std::make_unique<Side>("b", OptionsFor(profile, seed))),
      keep_ladder_(keep_ladder) {
  a_->peer = b_.get();
  b_->peer = a_.get();
  a_->out = &a_to_b_;
  b_->out = &b_to_a_;
  for (Side* side : {a_.get(), b_.get()}) {
    side->qp.memory.AddRegion(kLocalKey, kLocalBase, kRegionBytes);
    side->qp.memory.AddRegion(kRemoteKey, kRemoteBase, kRegionBytes);
    FillRandom(side->qp.memory, kLocalKey);
    FillRandom(side->qp.memory, kRemoteKey);
    side->local_target.assign(kRegionBytes, false);
    side->remote_target.assign(kRegionBytes, false);
    side->qp.memory.set_deferred(true);
    side->qp.on_transmit = [this, side](const TxPacket& packet, bool is_response) {
      OnTransmit(*side, packet, is_response);
    };
    side->qp.on_completion = [this, side](const Completion& completion) {
      OnCompletion(*side, completion);
    };
  }
  for (Side* side : {a_.get(), b_.get()}) {
    side->counter_address = AllocateRemote(*side, 8, true);
    side->counter = side->qp.memory.Word(kRemoteKey, side->counter_address);
  }
  Plan(*a_, *b_);
  Plan(*b_, *a_);
  for (Side* side : {a_.get(), b_.get()}) {
    const auto local = side->qp.memory.Bytes(kLocalKey);
    const auto remote = side->qp.memory.Bytes(kRemoteKey);
    side->local_before.assign(local.begin(), local.end());
    side->remote_before.assign(remote.begin(), remote.end());
  }
}

RcSimulation::~RcSimulation() = default;

void RcSimulation::FillRandom(FakeMemory& memory, uint32_t key) {
  auto bytes = memory.Bytes(key);
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const uint64_t value = random_.Next();
    std::memcpy(&bytes[i], &value, sizeof(value));
  }
}

// SGEs of `bytes` in all, apart from each other, some of them empty.
std::vector<MemorySegment> RcSimulation::AllocateSges(Side& side, uint32_t bytes, bool target) {
  std::vector<MemorySegment> sges;
  const uint32_t count = static_cast<uint32_t>(random_.Between(1, 4));
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t take =
        i + 1 == count ? bytes : static_cast<uint32_t>(random_.Below(uint64_t{bytes} + 1));
    sges.push_back({kLocalBase + side.local_used, take, kLocalKey});
    if (target) {
      std::fill_n(side.local_target.begin() + static_cast<ptrdiff_t>(side.local_used), take, true);
    }
    side.local_used += take + random_.Below(9);
    bytes -= take;
  }
  return sges;
}

uint64_t RcSimulation::AllocateRemote(Side& peer, uint32_t bytes, bool target) {
  peer.remote_used = (peer.remote_used + 7) / 8 * 8;
  const uint64_t at = peer.remote_used;
  if (target) {
    std::fill_n(peer.remote_target.begin() + static_cast<ptrdiff_t>(at), bytes, true);
  }
  peer.remote_used += bytes + random_.Below(20);
  return kRemoteBase + at;
}

std::vector<std::byte> RcSimulation::Gather(FakeMemory& memory,
                                            const std::vector<MemorySegment>& sges) {
  std::vector<std::byte> out;
  for (const MemorySegment& sge : sges) {
    if (sge.key != kLocalKey) continue;
    const auto bytes = memory.At(sge.key, sge.address, sge.length);
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  return out;
}

void RcSimulation::PlanAtomic(PlannedWr& wr, Side& side, Side& peer) {
  wr.bytes = 8;
  wr.remote = peer.counter_address;
  wr.sges = AllocateSges(side, 8, true);
  wr.compare_add = random_.Next();
  wr.expected.resize(8);
  std::memcpy(wr.expected.data(), &peer.counter, 8);
  ++peer.atomics;
  if (wr.opcode == WrOpcode::kFetchAdd) {
    peer.counter += wr.compare_add;
    return;
  }
  wr.swap = random_.Next();
  if (random_.Chance(0.7)) wr.compare_add = peer.counter;
  if (wr.compare_add == peer.counter) peer.counter = wr.swap;
}

void RcSimulation::Plan(Side& side, Side& peer) {
  constexpr WrOpcode kOpcodes[] = {
      WrOpcode::kSend,     WrOpcode::kSendImm,  WrOpcode::kRdmaWrite,   WrOpcode::kRdmaWriteImm,
      WrOpcode::kRdmaRead, WrOpcode::kFetchAdd, WrOpcode::kCompareSwap, WrOpcode::kRdmaWrite};
  for (uint32_t i = 0; i < profile_.wrs; ++i) {
    PlannedWr wr;
    wr.opcode = kOpcodes[random_.Below(std::size(kOpcodes))];
    wr.signaled = random_.Chance(0.7) || i + 1 == profile_.wrs;
    wr.fence = random_.Chance(0.1);
    wr.solicited = random_.Chance(0.3);
    wr.bytes = static_cast<uint32_t>(random_.Chance(0.5) ? random_.Below(64)
                                                         : random_.Below(profile_.max_bytes));
    wr.imm = static_cast<uint32_t>(random_.Next());
    if (wr.opcode == WrOpcode::kFetchAdd || wr.opcode == WrOpcode::kCompareSwap) {
      PlanAtomic(wr, side, peer);
    } else if (wr.opcode == WrOpcode::kRdmaRead) {
      wr.remote = AllocateRemote(peer, wr.bytes, false);
      wr.sges = AllocateSges(side, wr.bytes, true);
      const auto bytes = peer.qp.memory.At(kRemoteKey, wr.remote, wr.bytes);
      wr.expected.assign(bytes.begin(), bytes.end());
    } else {
      wr.sges = AllocateSges(side, wr.bytes, false);
      wr.expected = Gather(side.qp.memory, wr.sges);
      const bool is_write =
          wr.opcode == WrOpcode::kRdmaWrite || wr.opcode == WrOpcode::kRdmaWriteImm;
      if (is_write) wr.remote = AllocateRemote(peer, wr.bytes, true);
      if (wr.bytes != 0 && wr.bytes <= 256 && random_.Chance(0.3)) {
        wr.inline_data = wr.expected;
        wr.sges.clear();
      }
    }
    if (ConsumesReceive(wr.opcode)) {
      const bool is_send = wr.opcode != WrOpcode::kRdmaWriteImm;
      wr.receive = AllocateSges(
          peer, is_send ? wr.bytes + static_cast<uint32_t>(random_.Below(100)) : 10, is_send);
      peer.receives.push_back(wr.receive);
    }
    if (random_.Chance(profile_.fetch_failure) && !wr.sges.empty() && wr.bytes != 0) {
      for (MemorySegment& sge : wr.sges) sge.key = kBadKey;
    }
    side.wrs.push_back(std::move(wr));
  }
}

void RcSimulation::Note(const std::string& line) {
  if (!keep_ladder_) return;
  ladder_.push_back(std::to_string(now_.ns() / 1000) + "us " + line);
}

void RcSimulation::Fail(const std::string& what) {
  if (failure_.empty()) failure_ = what;
  Note("FAILURE " + what);
}

void RcSimulation::PostSome(Side& side) {
  while (side.posted < side.wrs.size() && side.qp.requester.CanPost() && random_.Chance(0.8)) {
    const PlannedWr& wr = side.wrs[side.posted];
    transport::SendRequest request;
    request.wr_id = side.posted;
    request.wqe_index = static_cast<uint32_t>(side.posted);
    request.opcode = wr.opcode;
    request.signaled = wr.signaled;
    request.fence = wr.fence;
    request.solicited = wr.solicited;
    request.imm_or_inv = wr.imm;
    request.remote_address = wr.remote;
    request.rkey = kRemoteKey;
    request.compare_add = wr.compare_add;
    request.swap = wr.swap;
    request.sges = wr.sges;
    request.inline_data = wr.inline_data;
    side.qp.requester.Post(request, now_);
    ++side.posted;
  }
  while (!side.receives.empty() && random_.Chance(profile_.receives_posted)) {
    side.qp.receive_queue.Post(side.receives_posted++, side.receives.front());
    side.receives.pop_front();
  }
  const bool more = side.posted < side.wrs.size() || !side.receives.empty();
  side.post_at = more ? now_ + Duration::Microseconds(static_cast<int64_t>(random_.Between(1, 60)))
                      : Time::Never();
}

void RcSimulation::OnTransmit(Side& side, const TxPacket& packet, bool is_response) {
  if (!is_response) return;
  const bool is_ack = packet.opcode == transport::Opcode::kRcAcknowledge;
  const bool is_nak = is_ack && (packet.syndrome & 0x60) != 0;
  const Psn acknowledged = is_nak ? packet.psn.Previous() : packet.psn;
  if (!side.qp.memory.IsPlacedUpTo(acknowledged)) {
    Fail(std::string(side.name) + " answers PSN " + std::to_string(packet.psn.value()) +
         " before the placement is visible");
  }
}

void RcSimulation::TransmitFrom(Side& side) {
  // Sometimes the engine has no time or buffers.
  const size_t limit = random_.Chance(0.2) ? random_.Below(3) : SIZE_MAX;
  for (Frame& frame : side.qp.Transmit(now_, limit)) {
    ++packets_;
    if (keep_ladder_) Note(std::string(side.name) + "> " + transport::Describe(ViewOf(frame)));
    side.out->Send(std::move(frame), now_);
  }
  if (limit != SIZE_MAX) {
    side.post_at = std::min(side.post_at, now_ + Duration::Microseconds(1));
  }
}

void RcSimulation::DeliverTo(Side& side, NetworkSimulator& network) {
  while (auto frame = network.Receive(now_)) {
    const bool accepted = side.qp.Deliver(*frame, now_);
    if (keep_ladder_) {
      const auto view = PacketView::Parse(*frame);
      Note(std::string("    >") + side.name + " " +
           (accepted && view.ok() ? transport::Describe(*view) : "spoiled"));
    }
  }
}

void RcSimulation::CommitDue(Side& side) {
  if (side.commit_at <= now_) {
    side.commit_at = Time::Never();
    const size_t count = random_.Between(1, std::max<size_t>(side.qp.memory.pending(), 1));
    for (size_t i = 0; i < count && side.qp.memory.HasPending(); ++i) {
      const bool fail = random_.Chance(profile_.placement_failure);
      Note(std::string(side.name) + (fail ? " placement fails" : " commit"));
      side.qp.Commit(now_, fail);
    }
  }
  if (side.qp.memory.HasPending() && side.commit_at.IsNever()) {
    const uint64_t most = static_cast<uint64_t>(profile_.commit_delay.ns());
    side.commit_at = now_ + Duration::Nanoseconds(static_cast<int64_t>(random_.Below(most + 1)));
  }
}

void RcSimulation::OnCompletion(Side& side, const Completion& completion) {
  Note(std::string(side.name) + (completion.is_send ? " send CQE " : " recv CQE ") +
       Text(completion));
  if (completion.status != WcStatus::kSuccess) ++errors_;
  if (completion.is_send) {
    CheckSendCompletion(side, completion);
  } else {
    CheckRecvCompletion(side, completion);
  }
}

void RcSimulation::CheckSendCompletion(Side& side, const Completion& completion) {
  const std::string who = std::string(side.name) + " send " + Text(completion);
  const bool success = completion.status == WcStatus::kSuccess;
  if (side.send_failed && completion.status != WcStatus::kWrFlushErr) {
    Fail(who + ": not flushed after a failure");
  }
  if (!success) side.send_failed = true;
  if (completion.wr_id < side.next_wr || completion.wr_id >= side.posted) {
    Fail(who + ": repeated or invented");
    return;
  }
  for (; side.next_wr < completion.wr_id; ++side.next_wr) {
    const PlannedWr& skipped = side.wrs[side.next_wr];
    if (skipped.signaled) Fail(who + ": overtakes a signalled WR");
    CheckData(side, skipped);
  }
  const PlannedWr& wr = side.wrs[side.next_wr++];
  if (success && !wr.signaled) Fail(who + ": was not signalled");
  if (completion.opcode != transport::CompletionOpcode(wr.opcode)) Fail(who + ": wrong opcode");
  if (success) CheckData(side, wr);
}

// The WR has succeeded: is its data where it belongs?
void RcSimulation::CheckData(Side& side, const PlannedWr& wr) {
  if (wr.bytes == 0) return;
  bool right = true;
  if (wr.opcode == WrOpcode::kRdmaRead || wr.opcode == WrOpcode::kFetchAdd ||
      wr.opcode == WrOpcode::kCompareSwap) {
    right = Gather(side.qp.memory, wr.sges) == wr.expected;
  } else if (wr.opcode == WrOpcode::kRdmaWrite || wr.opcode == WrOpcode::kRdmaWriteImm) {
    const auto bytes = side.peer->qp.memory.At(kRemoteKey, wr.remote, wr.bytes);
    right = std::equal(bytes.begin(), bytes.end(), wr.expected.begin());
  } else {
    auto bytes = Gather(side.peer->qp.memory, wr.receive);
    bytes.resize(wr.bytes);
    right = bytes == wr.expected;
  }
  if (!right) {
    Fail(std::string(side.name) + " wrong data of WR " + std::to_string(&wr - side.wrs.data()));
  }
}

void RcSimulation::CheckRecvCompletion(Side& side, const Completion& completion) {
  const std::string who = std::string(side.name) + " recv " + Text(completion);
  if (completion.wr_id != side.next_receive || completion.wr_id >= side.receives_posted) {
    Fail(who + ": out of order, repeated or invented");
    return;
  }
  ++side.next_receive;
  if (side.recv_failed && completion.status != WcStatus::kWrFlushErr) {
    Fail(who + ": not flushed after a failure");
  }
  if (completion.status != WcStatus::kSuccess) {
    side.recv_failed = true;
    return;
  }
  const auto& wrs = side.peer->wrs;
  while (side.next_message < wrs.size() && !ConsumesReceive(wrs[side.next_message].opcode)) {
    ++side.next_message;
  }
  if (side.next_message >= wrs.size()) {
    Fail(who + ": no message for it");
    return;
  }
  const PlannedWr& wr = wrs[side.next_message++];
  const bool is_write = wr.opcode == WrOpcode::kRdmaWriteImm;
  const bool has_imm = is_write || wr.opcode == WrOpcode::kSendImm;
  if (completion.opcode != (is_write ? WcOpcode::kRecvRdmaWithImm : WcOpcode::kRecv) ||
      completion.byte_len != wr.bytes || completion.has_imm != has_imm ||
      (has_imm && completion.imm_or_inv != wr.imm) || completion.solicited != wr.solicited) {
    Fail(who + ": fields differ from the message's");
  }
  CheckData(*side.peer, wr);
}

void RcSimulation::CheckUntouched(Side& side, uint32_t key, const std::vector<std::byte>& before,
                                  const std::vector<bool>& target) {
  const auto after = side.qp.memory.Bytes(key);
  for (size_t i = 0; i < after.size(); ++i) {
    if (!target[i] && after[i] != before[i]) {
      Fail(std::string(side.name) + " a byte outside every target changed");
      return;
    }
  }
}

void RcSimulation::CheckEnd(Side& side, Side& peer) {
  const std::string who(side.name);
  if (!side.qp.memory.AreGuardsIntact()) Fail(who + " guard bytes changed");
  CheckUntouched(side, kLocalKey, side.local_before, side.local_target);
  CheckUntouched(side, kRemoteKey, side.remote_before, side.remote_target);
  if (side.posted != side.wrs.size()) Fail(who + " could not post everything");
  if (side.qp.requester.outstanding() != 0) Fail(who + " WRs without a completion");
  if (side.qp.memory.atomics_executed() > side.atomics) Fail(who + " an atomic ran twice");
  if (side.qp.in_error || peer.qp.in_error) {
    if (profile_.expect_success) Fail(who + " failed");
    if (side.qp.in_error && side.next_receive != side.receives_posted) {
      Fail(who + " receives without a completion");
    }
    return;
  }
  if (side.next_receive != side.receives_posted) Fail(who + " receives without a completion");
  if (side.qp.memory.Word(kRemoteKey, side.counter_address) != side.counter ||
      side.qp.memory.atomics_executed() != side.atomics) {
    Fail(who + " atomics not executed exactly once");
  }
}

Time RcSimulation::NextEvent() const {
  Time next = std::min(a_to_b_.NextArrival(), b_to_a_.NextArrival());
  for (const Side* side : {a_.get(), b_.get()}) {
    next = std::min({next, side->qp.requester.next_timeout(), side->commit_at, side->post_at});
  }
  return next;
}

std::string RcSimulation::Run() {
  for (int event = 0; event < kMaxEvents && failure_.empty(); ++event) {
    for (Side* side : {a_.get(), b_.get()}) {
      if (side->post_at <= now_) PostSome(*side);
      DeliverTo(*side, side == a_.get() ? b_to_a_ : a_to_b_);
      if (side->qp.requester.next_timeout() <= now_) {
        Note(std::string(side->name) + " timer");
        side->qp.Timeout(now_);
      }
      CommitDue(*side);
      TransmitFrom(*side);
      side->qp.Poll();
    }
    const Time next = NextEvent();
    if (next.IsNever()) {
      CheckEnd(*a_, *b_);
      CheckEnd(*b_, *a_);
      return failure_;
    }
    now_ = std::max(now_, next);
  }
  if (failure_.empty()) Fail("does not come to an end");
  return failure_;
}

}  // namespace verbena::testing
