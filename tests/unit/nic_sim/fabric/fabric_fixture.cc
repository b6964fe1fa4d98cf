// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/nic_sim/fabric/fabric_fixture.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "nic_sim/env/dpdk_env.h"

namespace verbena::nic {
namespace {

constexpr uint32_t kPoolPackets = 6000;  // more than the fault stage holds
rte_mempool* packet_pool = nullptr;

void PutBe(std::vector<uint8_t>* out, uint64_t value, int bytes) {
  for (int i = bytes - 1; i >= 0; --i) out->push_back(static_cast<uint8_t>(value >> (8 * i)));
}

std::vector<uint8_t> LinkLocal(uint32_t address) {
  std::vector<uint8_t> gid(16);
  gid[0] = 0xfe;
  gid[1] = 0x80;
  gid[15] = static_cast<uint8_t>(address);
  return gid;
}

transport::Gid LinkLocalGid(uint32_t address) {
  const std::vector<uint8_t> bytes = LinkLocal(address);
  return transport::Gid::Load(reinterpret_cast<const std::byte*>(bytes.data()));
}

void PutIpv4(std::vector<uint8_t>* out, const PacketSpec& spec, size_t length) {
  const size_t start = out->size();
  PutBe(out, 0x4500, 2);
  PutBe(out, length, 2);
  PutBe(out, 0x00004000, 4);
  PutBe(out, 0x4011, 2);  // TTL 64, UDP
  PutBe(out, 0, 2);
  PutBe(out, spec.source, 4);
  PutBe(out, spec.destination, 4);
  uint32_t sum = 0;
  for (size_t i = start; i < out->size(); i += 2) sum += ((*out)[i] << 8) + (*out)[i + 1];
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
  (*out)[start + 10] = static_cast<uint8_t>(~sum >> 8);
  (*out)[start + 11] = static_cast<uint8_t>(~sum);
}

}  // namespace

std::vector<uint8_t> FrameOfSpec(const PacketSpec& spec) {
  std::vector<uint8_t> frame;
  PutBe(&frame, (spec.group_mac ? 0x01005e000000 : 0x020000000000) + (spec.destination & 0xff), 6);
  PutBe(&frame, 0x020000000000 + (spec.source & 0xff), 6);
  if (spec.vlan) PutBe(&frame, 0x81000005, 4);
  const size_t udp_bytes = 8 + 12 + spec.payload_bytes + 4;
  if (spec.ipv6) {
    PutBe(&frame, 0x86dd, 2);
    PutBe(&frame, 0x60000000, 4);
    PutBe(&frame, udp_bytes, 2);
    PutBe(&frame, 0x1140, 2);  // UDP, hop limit 64
    for (uint32_t address : {spec.source, spec.destination}) {
      const std::vector<uint8_t> gid = LinkLocal(address);
      frame.insert(frame.end(), gid.begin(), gid.end());
    }
  } else {
    PutBe(&frame, 0x0800, 2);
    PutIpv4(&frame, spec, 20 + udp_bytes);
  }
  PutBe(&frame, 0xc123, 2);
  PutBe(&frame, 4791, 2);
  PutBe(&frame, udp_bytes, 2);
  PutBe(&frame, 0, 2);
  PutBe(&frame, spec.opcode, 1);
  PutBe(&frame, 0x40ffff, 3);  // MigReq, P_Key
  PutBe(&frame, spec.dest_qpn, 4);
  PutBe(&frame, spec.psn, 4);
  for (size_t i = 0; i < spec.payload_bytes; ++i) frame.push_back(static_cast<uint8_t>(i * 7));
  PutBe(&frame, 0, 4);
  return frame;
}

uint32_t SlowIcrc(const std::vector<uint8_t>& frame) {
  size_t l3 = 14;
  if (frame[12] == 0x81) l3 = 18;
  const bool ipv6 = frame[l3 - 2] == 0x86;
  std::vector<uint8_t> bytes(8, 0xff);
  bytes.insert(bytes.end(), frame.begin() + static_cast<ptrdiff_t>(l3), frame.end() - 4);
  uint8_t* ip = &bytes[8];
  uint8_t* udp = ip + (ipv6 ? 40 : 20);
  if (ipv6) {
    ip[0] |= 0x0f;
    ip[1] = ip[2] = ip[3] = ip[7] = 0xff;
  } else {
    ip[1] = ip[8] = ip[10] = ip[11] = 0xff;
  }
  udp[6] = udp[7] = 0xff;
  udp[8 + 4] = 0xff;
  uint32_t crc = 0xffffffff;
  for (uint8_t byte : bytes) {
    crc ^= byte;
    for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0);
  }
  return ~crc;
}

bool IcrcIsRight(const std::vector<uint8_t>& frame) {
  const uint32_t crc = SlowIcrc(frame);
  const uint8_t* end = frame.data() + frame.size() - 4;
  for (int i = 0; i < 4; ++i) {
    if (end[i] != static_cast<uint8_t>(crc >> (8 * i))) return false;
  }
  return true;
}

rte_mempool* FabricTest::pool() { return packet_pool; }

void FabricTest::SetUp() {
  free_before_ = rte_mempool_avail_count(pool());
  MakeFabric(false);
}

void FabricTest::TearDown() {
  fabric_.reset();
  EXPECT_EQ(rte_mempool_avail_count(pool()), free_before_) << "packets are not given back";
}

void FabricTest::MakeFabric(bool strict) {
  fabric_ = std::make_unique<Fabric>(strict);
  for (uint32_t address : {kAddress0, kAddress1}) {
    PortConfig config;
    config.device = address == kAddress0 ? "verbena0" : "verbena1";
    config.mac = transport::MacAddress::FromUint64(0x020000000000 + (address & 0xff));
    config.group_limits = {.groups = 3, .qps_of_group = 4, .attachments = 6};
    config.gids = {LinkLocalGid(address), transport::Gid::FromIpv4(address), transport::Gid()};
    fabric_->AddPort(config);
  }
}

rte_mbuf* FabricTest::NewPacket(const PacketSpec& spec) {
  rte_mbuf* packet = rte_pktmbuf_alloc(pool());
  if (packet == nullptr) return nullptr;
  const std::vector<uint8_t> frame = FrameOfSpec(spec);
  std::memcpy(rte_pktmbuf_append(packet, static_cast<uint16_t>(frame.size())), frame.data(),
              frame.size());
  MetaOf(packet) = PacketMeta{.source_qpn = spec.source_qpn,
                              .psn_offset = spec.psn,
                              .retransmission = false,
                              .icrc_present = false,
                              .trusted = false};
  return packet;
}

void FabricTest::Send(const PacketSpec& spec, PortId port) {
  rte_mbuf* packet = NewPacket(spec);
  ASSERT_NE(packet, nullptr);
  fabric_->Transmit(port, {&packet, 1}, now_);
}

void FabricTest::SendPsns(uint32_t first, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) Send({.psn = first + i});
}

uint32_t FabricTest::AddRule(const std::string& text) {
  std::string error;
  const uint32_t id = fabric_->AddRule(text, &error);
  EXPECT_NE(id, 0u) << text << ": " << error;
  return id;
}

uint64_t FabricTest::Hits(uint32_t id) {
  for (const nlohmann::json& rule : fabric_->ListRules()) {
    if (rule["id"] == id) return rule["hits"];
  }
  ADD_FAILURE() << "no rule " << id;
  return 0;
}

std::vector<FabricTest::Received> FabricTest::Receive(PortId port) {
  std::vector<Received> all;
  rte_mbuf* burst[32];
  while (const size_t count = fabric_->Receive(port, burst)) {
    for (size_t i = 0; i < count; ++i) {
      Received received;
      const auto* bytes = reinterpret_cast<const uint8_t*>(FrameOf(burst[i]));
      received.frame.assign(bytes, bytes + burst[i]->data_len);
      received.meta = MetaOf(burst[i]);
      received.psn = received.meta.psn_offset;
      all.push_back(received);
      rte_pktmbuf_free(burst[i]);
    }
  }
  return all;
}

std::vector<uint32_t> FabricTest::ReceivePsns(PortId port) {
  std::vector<uint32_t> psns;
  for (const Received& received : Receive(port)) psns.push_back(received.psn);
  return psns;
}

}  // namespace verbena::nic

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  char folder[] = "/tmp/verbena-fabric-XXXXXX";
  if (mkdtemp(folder) == nullptr) return 1;
  verbena::nic::DpdkOptions options;
  options.instance = "test-" + std::to_string(getpid());
  options.run_folder = folder;
  options.memory_mib = 64;
  std::string error;
  if (verbena::nic::InitDpdk(options, &error)) {
    verbena::nic::packet_pool =
        verbena::nic::CreatePacketPool("packets", verbena::nic::kPoolPackets, &error);
  }
  int status = 1;
  if (verbena::nic::packet_pool == nullptr) {
    fprintf(stderr, "%s\n", error.c_str());
  } else {
    status = RUN_ALL_TESTS();
    rte_mempool_free(verbena::nic::packet_pool);
  }
  verbena::nic::CleanUpDpdk();
  rmdir(folder);
  return status;
}
