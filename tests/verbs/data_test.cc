// SPDX-License-Identifier: Apache-2.0
//
// Data end to end: every RC operation, sizes, SGE splits, MTUs, paths, threads and processes.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/traffic.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

struct Path {
  const char* name;
  const char* from;
  const char* to;
  int gid_index;
};

class OverPath : public ::testing::TestWithParam<Path> {
 protected:
  EndOptions From(uint32_t max_inline = 256) const {
    return TrafficEnd(GetParam().from, GetParam().gid_index, max_inline);
  }
  EndOptions To() const { return TrafficEnd(GetParam().to, GetParam().gid_index); }
};

TEST_P(OverPath, EveryOperationMovesTheRightBytesAtEveryMtu) {
  for (const ibv_mtu mtu : {IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096}) {
    RcEnd a(From()), b(To());
    PathOptions path;
    path.mtu = mtu;
    ConnectPair(a, b, path);
    TrafficOptions traffic;
    traffic.seed = TestSeed() + static_cast<uint64_t>(mtu);
    traffic.rounds = 8;
    traffic.max_inline = 256;
    EXPECT_EQ(RunTraffic(a, b, traffic), "") << "mtu " << (128 << mtu);
    // And in the other direction on the same connection.
    traffic.seed += 1000;
    traffic.rounds = 2;
    EXPECT_EQ(RunTraffic(b, a, traffic), "") << "mtu " << (128 << mtu) << ", other direction";
  }
}

TEST_P(OverPath, LargeMessagesArriveWhole) {
  RcEnd a(From()), b(To());
  PathOptions path;
  path.mtu = IBV_MTU_4096;
  path.timeout = 18;
  ConnectPair(a, b, path);
  constexpr size_t kBytes = (64 << 20) + 13;
  Memory source(a.pd(), kBytes), target(b.pd(), kBytes);
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    const bool read = opcode == IBV_WR_RDMA_READ;
    Memory& from = read ? target : source;
    Memory& to = read ? source : target;
    FillPattern(from.bytes(), static_cast<uint64_t>(opcode) + 5);
    memset(to.data(), 0, kBytes);
    if (opcode == IBV_WR_SEND) {
      ASSERT_EQ(b.PostRecv(9, {target.sge(0, 1), target.sge(1, kBytes - 1)}), 0);
    }
    ASSERT_EQ(a.PostSend(RdmaWr(1, opcode, target.address(), target.rkey()),
                         {source.sge(0, 4097), source.sge(4097, kBytes - 4097)}),
              0);
    const ibv_wc wc = PollOne(a.send_cq(), Milliseconds(60000));
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    if (opcode == IBV_WR_SEND) {
      const ibv_wc received = PollOne(b.recv_cq());
      ASSERT_EQ(received.status, IBV_WC_SUCCESS) << Describe(received);
      EXPECT_EQ(received.byte_len, kBytes);
    }
    EXPECT_EQ(PatternMismatch(to.bytes(), static_cast<uint64_t>(opcode) + 5), std::nullopt)
        << "opcode " << opcode;
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, OverPath,
                         ::testing::Values(Path{"TwoNicsIpv4", "verbena0", "verbena1", 1},
                                           Path{"TwoNicsIpv6", "verbena0", "verbena1", 0},
                                           Path{"OneNicIpv4", "verbena0", "verbena0", 1},
                                           Path{"OneNicIpv6", "verbena1", "verbena1", 0}),
                         [](const auto& info) { return info.param.name; });

// Everything else runs between two NICs.
class Connected : public ::testing::Test {
 protected:
  void Connect(const EndOptions& options, const PathOptions& path = {}) {
    EndOptions other = options;
    other.device = "verbena1";
    a_ = std::make_unique<RcEnd>(options);
    b_ = std::make_unique<RcEnd>(other);
    ConnectPair(*a_, *b_, path);
  }
  std::unique_ptr<RcEnd> a_, b_;
};

TEST_F(Connected, AQpToItselfMovesData) {
  RcEnd end(TrafficEnd("verbena0"));
  end.Connect(end.address());
  Memory memory(end.pd(), 8192);
  FillPattern(memory.bytes().first(4096), 3);
  ASSERT_EQ(end.PostRecv(1, {memory.sge(4096, 4096)}), 0);
  ASSERT_EQ(end.PostSend(SendWr(2), {memory.sge(0, 4096)}), 0);
  EXPECT_EQ(PollOne(end.send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(end.recv_cq()).byte_len, 4096u);
  EXPECT_EQ(PatternMismatch(memory.bytes().subspan(4096), 3), std::nullopt);
}

TEST_F(Connected, ThirtyTwoSgesOfOddSizesOnBothSides) {
  EndOptions options;
  options.sge = 32;
  Connect(options);
  Memory source(a_->pd(), 65536), target(b_->pd(), 65536);
  std::vector<ibv_sge> gather, scatter;
  size_t total = 0, room = 0;
  for (size_t i = 0; i < 32; ++i) {
    const size_t length = 1 + i * 37 % 200;
    gather.push_back(source.sge(i * 2048 + i, length));
    FillPattern({source.data() + i * 2048 + i, length}, 8, total);
    total += length;
  }
  for (size_t i = 0; i < 32; ++i) {
    const size_t length = i == 31 ? total - room : 1 + i * 53 % 150;
    scatter.push_back(target.sge(i * 2048, length));
    room += length;
  }
  ASSERT_EQ(b_->PostRecv(1, scatter), 0);
  ASSERT_EQ(a_->PostSend(SendWr(2), gather), 0);
  EXPECT_EQ(PollOne(a_->send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(b_->recv_cq()).byte_len, total);
  size_t at = 0;
  for (const ibv_sge& sge : scatter) {
    EXPECT_EQ(PatternMismatch({reinterpret_cast<uint8_t*>(sge.addr), sge.length}, 8, at),
              std::nullopt);
    at += sge.length;
  }
}

TEST_F(Connected, ZeroLengthOperationsNeedNoKeyAndComplete) {
  Connect({});
  const ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND,
                                   IBV_WR_RDMA_WRITE_WITH_IMM};
  ASSERT_EQ(b_->PostRecv(1), 0);
  ASSERT_EQ(b_->PostRecv(2), 0);
  for (const ibv_wr_opcode opcode : opcodes) {
    // IBTA C9-88: the R_Key of a zero-length RDMA request is not checked.
    ASSERT_EQ(a_->PostSend(RdmaWr(7, opcode, 0xdeadbeef, 0x1234)), 0);
    EXPECT_EQ(PollOne(a_->send_cq()).status, IBV_WC_SUCCESS) << opcode;
  }
  for (const uint64_t id : {1u, 2u}) {
    const ibv_wc wc = PollOne(b_->recv_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, id);
    EXPECT_EQ(wc.byte_len, 0u);
  }
}

TEST_F(Connected, InlineDataBelongsToTheDeviceAfterPost) {
  EndOptions options;
  options.max_inline = 512;
  Connect(options);
  Memory target(b_->pd(), 4096);
  uint8_t stack[512];  // Not registered, lkey ignored.
  for (const uint32_t length : {1u, 8u, 63u, 64u, 65u, 511u, 512u}) {
    FillPattern({stack, length}, length);
    ASSERT_EQ(
        a_->PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, target.address(), target.rkey(),
                            IBV_SEND_SIGNALED | IBV_SEND_INLINE),
                     {{reinterpret_cast<uint64_t>(stack), length / 2, 0xbad},
                      {reinterpret_cast<uint64_t>(stack) + length / 2, length - length / 2, 7}}),
        0);
    memset(stack, 0, sizeof(stack));
    ASSERT_EQ(PollOne(a_->send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(PatternMismatch(target.bytes().first(length), length), std::nullopt) << length;
  }
}

TEST_F(Connected, TooMuchInlineDataIsRefusedAtPost) {
  EndOptions options;
  options.max_inline = 64;
  Connect(options);
  ibv_qp_attr attr = {};
  ibv_qp_init_attr init = {};
  ASSERT_EQ(ibv_query_qp(a_->qp(), &attr, IBV_QP_CAP, &init), 0);
  const uint32_t granted = init.cap.max_inline_data;
  EXPECT_GE(granted, 64u);
  std::vector<uint8_t> bytes(granted + 1);
  EXPECT_NE(a_->PostSend(SendWr(1, IBV_WR_SEND, IBV_SEND_SIGNALED | IBV_SEND_INLINE),
                         {{reinterpret_cast<uint64_t>(bytes.data()), granted + 1, 0}}),
            0);
  EXPECT_TRUE(StaysEmpty(a_->send_cq(), Milliseconds(20)));
}

TEST_F(Connected, SignalAllCompletesEveryRequest) {
  EndOptions options;
  options.sq_sig_all = true;
  Connect(options);
  Memory target(b_->pd(), 64);
  Memory source(a_->pd(), 64);
  for (uint64_t i = 0; i < 32; ++i) {
    ASSERT_EQ(a_->PostSend(RdmaWr(i, IBV_WR_RDMA_WRITE, target.address(), target.rkey(), 0),
                           {source.sge(0, 64)}),
              0);
  }
  for (uint64_t i = 0; i < 32; ++i) EXPECT_EQ(PollOne(a_->send_cq()).wr_id, i);
  EXPECT_TRUE(StaysEmpty(a_->send_cq(), Milliseconds(20)));
}

TEST_F(Connected, ASendQueueFullOfUnsignalledRequestsIsRefusedNotOverwritten) {
  EndOptions options;
  options.send_wr = 16;
  Connect(options);
  Memory target(b_->pd(), 64), source(a_->pd(), 64);
  ibv_qp_attr attr = {};
  ibv_qp_init_attr init = {};
  ASSERT_EQ(ibv_query_qp(a_->qp(), &attr, IBV_QP_CAP, &init), 0);
  // Without a signalled completion nothing gives slots back.
  uint32_t posted = 0;
  int error = 0;
  while (posted <= init.cap.max_send_wr && error == 0) {
    error = a_->PostSend(RdmaWr(posted, IBV_WR_RDMA_WRITE, target.address(), target.rkey(), 0),
                         {source.sge(0, 64)});
    if (error == 0) ++posted;
  }
  EXPECT_EQ(error, ENOMEM);
  EXPECT_EQ(posted, init.cap.max_send_wr);
}

TEST_F(Connected, AListOfRequestsIsPostedInOrderAndTheBadOneIsNamed) {
  Connect({});
  Memory target(b_->pd(), 4096), source(a_->pd(), 4096);
  ibv_sge sges[3];
  ibv_send_wr wrs[3];
  for (size_t i = 0; i < 3; ++i) {
    sges[i] = source.sge(i * 64, 64);
    wrs[i] = RdmaWr(i, IBV_WR_RDMA_WRITE, target.address(i * 64), target.rkey());
    wrs[i].sg_list = &sges[i];
    wrs[i].num_sge = 1;
    wrs[i].next = i < 2 ? &wrs[i + 1] : nullptr;
  }
  wrs[2].num_sge = 100;  // More than the QP has.
  ibv_send_wr* bad = nullptr;
  EXPECT_NE(ibv_post_send(a_->qp(), wrs, &bad), 0);
  EXPECT_EQ(bad, &wrs[2]);
  EXPECT_EQ(PollOne(a_->send_cq()).wr_id, 0u);
  EXPECT_EQ(PollOne(a_->send_cq()).wr_id, 1u);
  EXPECT_TRUE(StaysEmpty(a_->send_cq(), Milliseconds(20)));
}

TEST_F(Connected, AtomicsOnOneWordFromManyQpsAreSerialised) {
  constexpr int kQps = 4, kEach = 300;
  RcEnd owner((EndOptions()));
  Memory word(owner.pd(), 64);
  memset(word.data(), 0, 64);
  std::vector<std::unique_ptr<RcEnd>> targets, sources;
  for (int i = 0; i < kQps; ++i) {
    targets.push_back(std::make_unique<RcEnd>(owner, EndOptions()));
    EndOptions options;
    options.device = i % 2 == 0 ? "verbena0" : "verbena1";
    sources.push_back(std::make_unique<RcEnd>(options));
    ConnectPair(*sources.back(), *targets.back());
  }
  std::vector<std::thread> threads;
  std::vector<std::vector<uint64_t>> seen(kQps);
  std::vector<std::string> problems(kQps);
  for (size_t q = 0; q < kQps; ++q) {
    threads.emplace_back([&, q] {
      try {
        Memory result(sources[q]->pd(), 64);
        for (int i = 0; i < kEach; ++i) {
          sources[q]->PostSend(
              AtomicWr(1, IBV_WR_ATOMIC_FETCH_AND_ADD, word.address(8), word.rkey(), 1),
              {result.sge(0, 8)});
          const ibv_wc wc = PollOne(sources[q]->send_cq());
          if (wc.status != IBV_WC_SUCCESS) throw std::runtime_error(Describe(wc));
          uint64_t value;
          memcpy(&value, result.data(), 8);
          seen[q].push_back(value);
        }
      } catch (const std::exception& error) {
        problems[q] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<uint64_t> all;
  for (size_t q = 0; q < kQps; ++q) {
    EXPECT_EQ(problems[q], "");
    all.insert(all.end(), seen[q].begin(), seen[q].end());
  }
  std::sort(all.begin(), all.end());
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], i) << "a value was seen twice";
  uint64_t final_value;
  memcpy(&final_value, word.data() + 8, 8);
  EXPECT_EQ(final_value, static_cast<uint64_t>(kQps) * kEach);
}

TEST_F(Connected, ZeroBasedAndShiftedRegionsAreAddressedByTheirIova) {
  Connect({});
  Memory source(a_->pd(), 4096);
  FillPattern(source.bytes(), 12);
  std::vector<uint8_t> raw(8192);
  ibv_mr* zero = ibv_reg_mr(b_->pd(), raw.data(), 4096, kAllAccess | IBV_ACCESS_ZERO_BASED);
  ASSERT_NE(zero, nullptr) << strerror(errno);
  ibv_mr* shifted = ibv_reg_mr_iova(b_->pd(), raw.data() + 4096, 4096, 0x7000000000,
                                    static_cast<int>(kAllAccess));
  ASSERT_NE(shifted, nullptr) << strerror(errno);
  ASSERT_EQ(a_->PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, 100, zero->rkey), {source.sge(0, 900)}), 0);
  EXPECT_EQ(PollOne(a_->send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch({raw.data() + 100, 900}, 12), std::nullopt);
  ASSERT_EQ(a_->PostSend(RdmaWr(2, IBV_WR_RDMA_WRITE, 0x7000000000 + 8, shifted->rkey),
                         {source.sge(0, 900)}),
            0);
  EXPECT_EQ(PollOne(a_->send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch({raw.data() + 4096 + 8, 900}, 12), std::nullopt);
  // As a local key the iova counts, too.
  ASSERT_EQ(b_->PostRecv(3, {{0x7000000000 + 2000, 900, shifted->lkey}}), 0);
  ASSERT_EQ(a_->PostSend(SendWr(4), {source.sge(0, 900)}), 0);
  EXPECT_EQ(PollOne(b_->recv_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch({raw.data() + 4096 + 2000, 900}, 12), std::nullopt);
  EXPECT_EQ(ibv_dereg_mr(zero), 0);
  EXPECT_EQ(ibv_dereg_mr(shifted), 0);
}

TEST_F(Connected, AReceivePostedLateEndsTheRnrWait) {
  PathOptions path;
  path.rnr_retry = 7;       // For ever.
  path.min_rnr_timer = 14;  // 1.28 ms
  Connect({}, path);
  Memory source(a_->pd(), 64), target(b_->pd(), 64);
  ASSERT_EQ(a_->PostSend(SendWr(1), {source.sge(0, 64)}), 0);
  EXPECT_TRUE(StaysEmpty(a_->send_cq(), Milliseconds(60)));
  ASSERT_EQ(b_->PostRecv(2, {target.sge(0, 64)}), 0);
  EXPECT_EQ(PollOne(a_->send_cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(b_->recv_cq()).wr_id, 2u);
}

TEST_F(Connected, ManyQpsOnOneCqCompleteEachExactlyOnce) {
  constexpr uint32_t kQps = 300;
  EndOptions options;
  options.send_wr = options.recv_wr = 4;
  options.sge = 1;
  options.cqe = 8;
  RcEnd a(options);
  options.device = "verbena1";
  RcEnd b(options);
  Owned<ibv_cq> a_cq(ibv_create_cq(a.context(), 4 * kQps, nullptr, nullptr, 0));
  Owned<ibv_cq> b_cq(ibv_create_cq(b.context(), 4 * kQps, nullptr, nullptr, 0));
  ASSERT_TRUE(a_cq && b_cq);
  Memory source(a.pd(), 4096), target(b.pd(), kQps * 64);
  struct Link {
    Owned<ibv_qp> a, b;
  };
  std::vector<Link> links(kQps);
  const auto create = [&](RcEnd& end, ibv_cq* cq) {
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = cq;
    init.qp_type = IBV_QPT_RC;
    init.cap = {4, 4, 1, 1, 0};
    Owned<ibv_qp> qp(ibv_create_qp(end.pd(), &init));
    Require(qp != nullptr, "ibv_create_qp");
    return qp;
  };
  const auto connect = [](ibv_qp* qp, uint32_t peer, const ibv_gid& gid) {
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    ASSERT_EQ(ibv_modify_qp(qp, &attr,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
              0);
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = gid;
    attr.ah_attr.grh.sgid_index = 1;
    attr.ah_attr.grh.hop_limit = 1;
    ASSERT_EQ(ibv_modify_qp(qp, &attr,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
              0);
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = attr.rnr_retry = 7;
    ASSERT_EQ(ibv_modify_qp(qp, &attr,
                            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
              0);
  };
  for (Link& link : links) {
    link.a = create(a, a_cq.get());
    link.b = create(b, b_cq.get());
    connect(link.a.get(), link.b->qp_num, b.address().gid);
    connect(link.b.get(), link.a->qp_num, a.address().gid);
  }
  for (uint32_t i = 0; i < kQps; ++i) {
    ibv_sge sge = target.sge(i * 64, 64);
    ibv_recv_wr recv = {};
    recv.wr_id = i;
    recv.sg_list = &sge;
    recv.num_sge = 1;
    ibv_recv_wr* bad_recv = nullptr;
    ASSERT_EQ(ibv_post_recv(links[i].b.get(), &recv, &bad_recv), 0);
    ibv_sge from = source.sge(i % 64, 64);
    ibv_send_wr send = SendWr(i);
    send.sg_list = &from;
    send.num_sge = 1;
    ibv_send_wr* bad_send = nullptr;
    ASSERT_EQ(ibv_post_send(links[i].a.get(), &send, &bad_send), 0);
  }
  std::vector<int> sent(kQps), received(kQps);
  for (uint32_t i = 0; i < kQps; ++i) {
    const ibv_wc wc = PollOne(a_cq.get());
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    ASSERT_EQ(wc.qp_num, links[wc.wr_id].a->qp_num);
    ++sent[wc.wr_id];
    const ibv_wc other = PollOne(b_cq.get());
    ASSERT_EQ(other.status, IBV_WC_SUCCESS);
    ASSERT_EQ(other.qp_num, links[other.wr_id].b->qp_num);
    ++received[other.wr_id];
  }
  for (uint32_t i = 0; i < kQps; ++i) {
    EXPECT_EQ(sent[i], 1) << i;
    EXPECT_EQ(received[i], 1) << i;
  }
  EXPECT_TRUE(StaysEmpty(a_cq.get(), Milliseconds(5)));
}

TEST_F(Connected, ThreadsWithTheirOwnQpsDoNotDisturbEachOther) {
  constexpr size_t kThreads = 4;
  RcEnd a_owner(TrafficEnd("verbena0")), b_owner(TrafficEnd("verbena1"));
  std::vector<std::unique_ptr<RcEnd>> a, b;
  for (size_t i = 0; i < kThreads; ++i) {
    a.push_back(std::make_unique<RcEnd>(a_owner, TrafficEnd("verbena0")));
    b.push_back(std::make_unique<RcEnd>(b_owner, TrafficEnd("verbena1")));
    ConnectPair(*a[i], *b[i]);
  }
  std::vector<std::string> problems(kThreads);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      TrafficOptions traffic;
      traffic.seed = TestSeed() + 100 * i;
      traffic.rounds = 10;
      traffic.max_inline = 256;
      try {
        problems[i] = RunTraffic(*a[i], *b[i], traffic);
      } catch (const std::exception& error) {
        problems[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& problem : problems) EXPECT_EQ(problem, "");
}

TEST_F(Connected, ThreadsThatShareOneQpLoseNoRequest) {
  constexpr size_t kThreads = 4;
  constexpr uint64_t kEach = 500;
  EndOptions options;
  options.send_wr = 256;
  options.cqe = 512;
  Connect(options);
  Memory source(a_->pd(), 4096), target(b_->pd(), 4096);
  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kEach && !stop;) {
        const int error =
            a_->PostSend(RdmaWr(t * kEach + i, IBV_WR_RDMA_WRITE, target.address(), target.rkey()),
                         {source.sge(0, 64)});
        if (error == 0) {
          ++i;
        } else {
          sched_yield();
        }
      }
    });
  }
  std::vector<int> seen(kThreads * kEach);
  std::vector<uint64_t> last(kThreads, 0);
  try {
    for (uint64_t i = 0; i < kThreads * kEach; ++i) {
      const ibv_wc wc = PollOne(a_->send_cq());
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
      ASSERT_LT(wc.wr_id, seen.size());
      ++seen[wc.wr_id];
      // Each thread's requests complete in the order in which it posted them.
      const uint64_t number = wc.wr_id % kEach + 1;
      EXPECT_EQ(number, last[wc.wr_id / kEach] + 1);
      last[wc.wr_id / kEach] = number;
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<long>(seen.size()));
}

// The other process of the next test: requester towards the address in its arguments.
VERBENA_ROLE(traffic_requester) {
  TrafficOptions traffic;
  const std::string device = arguments.at(0);
  const PeerAddress peer = PeerAddress::Parse(arguments.at(1));
  const RemoteMemory remote = RemoteMemory::Parse(arguments.at(2));
  traffic.seed = std::stoull(arguments.at(3));
  traffic.rounds = std::stoi(arguments.at(4));
  traffic.max_inline = 256;
  RcEnd end(TrafficEnd(device));
  printf("address %s\n", end.address().Text().c_str());
  PathOptions path;
  path.timeout = 16;  // The responder may become ready a little later.
  end.Connect(peer, path);
  TrafficRequester requester(end, remote, traffic);
  requester.Run();
  printf("done\n");
  return 0;
}

TEST(Processes, TrafficBetweenSeveralProcessesIsExact) {
  constexpr size_t kProcesses = 3;
  struct Peer {
    std::unique_ptr<RcEnd> end;
    std::unique_ptr<TrafficResponder> responder;
    std::unique_ptr<Process> process;
    std::jthread thread;
    std::string problem;
  };
  std::vector<Peer> peers(kProcesses);
  for (size_t i = 0; i < kProcesses; ++i) {
    Peer& peer = peers[i];
    TrafficOptions traffic;
    traffic.seed = TestSeed() + 31 * i;
    traffic.rounds = 15;
    traffic.max_inline = 256;
    peer.end = std::make_unique<RcEnd>(TrafficEnd("verbena0"));
    peer.responder = std::make_unique<TrafficResponder>(*peer.end, traffic);
    peer.process = std::make_unique<Process>(RoleProcess(
        "traffic_requester", {i % 2 == 0 ? "verbena1" : "verbena0", peer.end->address().Text(),
                              peer.responder->remote().Text(), std::to_string(traffic.seed),
                              std::to_string(traffic.rounds)}));
    const auto address = peer.process->WaitForLine("address ", Milliseconds(10000));
    ASSERT_TRUE(address) << peer.process->Output();
    // Ready before the first packet can come: Prepare also clears the memory.
    ASSERT_EQ(peer.end->ToInit(), 0);
    peer.responder->Prepare();
    ASSERT_EQ(peer.end->ToRtr(PeerAddress::Parse(*address)), 0);
    ASSERT_EQ(peer.end->ToRts(), 0);
    peer.thread = std::jthread([&peer] {
      try {
        peer.responder->Run();
      } catch (const std::exception& error) {
        peer.problem = error.what();
      }
    });
  }
  for (Peer& peer : peers) {
    peer.thread.join();
    EXPECT_EQ(peer.problem, "");
    EXPECT_EQ(peer.process->Wait(), 0) << peer.process->Output();
  }
}

// Faults are the daemon's: each test removes its own.
class UnderFaults : public ::testing::Test {
 protected:
  void Add(const std::string& rule) {
    const Finished added = VerbenaHere({"fault", "add", rule});
    ASSERT_EQ(added.status, 0) << rule << ": " << added.output;
  }
  void TearDown() override { EXPECT_EQ(VerbenaHere({"fault", "clear"}).status, 0); }

  void RunOver(const char* from, const char* to, int rounds) {
    PathOptions path;
    path.timeout = 12;  // 16.8 ms
    path.mtu = IBV_MTU_1024;
    RcEnd a(TrafficEnd(from)), b(TrafficEnd(to));
    ConnectPair(a, b, path);
    TrafficOptions traffic;
    traffic.seed = TestSeed();
    traffic.rounds = rounds;
    traffic.max_inline = 256;
    EXPECT_EQ(RunTraffic(a, b, traffic), "");
  }
};

TEST_F(UnderFaults, LossDuplicationReorderingAndCorruptionDoNotShow) {
  Add("drop prob=0.02 seed=11");
  Add("duplicate prob=0.02 seed=12");
  Add("reorder prob=0.02 seed=13 by=3");
  Add("corrupt prob=0.02 seed=14");
  RunOver("verbena0", "verbena1", 40);
  RunOver("verbena0", "verbena0", 20);
  const std::vector<int64_t> hits = FaultHits();
  ASSERT_EQ(hits.size(), 4u);
  for (const int64_t count : hits) EXPECT_GT(count, 0) << "a rule never hit";
}

TEST_F(UnderFaults, AFencedWriteSendsWhatTheReadBroughtBefore) {
  // Late READ responses: without the fence the WRITE leaves first, with the old bytes.
  Add("delay dev=verbena1 dir=tx opcode=read us=5000");
  RcEnd a(TrafficEnd("verbena0")), b(TrafficEnd("verbena1"));
  ConnectPair(a, b);
  constexpr size_t kBytes = 3000;
  Memory local(a.pd(), kBytes), remote(b.pd(), 2 * kBytes);
  for (uint64_t round = 0; round < 10; ++round) {
    FillPattern(remote.bytes().first(kBytes), round);
    memset(local.data(), 0, kBytes);
    ASSERT_EQ(a.PostSend(RdmaWr(1, IBV_WR_RDMA_READ, remote.address(), remote.rkey(), 0),
                         {local.sge(0, kBytes)}),
              0);
    ASSERT_EQ(a.PostSend(RdmaWr(2, IBV_WR_RDMA_WRITE, remote.address(kBytes), remote.rkey(),
                                IBV_SEND_SIGNALED | IBV_SEND_FENCE),
                         {local.sge(0, kBytes)}),
              0);
    ASSERT_EQ(PollOne(a.send_cq()).status, IBV_WC_SUCCESS);
    ASSERT_EQ(PatternMismatch(remote.bytes().subspan(kBytes), round), std::nullopt);
  }
  EXPECT_GE(FaultHits().at(0), 30);  // Three responses each.
}

TEST_F(UnderFaults, EveryPacketTwiceDoesNotShow) {
  Add("duplicate every=1");
  RunOver("verbena0", "verbena1", 10);
  EXPECT_GT(FaultHits().at(0), 1000);
}

TEST_F(UnderFaults, LostAcknowledgementsDoNotShow) {
  Add("drop opcode=ack every=3");
  RunOver("verbena0", "verbena1", 6);
}

}  // namespace
}  // namespace verbena::testing
