// SPDX-License-Identifier: Apache-2.0
//
// What the RC state machines cost per message, stage by stage, on one core:
// 8-byte WRITEs and SENDs in batches of 32, headers really written and parsed,
// no ICRC, memory that commits once per batch. Prints nanoseconds, of
// each stage the median over all batches (the machine may be busy); not a test.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "transport/rc/requester.h"
#include "transport/rc/responder.h"
#include "transport/wire/packet_builder.h"
#include "transport/wire/packet_view.h"

namespace verbena::transport {
namespace {

constexpr int kBatch = 32;
constexpr int kRounds = 50'000;

class BenchMemory : public MemoryPort {
 public:
  MemoryStatus Check(uint32_t, uint64_t, uint64_t, MemoryAccess) override {
    return MemoryStatus::kOk;
  }
  MemoryStatus Place(const MemorySegment& to, std::span<const std::byte> bytes, MemoryAccess, bool,
                     Ticket* ticket) override {
    std::memcpy(&storage_[to.address], bytes.data(), bytes.size());
    *ticket = ++ticket_;
    return MemoryStatus::kOk;
  }
  MemoryStatus Atomic(uint32_t, uint64_t, const AtomicOperation&, Ticket* ticket) override {
    *ticket = ++ticket_;
    return MemoryStatus::kOk;
  }
  MemoryStatus Invalidate(uint32_t) override { return MemoryStatus::kOk; }

  const std::byte* At(uint64_t address) const { return &storage_[address]; }
  Ticket ticket() const { return ticket_; }

 private:
  std::array<std::byte, 4096> storage_{};
  Ticket ticket_ = 0;
};

class BenchReceives : public ReceiveQueuePort {
 public:
  bool Take(RecvRequest* request) override {
    request->wr_id = ++taken_;
    request->wqe_index = 0;
    request->malformed = false;
    request->sge_count = 1;
    request->sges[0] = {64, 64, 1};
    return true;
  }
  void PutBack() override { --taken_; }

 private:
  uint64_t taken_ = 0;
};

struct BenchFrame {
  size_t bytes = 0;
  std::array<std::byte, 256> data;
};

TransportHeaders HeadersFor(const TxPacket& packet) {
  const OpcodeTraits& traits = TraitsOf(packet.opcode);
  TransportHeaders headers;
  headers.bth.opcode = packet.opcode;
  headers.bth.psn = packet.psn;
  headers.bth.ack_req = packet.ack_request;
  if (traits.has_reth()) {
    headers.reth = {packet.remote_address, Rkey(packet.rkey), packet.dma_length};
  }
  if (traits.has_aeth()) headers.aeth = {packet.syndrome, packet.msn};
  return headers;
}

void Encode(const PacketTemplate& path, const TxPacket& packet, const BenchMemory& memory,
            BenchFrame* frame) {
  const size_t headers =
      path.WriteHeaders(HeadersFor(packet), packet.payload_bytes, frame->data.data());
  size_t at = headers;
  for (uint32_t i = 0; i < packet.segment_count; ++i) {
    std::memcpy(&frame->data[at], memory.At(packet.segments[i].address), packet.segments[i].length);
    at += packet.segments[i].length;
  }
  frame->bytes = headers + packet.payload_bytes + PadBytes(packet.payload_bytes) + kIcrcBytes;
}

class Bench {
 public:
  Bench() : requester_({.max_wr = 128, .max_sge = 4}, memory_), responder_(memory_, receives_) {
    requester_.Start({.first_psn = Psn(0), .max_rd_atomic = 16});
    responder_.Start({.expected_psn = Psn(0),
                      .max_dest_rd_atomic = 16,
                      .access_flags = kAccessRemoteWrite | kAccessRemoteRead});
    PacketAddress address;
    address.source_gid = Gid::FromIpv4(0x7f580001);
    address.destination_gid = Gid::FromIpv4(0x7f580002);
    path_ = PacketTemplate(address);
  }

  void Run(const char* name, WrOpcode opcode) {
    for (auto& laps : laps_) {
      laps.clear();
      laps.reserve(kRounds);
    }
    for (int round = 0; round < kRounds; ++round) Round(opcode);
    double sum = 0;
    double machines = 0;
    std::printf("%s:", name);
    for (size_t i = 0; i < laps_.size(); ++i) {
      auto& laps = laps_[i];
      std::nth_element(laps.begin(), laps.begin() + kRounds / 2, laps.end());
      const double ns = static_cast<double>(laps[kRounds / 2]) / kBatch;
      std::printf(" %s %.1f", kStageNames[i], ns);
      sum += ns;
      if (i != kEncode && i != kParse) machines += ns;
    }
    std::printf("; state machines %.1f, all %.1f ns per message\n", machines, sum);
  }

 private:
  enum Stage { kPost, kTransmit, kEncode, kParse, kRequest, kAcks, kComplete, kStages };
  static constexpr const char* kStageNames[] = {"post",    "transmit", "encode",  "parse",
                                                "request", "acks",     "complete"};

  static int64_t Clock() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void Lap(Stage stage) {
    const int64_t now = Clock();
    laps_[stage].push_back(now - last_);
    last_ = now;
  }

  void Round(WrOpcode opcode) {
    now_ += Duration::Microseconds(5);
    const MemorySegment sge{0, 8, 1};
    last_ = Clock();
    for (int i = 0; i < kBatch; ++i) {
      SendRequest request;
      request.opcode = opcode;
      request.signaled = true;
      request.remote_address = 128;
      request.sges = {&sge, 1};
      requester_.Post(request, now_);
    }
    Lap(kPost);
    int count = 0;
    while (count < kBatch && requester_.PollTransmit(now_, &packets_[count])) ++count;
    Lap(kTransmit);
    for (int i = 0; i < count; ++i) Encode(path_, packets_[i], memory_, &frames_[i]);
    Lap(kEncode);
    for (int i = 0; i < count; ++i) {
      views_[i] = *PacketView::Parse({frames_[i].data.data(), frames_[i].bytes});
    }
    Lap(kParse);
    Completion completion;
    for (int i = 0; i < count; ++i) responder_.HandleRequest(views_[i], now_);
    responder_.HandleCommitted(memory_.ticket(), now_);
    while (responder_.PollCompletion(&completion)) ++completions_;
    Lap(kRequest);
    TxPacket ack;
    while (responder_.PollTransmit(now_, &ack)) {
      Encode(path_, ack, memory_, &frames_[0]);
      const auto view = PacketView::Parse({frames_[0].data.data(), frames_[0].bytes});
      requester_.HandleResponse(*view, now_);
    }
    Lap(kAcks);
    while (requester_.PollCompletion(&completion)) ++completions_;
    Lap(kComplete);
  }

  BenchMemory memory_;
  BenchReceives receives_;
  RcRequester requester_;
  RcResponder responder_;
  PacketTemplate path_;
  Time now_ = Time::Zero();
  int64_t last_ = 0;
  std::array<std::vector<int64_t>, kStages> laps_;
  uint64_t completions_ = 0;
  TxPacket packets_[kBatch];
  BenchFrame frames_[kBatch];
  PacketView views_[kBatch];
};

}  // namespace
}  // namespace verbena::transport

int main() {
  auto bench = std::make_unique<verbena::transport::Bench>();
  bench->Run("8-byte WRITE", verbena::transport::WrOpcode::kRdmaWrite);
  bench->Run("8-byte SEND", verbena::transport::WrOpcode::kSend);
  return 0;
}
