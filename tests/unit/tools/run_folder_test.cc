// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/runtime/run_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/unit/tools/run_program.h"

namespace verbena::nic {
namespace {

using tools::ScratchFolder;

class RunFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("XDG_RUNTIME_DIR", scratch_.path().c_str(), 1);
    unsetenv("VERBENA_SOCKET");
    unsetenv("VERBENA_NAME");
    umask(022);
  }
  ScratchFolder scratch_;
};

TEST_F(RunFolderTest, LiesInXdgRuntimeDirOfThisUser) {
  EXPECT_EQ(RunFolder(false), scratch_ / "verbena");
  EXPECT_EQ(RunFolder(true), "/run/verbena");
}

TEST_F(RunFolderTest, FallsBackToTmpWhenXdgRuntimeDirIsNoUsableFolder) {
  const std::string fallback = "/tmp/verbena-" + std::to_string(geteuid());
  std::ofstream(scratch_ / "file") << "x";
  for (const std::string& bad : {std::string(), scratch_ / "absent", scratch_ / "file",
                                 std::string("relative/path"), std::string(".")}) {
    setenv("XDG_RUNTIME_DIR", bad.c_str(), 1);
    EXPECT_EQ(RunFolder(false), fallback) << bad;
  }
  unsetenv("XDG_RUNTIME_DIR");
  EXPECT_EQ(RunFolder(false), fallback);
}

TEST_F(RunFolderTest, IgnoresXdgRuntimeDirOfSomebodyElse) {
  // As root under sudo with the variable kept. A folder of another user, whoever runs this.
  std::string foreign;
  for (const char* path : {"/", "/var/cache/apt/archives/partial", "/var/cache/man"}) {
    struct stat info = {};
    if (stat(path, &info) == 0 && info.st_uid != geteuid()) foreign = path;
  }
  if (foreign.empty()) {
    ASSERT_EQ(chown(scratch_.path().c_str(), 12345, static_cast<gid_t>(-1)), 0)
        << "no folder of another user here, and none can be made";
    foreign = scratch_.path();
  }
  setenv("XDG_RUNTIME_DIR", foreign.c_str(), 1);
  EXPECT_EQ(RunFolder(false), "/tmp/verbena-" + std::to_string(geteuid()));
}

TEST_F(RunFolderTest, IsMadePrivate) {
  umask(0);
  const PathResult made = CreateRunFolder(false);
  ASSERT_TRUE(made.ok()) << made.error;
  struct stat info = {};
  ASSERT_EQ(lstat(made.value.c_str(), &info), 0);
  EXPECT_TRUE(S_ISDIR(info.st_mode));
  EXPECT_EQ(info.st_mode & 07777, 0700U);
  EXPECT_TRUE(CreateRunFolder(false).ok()) << "a second time it is there already";
}

TEST_F(RunFolderTest, RefusesALink) {
  ASSERT_EQ(mkdir((scratch_ / "elsewhere").c_str(), 0700), 0);
  ASSERT_EQ(symlink((scratch_ / "elsewhere").c_str(), (scratch_ / "verbena").c_str()), 0);
  const PathResult made = CreateRunFolder(false);
  EXPECT_FALSE(made.ok());
  EXPECT_NE(made.error.find("symbolic link"), std::string::npos) << made.error;
}

TEST_F(RunFolderTest, RefusesAFile) {
  std::ofstream(scratch_ / "verbena") << "x";
  EXPECT_FALSE(CreateRunFolder(false).ok());
}

TEST_F(RunFolderTest, RefusesAFolderThatOthersCanEnterAndSaysHowToRepairIt) {
  for (const mode_t mode : {0755U, 0710U, 0702U, 0777U}) {
    rmdir((scratch_ / "verbena").c_str());
    ASSERT_EQ(mkdir((scratch_ / "verbena").c_str(), 0700), 0);
    ASSERT_EQ(chmod((scratch_ / "verbena").c_str(), mode), 0);
    const PathResult made = CreateRunFolder(false);
    EXPECT_FALSE(made.ok()) << std::oct << mode;
    EXPECT_NE(made.error.find("chmod 700"), std::string::npos) << made.error;
  }
}

TEST_F(RunFolderTest, SystemFolderMayBeReadButNotWrittenByOthers) {
  const std::string folder = scratch_ / "run";
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
  EXPECT_EQ(CheckRunFolder(folder, true, geteuid()), "");
  ASSERT_EQ(chmod(folder.c_str(), 0775), 0);
  EXPECT_NE(CheckRunFolder(folder, true, geteuid()), "");
}

TEST_F(RunFolderTest, RefusesAFolderOfAnotherOwner) {
  const std::string folder = scratch_ / "theirs";
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  EXPECT_EQ(CheckRunFolder(folder, false, geteuid()), "");
  const std::string problem = CheckRunFolder(folder, false, geteuid() + 1);
  EXPECT_NE(problem.find("belongs to user"), std::string::npos) << problem;
}

TEST_F(RunFolderTest, TellsMissingFromWrong) {
  bool missing = false;
  EXPECT_NE(CheckRunFolder(scratch_ / "absent", false, geteuid(), &missing), "");
  EXPECT_TRUE(missing);
  std::ofstream(scratch_ / "file") << "x";
  EXPECT_NE(CheckRunFolder(scratch_ / "file", false, geteuid(), &missing), "");
  EXPECT_FALSE(missing);
}

TEST(InstanceNameTest, AcceptsTheAllowedCharactersOnly) {
  EXPECT_EQ(CheckInstanceName("default"), "");
  EXPECT_EQ(CheckInstanceName("A-z_0.9"), "");
  EXPECT_EQ(CheckInstanceName(std::string(32, 'x')), "");
  for (const std::string& bad :
       {std::string(), std::string(33, 'x'), std::string("."), std::string(".."),
        std::string(".hidden"), std::string("a/b"), std::string("a b"), std::string("a\n"),
        std::string("caf\xc3\xa9"), std::string("a\0b", 3)}) {
    EXPECT_NE(CheckInstanceName(bad), "") << bad;
  }
}

TEST_F(RunFolderTest, NameComesFromOptionThenEnvironmentThenDefault) {
  EXPECT_EQ(InstanceName("").value, "default");
  setenv("VERBENA_NAME", "lab", 1);
  EXPECT_EQ(InstanceName("").value, "lab");
  EXPECT_EQ(InstanceName("x").value, "x");
  setenv("VERBENA_NAME", "../evil", 1);
  EXPECT_FALSE(InstanceName("").ok());
}

TEST_F(RunFolderTest, SocketPathMustFitIntoASocketAddress) {
  EXPECT_EQ(SocketPath("/r", "n").value, "/r/n.sock");
  EXPECT_FALSE(SocketPath("/r", "../n").ok());
  const std::string folder(107 - std::string("/n.sock").size(), 'x');
  EXPECT_TRUE(SocketPath(folder, "n").ok());
  EXPECT_FALSE(SocketPath(folder + "x", "n").ok());
  sockaddr_un address;
  EXPECT_TRUE(FillAddress(SocketPath(folder, "n").value, &address));
  EXPECT_FALSE(FillAddress(std::string(108, 'x'), &address));
  EXPECT_FALSE(FillAddress("", &address));
}

TEST_F(RunFolderTest, ClientsLookAtTheEnvironmentThenTheirOwnFolderThenTheSystem) {
  const std::string own = scratch_ / "verbena/n.sock";
  EXPECT_EQ(SocketCandidates("n", true), (std::vector<std::string>{own, "/run/verbena/n.sock"}));
  setenv("VERBENA_SOCKET", "/x/y.sock", 1);
  EXPECT_EQ(SocketCandidates("n", true),
            (std::vector<std::string>{"/x/y.sock", own, "/run/verbena/n.sock"}));
  EXPECT_EQ(SocketCandidates("n", false), (std::vector<std::string>{own, "/run/verbena/n.sock"}));
  setenv("VERBENA_SOCKET", own.c_str(), 1);
  EXPECT_EQ(SocketCandidates("n", true).size(), 2U) << "no path twice";
}

}  // namespace
}  // namespace verbena::nic
