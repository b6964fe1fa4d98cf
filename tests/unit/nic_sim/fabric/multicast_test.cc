// SPDX-License-Identifier: Apache-2.0
//
// Multicast groups in the fabric: who gets a copy, faults on one of the copies,
// limits; and the inbox of QP1.
#include <gtest/gtest.h>

#include <cerrno>
#include <vector>

#include "nic_sim/fabric/fabric.h"
#include "tests/unit/nic_sim/fabric/fabric_fixture.h"

namespace verbena::nic {
namespace {

using Psns = std::vector<uint32_t>;
using transport::Gid;

constexpr uint32_t kGroupAddress = 0xef010203;  // 239.1.2.3
const Gid kGroupGid = Gid::FromIpv4(kGroupAddress);

PacketSpec ToGroup(uint32_t psn, uint32_t group = kGroupAddress) {
  return {
      .destination = group, .opcode = 0x64, .dest_qpn = 0xffffff, .psn = psn, .group_mac = true};
}

class MulticastTest : public FabricTest {
 protected:
  Psns ReceiveOf(PortId port, ShardId shard) {
    Psns psns;
    rte_mbuf* packet = nullptr;
    while (fabric_->Receive(port, {&packet, 1}, shard) == 1) {
      psns.push_back(MetaOf(packet).psn_offset);
      rte_pktmbuf_free(packet);
    }
    return psns;
  }
};

TEST_F(MulticastTest, EachPortWithMembersGetsOneCopyTheSendersToo) {
  EXPECT_EQ(fabric_->AttachGroup(0, 0, kGroupGid), 0);
  EXPECT_EQ(fabric_->AttachGroup(1, 0, kGroupGid), 0);
  EXPECT_EQ(fabric_->AttachGroup(1, 0, kGroupGid), 0);  // another QP
  Send(ToGroup(1));
  Send(ToGroup(2));
  const auto first = Receive(0);
  const auto second = Receive(1);
  ASSERT_EQ(first.size(), 2u);
  ASSERT_EQ(second.size(), 2u);
  EXPECT_EQ(first[0].frame, FrameOfSpec(ToGroup(1)));
  EXPECT_EQ(second[1].frame, FrameOfSpec(ToGroup(2)));
  EXPECT_TRUE(second[0].meta.trusted);
  EXPECT_EQ(fabric_->counters(0).multicast_xmit_packets, 2u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_packets, 2u);
  EXPECT_EQ(fabric_->counters(0).unicast_xmit_packets, 0u);
  for (PortId port = 0; port < 2; ++port) {
    EXPECT_EQ(fabric_->counters(port).multicast_rcv_packets, 2u);
    EXPECT_EQ(fabric_->counters(port).port_rcv_packets, 2u);
    EXPECT_EQ(fabric_->counters(port).unicast_rcv_packets, 0u);
  }
}

TEST_F(MulticastTest, APacketToAGroupWithoutMembersIsSentAndGone) {
  Send(ToGroup(1));
  EXPECT_EQ(fabric_->AttachGroup(1, 0, kGroupGid), 0);
  fabric_->DetachGroup(1, 0, kGroupGid);
  Send(ToGroup(2));
  EXPECT_EQ(Receive(0).size() + Receive(1).size(), 0u);
  EXPECT_EQ(fabric_->counters(0).multicast_xmit_packets, 2u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_discards, 0u);
}

TEST_F(MulticastTest, EachShardOfAPortGetsACopyAndOthersNothing) {
  for (ShardId shard = 1; shard < 4; ++shard) fabric_->OpenInbox(shard, pool(), nullptr);
  fabric_->AttachGroup(1, 1, kGroupGid);
  fabric_->AttachGroup(1, 3, kGroupGid);
  Send(ToGroup(7));
  EXPECT_EQ(ReceiveOf(1, 1), Psns{7});
  EXPECT_EQ(ReceiveOf(1, 3), Psns{7});
  EXPECT_EQ(ReceiveOf(1, 0), Psns{});
  EXPECT_EQ(ReceiveOf(1, 2), Psns{});
  EXPECT_EQ(fabric_->counters(1).multicast_rcv_packets, 1u);
}

TEST_F(MulticastTest, AFaultOnOneReceivingSideLeavesTheOthers) {
  fabric_->AttachGroup(0, 0, kGroupGid);
  fabric_->AttachGroup(1, 0, kGroupGid);
  const uint32_t rule = AddRule("drop dev=verbena1 dir=rx nth=1");
  Send(ToGroup(1));
  Send(ToGroup(2));
  EXPECT_EQ(ReceivePsns(0), (Psns{1, 2}));
  EXPECT_EQ(ReceivePsns(1), Psns{2});
  EXPECT_EQ(Hits(rule), 1u);
}

TEST_F(MulticastTest, AFaultWhereItIsSentMeetsAllAndADamagedCopyIsOfOneOnly) {
  fabric_->AttachGroup(0, 0, kGroupGid);
  fabric_->AttachGroup(1, 0, kGroupGid);
  AddRule("drop dev=verbena0 dir=tx nth=1");
  AddRule("corrupt dev=verbena1 dir=rx nth=1");
  Send(ToGroup(1));
  Send(ToGroup(2));
  const auto first = Receive(0);
  const auto second = Receive(1);
  ASSERT_EQ(first.size(), 1u);
  ASSERT_EQ(second.size(), 1u);
  EXPECT_TRUE(first[0].meta.trusted);
  EXPECT_FALSE(second[0].meta.trusted);
  EXPECT_FALSE(IcrcIsRight(second[0].frame));
}

TEST_F(MulticastTest, LimitsArePerPort) {
  const auto group = [](uint32_t n) { return Gid::FromIpv4(0xef000000 + n); };
  // Of a group: 4; groups: 3; attachments: 6.
  for (int i = 0; i < 4; ++i) EXPECT_EQ(fabric_->AttachGroup(0, 0, group(1)), 0);
  EXPECT_EQ(fabric_->AttachGroup(0, 0, group(1)), ENOMEM);
  EXPECT_EQ(fabric_->AttachGroup(0, 0, group(2)), 0);
  EXPECT_EQ(fabric_->AttachGroup(0, 0, group(3)), 0);
  EXPECT_EQ(fabric_->AttachGroup(0, 0, group(2)), ENOMEM);
  EXPECT_EQ(fabric_->AttachGroup(1, 0, group(1)), 0) << "another port";
  fabric_->DetachGroup(0, 0, group(1));
  EXPECT_EQ(fabric_->AttachGroup(0, 0, group(4)), ENOMEM) << "a fourth group";
  fabric_->DetachGroup(0, 0, group(3));
  EXPECT_EQ(fabric_->AttachGroup(0, 0, group(4)), 0);
  // What was never attached changes nothing.
  fabric_->DetachGroup(0, 5, group(1));
  fabric_->DetachGroup(0, 0, group(9));
  EXPECT_EQ(fabric_->AttachGroup(0, 0, group(1)), 0);
  EXPECT_EQ(fabric_->AttachGroup(0, 0, group(1)), ENOMEM);
}

class WakeCounter final : public InboxOwner {
 public:
  void OnForeignPackets() override { ++wakes; }
  int wakes = 0;
};

TEST_F(MulticastTest, PacketsToQp1HaveAnInboxOfTheirOwnThatIsBounded) {
  const PacketSpec to_qp1 = {.opcode = 0x64, .dest_qpn = 1, .psn = 5};
  Send(to_qp1);
  EXPECT_EQ(ReceivePsns(1), Psns{5}) << "nobody has opened it";
  WakeCounter owner;
  fabric_->OpenManagementInbox(&owner);
  Send(to_qp1);
  EXPECT_EQ(owner.wakes, 1);
  EXPECT_EQ(ReceiveOf(1, 0), Psns{});
  EXPECT_TRUE(fabric_->has_received(1, kManagementInbox));
  EXPECT_EQ(ReceiveOf(1, kManagementInbox), Psns{5});
  uint32_t sent = 0;
  for (; sent < kMaxForeignPackets + 10 && rte_mempool_avail_count(pool()) > 2; ++sent) {
    Send(to_qp1);
  }
  EXPECT_EQ(Drops(1, DropReason::queue_full), sent - std::min<size_t>(sent, kMaxForeignPackets));
  fabric_->CloseInbox(kManagementInbox);
  Send(to_qp1);
  EXPECT_EQ(ReceivePsns(1), Psns{5});
}

TEST_F(MulticastTest, RulesFindMessagesOfTheConnectionManager) {
  fabric_->AttachGroup(1, 0, kGroupGid);
  const uint32_t rule = AddRule("drop mad=rep");
  const auto send = [this](uint8_t management_class, uint8_t attribute, uint32_t qpn) {
    rte_mbuf* packet = NewPacket({.opcode = 0x64, .dest_qpn = qpn, .payload_bytes = 8 + 256});
    std::byte* mad = FrameOf(packet) + 14 + 20 + 8 + 12 + 8;
    mad[1] = std::byte{management_class};
    mad[16] = std::byte{0};
    mad[17] = std::byte{attribute};
    fabric_->Transmit(0, {&packet, 1}, now_);
    return Receive(1).size();
  };
  EXPECT_EQ(send(7, 0x10, 1), 1u) << "REQ";
  EXPECT_EQ(send(7, 0x13, 1), 0u) << "REP";
  EXPECT_EQ(send(3, 0x13, 1), 1u) << "another class";
  EXPECT_EQ(send(7, 0x13, 0x22), 1u) << "a user's datagram";
  EXPECT_EQ(Hits(rule), 1u);
}

}  // namespace
}  // namespace verbena::nic
