// SPDX-License-Identifier: Apache-2.0
//
// A fabric port that is joined to a netdev, played by a list of frames.
#include "nic_sim/port/wire.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <vector>

#include "nic_sim/fabric/fabric.h"
#include "tests/unit/nic_sim/fabric/fabric_fixture.h"
#include "transport/base/byteorder.h"

namespace verbena::nic {
namespace {

using Frame = std::vector<uint8_t>;
using transport::Duration;
using transport::Gid;
using transport::MacAddress;
using transport::Pmtu;

constexpr uint32_t kOwn = 0x0a000001;   // 10.0.0.1, of port 0 outside
constexpr uint32_t kPeer = 0x0a000002;  // 10.0.0.2
const Frame kOwnMac = {0x02, 0x56, 0, 0, 0, 1};
const Frame kPeerMac = {0x02, 0x99, 0, 0, 0, 2};

class FakePort final : public FramePort {
 public:
  explicit FakePort(rte_mempool* pool) : pool_(pool) {}

  size_t Receive(std::span<rte_mbuf*> out) override {
    size_t count = 0;
    while (count < out.size() && !incoming.empty()) {
      rte_mbuf* packet = rte_pktmbuf_alloc(pool_);
      const Frame& frame = incoming.front();
      std::memcpy(rte_pktmbuf_append(packet, static_cast<uint16_t>(frame.size())), frame.data(),
                  frame.size());
      incoming.pop_front();
      out[count++] = packet;
    }
    return count;
  }
  size_t Send(std::span<rte_mbuf*> frames) override {
    size_t count = 0;
    for (; count < frames.size() && room != 0; ++count, --room) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(FrameOf(frames[count]));
      sent.emplace_back(bytes, bytes + frames[count]->data_len);
      rte_pktmbuf_free(frames[count]);
    }
    return count;
  }
  uint32_t mtu() const override { return mtu_bytes; }
  bool up() const override { return is_up; }
  void Refresh() override {}
  int wake_fd() const override { return -1; }

  std::deque<Frame> incoming;
  std::vector<Frame> sent;
  size_t room = SIZE_MAX;
  uint32_t mtu_bytes = 4200;
  bool is_up = true;

 private:
  rte_mempool* pool_;
};

class WireTest : public FabricTest {
 protected:
  void SetUp() override {
    FabricTest::SetUp();
    auto port = std::make_unique<FakePort>(pool());
    port_ = port.get();
    const IpHost::Config config{.mac = MacAddress::FromUint64(0x025600000001),
                                .addresses = {{*ParseInterfaceAddress("10.0.0.1/24"), false}},
                                .gateways = {}};
    fabric_->AttachWire(0, std::make_unique<Wire>(config, std::move(port), pool()));
    port_->sent.clear();  // the announcement
  }

  void SendOut(uint32_t psn, uint32_t destination = kPeer) {
    Send({.source = kOwn, .destination = destination, .psn = psn});
  }
  // The peer answers the ARP request that is the last frame sent.
  void AnswerArp() {
    Frame reply = kOwnMac;
    for (const Frame& part : {kPeerMac, Frame{8, 6, 0, 1, 8, 0, 6, 4, 0, 2}, kPeerMac,
                              Frame{10, 0, 0, 2}, kOwnMac, Frame{10, 0, 0, 1}}) {
      reply.insert(reply.end(), part.begin(), part.end());
    }
    port_->incoming.push_back(reply);
    fabric_->PollWires(now_);
  }
  void Resolve() {
    fabric_->Prepare(0, Gid::FromIpv4(kPeer), now_);
    AnswerArp();
    port_->sent.clear();
  }
  // A frame of the peer with a right ICRC.
  Frame FromPeer(uint32_t psn, uint32_t source = kPeer) {
    Frame frame = FrameOfSpec({.source = source, .destination = kOwn, .psn = psn});
    std::copy(kOwnMac.begin(), kOwnMac.end(), frame.begin());
    std::copy(kPeerMac.begin(), kPeerMac.end(), frame.begin() + 6);
    const uint32_t icrc = SlowIcrc(frame);
    std::memcpy(&frame[frame.size() - 4], &icrc, 4);
    return frame;
  }
  std::vector<uint32_t> SentPsns() const {
    std::vector<uint32_t> psns;
    for (const Frame& frame : port_->sent) {
      if (frame[12] != 8 || frame[13] != 0) continue;
      psns.push_back(frame[51] << 16 | frame[52] << 8 | frame[53]);
    }
    return psns;
  }

  FakePort* port_ = nullptr;
};

TEST_F(WireTest, PacketsWaitForTheAnswerAndGoInOrderWithItsMacAndAnIcrc) {
  for (uint32_t psn = 0; psn < 5; ++psn) SendOut(psn);
  ASSERT_EQ(port_->sent.size(), 1u) << "one question for all";
  EXPECT_EQ(port_->sent[0][13], 6) << "ARP";
  port_->sent.clear();
  AnswerArp();
  EXPECT_EQ(SentPsns(), (std::vector<uint32_t>{0, 1, 2, 3, 4}));
  for (const Frame& frame : port_->sent) {
    EXPECT_EQ(Frame(frame.begin(), frame.begin() + 6), kPeerMac);
    EXPECT_TRUE(IcrcIsRight(frame));
  }
  EXPECT_EQ(fabric_->counters(0).port_xmit_packets, 5u);
}

TEST_F(WireTest, WhatWaitsIsBoundedAndLostWithoutAnAnswer) {
  for (uint32_t psn = 0; psn < Wire::kMaxWaitingPerHop + 3; ++psn) SendOut(psn);
  EXPECT_EQ(Drops(0, DropReason::unresolved), 3u);
  for (int i = 0; i < 100 && !fabric_->next_deadline().IsNever(); ++i) {
    now_ = fabric_->next_deadline();
    fabric_->HandleTimeout(now_);
  }
  EXPECT_TRUE(fabric_->next_deadline().IsNever());
  EXPECT_EQ(Drops(0, DropReason::unresolved), Wire::kMaxWaitingPerHop + 3);
  EXPECT_EQ(SentPsns().size(), 0u);
  EXPECT_EQ(fabric_->counters(0).port_xmit_discards, Wire::kMaxWaitingPerHop + 3);
}

TEST_F(WireTest, WhatHasNoWayOutIsDropped) {
  SendOut(0, 0x0b000001);  // not on the link
  Send({.source = kAddress0, .destination = kPeer});
  EXPECT_EQ(Drops(0, DropReason::no_route), 2u) << "127.0.0.0/8 never leaves";
  EXPECT_TRUE(port_->sent.empty());
  EXPECT_FALSE(fabric_->CanReach(0, Gid::FromIpv4(kAddress0), Gid::FromIpv4(kPeer)));
  EXPECT_TRUE(fabric_->CanReach(0, Gid::FromIpv4(kOwn), Gid::FromIpv4(kPeer)));
  EXPECT_FALSE(fabric_->CanReach(1, Gid::FromIpv4(kOwn), Gid::FromIpv4(kPeer)));
}

TEST_F(WireTest, PortsOfTheDaemonAreReachedInside) {
  Send({.destination = kAddress1, .psn = 7});
  EXPECT_EQ(ReceivePsns(1), (std::vector<uint32_t>{7}));
  EXPECT_TRUE(port_->sent.empty());
}

TEST_F(WireTest, AFullNetdevHoldsPacketsBackAndLosesNone) {
  Resolve();
  port_->room = 3;
  for (uint32_t psn = 0; psn < 40; ++psn) SendOut(psn);
  EXPECT_TRUE(fabric_->congested(0));
  EXPECT_EQ(port_->sent.size(), 3u);
  EXPECT_LE(fabric_->next_deadline(), now_ + Wire::kRetry);
  port_->room = SIZE_MAX;
  now_ = fabric_->next_deadline();
  fabric_->HandleTimeout(now_);
  EXPECT_FALSE(fabric_->congested(0));
  const std::vector<uint32_t> psns = SentPsns();
  ASSERT_EQ(psns.size(), 40u);
  for (uint32_t psn = 0; psn < 40; ++psn) EXPECT_EQ(psns[psn], psn);
  EXPECT_EQ(Drops(0, DropReason::queue_full), 0u);
}

TEST_F(WireTest, ANetdevThatTakesNothingForLongIsACutCable) {
  Resolve();
  port_->room = 0;
  SendOut(1);
  const transport::Time start = now_;
  while (fabric_->congested(0) && now_ - start < Duration::Milliseconds(1000)) {
    now_ = fabric_->next_deadline();
    fabric_->HandleTimeout(now_);
  }
  EXPECT_FALSE(fabric_->congested(0));
  EXPECT_GE(now_ - start, Wire::kStuck);
  EXPECT_EQ(Drops(0, DropReason::queue_full), 1u);
  // It comes back.
  port_->room = SIZE_MAX;
  SendOut(2);
  EXPECT_EQ(SentPsns(), (std::vector<uint32_t>{2}));
}

TEST_F(WireTest, WhatIsLongerThanTheMtuIsDropped) {
  Resolve();
  port_->mtu_bytes = 1500;
  EXPECT_EQ(fabric_->active_mtu(0), Pmtu::k1024);
  Send({.source = kOwn, .destination = kPeer, .payload_bytes = 2048});
  EXPECT_EQ(Drops(0, DropReason::over_mtu), 1u);
  Send({.source = kOwn, .destination = kPeer, .payload_bytes = 1024});
  EXPECT_EQ(port_->sent.size(), 1u);
}

TEST_F(WireTest, ActiveMtuFollowsTheNetdevAsWithLinux) {
  // Linux rxe on netdevs of these MTUs.
  for (const auto& [mtu, active] : {std::pair{1500u, Pmtu::k1024},
                                    {2200u, Pmtu::k2048},
                                    {4096u, Pmtu::k2048},
                                    {4200u, Pmtu::k4096},
                                    {9000u, Pmtu::k4096},
                                    {0u, Pmtu::k256}}) {
    port_->mtu_bytes = mtu;
    EXPECT_EQ(fabric_->active_mtu(0), active) << mtu;
  }
  EXPECT_EQ(fabric_->active_mtu(1), Pmtu::k4096) << "not joined to a netdev";
}

TEST_F(WireTest, PacketsFromOutsideAreNotTrusted) {
  port_->incoming.push_back(FromPeer(9));
  EXPECT_TRUE(fabric_->PollWires(now_));
  const auto received = Receive(0);
  ASSERT_EQ(received.size(), 1u);
  EXPECT_FALSE(received[0].meta.trusted);
  EXPECT_TRUE(received[0].meta.icrc_present);
  EXPECT_EQ(received[0].frame, FromPeer(9));
  EXPECT_EQ(fabric_->counters(0).port_rcv_packets, 1u);
}

TEST_F(WireTest, AddressesOfTheDaemonDoNotComeFromOutside) {
  port_->incoming.push_back(FromPeer(9, kAddress1));  // also loopback
  fabric_->PollWires(now_);
  EXPECT_TRUE(Receive(0).empty());
  PortConfig config;
  config.device = "verbena2";
  config.gids = {Gid::FromIpv4(0x0a000003)};
  fabric_->AddPort(config);
  port_->incoming.push_back(FromPeer(9, 0x0a000003));
  fabric_->PollWires(now_);
  EXPECT_TRUE(Receive(0).empty());
  EXPECT_EQ(Drops(0, DropReason::spoofed), 1u);
}

TEST_F(WireTest, RulesSeeBothWays) {
  Resolve();
  const uint32_t all = AddRule("drop opcode=send");
  SendOut(1);
  port_->incoming.push_back(FromPeer(2));
  fabric_->PollWires(now_);
  EXPECT_TRUE(port_->sent.empty());
  EXPECT_TRUE(Receive(0).empty());
  EXPECT_EQ(Hits(all), 2u);
  fabric_->ClearRules(0);
  const uint32_t incoming = AddRule("drop dev=verbena0 dir=rx");
  SendOut(3);
  port_->incoming.push_back(FromPeer(4));
  fabric_->PollWires(now_);
  EXPECT_EQ(SentPsns(), (std::vector<uint32_t>{3}));
  EXPECT_TRUE(Receive(0).empty());
  EXPECT_EQ(Hits(incoming), 1u);
}

TEST_F(WireTest, DelayedPacketsGoOutAndComeInLater) {
  Resolve();
  AddRule("delay us=1000");
  SendOut(1);
  port_->incoming.push_back(FromPeer(2));
  fabric_->PollWires(now_);
  EXPECT_TRUE(port_->sent.empty());
  EXPECT_TRUE(Receive(0).empty());
  AdvanceUs(1000);
  HandleTimeout();
  EXPECT_EQ(SentPsns(), (std::vector<uint32_t>{1}));
  EXPECT_EQ(Receive(0).size(), 1u);
}

TEST_F(WireTest, ACorruptedPacketLeavesWithAWrongIcrc) {
  Resolve();
  AddRule("corrupt dir=tx");
  SendOut(1);
  ASSERT_EQ(port_->sent.size(), 1u);
  EXPECT_FALSE(IcrcIsRight(port_->sent[0]));
}

TEST_F(WireTest, PacketsThatWaitGoBackWithTheFabric) { SendOut(1); }  // TearDown counts

TEST_F(WireTest, TheLinkIsUpWhenTheNetdevIs) {
  EXPECT_TRUE(fabric_->link_up(0));
  port_->is_up = false;
  EXPECT_FALSE(fabric_->link_up(0));
  EXPECT_TRUE(fabric_->link_up(1));
}

}  // namespace
}  // namespace verbena::nic
