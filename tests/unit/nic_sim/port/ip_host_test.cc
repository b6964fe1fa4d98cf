// SPDX-License-Identifier: Apache-2.0
//
// ARP, neighbour discovery and pings as the RFCs give them, byte by byte, and
// frames that are wrong.
#include "nic_sim/port/ip_host.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace verbena::nic {
namespace {

using transport::Duration;
using transport::Gid;
using transport::MacAddress;
using transport::Time;
using Verdict = IpHost::Verdict;
using Bytes = std::vector<uint8_t>;

const MacAddress kOwnMac = *MacAddress::Parse("02:56:00:00:00:01");
const Bytes kOwn = {0x02, 0x56, 0, 0, 0, 1};
const Bytes kPeer = {0x02, 0x99, 0, 0, 0, 2};
const Bytes kBroadcast(6, 0xff);
const Bytes kOwnIp = {10, 0, 0, 1};
const Bytes kPeerIp = {10, 0, 0, 2};

Bytes Join(std::initializer_list<Bytes> parts) {
  Bytes all;
  for (const Bytes& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Bytes AddressBytes(const std::string& text) {
  const Gid gid = *Gid::Parse(text);
  Bytes bytes;
  for (const std::byte b : gid.bytes()) bytes.push_back(std::to_integer<uint8_t>(b));
  return bytes;
}

// RFC 1071, another way than the code's.
uint16_t Checksum(Bytes bytes) {
  if (bytes.size() % 2 != 0) bytes.push_back(0);
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes.size(); i += 2) sum += bytes[i] * 256u + bytes[i + 1];
  return static_cast<uint16_t>(0xffff - (sum % 0xffff == 0 && sum != 0 ? 0xffff : sum % 0xffff));
}

Bytes Be16(uint16_t v) { return {static_cast<uint8_t>(v >> 8), static_cast<uint8_t>(v)}; }

Bytes Arp(const Bytes& to, uint8_t operation, const Bytes& sender_mac, const Bytes& sender_ip,
          const Bytes& target_mac, const Bytes& target_ip) {
  return Join({to,
               sender_mac,
               {0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, operation},
               sender_mac,
               sender_ip,
               target_mac,
               target_ip});
}

Bytes Ipv4(uint8_t protocol, const Bytes& source, const Bytes& destination, const Bytes& body,
           const Bytes& flags = {0x40, 0}) {
  Bytes header = Join({{0x45, 0},
                       Be16(static_cast<uint16_t>(20 + body.size())),
                       {0, 0},
                       flags,
                       {64, protocol, 0, 0},
                       source,
                       destination});
  const uint16_t sum = Checksum(header);
  header[10] = static_cast<uint8_t>(sum >> 8);
  header[11] = static_cast<uint8_t>(sum);
  return Join({kOwn, kPeer, {8, 0}, header, body});
}

Bytes Icmp(uint8_t type, const Bytes& data) {
  Bytes message = Join({{type, 0, 0, 0, 0x12, 0x34, 0, 7}, data});
  const uint16_t sum = Checksum(message);
  message[2] = static_cast<uint8_t>(sum >> 8);
  message[3] = static_cast<uint8_t>(sum);
  return message;
}

Bytes Ipv6(const Bytes& to_mac, const std::string& source, const std::string& destination,
           uint8_t next_header, uint8_t hop_limit, const Bytes& body) {
  return Join({to_mac,
               kPeer,
               {0x86, 0xdd, 0x60, 0, 0, 0},
               Be16(static_cast<uint16_t>(body.size())),
               {next_header, hop_limit},
               AddressBytes(source),
               AddressBytes(destination),
               body});
}

Bytes Icmpv6(const Bytes& to_mac, const std::string& source, const std::string& destination,
             uint8_t hop_limit, Bytes body) {
  const Bytes pseudo = Join({AddressBytes(source),
                             AddressBytes(destination),
                             {0, 0},
                             Be16(static_cast<uint16_t>(body.size())),
                             {0, 0, 0, 58},
                             body});
  const uint16_t sum = Checksum(pseudo);
  body[2] = static_cast<uint8_t>(sum >> 8);
  body[3] = static_cast<uint8_t>(sum);
  return Ipv6(to_mac, source, destination, 58, hop_limit, body);
}

Bytes Solicitation(const std::string& target, const Bytes& options) {
  return Join({{135, 0, 0, 0, 0, 0, 0, 0}, AddressBytes(target), options});
}

class IpHostTest : public ::testing::Test {
 protected:
  IpHostTest() : host_(MakeConfig(false)) {}

  static IpHost::Config MakeConfig(bool kernel) {
    return {.mac = kOwnMac,
            .addresses = {{*ParseInterfaceAddress("fe80::1"), kernel},
                          {*ParseInterfaceAddress("10.0.0.1/24"), kernel},
                          {*ParseInterfaceAddress("fd00::1"), kernel}},
            .gateways = {*Gid::Parse("10.0.0.254")}};
  }

  Verdict Handle(const Bytes& frame) { return Handle(&host_, frame); }
  Verdict Handle(IpHost* host, const Bytes& frame) {
    last_ = frame;
    size_t size = last_.size();
    const Verdict verdict = host->Handle(reinterpret_cast<std::byte*>(last_.data()), &size, now_);
    EXPECT_LE(size, last_.size());
    last_.resize(size);
    return verdict;
  }
  // The next frame that the host sends; empty: none.
  Bytes Sent() {
    ControlFrame frame;
    if (!host_.PollTransmit(&frame)) return {};
    const auto* bytes = reinterpret_cast<const uint8_t*>(frame.bytes.data());
    return {bytes, bytes + frame.size};
  }
  std::string MacOf(const std::string& address) {
    const auto answer = host_.neighbours().Use(*Gid::Parse(address), now_);
    return answer.mac == nullptr ? "" : answer.mac->ToString();
  }

  IpHost host_;
  Bytes last_;
  Time now_ = Time::FromNanoseconds(1'000'000'000);
};

TEST_F(IpHostTest, ARequestForItsAddressIsAnswered) {
  EXPECT_EQ(Handle(Arp(kBroadcast, 1, kPeer, kPeerIp, Bytes(6, 0), kOwnIp)), Verdict::kDone);
  Bytes reply = Sent();
  ASSERT_EQ(reply.size(), 60u);
  reply.resize(42);
  EXPECT_EQ(reply, Arp(kPeer, 2, kOwn, kOwnIp, kPeer, kPeerIp));
  EXPECT_TRUE(Sent().empty());
}

TEST_F(IpHostTest, RequestsForOthersAreNot) {
  Handle(Arp(kBroadcast, 1, kPeer, kPeerIp, Bytes(6, 0), {10, 0, 0, 3}));
  EXPECT_TRUE(Sent().empty());
}

TEST_F(IpHostTest, AProbeOfRfc5227IsAnswered) {
  Handle(Arp(kBroadcast, 1, kPeer, {0, 0, 0, 0}, Bytes(6, 0), kOwnIp));
  EXPECT_EQ(Sent().size(), 60u);
}

TEST_F(IpHostTest, AddressesThatTheKernelHasAreLeftToIt) {
  IpHost shared(MakeConfig(true));
  Handle(&shared, Arp(kBroadcast, 1, kPeer, kPeerIp, Bytes(6, 0), kOwnIp));
  EXPECT_EQ(Handle(&shared, Ipv4(1, kPeerIp, kOwnIp, Icmp(8, Bytes(20, 5)))), Verdict::kDropped);
  Handle(&shared, Icmpv6({0x33, 0x33, 0xff, 0, 0, 1}, "fd00::2", "ff02::1:ff00:1", 255,
                         Solicitation("fd00::1", Join({{1, 1}, kPeer}))));
  ControlFrame frame;
  EXPECT_FALSE(shared.PollTransmit(&frame));
  // RoCEv2 is the NIC's all the same.
  EXPECT_EQ(Handle(&shared, Ipv4(17, kPeerIp, kOwnIp,
                                 Join({{0xc0, 0, 0x12, 0xb7, 0, 28, 0, 0}, Bytes(20, 0)}))),
            Verdict::kRoce);
}

TEST_F(IpHostTest, NextHopsAreAskedForAndLearnt) {
  EXPECT_EQ(MacOf("10.0.0.2"), "");
  Bytes request = Sent();
  ASSERT_EQ(request.size(), 60u);
  request.resize(42);
  EXPECT_EQ(request, Arp(kBroadcast, 1, kOwn, kOwnIp, Bytes(6, 0), kPeerIp));
  EXPECT_TRUE(Sent().empty());
  Handle(Arp(kOwn, 2, kPeer, kPeerIp, kOwn, kOwnIp));
  EXPECT_EQ(MacOf("10.0.0.2"), "02:99:00:00:00:02");
}

TEST_F(IpHostTest, AQuestionIsRepeatedABoundedNumberOfTimes) {
  const auto answer = host_.neighbours().Use(*Gid::Parse("10.0.0.2"), now_);
  host_.neighbours().SetWaiting(answer.slot, true);
  uint32_t asked = 0;
  NeighbourTable::Outcome outcome;
  while (!host_.neighbours().PollOutcome(&outcome)) {
    ASSERT_LE(asked, NeighbourTable::kQuestions);
    if (!Sent().empty()) ++asked;
    ASSERT_FALSE(host_.next_deadline().IsNever());
    now_ = host_.next_deadline();
    host_.HandleTimeout(now_);
  }
  EXPECT_EQ(asked, NeighbourTable::kQuestions);
  EXPECT_FALSE(outcome.resolved);
  EXPECT_TRUE(host_.next_deadline().IsNever());
  // The next packet asks again.
  EXPECT_EQ(MacOf("10.0.0.2"), "");
  EXPECT_FALSE(Sent().empty());
}

TEST_F(IpHostTest, AnOldAnswerServesWhileItIsCheckedAndIsForgottenWithoutAnAnswer) {
  MacOf("10.0.0.2");
  Sent();
  Handle(Arp(kOwn, 2, kPeer, kPeerIp, kOwn, kOwnIp));
  now_ = now_ + NeighbourTable::kReachable + Duration::Milliseconds(1);
  EXPECT_EQ(MacOf("10.0.0.2"), "02:99:00:00:00:02");
  const Bytes probe = Sent();
  ASSERT_EQ(probe.size(), 60u);
  EXPECT_EQ(Bytes(probe.begin(), probe.begin() + 6), kPeer) << "asks that host alone";
  for (uint32_t i = 0; i < NeighbourTable::kProbes; ++i) {
    now_ = now_ + NeighbourTable::kInterval;
    host_.HandleTimeout(now_);
    Sent();
  }
  EXPECT_EQ(MacOf("10.0.0.2"), "");
}

TEST_F(IpHostTest, NobodyCanFillTheTable) {
  for (int i = 3; i < 250; ++i) {
    const Bytes ip = {10, 0, 0, static_cast<uint8_t>(i)};
    Handle(Arp(kOwn, 2, kPeer, ip, kOwn, kOwnIp));
    Handle(Arp(kBroadcast, 1, kPeer, ip, Bytes(6, 0), ip));
  }
  EXPECT_EQ(host_.neighbours().size(), 0u);
}

TEST_F(IpHostTest, WhoWaitsIsNotDisplacedByMoreDestinations) {
  const auto first = host_.neighbours().Use(*Gid::Parse("10.0.0.2"), now_);
  host_.neighbours().SetWaiting(first.slot, true);
  for (uint32_t i = 0; i < 2 * NeighbourTable::kCapacity; ++i) {
    now_ = now_ + Duration::Microseconds(1);
    EXPECT_NE(host_.neighbours().Use(Gid::FromIpv4(0x0a010000 + i), now_).slot, first.slot);
  }
  EXPECT_EQ(host_.neighbours().size(), NeighbourTable::kCapacity);
}

TEST_F(IpHostTest, AnotherHostWithItsAddressIsCountedAndNotLearnt) {
  Handle(Arp(kBroadcast, 1, kPeer, kOwnIp, Bytes(6, 0), kOwnIp));
  EXPECT_EQ(host_.counters().address_conflicts, 1u);
  EXPECT_TRUE(Sent().empty());
}

TEST_F(IpHostTest, RoutesGoToTheLinkOrTheGateway) {
  const auto hop = [this](const char* to) {
    const std::optional<Gid> gid = host_.NextHop(*Gid::Parse(to));
    return gid ? gid->ToString() : std::string();
  };
  EXPECT_EQ(hop("10.0.0.77"), "::ffff:10.0.0.77");
  EXPECT_EQ(hop("10.0.1.77"), "::ffff:10.0.0.254");
  EXPECT_EQ(hop("fd00::77"), "fd00::77");
  EXPECT_EQ(hop("fe80::77"), "fe80::77");
  EXPECT_EQ(hop("fd01::77"), "") << "no gateway of that family";
  EXPECT_EQ(hop("127.88.0.1"), "");
  EXPECT_EQ(hop("::1"), "");
  EXPECT_EQ(hop("224.0.0.1"), "");
}

TEST_F(IpHostTest, PingsAreAnswered) {
  for (const size_t bytes : {0u, 1u, 56u, 4000u}) {
    EXPECT_EQ(Handle(Ipv4(1, kPeerIp, kOwnIp, Icmp(8, Bytes(bytes, 0xab)))), Verdict::kReply);
    Bytes expected = Ipv4(1, kOwnIp, kPeerIp, Icmp(0, Bytes(bytes, 0xab)));
    std::copy(kPeer.begin(), kPeer.end(), expected.begin());
    std::copy(kOwn.begin(), kOwn.end(), expected.begin() + 6);
    EXPECT_EQ(last_, expected) << bytes;
  }
  EXPECT_EQ(host_.counters().echo_replies, 4u);
}

TEST_F(IpHostTest, PingsOverIpv6AreAnswered) {
  const Bytes data = {0, 1, 2, 3, 4, 5, 6};
  EXPECT_EQ(
      Handle(Icmpv6(kOwn, "fd00::2", "fd00::1", 64, Join({{128, 0, 0, 0, 0, 9, 0, 1}, data}))),
      Verdict::kReply);
  Bytes expected =
      Icmpv6(kPeer, "fd00::1", "fd00::2", 64, Join({{129, 0, 0, 0, 0, 9, 0, 1}, data}));
  std::copy(kOwn.begin(), kOwn.end(), expected.begin() + 6);
  EXPECT_EQ(last_, expected);
}

TEST_F(IpHostTest, ASolicitationIsAnsweredWithAnAdvertisement) {
  EXPECT_EQ(Handle(Icmpv6({0x33, 0x33, 0xff, 0, 0, 1}, "fd00::2", "ff02::1:ff00:1", 255,
                          Solicitation("fd00::1", Join({{1, 1}, kPeer})))),
            Verdict::kDone);
  Bytes expected =
      Icmpv6(kPeer, "fd00::1", "fd00::2", 255,
             Join({{136, 0, 0, 0, 0x60, 0, 0, 0}, AddressBytes("fd00::1"), {2, 1}, kOwn}));
  std::copy(kOwn.begin(), kOwn.end(), expected.begin() + 6);
  EXPECT_EQ(Sent(), expected);
}

TEST_F(IpHostTest, DuplicateAddressDetectionIsAnsweredToAll) {
  Handle(Icmpv6({0x33, 0x33, 0xff, 0, 0, 1}, "::", "ff02::1:ff00:1", 255,
                Solicitation("fd00::1", {})));
  Bytes expected =
      Icmpv6({0x33, 0x33, 0, 0, 0, 1}, "fd00::1", "ff02::1", 255,
             Join({{136, 0, 0, 0, 0x20, 0, 0, 0}, AddressBytes("fd00::1"), {2, 1}, kOwn}));
  std::copy(kOwn.begin(), kOwn.end(), expected.begin() + 6);
  EXPECT_EQ(Sent(), expected);
}

TEST_F(IpHostTest, Ipv6NextHopsAreSolicited) {
  EXPECT_EQ(MacOf("fd00::12:3456"), "");
  Bytes expected = Icmpv6({0x33, 0x33, 0xff, 0x12, 0x34, 0x56}, "fd00::1", "ff02::1:ff12:3456", 255,
                          Solicitation("fd00::12:3456", Join({{1, 1}, kOwn})));
  std::copy(kOwn.begin(), kOwn.end(), expected.begin() + 6);
  EXPECT_EQ(Sent(), expected);
  Handle(
      Icmpv6(kOwn, "fd00::12:3456", "fd00::1", 255,
             Join({{136, 0, 0, 0, 0x60, 0, 0, 0}, AddressBytes("fd00::12:3456"), {2, 1}, kPeer})));
  EXPECT_EQ(MacOf("fd00::12:3456"), "02:99:00:00:00:02");
}

TEST_F(IpHostTest, WrongNeighbourMessagesAreDropped) {
  const Bytes group = {0x33, 0x33, 0xff, 0, 0, 1};
  const Bytes good = Solicitation("fd00::1", Join({{1, 1}, kPeer}));
  const std::string to = "ff02::1:ff00:1";
  std::vector<Bytes> wrong = {
      Icmpv6(group, "fd00::2", to, 254, good),                         // not on the link
      Icmpv6(group, "fd00::2", to, 255, Solicitation("ff02::1", {})),  // target a group
      Icmpv6(group, "fd00::2", to, 255, Solicitation("fd00::1", {1, 0, 0, 0, 0, 0, 0, 0})),
      Icmpv6(group, "fd00::2", to, 255, Solicitation("fd00::1", {1, 2, 0, 0, 0, 0, 0, 0})),
      Icmpv6(group, "fd00::2", to, 255, Solicitation("fd00::1", {1})),
      Icmpv6(group, "::", to, 255, good),                                // DAD with option
      Icmpv6(group, "::", "ff02::1", 255, Solicitation("fd00::1", {})),  // DAD to all
      Icmpv6(group, "fd00::2", to, 255, Join({{1, 1}, {0, 0, 0, 0, 0, 0}})),
  };
  Bytes code = good;
  code[1] = 1;
  wrong.push_back(Icmpv6(group, "fd00::2", to, 255, code));
  Bytes checksum = Icmpv6(group, "fd00::2", to, 255, good);
  checksum[14 + 40 + 2] ^= 1;
  wrong.push_back(checksum);
  for (const Bytes& frame : wrong) {
    Handle(frame);
    EXPECT_TRUE(Sent().empty());
  }
  EXPECT_EQ(host_.counters().nd_rcv, 0u);
}

TEST_F(IpHostTest, WrongPacketsAreDropped) {
  const Bytes ping = Ipv4(1, kPeerIp, kOwnIp, Icmp(8, Bytes(20, 1)));
  EXPECT_EQ(Handle(ping), Verdict::kReply);
  Bytes bad = ping;
  bad[24] ^= 1;  // IP checksum
  EXPECT_EQ(Handle(bad), Verdict::kDropped);
  bad = ping;
  bad[40] ^= 1;  // ICMP
  EXPECT_EQ(Handle(bad), Verdict::kDropped);
  bad = ping;
  bad[17] = 0xff;  // longer than the frame
  EXPECT_EQ(Handle(bad), Verdict::kDropped);
  bad = ping;
  bad[14] = 0x44;  // header of 16 bytes
  EXPECT_EQ(Handle(bad), Verdict::kDropped);
  EXPECT_EQ(Handle(Ipv4(1, kPeerIp, kOwnIp, Icmp(8, {}), {0x20, 0})), Verdict::kDropped);
  EXPECT_EQ(Handle(Ipv4(1, kPeerIp, kOwnIp, Icmp(0, {}))), Verdict::kDropped);
  EXPECT_EQ(Handle(Ipv4(1, {127, 0, 0, 1}, kOwnIp, Icmp(8, {}))), Verdict::kDropped);
  EXPECT_EQ(Handle(Ipv4(1, {224, 0, 0, 1}, kOwnIp, Icmp(8, {}))), Verdict::kDropped);
  EXPECT_EQ(Handle(Ipv4(6, kPeerIp, kOwnIp, Bytes(20, 0))), Verdict::kDropped);
  EXPECT_EQ(host_.counters().rcv_spoofed, 2u);
}

TEST_F(IpHostTest, FramesCutAtAnyLengthDoNoHarm) {
  const std::vector<Bytes> frames = {
      Arp(kBroadcast, 1, kPeer, kPeerIp, Bytes(6, 0), kOwnIp),
      Ipv4(1, kPeerIp, kOwnIp, Icmp(8, Bytes(20, 1))),
      Ipv4(17, kPeerIp, kOwnIp, Join({{0xc0, 0, 0x12, 0xb7, 0, 28, 0, 0}, Bytes(20, 0)})),
      Icmpv6({0x33, 0x33, 0xff, 0, 0, 1}, "fd00::2", "ff02::1:ff00:1", 255,
             Solicitation("fd00::1", Join({{1, 1}, kPeer}))),
  };
  for (const Bytes& frame : frames) {
    for (size_t size = 0; size < frame.size(); ++size) {
      const Verdict verdict = Handle(Bytes(frame.begin(), frame.begin() + static_cast<long>(size)));
      EXPECT_NE(verdict, Verdict::kRoce) << size;
      EXPECT_NE(verdict, Verdict::kReply) << size;
      EXPECT_TRUE(Sent().empty()) << size;
    }
  }
}

TEST_F(IpHostTest, RandomFramesDoNoHarm) {
  const std::vector<Bytes> frames = {
      Arp(kBroadcast, 1, kPeer, kPeerIp, Bytes(6, 0), kOwnIp),
      Ipv4(1, kPeerIp, kOwnIp, Icmp(8, Bytes(20, 1))),
      Icmpv6({0x33, 0x33, 0xff, 0, 0, 1}, "fd00::2", "ff02::1:ff00:1", 255,
             Solicitation("fd00::1", Join({{1, 1}, kPeer}))),
  };
  uint64_t random = 1;
  const auto next = [&random] {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(random >> 33);
  };
  for (int i = 0; i < 200'000; ++i) {
    Bytes frame = frames[next() % frames.size()];
    for (uint32_t change = next() % 4; change != 0; --change) {
      frame[12 + next() % (frame.size() - 12)] = static_cast<uint8_t>(next());
    }
    if (next() % 8 == 0) frame.resize(next() % frame.size());
    Handle(frame);
    while (!Sent().empty()) {
    }
  }
  EXPECT_LE(host_.neighbours().size(), 0u);
}

TEST_F(IpHostTest, PaddingBehindThePacketIsCutOff) {
  Bytes frame = Ipv4(17, kPeerIp, kOwnIp, Join({{0xc0, 0, 0x12, 0xb7, 0, 28, 0, 0}, Bytes(20, 0)}));
  const size_t size = frame.size();
  frame.resize(size + 30);
  EXPECT_EQ(Handle(frame), Verdict::kRoce);
  EXPECT_EQ(last_.size(), size);
}

TEST_F(IpHostTest, FramesForOthersAreLeft) {
  Bytes frame = Ipv4(1, kPeerIp, kOwnIp, Icmp(8, Bytes(20, 1)));
  frame[5] = 9;  // another MAC
  EXPECT_EQ(Handle(frame), Verdict::kDropped);
  EXPECT_EQ(Handle(Ipv4(1, kPeerIp, {10, 0, 0, 9}, Icmp(8, {}))), Verdict::kDropped);
  EXPECT_EQ(host_.counters().rcv_other, 2u);
}

// From a capture of Linux (tests/vectors/cm_mckey_v4.pcap): behind the IP header.
const Bytes kJoinReport = {0x22, 0, 0xe8, 0xf9, 0, 0, 0, 1, 4, 0, 0, 0, 0xef, 1, 2, 3};
const Bytes kLeaveReport = {0x22, 0, 0xe9, 0xf9, 0, 0, 0, 1, 3, 0, 0, 0, 0xef, 1, 2, 3};

Bytes ReportFrame(const Bytes& message) {
  Bytes header = Join({{0x46, 0xc0, 0, 0x28, 0, 0, 0x40, 0, 1, 2, 0, 0},
                       kOwnIp,
                       {0xe0, 0, 0, 0x16},
                       {0x94, 4, 0, 0}});
  const uint16_t sum = Checksum(header);
  header[10] = static_cast<uint8_t>(sum >> 8);
  header[11] = static_cast<uint8_t>(sum);
  return Join({{1, 0, 0x5e, 0, 0, 0x16}, kOwn, {8, 0}, header, message});
}

TEST_F(IpHostTest, MembershipsAreReportedAsLinuxDoes) {
  const Gid group = *Gid::Parse("239.1.2.3");
  host_.JoinGroup(group);
  EXPECT_EQ(Sent(), ReportFrame(kJoinReport));
  host_.JoinGroup(group);
  host_.LeaveGroup(group);
  EXPECT_TRUE(Sent().empty()) << "joined twice, left once";
  host_.LeaveGroup(group);
  EXPECT_EQ(Sent(), ReportFrame(kLeaveReport));
  host_.LeaveGroup(group);
  EXPECT_TRUE(Sent().empty());
  EXPECT_EQ(host_.counters().group_reports, 2u);
}

TEST_F(IpHostTest, QueriesAreAnsweredWithTheMembershipsThatTheyAskFor) {
  host_.JoinGroup(*Gid::Parse("239.1.2.3"));
  host_.JoinGroup(*Gid::Parse("239.9.9.9"));
  while (!Sent().empty()) {
  }
  const auto query = [](const Bytes& group, const Bytes& to) {
    Bytes message = Join({{0x11, 100, 0, 0}, group, {2, 125, 0, 0}});
    const uint16_t sum = Checksum(message);
    message[2] = static_cast<uint8_t>(sum >> 8);
    message[3] = static_cast<uint8_t>(sum);
    Bytes frame = Ipv4(2, kPeerIp, to, message);
    const Bytes mac = {1, 0, 0x5e, to[1], to[2], to[3]};
    std::copy(mac.begin(), mac.end(), frame.begin());
    return frame;
  };
  EXPECT_EQ(Handle(query({0, 0, 0, 0}, {224, 0, 0, 1})), Verdict::kDone);
  EXPECT_EQ(Sent()[14 + 24 + 8], 2) << "MODE_IS_EXCLUDE";
  EXPECT_FALSE(Sent().empty());
  EXPECT_TRUE(Sent().empty());
  EXPECT_EQ(Handle(query({239, 1, 2, 3}, {239, 1, 2, 3})), Verdict::kDone);
  EXPECT_FALSE(Sent().empty());
  EXPECT_TRUE(Sent().empty());
  Bytes bad = query({0, 0, 0, 0}, {224, 0, 0, 1});
  bad.back() ^= 1;
  EXPECT_EQ(Handle(bad), Verdict::kDropped);
  EXPECT_TRUE(Sent().empty());
}

// RFC 3810, 5.2: from a link-local address to ff02::16, with a router alert.
TEST_F(IpHostTest, MembershipsOfIpv6AreReportedByMld) {
  host_.JoinGroup(*Gid::Parse("ff15::4791"));
  const Bytes sent = Sent();
  Bytes message = Join({{143, 0, 0, 0, 0, 0, 0, 1, 4, 0, 0, 0}, AddressBytes("ff15::4791")});
  const Bytes pseudo = Join({AddressBytes("fe80::1"),
                             AddressBytes("ff02::16"),
                             {0, 0},
                             Be16(static_cast<uint16_t>(message.size())),
                             {0, 0, 0, 58},
                             message});
  const uint16_t sum = Checksum(pseudo);
  message[2] = static_cast<uint8_t>(sum >> 8);
  message[3] = static_cast<uint8_t>(sum);
  Bytes expected = Ipv6({0x33, 0x33, 0, 0, 0, 0x16}, "fe80::1", "ff02::16", 0, 1,
                        Join({{58, 0, 5, 2, 0, 0, 1, 0}, message}));
  std::copy(kOwn.begin(), kOwn.end(), expected.begin() + 6);
  EXPECT_EQ(sent, expected);

  Bytes query = Join({{130, 0, 0, 0, 0, 0, 0, 0}, AddressBytes("::")});
  const Bytes all = Join({AddressBytes("fe80::9"),
                          AddressBytes("ff02::1"),
                          {0, 0},
                          Be16(static_cast<uint16_t>(query.size())),
                          {0, 0, 0, 58},
                          query});
  const uint16_t query_sum = Checksum(all);
  query[2] = static_cast<uint8_t>(query_sum >> 8);
  query[3] = static_cast<uint8_t>(query_sum);
  EXPECT_EQ(Handle(Ipv6({0x33, 0x33, 0, 0, 0, 1}, "fe80::9", "ff02::1", 0, 1,
                        Join({{58, 0, 5, 2, 0, 0, 1, 0}, query}))),
            Verdict::kDone);
  const Bytes answer = Sent();
  ASSERT_EQ(answer.size(), expected.size());
  EXPECT_EQ(answer[14 + 40 + 8 + 8], 2);
}

TEST_F(IpHostTest, OnlyPacketsOfAcceptedGroupsAreLetIn) {
  const Bytes roce = Join({{0xc0, 0, 0x12, 0xb7, 0, 28, 0, 0}, Bytes(20, 0)});
  const auto to_group = [&roce](const Bytes& ip, const Bytes& mac) {
    Bytes frame = Ipv4(17, kPeerIp, ip, roce);
    std::copy(mac.begin(), mac.end(), frame.begin());
    return frame;
  };
  const Bytes good = to_group({239, 129, 2, 3}, {1, 0, 0x5e, 1, 2, 3});
  EXPECT_EQ(Handle(good), Verdict::kDropped);
  host_.AcceptGroup(*Gid::Parse("239.129.2.3"), true);
  EXPECT_EQ(Handle(good), Verdict::kRoce);
  EXPECT_EQ(Handle(to_group({239, 1, 2, 3}, {1, 0, 0x5e, 1, 2, 3})), Verdict::kDropped)
      << "another group with that MAC address";
  EXPECT_EQ(Handle(to_group({239, 129, 2, 3}, kBroadcast)), Verdict::kDropped);
  EXPECT_EQ(Handle(to_group({239, 129, 2, 3}, kOwn)), Verdict::kDropped);
  EXPECT_EQ(Handle(to_group(kOwnIp, {1, 0, 0x5e, 1, 2, 3})), Verdict::kDropped);
  host_.AcceptGroup(*Gid::Parse("239.129.2.3"), false);
  EXPECT_EQ(Handle(good), Verdict::kDropped);

  const auto ipv6 = [&roce] {
    return Ipv6({0x33, 0x33, 0, 0, 0x47, 0x91}, "fd00::2", "ff15::4791", 17, 64, roce);
  };
  EXPECT_EQ(Handle(ipv6()), Verdict::kDropped);
  host_.AcceptGroup(*Gid::Parse("ff15::4791"), true);
  EXPECT_EQ(Handle(ipv6()), Verdict::kRoce);
  // Pings to a group are not for the NIC.
  EXPECT_EQ(Handle(Icmpv6({0x33, 0x33, 0, 0, 0x47, 0x91}, "fd00::2", "ff15::4791", 64,
                          {128, 0, 0, 0, 0, 9, 0, 1})),
            Verdict::kDropped);
}

TEST_F(IpHostTest, ItAnnouncesItsAddresses) {
  host_.Announce();
  EXPECT_EQ(Sent()[54], 136) << "fe80::1";
  Bytes arp = Sent();
  arp.resize(42);
  EXPECT_EQ(arp, Arp(kBroadcast, 1, kOwn, kOwnIp, Bytes(6, 0), kOwnIp));
  EXPECT_EQ(Sent()[54], 136) << "fd00::1";
  EXPECT_TRUE(Sent().empty());
}

TEST(PortOptions, Texts) {
  std::string error;
  const auto spec = ParsePortSpec("af_packet:veth0", &error);
  ASSERT_TRUE(spec) << error;
  EXPECT_EQ(spec->interface, "veth0");
  EXPECT_EQ(ParsePortSpec("tap:t", &error)->driver, PortDriver::kTap);
  for (const char* bad : {"", "veth0", "af_packet", "af_packet:", "af_xdp:x", "tap:a,b=c",
                          "tap:0123456789abcdef", "tap:a/b", "tap:."}) {
    error.clear();
    EXPECT_FALSE(ParsePortSpec(bad, &error)) << bad;
    EXPECT_NE(error, "") << bad;
  }
  EXPECT_EQ(ParseInterfaceAddress("10.0.0.1/8")->prefix_bits, 104);
  EXPECT_EQ(ParseInterfaceAddress("10.0.0.1")->prefix_bits, 120);
  EXPECT_EQ(ParseInterfaceAddress("fd00::1")->prefix_bits, 64);
  for (const char* bad : {"10.0.0.1/", "10.0.0.1/33", "10.0.0.1/0", "10.0.0.1/8x", "fd00::1/129",
                          "224.0.0.1", "ff02::1", "0.0.0.0", "::"}) {
    EXPECT_FALSE(ParseInterfaceAddress(bad)) << bad;
  }
  EXPECT_TRUE(SamePrefix(Gid::FromIpv4(0x0a000081), Gid::FromIpv4(0x0a0000ff), 121));
  EXPECT_FALSE(SamePrefix(Gid::FromIpv4(0x0a000081), Gid::FromIpv4(0x0a000001), 121));
}

}  // namespace
}  // namespace verbena::nic
