// SPDX-License-Identifier: Apache-2.0
//
// Polling, arming, events, and the death of the device.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "provider/valgrind.h"
#include "tests/unit/provider/provider_fixture.h"

namespace verbena::provider {
namespace {

TEST_F(QpInRts, EmptyCqGivesNothing) {
  ibv_wc wc[4];
  EXPECT_EQ(ibv_poll_cq(send_cq_, 4, wc), 0);
  EXPECT_EQ(ibv_poll_cq(send_cq_, 0, wc), 0);
  EXPECT_LT(ibv_poll_cq(send_cq_, -1, wc), 0);
  // Also after it began to yield.
  for (int i = 0; i < 40; ++i) EXPECT_EQ(ibv_poll_cq(send_cq_, 1, wc), 0);
}

TEST_F(QpInRts, CompletionCarriesEveryField) {
  ASSERT_EQ(PostRecv(1), 0);
  device_.Complete(recv_cq_->handle, {.qp = qp_->handle,
                                      .send = false,
                                      .wqe_index = 0,
                                      .wr_id = 0x1122334455667788,
                                      .opcode = IBV_WC_RECV_RDMA_WITH_IMM,
                                      .flags = abi::kCqeWithImm | abi::kCqeGrh,
                                      .sl = 2,
                                      .byte_len = 77,
                                      .imm_or_inv = 0xa1b2c3d4,
                                      .src_qpn = 0x99,
                                      .vendor_err = 5});
  ibv_wc wc;
  memset(&wc, 0xee, sizeof(wc));
  ASSERT_EQ(ibv_poll_cq(recv_cq_, 1, &wc), 1);
  EXPECT_EQ(wc.wr_id, 0x1122334455667788u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(wc.wc_flags, static_cast<unsigned>(IBV_WC_WITH_IMM | IBV_WC_GRH));
  EXPECT_EQ(wc.sl, 2);
  EXPECT_EQ(wc.byte_len, 77u);
  EXPECT_EQ(wc.imm_data, 0xa1b2c3d4u);
  EXPECT_EQ(wc.qp_num, 0x4321u);
  EXPECT_EQ(wc.src_qp, 0x99u);
  EXPECT_EQ(wc.vendor_err, 5u);
}

TEST_F(QpInRts, CompletionsKeepTheirOrderOverManyRoundsOfTheRing) {
  uint32_t done = 0;
  uint32_t posted = 0;
  for (int round = 0; round < 13; ++round) {
    for (int i = 0; i < 3; ++i, ++posted) {
      ASSERT_EQ(PostSend(posted), 0);
      CompleteSend(posted, posted);
    }
    ibv_wc wc[8];
    ASSERT_EQ(ibv_poll_cq(send_cq_, 8, wc), 3);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(wc[i].wr_id, done++);
    EXPECT_EQ(device_.page()->cq[send_cq_->handle].consumer, done);
    EXPECT_EQ(ibv_poll_cq(send_cq_, 8, wc), 0);
  }
}

TEST_F(QpInRts, AFullRingIsPolledInPieces) {
  for (uint32_t i = 0; i < kDepth; ++i) {
    ASSERT_EQ(PostSend(i), 0);
    CompleteSend(i, i);
  }
  ibv_wc wc[3];
  EXPECT_EQ(ibv_poll_cq(send_cq_, 3, wc), 3);
  EXPECT_EQ(ibv_poll_cq(send_cq_, 3, wc), 1);
  EXPECT_EQ(wc[0].wr_id, 3u);
  EXPECT_EQ(ibv_poll_cq(send_cq_, 3, wc), 0);
}

TEST_F(QpInRts, CompletionsFromBeforeAResetAreSkipped) {
  ASSERT_EQ(PostSend(1), 0);
  CompleteSend(0, 1);
  MoveTo(IBV_QPS_RESET);
  MoveTo(IBV_QPS_RTS);
  ASSERT_EQ(PostSend(2), 0);
  CompleteSend(0, 2);
  ibv_wc wc[4];
  ASSERT_EQ(ibv_poll_cq(send_cq_, 4, wc), 1);
  EXPECT_EQ(wc[0].wr_id, 2u);
  EXPECT_EQ(device_.page()->cq[send_cq_->handle].consumer, 2u);
}

TEST_F(QpInRts, CompletionsOfADestroyedQpAreSkipped) {
  ASSERT_EQ(PostSend(1), 0);
  CompleteSend(0, 1);
  ASSERT_EQ(ibv_destroy_qp(qp_), 0);
  qp_ = nullptr;
  ibv_wc wc;
  EXPECT_EQ(ibv_poll_cq(send_cq_, 1, &wc), 0);
  qp_ = MakeQp();
  ASSERT_NE(qp_, nullptr);
}

TEST_F(QpInRts, DeathFlushesEachOutstandingRequestExactlyOnce) {
  for (uint32_t i = 0; i < kDepth; ++i) {
    ASSERT_EQ(PostSend(100 + i), 0);
    ASSERT_EQ(PostRecv(200 + i), 0);
  }
  CompleteSend(0, 100);  // still reported as what it was
  device_.status()->device_dead = 1;
  EXPECT_EQ(PostSend(1), EIO);
  EXPECT_EQ(PostRecv(1), EIO);
  EXPECT_EQ(ibv_req_notify_cq(send_cq_, 0), EIO);

  std::vector<uint64_t> flushed;
  ibv_wc wc[2];
  ASSERT_EQ(ibv_poll_cq(send_cq_, 2, wc), 1);
  EXPECT_EQ(wc[0].wr_id, 100u);
  EXPECT_EQ(wc[0].status, IBV_WC_SUCCESS);
  for (ibv_cq* cq : {send_cq_, recv_cq_}) {
    for (int i = 0; i < 10; ++i) {
      const int count = ibv_poll_cq(cq, 2, wc);
      for (int k = 0; k < count; ++k) {
        EXPECT_EQ(wc[k].status, IBV_WC_WR_FLUSH_ERR);
        EXPECT_EQ(wc[k].qp_num, qp_->qp_num);
        flushed.push_back(wc[k].wr_id);
      }
    }
  }
  EXPECT_EQ(flushed, (std::vector<uint64_t>{101, 102, 103, 200, 201, 202, 203}));
}

TEST_F(QpInRts, ConcurrentPollersAndPostersSeeEachCompletionOnce) {
  constexpr uint32_t kCount = 20000;
  std::atomic<bool> stop{false};
  std::thread engine([&] {
    uint32_t done = 0;
    while (done < kCount && !stop) {
      const uint32_t posted = Record().sq_producer.load(std::memory_order_acquire);
      const uint32_t consumed =
          device_.page()->cq[send_cq_->handle].consumer.load(std::memory_order_acquire);
      if (done == posted || done - consumed == device_.cq_slots(send_cq_->handle)) {
        std::this_thread::yield();
        continue;
      }
      CompleteSend(done, View().Send(done).wr_id);
      ++done;
    }
  });
  std::vector<std::atomic<uint8_t>> seen(kCount);
  std::atomic<uint32_t> polled{0};
  std::atomic<uint32_t> next{0};
  const auto worker = [&] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    uint32_t mine = next.fetch_add(1);
    while (polled < kCount && std::chrono::steady_clock::now() < end) {
      if (mine < kCount && PostSend(mine) == 0) mine = next.fetch_add(1);
      ibv_wc wc[3];
      const int count = ibv_poll_cq(send_cq_, 3, wc);
      for (int i = 0; i < count; ++i) {
        if (wc[i].wr_id < kCount) ++seen[wc[i].wr_id];
      }
      if (count > 0) polled += static_cast<uint32_t>(count);
    }
  };
  std::thread other(worker);
  worker();
  other.join();
  stop = true;
  engine.join();
  EXPECT_EQ(polled, kCount);
  for (uint32_t i = 0; i < kCount; ++i) ASSERT_EQ(seen[i], 1) << i;
}

#ifdef VERBENA_HAVE_VALGRIND
// Bytes of `buffer` that memcheck takes for undefined; 0 outside valgrind.
template <size_t kBytes>
int Undefined(const char (&buffer)[kBytes], size_t from, size_t count) {
  int undefined = 0;
  for (size_t i = from; i < from + count; ++i) {
    unsigned char bits = 0;
    if (VALGRIND_GET_VBITS(&buffer[i], &bits, 1) == 1 && bits != 0) ++undefined;
  }
  return undefined;
}

// What the device writes is invisible to memcheck. Runs itself under valgrind.
TEST_F(QpInRts, MemcheckTakesReceivedBytesForDefined) {
  if (!RunningOnValgrind()) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "valgrind and sanitizers exclude each other";
#else
    const std::string program = std::filesystem::read_symlink("/proc/self/exe");
    const std::string command = "timeout 100 valgrind -q --error-exitcode=9 " + program +
                                " --gtest_filter=QpInRts.Memcheck* >&2";
    EXPECT_EQ(system(command.c_str()), 0);
    return;
#endif
  }
  char received[64];
  char read[64];
  char atomic[64];
  for (char* buffer : {received, read, atomic}) {
    static_cast<void>(VALGRIND_MAKE_MEM_UNDEFINED(buffer, 64));
  }
  ASSERT_EQ(Undefined(received, 0, 64), 64);

  // 10 + 20 bytes of room, 25 received.
  ibv_sge sges[2] = {{reinterpret_cast<uint64_t>(received), 10, 1},
                     {reinterpret_cast<uint64_t>(received + 30), 20, 1}};
  ibv_recv_wr recv = {};
  recv.sg_list = sges;
  recv.num_sge = 2;
  ibv_recv_wr* bad_recv = nullptr;
  ASSERT_EQ(ibv_post_recv(qp_, &recv, &bad_recv), 0);
  device_.Complete(recv_cq_->handle,
                   {.qp = qp_->handle, .send = false, .wqe_index = 0, .byte_len = 25});
  ibv_wc wc;
  ASSERT_EQ(ibv_poll_cq(recv_cq_, 1, &wc), 1);
  EXPECT_EQ(Undefined(received, 0, 10), 0);
  EXPECT_EQ(Undefined(received, 10, 20), 20);
  EXPECT_EQ(Undefined(received, 30, 15), 0);
  EXPECT_EQ(Undefined(received, 45, 19), 19);

  // An unsignalled READ and an atomic, completed together.
  sges[0] = {reinterpret_cast<uint64_t>(read), 40, 1};
  sges[1] = {reinterpret_cast<uint64_t>(atomic), 8, 1};
  ibv_send_wr sends[2] = {};
  sends[0].opcode = IBV_WR_RDMA_READ;
  sends[1].opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
  for (int i = 0; i < 2; ++i) {
    sends[i].sg_list = &sges[i];
    sends[i].num_sge = 1;
  }
  sends[0].next = &sends[1];
  ibv_send_wr* bad_send = nullptr;
  ASSERT_EQ(ibv_post_send(qp_, sends, &bad_send), 0);
  CompleteSend(1);
  ASSERT_EQ(ibv_poll_cq(send_cq_, 1, &wc), 1);
  EXPECT_EQ(Undefined(read, 0, 40), 0);
  EXPECT_EQ(Undefined(read, 40, 24), 24);
  EXPECT_EQ(Undefined(atomic, 0, 8), 0);
  EXPECT_EQ(Undefined(atomic, 8, 56), 56);
}
#endif

TEST_F(QpInRts, ArmingIsOnlyRaised) {
  const std::atomic<uint32_t>& arm = device_.page()->cq[send_cq_->handle].arm;
  EXPECT_EQ(ibv_req_notify_cq(send_cq_, 1), 0);
  EXPECT_EQ(arm, abi::kCqArmedSolicited);
  EXPECT_EQ(ibv_req_notify_cq(send_cq_, 0), 0);
  EXPECT_EQ(arm, abi::kCqArmedAny);
  EXPECT_EQ(ibv_req_notify_cq(send_cq_, 1), 0);
  EXPECT_EQ(arm, abi::kCqArmedAny);
}

TEST_F(QpInRts, UnreadQpEventsDisappearWithTheQp) {
  ibv_qp* doomed = MakeQp();
  ASSERT_NE(doomed, nullptr);
  device_.SendQpEvent(doomed->handle, IBV_EVENT_COMM_EST);
  device_.SendQpEvent(qp_->handle, IBV_EVENT_QP_FATAL);
  device_.SendQpEvent(doomed->handle, IBV_EVENT_QP_FATAL);
  EXPECT_EQ(ibv_destroy_qp(doomed), 0);
  ibv_async_event event;
  ASSERT_EQ(ibv_get_async_event(context_, &event), 0);
  EXPECT_EQ(event.element.qp, qp_);
  EXPECT_EQ(event.event_type, IBV_EVENT_QP_FATAL);
  fcntl(context_->async_fd, F_SETFL, O_NONBLOCK);
  ibv_async_event none;
  EXPECT_NE(ibv_get_async_event(context_, &none), 0);
  ibv_ack_async_event(&event);
}

// Takes every descriptor that this process may have, for as long as it lives.
class NoDescriptorsLeft {
 public:
  NoDescriptorsLeft() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few = {256, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
    for (int fd; (fd = dup(STDERR_FILENO)) >= 0;) taken_.push_back(fd);
  }
  ~NoDescriptorsLeft() {
    for (const int fd : taken_) close(fd);
    setrlimit(RLIMIT_NOFILE, &before_);
  }
  void GiveBackOne() {
    close(taken_.back());
    taken_.pop_back();
  }

 private:
  rlimit before_ = {};
  std::vector<int> taken_;
};

TEST_F(QpInRts, DestroyWithAnUnreadEventNeedsNoFreeDescriptor) {
  for (int round = 0; round < 3; ++round) {  // what was used is there again
    ibv_qp* doomed = MakeQp();
    ASSERT_NE(doomed, nullptr);
    device_.SendQpEvent(doomed->handle, IBV_EVENT_QP_FATAL);
    const NoDescriptorsLeft full;
    ASSERT_EQ(ibv_destroy_qp(doomed), 0);
  }
}

// The application has closed all that it does not know; with room again it can go on.
TEST_F(QpInRts, DestroyThatCannotDrainFailsAndChangesNothing) {
  ibv_qp* doomed = MakeQp();
  ASSERT_NE(doomed, nullptr);
  device_.SendQpEvent(doomed->handle, IBV_EVENT_QP_FATAL);
  // By name, without a call on descriptors that are the device's thread's.
  const auto target = [](int fd) {
    std::error_code none;
    return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), none).string();
  };
  const std::string command = target(context_->cmd_fd);
  ASSERT_FALSE(command.empty());
  for (int fd = STDERR_FILENO + 1; fd < 256; ++fd) {
    if (fd != context_->cmd_fd && target(fd) == command) close(fd);
  }
  NoDescriptorsLeft full;
  EXPECT_EQ(ibv_destroy_qp(doomed), EMFILE);
  full.GiveBackOne();
  EXPECT_EQ(ibv_destroy_qp(doomed), 0);
}

class ChannelOfTwoCqs : public OpenedDevice {
 protected:
  void SetUp() override {
    OpenedDevice::SetUp();
    channel_ = ibv_create_comp_channel(context_);
    ASSERT_NE(channel_, nullptr) << errno;
    first_ = ibv_create_cq(context_, 4, &first_context_, channel_, 0);
    second_ = ibv_create_cq(context_, 4, nullptr, channel_, 1);
    ASSERT_TRUE(first_ != nullptr && second_ != nullptr) << errno;
  }
  void TearDown() override {
    if (first_ != nullptr) {
      EXPECT_EQ(ibv_destroy_cq(first_), 0);
    }
    EXPECT_EQ(ibv_destroy_cq(second_), 0);
    EXPECT_EQ(ibv_destroy_comp_channel(channel_), 0);
    OpenedDevice::TearDown();
  }

  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* first_ = nullptr;
  ibv_cq* second_ = nullptr;
  int first_context_ = 0;
};

TEST_F(ChannelOfTwoCqs, EventNamesItsCq) {
  EXPECT_NE(fcntl(channel_->fd, F_GETFD) & FD_CLOEXEC, 0);
  device_.SendCompEvent(first_->handle);
  ibv_cq* cq = nullptr;
  void* cq_context = nullptr;
  ASSERT_EQ(ibv_get_cq_event(channel_, &cq, &cq_context), 0);
  EXPECT_EQ(cq, first_);
  EXPECT_EQ(cq_context, &first_context_);
  ibv_ack_cq_events(cq, 1);
}

TEST_F(ChannelOfTwoCqs, UnreadEventsDisappearWithTheirCqOnly) {
  device_.SendCompEvent(first_->handle);
  device_.SendCompEvent(second_->handle);
  device_.SendCompEvent(first_->handle);
  EXPECT_EQ(ibv_destroy_cq(first_), 0);
  first_ = nullptr;
  ibv_cq* cq = nullptr;
  void* cq_context = nullptr;
  ASSERT_EQ(ibv_get_cq_event(channel_, &cq, &cq_context), 0);
  EXPECT_EQ(cq, second_);
  fcntl(channel_->fd, F_SETFL, O_NONBLOCK);
  ibv_cq* none = nullptr;
  EXPECT_NE(ibv_get_cq_event(channel_, &none, &cq_context), 0);
  ibv_ack_cq_events(cq, 1);
}

TEST_F(ChannelOfTwoCqs, DestroyWithUnreadEventsNeedsNoFreeDescriptor) {
  device_.SendCompEvent(first_->handle);
  const NoDescriptorsLeft full;
  EXPECT_EQ(ibv_destroy_cq(first_), 0);
  first_ = nullptr;
}

TEST_F(ChannelOfTwoCqs, DestroyWaitsForAcknowledgement) {
  device_.SendCompEvent(first_->handle);
  ibv_cq* cq = nullptr;
  void* cq_context = nullptr;
  ASSERT_EQ(ibv_get_cq_event(channel_, &cq, &cq_context), 0);
  std::atomic<bool> destroyed{false};
  std::thread destroyer([&] {
    EXPECT_EQ(ibv_destroy_cq(first_), 0);
    destroyed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(destroyed);
  ibv_ack_cq_events(cq, 1);
  destroyer.join();
  EXPECT_TRUE(destroyed);
  first_ = nullptr;
}

TEST_F(QpInRts, QpsWithUnreadEventsAreDestroyedByManyThreadsAtOnce) {
  constexpr size_t kThreads = 4;
  std::vector<ibv_qp*> qps;
  for (size_t i = 0; i < 32 * kThreads; ++i) {
    qps.push_back(MakeQp());
    ASSERT_NE(qps.back(), nullptr) << errno;
    device_.SendQpEvent(qps.back()->handle, IBV_EVENT_QP_FATAL);
  }
  alarm(30);  // a destroy that misses its event waits for ever
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&qps, t] {
      for (size_t i = t; i < qps.size(); i += kThreads) EXPECT_EQ(ibv_destroy_qp(qps[i]), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  alarm(0);
}

TEST_F(OpenedDevice, CqArgumentsAreChecked) {
  errno = 0;
  EXPECT_EQ(ibv_create_cq(context_, 0, nullptr, nullptr, 0), nullptr);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(ibv_create_cq(context_, 1, nullptr, nullptr, 4), nullptr);
  EXPECT_EQ(ibv_create_cq(context_, 1, nullptr, nullptr, -1), nullptr);
  ibv_cq* cq = ibv_create_cq(context_, 5, nullptr, nullptr, 3);
  ASSERT_NE(cq, nullptr);
  EXPECT_EQ(cq->cqe, 8);
  EXPECT_EQ(ibv_destroy_cq(cq), 0);
}

}  // namespace
}  // namespace verbena::provider
