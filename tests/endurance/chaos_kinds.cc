// SPDX-License-Identifier: Apache-2.0
//
// Role `kinds SEED SECONDS DEVICE DEVICE` of tools/chaos: traffic over every transport but plain
// RC, through windows, shared receive queues and memory of the device. Over UC, UD and raw packets
// messages may be lost, but what arrives is what was sent; over the others all arrives.
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/endurance/chaos_roles.h"
#include "tests/verbs/raw_end.h"
#include "tests/verbs/ud_end.h"
#include "tests/verbs/verbs_support.h"
#include "tests/verbs/xrc_end.h"

namespace verbena::testing {
namespace {

constexpr Milliseconds kQuiet(100);  // nothing more comes
constexpr uint32_t kMessages = 16;
constexpr uint32_t kSlotBytes = 8192;

struct Tally {
  int sent = 0;
  int arrived = 0;
};

[[noreturn]] void Fail(const std::string& what) { throw std::runtime_error(what); }

void ExpectSuccess(const ibv_wc& wc) {
  if (wc.status != IBV_WC_SUCCESS) Fail(Describe(wc));
}

void ExpectPattern(std::span<const uint8_t> bytes, uint64_t id, const char* where) {
  if (const auto at = PatternMismatch(bytes, id)) {
    Fail(std::string(where) + ": wrong byte at " + std::to_string(*at) + " of message " +
         std::to_string(id));
  }
}

// The next completion, or nothing when it stays quiet.
std::optional<ibv_wc> Poll(ibv_cq* cq) {
  const auto end = Clock::now() + kQuiet;
  ibv_wc wc = {};
  while (true) {
    const int count = ibv_poll_cq(cq, 1, &wc);
    if (count == 1) return wc;
    if (count < 0 || Clock::now() > end) return std::nullopt;
    usleep(100);
  }
}

PathOptions RandomPath(Random& random) {
  PathOptions path;
  path.mtu = static_cast<ibv_mtu>(IBV_MTU_256 + random.Below(5));
  return path;
}

EndOptions End(const std::string& device, ibv_qp_type type) {
  EndOptions options;
  options.device = device;
  options.type = type;
  return options;
}

// SENDs and WRITEs with immediate; both take receives. The immediate is the message's number.
void Unreliable(Random& random, const std::string& from, const std::string& to, Tally* tally) {
  RcEnd a(End(from, IBV_QPT_UC)), b(End(to, IBV_QPT_UC));
  ConnectPair(a, b, RandomPath(random));
  Memory source(a.pd(), kMessages * kSlotBytes), sink(b.pd(), 2 * kMessages * kSlotBytes);
  for (uint32_t i = 0; i < kMessages; ++i) {
    Require(b.PostRecv(i, {sink.sge(i * kSlotBytes, kSlotBytes)}) == 0, "post_recv");
  }
  std::vector<uint32_t> lengths;
  std::vector<bool> is_write;
  for (uint32_t i = 0; i < kMessages; ++i) {
    lengths.push_back(1 + static_cast<uint32_t>(random.Below(kSlotBytes)));
    is_write.push_back(random.OneIn(2));
    FillPattern(source.bytes().subspan(i * kSlotBytes, lengths[i]), i);
    ibv_send_wr wr = is_write[i] ? RdmaWr(i, IBV_WR_RDMA_WRITE_WITH_IMM,
                                          sink.address((kMessages + i) * kSlotBytes), sink.rkey())
                                 : SendWr(i, IBV_WR_SEND_WITH_IMM);
    wr.imm_data = htobe32(i);
    Require(a.PostSend(wr, {source.sge(i * kSlotBytes, lengths[i])}) == 0, "post_send");
  }
  for (uint32_t i = 0; i < kMessages; ++i) {
    const ibv_wc wc = PollOne(a.send_cq());
    ExpectSuccess(wc);
    if (wc.wr_id != i) Fail("UC: completions out of order");
  }
  tally->sent += static_cast<int>(kMessages);
  // A rule may let one arrive twice or late: UC takes a message's first packet with any PSN.
  while (const auto wc = Poll(b.recv_cq())) {
    ExpectSuccess(*wc);
    const uint32_t id = be32toh(wc->imm_data);
    if (id >= kMessages) Fail("UC: wrong bytes: message " + std::to_string(id));
    if (wc->byte_len != lengths[id])
      Fail("UC: wrong bytes: length " + std::to_string(wc->byte_len));
    const size_t slot = is_write[id] ? kMessages + id : wc->wr_id;
    ExpectPattern(sink.bytes().subspan(slot * kSlotBytes, lengths[id]), id, "UC");
    ++tally->arrived;
  }
}

// The first word of a datagram is its number.
void Datagrams(Random& random, const std::string& from, const std::string& to, Tally* tally) {
  constexpr uint32_t kRoom = 1024, kReceives = 32768;
  UdEnd a(from), b(to);
  const Owned<ibv_ah> ah = a.AhTo(b);
  for (uint32_t i = 0; i < kMessages; ++i) b.Receive(i, kReceives + i * kRoom, kRoom);
  std::vector<uint32_t> lengths;
  for (uint32_t i = 0; i < kMessages; ++i) {
    lengths.push_back(4 + static_cast<uint32_t>(random.Below(kRoom - kGrhBytes - 3)));
    const auto bytes = a.memory().bytes().subspan(i * kRoom, lengths[i]);
    FillPattern(bytes, i);
    std::memcpy(bytes.data(), &i, sizeof i);
    Require(a.Send(i, ah.get(), b, lengths[i], kQkey, IBV_WR_SEND, i * kRoom) == 0, "post_send");
  }
  for (uint32_t i = 0; i < kMessages; ++i) ExpectSuccess(PollOne(a.cq()));
  tally->sent += static_cast<int>(kMessages);
  while (const auto wc = Poll(b.cq())) {
    ExpectSuccess(*wc);
    const auto bytes =
        b.memory().bytes().subspan(kReceives + wc->wr_id * kRoom + kGrhBytes, kRoom - kGrhBytes);
    uint32_t id = 0;
    std::memcpy(&id, bytes.data(), sizeof id);
    if (id >= kMessages || wc->byte_len != kGrhBytes + lengths[id]) Fail("UD: wrong bytes");
    std::vector<uint8_t> sent(lengths[id]);
    FillPattern(sent, id);
    std::memcpy(sent.data(), &id, sizeof id);
    if (std::memcmp(sent.data(), bytes.data(), sent.size()) != 0) Fail("UD: wrong byte");
    ++tally->arrived;
  }
}

// The source port is the frame's number. No check sum protects it: a rule may flip some bits.
void RawPackets(Random& random, const std::string& from, const std::string& to, Tally* tally) {
  RawEnd a(from), b(to);
  // Nobody's, or frames of other programs to this NIC would come as well.
  Mac mac = {0x02};
  for (size_t i = 1; i < mac.size(); ++i) mac[i] = static_cast<uint8_t>(random.Next());
  const Flow flow = Rule().Eth(mac).On(b);
  std::vector<Bytes> frames;
  for (uint32_t i = 0; i < kMessages; ++i) {
    frames.push_back(MakeFrame({.to = mac,
                                .from = a.mac(),
                                .ipv6 = i % 2 == 1,
                                .source_port = static_cast<uint16_t>(i),
                                .payload = 1 + random.Below(900)}));
    Require(a.Post(frames.back()) == 0, "post_send");
    ExpectSuccess(PollOne(a.cq()));
  }
  tally->sent += static_cast<int>(kMessages);
  while (const auto wc = Poll(b.cq())) {
    ExpectSuccess(*wc);
    const auto bytes = b.memory().bytes().subspan(wc->wr_id * kSlot, wc->byte_len);
    int best = 1000;
    for (const Bytes& frame : frames) {
      if (frame.size() != bytes.size()) continue;
      int bits = 0;
      for (size_t i = 0; i < frame.size(); ++i) {
        bits += std::popcount(static_cast<unsigned>(frame[i] ^ bytes[i]));
      }
      best = std::min(best, bits);
    }
    if (best > 4) Fail("raw packet: wrong byte");
    ++tally->arrived;
  }
}

// A domain with two SRQs, one receiving QP.
void Extended(Random& random, const std::string& from, const std::string& to) {
  const Owned<ibv_context> context = OpenDevice(to);
  const Owned<ibv_pd> pd(ibv_alloc_pd(context.get()));
  const OwnedXrcd xrcd(OpenXrcd(context.get(), -1));
  Require(xrcd != nullptr, "ibv_open_xrcd");
  Xsrq queues[2] = {{context.get(), pd.get(), xrcd.get()}, {context.get(), pd.get(), xrcd.get()}};
  const Owned<ibv_qp> target = CreateTarget(context.get(), xrcd.get());
  Initiator initiator(from);
  const PathOptions path = RandomPath(random);
  Connect(target.get(), initiator.Address(), AddressOf(target.get()).psn, path);
  Connect(initiator.qp.get(), AddressOf(target.get()), initiator.Address().psn, path);
  for (uint32_t i = 0; i < kMessages; ++i) {
    Xsrq& queue = queues[random.Below(2)];
    const size_t bytes = 1 + random.Below(kSlotBytes);
    queue.Post(i, 0, bytes);
    FillPattern(initiator.memory.bytes().first(bytes), i);
    Require(initiator.Post(SendWr(i), queue.number, 0, bytes) == 0, "post_send");
    ExpectSuccess(PollOne(initiator.cq.get()));
    const ibv_wc wc = PollOne(queue.cq.get());
    ExpectSuccess(wc);
    if (wc.wr_id != i || wc.byte_len != bytes) Fail("XRC: too many or wrong bytes");
    ExpectPattern(queue.memory.bytes().first(bytes), i, "XRC");
  }
}

// Two QPs at either end, those of one on an SRQ.
void Shared(Random& random, const std::string& from, const std::string& to) {
  const Owned<ibv_context> context = OpenDevice(to);
  const Owned<ibv_pd> pd(ibv_alloc_pd(context.get()));
  Require(pd != nullptr, "ibv_alloc_pd");
  ibv_srq_init_attr init = {nullptr, {kMessages, 1, 0}};
  const Owned<ibv_srq> srq(ibv_create_srq(pd.get(), &init));
  Require(srq != nullptr, "ibv_create_srq");
  Memory sink(pd.get(), kMessages * kSlotBytes);
  EndOptions options = End(to, IBV_QPT_RC);
  options.srq = srq.get();
  RcEnd first(context.get(), pd.get(), options), second(first, options);
  RcEnd a(End(from, IBV_QPT_RC)), b(a, End(from, IBV_QPT_RC));
  ConnectPair(a, first, RandomPath(random));
  ConnectPair(b, second, RandomPath(random));
  Memory source(a.pd(), kMessages * kSlotBytes);
  std::map<uint32_t, uint32_t> lengths;
  std::vector<bool> by_a;
  for (uint32_t i = 0; i < kMessages; ++i) {
    ibv_sge sge = sink.sge(i * kSlotBytes, kSlotBytes);
    ibv_recv_wr wr = {i, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    Require(ibv_post_srq_recv(srq.get(), &wr, &bad) == 0, "post_srq_recv");
  }
  for (uint32_t i = 0; i < kMessages; ++i) {
    lengths[i] = 1 + static_cast<uint32_t>(random.Below(kSlotBytes));
    FillPattern(source.bytes().subspan(i * kSlotBytes, lengths[i]), i);
    ibv_send_wr wr = SendWr(i, IBV_WR_SEND_WITH_IMM);
    wr.imm_data = htobe32(i);
    by_a.push_back(random.OneIn(2));
    RcEnd& end = by_a[i] ? a : b;
    Require(end.PostSend(wr, {source.sge(i * kSlotBytes, lengths[i])}) == 0, "post_send");
  }
  for (const bool of_a : by_a) ExpectSuccess(PollOne((of_a ? a : b).send_cq()));
  for (const bool of_a : by_a) {
    const ibv_wc wc = PollOne((of_a ? first : second).recv_cq());
    ExpectSuccess(wc);
    const uint32_t id = be32toh(wc.imm_data);
    if (!lengths.contains(id) || wc.byte_len != lengths[id]) Fail("SRQ: too many or wrong bytes");
    ExpectPattern(sink.bytes().subspan(wc.wr_id * kSlotBytes, lengths[id]), id, "SRQ");
    lengths.erase(id);
  }
}

// WRITEs through a window of either type, which is then taken back.
void Windows(Random& random, const std::string& from, const std::string& to) {
  RcEnd a(End(from, IBV_QPT_RC)), b(End(to, IBV_QPT_RC));
  ConnectPair(a, b, RandomPath(random));
  Memory source(a.pd(), kSlotBytes);
  Memory sink(b.pd(), kSlotBytes, kAllAccess | IBV_ACCESS_MW_BIND);
  for (const ibv_mw_type type : {IBV_MW_TYPE_1, IBV_MW_TYPE_2}) {
    const Owned<ibv_mw> mw(ibv_alloc_mw(b.pd(), type));
    Require(mw != nullptr, "ibv_alloc_mw");
    const uint32_t at = static_cast<uint32_t>(random.Below(4096));
    const ibv_mw_bind_info info = {sink.mr(), sink.address(at), 4096, IBV_ACCESS_REMOTE_WRITE};
    uint32_t rkey;
    if (type == IBV_MW_TYPE_1) {
      ibv_mw_bind bind = {.wr_id = 1, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
      Require(ibv_bind_mw(b.qp(), mw.get(), &bind) == 0, "ibv_bind_mw");
      rkey = mw->rkey;
    } else {
      rkey = ibv_inc_rkey(mw->rkey);
      ibv_send_wr wr = SendWr(1, IBV_WR_BIND_MW);
      wr.bind_mw.mw = mw.get();
      wr.bind_mw.rkey = rkey;
      wr.bind_mw.bind_info = info;
      Require(b.PostSend(wr) == 0, "BIND_MW");
    }
    ExpectSuccess(PollOne(b.send_cq()));
    FillPattern(source.bytes().first(4096), at);
    Require(a.PostSend(RdmaWr(2, IBV_WR_RDMA_WRITE, sink.address(at), rkey),
                       {source.sge(0, 4096)}) == 0,
            "post_send");
    ExpectSuccess(PollOne(a.send_cq()));
    ExpectPattern(sink.bytes().subspan(at, 4096), at, "window");
    if (type == IBV_MW_TYPE_2) {
      Require(b.PostRecv(3) == 0, "post_recv");
      ibv_send_wr wr = SendWr(3, IBV_WR_SEND_WITH_INV);
      wr.invalidate_rkey = rkey;
      Require(a.PostSend(wr) == 0, "SEND_WITH_INV");
      ExpectSuccess(PollOne(a.send_cq()));
      ExpectSuccess(PollOne(b.recv_cq()));
    }
  }
}

// WRITEs into memory of the device and READs from it.
void DeviceMemory(Random& random, const std::string& from, const std::string& to) {
  RcEnd a(End(from, IBV_QPT_RC)), b(End(to, IBV_QPT_RC));
  ConnectPair(a, b, RandomPath(random));
  ibv_alloc_dm_attr attr = {.length = 4096, .log_align_req = 6, .comp_mask = 0};
  const Owned<ibv_dm> dm(ibv_alloc_dm(b.context(), &attr));
  Require(dm != nullptr, "ibv_alloc_dm");
  const Owned<ibv_mr> mr(
      ibv_reg_dm_mr(b.pd(), dm.get(), 0, 4096, kAllAccess | IBV_ACCESS_ZERO_BASED));
  Require(mr != nullptr, "ibv_reg_dm_mr");
  Memory local(a.pd(), 8192);
  const uint64_t id = random.Next();
  FillPattern(local.bytes().first(4096), id);
  Require(a.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, 0, mr->rkey), {local.sge(0, 4096)}) == 0,
          "post_send");
  ExpectSuccess(PollOne(a.send_cq()));
  std::vector<uint8_t> bytes(4096);
  Require(ibv_memcpy_from_dm(bytes.data(), dm.get(), 0, 4096) == 0, "ibv_memcpy_from_dm");
  ExpectPattern(bytes, id, "WRITE to DM");
  Require(a.PostSend(RdmaWr(2, IBV_WR_RDMA_READ, 0, mr->rkey), {local.sge(4096, 4096)}) == 0,
          "post_send");
  ExpectSuccess(PollOne(a.send_cq()));
  ExpectPattern(local.bytes().subspan(4096), id, "READ from DM");
}

// One of everything; raw packets are not for every user.
class OneOfEach {
 public:
  OneOfEach(const std::string& device, bool raw)
      : datagrams_(device),
        ah_(datagrams_.AhTo(datagrams_)),
        xrcd_(OpenXrcd(datagrams_.context(), -1)),
        queue_(datagrams_.context(), datagrams_.pd(), xrcd_.get()),
        target_(CreateTarget(datagrams_.context(), xrcd_.get())),
        mw_(ibv_alloc_mw(datagrams_.pd(), IBV_MW_TYPE_2)) {
    ibv_alloc_dm_attr attr = {.length = 4096, .log_align_req = 6, .comp_mask = 0};
    dm_.reset(ibv_alloc_dm(datagrams_.context(), &attr));
    Require(ah_ && xrcd_ && dm_ && mw_, "objects");
    if (!raw) return;
    raw_ = std::make_unique<RawEnd>(device);
    flow_ = Rule().Eth(raw_->mac()).On(*raw_);
  }

 private:
  UdEnd datagrams_;
  Owned<ibv_ah> ah_;
  OwnedXrcd xrcd_;
  Xsrq queue_;
  Owned<ibv_qp> target_;
  Owned<ibv_mw> mw_;
  Owned<ibv_dm> dm_;
  std::unique_ptr<RawEnd> raw_;
  Flow flow_;
};

bool MaySendRawPackets(const std::string& device) {
  try {
    RawEnd end(device, 0);
    return true;
  } catch (const std::exception& error) {
    return std::string(error.what()).find(std::strerror(EPERM)) == std::string::npos;
  }
}

// objects DEVICE: holds one of each until it is killed.
VERBENA_ROLE(objects) {
  const OneOfEach objects(arguments.at(0), MaySendRawPackets(arguments.at(0)));
  printf("ready\n");
  fflush(stdout);
  while (true) pause();
}

VERBENA_ROLE(kinds) {
  Random random(std::stoull(arguments.at(0)));
  const auto end = After(arguments.at(1));
  const std::string& from = arguments.at(2);
  const std::string& to = arguments.at(3);
  Tally tally;
  int before = -1;
  try {
    const bool raw = MaySendRawPackets(from);
    // Round by round, so that a short run has them all.
    uint64_t turn = random.Next();
    do {
      switch (turn++ % 7) {
        case 0:
          Unreliable(random, from, to, &tally);
          break;
        case 1:
          Datagrams(random, from, to, &tally);
          break;
        case 2:
          if (raw) RawPackets(random, from, to, &tally);
          break;
        case 3:
          Extended(random, from, to);
          break;
        case 4:
          Shared(random, from, to);
          break;
        case 5:
          Windows(random, from, to);
          break;
        default:
          DeviceMemory(random, from, to);
      }
      // The first one leaves what libibverbs keeps for good.
      if (before < 0) before = OpenDescriptors();
      CheckDescriptors(before);
    } while (Clock::now() < end);
    if (random.OneIn(2)) {
      // Left to the end of the process: the daemon has to clear away.
      const OneOfEach left(to, raw);
      printf("data right\n");
      fflush(stdout);
      _exit(0);
    }
  } catch (const std::exception& error) {
    return Report(error);
  }
  printf("data right: %d of %d that may be lost arrived\n", tally.arrived, tally.sent);
  return 0;
}

}  // namespace
}  // namespace verbena::testing
