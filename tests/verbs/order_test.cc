// SPDX-License-Identifier: Apache-2.0
//
// The order promised to applications, watched by a second process: the last byte of an RDMA WRITE
// becomes visible last, an aligned 8-byte word is never torn, everything placed is visible before
// the completion that reports it.
//
// The reader owns the memory and spins on it; the writer is this program as another process. After
// each batch of messages, each to its own slot, the reader answers with an empty SEND.
// VERBENA_TEST_LITMUS_SECONDS lengthens each case.
#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <cstring>

#include "tests/verbs/traffic.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kLengths[] = {1,    2,    7,    8,    9,    63,   64,   65,    255,  256,
                                 1000, 1023, 1024, 1025, 2048, 4095, 4097, 16384, 65536};
constexpr uint64_t kBatch = 16;
constexpr size_t kSlotBytes = 65536 + 256;
constexpr size_t kBytes = kBatch * kSlotBytes;

// Every byte of message n is Value(n); places are zeroed before they are used again.
uint8_t Value(uint64_t n) { return static_cast<uint8_t>(n % 251 + 1); }
uint32_t Length(uint64_t n) { return kLengths[n * 7 % std::size(kLengths)]; }
size_t Offset(uint64_t n) { return n % kBatch * kSlotBytes + n * 13 % 128; }

enum class Mode { kLastByte, kCompletion, kWords };

// Arguments: device, reader's address, memory, mode, count (0 = until killed), gid index.
VERBENA_ROLE(litmus_writer) {
  EndOptions options;
  options.device = arguments.at(0);
  options.cqe = 64;
  options.send_wr = kBatch;
  RcEnd end(options);
  printf("address %s\n", end.address().Text().c_str());
  PathOptions path;
  path.mtu = IBV_MTU_1024;
  path.timeout = 16;  // The reader may become ready a little later.
  end.Connect(PeerAddress::Parse(arguments.at(1)), path);
  const RemoteMemory remote = RemoteMemory::Parse(arguments.at(2));
  const Mode mode = static_cast<Mode>(std::stoi(arguments.at(3)));
  Memory memory(end.pd(), kBytes + 8);
  const ibv_sge answer_room = memory.sge(kBytes, 8);
  const auto finish = [&](ibv_cq* cq) {
    const ibv_wc wc = PollOne(cq);
    if (wc.status != IBV_WC_SUCCESS) throw std::runtime_error(Describe(wc));
    return wc;
  };
  if (mode == Mode::kWords) {
    // Two patterns in turns until the reader says something.
    Require(end.PostRecv(0, {answer_room}) == 0, "post_recv");
    ibv_wc wc = {};
    for (uint64_t n = 0; ibv_poll_cq(end.recv_cq(), 1, &wc) == 0; ++n) {
      memset(memory.data(), n % 2 == 0 ? 0x33 : 0xcc, 4096);
      errno = end.PostSend(RdmaWr(n, IBV_WR_RDMA_WRITE, remote.address, remote.rkey),
                           {memory.sge(0, 4096)});
      Require(errno == 0, "post_send");
      finish(end.send_cq());
    }
    return 0;
  }
  const ibv_wr_opcode opcode =
      mode == Mode::kCompletion ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
  for (uint64_t first = 0;; first += kBatch) {
    Require(end.PostRecv(first, {answer_room}) == 0, "post_recv");
    for (uint64_t n = first; n < first + kBatch; ++n) {
      memset(memory.data() + n % kBatch * kSlotBytes, Value(n), Length(n));
      errno = end.PostSend(RdmaWr(n, opcode, remote.address + Offset(n), remote.rkey),
                           {memory.sge(n % kBatch * kSlotBytes, Length(n))});
      Require(errno == 0, "post_send");
    }
    for (uint64_t i = 0; i < kBatch; ++i) finish(end.send_cq());
    if (finish(end.recv_cq()).byte_len == 1) return 0;
  }
}

class Litmus : public ::testing::TestWithParam<const char*> {
 protected:
  void Start(Mode mode) {
    end_ = std::make_unique<RcEnd>();
    memory_ = std::make_unique<Memory>(end_->pd(), kBytes);
    memset(memory_->data(), mode == Mode::kWords ? 0x33 : 0, kBytes);
    writer_ = std::make_unique<Process>(
        RoleProcess("litmus_writer", {GetParam(), end_->address().Text(),
                                      RemoteMemory{memory_->address(), memory_->rkey()}.Text(),
                                      std::to_string(static_cast<int>(mode))}));
    const auto address = writer_->WaitForLine("address ", Milliseconds(10000));
    ASSERT_TRUE(address) << writer_->Output();
    PathOptions path;
    path.mtu = IBV_MTU_1024;
    end_->Connect(PeerAddress::Parse(*address), path);
  }

  // After the last message of a batch. Empty: go on; one byte: end.
  void Answer(bool last) {
    if (!last) memset(memory_->data(), 0, kBytes);  // The writer waits for us.
    errno = last ? end_->PostSend(SendWr(0), {memory_->sge(0, 1)}) : end_->PostSend(SendWr(0));
    Require(errno == 0, "answer");
    const ibv_wc wc = PollOne(end_->send_cq());
    if (wc.status != IBV_WC_SUCCESS) throw std::runtime_error(Describe(wc));
  }

  static Clock::time_point End() {
    const char* seconds = getenv("VERBENA_TEST_LITMUS_SECONDS");
    return Clock::now() +
           std::chrono::milliseconds(static_cast<int64_t>(1000 * (seconds ? atof(seconds) : 1.5)));
  }

  // Number of bytes of message n that are not there yet.
  size_t Missing(uint64_t n) const {
    size_t missing = 0;
    const uint8_t* bytes = memory_->data() + Offset(n);
    for (uint32_t i = 0; i < Length(n); ++i) missing += bytes[i] != Value(n);
    return missing;
  }

  std::unique_ptr<RcEnd> end_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Process> writer_;
};

TEST_P(Litmus, TheLastByteOfAWriteIsVisibleLast) {
  Start(Mode::kLastByte);
  const auto end = End();
  uint64_t early = 0;
  for (uint64_t n = 0;; ++n) {
    const std::atomic_ref<uint8_t> last(memory_->data()[Offset(n) + Length(n) - 1]);
    const auto limit = Clock::now() + std::chrono::seconds(15);
    // Yields rarely: the interesting moment is just after the last byte appeared.
    for (uint32_t spin = 0; last.load(std::memory_order_acquire) != Value(n); ++spin) {
      if (spin % 2048 == 2047) {
        ASSERT_LT(Clock::now(), limit) << "message " << n << "\n" << writer_->Output();
        sched_yield();
      }
    }
    const size_t missing = Missing(n);
    if (missing > 0) {
      ++early;
      ADD_FAILURE() << "message " << n << " of " << Length(n) << " bytes: " << missing
                    << " bytes appeared after the last one";
    }
    if (n % kBatch != kBatch - 1) continue;
    const bool done = Clock::now() > end || early > 5;
    Answer(done);
    if (done) {
      RecordProperty("messages", static_cast<int>(n + 1));
      printf("%lu messages\n", n + 1);
      break;
    }
  }
  EXPECT_EQ(writer_->Wait(), 0) << writer_->Output();
}

TEST_P(Litmus, EverythingIsVisibleBeforeTheCompletion) {
  Start(Mode::kCompletion);
  const auto end = End();
  for (uint64_t n = 0; n < kBatch; ++n) ASSERT_EQ(end_->PostRecv(n), 0);
  for (uint64_t n = 0;; ++n) {
    const ibv_wc wc = PollOne(end_->recv_cq());
    const size_t missing = Missing(n);
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    ASSERT_EQ(wc.byte_len, Length(n));
    EXPECT_EQ(missing, 0u) << "message " << n << " of " << Length(n) << " bytes";
    ASSERT_EQ(end_->PostRecv(n + kBatch), 0);
    if (n % kBatch != kBatch - 1) continue;
    const bool done = Clock::now() > end || HasFailure();
    Answer(done);
    if (done) break;
  }
  EXPECT_EQ(writer_->Wait(), 0) << writer_->Output();
}

TEST_P(Litmus, AnAlignedWordIsNeverTorn) {
  Start(Mode::kWords);
  const auto end = End();
  uint64_t changes = 0, before = 0;
  while (Clock::now() < end) {
    for (size_t i = 0; i < 4096; i += 8) {
      const std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(memory_->data() + i));
      const uint64_t value = word.load(std::memory_order_relaxed);
      if (value != 0x3333333333333333 && value != 0xcccccccccccccccc) {
        FAIL() << "torn word " << std::hex << value << " at " << i;
      }
      changes += i == 0 && value != before;
      before = i == 0 ? value : before;
    }
  }
  EXPECT_GT(changes, 10u) << "the writer did not write: " << writer_->Output();
  Answer(true);
  EXPECT_EQ(writer_->Wait(), 0) << writer_->Output();
}

INSTANTIATE_TEST_SUITE_P(Writers, Litmus, ::testing::Values("verbena0", "verbena1"),
                         [](const auto& info) {
                           return info.param[7] == '0' ? "OnOneNic" : "BetweenTwoNics";
                         });

}  // namespace
}  // namespace verbena::testing
