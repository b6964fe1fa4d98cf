// SPDX-License-Identifier: Apache-2.0
//
// Two RC QPs connected to each other, in virtual time. Every packet really goes
// through bytes: built with ICRC, parsed with PacketView, ICRC checked. Each
// side plays the engine's part: fetches payloads, commits placements, moves the
// QP to error.
//
// A test either drives both sides until nothing moves (Drive), or handles
// single frames (RcSide::Transmit, RcSide::Deliver).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/testing/fake_memory.h"
#include "transport/rc/requester.h"
#include "transport/rc/responder.h"
#include "transport/wire/packet_builder.h"
#include "transport/wire/packet_view.h"

namespace verbena::testing {

using Frame = std::vector<std::byte>;

// The parsed frame; it must be well-formed and its ICRC right.
transport::PacketView ViewOf(const Frame& frame);

class FakeReceiveQueue : public transport::ReceiveQueuePort {
 public:
  bool Take(transport::RecvRequest* request) override;
  void PutBack() override { queue_.push_front(last_); }
  void Post(uint64_t wr_id, std::vector<transport::MemorySegment> sges, bool malformed = false);
  size_t posted() const { return queue_.size(); }

 private:
  struct Entry {
    uint64_t wr_id;
    std::vector<transport::MemorySegment> sges;
    bool malformed;
  };
  std::deque<Entry> queue_;
  Entry last_;
};

struct RcOptions {
  transport::Pmtu pmtu = transport::Pmtu::k256;
  transport::Psn psn{0xfffffe};  // wraps soon
  uint8_t timeout = 10;          // 4.19 ms
  uint8_t retry_cnt = 7;
  uint8_t rnr_retry = 7;
  uint8_t max_rd_atomic = 4;
  uint8_t min_rnr_timer = 12;
  uint32_t access_flags =
      transport::kAccessRemoteWrite | transport::kAccessRemoteRead | transport::kAccessRemoteAtomic;
  transport::RcRequester::Capacity capacity{.max_wr = 64, .max_sge = 32, .max_inline = 512};
};

// One QP.
class RcSide {
 public:
  explicit RcSide(const RcOptions& options);

  // Takes all that either half wants to send now, at most `limit` packets.
  std::vector<Frame> Transmit(transport::Time now, size_t limit = SIZE_MAX);
  // To the half that it is for; false if parsing or ICRC fails.
  bool Deliver(const Frame& frame, transport::Time now);
  // Commits the oldest pending placement (or makes it fail).
  void Commit(transport::Time now, bool fail = false);
  void CommitAll(transport::Time now);
  void Timeout(transport::Time now) { requester.HandleTimeout(now); }
  // Takes completions and events; moves the QP to error if a half has failed.
  void Poll();
  // modify_qp to ERR.
  void ModifyToError();

  FakeMemory memory;
  FakeReceiveQueue receive_queue;
  transport::RcRequester requester;
  transport::RcResponder responder;

  bool in_error = false;
  std::vector<transport::Completion> send_completions;
  std::vector<transport::Completion> recv_completions;
  std::vector<transport::AsyncEventType> events;
  // Called with each TxPacket before it is built.
  std::function<void(const transport::TxPacket&, bool is_response)> on_transmit;
  // Called with each completion when it is polled.
  std::function<void(const transport::Completion&)> on_completion;
  uint64_t fetches_failed = 0;

 private:
  std::optional<Frame> Build(const transport::TxPacket& packet, bool is_response,
                             transport::Time now);
};

class RcPair {
 public:
  explicit RcPair(const RcOptions& options = {}) : RcPair(options, options) {}
  RcPair(const RcOptions& a, const RcOptions& b);

  // Sends, delivers, commits and completes on both sides until nothing moves.
  // Does not advance the time.
  void Drive();
  // One direction: everything that `from` sends now is delivered to `to`.
  size_t Exchange(RcSide& from, RcSide& to);
  // Moves the time to the earliest timer of either side and fires it; false if
  // there is none.
  bool AdvanceToTimer();
  void Advance(transport::Duration duration) { now += duration; }

  transport::Time now = transport::Time::FromNanoseconds(1'000'000);
  RcSide a;
  RcSide b;
  // Frames for which this returns true are lost.
  std::function<bool(const transport::PacketView&)> lose;
  // One line per packet, in order of sending: for failures.
  std::vector<std::string> ladder;
};

}  // namespace verbena::testing
