// SPDX-License-Identifier: Apache-2.0
#include "transport/wire/describe.h"

#include <gtest/gtest.h>

#include "tests/testing/frames.h"
#include "tests/testing/vectors.h"

namespace verbena::transport {
namespace {

std::string Line(const std::string& capture, size_t frame) {
  const auto frames = verbena::testing::CaptureFrames(capture);
  if (frames.size() < frame) return "no such frame";
  const auto packet = PacketView::Parse(frames[frame - 1]);
  return packet.ok() ? Describe(*packet) : Describe(packet.error());
}

TEST(Describe, ShowsEachHeaderOfCapturedPackets) {
  EXPECT_EQ(Line("rc_atomics", 1),
            "192.168.77.1:50688 > 192.168.77.2 RC_CMP_SWAP qp=0x000020 psn=0x111111 A "
            "va=0x7f55dcd4a000 rkey=0x000011fb swap_add=0x1122334455667788 compare=0x0");
  EXPECT_EQ(Line("rc_atomics", 4),
            "192.168.77.2:50688 > 192.168.77.1 RC_ATOMIC_ACKNOWLEDGE qp=0x000030 psn=0x111112 "
            "ACK credits=none msn=2 original=0x1122334455667788");
  EXPECT_EQ(Line("cm_mckey_v4", 7),
            "192.168.77.1:58764 > 239.1.2.3 UD_SEND_ONLY_IMM qp=0xffffff psn=0x000000 "
            "qkey=0x01234567 src_qp=0x00009c imm=0x0000009c len=64");
  EXPECT_EQ(Line("ipv6_rc_mix", 3),
            "[fd00:77::1]:52162 > fd00:77::2 RC_RDMA_WRITE_FIRST qp=0x00002b psn=0x111112 "
            "va=0x7fc2ad219000 rkey=0x00001cca dma_len=2500 len=1024");
}

TEST(Describe, ShowsErrors) {
  EXPECT_EQ(Line("tap_python_peer_probes", 67), "reserved_opcode: the opcode is not defined");
  EXPECT_EQ(Line("cm_mckey_v4", 3), "not_ip: neither IPv4 nor IPv6");
}

TEST(Describe, ShowsFlagsAndVlan) {
  PacketAddress address = verbena::testing::Ipv4Address();
  address.has_vlan = true;
  address.vlan_tci = 0xe005;
  address.traffic_class = 0x6b;
  TransportHeaders headers;
  headers.bth.opcode = Opcode::kXrcSendOnlyInv;
  headers.bth.solicited = true;
  headers.bth.fecn = true;
  headers.bth.becn = true;
  headers.bth.pkey = Pkey(0x7fff);
  headers.xrceth.srq = SrqNumber(9);
  headers.ieth.rkey = Rkey(0x288);
  const auto frame =
      verbena::testing::BuildFrame(address, headers, verbena::testing::CountingBytes(2));
  EXPECT_EQ(Describe(*PacketView::Parse(frame)),
            "10.0.0.1:49152 > 10.0.0.2 vlan=5 dscp=26 ecn=ce XRC_SEND_ONLY_INV qp=0x000000 "
            "psn=0x000000 SE FECN BECN pkey=0x7fff srq=0x000009 inv_rkey=0x00000288 len=2 pad=2");
}

TEST(Describe, ShowsEveryKindOfAeth) {
  EXPECT_EQ(Describe(Aeth::Ack(Msn(3))), "ACK credits=none msn=3");
  EXPECT_EQ(Describe(Aeth::Ack(Msn(3), 5)), "ACK credits=6 msn=3");
  EXPECT_EQ(Describe(Aeth::RnrNak(Msn(3), 12)), "RNR_NAK timer=12 (0.64 ms) msn=3");
  EXPECT_EQ(Describe(Aeth::RnrNak(Msn(3), 0)), "RNR_NAK timer=0 (655.36 ms) msn=3");
  EXPECT_EQ(Describe(Aeth::Nak(Msn(3), NakCode::kRemoteAccessError)),
            "NAK remote_access_error msn=3");
  EXPECT_EQ(Describe(Aeth{0x7f, Msn(3)}), "NAK reserved msn=3");
  EXPECT_EQ(Describe(Aeth{0x40, Msn(3)}), "reserved syndrome 0x40 msn=3");
}

}  // namespace
}  // namespace verbena::transport
