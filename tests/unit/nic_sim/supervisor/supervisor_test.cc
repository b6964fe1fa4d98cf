// SPDX-License-Identifier: Apache-2.0
//
// The supervisor with an engine process of the test's own, which is killed or ends by itself.
#include "nic_sim/supervisor/supervisor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "nic_sim/abi/commands.h"
#include "nic_sim/abi/shared_memory.h"
#include "nic_sim/supervisor/engine_link.h"

namespace verbena::nic {
namespace {

using ::testing::HasSubstr;
constexpr int kLimitMs = 10000;

bool Readable(int fd, int milliseconds = kLimitMs) {
  pollfd descriptor = {fd, POLLIN, 0};
  return poll(&descriptor, 1, milliseconds) == 1 && (descriptor.revents & POLLIN) != 0;
}

struct Pipe {
  explicit Pipe(int write_flags = 0) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    read_end.reset(ends[0]);
    write_end.reset(ends[1]);
    fcntl(write_end.get(), F_SETFL, O_WRONLY | write_flags);
  }
  UniqueFd read_end;
  UniqueFd write_end;
};

LinkMessage Message(LinkKind kind, uint64_t context = 0, uint32_t handle = 0,
                    uint64_t user_handle = 0) {
  LinkMessage message;
  message.kind = kind;
  message.context = context;
  message.handle = handle;
  message.user_handle = user_handle;
  return message;
}

uint64_t ReadWord(int fd) {
  uint64_t word = 0;
  EXPECT_TRUE(Readable(fd));
  EXPECT_EQ(read(fd, &word, sizeof(word)), ssize_t{sizeof(word)});
  return word;
}

// Runs a supervisor in a process of its own, as it is in real life.
class SupervisorTest : public ::testing::Test {
 protected:
  SupervisorTest()
      : async_(O_NONBLOCK), channel_(O_NONBLOCK), other_channel_(O_NONBLOCK), reports_(0) {
    std::string folder = "/tmp/vsup.XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) ADD_FAILURE() << "mkdtemp";
    folder_ = folder;
    std::string error;
    paths_ = MakeInstancePaths(folder_, "t", &error);
    EXPECT_EQ(error, "");
    std::filesystem::create_directories(paths_.tree + "/sys");
    std::ofstream(paths_.socket) << "stands for the socket";
    status_.reset(memfd_create("status", MFD_CLOEXEC));
    EXPECT_EQ(ftruncate(status_.get(), sizeof(abi::StatusPage)), 0);
  }
  ~SupervisorTest() override {
    if (supervisor_ > 0) {
      kill(supervisor_, SIGKILL);
      waitpid(supervisor_, nullptr, 0);
    }
    std::filesystem::remove_all(folder_);
  }

  void Start(std::function<void(EngineLink*)> engine, int stop_seconds = 10) {
    supervisor_ = fork();
    ASSERT_GE(supervisor_, 0);
    if (supervisor_ != 0) {
      reports_.write_end.reset();
      return;
    }
    sigset_t signals;
    sigemptyset(&signals);
    for (const int number : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&signals, number);
    sigprocmask(SIG_BLOCK, &signals, nullptr);
    signal(SIGPIPE, SIG_IGN);
    InstanceGuard guard;
    SupervisorOptions options;
    options.paths = paths_;
    options.guard = &guard;
    options.stop_seconds = stop_seconds;
    options.report = [&](const std::string& error) { Say("report:" + error); };
    options.run_engine = [&](UniqueFd socket) {
      EngineLink link(std::move(socket));
      engine(&link);
    };
    if (!guard.Take(paths_.pid, "t").empty()) _exit(90);
    _exit(RunSupervisor(std::move(options)));
  }

  // Of the processes, to the test.
  void Say(const std::string& line) {
    const std::string text = line + "\n";
    if (write(reports_.write_end.get(), text.data(), text.size()) < 0) _exit(91);
  }
  std::string Hear() {
    std::string line;
    char c = 0;
    while (Readable(reports_.read_end.get()) && read(reports_.read_end.get(), &c, 1) == 1) {
      if (c == '\n') return line;
      line += c;
    }
    return line + "(end)";
  }

  // What a working engine says first.
  void Announce(EngineLink* link) {
    link->Send(Message(LinkKind::kReady), status_.get());
    link->Send(Message(LinkKind::kAddContext, 5), async_.write_end.get());
    link->Send(Message(LinkKind::kAddChannel, 5, 1, 0x1111), channel_.write_end.get());
    link->Send(Message(LinkKind::kAddChannel, 5, 2, 0x2222), channel_.write_end.get());
    link->Send(Message(LinkKind::kAddChannel, 5, 3, 0x3333), other_channel_.write_end.get());
    link->Send(Message(LinkKind::kRemoveCq, 5, 3));
    link->Send(Message(LinkKind::kAddContext, 6), async_.write_end.get());
    link->Send(Message(LinkKind::kRemoveContext, 6));
    link->Drain(1000);
    Say("engine:" + std::to_string(getpid()));
  }
  pid_t EnginePid() {
    std::string line = Hear();
    // The supervisor's report and the engine's line come in any order.
    if (line == "report:") line = Hear();
    return line.starts_with("engine:") ? std::stoi(line.substr(7)) : -1;
  }
  [[noreturn]] static void Forever() {
    for (;;) pause();
  }

  int ExitStatus() {
    int status = 0;
    EXPECT_EQ(waitpid(supervisor_, &status, 0), supervisor_);
    supervisor_ = -1;
    EXPECT_TRUE(WIFEXITED(status));
    return WEXITSTATUS(status);
  }
  void ExpectClientsTold() {
    abi::StatusPage page{};
    EXPECT_EQ(pread(status_.get(), &page, sizeof(page), 0), ssize_t{sizeof(page)});
    EXPECT_EQ(page.device_dead.load(), 1u);
    abi::AsyncEventRecord record{};
    ASSERT_TRUE(Readable(async_.read_end.get()));
    EXPECT_EQ(read(async_.read_end.get(), &record, sizeof(record)), ssize_t{sizeof(record)});
    EXPECT_EQ(record.event_type, 8u);
    EXPECT_EQ(record.element, 0u);
    EXPECT_FALSE(Readable(async_.read_end.get(), 0)) << "told twice, or a closed context";
    EXPECT_EQ(ReadWord(channel_.read_end.get()), 0x1111u);
    EXPECT_EQ(ReadWord(channel_.read_end.get()), 0x2222u);
    EXPECT_FALSE(Readable(other_channel_.read_end.get(), 0)) << "a destroyed CQ";
    EXPECT_FALSE(std::filesystem::exists(paths_.socket));
    EXPECT_FALSE(std::filesystem::exists(paths_.tree));
  }

  std::string folder_;
  InstancePaths paths_;
  Pipe async_;
  Pipe channel_;
  Pipe other_channel_;
  Pipe reports_;
  UniqueFd status_;
  pid_t supervisor_ = -1;
};

TEST_F(SupervisorTest, WhenTheEngineIsKilledEveryClientIsTold) {
  Start([this](EngineLink* link) {
    Announce(link);
    Forever();
  });
  const pid_t engine = EnginePid();
  ASSERT_GT(engine, 0);
  EXPECT_FALSE(Readable(async_.read_end.get(), 0));
  kill(engine, SIGKILL);
  EXPECT_NE(ExitStatus(), 0);
  ExpectClientsTold();
}

TEST_F(SupervisorTest, ACleanEndTellsTheClientsTooAndGivesZero) {
  Start([this](EngineLink* link) {
    Announce(link);
    while (link->Poll() == EngineLink::News::kNone) poll(nullptr, 0, 2);
    _exit(0);
  });
  ASSERT_GT(EnginePid(), 0);
  kill(supervisor_, SIGTERM);
  EXPECT_EQ(ExitStatus(), 0);
  ExpectClientsTold();
}

TEST_F(SupervisorTest, AnEngineThatSaysThatItEndsHasItsClientsToldAtOnce) {
  Start([this](EngineLink* link) {
    Announce(link);
    link->Send(Message(LinkKind::kStopping));
    Forever();
  });
  const pid_t engine = EnginePid();
  ASSERT_GT(engine, 0);
  EXPECT_EQ(ReadWord(channel_.read_end.get()), 0x1111u);
  EXPECT_EQ(ReadWord(channel_.read_end.get()), 0x2222u);
  EXPECT_TRUE(Readable(async_.read_end.get()));
  kill(engine, SIGKILL);
  EXPECT_NE(ExitStatus(), 0);
}

TEST_F(SupervisorTest, AnEngineThatDoesNotStartIsReportedWithItsReason) {
  Start([](EngineLink* link) {
    LinkMessage failed = Message(LinkKind::kFailed);
    std::string("no memory for packets").copy(failed.text, sizeof(failed.text));
    link->Send(failed);
    _exit(1);
  });
  EXPECT_EQ(Hear(), "report:no memory for packets");
  EXPECT_EQ(ExitStatus(), 1);
}

TEST_F(SupervisorTest, AnEngineThatDiesBeforeItIsReadyIsReported) {
  Start([](EngineLink*) { kill(getpid(), SIGKILL); });
  EXPECT_THAT(Hear(), HasSubstr("signal 9"));
  EXPECT_EQ(ExitStatus(), 1);
}

TEST_F(SupervisorTest, AnEngineThatDoesNotEndIsKilled) {
  Start(
      [this](EngineLink* link) {
        Announce(link);
        Forever();
      },
      1);
  ASSERT_GT(EnginePid(), 0);
  kill(supervisor_, SIGTERM);
  EXPECT_NE(ExitStatus(), 0);
  ExpectClientsTold();
}

TEST_F(SupervisorTest, AHeldConnectionClosesWhenAllIsOver) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  UniqueFd ours(pair[0]);
  UniqueFd theirs(pair[1]);
  Start([&](EngineLink* link) {
    ours.reset();
    Announce(link);
    link->Send(Message(LinkKind::kHold), theirs.get());
    theirs.reset();
    while (link->Poll() == EngineLink::News::kNone) poll(nullptr, 0, 2);
    _exit(0);
  });
  ASSERT_GT(EnginePid(), 0);
  theirs.reset();
  EXPECT_FALSE(Readable(ours.get(), 50));
  kill(supervisor_, SIGTERM);
  ASSERT_TRUE(Readable(ours.get()));
  // Over means: the name is free and the files are gone.
  EXPECT_FALSE(std::filesystem::exists(paths_.socket));
  InstanceGuard guard;
  EXPECT_EQ(guard.Take(paths_.pid, "t"), "");
  EXPECT_EQ(ExitStatus(), 0);
}

TEST_F(SupervisorTest, TheEngineSeesThatItsSupervisorIsGone) {
  Start([this](EngineLink* link) {
    Announce(link);
    pollfd descriptor = {link->fd(), POLLIN, 0};
    poll(&descriptor, 1, kLimitMs);
    Say(link->Poll() == EngineLink::News::kSupervisorGone ? "gone" : "other");
    _exit(0);
  });
  ASSERT_GT(EnginePid(), 0);
  kill(supervisor_, SIGKILL);
  std::string line = Hear();
  if (line == "report:") line = Hear();
  EXPECT_EQ(line, "gone");
}

TEST(InstanceGuard, TheSecondOfOneNameLearnsThePidOfTheFirst) {
  std::string folder = "/tmp/vguard.XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::string error;
  const InstancePaths paths = MakeInstancePaths(folder, "lab", &error);
  {
    InstanceGuard first;
    EXPECT_EQ(first.Take(paths.pid, "lab"), "");
    InstanceGuard second;
    const std::string refusal = second.Take(paths.pid, "lab");
    EXPECT_THAT(refusal, HasSubstr("already running"));
    EXPECT_THAT(refusal, HasSubstr("lab"));
    EXPECT_THAT(refusal, HasSubstr(std::to_string(getpid())));
    InstanceGuard other;
    EXPECT_EQ(other.Take(MakeInstancePaths(folder, "lab2", &error).pid, "lab2"), "");
  }
  InstanceGuard later;
  EXPECT_EQ(later.Take(paths.pid, "lab"), "");
  std::filesystem::remove_all(folder);
}

TEST(InstanceGuard, APidFileThatIsALinkIsRefused) {
  std::string folder = "/tmp/vguard.XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string victim = folder + "/victim";
  std::ofstream(victim) << "precious";
  std::filesystem::create_symlink(victim, folder + "/x.pid");
  InstanceGuard guard;
  EXPECT_THAT(guard.Take(folder + "/x.pid", "x"), HasSubstr("cannot open"));
  EXPECT_EQ(std::filesystem::file_size(victim), 8u);
  std::filesystem::remove_all(folder);
}

TEST(InstanceGuard, TheNameStaysTakenWhileTheEngineLives) {
  std::string folder = "/tmp/vguard.XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::string error;
  const InstancePaths paths = MakeInstancePaths(folder, "lab", &error);
  InstanceGuard supervisor;
  ASSERT_EQ(supervisor.Take(paths.pid, "lab"), "");
  UniqueFd engine(dup(supervisor.fd()));  // as inherited by fork
  supervisor.Release();
  InstanceGuard next;
  EXPECT_THAT(next.Take(paths.pid, "lab"), HasSubstr("already running"));
  engine.reset();
  EXPECT_EQ(next.Take(paths.pid, "lab"), "");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace verbena::nic
