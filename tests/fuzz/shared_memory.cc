// SPDX-License-Identifier: Apache-2.0
//
// The memory that a device and an application share, spoiled by the
// application: WQEs, producer indices, doorbells, CQ records, whole rings. The
// real device runs in this process, its passes made by hand; the input is a
// program of posts, scribbles, passes, time, and control commands on living
// queues, for two hostile applications that are connected with each other.
//
// What is watched: the engine's check of each range that it copies (dma_claim.h
// is on in these builds), the bytes around the registered ones, a third and a
// fourth application whose data must arrive at the end, and that nothing of the
// hostile ones stays behind: packets, regions, QPs.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/fuzz/fuzz_target.h"
#include "tests/unit/nic_sim/device/raw_client.h"
#include "transport/qp_state.h"
#include "transport/verbs_types.h"

namespace verbena::fuzz {
namespace {

using testing::RawClient;
using transport::Duration;
using transport::Time;
using transport::WrOpcode;

constexpr int kMaxSteps = 100;
constexpr size_t kRegionBytes = 8192;
constexpr size_t kGapBytes = 4096;
constexpr uint8_t kGap = 0xdb;
constexpr size_t kConnected = 4;  // QPs of an application that have a peer; then come the others
constexpr uint32_t kUd = 4;       // enum ibv_qp_type
constexpr uint32_t kRawPacket = 8;
constexpr uint32_t kQkey = 0x11;
constexpr uint8_t kBindMw = 8;  // enum ibv_wr_opcode

// Regions with bytes between them that nobody registers.
class Arena {
 public:
  static constexpr size_t kRegions = 4;
  Arena() {
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    FUZZ_CHECK(base_ != MAP_FAILED);
    std::fill_n(base_, kBytes, kGap);
  }
  uint8_t* region(size_t index) { return base_ + kGapBytes + index * kStep; }
  void CheckGaps() const {
    for (size_t gap = 0; gap <= kRegions; ++gap) {
      const uint8_t* begin = base_ + gap * kStep;
      FUZZ_CHECK(std::all_of(begin, begin + kGapBytes, [](uint8_t byte) { return byte == kGap; }));
    }
  }

 private:
  static constexpr size_t kStep = kRegionBytes + kGapBytes;
  static constexpr size_t kBytes = kRegions * kStep + kGapBytes;
  uint8_t* base_;
};

// One hostile application.
struct Hostile {
  explicit Hostile(nic::Device& device, uint32_t nic, Arena* arena, size_t first_region)
      : client(device, nic) {
    cq = client.CreateCq(16);
    qps.push_back(client.CreateQp(cq, cq, {8, 8, 3, 2, 32}));
    qps.push_back(client.CreateQp(cq, cq, {4, 4, 1, 1, 0}));
    srq = client.CreateSrq(8, 2);
    qps.push_back(client.CreateQp(cq, cq, {4, 0, 2, 0, 16}, /*type=*/2, &srq));
    qps.push_back(client.CreateQp(cq, cq, {8, 0, 2, 0, 16}, /*type=*/3, &srq));
    qps.push_back(client.CreateQp(cq, cq, {8, 8, 2, 2, 32}, kUd));
    qps.push_back(client.CreateQp(cq, cq, {8, 8, 2, 2, 32}, kRawPacket));
    for (size_t i = 0; i < 2; ++i) {
      regions[i] = arena->region(first_region + i);
      keys[i] = client.RegMr(regions[i], kRegionBytes,
                             i == 0 ? 15u : uint32_t{transport::kAccessRemoteRead});
    }
    // Registered, but nothing is there: each copy fails late.
    nothing = static_cast<uint8_t*>(
        mmap(nullptr, kRegionBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    regions[2] = nothing;
    keys[2] = client.RegMr(nothing, kRegionBytes, 15);
  }
  ~Hostile() { munmap(nothing, kRegionBytes); }

  RawClient client;
  RawClient::Cq cq;
  std::vector<RawClient::Qp> qps;  // RC twice, RC and UC on the SRQ, UD, raw packet
  RawClient::Srq srq;
  uint8_t* regions[3];
  uint32_t keys[3];
  uint8_t* nothing;
  uint32_t ah = 0;           // of the other one
  uint32_t windows[2] = {};  // handles: of type 1, of type 2
};

// What a QP without a peer needs; rules lead everything to the raw packet QP.
void Prepare(Hostile& own, const transport::Gid& peer) {
  using namespace transport;  // QpAttrMask
  nic::Context& context = own.client.context();
  const std::lock_guard lock(context.lock());
  for (size_t i = kConnected; i < own.qps.size(); ++i) {
    const RawClient::Qp& qp = own.qps[i];
    const bool ud = qp.type == kUd;
    abi::ModifyQpRequest request{};
    abi::ModifyQpReply reply{};
    request.handle = qp.handle;
    request.attr.port_num = 1;
    request.attr.qkey = kQkey;
    request.attr.state = 1;
    request.mask = kQpAttrState | kQpAttrPort | (ud ? kQpAttrPkeyIndex | kQpAttrQkey : 0u);
    FUZZ_CHECK(context.ModifyQp(request, &reply) == 0);
    request.attr.state = 2;
    request.mask = kQpAttrState;
    FUZZ_CHECK(context.ModifyQp(request, &reply) == 0);
    request.attr.state = 3;
    request.mask = kQpAttrState | (ud ? kQpAttrSqPsn : 0u);
    FUZZ_CHECK(context.ModifyQp(request, &reply) == 0);
    if (ud) continue;
    abi::CreateFlowRequest flow{};
    flow.qp = qp.handle;
    flow.type = 1;  // IBV_FLOW_ATTR_ALL_DEFAULT
    flow.port = 1;
    flow.counters = abi::kNoHandle;
    uint32_t handle = 0;
    FUZZ_CHECK(context.CreateFlow(flow, &handle) == 0);
  }
  abi::CreateAhRequest ah{};
  ah.pd = own.client.pd();
  ah.attr.is_global = 1;
  ah.attr.port_num = 1;
  ah.attr.sgid_index = peer.IsV4Mapped() ? 1 : 0;
  peer.Store(reinterpret_cast<std::byte*>(ah.attr.dgid));
  FUZZ_CHECK(context.CreateAh(ah, &own.ah) == 0);
  for (uint32_t type = 1; type <= 2; ++type) {
    abi::AllocMwRequest window{};
    window.pd = own.client.pd();
    window.type = type;
    FUZZ_CHECK(context.AllocMw(window, &own.windows[type - 1]) == 0);
  }
}

// Lives as long as the process: the device, and two applications that only want
// their data to arrive.
class World {
 public:
  static World& Get() {
    static World* const world = new World;  // EAL is not taken down by atexit
    return *world;
  }

  nic::Device& device() { return *device_; }
  Arena& arena() { return arena_; }

  // Until nothing is left to do, or very long.
  void Settle(int passes = 200) {
    while (passes-- > 0 && device_->RunPass(now_)) {
    }
  }
  void Advance(Duration duration) { now_ += duration; }

  void CheckBystanders() {
    ++round_;
    std::fill(from_.begin(), from_.end(), static_cast<uint8_t>(round_));
    b_->WriteRecv(b_qp_, round_, {Sge(to_, to_key_)});
    abi::SendWqe wqe{};
    wqe.wr_id = round_;
    wqe.opcode = static_cast<uint8_t>(WrOpcode::kSend);
    wqe.flags = abi::kWqeSignaled;
    a_->WriteSend(a_qp_, wqe, {Sge(from_, from_key_)});
    a_->Ring(a_qp_);
    // Both completions, within what the retry timers allow.
    std::optional<abi::Cqe*> sent;
    std::optional<abi::Cqe*> received;
    for (int i = 0; i < 50 && !(sent && received); ++i) {
      Settle();
      if (!sent) sent = a_->Poll(a_cq_, 0);
      if (!received) received = b_->Poll(b_cq_, 0);
      if (i > 10) Advance(Duration::Milliseconds(20));
    }
    FUZZ_CHECK(sent && received);
    FUZZ_CHECK((*sent)->wr_id == round_ && (*sent)->status == 0);
    FUZZ_CHECK((*received)->wr_id == round_ && (*received)->status == 0);
    FUZZ_CHECK(from_ == to_);
  }

  // Only what the bystanders have.
  void CheckNothingStays() {
    Settle();
    for (const char* what : {"context", "cq", "mr", "qp"}) {
      FUZZ_CHECK(device_->List(what)["items"].size() == 2);
    }
    for (const char* what : {"ah", "mw", "flow"}) {
      FUZZ_CHECK(device_->List(what)["items"].empty());
    }
    if (checks_++ % 32 != 0) return;  // a dump costs more than a run
    const uint64_t free_packets = device_->Dump()["engine"]["free_packets"];
    if (free_packets_ == 0) free_packets_ = free_packets;
    FUZZ_CHECK(free_packets == free_packets_);
  }

 private:
  World() : from_(3000), to_(3000) {
    nic::DeviceOptions options;
    options.instance = "fuzz-" + std::to_string(getpid());
    const char* folder = std::getenv("TEST_TMPDIR");
    options.run_folder = folder == nullptr ? "/tmp" : folder;
    options.nics = 2;
    options.mode = nic::DeviceOptions::Mode::kManual;
    std::string error;
    device_ = nic::Device::Start(options, &error);
    if (device_ == nullptr) std::fprintf(stderr, "%s\n", error.c_str());
    FUZZ_CHECK(device_ != nullptr);
    a_ = std::make_unique<RawClient>(*device_, 0);
    b_ = std::make_unique<RawClient>(*device_, 1);
    a_cq_ = a_->CreateCq(8);
    b_cq_ = b_->CreateCq(8);
    a_qp_ = a_->CreateQp(a_cq_, a_cq_);
    b_qp_ = b_->CreateQp(b_cq_, b_cq_);
    FUZZ_CHECK(a_->Connect(a_qp_, b_qp_.qpn, b_->gid()) == 0);
    FUZZ_CHECK(b_->Connect(b_qp_, a_qp_.qpn, a_->gid()) == 0);
    from_key_ = a_->RegMr(from_.data(), from_.size(), transport::kAccessLocalWrite);
    to_key_ = b_->RegMr(to_.data(), to_.size(), transport::kAccessLocalWrite);
    CheckBystanders();
    CheckNothingStays();
  }

  static abi::Sge Sge(const std::vector<uint8_t>& bytes, uint32_t key) {
    return {reinterpret_cast<uint64_t>(bytes.data()), static_cast<uint32_t>(bytes.size()), key};
  }

  std::unique_ptr<nic::Device> device_;
  Time now_ = Time::FromNanoseconds(1'000'000'000);
  Arena arena_;
  std::unique_ptr<RawClient> a_, b_;
  RawClient::Cq a_cq_, b_cq_;
  RawClient::Qp a_qp_, b_qp_;
  std::vector<uint8_t> from_, to_;
  uint32_t from_key_ = 0, to_key_ = 0;
  uint64_t round_ = 0;
  uint64_t checks_ = 0;
  uint64_t free_packets_ = 0;
};

class Program {
 public:
  explicit Program(Input input)
      : world_(World::Get()),
        input_(input),
        a_(world_.device(), 0, &world_.arena(), 0),
        b_(world_.device(), 1, &world_.arena(), 2) {
    for (size_t i = 0; i < kConnected; ++i) {
      FUZZ_CHECK(a_.client.Connect(a_.qps[i], b_.qps[i].qpn, b_.client.gid(), 2, 4) == 0);
      FUZZ_CHECK(b_.client.Connect(b_.qps[i], a_.qps[i].qpn, a_.client.gid(), 2, 4) == 0);
    }
    Prepare(a_, b_.client.gid());
    Prepare(b_, a_.client.gid());
  }

  void Run() {
    for (int step = 0; step < kMaxSteps && !input_.empty(); ++step) Step();
    world_.Settle();
  }

 private:
  void Step() {
    const uint8_t op = input_.U8();
    Hostile& own = (op & 0x80) != 0 ? b_ : a_;
    Hostile& peer = (op & 0x80) != 0 ? a_ : b_;
    RawClient::Qp& qp =
        own.qps[(op & 0x10) != 0 ? kConnected + (op >> 6 & 1) : (op >> 6 & 1u) | (op >> 4 & 2u)];
    switch (op & 15) {
      case 0:
      case 1:
      case 2:
        PostSend(own, peer, qp);
        return;
      case 3:
        PostReceive(own, qp);
        return;
      case 4:
      case 5:
        own.client.Ring(qp);
        world_.Settle(1 + input_.Below(8));
        return;
      case 6:
        world_.Advance(Duration::Microseconds(int64_t{1} << (input_.U8() & 31)));
        world_.Settle(2);
        return;
      case 7:
        while (own.client.Poll(own.cq, 0)) {
        }
        return;
      case 8:
        Command(own, qp);
        return;
      case 9:
      case 10:
        ScribbleRecords(own, qp);
        return;
      case 11:
        ScribbleDoorbells(own);
        return;
      default:
        ScribbleRings(own, qp);
        return;
    }
  }

  uint64_t Address(const Hostile& of, uint32_t region) {
    const uint8_t how = input_.U8();
    const auto base = reinterpret_cast<uint64_t>(of.regions[region]);
    switch (how >> 6) {
      case 0:
        return base + (how & 63u);
      case 1:
        return base + kRegionBytes - (how & 63u);
      case 2:
        return base - (how & 63u);
      default:
        return base + input_.U32();
    }
  }
  uint32_t Length() {
    const uint8_t how = input_.U8();
    if ((how & 0xc0) == 0xc0) return input_.U32();
    return (how & 0x40) != 0 ? (how & 63u) * 64 : (how & 63u);
  }
  abi::Sge AnySge(const Hostile& own, const Hostile& peer) {
    const uint8_t bits = input_.U8();
    const Hostile& of = (bits & 0xf0) == 0xf0 ? peer : own;
    const uint32_t region = bits % 3;
    return {Address(own, region), Length(), of.keys[region] ^ ((bits & 0xf) == 0xf ? 1u : 0u)};
  }

  void PostSend(Hostile& own, Hostile& peer, RawClient::Qp& qp) {
    abi::SendWqe wqe{};
    const uint8_t bits = input_.U8();
    const uint32_t region = input_.Below(3);
    wqe.wr_id = bits;
    wqe.opcode = bits & 15;
    wqe.flags = bits >> 4;
    wqe.imm_or_inv = peer.keys[0];
    wqe.remote_address = Address(peer, region);
    wqe.rkey = peer.keys[region];
    wqe.inline_bytes = input_.U8();
    if (qp.type == kUd) {
      const bool right = (wqe.inline_bytes & 0x80) == 0;
      wqe.ud = {right ? own.ah : input_.U32(), right ? peer.qps[kConnected].qpn : input_.U32(),
                right ? kQkey : input_.U32(), 0};
    } else if (wqe.opcode == kBindMw) {
      wqe.imm_or_inv = own.windows[bits >> 4 & 1];
      wqe.rkey = wqe.imm_or_inv + input_.Below(4);
      wqe.remote_address = Address(own, region);
      wqe.bind = {Length(), own.keys[region], input_.U8() & 0x2fu};
    }
    std::vector<abi::Sge> sges(std::min<size_t>(input_.Below(4), qp.caps.max_send_sge));
    for (abi::Sge& sge : sges) sge = AnySge(own, peer);
    own.client.WriteSend(qp, wqe, sges);
  }

  void PostReceive(Hostile& own, RawClient::Qp& qp) {
    if (qp.rq == nullptr) {
      std::vector<abi::Sge> sges(input_.Below(3));
      for (abi::Sge& sge : sges) sge = AnySge(own, own);
      own.client.WriteSrqRecv(own.srq, 8, sges);
      return;
    }
    std::vector<abi::Sge> sges(std::min<size_t>(input_.Below(3), qp.caps.max_recv_sge));
    for (abi::Sge& sge : sges) sge = AnySge(own, own);
    own.client.WriteRecv(qp, 7, sges);
    own.client.page().qp[qp.handle].rq_producer.store(qp.rq_producer);
  }

  uint32_t Number(uint32_t near) {
    const uint8_t how = input_.U8();
    return (how & 0x80) != 0 ? input_.U32() : near + (how & 127u) - 64;
  }

  void ScribbleRecords(Hostile& own, const RawClient::Qp& qp) {
    abi::ContextPage& page = own.client.page();
    // The rest of the records is written by the device or by nobody.
    switch (input_.Below(8)) {
      case 6:
        page.srq[own.srq.handle].producer.store(Number(own.srq.producer));
        return;
      case 7:
        page.srq[own.srq.handle].ring.store(Number(64));
        page.srq[own.srq.handle].taken.store(Number(own.srq.producer));
        return;
      case 0:
        page.qp[qp.handle].sq_producer.store(Number(qp.sq_producer));
        return;
      case 1:
        page.qp[qp.handle].rq_producer.store(Number(qp.rq_producer));
        return;
      case 2:
        page.cq[own.cq.handle].consumer.store(Number(own.cq.consumer));
        return;
      case 3:
        page.cq[own.cq.handle].arm.store(Number(1));
        return;
      case 4:
        page.qp[qp.handle].state.store(Number(0));
        page.qp[qp.handle].sq_fetched.store(Number(0));
        return;
      default: {
        const auto bytes = input_.Bytes(input_.Below(64));
        auto* record = reinterpret_cast<uint8_t*>(&page.qp[input_.Below(4)]);
        if (!bytes.empty()) std::memcpy(record, bytes.data(), bytes.size());
        return;
      }
    }
  }

  void ScribbleDoorbells(Hostile& own) {
    abi::ContextPage& page = own.client.page();
    const uint32_t word = input_.Below(abi::kMaxQpSlots / 64);
    page.doorbell_bits[word].store(input_.U64());
    page.doorbell_summary[word / 64].store(uint64_t{1} << (word % 64) | input_.U64());
  }

  void ScribbleRings(Hostile& own, const RawClient::Qp& qp) {
    const uint32_t which = input_.Below(3);
    const bool on_srq = qp.rq == nullptr;
    std::byte* const receives = on_srq ? own.srq.ring : qp.rq;
    const size_t receive_bytes =
        on_srq ? size_t{own.srq.slots} * own.srq.stride : size_t{qp.rq_slots} * qp.rq_stride;
    std::byte* ring = which == 0 ? qp.sq : which == 1 ? receives : own.cq.ring;
    const size_t bytes = which == 0   ? size_t{qp.sq_slots} * qp.sq_stride
                         : which == 1 ? receive_bytes
                                      : own.cq.slots * sizeof(abi::Cqe);
    const size_t at = input_.U16() % bytes;
    const auto what = input_.Bytes(std::min<size_t>(input_.Below(64), bytes - at));
    if (!what.empty()) std::memcpy(ring + at, what.data(), what.size());
  }

  // Control commands while the rings are in whatever state they are.
  void Command(Hostile& own, RawClient::Qp& qp) {
    nic::Context& context = own.client.context();
    const std::lock_guard lock(context.lock());
    const uint8_t what = input_.U8();
    switch (what & 7) {
      case 0:
      case 1:
      case 2: {
        abi::ModifyQpRequest request{};
        abi::ModifyQpReply reply{};
        request.handle = qp.handle;
        request.mask = (what & 0x80) != 0 ? input_.U32() : transport::kQpAttrState;
        request.attr = input_.Take<abi::QpAttr>();
        request.attr.state = what >> 3 & 7;
        context.ModifyQp(request, &reply);
        return;
      }
      case 3: {
        abi::DestroyReply reply{};
        context.DestroyQp(qp.handle, &reply);
        return;
      }
      case 4:
        if ((what & 0x80) != 0) {
          context.DeallocMw(own.windows[what >> 3 & 1]);
        } else {
          context.DeregMr(own.keys[input_.Below(3)]);
        }
        return;
      case 5: {
        abi::DestroyReply reply{};
        context.DestroyCq(own.cq.handle, &reply);
        return;
      }
      case 6: {
        abi::RegMrRequest request{};
        abi::RegMrReply reply{};
        const uint32_t region = input_.Below(3);
        request.pd = own.client.pd();
        request.access = input_.U8() & 0x2f;
        request.address = reinterpret_cast<uint64_t>(own.regions[region]);
        request.length = kRegionBytes;
        request.iova = (what & 0x80) != 0 ? input_.U64() : request.address;
        if (context.RegMr(request, &reply) == 0) own.keys[region] = reply.lkey;
        return;
      }
      default:
        SrqCommand(own, qp, what >> 3);
        return;
    }
  }

  void SrqCommand(Hostile& own, const RawClient::Qp& qp, uint32_t what) {
    nic::Context& context = own.client.context();
    switch (what & 3) {
      case 0: {
        abi::ModifySrqRequest request{};
        abi::ModifySrqReply reply{};
        request.handle = own.srq.handle;
        request.mask = input_.Below(4);
        request.max_wr = input_.U8();
        request.srq_limit = input_.Below(16);
        std::vector<int> fds;
        context.ModifySrq(request, &reply, &fds);
        for (const int fd : fds) close(fd);
        return;
      }
      case 1: {
        abi::FinishSrqResizeRequest request{};
        request.handle = own.srq.handle;
        request.commit = what >> 2 & 1;
        context.FinishSrqResize(request);
        return;
      }
      case 2: {
        abi::DestroyReply reply{};
        context.DestroySrq(own.srq.handle, &reply);
        return;
      }
      default: {
        abi::QueryQpReply reply{};
        context.QueryQp(qp.handle, &reply);
        return;
      }
    }
  }

  World& world_;
  Input input_;
  Hostile a_;
  Hostile b_;
};

}  // namespace
}  // namespace verbena::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace verbena::fuzz;
  World& world = World::Get();
  {
    Program program(Input(data, size));
    program.Run();
    world.CheckBystanders();
  }
  world.arena().CheckGaps();
  world.CheckNothingStays();
  return 0;
}
