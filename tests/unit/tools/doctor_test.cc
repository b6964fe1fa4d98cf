// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/doctor.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "tests/unit/tools/run_program.h"

namespace verbena::tools {
namespace {

using Level = Finding::Level;

TEST(DoctorTest, YamaOneIsANoteForUsersAndNothingForRoot) {
  EXPECT_EQ(JudgePtraceScope("", false).level, Level::kOk);
  EXPECT_EQ(JudgePtraceScope("0\n", false).level, Level::kOk);
  EXPECT_EQ(JudgePtraceScope("1\n", false).level, Level::kNote);
  EXPECT_EQ(JudgePtraceScope("1\n", true).level, Level::kOk);
  EXPECT_EQ(JudgePtraceScope("3\n", true).level, Level::kNote);
}

TEST(DoctorTest, SeccompIsReadFromStatus) {
  EXPECT_EQ(JudgeSeccomp("Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t0\n").level, Level::kOk);
  EXPECT_EQ(JudgeSeccomp("Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n").level, Level::kNote);
}

TEST(DoctorTest, ContainersAreRecognised) {
  EXPECT_EQ(JudgeNamespaces("         0          0 4294967295\n", true).level, Level::kOk);
  EXPECT_EQ(JudgeNamespaces("         0          0          1\n", true).level, Level::kNote);
  EXPECT_EQ(JudgeNamespaces("         0          0 4294967295\n", false).level, Level::kNote);
}

TEST(DoctorTest, FewCpusAreANote) {
  EXPECT_EQ(JudgeCpus(2).level, Level::kNote);
  EXPECT_EQ(JudgeCpus(8).level, Level::kOk);
}

TEST(DoctorTest, HugepagesAndMemlockAreNeverAProblem) {
  EXPECT_EQ(JudgeHugepages("MemTotal: 1 kB\nHugePages_Total:       4\n").finding, "4 pages");
  EXPECT_EQ(JudgeHugepages("MemTotal: 1 kB\nHugePages_Total:       0\n").level, Level::kOk);
  EXPECT_EQ(JudgeMemlock(0).level, Level::kOk);
  EXPECT_EQ(JudgeMemlock(~0UL).finding, "unlimited");
}

TEST(DoctorTest, LibibverbsMustHaveOurPrivateInterface) {
  EXPECT_EQ(JudgeLibibverbs("", false).level, Level::kProblem);
  EXPECT_EQ(JudgeLibibverbs("/usr/lib/libibverbs.so.1.14.44.0", false).level, Level::kProblem);
  EXPECT_EQ(JudgeLibibverbs("/usr/lib/libibverbs.so.1.14.44.0", true).level, Level::kOk);
  EXPECT_EQ(JudgeLibibverbs("/usr/lib/libibverbs.so.1.15.56.0", true).level, Level::kOk);
  EXPECT_EQ(JudgeLibibverbs("/usr/lib/libibverbs.so.1.14.57.0", true).level, Level::kNote);
  EXPECT_EQ(JudgeLibibverbs("libibverbs.so.1", true).level, Level::kOk);
}

TEST(DoctorTest, OneWayIntoMemoryIsEnoughAndNoneIsAProblem) {
  const auto worst = [](MemoryAccess access) {
    const auto findings = JudgeMemoryAccess(access);
    return std::ranges::max(findings, {}, &Finding::level).level;
  };
  EXPECT_EQ(worst({0, 0}), Level::kOk);
  EXPECT_EQ(worst({EPERM, 0}), Level::kNote);
  EXPECT_EQ(worst({0, EACCES}), Level::kNote);
  EXPECT_EQ(worst({EPERM, EACCES}), Level::kProblem);
}

TEST(DoctorTest, MemoryAccessIsTriedForReal) {
  // This machine allows at least one, or no test with data can run here at all.
  const MemoryAccess access = TryMemoryAccess();
  EXPECT_TRUE(access.process_vm_errno == 0 || access.proc_mem_errno == 0)
      << std::strerror(access.process_vm_errno) << ", " << std::strerror(access.proc_mem_errno);
}

TEST(DoctorTest, RealDevicesAreNamed) {
  EXPECT_EQ(JudgeRealDevices({}).level, Level::kOk);
  const Finding finding = JudgeRealDevices({"mlx5_0", "rxe0"});
  EXPECT_EQ(finding.level, Level::kNote);
  EXPECT_EQ(finding.finding, "mlx5_0, rxe0");
}

TEST(DoctorTest, FindsASocketThatADeadDaemonLeft) {
  const ScratchFolder scratch;
  setenv("XDG_RUNTIME_DIR", scratch.path().c_str(), 1);
  ASSERT_EQ(mkdir((scratch / "verbena").c_str(), 0700), 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, (scratch / "verbena/dead.sock").c_str());
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(fd);
  const auto findings = ExamineInstance({});
  const auto leftovers = std::ranges::find(findings, "leftovers", &Finding::name);
  ASSERT_NE(leftovers, findings.end());
  EXPECT_EQ(leftovers->level, Level::kNote);
  EXPECT_NE(leftovers->finding.find("dead"), std::string::npos);
}

TEST(DoctorTest, ARunFolderThatOthersCanEnterIsAProblem) {
  const ScratchFolder scratch;
  setenv("XDG_RUNTIME_DIR", scratch.path().c_str(), 1);
  ASSERT_EQ(mkdir((scratch / "verbena").c_str(), 0700), 0);
  ASSERT_EQ(chmod((scratch / "verbena").c_str(), 0777), 0);
  EXPECT_EQ(ExamineInstance({}).front().level, Level::kProblem);
}

}  // namespace
}  // namespace verbena::tools
