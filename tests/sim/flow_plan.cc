// SPDX-License-Identifier: Apache-2.0
//
// Flow: random WRs and the receives for them.
#include <algorithm>
#include <iterator>
#include <utility>

#include "tests/sim/flow.h"
#include "transport/wire/immediate.h"

namespace verbena::sim {
namespace {

constexpr WrOpcode kOpcodes[] = {
    WrOpcode::kSend,     WrOpcode::kSendImm,      WrOpcode::kRdmaWrite, WrOpcode::kRdmaWrite,
    WrOpcode::kRdmaRead, WrOpcode::kRdmaRead,     WrOpcode::kFetchAdd,  WrOpcode::kCompareSwap,
    WrOpcode::kSendInv,  WrOpcode::kRdmaWriteImm, WrOpcode::kLocalInv,  WrOpcode::kAtomicWrite,
    WrOpcode::kFlush,    WrOpcode::kBindMw,
};
constexpr WrOpcode kUcOpcodes[] = {
    WrOpcode::kSend,      WrOpcode::kSend,         WrOpcode::kSendImm,  WrOpcode::kRdmaWrite,
    WrOpcode::kRdmaWrite, WrOpcode::kRdmaWriteImm, WrOpcode::kLocalInv, WrOpcode::kBindMw,
};
constexpr WrOpcode kKeyOpcodes[] = {WrOpcode::kLocalInv, WrOpcode::kBindMw, WrOpcode::kSendInv,
                                    WrOpcode::kSendInv, WrOpcode::kSendInv};
constexpr uint32_t kMaxSges = 4;

WrOpcode RandomOpcode(const Profile& profile, const PathOptions& path, Random& random) {
  if (profile.keys > 0 && random.Chance(profile.keys)) {
    return kKeyOpcodes[random.Below(path.is_uc() ? 2 : std::size(kKeyOpcodes))];
  }
  if (path.is_uc()) return kUcOpcodes[random.Below(std::size(kUcOpcodes))];
  for (;;) {
    const WrOpcode opcode = kOpcodes[random.Below(std::size(kOpcodes))];
    const bool has_xrc = opcode != WrOpcode::kAtomicWrite && opcode != WrOpcode::kFlush;
    if (has_xrc || !path.is_xrc()) return opcode;
  }
}

bool LacksRight(const Wr& wr, uint32_t access_flags) {
  const uint32_t needed = wr.writes()      ? uint32_t{transport::kAccessRemoteWrite}
                          : wr.is_read()   ? uint32_t{transport::kAccessRemoteRead}
                          : wr.is_atomic() ? uint32_t{transport::kAccessRemoteAtomic}
                          : wr.is_flush()  ? uint32_t{transport::kAccessFlushGlobal}
                                           : 0;
  return (access_flags & needed) != needed;
}

}  // namespace

// SGEs of `bytes` in all of what is sent, some of them empty.
std::vector<MemorySegment> Flow::Split(uint64_t address, uint32_t bytes, Random& random) const {
  std::vector<MemorySegment> sges;
  const uint32_t count =
      random.Chance(0.6) ? 1 : static_cast<uint32_t>(random.Between(1, kMaxSges));
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t take = i + 1 == count ? bytes : random.Below32(uint64_t{bytes} + 1);
    sges.push_back({address, take, kPatternKey});
    // They skip a little, so that a wrong continuation is seen.
    address += take + random.Below(5);
    bytes -= take;
  }
  return sges;
}

void Flow::PlanWr(Wr& wr, const Profile& profile, HostMemory& sender, HostMemory& receiver,
                  std::span<const uint64_t> counters, Random& random) {
  wr.opcode = RandomOpcode(profile, path_, random);
  if (path_.is_xrc()) wr.srq = kSrqs[random.Below(std::size(kSrqs))];
  wr.signaled = random.Chance(0.7);
  wr.fence = random.Chance(0.1);
  wr.solicited = random.Chance(0.3);
  wr.imm_or_inv = static_cast<uint32_t>(random.Next());
  wr.bytes = random.Chance(0.5) ? random.Below32(64) : random.Below32(profile.max_bytes);
  const bool vanishes = profile.vanishing_key > 0 && random.Chance(0.3);
  const uint32_t local_key =
      vanishes && wr.is_read_or_atomic() ? sender.AddWindow(true) : kLocalKey;
  const uint64_t source = kPatternBase + random.Below(kPatternBytes - 64 - profile.max_bytes);
  if (wr.is_atomic()) {
    wr.bytes = 8;
    wr.remote = counters[random.Below(counters.size())];
    wr.rkey = kTargetKey;
    // Few values, so that compares often succeed.
    wr.compare_add = random.Below(3);
    wr.swap = random.Below(3);
    wr.sges = RandomTargets(8, local_key, sender, random);
  } else if (wr.is_read()) {
    wr.remote = source;
    wr.rkey = random.Chance(0.3) ? receiver.AddWindow() : kPatternKey;
    wr.sges = RandomTargets(wr.bytes, local_key, sender, random);
  } else if (wr.opcode == WrOpcode::kLocalInv) {
    wr.bytes = 0;
    if (last_bound_ >= 0 && random.Chance(0.6)) {
      wr.bound_by = std::exchange(last_bound_, -1);
      wr.imm_or_inv = wrs[static_cast<size_t>(wr.bound_by)].rkey;
    } else {
      wr.imm_or_inv = sender.AddWindow();
    }
  } else if (wr.opcode == WrOpcode::kBindMw) {
    last_bound_ = static_cast<int>(&wr - wrs.data());
    wr.bytes = 0;
    wr.rkey = sender.AddWindow();
    sender.RemoveWindow(wr.rkey);  // until it is bound
    wr.remote = source;
    wr.compare_add = random.Below(64);
    wr.swap = uint64_t{transport::kAccessRemoteRead} << 32 | kPatternKey;
  } else if (wr.is_flush()) {
    const bool region = random.Chance(0.5);
    wr.bytes = 0;
    wr.remote = receiver.Allocate(8);
    wr.compare_add = region ? random.Next() % 0x80000000 : random.Below(9);
    wr.rkey = kTargetKey;
    wr.imm_or_inv =
        transport::Feth::Of(transport::Feth::kGlobal,
                            region ? transport::Feth::kLevelRegion : transport::Feth::kLevelRange)
            .value;
  } else if (wr.is_atomic_write()) {
    wr.bytes = 8;
    wr.remote = receiver.Allocate(8);
    wr.rkey = kTargetKey;
    wr.sges = Split(source, 8, random);
  } else {
    wr.sges = Split(source, wr.bytes, random);
    if (wr.is_write()) {
      wr.remote = receiver.Allocate(wr.bytes);
      wr.rkey = kTargetKey;
    }
    if (wr.opcode == WrOpcode::kSendInv) wr.imm_or_inv = receiver.AddWindow();
    if (wr.bytes != 0 && wr.bytes <= 128 && random.Chance(0.3)) {
      wr.is_inline = true;
      wr.sges = {{source, wr.bytes, kPatternKey}};
    }
  }
}

// Makes it wrong, and says how it has to fail.
void Flow::SpoilWr(Wr& wr, HostMemory& receiver, Random& random) {
  constexpr uint32_t kBadKeys[] = {kUnknownKey, kForeignKey, 0};
  if (path_.is_xrc() && !wr.is_local() && random.Chance(0.2)) {
    wr.srq = random.Chance(0.5) ? 0 : kSrqs[0] ^ 0x800000;
    wr.expected = WcStatus::kRemInvReqErr;
    return;
  }
  switch (random.Below(6)) {
    case 0:
      wr.malformed = true;
      wr.expected = WcStatus::kLocQpOpErr;
      return;
    case 1:
      if (wr.is_inline) break;
      wr.sges.assign(transport::kMaxSge + 1, {kPatternBase, 0, kPatternKey});
      wr.bytes = 0;
      wr.expected = WcStatus::kLocQpOpErr;
      return;
    case 2:
      if (wr.is_inline || wr.bytes == 0) break;
      for (MemorySegment& sge : wr.sges) sge.key = kBadKeys[random.Below(2)];
      wr.expected = WcStatus::kLocProtErr;
      return;
    case 3:
      if (wr.is_inline || wr.is_atomic() || wr.is_flush() || wr.is_local()) break;
      wr.sges = {{kPatternBase, 0x80000000, kPatternKey}, {kPatternBase, 1, kPatternKey}};
      wr.huge = true;
      wr.expected = WcStatus::kLocLenErr;
      return;
    case 4:
      if (wr.is_answered()) {
        // Inline data makes no sense for what writes locally.
        wr.is_inline = true;
        wr.bytes = 8;
        wr.sges = {{kPatternBase, 8, kPatternKey}};
        wr.expected = WcStatus::kLocQpOpErr;
        return;
      }
      if (wr.opcode != WrOpcode::kSend) break;
      wr.opcode = WrOpcode::kBindMw;  // of a window that is not there
      wr.expected = WcStatus::kMwBindErr;
      return;
    default:
      break;
  }
  if (path_.is_uc() && !wr.is_local()) return SpoilUcWr(wr, random);
  if (wr.is_write() || wr.is_read()) {
    if (wr.bytes == 0) return;  // the key is not looked at
    switch (random.Below(3)) {
      case 0:
        wr.rkey = kBadKeys[random.Below(3)];
        break;
      case 1:
        wr.remote = wr.is_read() ? kPatternBase + kPatternBytes - wr.bytes + 1 : kTargetBase - 1;
        wr.rkey = wr.is_read() ? kPatternKey : kTargetKey;
        break;
      default:
        wr.rkey = wr.is_write() && random.Chance(0.5) ? kPatternKey : kLocalKey;
        break;
    }
    wr.expected = WcStatus::kRemAccessErr;
  } else if (wr.is_atomic_write()) {
    if (random.Chance(0.3)) {
      wr.remote += random.Between(1, 7);
      wr.expected = WcStatus::kRemInvReqErr;
    } else if (random.Chance(0.3)) {
      wr.bytes = random.Chance(0.5) ? 7 : 9;
      wr.sges = {{kPatternBase, wr.bytes, kPatternKey}};
      wr.expected = WcStatus::kLocLenErr;
    } else {
      wr.rkey = random.Chance(0.3) ? kPatternKey : kBadKeys[random.Below(3)];
      wr.expected = WcStatus::kRemAccessErr;
    }
  } else if (wr.is_flush()) {
    if (random.Chance(0.5)) {
      constexpr uint32_t kBad[] = {0, 2, 3, 4, 0x21, 0x31};
      wr.imm_or_inv = kBad[random.Below(std::size(kBad))];
      wr.expected = WcStatus::kRemInvReqErr;
    } else {
      wr.rkey = kBadKeys[random.Below(3)];
      wr.expected = WcStatus::kRemAccessErr;
    }
  } else if (wr.is_atomic()) {
    if (random.Chance(0.3)) {
      wr.remote += random.Between(1, 7);
      wr.expected = WcStatus::kRemInvReqErr;
    } else if (random.Chance(0.3)) {
      wr.sges = {{receiver.Allocate(4), 4, kLocalKey}};
      wr.expected = WcStatus::kLocLenErr;
    } else {
      wr.rkey = kBadKeys[random.Below(3)];
      wr.expected = WcStatus::kRemAccessErr;
    }
  } else if (wr.opcode == WrOpcode::kLocalInv) {
    wr.imm_or_inv = kTargetKey;
    wr.bound_by = -1;
    wr.expected = WcStatus::kLocQpOpErr;
  } else if (wr.opcode == WrOpcode::kBindMw) {
    wr.swap = kUnknownKey;
    wr.expected = WcStatus::kMwBindErr;
  } else if (wr.opcode == WrOpcode::kSendInv) {
    wr.imm_or_inv = random.Chance(0.5) ? kTargetKey : kUnknownKey;
    wr.expected = WcStatus::kRetryExcErr;  // there is no answer
  }
}

// What the other side does not take it drops, and nobody hears of it.
void Flow::SpoilUcWr(Wr& wr, Random& random) {
  constexpr WrOpcode kNotUc[] = {WrOpcode::kRdmaRead, WrOpcode::kSendInv, WrOpcode::kFetchAdd,
                                 WrOpcode::kAtomicWrite};
  if (wr.is_send() || random.Chance(0.3)) {
    wr.opcode = kNotUc[random.Below(std::size(kNotUc))];
    wr.expected = WcStatus::kLocQpOpErr;
    return;
  }
  if (wr.bytes == 0) return;  // the key is not looked at
  if (random.Chance(0.5)) {
    wr.rkey = random.Chance(0.5) ? kUnknownKey : kLocalKey;
  } else {
    wr.remote = kTargetBase - 1;
  }
  wr.refused = true;
}

// One for this message, as an application posts them that knows what comes.
void Flow::PlanReceive(const Wr& wr, const Profile& profile, HostMemory& receiver, Random& random) {
  PlannedReceive& receive = receives.Plan();
  receive.bytes = wr.is_send() ? wr.bytes + random.Below32(100) : 10;
  if (profile.bad_receive > 0 && random.Chance(profile.bad_receive) &&
      wr.expected == WcStatus::kSuccess) {
    if (wr.is_send() && wr.bytes > 0 && random.Chance(0.4)) {
      receive.bytes = random.Below32(wr.bytes);
    } else if (wr.is_send() && wr.bytes > 0 && random.Chance(0.5)) {
      receive.bad_key = true;
    } else {
      receive.malformed = true;
    }
  }
  receive.sges =
      RandomTargets(receive.bytes, receive.bad_key ? kUnknownKey : kLocalKey, receiver, random);
}

void Flow::Plan(const Profile& profile, const PathOptions& path, HostMemory& sender,
                HostMemory& receiver, std::span<const uint64_t> counters, uint32_t connection,
                uint32_t its_srq, Random& random) {
  path_ = path;
  srq = its_srq;
  receives.Reset(connection, 0);
  wrs.resize(random.Between(profile.max_wrs / 2, profile.max_wrs));
  for (Wr& wr : wrs) {
    PlanWr(wr, profile, sender, receiver, counters, random);
    if (profile.bad_wr > 0 && random.Chance(profile.bad_wr)) SpoilWr(wr, receiver, random);
    // Rights of the QP are looked at before the key.
    const bool reaches_qp =
        wr.expected == WcStatus::kSuccess || wr.expected == WcStatus::kRemAccessErr;
    if (reaches_qp && LacksRight(wr, path.access_flags)) {
      wr.refused = path.is_uc();
      if (!path.is_uc()) wr.expected = WcStatus::kRemInvReqErr;
    }
    if (wr.is_answered() && path.max_rd_atomic == 0 && wr.expected != WcStatus::kLocLenErr) {
      wr.expected = WcStatus::kLocQpOpErr;
    }
    const bool local_error = wr.expected == WcStatus::kLocQpOpErr ||
                             wr.expected == WcStatus::kLocLenErr ||
                             wr.expected == WcStatus::kMwBindErr;
    if (!local_error && !wr.is_local()) {
      wr.packets = wr.bytes == 0 ? 1 : (wr.bytes - 1) / path.mtu() + 1;
      total_packets_ += wr.packets;
    }
    // One that fails on this side takes no receive.
    if (!wr.takes_receive() || local_error || srq != 0 || path.is_xrc()) continue;
    if (path.is_uc()) {
      receives.PlanAny(profile, receiver, random);
    } else {
      PlanReceive(wr, profile, receiver, random);
    }
  }
}

void Flow::Start(Psn first) {
  // Far above 0, so that sequence numbers of old packets are not negative.
  first_ = next = expected = (uint64_t{1} << 32) + first.value();
}

}  // namespace verbena::sim
