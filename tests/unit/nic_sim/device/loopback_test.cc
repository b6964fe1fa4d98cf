// SPDX-License-Identifier: Apache-2.0
//
// Two applications on the device interface, engine threads running: data
// arrives, completions are right, hostile queue contents harm only their owner.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <rte_mbuf.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "nic_sim/env/dpdk_env.h"
#include "nic_sim/fabric/packet.h"
#include "tests/testing/frames.h"
#include "tests/unit/nic_sim/device/raw_client.h"
#include "transport/verbs_types.h"

namespace verbena::testing {
namespace {

using transport::WcStatus;
using transport::WrOpcode;

// EAL can be initialised once per process: one device for all tests.
std::unique_ptr<nic::Device>& TheDevice() {
  static std::unique_ptr<nic::Device> device;
  return device;
}

class DeviceEnvironment : public ::testing::Environment {
 public:
  void SetUp() override { TheDevice() = StartDevice(2); }
  void TearDown() override { TheDevice().reset(); }
};
const auto* const kEnvironment = ::testing::AddGlobalTestEnvironment(new DeviceEnvironment);

// A connected pair: client a on verbena0, client b on verbena1 (or the same).
class ConnectedPair : public ::testing::TestWithParam<uint32_t> {
 protected:
  void SetUp() override {
    ASSERT_NE(TheDevice(), nullptr);
    a = std::make_unique<RawClient>(*TheDevice(), 0);
    b = std::make_unique<RawClient>(*TheDevice(), GetParam());
    a_cq = a->CreateCq(64);
    b_cq = b->CreateCq(64);
    a_qp = a->CreateQp(a_cq, a_cq);
    b_qp = b->CreateQp(b_cq, b_cq);
    ASSERT_EQ(a->Connect(a_qp, b_qp.qpn, b->gid()), 0);
    ASSERT_EQ(b->Connect(b_qp, a_qp.qpn, a->gid()), 0);
    from.resize(kBytes);
    std::iota(from.begin(), from.end(), uint8_t{1});
    to.assign(kBytes, 0);
    from_key = a->RegMr(from.data(), from.size(), transport::kAccessLocalWrite);
    to_key = b->RegMr(to.data(), to.size(), 15);
  }

  abi::Sge From(uint32_t bytes) const {
    return {reinterpret_cast<uint64_t>(from.data()), bytes, from_key};
  }
  abi::Sge To(uint32_t bytes) const {
    return {reinterpret_cast<uint64_t>(to.data()), bytes, to_key};
  }
  abi::SendWqe Wqe(WrOpcode opcode, uint64_t wr_id) const {
    abi::SendWqe wqe{};
    wqe.wr_id = wr_id;
    wqe.opcode = static_cast<uint8_t>(opcode);
    wqe.flags = abi::kWqeSignaled;
    wqe.remote_address = reinterpret_cast<uint64_t>(to.data());
    wqe.rkey = to_key;
    return wqe;
  }
  void ExpectCqe(RawClient& client, RawClient::Cq& cq, uint64_t wr_id, WcStatus status) {
    const auto cqe = client.Poll(cq);
    ASSERT_TRUE(cqe.has_value()) << "no completion\n" << TheDevice()->Dump().dump(1);
    EXPECT_EQ((*cqe)->wr_id, wr_id);
    EXPECT_EQ((*cqe)->status, static_cast<uint8_t>(status));
  }

  static constexpr uint32_t kBytes = 100000;
  std::unique_ptr<RawClient> a, b;
  RawClient::Cq a_cq, b_cq;
  RawClient::Qp a_qp, b_qp;
  std::vector<uint8_t> from, to;
  uint32_t from_key = 0, to_key = 0;
};

INSTANTIATE_TEST_SUITE_P(SameAndOtherNic, ConnectedPair, ::testing::Values(0u, 1u));

TEST_P(ConnectedPair, SendFillsThePostedReceive) {
  b->WriteRecv(b_qp, 7, {To(kBytes)});
  a->WriteSend(a_qp, Wqe(WrOpcode::kSend, 5), {From(kBytes)});
  a->Ring(a_qp);
  ExpectCqe(*a, a_cq, 5, WcStatus::kSuccess);
  const auto cqe = b->Poll(b_cq);
  ASSERT_TRUE(cqe.has_value());
  EXPECT_EQ((*cqe)->wr_id, 7u);
  EXPECT_EQ((*cqe)->byte_len, kBytes);
  EXPECT_EQ((*cqe)->qpn, b_qp.qpn);
  EXPECT_EQ(from, to);
}

TEST_P(ConnectedPair, AFlushIsDoneWhenTheWritesBeforeItAreThere) {
  std::vector<uint8_t> flushed(64);
  const uint32_t key = b->RegMr(flushed.data(), flushed.size(), transport::kAccessFlushGlobal);
  abi::SendWqe write = Wqe(WrOpcode::kRdmaWrite, 1);
  write.flags = 0;
  a->WriteSend(a_qp, write, {From(kBytes)});
  abi::SendWqe flush = Wqe(WrOpcode::kFlush, 2);
  flush.rkey = key;
  flush.remote_address = reinterpret_cast<uint64_t>(flushed.data());
  flush.atomic.compare_add = flushed.size();
  flush.imm_or_inv = 1;  // global, of the range
  a->WriteSend(a_qp, flush, {});
  a->Ring(a_qp);
  const auto cqe = a->Poll(a_cq);
  ASSERT_TRUE(cqe.has_value());
  EXPECT_EQ((*cqe)->wr_id, 2u);
  EXPECT_EQ((*cqe)->status, 0u);
  EXPECT_EQ((*cqe)->opcode, 8u);  // IBV_WC_FLUSH
  EXPECT_EQ(from, to);
  flush.rkey = to_key;  // without the right
  flush.remote_address = reinterpret_cast<uint64_t>(to.data());
  a->WriteSend(a_qp, flush, {});
  a->Ring(a_qp);
  ExpectCqe(*a, a_cq, 2, WcStatus::kRemAccessErr);
}

TEST_P(ConnectedPair, WriteLandsWithoutAReceive) {
  a->WriteSend(a_qp, Wqe(WrOpcode::kRdmaWrite, 1), {From(kBytes)});
  a->Ring(a_qp);
  ExpectCqe(*a, a_cq, 1, WcStatus::kSuccess);
  EXPECT_EQ(from, to);
}

TEST_P(ConnectedPair, ReadFetchesRemoteBytes) {
  std::iota(to.begin(), to.end(), uint8_t{77});
  a->WriteSend(a_qp, Wqe(WrOpcode::kRdmaRead, 2), {From(kBytes)});
  a->Ring(a_qp);
  ExpectCqe(*a, a_cq, 2, WcStatus::kSuccess);
  EXPECT_EQ(from, to);
}

TEST_P(ConnectedPair, FetchAddReturnsTheOriginalValue) {
  const uint64_t before = 41;
  std::memcpy(to.data(), &before, 8);
  abi::SendWqe wqe = Wqe(WrOpcode::kFetchAdd, 3);
  wqe.atomic.compare_add = 1;
  a->WriteSend(a_qp, wqe, {From(8)});
  a->Ring(a_qp);
  ExpectCqe(*a, a_cq, 3, WcStatus::kSuccess);
  uint64_t original = 0;
  uint64_t after = 0;
  std::memcpy(&original, from.data(), 8);
  std::memcpy(&after, to.data(), 8);
  EXPECT_EQ(original, 41u);
  EXPECT_EQ(after, 42u);
}

TEST_P(ConnectedPair, WrongRkeyFailsBothQps) {
  abi::SendWqe wqe = Wqe(WrOpcode::kRdmaWrite, 4);
  wqe.rkey ^= 0xff;
  b->WriteRecv(b_qp, 8, {To(16)});
  a->WriteSend(a_qp, wqe, {From(16)});
  a->Ring(a_qp);
  ExpectCqe(*a, a_cq, 4, WcStatus::kRemAccessErr);
  ExpectCqe(*b, b_cq, 8, WcStatus::kWrFlushErr);
}

TEST_P(ConnectedPair, ReceivePostedInErrorIsFlushed) {
  abi::SendWqe wqe = Wqe(WrOpcode::kRdmaWrite, 4);
  wqe.rkey ^= 0xff;
  a->WriteSend(a_qp, wqe, {From(16)});
  a->Ring(a_qp);
  ExpectCqe(*a, a_cq, 4, WcStatus::kRemAccessErr);
  a->WriteRecv(a_qp, 9, {From(16)});
  a->Ring(a_qp);
  ExpectCqe(*a, a_cq, 9, WcStatus::kWrFlushErr);
}

TEST_P(ConnectedPair, VanishedPeerExhaustsTheRetries) {
  ASSERT_EQ(a->Connect(a_qp, 0xffffff - 1, b->gid()), EINVAL);  // not from RTS
  RawClient::Qp lonely = a->CreateQp(a_cq, a_cq);
  ASSERT_EQ(a->Connect(lonely, 0xfffffe, b->gid(), 1, 1), 0);
  a->WriteSend(lonely, Wqe(WrOpcode::kSend, 6), {From(16)});
  a->Ring(lonely);
  ExpectCqe(*a, a_cq, 6, WcStatus::kRetryExcErr);
}

// Whatever stands in a ring, only its owner sees errors.
TEST_P(ConnectedPair, HostileSendWqesEndInErrorCompletions) {
  struct Case {
    const char* what;
    void (*spoil)(abi::SendWqe&);
  };
  static constexpr Case kCases[] = {
      {"opcode", [](abi::SendWqe& w) { w.opcode = 0xee; }},
      {"too many SGEs", [](abi::SendWqe& w) { w.num_sge = 255; }},
      {"inline beyond the stride",
       [](abi::SendWqe& w) {
         w.flags |= abi::kWqeInline;
         w.inline_bytes = 0x80000000;
       }},
      {"inline READ",
       [](abi::SendWqe& w) {
         w.opcode = static_cast<uint8_t>(WrOpcode::kRdmaRead);
         w.flags |= abi::kWqeInline;
       }},
  };
  for (const Case& one : kCases) {
    SCOPED_TRACE(one.what);
    RawClient::Qp qp = a->CreateQp(a_cq, a_cq);
    ASSERT_EQ(a->Connect(qp, b_qp.qpn, b->gid()), 0);
    abi::SendWqe wqe = Wqe(WrOpcode::kRdmaWrite, 10);
    one.spoil(wqe);
    a->WriteSend(qp, wqe, {From(16)});
    a->Ring(qp);
    ExpectCqe(*a, a_cq, 10, WcStatus::kLocQpOpErr);
  }
}

TEST_P(ConnectedPair, WrongLkeyIsALocalProtectionError) {
  abi::Sge sge = From(16);
  sge.lkey ^= 1;
  a->WriteSend(a_qp, Wqe(WrOpcode::kRdmaWrite, 11), {sge});
  a->Ring(a_qp);
  ExpectCqe(*a, a_cq, 11, WcStatus::kLocProtErr);
}

TEST_P(ConnectedPair, ProducerBeyondTheRingIsIgnored) {
  // What stands in the rings would be carried out.
  for (uint32_t i = 0; i < a_qp.sq_slots; ++i) {
    a->WriteSend(a_qp, Wqe(WrOpcode::kRdmaWrite, i), {From(8)});
  }
  a->WriteRecv(a_qp, 7, {From(8)});
  auto& record = a->page().qp[a_qp.handle];
  record.sq_producer.store(0x7fffffff);
  record.rq_producer.store(0x80000000);
  a->page().doorbell_bits[0].store(~uint64_t{0});
  a->page().doorbell_summary[3].store(~uint64_t{0});
  a->page().doorbell_summary[0].store(~uint64_t{0});
  TheDevice()->Kick();
  EXPECT_FALSE(a->Poll(a_cq, 50).has_value());
  // The other application goes on.
  b->WriteSend(b_qp, Wqe(WrOpcode::kSend, 12), {});
  b->Ring(b_qp);
  EXPECT_FALSE(a->Poll(a_cq, 50).has_value()) << "nothing is posted";
  EXPECT_EQ(TheDevice()->List("qp")["items"].size(), 2u);
}

TEST_P(ConnectedPair, CqOverrunStopsTheQp) {
  RawClient::Cq tiny = a->CreateCq(1);
  RawClient::Qp qp = a->CreateQp(tiny, tiny);
  RawClient::Qp peer = b->CreateQp(b_cq, b_cq);
  ASSERT_EQ(a->Connect(qp, peer.qpn, b->gid()), 0);
  ASSERT_EQ(b->Connect(peer, qp.qpn, a->gid()), 0);
  for (uint64_t i = 0; i < 3; ++i) a->WriteSend(qp, Wqe(WrOpcode::kRdmaWrite, i), {From(8)});
  a->Ring(qp);
  for (int i = 0; i < 200; ++i) {
    {
      const std::lock_guard lock(a->context().lock());
      abi::QueryQpReply reply{};
      ASSERT_EQ(a->context().QueryQp(qp.handle, &reply), 0);
      if (reply.attr.state == static_cast<uint32_t>(transport::QpState::kErr)) return;
    }
    usleep(10000);
  }
  FAIL() << "the QP is still alive";
}

// A frame from outside, with its ICRC, as a port would give it to the fabric.
TEST_P(ConnectedPair, ReservedOpcodeEndsTheConnectionWithANak) {
  std::string error;
  static rte_mempool* const pool = nic::CreatePacketPool("loopback_test", 16, &error);
  ASSERT_NE(pool, nullptr) << error;
  abi::QueryQpReply attributes{};
  ASSERT_EQ(b->context().QueryQp(b_qp.handle, &attributes), 0);
  transport::PacketAddress path = Ipv4Address();
  path.source_gid = a->gid();
  path.destination_gid = b->gid();
  const auto send = [&](uint8_t code, uint32_t psn, bool good_icrc, uint32_t source_offset = 0) {
    transport::PacketAddress from_path = path;
    from_path.source_gid = transport::Gid::FromIpv4(path.source_gid.Ipv4() + source_offset);
    transport::TransportHeaders headers;
    headers.bth.opcode = transport::Opcode::kRcSendOnly;
    headers.bth.dest_qpn = transport::Qpn(b_qp.qpn);
    headers.bth.psn = transport::Psn(psn);
    ByteVector frame = BuildFrame(from_path, headers, CountingBytes(16));
    frame[14 + 20 + 8] = std::byte{code};
    const auto view = transport::PacketView::ParseReserved(frame);
    ASSERT_TRUE(view.ok());
    transport::StoreLe32(&frame[frame.size() - 4], view->ComputeIcrc() ^ (good_icrc ? 0u : 1u));
    rte_mbuf* packet = rte_pktmbuf_alloc(pool);
    ASSERT_NE(packet, nullptr);
    std::memcpy(rte_pktmbuf_append(packet, static_cast<uint16_t>(frame.size())), frame.data(),
                frame.size());
    nic::MetaOf(packet) = {.icrc_present = true};
    TheDevice()->fabric().Transmit(0, {&packet, 1}, transport::Time::FromNanoseconds(1));
    TheDevice()->Kick();
  };
  b->WriteRecv(b_qp, 8, {To(16)});
  // None of these is a violation of the peer's.
  send(0x18, attributes.attr.rq_psn, false);
  send(0x18, attributes.attr.rq_psn, true, 100);
  send(0x38, attributes.attr.rq_psn, true);  // a UC code
  send(0x18, attributes.attr.rq_psn + 1, true);
  a->WriteSend(a_qp, Wqe(WrOpcode::kSend, 5), {From(16)});
  a->Ring(a_qp);
  ExpectCqe(*a, a_cq, 5, WcStatus::kSuccess);
  ExpectCqe(*b, b_cq, 8, WcStatus::kSuccess);

  b->WriteRecv(b_qp, 9, {To(16)});
  send(0x18, attributes.attr.rq_psn + 1, true);
  ExpectCqe(*b, b_cq, 9, WcStatus::kWrFlushErr);
}

// With more rights than the client has, the device could follow it into a set-uid program.
TEST(OpenContext, OtherUsersMemoryIsReachedOnlyThroughWhatTheyOpened) {
  nic::Device& device = *TheDevice();
  alignas(4096) static std::byte guard[4096];
  const uint64_t magic = 0x5566778811223344;
  std::memcpy(guard, &magic, sizeof magic);
  abi::Hello hello{};
  hello.guard_address = reinterpret_cast<uint64_t>(guard);
  hello.guard_magic = magic;
  const auto open_as = [&](uid_t uid, int mem_fd, std::string* backend) {
    abi::HelloReply reply{};
    nic::Context* context = nullptr;
    int fd = -1;
    std::string why;
    const int error =
        device.OpenContext(hello, {.pid = getpid(), .uid = uid, .comm = "test", .mem_fd = mem_fd},
                           &reply, &fd, &context, &why);
    if (error != 0) return error;
    *backend = device.List("context")["items"].back()["backend"];
    device.CloseContext(context);
    close(fd);
    return 0;
  };
  std::string backend;
  ASSERT_EQ(open_as(geteuid(), open("/proc/self/mem", O_RDWR | O_CLOEXEC), &backend), 0);
  EXPECT_EQ(backend, "process_vm");
  ASSERT_EQ(open_as(geteuid() + 1, open("/proc/self/mem", O_RDWR | O_CLOEXEC), &backend), 0);
  EXPECT_EQ(backend, "proc_mem");
  EXPECT_EQ(open_as(geteuid() + 1, -1, &backend), EPERM);
}

// --- Shared receive queues ---

class OnSrq : public ::testing::Test {
 protected:
  OnSrq() : a_(*TheDevice(), 0), b_(*TheDevice(), 1) {
    a_cq_ = a_.CreateCq(32);
    b_cq_ = b_.CreateCq(32);
    srq_ = b_.CreateSrq(8, 1, /*user_handle=*/0x5123);
    a_qp_ = a_.CreateQp(a_cq_, a_cq_);
    b_qp_ = b_.CreateQp(b_cq_, b_cq_, {4, 0, 1, 0, 0}, 2, &srq_);
    EXPECT_EQ(a_.Connect(a_qp_, b_qp_.qpn, b_.gid(), 1, 8), 0);
    EXPECT_EQ(b_.Connect(b_qp_, a_qp_.qpn, a_.gid(), 1, 8), 0);
  }
  void Send(uint64_t wr_id) {
    abi::SendWqe wqe{};
    wqe.wr_id = wr_id;
    wqe.opcode = static_cast<uint8_t>(WrOpcode::kSend);
    wqe.flags = abi::kWqeSignaled;
    a_.WriteSend(a_qp_, wqe, {});
    a_.Ring(a_qp_);
  }
  std::vector<uint32_t> Events(RawClient& client, size_t count) {
    std::vector<uint32_t> types;
    for (int i = 0; i < 2000 && types.size() < count; ++i) {
      if (const auto event = client.NextEvent()) {
        types.push_back(event->event_type);
        if (event->event_type == 14) {
          EXPECT_EQ(event->element, 0x5123u);
        }
      } else {
        usleep(1000);
      }
    }
    return types;
  }

  RawClient a_, b_;
  RawClient::Cq a_cq_, b_cq_;
  RawClient::Srq srq_;
  RawClient::Qp a_qp_, b_qp_;
};

TEST_F(OnSrq, SlotsAreFreeAgainWhenTheDeviceSaysSo) {
  for (uint64_t i = 0; i < 100; ++i) {
    b_.WriteSrqRecv(srq_, i, {});
    Send(i);
    const auto cqe = b_.Poll(b_cq_);
    ASSERT_TRUE(cqe.has_value());
    EXPECT_EQ((*cqe)->wr_id, i);
    ASSERT_TRUE(a_.Poll(a_cq_).has_value());
    EXPECT_EQ(b_.page().srq[srq_.handle].taken.load(), i + 1);
  }
}

// SRQ_ERR for the queue, then QP_FATAL for its QP, and LAST_WQE_REACHED.
TEST_F(OnSrq, AProducerThatCannotBeTrueEndsTheQueueAndItsQps) {
  b_.page().srq[srq_.handle].producer.store(9);
  Send(1);
  EXPECT_EQ(Events(b_, 3), (std::vector<uint32_t>{14, 1, 16}));
  EXPECT_EQ(TheDevice()->List("srq")["items"][0]["error"], true);
}

TEST_F(OnSrq, AWqeWithTooManySgesFailsTheQpThatTakesItAndNoOther) {
  auto* wqe = reinterpret_cast<abi::RecvWqe*>(srq_.ring);
  *wqe = {.wr_id = 3, .num_sge = 33, .reserved = 0};
  b_.page().srq[srq_.handle].producer.store(srq_.producer = 1);
  Send(1);
  const auto cqe = b_.Poll(b_cq_);
  ASSERT_TRUE(cqe.has_value());
  EXPECT_EQ((*cqe)->wr_id, 3u);
  EXPECT_EQ((*cqe)->status, static_cast<uint8_t>(WcStatus::kLocProtErr));
  RawClient::Qp other = b_.CreateQp(b_cq_, b_cq_, {4, 0, 1, 0, 0}, 2, &srq_);
  RawClient::Qp peer = a_.CreateQp(a_cq_, a_cq_);
  ASSERT_EQ(a_.Connect(peer, other.qpn, b_.gid()), 0);
  ASSERT_EQ(b_.Connect(other, peer.qpn, a_.gid()), 0);
  b_.WriteSrqRecv(srq_, 4, {});
  a_qp_ = peer;
  Send(2);
  const auto next = b_.Poll(b_cq_);
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ((*next)->wr_id, 4u);
  EXPECT_EQ((*next)->status, 0);
}

TEST_F(OnSrq, AResizeThatNobodyFinishesDoesNoHarm) {
  {
    const std::lock_guard lock(b_.context().lock());
    abi::ModifySrqRequest request{};
    request.handle = srq_.handle;
    request.mask = 1;
    request.max_wr = 64;
    abi::ModifySrqReply reply{};
    std::vector<int> fds;
    ASSERT_EQ(b_.context().ModifySrq(request, &reply, &fds), 0);
    for (const int fd : fds) close(fd);
    EXPECT_EQ(b_.context().ModifySrq(request, &reply, &fds), EBUSY);
    // Says that the WQEs are in the new ring, which is empty.
    b_.page().srq[srq_.handle].ring.store(reply.ring_number);
  }
  b_.WriteSrqRecv(srq_, 7, {});
  Send(1);
  const auto cqe = b_.Poll(b_cq_);
  ASSERT_TRUE(cqe.has_value());
  EXPECT_EQ((*cqe)->wr_id, 0u);  // what the new ring has there
  const std::lock_guard lock(b_.context().lock());
  abi::FinishSrqResizeRequest finish{};
  finish.handle = srq_.handle;
  finish.commit = 1;
  EXPECT_EQ(b_.context().FinishSrqResize(finish), 0);
  EXPECT_EQ(b_.context().FinishSrqResize(finish), EINVAL);
}

}  // namespace
}  // namespace verbena::testing
