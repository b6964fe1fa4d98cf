// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/command_dispatch.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "tests/unit/nic_sim/ctrl/fake_hardware.h"

namespace verbena::nic {
namespace {

class CommandDispatch : public ::testing::Test {
 protected:
  CommandDispatch() : context_(ClientIdentity{}, 1, lock_, -1) {}

  template <typename Request>
  CommandResult Run(Request request, uint16_t op, std::vector<UniqueFd> fds = {}) {
    request.header = {op, sizeof(request), 99};
    return DispatchCommand(&context_, std::as_bytes(std::span(&request, 1)), false, std::move(fds));
  }
  template <typename Reply>
  static Reply As(const CommandResult& result) {
    Reply reply{};
    EXPECT_EQ(result.reply.size(), sizeof(reply));
    std::memcpy(&reply, result.reply.data(), std::min(result.reply.size(), sizeof(reply)));
    EXPECT_EQ(reply.header.sequence, 99u);
    return reply;
  }
  static std::vector<UniqueFd> One(int fd) {
    std::vector<UniqueFd> fds;
    fds.emplace_back(fd);
    return fds;
  }

  ShardLock lock_;
  FakeContext context_;
};

TEST_F(CommandDispatch, HandlesGoToTheContextAndBack) {
  const CommandResult alloc = Run(abi::HandleRequest{}, abi::kCmdAllocPd);
  EXPECT_EQ(alloc.error, 0);
  const auto pd = As<abi::HandleReply>(alloc).handle;
  EXPECT_EQ(pd, 1u);
  abi::HandleRequest request{};
  request.handle = pd;
  EXPECT_EQ(Run(request, abi::kCmdDeallocPd).error, 0);
  EXPECT_EQ(Run(request, abi::kCmdDeallocPd).error, EINVAL);
}

TEST_F(CommandDispatch, EveryOpOfTheInterfaceIsCarriedOut) {
  abi::HandleRequest handle{};
  handle.handle = 7;
  EXPECT_EQ(As<abi::HandleReply>(Run(handle, abi::kCmdDeregMr)).header.error, 0);
  EXPECT_EQ(As<abi::QueryQpReply>(Run(handle, abi::kCmdQueryQp)).attr.dest_qpn, 8u);
  EXPECT_EQ(As<abi::DestroyReply>(Run(handle, abi::kCmdDestroyQp)).async_events, 4u);
  EXPECT_EQ(As<abi::HandleReply>(Run(handle, abi::kCmdDestroyAh)).header.error, 0);
  handle.handle = 1;
  EXPECT_EQ(As<abi::QueryPortReply>(Run(handle, abi::kCmdQueryPort)).state, 4);
  abi::RegMrRequest mr{};
  mr.address = 4096;
  EXPECT_EQ(As<abi::RegMrReply>(Run(mr, abi::kCmdRegMr)).rkey, 0x701u);
  abi::ModifyQpRequest modify{};
  modify.attr.state = 3;
  EXPECT_EQ(As<abi::ModifyQpReply>(Run(modify, abi::kCmdModifyQp)).state, 3u);
  abi::CreateAhRequest ah{};
  ah.attr.port_num = 5;
  EXPECT_EQ(As<abi::HandleReply>(Run(ah, abi::kCmdCreateAh)).handle, 5u);
  abi::CreateQpRequest qp{};
  qp.type = 2;
  const CommandResult created = Run(qp, abi::kCmdCreateQp);
  EXPECT_EQ(As<abi::CreateQpReply>(created).qpn, 0x123456u);
  EXPECT_EQ(created.fds.size(), 2u);
}

TEST_F(CommandDispatch, AnErrorGivesAZeroedReplyAndNoDescriptors) {
  const CommandResult mr = Run(abi::RegMrRequest{}, abi::kCmdRegMr);
  const auto reply = As<abi::RegMrReply>(mr);
  EXPECT_EQ(reply.header.error, EFAULT);
  EXPECT_EQ(reply.lkey, 0u);
  const CommandResult qp = Run(abi::CreateQpRequest{}, abi::kCmdCreateQp);
  EXPECT_EQ(qp.error, EOPNOTSUPP);
  EXPECT_TRUE(qp.fds.empty());
}

TEST_F(CommandDispatch, ASegmentComesWithItsDescriptor) {
  abi::HandleRequest segment{};
  EXPECT_EQ(Run(segment, abi::kCmdGetSegment).fds.size(), 1u);
  segment.handle = 7;
  EXPECT_EQ(Run(segment, abi::kCmdGetSegment).error, EINVAL);
}

TEST_F(CommandDispatch, EveryWrongSizeIsEinval) {
  std::array<std::byte, 600> bytes{};
  for (uint16_t op = abi::kCmdAllocPd; op <= abi::kCmdGetSegment; ++op) {
    int accepted = 0;
    for (uint16_t size = 0; size < bytes.size(); ++size) {
      const abi::CommandHeader header = {op, size, 5};
      std::memcpy(bytes.data(), &header, sizeof(header));
      const auto result = DispatchCommand(&context_, std::span(bytes).first(size), false, {});
      // The right size reaches the context and gets a whole reply.
      if (result.reply.size() > sizeof(abi::ReplyHeader)) {
        ++accepted;
      } else {
        EXPECT_EQ(result.error, EINVAL) << op << " " << size;
      }
    }
    EXPECT_EQ(accepted, 1) << op;
  }
}

TEST_F(CommandDispatch, ASizeFieldThatLiesIsEinval) {
  abi::HandleRequest request{};
  request.header = {abi::kCmdAllocPd, sizeof(request) + 8, 5};
  EXPECT_EQ(DispatchCommand(&context_, std::as_bytes(std::span(&request, 1)), false, {}).error,
            EINVAL);
  request.header.size = sizeof(request);
  EXPECT_EQ(DispatchCommand(&context_, std::as_bytes(std::span(&request, 1)), true, {}).error,
            EINVAL);
}

TEST_F(CommandDispatch, UnknownOpsAreNotSupported) {
  for (const uint16_t op : {uint16_t{0}, uint16_t{abi::kCmdGetSegment + 1}, uint16_t{0xffff}}) {
    EXPECT_EQ(Run(abi::HandleRequest{}, op).error, EOPNOTSUPP);
  }
}

TEST_F(CommandDispatch, AChannelIsAPipeThatNobodyElseCanMakeBlocking) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd read_end(ends[0]);
  const UniqueFd kept(fcntl(ends[1], F_DUPFD_CLOEXEC, 3));  // the application's
  abi::CreateCqRequest request{};
  request.cqe = 10;
  request.user_handle = 0x1234;
  request.has_channel = 1;
  const CommandResult result = Run(request, abi::kCmdCreateCq, One(ends[1]));
  ASSERT_EQ(result.error, 0);
  EXPECT_EQ(result.fds.size(), 1u);
  EXPECT_EQ(result.cq_change, CommandResult::CqChange::kChannelAdded);
  EXPECT_EQ(result.cq_user_handle, 0x1234u);
  fcntl(kept.get(), F_SETFL, 0);
  EXPECT_TRUE(fcntl(context_.channel(0), F_GETFL) & O_NONBLOCK);
  EXPECT_TRUE(fcntl(result.channel.get(), F_GETFL) & O_NONBLOCK);
  ASSERT_EQ(write(result.channel.get(), "x", 1), 1);
  char byte = 0;
  EXPECT_EQ(read(read_end.get(), &byte, 1), 1);
}

TEST_F(CommandDispatch, WrongChannelsAreEinval) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd write_end(ends[1]);
  abi::CreateCqRequest request{};
  request.cqe = 10;
  request.has_channel = 1;
  EXPECT_EQ(Run(request, abi::kCmdCreateCq).error, EINVAL);                // none
  EXPECT_EQ(Run(request, abi::kCmdCreateCq, One(ends[0])).error, EINVAL);  // read end
  EXPECT_EQ(Run(request, abi::kCmdCreateCq, One(open("/dev/null", O_RDWR))).error, EINVAL);
  request.has_channel = 0;
  EXPECT_EQ(Run(request, abi::kCmdCreateCq, One(dup(ends[1]))).error, EINVAL);  // unannounced
  request.has_channel = 2;
  EXPECT_EQ(Run(request, abi::kCmdCreateCq).error, EINVAL);
}

}  // namespace
}  // namespace verbena::nic
