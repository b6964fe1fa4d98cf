// SPDX-License-Identifier: Apache-2.0
//
// One direction of a UC connection: a requester, frames, a responder. Every
// packet goes through bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tests/testing/fake_memory.h"
#include "tests/testing/frames.h"
#include "tests/testing/rc_pair.h"
#include "transport/uc/requester.h"
#include "transport/uc/responder.h"
#include "transport/wire/packet_builder.h"

namespace verbena::testing {

inline constexpr uint32_t kUcSourceKey = 7;
inline constexpr uint32_t kUcTargetKey = 8;
inline constexpr uint32_t kUcReceiveKey = 9;
inline constexpr uint64_t kUcBase = 0x10000;

class UcPair {
 public:
  explicit UcPair(transport::Psn psn = transport::Psn(0xfffffe), size_t bytes = 1 << 16)
      : requester(memory), responder(memory, receives) {
    for (const uint32_t key : {kUcSourceKey, kUcTargetKey, kUcReceiveKey}) {
      memory.AddRegion(key, kUcBase, bytes);
    }
    requester.Start({.pmtu = transport::Pmtu::k256, .first_psn = psn});
    responder.Start({.pmtu = transport::Pmtu::k256,
                     .expected_psn = psn,
                     .access_flags = transport::kAccessRemoteWrite});
  }

  // A WR with one SGE into the source; completes with wr_id.
  void Post(uint64_t wr_id, transport::WrOpcode opcode, uint32_t bytes, uint64_t offset = 0,
            uint64_t remote_offset = 0) {
    sge = {.address = kUcBase + offset, .length = bytes, .key = kUcSourceKey};
    transport::SendRequest request;
    request.wr_id = wr_id;
    request.wqe_index = static_cast<uint32_t>(wr_id);
    request.opcode = opcode;
    request.signaled = true;
    request.solicited = true;
    request.imm_or_inv = static_cast<uint32_t>(wr_id) * 0x01010101;
    request.remote_address = kUcBase + remote_offset;
    request.rkey = kUcTargetKey;
    request.sges = {&sge, 1};
    requester.Post(request);
  }

  // The next packet, its payload read; nothing if there is none or it cannot be
  // read.
  std::optional<Frame> Transmit() {
    transport::TxPacket packet;
    if (!requester.PollTransmit(&packet)) return std::nullopt;
    std::vector<std::byte> payload;
    const auto segments = std::span(packet.segments, packet.segment_count);
    if (memory.Fetch(segments, packet.payload_access, &payload) != transport::MemoryStatus::kOk) {
      requester.HandleFetchFailed(packet.psn);
      return std::nullopt;
    }
    requester.HandleFetched(packet.psn);
    transport::TransportHeaders headers;
    headers.bth.opcode = packet.opcode;
    headers.bth.psn = packet.psn;
    headers.bth.solicited = packet.solicited;
    headers.reth = {.va = packet.remote_address,
                    .rkey = transport::Rkey(packet.rkey),
                    .dma_length = packet.dma_length};
    headers.imm = {.value = transport::LoadBe32(reinterpret_cast<std::byte*>(&packet.imm_or_inv))};
    return BuildFrame(Ipv4Address(), headers, payload);
  }
  std::vector<Frame> TransmitAll() {
    std::vector<Frame> frames;
    while (auto frame = Transmit()) frames.push_back(std::move(*frame));
    return frames;
  }

  transport::UcResponder::Verdict Deliver(const Frame& frame) {
    const auto verdict = responder.HandleRequest(ViewOf(frame));
    while (!deferred && memory.HasPending()) Commit();
    return verdict;
  }
  void Commit(bool fail = false) {
    const FakeMemory::Committed committed = memory.CommitNext(fail);
    if (committed.failure) {
      responder.HandlePlacementFailed(committed.ticket);
    } else {
      responder.HandleCommitted(committed.ticket);
    }
  }
  void Receive(uint64_t wr_id, uint32_t bytes, uint64_t offset = 0) {
    receives.Post(wr_id, {{.address = kUcBase + offset, .length = bytes, .key = kUcReceiveKey}});
  }
  std::optional<transport::Completion> Sent() {
    transport::Completion completion;
    if (!requester.PollCompletion(&completion)) return std::nullopt;
    return completion;
  }
  std::optional<transport::Completion> Received() {
    transport::Completion completion;
    if (!responder.PollCompletion(&completion)) return std::nullopt;
    return completion;
  }

  FakeMemory memory;
  FakeReceiveQueue receives;
  transport::UcRequester requester;
  transport::UcResponder responder;
  transport::MemorySegment sge;  // of the WR that is being sent
  bool deferred = false;
};

}  // namespace verbena::testing
