// SPDX-License-Identifier: Apache-2.0
//
// The control server with clients over its real socket, in front of a fake device.
#include "nic_sim/ctrl/server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>

#include "nic_sim/supervisor/death_notices.h"
#include "tests/unit/nic_sim/ctrl/fake_hardware.h"
#include "tests/unit/nic_sim/ctrl/test_client.h"

namespace verbena::nic {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
class ServerTest : public ::testing::Test {
 protected:
  ServerTest() {
    std::string folder = "/tmp/vsrv.XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) ADD_FAILURE() << "mkdtemp";
    folder_ = folder;
    path_ = folder_ + "/t.sock";
    options_.daemon = {"t", path_, false, getpid()};
    int pair[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    link_ = std::make_unique<EngineLink>(UniqueFd(pair[0]));
    supervisor_.reset(pair[1]);
  }
  ~ServerTest() override {
    if (thread_.joinable()) {
      server_->Stop();
      thread_.join();
    }
    server_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Start() {
    server_ = std::make_unique<Server>(&hardware_, link_.get(), options_);
    ASSERT_EQ(server_->Listen(path_, -1), "");
    thread_ = std::thread([this] {
      server_->Run();
      ended_ = true;
    });
  }
  size_t Contexts() {
    const std::lock_guard<ShardLock> guard(hardware_.lock());
    return hardware_.context_count();
  }
  // What the supervisor was told.
  ReceivedMessage News(LinkMessage* message) {
    if (!Readable(supervisor_.get())) return {};
    return ReceiveMessage(supervisor_.get(), std::as_writable_bytes(std::span(message, 1)));
  }

  std::string folder_;
  std::string path_;
  ServerOptions options_;
  FakeHardware hardware_;
  std::unique_ptr<EngineLink> link_;
  UniqueFd supervisor_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
  std::atomic<bool> ended_{false};
};

TEST_F(ServerTest, OpeningADeviceGivesItsDescriptorsInOrder) {
  Start();
  Client client(path_);
  std::vector<UniqueFd> fds;
  const abi::HelloReply reply = client.Open(GoodHello(1), &fds);
  EXPECT_EQ(reply.error, 0);
  EXPECT_EQ(reply.version, abi::kVersionMax);
  EXPECT_EQ(reply.cookie, 1u);
  ASSERT_EQ(fds.size(), 4u);
  const auto name = [](const UniqueFd& fd) {
    return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd.get())).string();
  };
  EXPECT_THAT(name(fds[0]), HasSubstr("memfd:context"));
  EXPECT_THAT(name(fds[1]), HasSubstr("memfd:wake"));
  EXPECT_THAT(name(fds[2]), HasSubstr("memfd:status"));
  EXPECT_THAT(name(fds[3]), HasSubstr("pipe:"));
  EXPECT_EQ(fcntl(fds[3].get(), F_GETFL) & (O_ACCMODE | O_NONBLOCK), O_RDONLY);
  const std::lock_guard<ShardLock> guard(hardware_.lock());
  const ClientIdentity& client_identity = hardware_.only_context().client();
  EXPECT_EQ(client_identity.pid, getpid());
  EXPECT_EQ(client_identity.uid, geteuid());
  EXPECT_EQ(client_identity.comm, "tester");
  EXPECT_NE(fcntl(client_identity.async_write_fd, F_GETFL) & O_NONBLOCK, 0);
}

TEST_F(ServerTest, TheSocketIsForItsUserOnly) {
  Start();
  struct stat info = {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(ServerTest, CommandsAreAnsweredInOrder) {
  Start();
  Client client(path_);
  ASSERT_EQ(client.Open().error, 0);
  EXPECT_EQ(client.Command(abi::HandleRequest{}, abi::kCmdAllocPd).handle, 1u);
  EXPECT_EQ(client.Command(abi::HandleRequest{}, abi::kCmdAllocPd).handle, 2u);
  // Many at once, none read meanwhile.
  for (uint32_t i = 0; i < 100; ++i) {
    abi::HandleRequest request{};
    request.header = {abi::kCmdAllocPd, sizeof(request), 1000 + i};
    ASSERT_EQ(client.Send(request), 0);
  }
  for (uint32_t i = 0; i < 100; ++i) {
    const auto reply = client.ReceiveAs<abi::HandleReply>();
    ASSERT_EQ(reply.header.sequence, 1000 + i);
    ASSERT_EQ(reply.handle, 3 + i);
  }
}

TEST_F(ServerTest, ACqBringsItsSegmentAndTellsTheSupervisor) {
  Start();
  LinkMessage news;
  News(&news);
  EXPECT_EQ(news.kind, LinkKind::kReady);
  Client client(path_);
  ASSERT_EQ(client.Open().error, 0);
  News(&news);
  EXPECT_EQ(news.kind, LinkKind::kAddContext);
  const uint64_t context = news.context;

  int channel[2];
  ASSERT_EQ(pipe2(channel, O_CLOEXEC), 0);
  const UniqueFd read_end(channel[0]);
  const UniqueFd write_end(channel[1]);
  abi::CreateCqRequest request{};
  request.cqe = 16;
  request.user_handle = 0xabcdef;
  request.has_channel = 1;
  std::vector<UniqueFd> fds;
  const auto reply = client.Command<abi::CreateCqReply>(request, abi::kCmdCreateCq,
                                                        std::span(&channel[1], 1), &fds);
  EXPECT_EQ(reply.header.error, 0);
  EXPECT_EQ(reply.cqe, 16u);
  EXPECT_EQ(fds.size(), 1u);
  const ReceivedMessage added = News(&news);
  EXPECT_EQ(news.kind, LinkKind::kAddChannel);
  EXPECT_EQ(news.context, context);
  EXPECT_EQ(news.handle, reply.handle);
  EXPECT_EQ(news.user_handle, 0xabcdefu);
  ASSERT_EQ(added.fds.size(), 1u);
  ASSERT_EQ(write(added.fds[0].get(), "x", 1), 1);
  EXPECT_TRUE(Readable(read_end.get(), 0));

  abi::HandleRequest destroy{};
  destroy.handle = reply.handle;
  EXPECT_EQ(client.Command<abi::DestroyReply>(destroy, abi::kCmdDestroyCq).comp_events, 3u);
  News(&news);
  EXPECT_EQ(news.kind, LinkKind::kRemoveCq);
  EXPECT_EQ(news.handle, reply.handle);
  client.Close();
  News(&news);
  EXPECT_EQ(news.kind, LinkKind::kRemoveContext);
  EXPECT_EQ(news.context, context);
}

TEST_F(ServerTest, RefusalsSayWhyAndClose) {
  Start();
  abi::Hello other = GoodHello();
  other.sizes.cqe += 1;
  Client incompatible(path_);
  const abi::HelloReply reply = incompatible.Open(other);
  EXPECT_EQ(reply.error, EPROTO);
  EXPECT_EQ(reply.sizes, abi::kAbiSizes);
  EXPECT_EQ(reply.version_max, abi::kVersionMax);
  EXPECT_TRUE(incompatible.Closed());

  Client no_device(path_);
  EXPECT_EQ(no_device.Open(GoodHello(2)).error, ENODEV);
  EXPECT_TRUE(no_device.Closed());

  Client garbage(path_);
  garbage.SendText("GET / HTTP/1.1");
  EXPECT_TRUE(garbage.Closed());

  Client wrong_memory(path_);
  const UniqueFd null(open("/dev/null", O_RDWR));
  wrong_memory.Send(GoodHello(), std::vector<int>{null.get()});
  EXPECT_EQ(wrong_memory.ReceiveAs<abi::HelloReply>().error, EINVAL);

  {
    const std::lock_guard<ShardLock> guard(hardware_.lock());
    hardware_.open_error = EPERM;
  }
  Client not_allowed(path_);
  EXPECT_EQ(not_allowed.Open().error, EPERM);
  EXPECT_TRUE(not_allowed.Closed());
  EXPECT_EQ(Contexts(), 0u);
}

TEST_F(ServerTest, ClosingTheConnectionClosesTheContext) {
  Start();
  Client client(path_);
  ASSERT_EQ(client.Open().error, 0);
  Client other(path_);
  ASSERT_EQ(other.Open().error, 0);
  EXPECT_EQ(Contexts(), 2u);
  client.Close();
  EXPECT_TRUE(Eventually([&] { return Contexts() == 1; }));
  EXPECT_EQ(other.Command(abi::HandleRequest{}, abi::kCmdAllocPd).header.error, 0);
}

TEST_F(ServerTest, AProcessThatDiesLosesItsContextAlthoughItsChildKeepsTheSocket) {
  Start();
  int report[2];
  ASSERT_EQ(pipe2(report, O_CLOEXEC), 0);
  const UniqueFd read_end(report[0]);
  const pid_t application = fork();
  if (application == 0) {
    Client client(path_);
    const bool opened = client.Open().error == 0;
    const pid_t child = fork();
    if (child == 0) {
      pause();  // with the connection
      _exit(0);
    }
    const pid_t answer = opened ? child : 0;
    if (write(report[1], &answer, sizeof(answer)) != sizeof(answer)) _exit(1);
    pause();
    _exit(0);
  }
  close(report[1]);
  pid_t child = 0;
  ASSERT_TRUE(Readable(read_end.get()));
  ASSERT_EQ(read(read_end.get(), &child, sizeof(child)), ssize_t{sizeof(child)});
  ASSERT_GT(child, 0);
  EXPECT_EQ(Contexts(), 1u);
  kill(application, SIGKILL);
  EXPECT_TRUE(Eventually([&] { return Contexts() == 0; }, 1000));
  EXPECT_EQ(kill(child, 0), 0);
  kill(child, SIGKILL);
  waitpid(application, nullptr, 0);
}

TEST_F(ServerTest, ASilentConnectionIsClosedAndAFloodOfThemKeepsNobodyOut) {
  options_.hello_ms = 300;
  Start();
  std::vector<Client> silent;
  for (int i = 0; i < 200; ++i) silent.emplace_back(path_);
  Client client(path_);
  ASSERT_EQ(client.Open().error, 0);
  for (Client& each : silent) EXPECT_TRUE(each.Closed());
  EXPECT_EQ(client.Command(abi::HandleRequest{}, abi::kCmdAllocPd).header.error, 0);
}

TEST_F(ServerTest, AClientThatDoesNotReadItsRepliesDelaysNobody) {
  {
    const std::lock_guard<ShardLock> guard(hardware_.lock());
    hardware_.list_items = 100000;  // megabytes of reply
  }
  Start();
  Client lazy(path_);
  lazy.OpenControl();
  for (int i = 0; i < 5; ++i) lazy.SendText(R"({"op":"list","what":"qp"})");
  Client client(path_);
  ASSERT_EQ(client.Open().error, 0);
  for (int i = 0; i < 100; ++i) client.Command(abi::HandleRequest{}, abi::kCmdAllocPd);
  // And when it reads, everything is there.
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(lazy.ReadReply()["items"].size(), 100000u);
  }
}

TEST_F(ServerTest, HostileMessagesAreRefusedAndTheConnectionLives) {
  Start();
  Client client(path_);
  ASSERT_EQ(client.Open().error, 0);
  std::vector<std::byte> big(abi::kMaxMessageBytes + 1);
  const abi::CommandHeader header = {abi::kCmdAllocPd, 4097, 5};
  std::memcpy(big.data(), &header, sizeof(header));
  ASSERT_EQ(SendMessage(client.fd(), big), 0);
  EXPECT_EQ(client.ReceiveAs<abi::ReplyHeader>().error, EINVAL);
  ASSERT_EQ(client.SendText("x"), 0);
  EXPECT_EQ(client.ReceiveAs<abi::ReplyHeader>().error, EINVAL);
  // Descriptors that nobody asked for do not pile up.
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  const auto before = open_files();
  const std::vector<int> many(50, client.fd());
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(client.Command(abi::HandleRequest{}, abi::kCmdAllocPd, many).header.error, 0);
  }
  EXPECT_EQ(open_files(), before);
  EXPECT_EQ(client.Command(abi::HandleRequest{}, abi::kCmdAllocPd).header.error, 0);
}

TEST_F(ServerTest, ControlRequestsOfOneConnection) {
  Start();
  Client client(path_);
  client.OpenControl();
  EXPECT_EQ(client.Ask(R"({"op":"status"})")["clients"], 0);
  Client device(path_);
  ASSERT_EQ(device.Open().error, 0);
  EXPECT_EQ(client.Ask(R"({"op":"status"})")["clients"], 1);
  EXPECT_TRUE(client.Ask("nonsense").contains("error"));
  EXPECT_TRUE(client.Ask(std::string(70000, ' ')).contains("error"));
  EXPECT_EQ(client.Ask(R"({"op":"version"})")["pid"], getpid());
}

TEST_F(ServerTest, ACaptureEndsByItsCountByRequestAndByDisconnection) {
  Start();
  Client client(path_);
  client.OpenControl();
  const UniqueFd file(memfd_create("out", MFD_CLOEXEC));
  const std::vector<int> fd = {file.get()};
  EXPECT_TRUE(client.Ask(R"({"op":"capture","stage":"after","count":5})", fd)["ok"]);
  const json done = client.ReadReply();
  EXPECT_EQ(done["done"], true);
  EXPECT_EQ(done["packets"], 5);
  EXPECT_EQ(done["missed"], 1);

  EXPECT_TRUE(client.Ask(R"({"op":"capture","stage":"after"})", fd)["ok"]);
  EXPECT_TRUE(client.Ask(R"({"op":"capture","stage":"after"})", fd).contains("error"));
  EXPECT_EQ(client.Ask(R"({"op":"capture_stop"})")["done"], true);
  EXPECT_TRUE(client.Ask(R"({"op":"capture_stop"})").contains("error"));

  EXPECT_TRUE(client.Ask(R"({"op":"capture","stage":"after"})", fd)["ok"]);
  client.Close();
  EXPECT_TRUE(Eventually([&] {
    const std::lock_guard<ShardLock> guard(hardware_.lock());
    return hardware_.capture_count() == 0;
  }));
}

TEST_F(ServerTest, ACaptureNeedsADescriptorForWriting) {
  Start();
  Client client(path_);
  client.OpenControl();
  EXPECT_TRUE(client.Ask(R"({"op":"capture","stage":"after"})").contains("error"));
  const UniqueFd null(open("/dev/null", O_RDONLY));
  const std::vector<int> read_only = {null.get()};
  EXPECT_TRUE(client.Ask(R"({"op":"capture","stage":"after"})", read_only).contains("error"));
  const UniqueFd full(open("/dev/full", O_WRONLY));
  const std::vector<int> full_disk = {full.get()};
  EXPECT_TRUE(client.Ask(R"({"op":"capture","stage":"after"})", full_disk)["ok"]);
  EXPECT_THAT(client.Ask(R"({"op":"capture_stop"})").value("error", ""),
              HasSubstr("No space left"));
  EXPECT_TRUE(client.Ask(R"({"op":"capture","stage":"after","dev":"verbena7"})", full_disk)
                  .contains("error"));
}

TEST_F(ServerTest, ShutdownEndsTheServerAndHandsTheConnectionToTheSupervisor) {
  Start();
  Client client(path_);
  client.OpenControl();
  EXPECT_EQ(client.Ask(R"({"op":"shutdown"})"), json({{"ok", true}}));
  ASSERT_TRUE(Eventually([&] { return ended_.load(); }));
  EXPECT_FALSE(std::filesystem::exists(path_));
  LinkMessage news;
  std::vector<LinkKind> kinds;
  UniqueFd held;
  while (Readable(supervisor_.get(), 0)) {
    ReceivedMessage got = News(&news);
    kinds.push_back(news.kind);
    if (news.kind == LinkKind::kHold && !got.fds.empty()) held = std::move(got.fds[0]);
  }
  EXPECT_EQ(kinds, (std::vector<LinkKind>{LinkKind::kReady, LinkKind::kHold, LinkKind::kStopping}));
  server_->Stop();
  thread_.join();
  server_.reset();
  // Open until the supervisor ends.
  EXPECT_FALSE(Readable(client.fd(), 50));
  held.reset();
  EXPECT_TRUE(client.Closed());
}

TEST_F(ServerTest, TheSupervisorsWordEndsIt) {
  Start();
  LinkMessage stop;
  stop.kind = LinkKind::kStop;
  ASSERT_EQ(SendMessage(supervisor_.get(), BytesOf(stop)), 0);
  EXPECT_TRUE(Eventually([&] { return ended_.load(); }));
}

TEST_F(ServerTest, WithoutItsSupervisorItTellsTheClientsItselfAndEnds) {
  Start();
  Client client(path_);
  std::vector<UniqueFd> fds;
  ASSERT_EQ(client.Open(GoodHello(), &fds).error, 0);
  supervisor_.reset();
  ASSERT_TRUE(Eventually([&] { return ended_.load(); }));
  abi::AsyncEventRecord record{};
  ASSERT_TRUE(Readable(fds[3].get()));
  ASSERT_EQ(read(fds[3].get(), &record, sizeof(record)), ssize_t{sizeof(record)});
  EXPECT_EQ(record.event_type, 8u);
  uint32_t dead = 0;
  ASSERT_EQ(pread(fds[2].get(), &dead, sizeof(dead), 0), ssize_t{sizeof(dead)});
  EXPECT_EQ(dead, 1u);
  EXPECT_EQ(Contexts(), 0u);
}

TEST_F(ServerTest, AnIdleDaemonEndsAfterItsLastClient) {
  options_.exit_idle_s = 1;
  Start();
  Client client(path_);
  ASSERT_EQ(client.Open().error, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(1300));
  EXPECT_FALSE(ended_);
  const auto closed = Clock::now();
  client.Close();
  ASSERT_TRUE(Eventually([&] { return ended_.load(); }));
  EXPECT_GE(Clock::now() - closed, std::chrono::milliseconds(950));
}

TEST_F(ServerTest, AnIdleDaemonEndsWhenNobodyEverComes) {
  options_.exit_idle_s = 1;
  options_.first_client_s = 2;
  Start();
  const auto started = Clock::now();
  {
    // A look does not count as the client that it waits for.
    Client control(path_);
    control.OpenControl();
    control.Ask(R"({"op":"version"})");
  }
  ASSERT_TRUE(Eventually([&] { return ended_.load(); }));
  EXPECT_GE(Clock::now() - started, std::chrono::milliseconds(1950));
}

TEST_F(ServerTest, EachOtherUserHasALimitOfContexts) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to be another user";
  options_.max_contexts_of_others = 2;
  options_.daemon.system = true;
  Start();
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(12345) != 0) _exit(10);
    Client first(path_);
    Client second(path_);
    Client third(path_);
    Client control(path_);
    if (first.Open().error != 0 || second.Open().error != 0) _exit(11);
    if (third.Open().error != ENOMEM) _exit(12);
    control.OpenControl();
    if (control.Ask(R"({"op":"dump"})").value("errno", "") != "EPERM") _exit(13);
    if (!control.Ask(R"({"op":"list","what":"qp"})").contains("items")) _exit(15);
    second.Close();
    for (int i = 0; i < 500; ++i) {
      Client again(path_);
      if (again.Open().error == 0) _exit(0);
      usleep(10000);
    }
    _exit(14);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WEXITSTATUS(status) == 10) GTEST_SKIP() << "this root cannot be another user (sandbox)";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace verbena::nic
