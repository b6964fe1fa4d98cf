// SPDX-License-Identifier: Apache-2.0
// Each library that the build names can be included, linked and run.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <isa-l/crc.h>
#include <rdma/rdma_cma.h>
#include <rte_ether.h>
#include <rte_mbuf.h>
#include <rte_ring.h>
#include <rte_version.h>
#include <spdlog/spdlog.h>
#include <toml++/toml.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace {

TEST(Libraries, IsalCrcGivesTheCheckValueOfCrc32) {
  const std::string text = "123456789";  // The check value of CRC-32/ISO-HDLC is public.
  EXPECT_EQ(crc32_gzip_refl(0, reinterpret_cast<const unsigned char*>(text.data()), text.size()),
            0xcbf43926u);
}

TEST(Libraries, DpdkIsLinked) {
  EXPECT_THAT(rte_version(), testing::HasSubstr("DPDK 22.11"));
  EXPECT_LT(rte_ring_get_memsize(64), 4096);
  EXPECT_EQ(sizeof(rte_mbuf), 128u);
}

TEST(Libraries, FmtJsonTomlAndCliWork) {
  EXPECT_EQ(fmt::format("{:06x}", 0xabc), "000abc");
  EXPECT_EQ(nlohmann::json::parse(R"({"a":[1,2]})")["a"].size(), 2u);
  EXPECT_EQ(toml::parse("nics = 2")["nics"].value<std::int64_t>(), 2);
  CLI::App app;
  int nics = 0;
  app.add_option("--nics", nics);
  std::vector<std::string> args{"3", "--nics"};  // CLI11 takes the reversed order.
  app.parse(args);
  EXPECT_EQ(nics, 3);
  spdlog::set_level(spdlog::level::warn);
}

TEST(Libraries, VerbsAndCmAreLinked) {
  EXPECT_STREQ(ibv_wc_status_str(IBV_WC_SUCCESS), "success");
  EXPECT_STREQ(rdma_event_str(RDMA_CM_EVENT_ESTABLISHED), "RDMA_CM_EVENT_ESTABLISHED");
}

}  // namespace
