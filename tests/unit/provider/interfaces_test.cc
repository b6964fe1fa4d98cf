// SPDX-License-Identifier: Apache-2.0
//
// What programs find when they look for network interfaces, counters and
// NETLINK_RDMA: the preload with the real control server.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <cstdio>
#include <string>

#include "tests/unit/provider/server_fixture.h"

namespace verbena::nic {
namespace {

class Interfaces : public ServerFixture, public ::testing::WithParamInterface<const char*> {};

TEST_P(Interfaces, AreShownLikeTheKernels) {
  ExpectGood(ReadAll(StartProbe("interfaces_probe", GetParam())));
}

INSTANTIATE_TEST_SUITE_P(All, Interfaces,
                         ::testing::Values("addresses", "names", "ioctls", "files", "netlink"),
                         [](const auto& info) { return std::string(info.param); });

class Counters : public ServerFixture {};

TEST_F(Counters, AreReadAsTheyAreNow) {
  const std::string fifo = folder_ + "/go";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  FILE* program = StartProbe("interfaces_probe", "counters < " + fifo);
  FILE* go = fopen(fifo.c_str(), "w");
  std::array<char, 64> line;
  while (fgets(line.data(), line.size(), program) != nullptr) {
    if (std::string(line.data()) == "counted\n") break;
    EXPECT_EQ(std::string(line.data()).substr(0, 4), "good") << line.data();
  }
  hardware_.xmit_packets = 1234567890123;
  fputs("go\n", go);
  fclose(go);
  ExpectGood(ReadAll(program));
}

}  // namespace
}  // namespace verbena::nic
