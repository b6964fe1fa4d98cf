// SPDX-License-Identifier: Apache-2.0
//
// Packets into a living QP. The input is a program: two connected RC QPs post
// work, exchange their packets, lose them, commit late or fail to, let timers
// expire; in between come packets with valid headers and ICRC whose fields are
// hostile, near the values that the QP waits for. Memory is checked at each
// access, its guards at the end; no work request may complete twice, out of
// order or never.
#include <algorithm>
#include <vector>

#include "tests/fuzz/fuzz_target.h"
#include "tests/testing/frames.h"
#include "tests/testing/rc_pair.h"

namespace verbena::fuzz {
namespace {

using namespace transport;
using testing::FakeMemory;
using testing::Frame;
using testing::RcOptions;
using testing::RcPair;
using testing::RcSide;

constexpr int kMaxSteps = 200;
constexpr size_t kMaxFrames = 96;       // that one step sends
constexpr uint32_t kMaxPayload = 4100;  // a little more than the largest MTU

struct RegionKind {
  uint32_t key;
  uint64_t address;
  uint32_t bytes;
  uint32_t access;
};
constexpr RegionKind kRegions[] = {
    {0x100, 0x10000, 9000, FakeMemory::kAllRights},
    {0x101, 0x20000, 4096, kAccessLocalWrite},
    {0x102, 0x30000, 4096, kAccessRemoteRead},
    {0x103, 0x40000, 512, FakeMemory::kAllRights},  // of another PD
    {0x104, 0x50000, 512, FakeMemory::kAllRights},  // its pages are gone
    {0x105, 0x60000, 512, FakeMemory::kAllRights},  // may be invalidated
    {0x106, ~uint64_t{0} - 4095, 4095, FakeMemory::kAllRights},
};

struct Posted {
  uint64_t wr_id;
  bool must_complete;
};

// One side with what was posted to it and came back.
struct Tracked {
  explicit Tracked(RcSide* rc_side) : side(*rc_side) {
    for (const RegionKind& region : kRegions) {
      side.memory.AddRegion(region.key, region.address, region.bytes, region.access);
    }
    side.memory.MoveToOtherPd(0x103);
    side.memory.Unmap(0x104);
    side.memory.AllowInvalidate(0x105);
    side.on_completion = [this](const Completion& completion) { Take(completion); };
  }

  void Take(const Completion& completion) {
    std::vector<Posted>& posted = completion.is_send ? sends : receives;
    size_t& next = completion.is_send ? next_send : next_receive;
    // Only silent ones may be passed over.
    while (next < posted.size() && posted[next].wr_id != completion.wr_id) {
      FUZZ_CHECK(!posted[next].must_complete);
      ++next;
    }
    FUZZ_CHECK(next < posted.size());
    ++next;
  }

  void CheckAllCameBack() {
    for (; next_send < sends.size(); ++next_send) FUZZ_CHECK(!sends[next_send].must_complete);
    FUZZ_CHECK(next_receive == receives.size());
    FUZZ_CHECK(side.memory.AreGuardsIntact());
    FUZZ_CHECK(side.requester.outstanding() == 0);
  }

  RcSide& side;
  std::vector<Posted> sends;
  std::vector<Posted> receives;
  size_t next_send = 0;
  size_t next_receive = 0;
};

class Scenario {
 public:
  explicit Scenario(Input input)
      : input_(input), pair_(Options(&input_)), a_(&pair_.a), b_(&pair_.b) {}

  void Run() {
    for (int step = 0; step < kMaxSteps && !input_.empty(); ++step) Step();
    for (Tracked* t : {&a_, &b_}) {
      t->side.ModifyToError();
      t->side.CommitAll(pair_.now);
      t->side.Poll();
      t->CheckAllCameBack();
    }
  }

 private:
  static RcOptions Options(Input* input) {
    RcOptions options;
    const uint8_t bits = input->U8();
    options.pmtu = static_cast<Pmtu>(1 + bits % 5);
    options.retry_cnt = static_cast<uint8_t>(bits >> 3 & 7);
    options.rnr_retry = static_cast<uint8_t>(bits >> 5);
    const uint8_t more = input->U8();
    options.max_rd_atomic = static_cast<uint8_t>(more & 15);
    options.timeout = static_cast<uint8_t>(more >> 4);
    const uint8_t rights = input->U8();
    options.access_flags = static_cast<uint32_t>((rights & 7) << 1);
    options.psn = (rights & 8) != 0 ? Psn(0xfffffe) : Psn(0x7ffffe);
    options.capacity = {.max_wr = 16, .max_sge = 4, .max_inline = 64};
    return options;
  }

  Tracked& Side(bool which) { return which ? b_ : a_; }

  void Step() {
    const uint8_t op = input_.U8();
    Tracked& t = Side((op & 0x80) != 0);
    Tracked& other = Side((op & 0x80) == 0);
    switch (op & 0x0f) {
      case 0:
      case 1:
      case 2:
        PostSend(t);
        break;
      case 3:
        PostReceive(t);
        break;
      case 4:
      case 5:
        Move(t, other, (op & 0x40) != 0 ? input_.U8() : 0);
        break;
      case 6:
        Commit(t, (op & 0x40) != 0);
        break;
      case 7:
        t.side.memory.set_deferred((op & 0x40) != 0);
        break;
      case 8:
        pair_.AdvanceToTimer();
        break;
      case 9:
        pair_.Advance(Duration::Microseconds(input_.U16()));
        break;
      case 10:
        Misc(t);
        break;
      default:
        Inject(t);
        break;
    }
    a_.side.Poll();
    b_.side.Poll();
  }

  uint64_t Address(const RegionKind& region) {
    const uint8_t how = input_.U8();
    const uint64_t near = how & 63;
    switch (how >> 6) {
      case 0:
        return region.address + near * 8;
      case 1:
        return region.address + region.bytes - near;
      case 2:
        return region.address - near;
      default:
        return input_.U64();
    }
  }

  const RegionKind& AnyRegion() { return kRegions[input_.Below(std::size(kRegions))]; }

  uint32_t Length() {
    const uint8_t how = input_.U8();
    switch (how >> 6) {
      case 0:
        return how & 63;
      case 1:
        return (how & 63u) * 64;
      case 2:
        return 256u << (how & 7);
      default:
        return input_.U32();
    }
  }

  void PostSend(Tracked& t) {
    static constexpr WrOpcode kOpcodes[] = {
        WrOpcode::kSend,     WrOpcode::kSendImm,     WrOpcode::kRdmaWrite, WrOpcode::kRdmaWriteImm,
        WrOpcode::kRdmaRead, WrOpcode::kCompareSwap, WrOpcode::kFetchAdd,  WrOpcode::kSendInv,
        WrOpcode::kLocalInv, WrOpcode::kBindMw};
    if (!t.side.requester.CanPost()) return;
    const uint8_t bits = input_.U8();
    SendRequest request;
    request.opcode = kOpcodes[(bits & 15) % std::size(kOpcodes)];
    request.signaled = (bits & 16) != 0;
    request.fence = (bits & 32) != 0;
    request.solicited = (bits & 64) != 0;
    request.wr_id = ++last_id_;
    request.wqe_index = static_cast<uint32_t>(last_id_);
    const RegionKind& target = AnyRegion();
    request.rkey = target.key;
    request.imm_or_inv = 0x105;
    request.remote_address = Address(target);
    MemorySegment sges[4];
    std::byte inline_data[64] = {};
    // Inline READs and atomics are refused before they come here (SendQueue::Fetch).
    const bool inline_possible =
        request.opcode <= WrOpcode::kSendImm || request.opcode == WrOpcode::kSendInv;
    if ((bits & 128) != 0 && inline_possible) {
      request.inline_data = {inline_data, input_.Below(65)};
    } else {
      const uint32_t count = input_.Below(5);
      for (uint32_t i = 0; i < count; ++i) {
        const RegionKind& local = AnyRegion();
        sges[i] = {.address = Address(local), .length = Length(), .key = local.key};
      }
      request.sges = {sges, count};
    }
    t.sends.push_back({request.wr_id, request.signaled});
    t.side.requester.Post(request, pair_.now);
  }

  void PostReceive(Tracked& t) {
    if (t.side.receive_queue.posted() >= 16) return;
    std::vector<MemorySegment> sges(input_.Below(4));
    for (MemorySegment& sge : sges) {
      const RegionKind& region = AnyRegion();
      sge = {.address = Address(region), .length = Length(), .key = region.key};
    }
    t.receives.push_back({++last_id_, true});
    t.side.receive_queue.Post(last_id_, std::move(sges), input_.Below(32) == 31);
  }

  // Sends what `from` has; `plan` says what becomes of the packets, two bits each.
  void Move(Tracked& from, Tracked& to, uint8_t plan) {
    std::vector<Frame> frames = from.side.Transmit(pair_.now, kMaxFrames);
    for (size_t i = 0; i < frames.size(); ++i) {
      const uint8_t fate = plan >> (i % 4 * 2) & 3;
      if (fate == 1) continue;
      to.side.Deliver(frames[i], pair_.now);
      if (fate == 2) to.side.Deliver(frames[i], pair_.now);
      if (fate == 3 && i > 0) to.side.Deliver(frames[i - 1], pair_.now);
    }
  }

  void Commit(Tracked& t, bool fail) {
    for (uint32_t i = 0, n = 1 + input_.Below(16); i < n && t.side.memory.HasPending(); ++i) {
      t.side.Commit(pair_.now, fail && i + 1 == n);
    }
  }

  void Misc(Tracked& t) {
    switch (input_.Below(6)) {
      case 0:
        t.side.ModifyToError();
        return;
      case 1:
        t.side.requester.Drain();
        return;
      case 2:
        t.side.requester.Resume();
        return;
      case 3:
        t.side.responder.HandleReservedOpcode(t.side.responder.expected_psn() + input_.Below(3),
                                              pair_.now);
        return;
      case 4:
        t.side.memory.RemoveRegion(0x102);
        return;
      default: {
        RcResponderConfig config;
        config.max_dest_rd_atomic = static_cast<uint8_t>(input_.Below(17));
        config.min_rnr_timer = input_.U8();
        config.access_flags = input_.Below(8) << 1;
        t.side.responder.Reconfigure(config);
        return;
      }
    }
  }

  // Near what the QP waits for, or anywhere.
  Psn AnyPsn(const RcSide& side, bool response) {
    const uint8_t how = input_.U8();
    const uint32_t base = !response           ? side.responder.expected_psn().value()
                          : (how & 0x40) != 0 ? side.requester.next_psn().value()
                                              : side.requester.una_psn().value();
    if ((how & 0x80) != 0) return Psn(input_.U32());
    return Psn(base + (how & 63u) - 8);
  }

  void Inject(Tracked& t) {
    const uint8_t code = input_.U8();
    TransportHeaders headers;
    // Mostly RC, sometimes any that is defined.
    headers.bth.opcode = static_cast<Opcode>((code & 0xc0) == 0xc0 ? input_.U8() : code % 0x18);
    const OpcodeTraits& traits = TraitsOf(headers.bth.opcode);
    if (traits.is_reserved()) return;
    headers.bth.psn = AnyPsn(t.side, traits.is_response());
    const uint8_t bits = input_.U8();
    headers.bth.ack_req = (bits & 1) != 0;
    headers.bth.solicited = (bits & 2) != 0;
    headers.bth.dest_qpn = Qpn(0x11);
    const RegionKind& region = AnyRegion();
    if (traits.has_reth()) headers.reth = {Address(region), Rkey(region.key), Length()};
    if (traits.has_atomic_eth()) {
      headers.atomic_eth = {Address(region), Rkey(region.key), input_.U64(), input_.U8()};
    }
    if (traits.has_aeth()) headers.aeth = {input_.U8(), Msn(input_.U16())};
    if (traits.has_atomic_ack_eth()) headers.atomic_ack_eth = {input_.U64()};
    if (traits.has_imm()) headers.imm = {input_.U32()};
    if (traits.has_ieth()) headers.ieth = {Rkey(region.key)};
    std::vector<std::byte> payload;
    if (traits.carries_payload) {
      payload.assign(std::min(Length(), kMaxPayload), std::byte{0x5a});
      // What fits a WRITE that is one packet long is the usual case.
      if (traits.has_reth() && (bits & 4) != 0) {
        headers.reth.dma_length = static_cast<uint32_t>(payload.size());
      }
    }
    const Frame frame = testing::BuildFrame(testing::Ipv4Address(), headers, payload);
    FUZZ_CHECK(PacketView::Parse(frame).ok());
    // What the device looks at before the state machines (Qp::HandlePacket).
    if (traits.service == Service::kRc) t.side.Deliver(frame, pair_.now);
  }

  Input input_;
  RcPair pair_;
  Tracked a_;
  Tracked b_;
  uint64_t last_id_ = 0;
};

}  // namespace
}  // namespace verbena::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  verbena::fuzz::Scenario(verbena::fuzz::Input(data, size)).Run();
  return 0;
}
