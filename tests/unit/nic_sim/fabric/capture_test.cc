// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/capture.h"

#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "nic_sim/fabric/fabric.h"
#include "tests/unit/nic_sim/fabric/fabric_fixture.h"

namespace verbena::nic {
namespace {

using ::testing::ElementsAre;

// A reader of pcapng of its own, from the format's text (little-endian only).
struct PcapPacket {
  uint32_t interface = 0;
  uint64_t time_ns = 0;
  int direction = 0;  // 1 inbound, 2 outbound
  std::vector<uint8_t> frame;
};
struct Pcap {
  std::vector<std::string> interfaces;
  std::vector<PcapPacket> packets;
};

class PcapReader {
 public:
  explicit PcapReader(std::vector<uint8_t> bytes) : bytes_(std::move(bytes)) {}

  void ReadTo(Pcap* pcap) {
    size_t at = 0;
    while (at < bytes_.size()) {
      const uint32_t type = U32(at);
      const uint32_t length = U32(at + 4);
      ASSERT_EQ(length % 4, 0u);
      ASSERT_GE(length, 12u);
      ASSERT_LE(at + length, bytes_.size());
      ASSERT_EQ(U32(at + length - 4), length);
      if (at == 0) {
        ASSERT_EQ(type, 0x0a0d0d0au);
      }
      const size_t end = at + length - 4;
      if (type == 0x0a0d0d0a) {
        ASSERT_EQ(U32(at + 8), 0x1a2b3c4du);
        ASSERT_EQ(U16(at + 12), 1);  // version 1.0
        ASSERT_EQ(U16(at + 14), 0);
      } else if (type == 1) {
        ASSERT_EQ(U16(at + 8), 1);  // Ethernet
        bool nanoseconds = false;
        Options(at + 16, end, [&](uint16_t code, size_t where, uint16_t size) {
          if (code == 2) pcap->interfaces.emplace_back(&bytes_[where], &bytes_[where] + size);
          if (code == 9) nanoseconds = size == 1 && bytes_[where] == 9;
        });
        ASSERT_TRUE(nanoseconds);
      } else if (type == 6) {
        PcapPacket packet;
        packet.interface = U32(at + 8);
        packet.time_ns = (uint64_t{U32(at + 12)} << 32) | U32(at + 16);
        const uint32_t captured = U32(at + 20);
        ASSERT_EQ(U32(at + 24), captured);
        ASSERT_LE(at + 28 + captured, end);
        packet.frame.assign(&bytes_[at + 28], &bytes_[at + 28] + captured);
        Options(at + 28 + (captured + 3) / 4 * 4, end, [&](uint16_t code, size_t where, uint16_t) {
          if (code == 2) packet.direction = static_cast<int>(U32(where) & 3);
        });
        pcap->packets.push_back(packet);
      } else {
        FAIL() << "block type " << type;
      }
      at += length;
    }
  }

 private:
  uint16_t U16(size_t at) const { return static_cast<uint16_t>(bytes_[at] | bytes_[at + 1] << 8); }
  uint32_t U32(size_t at) const { return U16(at) | uint32_t{U16(at + 2)} << 16; }

  template <typename Use>
  void Options(size_t at, size_t end, Use use) {
    while (at + 4 <= end) {
      const uint16_t code = U16(at);
      const uint16_t size = U16(at + 2);
      if (code == 0) return;
      ASSERT_LE(at + 4 + size, end);
      use(code, at + 4, size);
      at += 4u + (size + 3u) / 4 * 4;
    }
  }

  std::vector<uint8_t> bytes_;
};

class CaptureTest : public FabricTest {
 protected:
  void SetUp() override {
    FabricTest::SetUp();
    char name[] = "/tmp/verbena-capture-XXXXXX";
    fd_ = mkstemp(name);
    ASSERT_GE(fd_, 0);
    path_ = name;
  }
  void TearDown() override {
    unlink(path_.c_str());
    FabricTest::TearDown();
  }

  uint32_t Start(PortId port, CaptureStage stage, uint64_t count = 0) {
    const uint32_t id = fabric_->StartCapture(dup(fd_), port, stage, count);
    EXPECT_NE(id, 0u);
    return id;
  }
  CaptureResult Finish(uint32_t id) {
    std::unique_ptr<CaptureFile> file = fabric_->DetachCapture(id);
    EXPECT_NE(file, nullptr);
    return file->Finish();
  }
  Pcap Read() {
    std::vector<uint8_t> bytes(static_cast<size_t>(lseek(fd_, 0, SEEK_END)));
    EXPECT_EQ(pread(fd_, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    Pcap pcap;
    PcapReader(std::move(bytes)).ReadTo(&pcap);
    return pcap;
  }

  int fd_ = -1;
  std::string path_;
};

std::vector<int> Directions(const Pcap& pcap) {
  std::vector<int> directions;
  for (const PcapPacket& packet : pcap.packets) {
    directions.push_back(static_cast<int>(packet.interface) * 10 + packet.direction);
  }
  return directions;
}

TEST_F(CaptureTest, WritesAPacketOncePerPortThatItCrosses) {
  const uint32_t id = Start(Fabric::kAllPorts, CaptureStage::kAfter);
  Send({.psn = 1});
  Send({.source = kAddress1, .destination = kAddress0}, 1);
  Send({.destination = kAddress0});  // loopback
  const CaptureResult result = Finish(id);
  EXPECT_EQ(result.packets, 6u);
  EXPECT_EQ(result.missed, 0u);
  EXPECT_EQ(result.error, 0);
  const Pcap pcap = Read();
  EXPECT_THAT(pcap.interfaces, ElementsAre("verbena0", "verbena1"));
  // Interface * 10 + (1 inbound, 2 outbound).
  EXPECT_THAT(Directions(pcap), ElementsAre(2, 11, 12, 1, 2, 1));
  Receive(0);
  Receive(1);
}

TEST_F(CaptureTest, OnePortHasOnlyItsOwnPackets) {
  const uint32_t id = Start(1, CaptureStage::kAfter);
  Send({});
  Send({.destination = kAddress0});
  Send({.source = kAddress1, .destination = kAddress0}, 1);
  EXPECT_EQ(Finish(id).packets, 2u);
  const Pcap pcap = Read();
  EXPECT_THAT(pcap.interfaces, ElementsAre("verbena1"));
  EXPECT_THAT(Directions(pcap), ElementsAre(1, 2));
  Receive(0);
  Receive(1);
}

TEST_F(CaptureTest, FramesAreCompleteWithTheirIcrc) {
  const uint32_t id = Start(0, CaptureStage::kAfter);
  const PacketSpec specs[] = {{.psn = 3, .payload_bytes = 4096}, {.ipv6 = true}, {.vlan = true}};
  for (const PacketSpec& spec : specs) Send(spec);
  Finish(id);
  const Pcap pcap = Read();
  ASSERT_EQ(pcap.packets.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const std::vector<uint8_t> expected = FrameOfSpec(specs[i]);
    const std::vector<uint8_t>& frame = pcap.packets[i].frame;
    ASSERT_EQ(frame.size(), expected.size());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end() - 4, frame.begin()));
    EXPECT_TRUE(IcrcIsRight(frame));
  }
  for (const Received& received : Receive()) EXPECT_TRUE(received.meta.trusted);
}

TEST_F(CaptureTest, TimesAreWallClockWithTheDistancesOfTheDeviceClock) {
  const uint32_t id = Start(0, CaptureStage::kAfter);
  Send({});
  AdvanceUs(1234);
  now_ += transport::Duration::Nanoseconds(567);
  Send({});
  Finish(id);
  const Pcap pcap = Read();
  ASSERT_EQ(pcap.packets.size(), 2u);
  EXPECT_EQ(pcap.packets[1].time_ns - pcap.packets[0].time_ns, 1234567u);
  EXPECT_NEAR(static_cast<double>(pcap.packets[0].time_ns) / 1e9,
              static_cast<double>(time(nullptr)), 60);
  Receive();
}

TEST_F(CaptureTest, AfterEqualsTheCountersAndBeforeHasWhatRulesTake) {
  char name[] = "/tmp/verbena-capture-XXXXXX";
  const int before_fd = mkstemp(name);
  ASSERT_GE(before_fd, 0);
  unlink(name);
  const uint32_t before = fabric_->StartCapture(dup(before_fd), 0, CaptureStage::kBefore, 0);
  const uint32_t after = Start(Fabric::kAllPorts, CaptureStage::kAfter);
  const uint32_t drop = AddRule("drop every=5 dir=tx");
  AddRule("drop every=7 dir=rx");
  AddRule("duplicate every=3 dir=tx");
  AddRule("duplicate every=4 dir=rx");
  SendPsns(0, 100);
  Send({.destination = 0x7f580009});  // no route: crosses no port
  EXPECT_EQ(Finish(before).packets, 100u);
  EXPECT_EQ(Hits(drop), 20u);
  Finish(after);
  uint64_t packets[2][3] = {};
  uint64_t data[2][3] = {};
  for (const PcapPacket& packet : Read().packets) {
    ++packets[packet.interface][packet.direction];
    data[packet.interface][packet.direction] += (packet.frame.size() - 14) / 4;
  }
  EXPECT_EQ(packets[0][2], fabric_->counters(0).port_xmit_packets);
  EXPECT_EQ(data[0][2], fabric_->counters(0).port_xmit_data);
  EXPECT_EQ(packets[1][1], fabric_->counters(1).port_rcv_packets);
  EXPECT_EQ(data[1][1], fabric_->counters(1).port_rcv_data);
  EXPECT_EQ(packets[0][1] + packets[1][2], 0u);
  EXPECT_NE(packets[0][2], packets[1][1]);
  Receive();
  close(before_fd);
}

TEST_F(CaptureTest, EndsAtItsCount) {
  const uint32_t id = Start(Fabric::kAllPorts, CaptureStage::kAfter, 5);
  SendPsns(0, 2);
  EXPECT_FALSE(fabric_->CaptureDone(id));
  SendPsns(2, 8);
  EXPECT_TRUE(fabric_->CaptureDone(id));
  const CaptureResult result = Finish(id);
  EXPECT_EQ(result.packets, 5u);
  EXPECT_EQ(result.missed, 0u);
  EXPECT_EQ(Read().packets.size(), 5u);
  EXPECT_EQ(Receive().size(), 10u);
  EXPECT_TRUE(fabric_->CaptureDone(id));
  EXPECT_EQ(fabric_->DetachCapture(id), nullptr);
}

TEST_F(CaptureTest, LosesNothingWhenMuchMorePassesThanTheBufferHolds) {
  const uint32_t id = Start(0, CaptureStage::kAfter);
  constexpr uint32_t kPackets = 6000;  // 25 MB of frames, buffer 2 * 4 MiB
  for (uint32_t i = 0; i < kPackets; ++i) {
    Send({.psn = i, .payload_bytes = 4096});
    if (i % 32 == 0) Receive();
  }
  Receive();
  const CaptureResult result = Finish(id);
  EXPECT_EQ(result.packets, kPackets);
  EXPECT_EQ(result.missed, 0u);
  const Pcap pcap = Read();
  ASSERT_EQ(pcap.packets.size(), kPackets);
  for (uint32_t i = 0; i < kPackets; ++i) {
    const std::vector<uint8_t>& frame = pcap.packets[i].frame;
    const uint32_t psn = uint32_t{frame[51]} << 16 | uint32_t{frame[52]} << 8 | frame[53];
    ASSERT_EQ(psn, i);
  }
}

// The writer is often done before the engine, which waits for room, runs again.
TEST_F(CaptureTest, FastWriterAndSmallBufferDoNotHangOrLose) {
  CaptureFile file(open("/dev/null", O_WRONLY), {"verbena0"}, 0, 1 << 17);
  rte_mbuf* packet = NewPacket({.payload_bytes = 4096});
  for (int i = 0; i < 50'000; ++i) file.Add(0, Direction::kTx, packet, now_);
  const CaptureResult result = file.Finish();
  EXPECT_EQ(result.packets, 50'000u);
  EXPECT_EQ(result.missed, 0u);
  rte_pktmbuf_free(packet);
}

TEST_F(CaptureTest, FullBufferStallsTheEngineOnceAndThenCountsMisses) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  CaptureFile file(pipe_fds[1], {"verbena0"}, 0, 1 << 17);  // nobody reads the pipe
  rte_mbuf* packet = NewPacket({.payload_bytes = 4096});
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 1000; ++i) file.Add(0, Direction::kTx, packet, now_);
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_GT(took, std::chrono::milliseconds(900));
  EXPECT_LT(took, std::chrono::seconds(10));
  // Now someone reads: what was taken is written, the rest was counted.
  std::vector<uint8_t> bytes;
  std::thread reader([&] {
    uint8_t buffer[65536];
    ssize_t size;
    while ((size = read(pipe_fds[0], buffer, sizeof buffer)) > 0) {
      bytes.insert(bytes.end(), buffer, buffer + size);
    }
  });
  const CaptureResult result = file.Finish();
  reader.join();
  close(pipe_fds[0]);
  EXPECT_EQ(result.error, 0);
  EXPECT_GT(result.missed, 500u);
  EXPECT_EQ(result.packets + result.missed, 1000u);
  Pcap pcap;
  PcapReader(std::move(bytes)).ReadTo(&pcap);
  EXPECT_EQ(pcap.packets.size(), result.packets);
  rte_pktmbuf_free(packet);
}

TEST_F(CaptureTest, FinishDoesNotWaitForeverForAReader) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  CaptureFile file(pipe_fds[1], {"verbena0"}, 0);
  rte_mbuf* packet = NewPacket({.payload_bytes = 4096});
  for (int i = 0; i < 100; ++i) file.Add(0, Direction::kTx, packet, now_);
  const CaptureResult result = file.Finish();
  EXPECT_EQ(result.error, ETIMEDOUT);
  EXPECT_LT(result.packets, 20u);  // a pipe holds 64 KiB
  EXPECT_EQ(result.packets + result.missed, 100u);
  EXPECT_EQ(file.Finish().packets, result.packets);
  close(pipe_fds[0]);
  rte_pktmbuf_free(packet);
}

bool WaitForDone(const Fabric& fabric, uint32_t id) {
  for (int i = 0; i < 1000 && !fabric.CaptureDone(id); ++i) usleep(10'000);
  return fabric.CaptureDone(id);
}

TEST_F(CaptureTest, ClosedPipeEndsTheCaptureAndNotTheProcess) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  close(pipe_fds[0]);
  const uint32_t id = fabric_->StartCapture(pipe_fds[1], 0, CaptureStage::kAfter, 0);
  ASSERT_NE(id, 0u);
  EXPECT_TRUE(WaitForDone(*fabric_, id));
  Send({});
  EXPECT_EQ(Receive().size(), 1u);
  const CaptureResult result = Finish(id);
  EXPECT_EQ(result.error, EPIPE);
  EXPECT_EQ(result.packets, 0u);
}

TEST_F(CaptureTest, FullDiskEndsTheCapture) {
  const int full = open("/dev/full", O_WRONLY);
  if (full < 0) GTEST_SKIP() << "no /dev/full";
  const uint32_t id = fabric_->StartCapture(full, 0, CaptureStage::kAfter, 0);
  EXPECT_TRUE(WaitForDone(*fabric_, id));
  EXPECT_EQ(Finish(id).error, ENOSPC);
}

TEST_F(CaptureTest, NumberOfCapturesIsBoundedAndPortsAreChecked) {
  EXPECT_EQ(fabric_->StartCapture(dup(fd_), 2, CaptureStage::kAfter, 0), 0u);
  for (int i = 0; i < 16; ++i) Start(0, CaptureStage::kAfter);
  EXPECT_EQ(fabric_->StartCapture(dup(fd_), 0, CaptureStage::kAfter, 0), 0u);
  // The fabric ends those that run.
}

// Stock software reads the file and finds nothing malformed.
TEST_F(CaptureTest, TsharkReadsInterfacesDirectionsAndPackets) {
  if (system("command -v tshark > /dev/null 2>&1") != 0) GTEST_SKIP() << "no tshark";
  const uint32_t id = Start(Fabric::kAllPorts, CaptureStage::kAfter);
  Send({.dest_qpn = 0x1234, .psn = 0xabcdef});
  Send({.destination = kAddress0, .ipv6 = true});
  EXPECT_EQ(Finish(id).packets, 4u);
  Receive(0);
  Receive(1);
  const std::string command =
      "timeout 60 tshark -n -r " + path_ +
      " --disable-protocol rpcordma --disable-protocol infiniband.eoib -T fields -E separator=, "
      "-e frame.interface_name -e frame.packet_flags_direction -e infiniband.bth.opcode "
      "-e infiniband.bth.destqp -e infiniband.bth.psn -e _ws.malformed 2>/dev/null";
  FILE* output = popen(command.c_str(), "r");
  ASSERT_NE(output, nullptr);
  std::string text;
  char buffer[4096];
  while (const size_t size = fread(buffer, 1, sizeof buffer, output)) text.append(buffer, size);
  EXPECT_EQ(pclose(output), 0);
  EXPECT_EQ(text,
            "verbena0,0x00000002,4,0x001234,11259375,\n"
            "verbena1,0x00000001,4,0x001234,11259375,\n"
            "verbena0,0x00000002,4,0x000022,0,\n"
            "verbena0,0x00000001,4,0x000022,0,\n");
}

}  // namespace
}  // namespace verbena::nic
