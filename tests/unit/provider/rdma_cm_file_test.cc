// SPDX-License-Identifier: Apache-2.0
//
// /dev/infiniband/rdma_cm in a program of its own: the preload, the real control
// server, and a connection manager that makes events on demand. What is expected
// is what Linux' character device does.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>

#include "tests/unit/provider/server_fixture.h"

namespace verbena::nic {
namespace {

class RdmaCmFile : public ServerFixture {
 protected:
  FILE* Start(const std::string& scenario) { return StartProbe("rdma_cm_probe", scenario); }
  // The files that a program had are gone soon after it has ended.
  void ExpectNoFiles() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (Files() > 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_EQ(Files(), 0u);
    const std::lock_guard guard(cm_.mutex());
    EXPECT_EQ(cm_.id_count(), 0u);
  }
  size_t Files() {
    const std::lock_guard guard(cm_.mutex());
    return cm_.file_count();
  }
};

class RdmaCmScenario : public RdmaCmFile, public ::testing::WithParamInterface<const char*> {};

TEST_P(RdmaCmScenario, IsAsOnLinux) {
  ExpectGood(ReadAll(Start(GetParam())));
  ExpectNoFiles();
}

INSTANTIATE_TEST_SUITE_P(All, RdmaCmScenario,
                         ::testing::Values("opening", "commands", "polling", "edge", "non_blocking",
                                           "duplicates", "forking", "killed", "executing",
                                           "signals", "cancelling", "closing", "threads",
                                           "destroying", "destroying_while_waiting", "migrating",
                                           "many", "room"),
                         [](const auto& info) { return std::string(info.param); });

TEST_F(RdmaCmFile, EndOfTheDaemonEndsEveryWait) {
  FILE* program = Start("orphaned");
  std::array<char, 64> line;
  ASSERT_NE(fgets(line.data(), line.size(), program), nullptr);
  ASSERT_STREQ(line.data(), "waiting\n");
  Stop();
  ExpectGood(ReadAll(program));
}

TEST_F(RdmaCmFile, RefusalOfTheConnectionManagerFailsTheOpen) {
  {
    const std::lock_guard guard(cm_.mutex());
    cm_.refuse_files = true;
  }
  const std::string text = ReadAll(Start("refused"));
  EXPECT_NE(text.find("errno " + std::to_string(ENOMEM)), std::string::npos) << text;
}

TEST_F(RdmaCmFile, TheClientIsTheProgram) {
  ExpectGood(ReadAll(Start("destroying")));
  const std::lock_guard guard(cm_.mutex());
  EXPECT_EQ(cm_.last_client.uid, geteuid());
  EXPECT_EQ(cm_.last_client.may_bind_low_ports, geteuid() == 0);
  EXPECT_GT(cm_.last_client.pid, 1);
}

}  // namespace
}  // namespace verbena::nic
