// SPDX-License-Identifier: Apache-2.0
//
// Unreliable datagrams over the public verbs interface: what arrives, what the
// completion says, what errors do at either end.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "tests/verbs/ud_end.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

struct Case {
  const char* peer_device;
  int gid_index;
};
class UdTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Paths, UdTest,
                         ::testing::Values(Case{"verbena0", 1}, Case{"verbena1", 1},
                                           Case{"verbena0", 0}, Case{"verbena1", 0}),
                         [](const auto& info) {
                           return std::string(info.param.peer_device) +
                                  (info.param.gid_index == 0 ? "Ipv6" : "Ipv4");
                         });

TEST_P(UdTest, DatagramArrivesBehindTheHeaderOfItsNetwork) {
  const bool is_ipv6 = GetParam().gid_index == 0;
  UdEnd a("verbena0", GetParam().gid_index);
  UdEnd b(GetParam().peer_device, GetParam().gid_index);
  const auto ah = a.AhTo(b);
  FillPattern(a.memory().bytes().first(1000), 1);
  b.Receive(7, 0, kGrhBytes + 1000);
  ASSERT_EQ(a.Send(3, ah.get(), b, 1000, kQkey, IBV_WR_SEND_WITH_IMM), 0);

  const ibv_wc sent = PollOne(a.cq());
  EXPECT_EQ(sent.status, IBV_WC_SUCCESS);
  EXPECT_EQ(sent.wr_id, 3u);
  EXPECT_EQ(sent.opcode, IBV_WC_SEND);
  const ibv_wc got = PollOne(b.cq());
  ASSERT_EQ(got.status, IBV_WC_SUCCESS) << Describe(got);
  EXPECT_EQ(got.wr_id, 7u);
  EXPECT_EQ(got.opcode, IBV_WC_RECV);
  EXPECT_EQ(got.byte_len, kGrhBytes + 1000);
  EXPECT_EQ(got.src_qp, a.qp()->qp_num);
  EXPECT_EQ(got.qp_num, b.qp()->qp_num);
  EXPECT_EQ(got.wc_flags & (IBV_WC_GRH | IBV_WC_WITH_IMM),
            unsigned{IBV_WC_GRH} | unsigned{IBV_WC_WITH_IMM});
  EXPECT_EQ(be32toh(got.imm_data), 0xfeedbeefu);
  // How UCX tells the networks apart.
  EXPECT_EQ(got.sl & 0xf, is_ipv6 ? 1 : 2);
  EXPECT_EQ(PatternMismatch(b.memory().bytes().subspan(kGrhBytes, 1000), 1), std::nullopt);

  const uint8_t* header = b.memory().data();
  const ibv_gid from = a.gid();
  const ibv_gid to = b.gid();
  if (is_ipv6) {
    EXPECT_EQ(header[0] >> 4, 6);
    EXPECT_EQ(header[7], 17) << "hop limit";
    EXPECT_EQ(std::memcmp(header + 8, from.raw, 16), 0);
    EXPECT_EQ(std::memcmp(header + 24, to.raw, 16), 0);
  } else {
    const uint8_t* ip = header + 20;
    EXPECT_EQ(ip[0], 0x45);
    EXPECT_EQ(ip[1], 0x68) << "type of service";
    EXPECT_EQ(ip[8], 17) << "time to live";
    EXPECT_EQ(ip[9], 17) << "UDP";
    EXPECT_EQ(std::memcmp(ip + 12, from.raw + 12, 4), 0);
    EXPECT_EQ(std::memcmp(ip + 16, to.raw + 12, 4), 0);
    // RFC 791: the ones' complement sum of a header with its checksum is all ones.
    uint32_t sum = 0;
    for (int i = 0; i < 20; i += 2) sum += static_cast<uint32_t>(ip[i] << 8 | ip[i + 1]);
    EXPECT_EQ((sum & 0xffff) + (sum >> 16), 0xffffu);
  }
}

TEST_P(UdTest, WhatIsPostedLeavesBeforeAddressHandleAndQpAreDestroyed) {
  constexpr int kCount = 30;
  UdEnd b(GetParam().peer_device, GetParam().gid_index);
  for (int i = 0; i < kCount; ++i) b.Receive(static_cast<uint64_t>(i), 0, kGrhBytes + 100);
  {
    UdEnd a("verbena0", GetParam().gid_index);
    auto ah = a.AhTo(b);
    for (int i = 0; i < kCount; ++i) {
      ASSERT_EQ(a.Send(3, ah.get(), b, 100, kQkey, IBV_WR_SEND), 0);
    }
    ah.reset();
  }
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(PollOne(b.cq()).status, IBV_WC_SUCCESS) << i;
}

TEST_P(UdTest, AnswerGoesToWhereTheCompletionSays) {
  UdEnd a("verbena0", GetParam().gid_index);
  UdEnd b(GetParam().peer_device, GetParam().gid_index);
  const auto ah = a.AhTo(b);
  b.Receive(1, 0, 256);
  ASSERT_EQ(a.Send(1, ah.get(), b, 10), 0);
  PollOne(a.cq());
  ibv_wc got = PollOne(b.cq());
  ASSERT_EQ(got.status, IBV_WC_SUCCESS);
  ibv_grh grh;
  std::memcpy(&grh, b.memory().data(), sizeof grh);
  const Owned<ibv_ah> back(ibv_create_ah_from_wc(b.pd(), &got, &grh, 1));
  ASSERT_NE(back, nullptr) << strerror(errno);
  a.Receive(2, 0, 256);
  ASSERT_EQ(b.Send(2, back.get(), a, 20), 0);
  const ibv_wc sent = PollOne(b.cq());
  EXPECT_EQ(sent.status, IBV_WC_SUCCESS) << Describe(sent);
  const ibv_wc answer = PollOne(a.cq());
  EXPECT_EQ(answer.status, IBV_WC_SUCCESS);
  EXPECT_EQ(answer.byte_len, kGrhBytes + 20);
  EXPECT_EQ(answer.src_qp, b.qp()->qp_num);
}

TEST(UdErrors, WrongQkeyIsDroppedAndTheReceiveStays) {
  UdEnd a;
  UdEnd b;
  const auto ah = a.AhTo(b);
  b.Receive(1, 0, 256);
  ASSERT_EQ(a.Send(1, ah.get(), b, 10, kQkey + 1), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_SUCCESS);
  EXPECT_TRUE(StaysEmpty(b.cq(), Milliseconds(100)));
  ASSERT_EQ(a.Send(2, ah.get(), b, 10), 0);
  EXPECT_EQ(PollOne(b.cq()).wr_id, 1u);
}

TEST(UdErrors, ControlledQkeyOfTheWrMeansThatOfTheQp) {
  UdEnd a;
  UdEnd b;
  const auto ah = a.AhTo(b);
  b.Receive(1, 0, 256);
  ASSERT_EQ(a.Send(1, ah.get(), b, 10, 0x80000000), 0);
  EXPECT_EQ(PollOne(b.cq()).status, IBV_WC_SUCCESS);
}

TEST(UdErrors, DatagramWithoutOrWithTooSmallAReceiveIsDroppedSilently) {
  UdEnd a;
  UdEnd b;
  const auto ah = a.AhTo(b);
  ASSERT_EQ(a.Send(1, ah.get(), b, 100), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_SUCCESS);
  EXPECT_TRUE(StaysEmpty(b.cq(), Milliseconds(50)));
  b.Receive(1, 0, kGrhBytes + 99);
  ASSERT_EQ(a.Send(2, ah.get(), b, 100), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_SUCCESS);
  EXPECT_TRUE(StaysEmpty(b.cq(), Milliseconds(50)));
  EXPECT_EQ(b.State(), IBV_QPS_RTS);
  ASSERT_EQ(a.Send(3, ah.get(), b, 99), 0);
  const ibv_wc got = PollOne(b.cq());
  EXPECT_EQ(got.wr_id, 1u);
  EXPECT_EQ(got.byte_len, kGrhBytes + 99);
}

TEST(UdErrors, MessageOverTheMtuFailsAndEndsSendingUntilRtsAgain) {
  UdEnd a;
  UdEnd b;
  const auto ah = a.AhTo(b);
  b.Receive(1, 0, 8192);
  b.Receive(2, 8192, 8192);
  ASSERT_EQ(a.Send(1, ah.get(), b, 4096), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(b.cq()).byte_len, kGrhBytes + 4096);
  ASSERT_EQ(a.Send(2, ah.get(), b, 4097), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_LOC_LEN_ERR);
  // IBTA Vol 1, 10.3.1: a UD QP goes to SQE, not to ERR; receiving goes on.
  EXPECT_EQ(a.State(), IBV_QPS_SQE);
  ASSERT_EQ(a.Send(3, ah.get(), b, 1), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_WR_FLUSH_ERR);
  a.Receive(4, 0, 256);
  const auto back = b.AhTo(a);
  ASSERT_EQ(b.Send(5, back.get(), a, 1), 0);
  EXPECT_EQ(PollOne(b.cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(a.cq()).wr_id, 4u);
  ASSERT_EQ(a.ToState(IBV_QPS_RTS), 0);
  ASSERT_EQ(a.Send(6, ah.get(), b, 2), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(b.cq()).byte_len, kGrhBytes + 2);
}

TEST(UdErrors, UnregisteredPayloadFailsItsWr) {
  UdEnd a;
  UdEnd b;
  const auto ah = a.AhTo(b);
  ibv_sge sge = a.memory().sge(0, 64);
  sge.lkey ^= 0x5a5a00;
  ASSERT_EQ(a.SendSge(1, ah.get(), b, sge), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(a.State(), IBV_QPS_SQE);
}

TEST(UdErrors, UnmappedPayloadFailsItsWrAndFlushesThoseBehind) {
  UdEnd a;
  UdEnd b;
  const auto ah = a.AhTo(b);
  b.Receive(1, 0, 256);
  a.memory().Unmap(4096, 4096);
  ASSERT_EQ(a.Send(1, ah.get(), b, 64), 0);
  ASSERT_EQ(a.Send(2, ah.get(), b, 64, kQkey, IBV_WR_SEND, 4096), 0);
  ASSERT_EQ(a.Send(3, ah.get(), b, 64), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_SUCCESS);
  const ibv_wc failed = PollOne(a.cq());
  EXPECT_EQ(failed.wr_id, 2u);
  EXPECT_EQ(failed.status, IBV_WC_LOC_PROT_ERR);
  const ibv_wc flushed = PollOne(a.cq());
  EXPECT_EQ(flushed.wr_id, 3u);
  EXPECT_EQ(flushed.status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(PollOne(b.cq()).status, IBV_WC_SUCCESS);
}

TEST(UdErrors, ReceiveIntoUnregisteredMemoryFailsTheQp) {
  UdEnd a;
  UdEnd b;
  const auto ah = a.AhTo(b);
  ibv_sge sge = b.memory().sge(0, 256);
  sge.lkey ^= 0x5a5a00;
  ibv_recv_wr wr = {};
  wr.wr_id = 9;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_recv(b.qp(), &wr, &bad), 0);
  b.Receive(10, 0, 256);
  ASSERT_EQ(a.Send(1, ah.get(), b, 64), 0);
  EXPECT_EQ(PollOne(b.cq()).status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(PollOne(b.cq()).status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(b.State(), IBV_QPS_ERR);
}

TEST(UdErrors, OpcodesThatUdLacksAreRefusedAtPost) {
  UdEnd a;
  UdEnd b;
  const auto ah = a.AhTo(b);
  for (const ibv_wr_opcode opcode :
       {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND_WITH_INV, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
    EXPECT_EQ(a.Send(1, ah.get(), b, 8, kQkey, opcode), EINVAL) << opcode;
  }
}

TEST(UdObjects, HandleOfAnotherDomainIsNoAddress) {
  UdEnd a;
  UdEnd b;
  const Owned<ibv_pd> other(ibv_alloc_pd(a.context()));
  ibv_ah_attr attr = a.AttributesFor(b);
  const Owned<ibv_ah> ah(ibv_create_ah(other.get(), &attr));
  ASSERT_NE(ah, nullptr);
  ASSERT_EQ(a.Send(1, ah.get(), b, 8), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_LOC_QP_OP_ERR);
}

TEST(UdObjects, BadAddressesAreRefused) {
  UdEnd a;
  UdEnd b;
  const auto refused = [&](auto change) {
    ibv_ah_attr attr = a.AttributesFor(b);
    change(attr);
    errno = 0;
    const Owned<ibv_ah> ah(ibv_create_ah(a.pd(), &attr));
    return ah == nullptr ? errno : 0;
  };
  EXPECT_EQ(refused([](ibv_ah_attr&) {}), 0);
  EXPECT_EQ(refused([](ibv_ah_attr& attr) { attr.port_num = 2; }), EINVAL);
  EXPECT_EQ(refused([](ibv_ah_attr& attr) { attr.is_global = 0; }), EINVAL);
  EXPECT_EQ(refused([](ibv_ah_attr& attr) { attr.grh.sgid_index = 200; }), EINVAL);
  EXPECT_EQ(refused([](ibv_ah_attr& attr) { attr.grh.sgid_index = 0; }), EINVAL)
      << "IPv6 source, IPv4 destination";
  EXPECT_EQ(refused([](ibv_ah_attr& attr) { attr.grh.dgid = {}; }), EINVAL);
}

TEST(UdObjects, ManyDatagramsKeepTheirOrderAndArriveOnce) {
  UdEnd a;
  UdEnd b("verbena1");
  const auto ah = a.AhTo(b);
  constexpr uint32_t kRounds = 40;
  constexpr uint32_t kBatch = 16;
  for (uint32_t round = 0; round < kRounds; ++round) {
    for (uint32_t i = 0; i < kBatch; ++i) b.Receive(i, i * 128, 128);
    for (uint32_t i = 0; i < kBatch; ++i) {
      FillPattern(a.memory().bytes().subspan(i * 64, 64), round * kBatch + i);
      ASSERT_EQ(a.Send(i, ah.get(), b, 64, kQkey, IBV_WR_SEND, i * 64), 0);
    }
    for (uint32_t i = 0; i < kBatch; ++i) {
      EXPECT_EQ(PollOne(a.cq()).wr_id, i);
      const ibv_wc got = PollOne(b.cq());
      EXPECT_EQ(got.wr_id, i);
      EXPECT_EQ(
          PatternMismatch(b.memory().bytes().subspan(i * 128 + kGrhBytes, 64), round * kBatch + i),
          std::nullopt);
    }
  }
}

}  // namespace
}  // namespace verbena::testing
