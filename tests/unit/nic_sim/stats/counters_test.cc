// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/stats/counters.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "nic_sim/stats/counters_json.h"

namespace verbena::nic {
namespace {

TEST(Counters, EachDropReasonHasItsOwnName) {
  std::set<std::string> names;
  for (size_t i = 0; i < static_cast<size_t>(DropReason::count); ++i) {
    names.insert(DropReasonName(static_cast<DropReason>(i)));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(DropReason::count));
  EXPECT_TRUE(names.contains("bad_icrc"));
  EXPECT_TRUE(names.contains("no_route"));
  EXPECT_STREQ(DropReasonName(DropReason::count), "unknown");
}

TEST(Counters, JsonHasTheNamesOfLinuxAndAllDrops) {
  PortCounters counters;
  counters.port_xmit_packets = 7;
  counters.Drop(DropReason::fault);
  counters.Drop(DropReason::fault);
  EXPECT_EQ(CountersJson(counters)["port_xmit_packets"], 7);
  EXPECT_EQ(CountersJson(counters)["port_rcv_data"], 0);
  EXPECT_EQ(DropsJson(counters)["fault"], 2);
  EXPECT_EQ(DropsJson(counters)["malformed"], 0);
  EXPECT_EQ(DropsJson(counters).size(), static_cast<size_t>(DropReason::count));
}

}  // namespace
}  // namespace verbena::nic
