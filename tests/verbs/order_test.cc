// SPDX-License-Identifier: Apache-2.0
//
// The order promised to applications, watched by a second process: the last byte of an RDMA WRITE
// becomes visible last, an aligned 8-byte word is never torn, everything placed is visible before
// the completion that reports it.
//
// The reader owns the memory and spins on it; the writer is this program as another process. After
// each message the reader answers with an empty SEND. VERBENA_TEST_LITMUS_SECONDS lengthens it.
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
constexpr size_t kBytes = 65536 + 4096;

// Message n: every byte is Value(n), so that any old byte shows; two neighbours differ.
uint8_t Value(uint64_t n) { return static_cast<uint8_t>(n % 251 + 1); }
uint32_t Length(uint64_t n) { return kLengths[n * 7 % std::size(kLengths)]; }
uint32_t Offset(uint64_t n) { return static_cast<uint32_t>(n * 13 % 128); }

enum class Mode { kLastByte, kCompletion, kWords };

// Arguments: device, reader's address, memory, mode, count (0 = until killed), gid index.
VERBENA_ROLE(litmus_writer) {
  EndOptions options;
  options.device = arguments.at(0);
  options.cqe = 64;
  RcEnd end(options);
  printf("address %s\n", end.address().Text().c_str());
  PathOptions path;
  path.mtu = IBV_MTU_1024;
  path.timeout = 16;  // The reader may become ready a little later.
  end.Connect(PeerAddress::Parse(arguments.at(1)), path);
  const RemoteMemory remote = RemoteMemory::Parse(arguments.at(2));
  const Mode mode = static_cast<Mode>(std::stoi(arguments.at(3)));
  Memory memory(end.pd(), kBytes);
  const auto write = [&](uint64_t n, uint32_t offset, uint32_t length, ibv_wr_opcode opcode) {
    memset(memory.data(),
           mode == Mode::kWords ? static_cast<int>(n % 2 == 0 ? 0x33 : 0xcc) : Value(n), length);
    errno = end.PostSend(RdmaWr(n, opcode, remote.address + offset, remote.rkey),
                         {memory.sge(0, length)});
    Require(errno == 0, "post_send");
    const ibv_wc wc = PollOne(end.send_cq());
    if (wc.status != IBV_WC_SUCCESS) throw std::runtime_error(Describe(wc));
  };
  // The reader's first word starts and, for kWords, its end stops us.
  for (uint64_t n = 0;; ++n) {
    if (mode == Mode::kWords) {
      write(n, 0, 4096, IBV_WR_RDMA_WRITE);
      ibv_wc wc = {};
      if (n % 16 == 0 && ibv_poll_cq(end.recv_cq(), 1, &wc) == 1) return 0;
      if (n == 0) Require(end.PostRecv(0, {memory.sge(kBytes - 8, 8)}) == 0, "post_recv");
      continue;
    }
    Require(end.PostRecv(n, {memory.sge(kBytes - 8, 8)}) == 0, "post_recv");
    write(n, Offset(n), Length(n),
          mode == Mode::kCompletion ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE);
    const ibv_wc answer = PollOne(end.recv_cq());
    if (answer.status != IBV_WC_SUCCESS) throw std::runtime_error(Describe(answer));
    if (answer.byte_len == 1) return 0;
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

  // Empty: go on; one byte: end.
  void Answer(uint64_t n, bool last) {
    // The place of the next message starts without its value; the writer waits for us.
    memset(memory_->data() + Offset(n + 1), 0, Length(n + 1));
    errno = last ? end_->PostSend(SendWr(n), {memory_->sge(0, 1)}) : end_->PostSend(SendWr(n));
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
    const bool done = Clock::now() > end || early > 5;
    Answer(n, done);
    if (done) {
      printf("%lu messages\n", n + 1);
      break;
    }
  }
  EXPECT_EQ(writer_->Wait(), 0) << writer_->Output();
}

TEST_P(Litmus, EverythingIsVisibleBeforeTheCompletion) {
  Start(Mode::kCompletion);
  const auto end = End();
  for (uint64_t n = 0;; ++n) {
    ASSERT_EQ(end_->PostRecv(n), 0);
    const ibv_wc wc = PollOne(end_->recv_cq());
    const size_t missing = Missing(n);
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    ASSERT_EQ(wc.byte_len, Length(n));
    EXPECT_EQ(missing, 0u) << "message " << n << " of " << Length(n) << " bytes";
    const bool done = Clock::now() > end || HasFailure();
    Answer(n, done);
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
  Answer(0, true);
  EXPECT_EQ(writer_->Wait(), 0) << writer_->Output();
}

INSTANTIATE_TEST_SUITE_P(Writers, Litmus, ::testing::Values("verbena0", "verbena1"),
                         [](const auto& info) {
                           return info.param[7] == '0' ? "OnOneNic" : "BetweenTwoNics";
                         });

}  // namespace
}  // namespace verbena::testing
