// SPDX-License-Identifier: Apache-2.0
//
// Extended reliable connections: domains shared by file, one receiving QP for
// many SRQs, SRQs of several processes behind one connection.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/verbs_support.h"
#include "tests/verbs/xrc_end.h"

namespace verbena::testing {
namespace {

class TemporaryFile {
 public:
  TemporaryFile() {
    char path[] = "/tmp/verbena-xrc-XXXXXX";
    fd_ = mkstemp(path);
    path_ = path;
  }
  ~TemporaryFile() {
    close(fd_);
    unlink(path_.c_str());
  }
  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

 private:
  int fd_;
  std::string path_;
};

class Xrc : public ::testing::Test {
 protected:
  Xrc()
      : context_(OpenDevice()),
        pd_(ibv_alloc_pd(context_.get())),
        xrcd_(OpenXrcd(context_.get(), -1)) {
    Require(xrcd_ != nullptr, "ibv_open_xrcd");
    target_ = CreateTarget(context_.get(), xrcd_.get());
    const PeerAddress target = AddressOf(target_.get());
    Connect(target_.get(), initiator_.Address(), target.psn);
    Connect(initiator_.qp.get(), target, initiator_.Address().psn);
  }

  Owned<ibv_context> context_;
  Owned<ibv_pd> pd_;
  OwnedXrcd xrcd_;
  Owned<ibv_qp> target_;
  Initiator initiator_;
};

TEST_F(Xrc, TheDeviceSaysThatItHasIt) {
  ibv_device_attr attr = {};
  ASSERT_EQ(ibv_query_device(context_.get(), &attr), 0);
  EXPECT_NE(attr.device_cap_flags & IBV_DEVICE_XRC, 0u);
}

TEST_F(Xrc, OneConnectionReachesSrqsOfSeveralPds) {
  const Owned<ibv_pd> other(ibv_alloc_pd(context_.get()));
  Xsrq a(context_.get(), pd_.get(), xrcd_.get());
  Xsrq b(context_.get(), other.get(), xrcd_.get());
  ASSERT_NE(a.number, b.number);
  for (uint64_t id = 1; id <= 6; ++id) {
    Xsrq& to = id % 2 == 0 ? a : b;
    Xsrq& not_to = id % 2 == 0 ? b : a;
    const size_t bytes = id * 1000;
    to.Post(100 + id);
    ASSERT_EQ(initiator_.Send(id, to.number, bytes), IBV_WC_SUCCESS);
    const ibv_wc wc = PollOne(to.cq.get());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, 100 + id);
    EXPECT_EQ(wc.byte_len, bytes);
    EXPECT_EQ(wc.qp_num, target_->qp_num);
    EXPECT_EQ(wc.src_qp, initiator_.qp->qp_num);
    EXPECT_EQ(PatternMismatch(to.memory.bytes().first(bytes), id), std::nullopt);
    EXPECT_TRUE(StaysEmpty(not_to.cq.get(), Milliseconds(1)));
  }
}

TEST_F(Xrc, ReadsWritesAndAtomicsUseThePdOfTheSrq) {
  Xsrq a(context_.get(), pd_.get(), xrcd_.get());
  FillPattern(initiator_.memory.bytes().first(5000), 4);
  ASSERT_EQ(initiator_.Post(RdmaWr(1, IBV_WR_RDMA_WRITE, a.memory.address(8192), a.memory.rkey()),
                            a.number, 0, 5000),
            0);
  EXPECT_EQ(PollOne(initiator_.cq.get()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch(a.memory.bytes().subspan(8192, 5000), 4), std::nullopt);
  ASSERT_EQ(initiator_.Post(RdmaWr(2, IBV_WR_RDMA_READ, a.memory.address(8192), a.memory.rkey()),
                            a.number, 16384, 5000),
            0);
  EXPECT_EQ(PollOne(initiator_.cq.get()).status, IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch(initiator_.memory.bytes().subspan(16384, 5000), 4), std::nullopt);
  uint64_t word = 41;
  memcpy(a.memory.data(), &word, 8);
  ASSERT_EQ(initiator_.Post(
                AtomicWr(3, IBV_WR_ATOMIC_FETCH_AND_ADD, a.memory.address(), a.memory.rkey(), 1),
                a.number, 0, 8),
            0);
  EXPECT_EQ(PollOne(initiator_.cq.get()).status, IBV_WC_SUCCESS);
  memcpy(&word, a.memory.data(), 8);
  EXPECT_EQ(word, 42u);
  memcpy(&word, initiator_.memory.data(), 8);
  EXPECT_EQ(word, 41u);
}

TEST_F(Xrc, AKeyOfAnotherPdThanTheSrqsIsAnAccessError) {
  const Owned<ibv_pd> other(ibv_alloc_pd(context_.get()));
  Xsrq a(context_.get(), pd_.get(), xrcd_.get());
  Memory foreign(other.get(), 64);
  ASSERT_EQ(initiator_.Post(RdmaWr(1, IBV_WR_RDMA_WRITE, foreign.address(), foreign.rkey()),
                            a.number, 0, 64),
            0);
  EXPECT_EQ(PollOne(initiator_.cq.get()).status, IBV_WC_REM_ACCESS_ERR);
  const auto event = NextAsyncEvent(context_.get(), Milliseconds(5000));
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event_type, IBV_EVENT_QP_ACCESS_ERR);
  EXPECT_EQ(event->element.qp, target_.get());
}

TEST_F(Xrc, AnSrqThatIsNotInTheDomainIsAnInvalidRequest) {
  const OwnedXrcd other(OpenXrcd(context_.get(), -1));
  Xsrq elsewhere(context_.get(), pd_.get(), other.get());
  elsewhere.Post(1);
  EXPECT_EQ(initiator_.Send(1, elsewhere.number, 16), IBV_WC_REM_INV_REQ_ERR);
  EXPECT_TRUE(StaysEmpty(elsewhere.cq.get(), Milliseconds(10)));
  const auto event = NextAsyncEvent(context_.get(), Milliseconds(5000));
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event_type, IBV_EVENT_QP_REQ_ERR);
}

TEST_F(Xrc, AnEmptySrqMakesTheSenderWait) {
  Xsrq a(context_.get(), pd_.get(), xrcd_.get());
  FillPattern(initiator_.memory.bytes().first(8), 1);
  ASSERT_EQ(initiator_.Post(SendWr(1), a.number, 0, 8), 0);
  EXPECT_TRUE(StaysEmpty(initiator_.cq.get(), Milliseconds(20)));
  a.Post(3);
  EXPECT_EQ(PollOne(a.cq.get()).wr_id, 3u);
  EXPECT_EQ(PollOne(initiator_.cq.get()).status, IBV_WC_SUCCESS);
}

TEST_F(Xrc, AFullCqOfAnSrqGivesOverrunAndEndsTheQp) {
  Xsrq a(context_.get(), pd_.get(), xrcd_.get());
  const int room = a.cq->cqe;
  for (int i = 0; i < room; ++i) {
    a.Post(1);
    ASSERT_EQ(initiator_.Send(1, a.number, 8), IBV_WC_SUCCESS);
  }
  a.Post(1);
  FillPattern(initiator_.memory.bytes().first(8), 1);
  ASSERT_EQ(initiator_.Post(SendWr(1), a.number, 0, 8), 0);
  const auto overrun = NextAsyncEvent(context_.get(), Milliseconds(5000));
  ASSERT_TRUE(overrun.has_value());
  EXPECT_EQ(overrun->event_type, IBV_EVENT_CQ_ERR);
  EXPECT_EQ(overrun->element.cq, a.cq.get());
  const auto fatal = NextAsyncEvent(context_.get(), Milliseconds(5000));
  ASSERT_TRUE(fatal.has_value());
  EXPECT_EQ(fatal->event_type, IBV_EVENT_QP_FATAL);
  EXPECT_EQ(fatal->element.qp, target_.get());
  EXPECT_EQ(PollOne(initiator_.cq.get()).status, IBV_WC_RETRY_EXC_ERR);
}

TEST_F(Xrc, WhatIsUsedCannotBeDestroyed) {
  auto a = std::make_unique<Xsrq>(context_.get(), pd_.get(), xrcd_.get());
  EXPECT_EQ(ibv_destroy_cq(a->cq.get()), EBUSY);
  EXPECT_EQ(ibv_close_xrcd(xrcd_.get()), EBUSY);
  a.reset();
  EXPECT_EQ(ibv_close_xrcd(xrcd_.get()), EBUSY);  // the target
  target_.reset();
  EXPECT_EQ(ibv_close_xrcd(xrcd_.release()), 0);
}

TEST_F(Xrc, WrongRequestsAreRefused) {
  ibv_srq_init_attr_ex srq = {};
  srq.attr = {4, 1, 0};
  srq.pd = pd_.get();
  srq.srq_type = IBV_SRQT_XRC;
  srq.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
  errno = 0;
  EXPECT_EQ(ibv_create_srq_ex(context_.get(), &srq), nullptr);
  EXPECT_EQ(errno, EINVAL);
  ibv_qp_init_attr_ex qp = {};
  qp.qp_type = IBV_QPT_XRC_RECV;
  qp.pd = pd_.get();
  qp.comp_mask = IBV_QP_INIT_ATTR_PD;
  errno = 0;
  EXPECT_EQ(ibv_create_qp_ex(context_.get(), &qp), nullptr);
  EXPECT_EQ(errno, EINVAL);
  ibv_srq_init_attr basic = {nullptr, {4, 1, 0}};
  const Owned<ibv_srq> plain(ibv_create_srq(pd_.get(), &basic));
  uint32_t number = 0;
  EXPECT_NE(ibv_get_srq_num(plain.get(), &number), 0);
  ibv_recv_wr wr = {};
  ibv_recv_wr* bad = nullptr;
  EXPECT_NE(ibv_post_recv(target_.get(), &wr, &bad), 0);
  EXPECT_NE(ibv_post_recv(initiator_.qp.get(), &wr, &bad), 0);
}

TEST(XrcDomain, IsSharedByFileAndFlagsMeanWhatTheKernelSays) {
  const TemporaryFile file;
  const auto context = OpenDevice();
  EXPECT_EQ(OpenXrcd(context.get(), file.fd(), 0), nullptr);
  EXPECT_EQ(errno, EAGAIN);
  OwnedXrcd first(OpenXrcd(context.get(), file.fd(), O_CREAT | O_EXCL));
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(OpenXrcd(context.get(), file.fd(), O_CREAT | O_EXCL), nullptr);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(OpenXrcd(context.get(), 12345), nullptr);
  EXPECT_EQ(errno, EBADF);
  // Another open file of the same inode, from another context.
  const auto other = OpenDevice();
  const int fd = open(file.path().c_str(), O_RDONLY);
  OwnedXrcd second(OpenXrcd(other.get(), fd, 0));
  close(fd);
  ASSERT_NE(second, nullptr);
  first.reset();
  second.reset();
  EXPECT_EQ(OpenXrcd(context.get(), file.fd(), 0), nullptr);
}

// --- Processes ---

// Has an SRQ in the file's domain and receives `count` messages of 1000 bytes;
// arguments: file, count, number of a target to open and keep, or 0.
VERBENA_ROLE(XsrqOwner) {
  const auto context = OpenDevice();
  const Owned<ibv_pd> pd(ibv_alloc_pd(context.get()));
  const int fd = open(arguments.at(0).c_str(), O_RDONLY);
  const OwnedXrcd xrcd(OpenXrcd(context.get(), fd));
  Require(xrcd != nullptr, "ibv_open_xrcd");
  Xsrq srq(context.get(), pd.get(), xrcd.get());
  const uint64_t count = std::stoull(arguments.at(1));
  Owned<ibv_qp> opened;
  if (arguments.at(2) != "0") {
    ibv_qp_open_attr attr = {};
    attr.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
    attr.qp_num = static_cast<uint32_t>(std::stoul(arguments.at(2)));
    attr.xrcd = xrcd.get();
    attr.qp_type = IBV_QPT_XRC_RECV;
    opened.reset(ibv_open_qp(context.get(), &attr));
    Require(opened != nullptr, "ibv_open_qp");
    ibv_qp_attr queried = {};
    ibv_qp_init_attr init = {};
    Require(ibv_query_qp(opened.get(), &queried, IBV_QP_STATE, &init) == 0, "ibv_query_qp");
    Require(queried.qp_state == IBV_QPS_RTS, "state of the opened QP");
  }
  for (uint64_t i = 0; i < 8; ++i) srq.Post(i, i * 1024, 1024);
  printf("srq %u\n", srq.number);
  for (uint64_t i = 0; i < count; ++i) {
    const ibv_wc wc = PollOne(srq.cq.get());
    if (wc.status != IBV_WC_SUCCESS || wc.byte_len != 1000) return 2;
    if (PatternMismatch(srq.memory.bytes().subspan(wc.wr_id * 1024, 1000), i)) return 3;
    srq.Post(wc.wr_id, wc.wr_id * 1024, 1024);
  }
  return 0;
}

// Makes the target for an initiator (argument 1) in the file's domain and stays
// until it is killed.
VERBENA_ROLE(XrcTargetOwner) {
  const auto context = OpenDevice();
  const int fd = open(arguments.at(0).c_str(), O_RDONLY);
  const OwnedXrcd xrcd(OpenXrcd(context.get(), fd));
  Require(xrcd != nullptr, "ibv_open_xrcd");
  const Owned<ibv_qp> target = CreateTarget(context.get(), xrcd.get());
  const PeerAddress own = AddressOf(target.get());
  Connect(target.get(), PeerAddress::Parse(arguments.at(1)), own.psn);
  printf("target %s\n", own.Text().c_str());
  for (;;) pause();
}

TEST(XrcProcesses, SrqsOfThreeProcessesAreReachedByOneConnectionThatOutlivesItsMaker) {
  constexpr uint64_t kMessages = 50;
  const TemporaryFile file;
  Initiator initiator;
  Process maker(RoleProcess("XrcTargetOwner", {file.path(), initiator.Address().Text()}));
  const auto text = maker.WaitForLine("target ", Milliseconds(20000));
  ASSERT_TRUE(text.has_value()) << maker.Output();
  const PeerAddress target = PeerAddress::Parse(*text);
  Connect(initiator.qp.get(), target, initiator.Address().psn);
  std::vector<std::unique_ptr<Process>> owners;
  std::vector<uint32_t> numbers;
  for (int i = 0; i < 3; ++i) {
    // The last one to be served, so that it stays to the end.
    const std::string opens = i == 2 ? std::to_string(target.qpn) : "0";
    owners.push_back(std::make_unique<Process>(
        RoleProcess("XsrqOwner", {file.path(), std::to_string(kMessages), opens})));
    const auto number = owners.back()->WaitForLine("srq ", Milliseconds(20000));
    ASSERT_TRUE(number.has_value()) << owners.back()->Output();
    numbers.push_back(static_cast<uint32_t>(std::stoul(*number)));
  }
  for (uint64_t id = 0; id < kMessages; ++id) {
    // One of the owners has the target open, too: the QP stays.
    if (id == kMessages / 2) {
      maker.Signal(SIGKILL);
      maker.Wait();
    }
    for (const uint32_t number : numbers) {
      ASSERT_EQ(initiator.Send(id, number, 1000), IBV_WC_SUCCESS) << id;
    }
  }
  for (auto& owner : owners) EXPECT_EQ(owner->Wait(), 0) << owner->Output();
  // The last who had it open is gone, and the QP with it.
  EXPECT_EQ(VerbenaHere({"list", "qp"}).output.find("XRC_RECV"), std::string::npos);
}

}  // namespace
}  // namespace verbena::testing
