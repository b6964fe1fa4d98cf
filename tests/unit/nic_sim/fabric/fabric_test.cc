// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/fabric.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/unit/nic_sim/fabric/fabric_fixture.h"

namespace verbena::nic {
namespace {

using Psns = std::vector<uint32_t>;
using transport::Gid;

TEST_F(FabricTest, DeliversByIpv4AddressInOrder) {
  SendPsns(0, 100);
  EXPECT_FALSE(fabric_->has_received(0));
  EXPECT_TRUE(fabric_->has_received(1));
  const Psns psns = ReceivePsns(1);
  ASSERT_EQ(psns.size(), 100u);
  for (uint32_t i = 0; i < 100; ++i) EXPECT_EQ(psns[i], i);
  EXPECT_FALSE(fabric_->has_received(1));
}

TEST_F(FabricTest, AlternatingDestinationsAreNotMixedUp) {
  for (uint32_t i = 0; i < 6; ++i) {
    Send({.destination = i % 2 == 0 ? kAddress0 : kAddress1, .psn = i});
    Send({.destination = i % 2 == 0 ? kAddress0 : kAddress1, .ipv6 = true, .psn = 100 + i});
  }
  EXPECT_EQ(ReceivePsns(0), (Psns{0, 100, 2, 102, 4, 104}));
  EXPECT_EQ(ReceivePsns(1), (Psns{1, 101, 3, 103, 5, 105}));
}

TEST_F(FabricTest, DeliversByLinkLocalIpv6AddressAndThroughVlanTags) {
  Send({.ipv6 = true, .psn = 1});
  Send({.vlan = true, .psn = 2});
  Send({.ipv6 = true, .vlan = true, .psn = 3});
  EXPECT_EQ(ReceivePsns(1), (Psns{1, 2, 3}));
}

TEST_F(FabricTest, LoopbackOnOnePortTakesTheSameWay) {
  Send({.destination = kAddress0, .psn = 5});
  EXPECT_EQ(ReceivePsns(0), Psns{5});
  EXPECT_EQ(fabric_->counters(0).port_xmit_packets, 1u);
  EXPECT_EQ(fabric_->counters(0).port_rcv_packets, 1u);
}

TEST_F(FabricTest, CountsPacketsAndDataInUnitsOfLinux) {
  Send({.payload_bytes = 64});                 // IPv4 packet: 20 + 8 + 12 + 64 + 4 = 108 bytes
  Send({.ipv6 = true, .payload_bytes = 0});    // 40 + 8 + 12 + 4 = 64 bytes
  Send({.vlan = true, .payload_bytes = 256});  // 300 bytes; the tag does not count
  for (PortId port = 0; port < 2; ++port) {
    const PortCounters& counters = fabric_->counters(port);
    EXPECT_EQ(counters.port_xmit_packets, port == 0 ? 3u : 0u);
    EXPECT_EQ(counters.unicast_xmit_packets, port == 0 ? 3u : 0u);
    EXPECT_EQ(counters.port_xmit_data, port == 0 ? 27u + 16u + 75u : 0u);
    EXPECT_EQ(counters.port_rcv_packets, port == 1 ? 3u : 0u);
    EXPECT_EQ(counters.unicast_rcv_packets, port == 1 ? 3u : 0u);
    EXPECT_EQ(counters.port_rcv_data, port == 1 ? 27u + 16u + 75u : 0u);
  }
  Receive(1);
}

TEST_F(FabricTest, PacketToNobodyIsDroppedAndCounted) {
  Send({.destination = 0x7f580009});
  Send({.destination = 0x7f580009});
  Send({.destination = 9, .ipv6 = true});
  Send({.destination = 0});  // the empty address cache must not match
  EXPECT_EQ(Drops(0, DropReason::no_route), 4u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_discards, 4u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_packets, 0u);
  EXPECT_FALSE(fabric_->has_received(0));
  EXPECT_FALSE(fabric_->has_received(1));
}

TEST_F(FabricTest, FrameThatIsNoIpIsDroppedAndCountedAtEveryLength) {
  const uint16_t whole = static_cast<uint16_t>(FrameOfSpec({.payload_bytes = 0}).size());
  for (uint16_t length = 0; length < whole; ++length) {
    rte_mbuf* packet = NewPacket({.payload_bytes = 0});
    rte_pktmbuf_trim(packet, static_cast<uint16_t>(whole - length));
    fabric_->Transmit(0, {&packet, 1}, now_);
  }
  rte_mbuf* arp = NewPacket({});
  FrameOf(arp)[13] = std::byte{6};
  fabric_->Transmit(0, {&arp, 1}, now_);
  EXPECT_EQ(Drops(0, DropReason::malformed), whole + 1u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_discards, whole + 1u);
  EXPECT_EQ(Receive(1).size(), 0u);
}

TEST_F(FabricTest, ResolvesAddressesToMacs) {
  ASSERT_NE(fabric_->Resolve(Gid::FromIpv4(kAddress1)), nullptr);
  EXPECT_EQ(*fabric_->Resolve(Gid::FromIpv4(kAddress1)), fabric_->config(1).mac);
  EXPECT_EQ(*fabric_->Resolve(fabric_->config(0).gids[0]), fabric_->config(0).mac);
  EXPECT_EQ(fabric_->Resolve(Gid::FromIpv4(0x7f580009)), nullptr);
  EXPECT_EQ(fabric_->Resolve(Gid()), nullptr);
}

TEST_F(FabricTest, AddressOfAPortThatIsAddedLaterIsFound) {
  Send({.destination = 0x7f580003});
  PortConfig config;
  config.device = "verbena2";
  config.gids = {Gid::FromIpv4(0x7f580003)};
  EXPECT_EQ(fabric_->AddPort(config), 2);
  EXPECT_EQ(fabric_->port_count(), 3u);
  Send({.destination = 0x7f580003, .psn = 1});
  EXPECT_EQ(ReceivePsns(2), Psns{1});
}

TEST_F(FabricTest, PacketInsideTheDaemonIsTrustedWithoutIcrc) {
  Send({});
  const Received received = Receive(1).at(0);
  EXPECT_TRUE(received.meta.trusted);
  EXPECT_FALSE(received.meta.icrc_present);
}

TEST_F(FabricTest, StrictComputesTheIcrcAndTrustsNobody) {
  MakeFabric(true);
  Send({});
  Send({.ipv6 = true});
  Send({.vlan = true, .payload_bytes = 4096});
  for (const Received& received : Receive(1)) {
    EXPECT_FALSE(received.meta.trusted);
    EXPECT_TRUE(received.meta.icrc_present);
    EXPECT_TRUE(IcrcIsRight(received.frame));
  }
}

TEST_F(FabricTest, ReceiveTakesAtMostWhatFits) {
  SendPsns(0, 5);
  rte_mbuf* burst[3];
  EXPECT_EQ(fabric_->Receive(1, burst), 3u);
  rte_pktmbuf_free_bulk(burst, 3);
  EXPECT_EQ(ReceivePsns(1), (Psns{3, 4}));
  EXPECT_EQ(fabric_->Receive(1, burst), 0u);
}

TEST_F(FabricTest, ReceiveQueueHoldsTheWholePool) {
  const uint32_t all = rte_mempool_avail_count(pool());
  SendPsns(0, all);
  EXPECT_EQ(rte_mempool_avail_count(pool()), 0u);
  EXPECT_EQ(Receive(1).size(), all);
  EXPECT_EQ(Drops(1, DropReason::queue_full), 0u);
}

TEST_F(FabricTest, PacketsInQueuesAreFreedWithTheFabric) {
  SendPsns(0, 10);
  AddRule("delay us=100");
  SendPsns(10, 10);
  fabric_.reset();  // TearDown compares the pool
}

}  // namespace
}  // namespace verbena::nic
