// SPDX-License-Identifier: Apache-2.0
//
// The built `verbena` as people call it, in a staged tree of its own with a fake daemon.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "tests/unit/tools/fake_control_server.h"
#include "tests/unit/tools/run_program.h"

namespace verbena::tools {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// Paths in the test's runfiles.
constexpr char kVerbena[] = "tools/verbena";
constexpr char kFakeDaemon[] = "tests/unit/tools/fake_verbenad";

class VerbenaCommandTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(scratch_ / "bin");
    fs::create_directories(scratch_ / "lib");
    fs::create_directories(scratch_ / "run");
    // Copies: links would be resolved and lead back into the build tree.
    fs::copy_file(kVerbena, scratch_ / "bin/verbena");
    fs::copy_file(kFakeDaemon, scratch_ / "bin/verbenad");
    // What ld.so preloads must be a library: an empty one would only warn. None of ours is
    // needed here.
    std::ofstream(scratch_ / "lib/libverbena-rdmav34.so");
    std::ofstream(scratch_ / "lib/libverbena-preload.so");
    environment_ = {{"PATH", "/usr/bin:/bin"},
                    {"XDG_RUNTIME_DIR", scratch_ / "run"},
                    {"FAKE_VERBENAD_LOG", log_}};
    if (const char* options = std::getenv("ASAN_OPTIONS")) environment_["ASAN_OPTIONS"] = options;
  }

  void TearDown() override {
    // Every daemon of this test, by its own command.
    for (const std::string& name : started_) Verbena({"down", "--name", name});
  }

  std::unique_ptr<RunningProgram> Start(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), scratch_ / "bin/verbena");
    return std::make_unique<RunningProgram>(arguments, environment_);
  }
  ProgramResult Verbena(const std::vector<std::string>& arguments) {
    return Start(arguments)->Wait();
  }
  void Up(const std::string& name = "default") {
    started_.insert(name);
    const ProgramResult up = Verbena({"up", "--name", name});
    ASSERT_EQ(up.status, 0) << up.err;
  }
  std::vector<std::string> Starts() const {
    std::vector<std::string> lines;
    std::ifstream log(log_);
    for (std::string line; std::getline(log, line);) lines.push_back(line);
    return lines;
  }

  ScratchFolder scratch_;
  std::string log_ = scratch_ / "starts.log";
  std::string socket_ = scratch_ / "run/verbena/default.sock";
  std::map<std::string, std::string> environment_;
  std::set<std::string> started_;
};

TEST_F(VerbenaCommandTest, HelpTeachesInEveryCommand) {
  for (const char* command : {"up", "down", "run", "status", "env", "list", "counters", "capture",
                              "decode", "fault", "doctor", "version"}) {
    const ProgramResult help = Verbena({command, "--help"});
    EXPECT_EQ(help.status, 0) << command;
    EXPECT_NE(help.out.find("Usage:"), std::string::npos) << command;
  }
  const ProgramResult all = Verbena({});
  EXPECT_EQ(all.status, 0);
  EXPECT_NE(all.out.find("verbena run -- ibv_devinfo"), std::string::npos);
}

TEST_F(VerbenaCommandTest, WrongUsageIsStatusTwo) {
  EXPECT_EQ(Verbena({"frobnicate"}).status, 2);
  EXPECT_EQ(Verbena({"list", "socks"}).status, 2);
  EXPECT_EQ(Verbena({"up", "--nics", "0"}).status, 2);
  EXPECT_EQ(Verbena({"up", "--nics", "65"}).status, 2);  // a daemon has at most 64
  EXPECT_EQ(Verbena({"capture"}).status, 2);
}

TEST_F(VerbenaCommandTest, AFolderIsNoFileOfRules) {
  const ProgramResult add = Verbena({"fault", "add", "--file", "/"});
  EXPECT_EQ(add.status, 1);
  EXPECT_NE(add.err.find("cannot read /: Is a directory"), std::string::npos) << add.err;
}

TEST_F(VerbenaCommandTest, UpStartsAndSaysWhatNext) {
  started_.insert("default");
  const ProgramResult up = Verbena({"up", "--nics", "3", "--strict"});
  EXPECT_EQ(up.status, 0) << up.err;
  EXPECT_NE(up.out.find(socket_), std::string::npos) << up.out;
  EXPECT_NE(up.out.find("127.88.0.1"), std::string::npos);
  EXPECT_NE(up.out.find("verbena run -- ibv_devinfo"), std::string::npos);
  ASSERT_EQ(Starts().size(), 1U);
  EXPECT_EQ(Starts()[0], "start --name default --nics 3 --strict --ready-fd 3 ");
}

TEST_F(VerbenaCommandTest, UpRefusesASecondOne) {
  Up();
  const ProgramResult second = Verbena({"up"});
  EXPECT_EQ(second.status, 1);
  EXPECT_NE(second.err.find("already running"), std::string::npos) << second.err;
  EXPECT_EQ(Starts().size(), 1U);
}

TEST_F(VerbenaCommandTest, UpTellsWhyTheDaemonDidNotStart) {
  environment_["FAKE_VERBENAD_FAIL"] = "no memory for the engine";
  const ProgramResult said = Verbena({"up"});
  EXPECT_EQ(said.status, 1);
  EXPECT_NE(said.err.find("no memory for the engine"), std::string::npos) << said.err;
  environment_["FAKE_VERBENAD_FAIL"] = "";
  const ProgramResult silent = Verbena({"up"});
  EXPECT_EQ(silent.status, 1);
  EXPECT_NE(silent.err.find("on stderr"), std::string::npos) << silent.err;
}

TEST_F(VerbenaCommandTest, DownReturnsWhenTheSupervisorHasEndedToo) {
  environment_["FAKE_VERBENAD_LINGER"] = "400";
  Up();
  const ProgramResult down = Verbena({"down"});
  EXPECT_EQ(down.status, 0) << down.err;
  EXPECT_EQ(Starts().back(), "end");
}

TEST_F(VerbenaCommandTest, DownEndsItAndIsContentWhenNoneRuns) {
  Up();
  const ProgramResult down = Verbena({"down"});
  EXPECT_EQ(down.status, 0) << down.err;
  EXPECT_FALSE(fs::exists(socket_));
  const ProgramResult again = Verbena({"down"});
  EXPECT_EQ(again.status, 0);
  EXPECT_NE(again.err.find("no daemon named default"), std::string::npos);
}

TEST_F(VerbenaCommandTest, WithoutADaemonTheMessageSaysWhereItLooked) {
  const ProgramResult status = Verbena({"status", "--name", "lab"});
  EXPECT_EQ(status.status, 1);
  EXPECT_NE(status.err.find("no daemon named lab is running"), std::string::npos) << status.err;
  EXPECT_NE(status.err.find(scratch_ / "run/verbena/lab.sock"), std::string::npos);
  EXPECT_NE(status.err.find("verbena up"), std::string::npos);
}

TEST_F(VerbenaCommandTest, BadInstanceNamesAreRefused) {
  for (const char* name : {"../x", ".x", "a b"}) {
    EXPECT_EQ(Verbena({"status", "--name", name}).status, 1) << name;
    EXPECT_EQ(Verbena({"up", "--name", name}).status, 1) << name;
  }
  EXPECT_TRUE(Starts().empty());
}

TEST_F(VerbenaCommandTest, RunSetsTheEnvironmentAndNothingElse) {
  Up();
  environment_["LD_PRELOAD"] = "";
  environment_["MARK"] = "kept";
  const ProgramResult run = Verbena({"run", "--", "/usr/bin/env"});
  EXPECT_EQ(run.status, 0) << run.err;
  std::set<std::string> expected;
  for (const auto& [name, value] : environment_) {
    if (name != "LD_PRELOAD") expected.insert(name + "=" + value);
  }
  expected.insert("IBV_DRIVERS=" + scratch_ / "lib/libverbena");
  expected.insert("LD_PRELOAD=" + scratch_ / "lib/libverbena-preload.so");
  expected.insert("VERBENA_SOCKET=" + socket_);
  std::set<std::string> seen;
  std::istringstream lines(run.out);
  for (std::string line; std::getline(lines, line);) seen.insert(line);
  EXPECT_EQ(seen, expected);
}

TEST_F(VerbenaCommandTest, RunPassesArgumentsUnchanged) {
  Up();
  const ProgramResult with = Verbena({"run", "--name", "default", "--", "printf", "<%s>", "--name",
                                      "x y", "--", "-h", "--help", ""});
  EXPECT_EQ(with.out, "<--name><x y><--><-h><--help><>") << with.err;
  const ProgramResult without = Verbena({"run", "printf", "<%s>", "--nics", "--json"});
  EXPECT_EQ(without.out, "<--nics><--json>") << without.err;
}

TEST_F(VerbenaCommandTest, RunHasTheExitStatusOfTheCommand) {
  Up();
  EXPECT_EQ(Verbena({"run", "--", "sh", "-c", "exit 42"}).status, 42);
  EXPECT_EQ(Verbena({"run", "--", "true"}).status, 0);
  EXPECT_EQ(Verbena({"run", "--", "no-such-command-here"}).status, 127);
  EXPECT_EQ(Verbena({"run", "--", "/nowhere/x"}).status, 127);
  EXPECT_EQ(Verbena({"run", "--", scratch_.path()}).status, 126);
  EXPECT_EQ(Verbena({"run"}).status, 125);
  EXPECT_EQ(Verbena({"run", "--nics", "x", "true"}).status, 125);
}

TEST_F(VerbenaCommandTest, RunIsEndedByTheCommandsSignalsAndPassesItsOwn) {
  Up();
  EXPECT_EQ(Verbena({"run", "--", "sh", "-c", "kill -SEGV $$"}).signal, SIGSEGV);
  const auto running =
      Start({"run", "--", "sh", "-c",
             "trap 'exit 7' TERM; touch \"$0\"; while :; do sleep 0.02; done", scratch_ / "up"});
  for (int i = 0; i < 500 && !fs::exists(scratch_ / "up"); ++i) usleep(10'000);
  ASSERT_EQ(kill(running->pid(), SIGTERM), 0);
  EXPECT_EQ(running->Wait().status, 7);
}

TEST_F(VerbenaCommandTest, RunStartsADaemonThatEndsWhenIdle) {
  started_.insert("default");
  const ProgramResult run = Verbena({"run", "--nics", "2", "--", "true"});
  EXPECT_EQ(run.status, 0) << run.err;
  EXPECT_FALSE(run.late) << "the daemon keeps the caller's pipes open";
  ASSERT_EQ(Starts().size(), 1U);
  EXPECT_EQ(Starts()[0], "start --name default --nics 2 --exit-idle 10 --ready-fd 3 ");
}

TEST_F(VerbenaCommandTest, RunThatCannotStartADaemonIs125) {
  environment_["FAKE_VERBENAD_FAIL"] = "no memory for the engine";
  const ProgramResult run = Verbena({"run", "--", "true"});
  EXPECT_EQ(run.status, 125);
  EXPECT_NE(run.err.find("no memory for the engine"), std::string::npos) << run.err;
}

TEST_F(VerbenaCommandTest, TwentyRunsAtOnceStartOneDaemon) {
  started_.insert("default");
  std::vector<std::unique_ptr<RunningProgram>> running;
  for (int i = 0; i < 20; ++i) {
    running.push_back(Start({"run", "--", "sh", "-c", "printf %s \"$VERBENA_SOCKET\""}));
  }
  for (const auto& program : running) {
    const ProgramResult result = program->Wait();
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.out, socket_);
  }
  EXPECT_EQ(Starts().size(), 1U);
}

// A daemon that is ending accepts connections until the kernel has taken its socket away.
TEST_F(VerbenaCommandTest, RunReplacesADaemonThatIsJustEnding) {
  fs::create_directories(scratch_ / "run/verbena");
  chmod((scratch_ / "run/verbena").c_str(), 0700);
  started_.insert("default");
  FakeControlServer ending(socket_);
  std::thread serving([&ending] {
    ending.Serve([](const std::string&, int) { return FakeAnswer{{}, false, true}; }, 10);
  });
  const ProgramResult run = Verbena({"run", "--", "true"});
  serving.join();
  EXPECT_EQ(run.status, 0) << run.err;
  EXPECT_EQ(Starts().size(), 1U);
}

TEST_F(VerbenaCommandTest, RunRefusesARunFolderThatOthersCanEnter) {
  ASSERT_EQ(mkdir((scratch_ / "run/verbena").c_str(), 0700), 0);
  ASSERT_EQ(chmod((scratch_ / "run/verbena").c_str(), 0777), 0);
  const ProgramResult run = Verbena({"run", "--", "true"});
  EXPECT_EQ(run.status, 125);
  EXPECT_NE(run.err.find("chmod 700"), std::string::npos) << run.err;
  EXPECT_TRUE(Starts().empty());
}

TEST_F(VerbenaCommandTest, EnvCanBeEvaluatedByAShell) {
  Up("lab");
  environment_["LD_PRELOAD"] = "";
  environment_["PATH"] = scratch_ / "bin" + ":/usr/bin:/bin";
  RunningProgram shell({"/bin/sh", "-c",
                        "eval \"$(verbena env --name lab)\"; echo \"$IBV_DRIVERS|$LD_PRELOAD|"
                        "$VERBENA_SOCKET\""},
                       environment_);
  const ProgramResult result = shell.Wait();
  EXPECT_EQ(result.out, scratch_ / "lib/libverbena" + "|" + scratch_ / "lib/libverbena-preload.so" +
                            "|" + scratch_ / "run/verbena/lab.sock" + "\n")
      << result.err;
}

TEST_F(VerbenaCommandTest, VerbenaItselfRunsWithoutOurPreloadAndKeepsForeignEntries) {
  Up();
  const std::string foreign = scratch_ / "lib/foreign.so";  // absent: ld.so only complains
  environment_["LD_PRELOAD"] = foreign + ":/old/libverbena-preload.so";
  environment_["IBV_DRIVERS"] = "rxe:/old/libverbena";
  const ProgramResult run = Verbena({"run", "--", "/usr/bin/env"});
  EXPECT_NE(run.out.find("LD_PRELOAD=" + foreign + ":" + scratch_ / "lib/libverbena-preload.so\n"),
            std::string::npos)
      << run.out;
  EXPECT_NE(run.out.find("IBV_DRIVERS=rxe:" + scratch_ / "lib/libverbena\n"), std::string::npos);
  EXPECT_EQ(run.out.find("/old/"), std::string::npos);
}

TEST_F(VerbenaCommandTest, StatusListAndFaultsAsJson) {
  Up();
  const json status = json::parse(Verbena({"status", "--json"}).out, nullptr, false);
  ASSERT_TRUE(status.is_object());
  EXPECT_EQ(status["nics"][0]["device"], "verbena0");
  const json qps = json::parse(Verbena({"list", "qp", "--json"}).out, nullptr, false);
  ASSERT_TRUE(qps.is_array());
  EXPECT_EQ(qps[0]["qpn"], 17);
  const json rules = json::parse(Verbena({"fault", "list", "--json"}).out, nullptr, false);
  ASSERT_TRUE(rules.is_array());
  EXPECT_EQ(rules[0]["rule"], "drop nth=3");
  EXPECT_EQ(rules[0]["hits"], 1);
}

TEST_F(VerbenaCommandTest, AProcessNameCannotSteerTheTerminal) {
  Up();
  const ProgramResult list = Verbena({"list", "qp"});
  EXPECT_EQ(list.status, 0);
  EXPECT_NE(list.out.find("x\\x1b[2J"), std::string::npos) << list.out;
  EXPECT_EQ(list.out.find('\033'), std::string::npos);
}

TEST_F(VerbenaCommandTest, TheDaemonsRefusalIsPrintedAndIsStatusOne) {
  Up();
  const ProgramResult add = Verbena({"fault", "add", "drop", "nht=3"});
  EXPECT_EQ(add.status, 1);
  EXPECT_EQ(add.out, "");
  EXPECT_NE(add.err.find("unknown key 'nht' in: drop nht=3"), std::string::npos) << add.err;
  EXPECT_EQ(Verbena({"fault", "clear"}).status, 0);
  EXPECT_EQ(Verbena({"fault", "clear", "9"}).status, 1) << "no such rule";
}

TEST_F(VerbenaCommandTest, CaptureEndsAtSigintSigtermAndTheTimeLimitWithStatusZero) {
  Up();
  const std::string file = scratch_ / "c.pcapng";
  for (const int signal : {SIGINT, SIGTERM}) {
    fs::remove(file);
    const auto capture = Start({"capture", file});
    for (int i = 0; i < 500 && ReadWholeFile(file) != "pcapng"; ++i) usleep(10'000);
    usleep(50'000);
    kill(capture->pid(), signal);
    const ProgramResult result = capture->Wait();
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_NE(result.err.find("7 packets captured"), std::string::npos) << result.err;
    EXPECT_NE(result.err.find("1 packets missed"), std::string::npos) << result.err;
  }
  EXPECT_EQ(Verbena({"capture", file, "--for", "0.2"}).status, 0);
}

TEST_F(VerbenaCommandTest, CaptureEndsAtTheCountAndWritesIntoAPipe) {
  Up();
  const ProgramResult result = Verbena({"capture", "-", "--count", "3"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, "pcapng");
  EXPECT_NE(result.err.find("3 packets captured"), std::string::npos);
  EXPECT_EQ(Verbena({"capture", "/nowhere/c.pcapng"}).status, 1);
}

TEST_F(VerbenaCommandTest, VersionAndDoctorWorkWithAndWithoutADaemon) {
  EXPECT_EQ(Verbena({"version"}).status, 0);
  EXPECT_EQ(Verbena({"--version"}).out.rfind("verbena ", 0), 0U);
  Up();
  const json version = json::parse(Verbena({"version", "--json"}).out, nullptr, false);
  EXPECT_EQ(version["daemon"]["version"], "fake");
  const ProgramResult doctor = Verbena({"doctor", "--json"});
  const json checks = json::parse(doctor.out, nullptr, false);
  ASSERT_TRUE(checks.is_object()) << doctor.out;
  EXPECT_EQ(doctor.status, checks["problems"] == 0 ? 0 : 1);
  EXPECT_GT(checks["checks"].size(), 10U);
}

TEST_F(VerbenaCommandTest, DoctorNamesAMissingPart) {
  fs::remove(scratch_ / "lib/libverbena-preload.so");
  const ProgramResult doctor = Verbena({"doctor"});
  EXPECT_EQ(doctor.status, 1);
  EXPECT_NE(doctor.out.find("libverbena-preload.so is missing"), std::string::npos) << doctor.out;
  EXPECT_EQ(Verbena({"run", "--", "true"}).status, 125);
  EXPECT_TRUE(Starts().empty()) << "no daemon is started for nothing";
}

TEST_F(VerbenaCommandTest, OutputThatCannotBeWrittenIsAFailure) {
  Up();
  RunningProgram full({"/bin/sh", "-c", "exec \"$0\" status > /dev/full", scratch_ / "bin/verbena"},
                      environment_);
  EXPECT_EQ(full.Wait().status, 1);
}

}  // namespace
}  // namespace verbena::tools
