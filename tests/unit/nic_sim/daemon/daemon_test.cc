// SPDX-License-Identifier: Apache-2.0
//
// verbenad as a program: start, readiness, names, ends of all kinds, with a client on its socket
// that speaks the device interface.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/abi/shared_memory.h"
#include "nic_sim/runtime/read_file.h"
#include "tests/testing/process.h"
#include "tests/unit/nic_sim/ctrl/test_client.h"

namespace verbena::nic {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using verbena::testing::Finished;
using verbena::testing::Process;
using verbena::testing::ProcessOptions;
using verbena::testing::RunProcess;

std::string Program() {
  const char* runfiles = getenv("TEST_SRCDIR");
  return std::string(runfiles != nullptr ? runfiles : ".") + "/verbena/nic_sim/verbenad";
}

// Empty if the process ends meanwhile.
std::string ReadFile(const std::string& path) { return nic::ReadFile(path).value_or(""); }

bool Alive(pid_t pid) {
  const std::string status = ReadFile("/proc/" + std::to_string(pid) + "/status");
  return !status.empty() && status.find("State:\tZ") == std::string::npos;
}

// The page that a device's memory accesses touch first.
class GuardPage {
 public:
  static constexpr uint64_t kMagic = 0x1122334455667788;
  GuardPage()
      : page_(static_cast<uint64_t*>(
            mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    *page_ = kMagic;
  }
  ~GuardPage() { munmap(page_, 4096); }
  abi::Hello Hello(uint32_t device) const {
    abi::Hello hello = GoodHello(device);
    hello.guard_address = reinterpret_cast<uint64_t>(page_);
    hello.guard_magic = kMagic;
    return hello;
  }

 private:
  uint64_t* page_;
};

class DaemonTest : public ::testing::Test {
 protected:
  DaemonTest() {
    std::string folder = "/tmp/vd.XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) ADD_FAILURE() << "mkdtemp";
    folder_ = folder;
  }
  ~DaemonTest() override {
    for (const pid_t pid : started_) {
      if (pid > 1 && Alive(pid)) kill(pid, SIGKILL);
    }
    fs::remove_all(folder_);
  }

  ProcessOptions Options(std::vector<std::string> arguments) const {
    ProcessOptions options;
    options.argv = std::move(arguments);
    options.argv.insert(options.argv.begin(), Program());
    options.environment["XDG_RUNTIME_DIR"] = folder_;
    options.environment["VERBENA_NAME"] = std::nullopt;
    return options;
  }
  // Starts `name` in the background and checks that it is complete when the command returns.
  void Start(const std::string& name, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"--name", name});
    const Finished start = RunProcess(Options(std::move(more)));
    ASSERT_EQ(start.status, 0) << start.output << ReadFile(File(name, "log"));
    EXPECT_EQ(start.output, "");
    started_.push_back(Pid(name));
    started_.push_back(EnginePid(name));
    EXPECT_TRUE(fs::exists(File(name, "sock")));
    EXPECT_TRUE(fs::exists(File(name, "tree") + "/sys/class/infiniband/verbena0/node_guid"));
  }

  std::string File(const std::string& name, const char* what) const {
    return folder_ + "/verbena/" + name + "." + what;
  }
  pid_t Pid(const std::string& name) const {
    const std::string text = ReadFile(File(name, "pid"));
    return text.empty() ? -1 : std::stoi(text);
  }
  pid_t EnginePid(const std::string& name) const {
    const std::string pid = std::to_string(Pid(name));
    std::istringstream children(ReadFile("/proc/" + pid + "/task/" + pid + "/children"));
    pid_t child = -1;
    children >> child;
    return child;
  }
  void ExpectGone(const std::string& name) const {
    EXPECT_FALSE(fs::exists(File(name, "sock")));
    EXPECT_FALSE(fs::exists(File(name, "tree")));
  }
  static void ExpectTold(const std::vector<UniqueFd>& fds) {
    ASSERT_EQ(fds.size(), 4u);
    abi::AsyncEventRecord record{};
    ASSERT_TRUE(Readable(fds[3].get()));
    ASSERT_EQ(read(fds[3].get(), &record, sizeof(record)), ssize_t{sizeof(record)});
    EXPECT_EQ(record.event_type, 8u);
    uint32_t dead = 0;
    ASSERT_EQ(pread(fds[2].get(), &dead, sizeof(dead), 0), ssize_t{sizeof(dead)});
    EXPECT_EQ(dead, 1u);
  }

  std::string folder_;
  std::vector<pid_t> started_;
};

TEST_F(DaemonTest, StartsInTheBackgroundServesAndEndsCleanly) {
  Start("a", {"--nics", "2"});
  const pid_t supervisor = Pid("a");
  const pid_t engine = EnginePid("a");
  Client control(File("a", "sock"));
  control.OpenControl();
  const nlohmann::json status = control.Ask(R"({"op":"status"})");
  EXPECT_EQ(status["pid"], supervisor);
  EXPECT_EQ(status["nics"].size(), 2u);
  EXPECT_EQ(status["nics"][1]["ipv4"], "127.88.0.2");

  const GuardPage guard;
  Client device(File("a", "sock"));
  std::vector<UniqueFd> fds;
  const abi::HelloReply reply = device.Open(guard.Hello(1), &fds);
  ASSERT_EQ(reply.error, 0);
  EXPECT_EQ(reply.attributes.max_qp, 16384u);
  EXPECT_EQ(device.Command(abi::HandleRequest{}, abi::kCmdAllocPd).header.error, 0);
  EXPECT_EQ(control.Ask(R"({"op":"status"})")["clients"], 1);
  EXPECT_EQ(control.Ask(R"({"op":"list","what":"context"})")["items"][0]["pid"], getpid());
  // The status page cannot be written by applications.
  EXPECT_NE(pwrite(fds[2].get(), "x", 1, 0), 1);

  kill(supervisor, SIGTERM);
  EXPECT_TRUE(Eventually([&] { return !Alive(supervisor) && !Alive(engine); }));
  ExpectTold(fds);
  ExpectGone("a");
}

TEST_F(DaemonTest, ShutdownIsAnsweredAndTheConnectionClosesWhenAllIsOver) {
  Start("a");
  Client control(File("a", "sock"));
  control.OpenControl();
  EXPECT_EQ(control.Ask(R"({"op":"shutdown"})")["ok"], true);
  EXPECT_TRUE(control.Closed());
  ExpectGone("a");
  Start("a");  // at once
}

TEST_F(DaemonTest, TheSecondOfOneNameIsRefusedWithThePidAndHarmsNothing) {
  Start("a");
  const Finished second = RunProcess(Options({"--name", "a"}));
  EXPECT_EQ(second.status, 1);
  EXPECT_THAT(second.output, HasSubstr("already running"));
  EXPECT_THAT(second.output, HasSubstr(std::to_string(Pid("a"))));
  Start("b");
  for (const char* name : {"a", "b"}) {
    Client control(File(name, "sock"));
    control.OpenControl();
    EXPECT_EQ(control.Ask(R"({"op":"status"})")["name"], name);
  }
}

TEST_F(DaemonTest, WhenTheEngineIsKilledClientsAreToldAndTheNameIsFree) {
  Start("a");
  const GuardPage guard;
  Client device(File("a", "sock"));
  std::vector<UniqueFd> fds;
  ASSERT_EQ(device.Open(guard.Hello(0), &fds).error, 0);
  const pid_t supervisor = Pid("a");
  kill(EnginePid("a"), SIGKILL);
  ExpectTold(fds);
  EXPECT_TRUE(device.Closed());
  EXPECT_TRUE(Eventually([&] { return !Alive(supervisor); }));
  ExpectGone("a");
  EXPECT_THAT(ReadFile(File("a", "log")), HasSubstr("signal 9"));
  Start("a");
}

TEST_F(DaemonTest, WhenTheSupervisorIsKilledTheEngineTellsTheClientsAndEnds) {
  Start("a");
  const GuardPage guard;
  Client device(File("a", "sock"));
  std::vector<UniqueFd> fds;
  ASSERT_EQ(device.Open(guard.Hello(0), &fds).error, 0);
  const pid_t engine = EnginePid("a");
  kill(Pid("a"), SIGKILL);
  ExpectTold(fds);
  EXPECT_TRUE(Eventually([&] { return !Alive(engine); }));
  ExpectGone("a");
}

TEST_F(DaemonTest, LeftoversOfADaemonThatLostBothProcessesAreReplaced) {
  Start("a");
  const pid_t engine = EnginePid("a");
  kill(Pid("a"), SIGSTOP);  // or it would tidy up
  kill(engine, SIGKILL);
  kill(Pid("a"), SIGKILL);
  EXPECT_TRUE(Eventually([&] { return !Alive(engine) && !Alive(Pid("a")); }));
  EXPECT_TRUE(fs::exists(File("a", "sock")));
  std::ofstream(File("a", "tree") + "/stale") << "x";
  Start("a");
  EXPECT_FALSE(fs::exists(File("a", "tree") + "/stale"));
}

TEST_F(DaemonTest, ForegroundStaysAndGivesTheStatusOfItsEnd) {
  Process clean(Options({"--name", "f", "--foreground"}));
  ASSERT_TRUE(clean.WaitForOutput("ready", std::chrono::seconds(20))) << clean.Output();
  EXPECT_FALSE(fs::exists(File("f", "log")));
  clean.Signal(SIGINT);
  EXPECT_EQ(clean.Wait(), 0) << clean.Output();
  Process killed(Options({"--name", "f", "--foreground", "--log-level", "error"}));
  ASSERT_TRUE(Eventually([&] { return fs::exists(File("f", "sock")); }));
  kill(EnginePid("f"), SIGKILL);
  EXPECT_EQ(killed.Wait(), 1);
  EXPECT_THAT(killed.Output(), HasSubstr("signal 9"));
}

// As systemd does with Type=notify: a datagram socket, by path or by abstract name.
TEST_F(DaemonTest, AServiceManagerHearsWhenItIsReadyAndWhenItEnds) {
  const std::string path = folder_ + "/notify";
  for (const std::string& name : {path, "@verbena-test-" + std::to_string(getpid())}) {
    UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    name.copy(address.sun_path, sizeof(address.sun_path));
    if (name[0] == '@') address.sun_path[0] = '\0';
    ASSERT_EQ(bind(socket.get(), reinterpret_cast<sockaddr*>(&address),
                   static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size())),
              0);
    const auto next = [&] {
      char text[512];
      pollfd descriptor = {socket.get(), POLLIN, 0};
      if (poll(&descriptor, 1, 20000) != 1) return std::string("nothing came");
      const ssize_t length = recv(socket.get(), text, sizeof(text), 0);
      return std::string(text, length > 0 ? static_cast<size_t>(length) : 0);
    };
    ProcessOptions options = Options({"--name", "n", "--foreground"});
    options.environment["NOTIFY_SOCKET"] = name;
    Process daemon(options);
    EXPECT_THAT(next(), StartsWith("READY=1\n")) << daemon.Output();
    EXPECT_TRUE(fs::exists(File("n", "sock")));
    // Nobody but the process that was started may speak for the service.
    const std::string environment =
        ReadFile("/proc/" + std::to_string(EnginePid("n")) + "/environ");
    EXPECT_EQ(environment.find("NOTIFY_SOCKET"), std::string::npos);
    daemon.Signal(SIGTERM);
    EXPECT_EQ(next(), "STOPPING=1");
    EXPECT_EQ(daemon.Wait(), 0);
  }
}

TEST_F(DaemonTest, TheReadyPipeGetsOneLineAndIsClosed) {
  for (const bool good : {true, false}) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    const std::string nics = good ? "1" : "100";
    const std::string ready_fd = std::to_string(ends[1]);
    const pid_t child = fork();
    if (child == 0) {
      setenv("XDG_RUNTIME_DIR", folder_.c_str(), 1);
      execl(Program().c_str(), "verbenad", "--name", "r", "--nics", nics.c_str(), "--ready-fd",
            ready_fd.c_str(), nullptr);
      _exit(127);
    }
    close(ends[1]);
    std::string text;
    char buffer[256];
    for (ssize_t got = 1; got > 0;) {
      ASSERT_TRUE(Eventually([&] {
        pollfd descriptor = {ends[0], POLLIN, 0};
        return poll(&descriptor, 1, 10) == 1;
      }));
      got = read(ends[0], buffer, sizeof(buffer));
      if (got > 0) text.append(buffer, static_cast<size_t>(got));
    }
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    if (good) {
      EXPECT_EQ(text, "ready\n");
      EXPECT_EQ(WEXITSTATUS(status), 0);
      started_ = {Pid("r"), EnginePid("r")};
      kill(Pid("r"), SIGTERM);
    } else {
      EXPECT_THAT(text, HasSubstr("--nics"));
      EXPECT_EQ(text.find('\n'), text.size() - 1);
      EXPECT_EQ(WEXITSTATUS(status), 1);
    }
  }
}

TEST_F(DaemonTest, AnIdleDaemonEndsAfterItsLastClient) {
  Start("a", {"--exit-idle", "1"});
  const pid_t supervisor = Pid("a");
  {
    const GuardPage guard;
    Client device(File("a", "sock"));
    ASSERT_EQ(device.Open(guard.Hello(0)).error, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(1200));
    EXPECT_TRUE(Alive(supervisor));
  }
  EXPECT_TRUE(Eventually([&] { return !Alive(supervisor); }));
  ExpectGone("a");
}

TEST_F(DaemonTest, ItKeepsNothingOfWhoeverStartedIt) {
  Start("a");
  for (const pid_t pid : started_) {
    const std::string proc = "/proc/" + std::to_string(pid);
    EXPECT_EQ(fs::read_symlink(proc + "/cwd"), "/");
    EXPECT_EQ(fs::read_symlink(proc + "/fd/0"), "/dev/null");
    EXPECT_EQ(fs::read_symlink(proc + "/fd/1"), File("a", "log"));
    EXPECT_EQ(fs::read_symlink(proc + "/fd/2"), File("a", "log"));
    EXPECT_NE(getpgid(pid), getpgrp());
    EXPECT_NE(getsid(pid), getsid(0));
    EXPECT_EQ(ReadFile(proc + "/environ").find("libverbena"), std::string::npos);
  }
}

TEST_F(DaemonTest, StartsWithoutStandardDescriptors) {
  ProcessOptions options;
  options.argv = {"/bin/sh", "-c", "exec " + Program() + " --name c --nics 1 <&- >&- 2>&-"};
  options.environment["XDG_RUNTIME_DIR"] = folder_;
  EXPECT_EQ(RunProcess(options).status, 0);
  started_ = {Pid("c"), EnginePid("c")};
  EXPECT_TRUE(fs::exists(File("c", "sock")));
}

TEST_F(DaemonTest, AddressesComeFromTheConfigurationFile) {
  const std::string config = folder_ + "/v.toml";
  std::ofstream(config) << "nics = 2\n[verbena1]\naddresses = [\"10.9.8.7\", \"fd00::7\"]\n";
  Start("a", {"--config", config});
  Client control(File("a", "sock"));
  control.OpenControl();
  const nlohmann::json status = control.Ask(R"({"op":"status"})");
  EXPECT_EQ(status["nics"][0]["ipv4"], "127.88.0.1");
  EXPECT_EQ(status["nics"][1]["gids"][1], "::ffff:10.9.8.7");
  EXPECT_EQ(status["nics"][1]["gids"][2], "fd00::7");
  EXPECT_EQ(ReadFile(File("a", "tree") + "/sys/class/infiniband/verbena1/ports/1/gids/1"),
            "0000:0000:0000:0000:0000:ffff:0a09:0807\n");

  std::ofstream(config) << "nics = 2\nspeed = 1\n";
  const Finished bad = RunProcess(Options({"--name", "b", "--config", config}));
  EXPECT_EQ(bad.status, 1);
  EXPECT_THAT(bad.output, HasSubstr("v.toml:2: "));
}

// CPU time, so that a busy machine does not matter.
TEST_F(DaemonTest, IdleItTakesLessThanAPercentOfACore) {
  Start("a", {"--nics", "2", "--mode", "thread-per-cpu"});
  const auto ticks = [&] {
    long sum = 0;
    for (const pid_t pid : started_) {
      const std::string stat = ReadFile("/proc/" + std::to_string(pid) + "/stat");
      const size_t name_end = stat.rfind(')');
      if (name_end == std::string::npos) continue;  // it has ended
      std::istringstream fields(stat.substr(name_end + 2));
      std::string skipped;
      for (int i = 0; i < 11; ++i) fields >> skipped;
      long user = 0;
      long system = 0;
      fields >> user >> system;
      sum += user + system;
    }
    return sum;
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const long before = ticks();
  std::this_thread::sleep_for(std::chrono::seconds(3));
  EXPECT_LE(ticks() - before, 3 * sysconf(_SC_CLK_TCK) / 100);
}

}  // namespace
}  // namespace verbena::nic
