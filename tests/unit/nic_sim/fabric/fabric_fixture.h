// SPDX-License-Identifier: Apache-2.0
//
// A fabric of two NICs for tests, over DPDK without hugepages. Frames are built
// from the formats in the specifications, not by the code under test. The
// fixture checks that each test gives all packets back.
#pragma once

#include <gtest/gtest.h>
#include <rte_mbuf.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nic_sim/fabric/fabric.h"
#include "nic_sim/fabric/packet.h"

namespace verbena::nic {

// 127.88.0.1 and 127.88.0.2, as the daemon gives them.
inline constexpr uint32_t kAddress0 = 0x7f580001;
inline constexpr uint32_t kAddress1 = 0x7f580002;

struct PacketSpec {
  uint32_t source = kAddress0;
  uint32_t destination = kAddress1;
  bool ipv6 = false;  // from fe80::1 to fe80::2 (by the low byte of the above)
  bool vlan = false;
  uint8_t opcode = 0x04;  // RC SEND Only
  uint32_t source_qpn = 0x11;
  uint32_t dest_qpn = 0x22;
  uint32_t psn = 0;           // also the offset
  size_t payload_bytes = 64;  // multiple of 4
  bool group_mac = false;     // the group bit of the destination's MAC address
};

// Frame with four zero bytes in place of the ICRC.
std::vector<uint8_t> FrameOfSpec(const PacketSpec& spec);

// CRC-32 of the masked packet, bit by bit, from the text of the RoCEv2 annex.
uint32_t SlowIcrc(const std::vector<uint8_t>& frame);
// The frame ends with its ICRC.
bool IcrcIsRight(const std::vector<uint8_t>& frame);

class FabricTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  // Replaces the fabric by a new one with the same ports.
  void MakeFabric(bool strict);

  rte_mbuf* NewPacket(const PacketSpec& spec);
  void Send(const PacketSpec& spec, PortId port = 0);
  // PSNs `first` .. `first + count - 1`.
  void SendPsns(uint32_t first, uint32_t count);
  // Adds a rule that must be good.
  uint32_t AddRule(const std::string& text);
  uint64_t Hits(uint32_t id);
  void AdvanceUs(int64_t us) { now_ += transport::Duration::Microseconds(us); }
  void HandleTimeout() { fabric_->HandleTimeout(now_); }

  struct Received {
    std::vector<uint8_t> frame;
    PacketMeta meta;
    uint32_t psn = 0;
  };
  std::vector<Received> Receive(PortId port = 1);
  std::vector<uint32_t> ReceivePsns(PortId port = 1);

  uint64_t Drops(PortId port, DropReason reason) {
    return fabric_->counters(port).drops[static_cast<size_t>(reason)];
  }

  static rte_mempool* pool();

  std::unique_ptr<Fabric> fabric_;
  transport::Time now_ = transport::Time::FromNanoseconds(1'000'000'000);

 private:
  unsigned free_before_ = 0;
};

}  // namespace verbena::nic
