// SPDX-License-Identifier: Apache-2.0
//
// Both ends of the shared memory in one process and at one address, so that the
// thread sanitizer sees every access of either: the provider's post, doorbell
// and poll code on one side, the device's queue and doorbell code on the other,
// each in threads of its own that sleep and wake each other. Nothing may be
// lost, doubled, out of order or half written.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "nic_sim/queues/completion_queue.h"
#include "nic_sim/queues/doorbells.h"
#include "nic_sim/queues/work_queue.h"
#include "provider/provider.h"

namespace verbena {
namespace {

using transport::Duration;
using transport::WcStatus;

constexpr uint32_t kSlot = 69;  // not in the first words
constexpr uint32_t kSlots = 16;
constexpr uint32_t kCqSlots = 64;
constexpr uint32_t kGeneration = 7;
// A wake-up that is lost shows itself by a wait that ends here.
constexpr Duration kPatience = Duration::Seconds(20);

constexpr uint32_t kMessages = 2000;

template <typename T>
std::unique_ptr<T, void (*)(void*)> Zeroed(size_t bytes = sizeof(T)) {
  void* memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  std::memset(memory, 0, bytes);
  return {static_cast<T*>(memory), &free};
}

// What a number becomes in the fields of a WQE, so that a torn one is seen.
uint64_t AddressOf(uint64_t number) { return number * 0x9e3779b97f4a7c15u; }
uint32_t LengthOf(uint64_t number) {
  return static_cast<uint32_t>(number * 2654435761u) & 0xffffff;
}

// One QP and one CQ as the application has them, and as the device has them.
class BothEnds : public ::testing::Test {
 protected:
  static constexpr uint32_t kSqStride = abi::SendStride(2, 0);
  static constexpr uint32_t kRqStride = abi::RecvStride(2);

  BothEnds()
      : page_(Zeroed<abi::ContextPage>()),
        wake_(Zeroed<abi::WakePage>()),
        status_(Zeroed<abi::StatusPage>()),
        table_(Zeroed<provider::QpTableEntry>(sizeof(provider::QpTableEntry) * abi::kMaxQpSlots)),
        sq_(Zeroed<std::byte>(kSlots * kSqStride)),
        rq_(Zeroed<std::byte>(kSlots * kRqStride)),
        cq_(Zeroed<std::byte>(kCqSlots * sizeof(abi::Cqe))),
        context_(Zeroed<provider::Context>()),
        app_cq_(Zeroed<provider::Cq>()),
        app_qp_(Zeroed<provider::Qp>()) {
    status_->thread_count = 1;
    status_->cpu[0] = abi::kAnyCpu;
    context_->page = page_.get();
    context_->wake = wake_.get();
    context_->status = status_.get();
    context_->qp_table = table_.get();

    app_cq_->base.cq.context = &context_->verbs.context;
    app_cq_->ring = {reinterpret_cast<uint8_t*>(cq_.get()), kCqSlots, sizeof(abi::Cqe)};
    app_cq_->slots_log2 = static_cast<uint32_t>(std::countr_zero(kCqSlots));
    app_cq_->record = &page_->cq[1];

    provider::Qp& qp = *app_qp_;
    qp.base.qp.context = &context_->verbs.context;
    qp.base.qp.qp_type = IBV_QPT_RC;
    for (auto [queue, ring, stride] :
         {std::tuple{&qp.sq, sq_.get(), kSqStride}, std::tuple{&qp.rq, rq_.get(), kRqStride}}) {
      queue->ring = {reinterpret_cast<uint8_t*>(ring), kSlots, stride};
      queue->capacity = kSlots;
      queue->max_sge = 2;
      ids_.emplace_back(kSlots);
    }
    qp.sq.wr_ids = ids_[0].data();
    qp.rq.wr_ids = ids_[1].data();
    qp.send_cq = qp.recv_cq = app_cq_.get();
    qp.record = &page_->qp[kSlot];
    qp.slot = kSlot;
    qp.generation = kGeneration;
    qp.state = IBV_QPS_RTS;
    table_.get()[kSlot].generation = kGeneration;
    table_.get()[kSlot].qp = &qp;

    EXPECT_EQ(pipe2(channel_, O_CLOEXEC), 0);
    fcntl(channel_[1], F_SETFL, O_NONBLOCK);
    auto channel = std::make_shared<nic::EventChannel>(channel_[1], 1);
    device_cq_ = std::make_unique<nic::CompletionQueue>(
        1, RingOf(cq_.get(), kCqSlots, sizeof(abi::Cqe)), &page_->cq[1], 99, std::move(channel));
    device_sq_ = std::make_unique<nic::SendQueue>(
        RingOf(sq_.get(), kSlots, kSqStride), &page_->qp[kSlot],
        nic::SendQueue::Limits{.max_sge = 2, .max_inline = 0, .signal_all = false});
    device_rq_ = std::make_unique<nic::ReceiveQueue>(RingOf(rq_.get(), kSlots, kRqStride),
                                                     &page_->qp[kSlot], 2);
  }
  ~BothEnds() override { close(channel_[0]); }

  static nic::Ring RingOf(std::byte* data, uint32_t slots, uint32_t stride) {
    nic::Ring ring;
    ring.data = data;
    ring.bytes = uint64_t{slots} * stride;
    ring.location.slots = slots;
    ring.location.stride = stride;
    return ring;
  }

  // --- The application

  // False: the queue is full.
  bool PostSend(uint64_t number) {
    ibv_sge sge = {AddressOf(number), LengthOf(number), static_cast<uint32_t>(number)};
    ibv_send_wr wr = {};
    wr.wr_id = number;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    ibv_send_wr* bad = nullptr;
    const int error = provider::PostSend(&app_qp_->base.qp, &wr, &bad);
    EXPECT_TRUE(error == 0 || error == ENOMEM) << error;
    return error == 0;
  }
  bool PostReceive(uint64_t number) {
    ibv_sge sge = {AddressOf(number), LengthOf(number), static_cast<uint32_t>(number)};
    ibv_recv_wr wr = {};
    wr.wr_id = number;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    const int error = provider::PostRecv(&app_qp_->base.qp, &wr, &bad);
    EXPECT_TRUE(error == 0 || error == ENOMEM) << error;
    return error == 0;
  }

  // Takes what is there and checks that it is the next of its kind.
  void Poll() {
    ibv_wc wc[5];
    const int count = provider::PollCq(&app_cq_->base.cq, 5, wc);
    ASSERT_GE(count, 0);
    for (int i = 0; i < count; ++i) {
      std::atomic<uint32_t>& next = wc[i].opcode == IBV_WC_RECV ? received_ : sent_;
      ASSERT_EQ(wc[i].wr_id, next) << "lost, doubled or out of order";
      ASSERT_EQ(wc[i].byte_len, LengthOf(wc[i].wr_id));
      ASSERT_EQ(wc[i].vendor_err, static_cast<uint32_t>(AddressOf(wc[i].wr_id)));
      ++next;
    }
  }

  // Blocks in the completion channel, as programs with -e do.
  void WaitForEvent() {
    ASSERT_EQ(provider::ReqNotifyCq(&app_cq_->base.cq, 0), 0);
    const uint32_t before = sent_ + received_;
    Poll();
    if (sent_ + received_ != before) return;  // it may have come before the arming
    pollfd descriptor = {channel_[0], POLLIN, 0};
    ASSERT_EQ(poll(&descriptor, 1, 20000), 1) << "a completion event is lost";
    uint64_t handle = 0;
    ASSERT_EQ(read(channel_[0], &handle, sizeof handle), 8);
    ASSERT_EQ(handle, 99u);
  }

  // --- The device

  void Complete(uint64_t number, uint32_t wqe_index, bool is_send) {
    transport::Completion completion;
    completion.wr_id = number;
    completion.wqe_index = wqe_index;
    completion.is_send = is_send;
    completion.opcode = is_send ? transport::WcOpcode::kSend : transport::WcOpcode::kRecv;
    completion.byte_len = LengthOf(number);
    completion.vendor_err = static_cast<uint32_t>(AddressOf(number));
    ASSERT_TRUE(device_cq_->Write(
        completion, {.qpn = 5, .qp_slot = kSlot, .qp_generation = kGeneration, .src_qpn = 6}, 1));
  }
  // Room for the completions of all that can be outstanding is the CQ's size.
  void CheckWqe(uint64_t number, uint64_t expected, const transport::MemorySegment& sge) {
    ASSERT_EQ(number, expected);
    ASSERT_EQ(sge.address, AddressOf(number));
    ASSERT_EQ(sge.length, LengthOf(number));
    ASSERT_EQ(sge.key, static_cast<uint32_t>(number));
  }
  bool TakeSends() {
    nic::FetchedSend fetched;
    bool worked = false;
    while (device_sq_->Fetch(&fetched)) {
      const transport::SendRequest& request = fetched.request;
      CheckWqe(request.wr_id, fetched_, request.sges[0]);
      if (HasFatalFailure()) return false;
      Complete(fetched_++, request.wqe_index, true);
      worked = true;
    }
    device_sq_->Publish();
    return worked;
  }
  bool TakeReceives() {
    transport::RecvRequest request;
    bool worked = false;
    while (device_rq_->Take(&request)) {
      CheckWqe(request.wr_id, taken_, request.sges[0]);
      if (HasFatalFailure()) return false;
      Complete(taken_++, request.wqe_index, false);
      worked = true;
    }
    return worked;
  }
  void Notify() {
    abi::FullFence();
    EXPECT_TRUE(device_cq_->Notify(transport::Time::Zero()).IsNever());
  }

  // What an engine thread does, until `done`: passes over what rang, then sleep.
  template <typename Done, typename Work>
  void RunEngine(Done done, Work work) {
    abi::WakeWord& word = wake_->threads[0];
    while (!done() && !HasFatalFailure()) {
      bool rung = false;
      nic::TakeDoorbells(*page_, abi::kMaxQpSlots, [&](uint32_t slot) {
        EXPECT_EQ(slot, kSlot);
        rung = true;
      });
      if (rung && work()) Notify();
      if (rung || done()) continue;
      nic::Arm(word);
      if (nic::HasDoorbell(*page_)) {
        nic::Disarm(word);
        continue;
      }
      ++sleeps_;
      ASSERT_TRUE(nic::Wait(word, kPatience)) << "a wake-up is lost";
    }
  }

  std::unique_ptr<abi::ContextPage, void (*)(void*)> page_;
  std::unique_ptr<abi::WakePage, void (*)(void*)> wake_;
  std::unique_ptr<abi::StatusPage, void (*)(void*)> status_;
  std::unique_ptr<provider::QpTableEntry, void (*)(void*)> table_;
  std::unique_ptr<std::byte, void (*)(void*)> sq_, rq_, cq_;
  std::unique_ptr<provider::Context, void (*)(void*)> context_;
  std::unique_ptr<provider::Cq, void (*)(void*)> app_cq_;
  std::unique_ptr<provider::Qp, void (*)(void*)> app_qp_;
  std::vector<std::vector<uint64_t>> ids_;
  int channel_[2] = {-1, -1};
  std::unique_ptr<nic::CompletionQueue> device_cq_;
  std::unique_ptr<nic::SendQueue> device_sq_;
  std::unique_ptr<nic::ReceiveQueue> device_rq_;
  std::atomic<uint32_t> sent_{0}, received_{0};  // completions polled
  uint64_t fetched_ = 0, taken_ = 0;             // WQEs, of the engine thread
  uint64_t sleeps_ = 0;
};

TEST_F(BothEnds, StreamsOfSendsArriveOnceAndInOrder) {
  for (const abi::EngineMode mode : {abi::kEngineThreadPerCpu, abi::kEngineSpinning}) {
    status_->mode = mode;
    const uint64_t first = sent_;
    const uint64_t end = first + kMessages;
    std::thread engine(
        [&] { RunEngine([&] { return fetched_ == end; }, [&] { return TakeSends(); }); });
    std::minstd_rand random(mode + 1u);
    uint64_t posted = first;
    while (sent_ < end && !HasFatalFailure()) {
      // Bursts of any length; between them, now and then, the engine falls asleep.
      for (uint64_t n = random() % (2 * kSlots); n > 0 && posted < end && PostSend(posted); --n) {
        ++posted;
      }
      if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
      Poll();
    }
    engine.join();
    ASSERT_EQ(sent_, end);
  }
  EXPECT_GT(sleeps_, 10u) << "the engine never slept: nothing was shown";
}

TEST_F(BothEnds, SingleMessagesWakeTheEngineEachTime) {
  constexpr uint32_t kPings = kMessages / 8;
  std::thread engine(
      [&] { RunEngine([&] { return fetched_ == kPings; }, [&] { return TakeSends(); }); });
  for (uint64_t number = 0; number < kPings && !HasFatalFailure(); ++number) {
    ASSERT_TRUE(PostSend(number));
    while (sent_ <= number && !HasFatalFailure()) Poll();
  }
  engine.join();
  EXPECT_EQ(sent_, kPings);
}

TEST_F(BothEnds, PosterAndPollerInThreadsOfTheirOwn) {
  std::thread engine(
      [&] { RunEngine([&] { return fetched_ == kMessages; }, [&] { return TakeSends(); }); });
  std::thread poster([&] {
    for (uint64_t number = 0; number < kMessages && !HasFatalFailure();) {
      if (PostSend(number)) {
        ++number;
      } else {
        std::this_thread::yield();
      }
    }
  });
  while (sent_ < kMessages && !HasFatalFailure()) Poll();
  poster.join();
  engine.join();
  EXPECT_EQ(sent_, kMessages);
}

TEST_F(BothEnds, CompletionEventsAreNeverMissing) {
  constexpr uint32_t kEvents = kMessages / 8;
  std::thread engine(
      [&] { RunEngine([&] { return fetched_ == kEvents; }, [&] { return TakeSends(); }); });
  std::minstd_rand random(3);
  uint64_t posted = 0;
  while (sent_ < kEvents && !HasFatalFailure()) {
    for (uint64_t n = 1 + random() % 4; n > 0 && posted < kEvents && PostSend(posted); --n)
      ++posted;
    if (sent_ < posted) WaitForEvent();
  }
  engine.join();
  EXPECT_EQ(sent_, kEvents);
}

// While the QP is alive a receive rings no doorbell; from ERR on it does. What
// is posted at the change is flushed all the same.
TEST_F(BothEnds, ReceivesPostedWhileTheQpGoesToErrorAreAllFlushed) {
  constexpr uint32_t kRounds = kMessages / 100;
  uint64_t posted = 0;
  for (uint32_t round = 0; round < kRounds && !HasFatalFailure(); ++round) {
    const uint64_t end = posted + kSlots / 2;
    page_->qp[kSlot].state.store(IBV_QPS_RTS);
    std::atomic<bool> go{false};
    std::thread engine([&] {
      while (!go) std::this_thread::yield();
      for (uint32_t i = round % 64; i > 0; --i) sched_yield();
      // As Qp::MoveToError does it.
      page_->qp[kSlot].state.store(IBV_QPS_ERR, std::memory_order_release);
      abi::FullFence();
      if (TakeReceives()) Notify();
      RunEngine([&] { return taken_ == end; }, [&] { return TakeReceives(); });
    });
    go = true;
    while (posted < end) ASSERT_TRUE(PostReceive(posted++));
    while (received_ < end && !HasFatalFailure()) Poll();
    engine.join();
  }
}

}  // namespace
}  // namespace verbena
