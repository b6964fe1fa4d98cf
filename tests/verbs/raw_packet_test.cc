// SPDX-License-Identifier: Apache-2.0
//
// Raw packet QPs over the public verbs interface: frames as they are, and who gets
// them (ibv_create_flow(3)).
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "tests/verbs/raw_end.h"
#include "tests/verbs/ud_end.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

class RawPacket : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Peers, RawPacket, ::testing::Values("verbena0", "verbena1"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(RawPacket, FramesArriveAsTheyWereSent) {
  RawEnd a, b(GetParam());
  const Flow flow = Rule().Eth(b.mac()).On(b);
  for (const size_t bytes : {14u, 15u, 60u, 1514u, 4200u}) {
    FrameOptions options;
    options.to = b.mac();
    Bytes frame = MakeFrame(options);
    frame.resize(bytes, 0x5a);
    a.Send(frame);
    EXPECT_EQ(b.Next(), frame);
  }
}

TEST_P(RawPacket, WithoutARuleNothingIsReceived) {
  RawEnd a, b(GetParam());
  FrameOptions options;
  options.to = b.mac();
  a.Send(MakeFrame(options));
  EXPECT_TRUE(StaysEmpty(b.cq(), Milliseconds(50)));
  {
    const Flow flow = Rule().Eth(b.mac()).On(b);
    a.Send(MakeFrame(options));
    EXPECT_EQ(b.Next(), MakeFrame(options));
  }
  a.Send(MakeFrame(options));  // the rule is gone
  EXPECT_TRUE(StaysEmpty(b.cq(), Milliseconds(50)));
}

// Rules, frames that they take and frames that they do not.
struct MatchCase {
  const char* name;
  Rule rule;
  FrameOptions taken;
  FrameOptions other;
};

std::vector<MatchCase> MatchCases() {
  const auto with = [](auto change) {
    FrameOptions options;
    change(options);
    return options;
  };
  const FrameOptions plain;
  const FrameOptions ipv6 = with([](FrameOptions& o) { o.ipv6 = true; });
  std::vector<MatchCase> cases;
  cases.push_back({"mac", Rule().Eth(kTo), plain, with([](auto& o) { o.to[5] ^= 1; })});
  cases.push_back({"ether_type", Rule().EtherType(0x86dd), ipv6, plain});
  cases.push_back({"vlan_id", Rule().Vlan(5, 0xfff), with([](auto& o) { o.vlan = 0x2005; }),
                   with([](auto& o) { o.vlan = 6; })});
  cases.push_back({"vlan_0_is_no_frame_without_tag", Rule().Vlan(0, 0xfff),
                   with([](auto& o) { o.vlan = 0x2000; }), plain});
  cases.push_back(
      {"ipv4", Rule().Ipv4(2), plain, with([](auto& o) { o.last_of_destination = 3; })});
  cases.push_back(
      {"ipv4_behind_a_vlan_tag", Rule().Ipv4(2), with([](auto& o) { o.vlan = 9; }), ipv6});
  cases.push_back({"ipv4_protocol_and_tos", Rule().Ipv4Ext(6, 8), with([](auto& o) {
                     o.protocol = 6;
                     o.tos = 8;
                   }),
                   with([](auto& o) { o.protocol = 6; })});
  cases.push_back({"ipv6", Rule().Ipv6(2), ipv6, with([](auto& o) {
                     o.ipv6 = true;
                     o.last_of_destination = 3;
                   })});
  cases.push_back({"udp", Rule().Port(IBV_FLOW_SPEC_UDP, 2000), plain,
                   with([](auto& o) { o.destination_port = 2001; })});
  cases.push_back({"udp_is_not_tcp", Rule().Port(IBV_FLOW_SPEC_UDP, 2000), ipv6,
                   with([](auto& o) { o.protocol = 6; })});
  cases.push_back({"all_layers", Rule().Eth(kTo).Ipv6(2).Port(IBV_FLOW_SPEC_TCP, 2000),
                   with([](auto& o) {
                     o.ipv6 = true;
                     o.protocol = 6;
                   }),
                   ipv6});
  return cases;
}

TEST(RawPacketFlow, ARuleTakesWhatItsSpecsSay) {
  RawEnd a, b;
  for (const MatchCase& c : MatchCases()) {
    SCOPED_TRACE(c.name);
    const Flow flow = c.rule.On(b);
    a.Send(MakeFrame(c.other));
    a.Send(MakeFrame(c.taken));
    EXPECT_EQ(b.Next(), MakeFrame(c.taken));
    EXPECT_TRUE(StaysEmpty(b.cq(), Milliseconds(1)));
  }
}

TEST(RawPacketFlow, TheLowestPriorityNumberGoesFirst) {
  RawEnd a, b, c;
  const Bytes frame = MakeFrame({});
  const Flow low = Rule(IBV_FLOW_ATTR_NORMAL, 5).Eth(kTo).Ipv4(2).On(b);
  a.Send(frame);
  EXPECT_EQ(b.Next(), frame);
  {
    const Flow high = Rule(IBV_FLOW_ATTR_NORMAL, 1).Eth(kTo).On(c);
    a.Send(frame);
    EXPECT_EQ(c.Next(), frame);
    EXPECT_TRUE(StaysEmpty(b.cq(), Milliseconds(20)));
  }
  a.Send(frame);
  EXPECT_EQ(b.Next(), frame);
}

TEST(RawPacketFlow, QpsWithTheSameRuleAllGetTheFrame) {
  RawEnd a, b, c("verbena1"), d("verbena1");
  const Flow at_b = Rule().Eth(kGroupMac).On(b);
  const Flow at_c = Rule().Eth(kGroupMac).On(c);
  const Flow at_d = Rule().Eth(kGroupMac).On(d);
  FrameOptions options;
  options.to = kGroupMac;
  a.Send(MakeFrame(options));
  for (RawEnd* end : {&b, &c, &d}) EXPECT_EQ(end->Next(), MakeFrame(options));
}

TEST(RawPacketFlow, DefaultsTakeWhatNoOtherRuleTakes) {
  RawEnd a, all, multicast, normal;
  const Flow flow1 = Rule(IBV_FLOW_ATTR_ALL_DEFAULT).On(all);
  const Flow flow2 = Rule(IBV_FLOW_ATTR_MC_DEFAULT).On(multicast);
  const Flow flow3 = Rule(IBV_FLOW_ATTR_NORMAL, 9).Ipv4(2).On(normal);
  FrameOptions options;
  a.Send(MakeFrame(options));
  EXPECT_EQ(normal.Next(), MakeFrame(options));
  options.last_of_destination = 3;
  a.Send(MakeFrame(options));
  EXPECT_EQ(all.Next(), MakeFrame(options));
  options.to = kGroupMac;
  a.Send(MakeFrame(options));
  EXPECT_EQ(multicast.Next(), MakeFrame(options));
  options.to.fill(0xff);
  a.Send(MakeFrame(options));
  EXPECT_EQ(multicast.Next(), MakeFrame(options));
  for (RawEnd* end : {&all, &multicast, &normal}) {
    EXPECT_TRUE(StaysEmpty(end->cq(), Milliseconds(10)));
  }
}

TEST(RawPacketFlow, ARuleThatDoesNotTrapLetsTheNextOneHaveTheFrameToo) {
  RawEnd a, b, c;
  const Flow first = Rule(IBV_FLOW_ATTR_NORMAL, 1, IBV_FLOW_ATTR_FLAGS_DONT_TRAP).Eth(kTo).On(b);
  const Flow second = Rule(IBV_FLOW_ATTR_NORMAL, 2).Eth(kTo).On(c);
  a.Send(MakeFrame({}));
  EXPECT_EQ(b.Next(), MakeFrame({}));
  EXPECT_EQ(c.Next(), MakeFrame({}));
}

TEST(RawPacketFlow, ASnifferSeesWhatThePortSendsAndReceives) {
  UdEnd a, b("verbena1");
  RawEnd sniffer("verbena1");
  const Flow flow = Rule(IBV_FLOW_ATTR_SNIFFER).On(sniffer);
  const auto ah = a.AhTo(b);
  FillPattern(a.memory().bytes().first(100), 1);
  b.Receive(7, 0, kGrhBytes + 100);
  ASSERT_EQ(a.Send(3, ah.get(), b, 100), 0);
  EXPECT_EQ(PollOne(b.cq()).status, IBV_WC_SUCCESS);
  const Bytes seen = sniffer.Next();
  // Ethernet, IPv4, UDP, BTH, DETH, payload, ICRC.
  ASSERT_EQ(seen.size(), 14u + 20 + 8 + 12 + 8 + 100 + 4);
  EXPECT_EQ(seen[14 + 20 + 2] << 8 | seen[14 + 20 + 3], 4791);
  EXPECT_EQ(PatternMismatch(std::span(seen).subspan(62, 100), 1), std::nullopt);

  // The same bytes once more, from a raw packet QP: the transport takes them.
  b.Receive(8, 512, kGrhBytes + 100);
  RawEnd c;
  c.Send(seen);
  const ibv_wc again = PollOne(b.cq());
  EXPECT_EQ(again.status, IBV_WC_SUCCESS);
  EXPECT_EQ(again.wr_id, 8u);
  EXPECT_EQ(again.src_qp, a.qp()->qp_num);
  EXPECT_EQ(sniffer.Next(), seen);
  // One bit of it is wrong: the ICRC tells.
  Bytes wrong = seen;
  wrong[70] ^= 1;
  b.Receive(9, 0, kGrhBytes + 100);
  c.Send(wrong);
  EXPECT_EQ(sniffer.Next(), wrong);
  EXPECT_TRUE(StaysEmpty(b.cq(), Milliseconds(20)));
}

TEST(RawPacketFlow, TheTagOfTheRuleComesWithTheCompletion) {
  RawEnd a, b;
  const Flow flow = Rule().Eth(kTo).Tag(0xabcdef).On(b);
  a.Send(MakeFrame({}));
  ibv_cq_ex* cq = reinterpret_cast<ibv_cq_ex*>(b.cq());
  ibv_poll_cq_attr attr = {};
  const auto end = std::chrono::steady_clock::now() + Milliseconds(5000);
  int result = ENOENT;
  while (result == ENOENT && std::chrono::steady_clock::now() < end) {
    result = ibv_start_poll(cq, &attr);
  }
  ASSERT_EQ(result, 0);
  EXPECT_EQ(ibv_wc_read_flow_tag(cq), 0xabcdefu);
  EXPECT_EQ(ibv_wc_read_byte_len(cq), MakeFrame({}).size());
  ibv_end_poll(cq);
}

TEST(RawPacketFlow, DroppedFramesAreCountedAndGoNowhereElse) {
  RawEnd a, b, c;
  ibv_counters_init_attr init = {};
  ibv_counters* counters = ibv_create_counters(b.context(), &init);
  ASSERT_NE(counters, nullptr);
  ibv_counter_attach_attr attach = {IBV_COUNTER_PACKETS, 1, 0};
  ASSERT_EQ(ibv_attach_counters_point_flow(counters, &attach, nullptr), 0);
  attach = {IBV_COUNTER_BYTES, 0, 0};
  ASSERT_EQ(ibv_attach_counters_point_flow(counters, &attach, nullptr), 0);
  Flow drop = Rule(IBV_FLOW_ATTR_NORMAL, 1).Eth(kTo).Drop().Count(counters).On(b);
  const Flow later = Rule(IBV_FLOW_ATTR_NORMAL, 2).Eth(kTo).On(c);
  EXPECT_EQ(ibv_attach_counters_point_flow(counters, &attach, nullptr), EBUSY);
  const Bytes frame = MakeFrame({});
  for (int i = 0; i < 3; ++i) a.Send(frame);
  EXPECT_TRUE(StaysEmpty(c.cq(), Milliseconds(20)));
  uint64_t values[2] = {};
  EXPECT_EQ(ibv_read_counters(counters, values, 1, 0), EINVAL);
  ASSERT_EQ(ibv_read_counters(counters, values, 2, 0), 0);
  EXPECT_EQ(values[1], 3u);
  EXPECT_EQ(values[0], 3 * frame.size());
  EXPECT_EQ(ibv_destroy_counters(counters), EBUSY);
  drop.reset();
  EXPECT_EQ(ibv_destroy_counters(counters), 0);
  a.Send(frame);
  EXPECT_EQ(c.Next(), frame);
}

TEST(RawPacketFlow, WrongRulesAreRefused) {
  RawEnd b;
  RcEnd rc;
  const auto refused = [&](const Rule& rule, int error, ibv_qp* qp = nullptr) {
    EXPECT_EQ(rule.Create(qp != nullptr ? qp : b.qp()), nullptr);
    EXPECT_EQ(errno, error);
  };
  refused(Rule().Eth(kTo), EINVAL, rc.qp());
  Rule wrong_port = Rule().Eth(kTo);
  wrong_port.attr().port = 2;
  refused(wrong_port, EINVAL);
  Rule wrong_mask = Rule().Eth(kTo);
  wrong_mask.attr().comp_mask = 1;
  refused(wrong_mask, EINVAL);
  Rule wrong_type;
  const uint32_t no_type = 4;
  std::memcpy(&wrong_type.attr().type, &no_type, sizeof no_type);
  refused(wrong_type, EINVAL);
  refused(Rule(IBV_FLOW_ATTR_NORMAL, 0, 1 << 3), EINVAL);
  refused(Rule(IBV_FLOW_ATTR_NORMAL, 0, IBV_FLOW_ATTR_FLAGS_EGRESS), EOPNOTSUPP);
  refused(Rule(IBV_FLOW_ATTR_ALL_DEFAULT).Eth(kTo), EINVAL);
  refused(Rule().Eth(kTo).Eth(kTo), EINVAL);
  refused(Rule().Ipv4(1).Ipv6(1), EINVAL);
  refused(Rule().EtherType(0x86dd).Ipv4(1), EINVAL);
  refused(Rule().Port(IBV_FLOW_SPEC_UDP, 1).Port(IBV_FLOW_SPEC_TCP, 1), EINVAL);
  refused(Rule().Port(static_cast<ibv_flow_spec_type>(0x43), 1), EINVAL);
  refused(Rule().Port(IBV_FLOW_SPEC_VXLAN_TUNNEL, 1), EOPNOTSUPP);
  refused(Rule().Tag(1 << 24), EINVAL);
  refused(Rule().Count(nullptr), EINVAL);
  ibv_flow_spec_eth spec = {};
  spec.type = IBV_FLOW_SPEC_ETH;
  spec.size = 8;
  refused(Rule().With(spec), EINVAL);
  spec.size = 0;
  refused(Rule().With(spec), EINVAL);
}

TEST(RawPacketFlow, AQpWithARuleIsNotDestroyed) {
  RawEnd b;
  Flow flow = Rule().Eth(kTo).On(b);
  EXPECT_EQ(ibv_destroy_qp(b.qp()), EBUSY);
  flow.reset();
  b.DestroyQp();
}

TEST(RawPacketQp, WhatIsNoFrameIsRefused) {
  RawEnd a;
  EXPECT_EQ(a.Post(MakeFrame({}), IBV_WR_SEND_WITH_IMM), EINVAL);
  EXPECT_EQ(a.Post(MakeFrame({}), IBV_WR_RDMA_WRITE), EINVAL);
  ASSERT_EQ(a.Post(Bytes(13)), 0);
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_LOC_LEN_ERR);
  // It ends the QP: receives come back.
  EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(a.State(), IBV_QPS_ERR);
  RawEnd b;
  ASSERT_EQ(b.Post(Bytes(4201)), 0);
  EXPECT_EQ(PollOne(b.cq()).status, IBV_WC_LOC_LEN_ERR);
}

TEST(RawPacketQp, InlineFramesAreSent) {
  RawEnd a, b;
  const Flow flow = Rule().Eth(kTo).On(b);
  ASSERT_EQ(a.Post(MakeFrame({}), IBV_WR_SEND, IBV_SEND_INLINE), 0);
  std::memset(a.memory().data() + 33 * kSlot, 0, 100);
  EXPECT_EQ(b.Next(), MakeFrame({}));
}

TEST(RawPacketQp, FramesWithoutAReceiveOrTooLongForItAreLost) {
  RawEnd a, b("verbena0", 0);
  const Flow flow = Rule().Eth(kTo).On(b);
  a.Send(MakeFrame({}));
  EXPECT_TRUE(StaysEmpty(b.cq(), Milliseconds(20)));
  b.Receive(0, 60);
  FrameOptions longer;
  longer.payload = 100;
  a.Send(MakeFrame(longer));
  EXPECT_TRUE(StaysEmpty(b.cq(), Milliseconds(20)));
  FrameOptions fits;
  fits.payload = 10;
  a.Send(MakeFrame(fits));
  EXPECT_EQ(b.Next(), MakeFrame(fits));
}

TEST(RawPacketQp, ARateLimitSpacesTheFrames) {
  RawEnd a, b;
  const Flow flow = Rule().Eth(kTo).On(b);
  ibv_qp_rate_limit_attr limit = {};
  limit.rate_limit = 8000;  // a byte each microsecond
  ASSERT_EQ(ibv_modify_qp_rate_limit(a.qp(), &limit), 0);
  FrameOptions options;
  options.payload = 1000 - 42;
  const Bytes frame = MakeFrame(options);
  ASSERT_EQ(frame.size(), 1000u);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 50; ++i) ASSERT_EQ(a.Post(frame), 0);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(PollOne(a.cq()).status, IBV_WC_SUCCESS);
  // All but a burst of 4200 bytes and the last one had to wait.
  EXPECT_GE(std::chrono::steady_clock::now() - start, Milliseconds(40));
  for (int i = 0; i < 32; ++i) EXPECT_EQ(b.Next(), frame);
  limit.rate_limit = 0;
  EXPECT_EQ(ibv_modify_qp_rate_limit(a.qp(), &limit), 0);
  limit.rate_limit = 200'000'000;
  EXPECT_EQ(ibv_modify_qp_rate_limit(a.qp(), &limit), EINVAL);
  limit = {};
  limit.comp_mask = 1;
  EXPECT_EQ(ibv_modify_qp_rate_limit(a.qp(), &limit), EOPNOTSUPP);
  RcEnd rc;
  limit = {};
  EXPECT_EQ(ibv_modify_qp_rate_limit(rc.qp(), &limit), EOPNOTSUPP);
}

}  // namespace
}  // namespace verbena::testing
