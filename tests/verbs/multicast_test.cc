// SPDX-License-Identifier: Apache-2.0
//
// Multicast over the public verbs interface: who gets a copy, what it looks like,
// what attaching and detaching give.
#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/ud_end.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

constexpr uint32_t kGroupQpn = 0xffffff;

ibv_gid GroupGid(const char* address) {
  ibv_gid gid = {};
  Require(inet_pton(AF_INET6, address, gid.raw) == 1, address);
  return gid;
}

ibv_gid GroupOf(int gid_index) {
  return GroupGid(gid_index == 0 ? "ff15::4791" : "::ffff:239.1.2.3");
}

Owned<ibv_ah> AhToGroup(UdEnd& from, int gid_index, const ibv_gid& group) {
  ibv_ah_attr attr = {};
  attr.is_global = 1;
  attr.port_num = 1;
  attr.grh.sgid_index = static_cast<uint8_t>(gid_index);
  attr.grh.hop_limit = 9;
  attr.grh.dgid = group;
  Owned<ibv_ah> ah(ibv_create_ah(from.pd(), &attr));
  Require(ah != nullptr, "ibv_create_ah");
  return ah;
}

int SendToGroup(UdEnd& from, uint64_t wr_id, ibv_ah* ah, uint32_t bytes, uint32_t qkey = kQkey,
                uint32_t qpn = kGroupQpn) {
  ibv_sge sge = from.memory().sge(32768, bytes);
  ibv_send_wr wr = SendWr(wr_id, IBV_WR_SEND_WITH_IMM);
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.imm_data = htobe32(0x600d);
  wr.wr.ud.ah = ah;
  wr.wr.ud.remote_qpn = qpn;
  wr.wr.ud.remote_qkey = qkey;
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(from.qp(), &wr, &bad);
}

// Attached as long as it lives.
class Membership {
 public:
  Membership(UdEnd& end, const ibv_gid& group) : qp_(end.qp()), group_(group) {
    Require(ibv_attach_mcast(qp_, &group_, 0) == 0, "ibv_attach_mcast");
  }
  ~Membership() { ibv_detach_mcast(qp_, &group_, 0); }
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

 private:
  ibv_qp* qp_;
  ibv_gid group_;
};

uint64_t Counter(const std::string& device, const std::string& name) {
  const Finished answer = VerbenaHere({"counters", "--json"});
  const auto json = nlohmann::json::parse(answer.output, nullptr, false);
  Require(!json.is_discarded(), answer.output);
  return json["devices"][device]["counters"][name].get<uint64_t>();
}

class MulticastTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Networks, MulticastTest, ::testing::Values(1, 0), [](const auto& info) {
  return info.param == 0 ? std::string("Ipv6") : std::string("Ipv4");
});

// IBTA Vol 1, 10.5.2.1: a copy for each QP, also of the sender's own NIC.
TEST_P(MulticastTest, EveryMemberOnEveryNicGetsACopyAndTheSenderToo) {
  const int index = GetParam();
  const ibv_gid group = GroupOf(index);
  UdEnd sender("verbena0", index);
  UdEnd near("verbena0", index);
  UdEnd far("verbena1", index);
  UdEnd far_too("verbena1", index);
  UdEnd stranger("verbena1", index);
  std::vector<UdEnd*> members = {&sender, &near, &far, &far_too};
  std::vector<std::unique_ptr<Membership>> memberships;
  for (UdEnd* member : members) {
    memberships.push_back(std::make_unique<Membership>(*member, group));
    member->Receive(5, 0, kGrhBytes + 900);
  }
  stranger.Receive(5, 0, kGrhBytes + 900);
  const uint64_t sent_before = Counter("verbena0", "multicast_xmit_packets");
  const uint64_t rcv_before = Counter("verbena1", "multicast_rcv_packets");
  const auto ah = AhToGroup(sender, index, group);
  FillPattern(sender.memory().bytes().subspan(32768, 900), 3);
  ASSERT_EQ(SendToGroup(sender, 1, ah.get(), 900), 0);
  bool sent = false;
  bool own = false;
  for (int i = 0; i < 2; ++i) {
    const ibv_wc wc = PollOne(sender.cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    (wc.opcode == IBV_WC_SEND ? sent : own) = true;
  }
  EXPECT_TRUE(sent && own);
  for (UdEnd* member : members) {
    if (member != &sender) {
      const ibv_wc got = PollOne(member->cq());
      ASSERT_EQ(got.status, IBV_WC_SUCCESS) << Describe(got);
      EXPECT_EQ(got.byte_len, kGrhBytes + 900);
      EXPECT_EQ(got.src_qp, sender.qp()->qp_num);
      EXPECT_EQ(got.qp_num, member->qp()->qp_num);
      EXPECT_EQ(be32toh(got.imm_data), 0x600du);
    }
    EXPECT_EQ(PatternMismatch(member->memory().bytes().subspan(kGrhBytes, 900), 3), std::nullopt);
    // The group's address stands in the header that arrives.
    const uint8_t* header = member->memory().data();
    const ibv_gid from = sender.gid();
    if (index == 0) {
      EXPECT_EQ(std::memcmp(header + 8, from.raw, 16), 0);
      EXPECT_EQ(std::memcmp(header + 24, group.raw, 16), 0);
    } else {
      EXPECT_EQ(std::memcmp(header + 32, from.raw + 12, 4), 0);
      EXPECT_EQ(std::memcmp(header + 36, group.raw + 12, 4), 0);
    }
  }
  EXPECT_TRUE(StaysEmpty(stranger.cq(), Milliseconds(50)));
  EXPECT_EQ(Counter("verbena0", "multicast_xmit_packets"), sent_before + 1);
  EXPECT_EQ(Counter("verbena1", "multicast_rcv_packets"), rcv_before + 1)
      << "one packet, whatever number of QPs takes it";
}

TEST_P(MulticastTest, DetachedQpGetsNothingMoreAndAGroupWithoutMembersSwallows) {
  const int index = GetParam();
  const ibv_gid group = GroupOf(index);
  UdEnd sender("verbena0", index);
  UdEnd member("verbena1", index);
  const auto ah = AhToGroup(sender, index, group);
  member.Receive(1, 0, 256);
  member.Receive(2, 256, 256);
  ASSERT_EQ(ibv_attach_mcast(member.qp(), &group, 0), 0);
  ASSERT_EQ(SendToGroup(sender, 1, ah.get(), 8), 0);
  EXPECT_EQ(PollOne(member.cq()).wr_id, 1u);
  ASSERT_EQ(ibv_detach_mcast(member.qp(), &group, 0), 0);
  ASSERT_EQ(SendToGroup(sender, 2, ah.get(), 8), 0);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(PollOne(sender.cq()).status, IBV_WC_SUCCESS);
  EXPECT_TRUE(StaysEmpty(member.cq(), Milliseconds(50)));
}

TEST(Multicast, EachMemberChecksQkeyAndReceivesForItself) {
  const ibv_gid group = GroupOf(1);
  UdEnd sender;
  UdEnd good;
  UdEnd other_key;
  UdEnd small;
  UdEnd none("verbena1");
  const Membership memberships[] = {
      {good, group}, {other_key, group}, {small, group}, {none, group}};
  ibv_qp_attr attr = {};
  attr.qkey = kQkey + 7;
  ASSERT_EQ(ibv_modify_qp(other_key.qp(), &attr, IBV_QP_QKEY), 0);
  good.Receive(1, 0, 256);
  other_key.Receive(1, 0, 256);
  small.Receive(1, 0, kGrhBytes + 99);
  const auto ah = AhToGroup(sender, 1, group);
  ASSERT_EQ(SendToGroup(sender, 1, ah.get(), 100), 0);
  EXPECT_EQ(PollOne(good.cq()).status, IBV_WC_SUCCESS);
  EXPECT_TRUE(StaysEmpty(other_key.cq(), Milliseconds(30)));
  EXPECT_TRUE(StaysEmpty(small.cq(), Milliseconds(1)));
  ASSERT_EQ(SendToGroup(sender, 1, ah.get(), 50, kQkey + 7), 0);
  EXPECT_EQ(PollOne(other_key.cq()).status, IBV_WC_SUCCESS);
}

// The MAC address of IPv4 groups has only 23 bits of theirs.
TEST(Multicast, GroupsWithOneMacAddressAreNotMixedUp) {
  const ibv_gid first = GroupGid("::ffff:239.1.2.3");
  const ibv_gid second = GroupGid("::ffff:239.129.2.3");
  UdEnd sender;
  UdEnd a;
  UdEnd b("verbena1");
  const Membership memberships[] = {{a, first}, {b, second}};
  a.Receive(1, 0, 256);
  b.Receive(1, 0, 256);
  const auto ah = AhToGroup(sender, 1, second);
  ASSERT_EQ(SendToGroup(sender, 1, ah.get(), 8), 0);
  EXPECT_EQ(PollOne(b.cq()).status, IBV_WC_SUCCESS);
  EXPECT_TRUE(StaysEmpty(a.cq(), Milliseconds(30)));
}

TEST(Multicast, AQpThatBlocksItsOwnGetsThoseOfOthersOnly) {
  const ibv_gid group = GroupOf(1);
  UdEnd blocking("verbena0", 1, IBV_QP_CREATE_BLOCK_SELF_MCAST_LB);
  UdEnd near;
  const Membership memberships[] = {{blocking, group}, {near, group}};
  for (UdEnd* end : {&blocking, &near}) {
    end->Receive(1, 0, 256);
    end->Receive(2, 256, 256);
  }
  const auto ah = AhToGroup(blocking, 1, group);
  ASSERT_EQ(SendToGroup(blocking, 7, ah.get(), 8), 0);
  EXPECT_EQ(PollOne(near.cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(blocking.cq()).opcode, IBV_WC_SEND);
  EXPECT_TRUE(StaysEmpty(blocking.cq(), Milliseconds(50)));
  const auto back = AhToGroup(near, 1, group);
  ASSERT_EQ(SendToGroup(near, 8, back.get(), 9), 0);
  EXPECT_EQ(PollOne(blocking.cq()).byte_len, kGrhBytes + 9);
}

TEST(Multicast, DatagramToAQpByAGroupAddressOrToTheGroupByAnAddressIsDropped) {
  const ibv_gid group = GroupOf(1);
  UdEnd sender;
  UdEnd member;
  const Membership membership(member, group);
  member.Receive(1, 0, 256);
  const auto to_group = AhToGroup(sender, 1, group);
  ASSERT_EQ(SendToGroup(sender, 1, to_group.get(), 8, kQkey, member.qp()->qp_num), 0);
  const auto to_one = sender.AhTo(member);
  ASSERT_EQ(SendToGroup(sender, 2, to_one.get(), 8), 0);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(PollOne(sender.cq()).status, IBV_WC_SUCCESS);
  EXPECT_TRUE(StaysEmpty(member.cq(), Milliseconds(50)));
}

TEST(Multicast, BothFormsOfAnIpv4GroupNameIt) {
  const ibv_gid mapped = GroupGid("::ffff:239.7.7.7");
  const ibv_gid other = GroupGid("ff0e::ffff:239.7.7.7");
  UdEnd sender;
  UdEnd member;
  ASSERT_EQ(ibv_attach_mcast(member.qp(), &other, 0), 0);
  member.Receive(1, 0, 256);
  const auto ah = AhToGroup(sender, 1, mapped);
  ASSERT_EQ(SendToGroup(sender, 1, ah.get(), 8), 0);
  EXPECT_EQ(PollOne(member.cq()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(ibv_detach_mcast(member.qp(), &mapped, 0), 0);
}

// ibv_attach_mcast(3), ibv_destroy_qp(3); errno values as Linux gives them.
TEST(Multicast, AttachAndDetachAnswerAsLinuxDoes) {
  const ibv_gid group = GroupOf(1);
  UdEnd end;
  RcEnd rc;
  EXPECT_EQ(ibv_attach_mcast(rc.qp(), &group, 0), EINVAL) << "no UD QP";
  const ibv_gid own = end.gid();
  EXPECT_EQ(ibv_attach_mcast(end.qp(), &own, 0), EINVAL) << "no group";
  EXPECT_EQ(ibv_detach_mcast(end.qp(), &group, 0), EINVAL) << "not attached";
  EXPECT_EQ(ibv_attach_mcast(end.qp(), &group, 0), 0);
  EXPECT_EQ(ibv_attach_mcast(end.qp(), &group, 0), 0) << "twice is once";
  EXPECT_EQ(ibv_destroy_qp(end.qp()), EBUSY);
  EXPECT_EQ(ibv_detach_mcast(end.qp(), &group, 0), 0);
  EXPECT_EQ(ibv_detach_mcast(end.qp(), &group, 0), EINVAL);
}

TEST(Multicast, AGroupTakesAsManyQpsAsTheDeviceSays) {
  const ibv_gid group = GroupGid("::ffff:239.9.9.9");
  UdEnd first;
  ibv_device_attr device = {};
  ASSERT_EQ(ibv_query_device(first.context(), &device), 0);
  EXPECT_GE(device.max_mcast_grp, 1024);
  ASSERT_GE(device.max_mcast_qp_attach, 56);  // what rxe has
  EXPECT_GE(device.max_total_mcast_qp_attach, device.max_mcast_qp_attach);
  std::vector<Owned<ibv_qp>> qps;
  int attached = 0;
  for (int i = 0; i <= device.max_mcast_qp_attach; ++i) {
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = first.cq();
    init.qp_type = IBV_QPT_UD;
    init.cap = {.max_send_wr = 1,
                .max_recv_wr = 1,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = 0};
    qps.emplace_back(ibv_create_qp(first.pd(), &init));
    ASSERT_NE(qps.back(), nullptr);
    const int error = ibv_attach_mcast(qps.back().get(), &group, 0);
    if (error != 0) {
      EXPECT_EQ(error, ENOMEM);
      break;
    }
    ++attached;
  }
  EXPECT_EQ(attached, device.max_mcast_qp_attach);
  // Another group has room, and so has this one again when one leaves.
  const ibv_gid other = GroupGid("::ffff:239.9.9.10");
  const Membership elsewhere(first, other);
  EXPECT_EQ(ibv_attach_mcast(first.qp(), &group, 0), ENOMEM);
  ASSERT_EQ(ibv_detach_mcast(qps[0].get(), &group, 0), 0);
  const Membership again(first, group);
  for (size_t i = 1; i < qps.size(); ++i) ibv_detach_mcast(qps[i].get(), &group, 0);
}

// Is a member until it is killed; says when it is ready and what it got.
VERBENA_ROLE(member) {
  UdEnd end(arguments.at(0));
  const ibv_gid group = GroupOf(1);
  Require(ibv_attach_mcast(end.qp(), &group, 0) == 0, "ibv_attach_mcast");
  for (uint64_t i = 0; i < 8; ++i) end.Receive(i, 0, 256);
  printf("ready\n");
  fflush(stdout);
  while (true) {
    const ibv_wc wc = PollOne(end.cq());
    printf("got %u bytes, status %d\n", wc.byte_len, static_cast<int>(wc.status));
    fflush(stdout);
  }
}

TEST(Multicast, OtherProcessesAreMembersUntilTheyDie) {
  const ibv_gid group = GroupOf(1);
  UdEnd sender;
  UdEnd here("verbena1");
  const Membership membership(here, group);
  here.Receive(1, 0, 256);
  here.Receive(2, 0, 256);
  auto first = std::make_unique<Process>(RoleProcess("member", {"verbena0"}));
  Process second(RoleProcess("member", {"verbena1"}));
  ASSERT_TRUE(first->WaitForOutput("ready", Milliseconds(20000)));
  ASSERT_TRUE(second.WaitForOutput("ready", Milliseconds(20000)));
  const auto ah = AhToGroup(sender, 1, group);
  ASSERT_EQ(SendToGroup(sender, 1, ah.get(), 30), 0);
  EXPECT_TRUE(first->WaitForOutput("got 70 bytes, status 0", Milliseconds(20000)));
  EXPECT_TRUE(second.WaitForOutput("got 70 bytes, status 0", Milliseconds(20000)));
  EXPECT_EQ(PollOne(here.cq()).wr_id, 1u);
  first.reset();  // killed
  ASSERT_EQ(SendToGroup(sender, 2, ah.get(), 31), 0);
  EXPECT_TRUE(second.WaitForOutput("got 71 bytes, status 0", Milliseconds(20000)));
  EXPECT_EQ(PollOne(here.cq()).wr_id, 2u);
}

}  // namespace
}  // namespace verbena::testing
