// SPDX-License-Identifier: Apache-2.0
#include "tests/testing/rc_pair.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/testing/frames.h"
#include "transport/wire/describe.h"

namespace verbena::testing {

using transport::AsyncEventType;
using transport::Completion;
using transport::MemoryStatus;
using transport::PacketView;
using transport::Time;
using transport::TransportHeaders;
using transport::TxPacket;

namespace {

uint32_t FromWire(uint32_t wire_bytes) {
  std::byte bytes[4];
  std::memcpy(bytes, &wire_bytes, sizeof(bytes));
  return transport::LoadBe32(bytes);
}

TransportHeaders HeadersFor(const TxPacket& packet) {
  const transport::OpcodeTraits& traits = transport::TraitsOf(packet.opcode);
  TransportHeaders headers;
  headers.bth.opcode = packet.opcode;
  headers.bth.psn = packet.psn;
  headers.bth.ack_req = packet.ack_request;
  headers.bth.solicited = packet.solicited;
  headers.bth.dest_qpn = transport::Qpn(0x11);
  if (traits.has_reth()) {
    headers.reth = {packet.remote_address, transport::Rkey(packet.rkey), packet.dma_length};
  }
  if (traits.has_atomic_eth()) {
    headers.atomic_eth = {packet.remote_address, transport::Rkey(packet.rkey), packet.swap_or_add,
                          packet.compare};
  }
  if (traits.has_aeth()) headers.aeth = {packet.syndrome, packet.msn};
  if (traits.has_atomic_ack_eth()) headers.atomic_ack_eth = {packet.original};
  if (traits.has_imm()) headers.imm = {FromWire(packet.imm_or_inv)};
  if (traits.has_feth()) headers.feth = {packet.imm_or_inv};
  if (traits.has_ieth()) headers.ieth = {transport::Rkey(packet.imm_or_inv)};
  return headers;
}

}  // namespace

PacketView ViewOf(const Frame& frame) {
  auto parsed = PacketView::Parse(frame);
  if (!parsed.ok() || !parsed->VerifyIcrc()) {
    std::fprintf(stderr, "a frame that was built is not well-formed\n");
    std::abort();
  }
  return *parsed;
}

bool FakeReceiveQueue::Take(transport::RecvRequest* request) {
  if (queue_.empty()) return false;
  last_ = std::move(queue_.front());
  queue_.pop_front();
  request->wr_id = last_.wr_id;
  request->wqe_index = static_cast<uint32_t>(last_.wr_id);
  request->malformed = last_.malformed;
  request->sge_count = static_cast<uint32_t>(last_.sges.size());
  std::copy(last_.sges.begin(), last_.sges.end(), request->sges);
  return true;
}

void FakeReceiveQueue::Post(uint64_t wr_id, std::vector<transport::MemorySegment> sges,
                            bool malformed) {
  queue_.push_back({wr_id, std::move(sges), malformed});
}

RcSide::RcSide(const RcOptions& options)
    : requester(options.capacity, memory), responder(memory, receive_queue) {
  requester.Start({.pmtu = options.pmtu,
                   .first_psn = options.psn,
                   .timeout = options.timeout,
                   .retry_cnt = options.retry_cnt,
                   .rnr_retry = options.rnr_retry,
                   .max_rd_atomic = options.max_rd_atomic});
  responder.Start({.pmtu = options.pmtu,
                   .expected_psn = options.psn,
                   .max_dest_rd_atomic = options.max_rd_atomic,
                   .min_rnr_timer = options.min_rnr_timer,
                   .access_flags = options.access_flags});
}

std::optional<Frame> RcSide::Build(const TxPacket& packet, bool is_response, Time now) {
  if (on_transmit) on_transmit(packet, is_response);
  std::vector<std::byte> payload;
  if (packet.payload_bytes != 0 && packet.inline_payload != nullptr) {
    payload.assign(packet.inline_payload, packet.inline_payload + packet.payload_bytes);
  } else {
    const MemoryStatus status = memory.Fetch(std::span(packet.segments, packet.segment_count),
                                             packet.payload_access, &payload);
    if (status != MemoryStatus::kOk) {
      ++fetches_failed;
      if (is_response) {
        responder.HandleFetchFailed(packet.psn, status, now);
      } else {
        requester.HandleFetchFailed(packet.psn, status, now);
      }
      return std::nullopt;
    }
  }
  if (payload.size() != packet.payload_bytes) {
    std::fprintf(stderr, "segments and payload_bytes differ\n");
    std::abort();
  }
  return BuildFrame(Ipv4Address(), HeadersFor(packet), payload);
}

std::vector<Frame> RcSide::Transmit(Time now, size_t limit) {
  std::vector<Frame> frames;
  const auto poison = [](TxPacket* packet) {
    std::memset(static_cast<void*>(packet), 0xa5, sizeof(*packet));
  };
  for (const bool is_response : {true, false}) {
    while (frames.size() < limit) {
      TxPacket packet;
      poison(&packet);
      const bool got =
          is_response ? responder.PollTransmit(now, &packet) : requester.PollTransmit(now, &packet);
      if (!got) break;
      if (auto frame = Build(packet, is_response, now); frame.has_value()) {
        frames.push_back(std::move(*frame));
      }
    }
  }
  return frames;
}

bool RcSide::Deliver(const Frame& frame, Time now) {
  auto parsed = PacketView::Parse(frame);
  if (!parsed.ok() || !parsed->VerifyIcrc()) return false;
  if (parsed->traits().is_response()) {
    requester.HandleResponse(*parsed, now);
    return true;
  }
  responder.HandleRequest(*parsed, now);
  return true;
}

void RcSide::Commit(Time now, bool fail) {
  const FakeMemory::Committed committed = memory.CommitNext(fail);
  if (committed.failure.has_value()) {
    responder.HandlePlacementFailed(committed.ticket, *committed.failure, now);
    requester.HandlePlacementFailed(committed.ticket, *committed.failure, now);
    return;
  }
  if (committed.is_atomic) {
    responder.HandleAtomicCommitted(committed.ticket, committed.original, now);
  }
  responder.HandleCommitted(committed.ticket, now);
  requester.HandleCommitted(committed.ticket, now);
}

void RcSide::CommitAll(Time now) {
  while (memory.HasPending()) Commit(now);
}

void RcSide::ModifyToError() {
  in_error = true;
  requester.Flush();
  responder.Flush();
}

void RcSide::Poll() {
  // The completions of before the failure come before those that it flushes.
  for (int round = 0; round < 2; ++round) {
    Completion completion;
    while (requester.PollCompletion(&completion)) {
      send_completions.push_back(completion);
      if (on_completion) on_completion(completion);
    }
    while (responder.PollCompletion(&completion)) {
      recv_completions.push_back(completion);
      if (on_completion) on_completion(completion);
    }
    AsyncEventType event;
    while (responder.PollEvent(&event)) events.push_back(event);
    if (in_error || !(requester.failed() || responder.failed())) return;
    ModifyToError();
  }
}

RcPair::RcPair(const RcOptions& options_a, const RcOptions& options_b)
    : a(options_a), b(options_b) {}

size_t RcPair::Exchange(RcSide& from, RcSide& to) {
  const std::vector<Frame> frames = from.Transmit(now);
  for (const Frame& frame : frames) {
    const PacketView view = ViewOf(frame);
    const bool lost = lose && lose(view);
    ladder.push_back(std::string(&from == &a ? "a>b " : "b>a ") + (lost ? "LOST " : "") +
                     transport::Describe(view));
    if (!lost) to.Deliver(frame, now);
  }
  return frames.size();
}

void RcPair::Drive() {
  for (int round = 0; round < 10000; ++round) {
    const size_t moved = Exchange(a, b) + Exchange(b, a);
    const bool committed = a.memory.HasPending() || b.memory.HasPending();
    a.CommitAll(now);
    b.CommitAll(now);
    a.Poll();
    b.Poll();
    if (moved == 0 && !committed) return;
  }
  std::fprintf(stderr, "RcPair::Drive does not come to rest\n");
  std::abort();
}

bool RcPair::AdvanceToTimer() {
  const Time next = std::min(a.requester.next_timeout(), b.requester.next_timeout());
  if (next.IsNever()) return false;
  now = std::max(now, next);
  if (a.requester.next_timeout() <= now) a.Timeout(now);
  if (b.requester.next_timeout() <= now) b.Timeout(now);
  return true;
}

}  // namespace verbena::testing
