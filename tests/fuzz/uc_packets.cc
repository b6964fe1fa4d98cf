// SPDX-License-Identifier: Apache-2.0
//
// Packets into a UC QP. The input is a program: receives are posted, packets
// with valid headers and hostile fields arrive, placements commit late or fail,
// the QP is flushed. Memory is checked at each access, its guards at the end;
// each receive completes once, in order, and nothing that a peer sends ends the
// connection.
#include <algorithm>
#include <deque>
#include <vector>

#include "tests/fuzz/fuzz_target.h"
#include "tests/testing/fake_memory.h"
#include "tests/testing/frames.h"
#include "tests/testing/rc_pair.h"
#include "transport/uc/responder.h"

namespace verbena::fuzz {
namespace {

using namespace transport;

constexpr int kMaxSteps = 200;
constexpr uint32_t kKey = 0x100;
constexpr uint32_t kReadOnly = 0x101;
constexpr uint32_t kGone = 0x102;  // its pages are not there
constexpr uint64_t kBase = 0x10000;
constexpr uint32_t kBytes = 2048;

constexpr Opcode kOpcodes[] = {
    Opcode::kUcSendFirst, Opcode::kUcSendMiddle,   Opcode::kUcSendLast,   Opcode::kUcSendLastImm,
    Opcode::kUcSendOnly,  Opcode::kUcSendOnlyImm,  Opcode::kUcWriteFirst, Opcode::kUcWriteMiddle,
    Opcode::kUcWriteLast, Opcode::kUcWriteLastImm, Opcode::kUcWriteOnly,  Opcode::kUcWriteOnlyImm,
    Opcode::kRcSendOnly,  Opcode::kRcAcknowledge,  Opcode::kUdSendOnly,   Opcode::kXrcSendOnly};

class Program {
 public:
  explicit Program(Input input) : input_(input), responder_(memory_, receives_) {
    memory_.AddRegion(kKey, kBase, kBytes);
    memory_.AddRegion(kReadOnly, kBase, kBytes, kAccessRemoteRead);
    memory_.AddRegion(kGone, kBase, kBytes);
    memory_.Unmap(kGone);
    memory_.set_deferred(true);
    responder_.Start({.pmtu = Pmtu::k256,
                      .expected_psn = psn_,
                      .access_flags = (input_.U8() & 7) != 0 ? uint32_t{kAccessRemoteWrite} : 0});
  }

  void Run() {
    for (int step = 0; step < kMaxSteps && !input_.empty(); ++step) Step();
    if (!flushed_) Flush();
    while (memory_.HasPending()) Commit(false);
    Drain();
    FUZZ_CHECK(posted_.empty());
    FUZZ_CHECK(responder_.flushed());
    FUZZ_CHECK(memory_.AreGuardsIntact());
  }

 private:
  void Step() {
    const uint8_t what = input_.U8();
    switch (what & 7) {
      case 0:
        Post(what);
        break;
      case 1:
        if (memory_.HasPending()) Commit((what & 0xf0) == 0xf0);
        break;
      case 2:
        if ((what & 0xf8) == 0xf8 && !flushed_) Flush();
        break;
      default:
        Packet(what);
        break;
    }
    Drain();
  }

  void Post(uint8_t what) {
    const uint32_t bytes = input_.U16() % 1200;
    const uint32_t key = what >> 3 == 31 ? kGone : what >> 3 == 30 ? 0xbad : kKey;
    faulty_ |= key != kKey;
    posted_.push_back(next_id_);
    const uint32_t half = bytes / 2;
    receives_.Post(next_id_++,
                   {{.address = kBase, .length = half, .key = key},
                    {.address = kBase + half, .length = bytes - half, .key = key}},
                   /*malformed=*/what >> 3 == 29);
    faulty_ |= what >> 3 == 29;
  }

  void Packet(uint8_t what) {
    TransportHeaders headers;
    headers.bth.opcode = kOpcodes[input_.Below(std::size(kOpcodes))];
    psn_ = (what & 0x78) == 0x78 ? Psn(input_.U32()) : psn_ + ((what & 0x70) == 0x70 ? 2 : 0);
    headers.bth.psn = psn_;
    psn_ = psn_.Next();
    const uint8_t fields = input_.U8();
    const uint32_t key = (fields & 7) == 7 ? kReadOnly : (fields & 7) == 6 ? kGone : kKey;
    const uint32_t length = (fields & 8) != 0 ? input_.U32() : input_.U16() % 1200;
    headers.reth = {.va = kBase + ((fields & 16) != 0 ? input_.U16() : 0),
                    .rkey = Rkey(key),
                    .dma_length = length};
    faulty_ |= key == kGone;  // a WRITE there fails late
    const size_t bytes = (fields & 32) != 0 ? input_.U16() % 600 : 256;
    const bool has_payload = TraitsOf(headers.bth.opcode).carries_payload;
    const auto frame = testing::BuildFrame(testing::Ipv4Address(), headers,
                                           testing::CountingBytes(has_payload ? bytes : 0));
    responder_.HandleRequest(testing::ViewOf(frame));
  }

  void Commit(bool fail) {
    const auto committed = memory_.CommitNext(fail);
    if (committed.failure) {
      faulty_ = true;
      responder_.HandlePlacementFailed(committed.ticket);
    } else {
      responder_.HandleCommitted(committed.ticket);
    }
  }

  void Flush() {
    flushed_ = true;
    responder_.Flush();
  }

  void Drain() {
    for (Completion completion; responder_.PollCompletion(&completion);) {
      FUZZ_CHECK(!posted_.empty() && completion.wr_id == posted_.front());
      posted_.pop_front();
      const bool ok = completion.status == WcStatus::kSuccess;
      FUZZ_CHECK(ok || flushed_ || faulty_);
    }
    FUZZ_CHECK(!responder_.failed() || faulty_);
    // The owner moves the QP to error.
    if (responder_.failed() && !flushed_) Flush();
    for (AsyncEventType event; responder_.PollEvent(&event);) {
    }
  }

  Input input_;
  testing::FakeMemory memory_;
  testing::FakeReceiveQueue receives_;
  UcResponder responder_;
  Psn psn_{0xfffff0};
  std::deque<uint64_t> posted_;
  uint64_t next_id_ = 1;
  bool flushed_ = false;
  bool faulty_ = false;  // local memory has given a reason to fail
};

}  // namespace
}  // namespace verbena::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  verbena::fuzz::Program(verbena::fuzz::Input(data, size)).Run();
  return 0;
}
