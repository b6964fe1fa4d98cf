// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/environment.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "nic_sim/runtime/self_clean.h"
#include "tests/unit/tools/run_program.h"
#include "tools/verbena_cli/parts.h"

namespace verbena::tools {
namespace {

Parts PartsIn(const std::string& folder) {
  Parts parts;
  parts.preload = folder + "/libverbena-preload.so";
  parts.provider = folder + "/libverbena-rdmav34.so";
  parts.driver_name = folder + "/libverbena";
  return parts;
}

class EnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"LD_PRELOAD", "IBV_DRIVERS", "RDMAV_DRIVERS"}) unsetenv(name);
  }
  // LD_PRELOAD of the test process itself must not leak into programs that it starts.
  void TearDown() override { SetUp(); }
};

TEST_F(EnvironmentTest, NamesProviderPreloadAndSocket) {
  std::string error;
  EXPECT_EQ(ApplicationEnvironment(PartsIn("/l"), "/s", &error),
            (Variables{{"IBV_DRIVERS", "/l/libverbena"},
                       {"LD_PRELOAD", "/l/libverbena-preload.so"},
                       {"VERBENA_SOCKET", "/s"}}));
  EXPECT_EQ(error, "");
}

TEST_F(EnvironmentTest, AppendsToForeignEntriesAndReplacesOlderOnesOfOurs) {
  setenv("LD_PRELOAD", "/usr/lib/libfoo.so /old/libverbena-preload.so:/usr/lib/libbar.so", 1);
  setenv("IBV_DRIVERS", "mlx5:/old/libverbena;rxe", 1);
  setenv("RDMAV_DRIVERS", "rxe", 1);
  std::string error;
  const Variables variables = ApplicationEnvironment(PartsIn("/l"), "/s", &error);
  EXPECT_EQ(
      variables,
      (Variables{{"IBV_DRIVERS", "mlx5:rxe:/l/libverbena"},
                 {"RDMAV_DRIVERS", "rxe:/l/libverbena"},
                 {"LD_PRELOAD", "/usr/lib/libfoo.so:/usr/lib/libbar.so:/l/libverbena-preload.so"},
                 {"VERBENA_SOCKET", "/s"}}));
}

TEST_F(EnvironmentTest, RefusesPathsThatLdPreloadCannotExpress) {
  for (const char* folder : {"/a b", "/a:b", "/a;b"}) {
    std::string error;
    EXPECT_TRUE(ApplicationEnvironment(PartsIn(folder), "/s", &error).empty());
    EXPECT_NE(error, "") << folder;
  }
}

TEST(ShellQuoteTest, AShellReadsBackWhatWasQuoted) {
  for (const std::string text : {"", "plain", "two words", "it's", "'", "''",
                                 "$HOME `id` $(id) \\ \" ! * ~", "a\nb", "-n"}) {
    RunningProgram shell({"/bin/sh", "-c", "x=" + ShellQuote(text) + "; printf '%s' \"$x\""}, {});
    const ProgramResult result = shell.Wait();
    EXPECT_EQ(result.status, 0);
    EXPECT_EQ(result.out, text);
  }
}

TEST(SelfCleanTest, DropsOurEntriesOnly) {
  EXPECT_EQ(nic::WithoutOurPreload(""), "");
  EXPECT_EQ(nic::WithoutOurPreload("/x/libverbena-preload.so"), "");
  EXPECT_EQ(nic::WithoutOurPreload("libverbena-preload.so  a.so::b.so"), "a.so:b.so");
  EXPECT_EQ(nic::WithoutOurPreload("/x/libverbena-preload.so.old"), "/x/libverbena-preload.so.old");
  EXPECT_EQ(nic::WithoutOurDrivers("rxe;/x/libverbena:mlx5"), "rxe:mlx5");
  EXPECT_EQ(nic::WithoutOurDrivers("/x/libverbena-rdmav34.so:verbena"), "");
  EXPECT_EQ(nic::WithoutOurDrivers("/libverbena/libother"), "/libverbena/libother");
}

void Touch(const std::string& path) {
  std::ofstream(path) << "x";
  chmod(path.c_str(), 0755);
}

TEST(PartsTest, FindsPartsInABuildTreeThroughALink) {
  const ScratchFolder tree;
  for (const char* folder : {"tools", "nic_sim", "provider", "elsewhere"}) {
    mkdir((tree / folder).c_str(), 0755);
  }
  Touch(tree / "tools/verbena");
  Touch(tree / "nic_sim/verbenad");
  Touch(tree / "provider/libverbena-rdmav34.so");
  Touch(tree / "provider/libverbena-preload.so");
  ASSERT_EQ(symlink("../tools/verbena", (tree / "elsewhere/v").c_str()), 0);
  const Parts parts = FindParts(tree / "elsewhere/v");
  EXPECT_EQ(parts.daemon, tree / "nic_sim/verbenad");
  EXPECT_EQ(parts.driver_name, tree / "provider/libverbena");
  EXPECT_EQ(parts.preload, tree / "provider/libverbena-preload.so");
  EXPECT_EQ(parts.missing_daemon + parts.missing_libraries, "");
}

TEST(PartsTest, FindsPartsInAStagedTree) {
  const ScratchFolder tree;
  for (const char* folder : {"bin", "lib"}) mkdir((tree / folder).c_str(), 0755);
  Touch(tree / "bin/verbena");
  Touch(tree / "bin/verbenad");
  Touch(tree / "lib/libverbena-rdmav34.so");
  Touch(tree / "lib/libverbena-preload.so");
  const Parts parts = FindParts(tree / "bin/verbena");
  EXPECT_EQ(parts.daemon, tree / "bin/verbenad");
  EXPECT_EQ(parts.provider, tree / "lib/libverbena-rdmav34.so");
}

TEST(PartsTest, NamesWhatIsMissing) {
  const ScratchFolder tree;
  mkdir((tree / "bin").c_str(), 0755);
  mkdir((tree / "lib").c_str(), 0755);
  Touch(tree / "bin/verbena");
  Touch(tree / "lib/libverbena-rdmav34.so");
  const Parts parts = FindParts(tree / "bin/verbena");
  EXPECT_NE(parts.missing_daemon.find("verbenad is missing"), std::string::npos);
  EXPECT_NE(parts.missing_libraries.find("libverbena-preload.so is missing"), std::string::npos);
}

}  // namespace
}  // namespace verbena::tools
