// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/supervisor/death_notices.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "nic_sim/abi/commands.h"
#include "nic_sim/supervisor/engine_link.h"

namespace verbena::nic {
namespace {

LinkMessage Message(LinkKind kind, uint64_t context, uint32_t handle = 0,
                    uint64_t user_handle = 0) {
  LinkMessage message;
  message.kind = kind;
  message.context = context;
  message.handle = handle;
  message.user_handle = user_handle;
  return message;
}

struct Pipe {
  Pipe() {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    read_end.reset(ends[0]);
    write_end.reset(ends[1]);
  }
  UniqueFd Writer() const { return UniqueFd(fcntl(write_end.get(), F_DUPFD_CLOEXEC, 3)); }
  UniqueFd read_end;
  UniqueFd write_end;
};

TEST(DeathNotices, CqsOfOneChannelShareADescriptor) {
  DeathNotices notices;
  const Pipe async;
  const Pipe channel;
  notices.Apply(Message(LinkKind::kAddContext, 1), async.Writer());
  for (uint32_t cq = 0; cq < 1000; ++cq) {
    notices.Apply(Message(LinkKind::kAddChannel, 1, cq, cq), channel.Writer());
  }
  EXPECT_EQ(notices.descriptor_count(), 2u);
  for (uint32_t cq = 0; cq < 999; ++cq) {
    notices.Apply(Message(LinkKind::kRemoveCq, 1, cq), UniqueFd());
  }
  EXPECT_EQ(notices.descriptor_count(), 2u);
  notices.Apply(Message(LinkKind::kRemoveCq, 1, 999), UniqueFd());
  EXPECT_EQ(notices.descriptor_count(), 1u);
  notices.Apply(Message(LinkKind::kRemoveContext, 1), UniqueFd());
  EXPECT_EQ(notices.descriptor_count(), 0u);
}

TEST(DeathNotices, AFullEventPipeStillGetsTheFatalEvent) {
  DeathNotices notices;
  const Pipe async;
  notices.Apply(Message(LinkKind::kAddContext, 1), async.Writer());
  const abi::AsyncEventRecord other = {7, 10, 0};
  size_t before = 0;
  while (write(async.write_end.get(), &other, sizeof(other)) == ssize_t{sizeof(other)}) ++before;
  ASSERT_EQ(errno, EAGAIN);
  notices.Announce();
  abi::AsyncEventRecord last{};
  abi::AsyncEventRecord record{};
  size_t after = 0;
  while (read(async.read_end.get(), &record, sizeof(record)) == ssize_t{sizeof(record)}) {
    last = record;
    ++after;
  }
  EXPECT_EQ(after, before + 1);
  EXPECT_EQ(last.event_type, 8u);
}

TEST(DeathNotices, AClosedReaderOrAFullChannelDoesNotStopTheOthers) {
  signal(SIGPIPE, SIG_IGN);
  DeathNotices notices;
  Pipe gone;
  const Pipe full;
  const Pipe good;
  notices.Apply(Message(LinkKind::kAddContext, 1), gone.Writer());
  notices.Apply(Message(LinkKind::kAddContext, 2), good.Writer());
  notices.Apply(Message(LinkKind::kAddChannel, 2, 1, 5), full.Writer());
  gone.read_end.reset();
  while (write(full.write_end.get(), "12345678", 8) == 8) {
  }
  notices.Announce();
  abi::AsyncEventRecord record{};
  EXPECT_EQ(read(good.read_end.get(), &record, sizeof(record)), ssize_t{sizeof(record)});
}

TEST(EngineLink, MessagesThatDoNotFitWaitAndKeepTheirOrderAndDescriptors) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  EngineLink link{UniqueFd(pair[0])};
  const UniqueFd other(pair[1]);
  constexpr uint32_t kMessages = 3000;  // far more than a socket holds
  for (uint32_t i = 0; i < kMessages; ++i) {
    const UniqueFd fd(open("/dev/null", O_WRONLY | O_CLOEXEC));
    link.Send(Message(LinkKind::kAddChannel, 1, i), i % 100 == 0 ? fd.get() : -1);
  }
  EXPECT_TRUE(link.has_pending());
  for (uint32_t i = 0; i < kMessages; ++i) {
    LinkMessage message;
    ReceivedMessage got =
        ReceiveMessage(other.get(), std::as_writable_bytes(std::span(&message, 1)));
    if (got.kind == ReceivedMessage::Kind::kNothing) {
      link.Flush();
      got = ReceiveMessage(other.get(), std::as_writable_bytes(std::span(&message, 1)));
    }
    ASSERT_EQ(got.kind, ReceivedMessage::Kind::kMessage);
    ASSERT_EQ(message.handle, i);
    ASSERT_EQ(got.fds.size(), i % 100 == 0 ? 1u : 0u);
  }
  EXPECT_FALSE(link.has_pending());
}

}  // namespace
}  // namespace verbena::nic
