// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/mem/region_table.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <vector>

namespace verbena::nic {
namespace {

using transport::kAccessLocalWrite;
using transport::kAccessMwBind;
using transport::kAccessOnDemand;
using transport::kAccessRemoteAtomic;
using transport::kAccessRemoteRead;
using transport::kAccessRemoteWrite;
using transport::kAccessZeroBased;
using transport::MemoryAccess;
using transport::MemoryStatus;

AddressSpace* const kSpace = reinterpret_cast<AddressSpace*>(0x1000);

Region Plain(uint64_t address, uint64_t length, uint32_t access = kAccessLocalWrite) {
  return {.space = kSpace,
          .pd = 5,
          .access = access,
          .iova = address,
          .length = length,
          .address = address};
}

TEST(RegionTableTest, RegisterChecksItsArguments) {
  struct Case {
    const char* name;
    Region region;
    int error;
  };
  Region iova_wraps = Plain(0x1000, 0x2000);
  iova_wraps.iova = UINT64_MAX - 0x1000;
  const Case cases[] = {
      {"plain", Plain(0x1000, 1), 0},
      {"read only", Plain(0x1000, 1, 0), 0},
      {"length 0", Plain(0x1000, 0), EINVAL},
      {"address wraps", Plain(UINT64_MAX - 10, 20), EINVAL},
      {"iova wraps", iova_wraps, EINVAL},
      {"remote write alone", Plain(0x1000, 1, kAccessRemoteWrite), EINVAL},
      {"remote atomic alone", Plain(0x1000, 1, kAccessRemoteAtomic), EINVAL},
      {"remote read alone", Plain(0x1000, 1, kAccessRemoteRead), 0},
      {"all rights",
       Plain(0x1000, 1,
             kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead | kAccessRemoteAtomic |
                 kAccessMwBind | kAccessZeroBased),
       0},
      {"on demand", Plain(0x1000, 1, kAccessLocalWrite | kAccessOnDemand), 0},
      {"length 0 without an address", Plain(0x1000, 0, kAccessZeroBased), 0},
      {"unknown bit", Plain(0x1000, 1, kAccessLocalWrite | 1u << 12), EINVAL},
      {"huge pages and relaxed ordering", Plain(0x1000, 1, kAccessLocalWrite | 1u << 7 | 1u << 20),
       0},
  };
  for (const Case& c : cases) {
    RegionTable table(16, 1);
    uint32_t key = 0;
    EXPECT_EQ(table.Register(c.region, &key), c.error) << c.name;
    EXPECT_EQ(table.size(), c.error == 0 ? 1u : 0u) << c.name;
    if (c.error == 0) {
      EXPECT_NE(key, 0u) << c.name;
    }
  }
}

transport::WindowBind BindTo(uint32_t window, uint32_t region, uint32_t access) {
  return {.window = window,
          .new_key = (window & ~0xffu) | ((window + 1) & 0xff),
          .region_key = region,
          .access = access,
          .address = 0x1010,
          .length = 0x20};
}

TEST(RegionTableTest, AWindowGrantsItsOwnRightsInItsOwnBounds) {
  RegionTable table(16, 1);
  uint32_t region = 0, window = 0;
  ASSERT_EQ(table.Register(Plain(0x1000, 0x100, kAccessLocalWrite | kAccessMwBind), &region), 0);
  ASSERT_EQ(table.AllocateWindow(RegionKind::kWindow1, 5, 1, &window), 0);
  Extent extent;
  const auto write = [&](uint32_t key, uint64_t address, uint64_t bytes, uint32_t qpn = 7) {
    return table.Translate(key, 5, address, bytes, MemoryAccess::kRemoteWrite, &extent, qpn);
  };
  EXPECT_EQ(write(window, 0x1010, 8), MemoryStatus::kBadKey);  // not bound
  const auto bind = BindTo(window, region, kAccessRemoteWrite);
  ASSERT_EQ(table.Bind(bind, 5, 7), MemoryStatus::kOk);
  EXPECT_EQ(write(window, 0x1010, 8), MemoryStatus::kBadKey);  // its key of before
  EXPECT_EQ(write(bind.new_key, 0x1010, 0x20), MemoryStatus::kOk);
  EXPECT_EQ(extent.address, 0x1010u);
  EXPECT_EQ(write(bind.new_key, 0x1010, 0x21), MemoryStatus::kOutOfBounds);
  EXPECT_EQ(write(bind.new_key, 0x100f, 1), MemoryStatus::kOutOfBounds);
  EXPECT_EQ(table.Translate(bind.new_key, 5, 0x1010, 1, MemoryAccess::kRemoteRead, &extent),
            MemoryStatus::kNoRight);
  EXPECT_EQ(table.Translate(bind.new_key, 5, 0x1010, 1, MemoryAccess::kLocalRead, &extent),
            MemoryStatus::kBadKey);
  EXPECT_EQ(table.Translate(bind.new_key, 6, 0x1010, 1, MemoryAccess::kRemoteWrite, &extent),
            MemoryStatus::kWrongPd);
}

TEST(RegionTableTest, AWindowDoesNotOutliveItsRegionNorItsQp) {
  RegionTable table(16, 1);
  uint32_t region = 0, window = 0;
  ASSERT_EQ(table.Register(Plain(0x1000, 0x100, kAccessLocalWrite | kAccessMwBind), &region), 0);
  ASSERT_EQ(table.AllocateWindow(RegionKind::kWindow2, 5, 1, &window), 0);
  Extent extent;
  const auto read = [&](uint32_t key, uint32_t qpn) {
    return table.Translate(key, 5, 0x1010, 1, MemoryAccess::kRemoteRead, &extent, qpn);
  };
  auto bind = BindTo(window, region, transport::kAccessRemoteRead);
  ASSERT_EQ(table.Bind(bind, 5, 7), MemoryStatus::kOk);
  EXPECT_EQ(read(bind.new_key, 7), MemoryStatus::kOk);
  EXPECT_EQ(read(bind.new_key, 8), MemoryStatus::kWrongPd);
  EXPECT_EQ(table.Bind(bind, 5, 7), MemoryStatus::kNoRight);  // bound already
  EXPECT_EQ(table.Invalidate(bind.new_key, 5, 8), MemoryStatus::kNoRight);
  table.UnbindWindowsOf(7);
  EXPECT_EQ(read(bind.new_key, 7), MemoryStatus::kBadKey);
  bind.window = bind.new_key;
  ASSERT_EQ(table.Bind(bind, 5, 9), MemoryStatus::kOk);
  EXPECT_EQ(table.Find(region)->windows, 1u);
  EXPECT_EQ(table.Change(*table.Find(region)), EBUSY);
  EXPECT_TRUE(table.Deregister(region));  // its process is gone
  EXPECT_EQ(read(bind.new_key, 9), MemoryStatus::kBadKey);
  EXPECT_TRUE(table.Deregister(table.FindWindow(window)->key));
  EXPECT_EQ(table.size(), 0u);
  EXPECT_EQ(table.window_count(), 0u);
}

TEST(RegionTableTest, TranslateGrantsWhatTheRegionGrants) {
  constexpr MemoryStatus kOk = MemoryStatus::kOk;
  constexpr MemoryStatus kNo = MemoryStatus::kNoRight;
  struct Case {
    uint32_t access;
    // kLocalRead, kLocalWrite, kRemoteRead, kRemoteWrite, kRemoteAtomic
    MemoryStatus expected[5];
  };
  const Case cases[] = {
      {0, {kOk, kNo, kNo, kNo, kNo}},
      {kAccessLocalWrite, {kOk, kOk, kNo, kNo, kNo}},
      {kAccessRemoteRead, {kOk, kNo, kOk, kNo, kNo}},
      {kAccessLocalWrite | kAccessRemoteWrite, {kOk, kOk, kNo, kOk, kNo}},
      {kAccessLocalWrite | kAccessRemoteAtomic, {kOk, kOk, kNo, kNo, kOk}},
  };
  for (const Case& c : cases) {
    RegionTable table(16, 1);
    uint32_t key;
    ASSERT_EQ(table.Register(Plain(0x1000, 64, c.access), &key), 0);
    for (int i = 0; i < 5; ++i) {
      Extent extent;
      EXPECT_EQ(table.Translate(key, 5, 0x1000, 8, static_cast<MemoryAccess>(i), &extent),
                c.expected[i])
          << c.access << " " << i;
    }
  }
}

TEST(RegionTableTest, TranslateChecksKeyAndProtectionDomain) {
  RegionTable table(16, 1);
  uint32_t key;
  ASSERT_EQ(table.Register(Plain(0x1000, 64), &key), 0);
  Extent extent;
  const auto translate = [&](uint32_t k, PdId pd) {
    return table.Translate(k, pd, 0x1000, 8, MemoryAccess::kLocalRead, &extent);
  };
  EXPECT_EQ(translate(key, 5), MemoryStatus::kOk);
  EXPECT_EQ(translate(key, 6), MemoryStatus::kWrongPd);
  EXPECT_EQ(translate(key ^ 1, 5), MemoryStatus::kBadKey);    // other tag
  EXPECT_EQ(translate(key + 256, 5), MemoryStatus::kBadKey);  // other index
  EXPECT_EQ(translate(key - 256, 5), MemoryStatus::kBadKey);
  EXPECT_EQ(translate(0, 5), MemoryStatus::kBadKey);
  EXPECT_TRUE(table.Deregister(key));
  EXPECT_EQ(translate(key, 5), MemoryStatus::kBadKey);
  EXPECT_FALSE(table.Deregister(key));
  EXPECT_EQ(table.Find(key), nullptr);
}

TEST(RegionTableTest, TranslateChecksBoundsWithoutOverflow) {
  struct Case {
    const char* name;
    uint64_t iova, length;    // of the region, which lies at 0x7000'0000
    uint64_t address, bytes;  // asked for
    bool good;
  };
  const uint64_t top = UINT64_MAX - 0xffff;
  const Case cases[] = {
      {"whole", 0x1000, 0x100, 0x1000, 0x100, true},
      {"last byte", 0x1000, 0x100, 0x10ff, 1, true},
      {"nothing at the end", 0x1000, 0x100, 0x1100, 0, true},
      {"nothing behind the end", 0x1000, 0x100, 0x1101, 0, false},
      {"one too many", 0x1000, 0x100, 0x1000, 0x101, false},
      {"one before", 0x1000, 0x100, 0xfff, 1, false},
      {"starts before, ends inside", 0x1000, 0x100, 0xfff, 8, false},
      {"behind", 0x1000, 0x100, 0x1100, 1, false},
      {"sum wraps to inside", 0x1000, 0x100, 0x1010, UINT64_MAX - 0xf, false},
      {"length of all", 0x1000, 0x100, 0x1000, UINT64_MAX, false},
      {"address at the top", 0x1000, 0x100, UINT64_MAX, 1, false},
      {"iova 0", 0, 0x100, 0, 0x100, true},
      {"iova 0, minus one", 0, 0x100, UINT64_MAX, 2, false},
      {"iova at the top", top, 0x8000, top + 0x7fff, 1, true},
      {"iova at the top, behind", top, 0x8000, top + 0x8000, 1, false},
      {"iova at the top, wraps", top, 0x8000, top + 0x7000, 0x10000, false},
      {"iova at the top, address 0", top, 0x8000, 0, 1, false},
  };
  for (const Case& c : cases) {
    RegionTable table(4, 1);
    Region region = Plain(0x70000000, c.length);
    region.iova = c.iova;
    uint32_t key;
    ASSERT_EQ(table.Register(region, &key), 0) << c.name;
    Extent extent;
    const MemoryStatus status =
        table.Translate(key, 5, c.address, c.bytes, MemoryAccess::kLocalWrite, &extent);
    EXPECT_EQ(status, c.good ? MemoryStatus::kOk : MemoryStatus::kOutOfBounds) << c.name;
    if (c.good) {
      EXPECT_EQ(extent.space, kSpace) << c.name;
      EXPECT_EQ(extent.address, 0x70000000 + (c.address - c.iova)) << c.name;
    }
  }
}

TEST(RegionTableTest, ZeroBasedRegionStartsAtZeroWhateverIovaSays) {
  RegionTable table(4, 1);
  Region region = Plain(0x70000000, 0x100, kAccessLocalWrite | kAccessZeroBased);
  region.iova = 0x70000000;
  uint32_t key;
  ASSERT_EQ(table.Register(region, &key), 0);
  EXPECT_EQ(table.Find(key)->iova, 0u);
  Extent extent;
  ASSERT_EQ(table.Translate(key, 5, 0x10, 8, MemoryAccess::kLocalWrite, &extent),
            MemoryStatus::kOk);
  EXPECT_EQ(extent.address, 0x70000010u);
  EXPECT_EQ(table.Translate(key, 5, 0x70000000, 8, MemoryAccess::kLocalWrite, &extent),
            MemoryStatus::kOutOfBounds);
}

TEST(RegionTableTest, FullTableGivesEnomemUntilOneIsFreed) {
  RegionTable table(3, 9);
  uint32_t keys[4];
  for (int i = 0; i < 3; ++i) ASSERT_EQ(table.Register(Plain(0x1000, 1), &keys[i]), 0);
  EXPECT_EQ(table.Register(Plain(0x1000, 1), &keys[3]), ENOMEM);
  EXPECT_TRUE(table.Deregister(keys[1]));
  EXPECT_EQ(table.Register(Plain(0x1000, 1), &keys[3]), 0);
  EXPECT_NE(keys[3], keys[1]);
  EXPECT_EQ(table.Find(keys[1]), nullptr);
  EXPECT_EQ(table.size(), 3u);
}

TEST(RegionTableTest, KeysStartAtRandomAndAreNotReusedSoon) {
  constexpr uint32_t kCapacity = 100;
  std::set<uint32_t> first_keys;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    RegionTable table(kCapacity, seed);
    uint32_t key;
    ASSERT_EQ(table.Register(Plain(0x1000, 1), &key), 0);
    first_keys.insert(key >> 8);
  }
  EXPECT_GT(first_keys.size(), 45u);

  // One region that comes and goes beside ten that stay: an index comes back
  // only after all other free ones, and the same key only after 256 rounds.
  RegionTable table(kCapacity, 3);
  uint32_t key;
  for (int i = 0; i < 10; ++i) ASSERT_EQ(table.Register(Plain(0x1000, 1), &key), 0);
  std::map<uint32_t, uint32_t> last_index;
  std::map<uint32_t, uint32_t> last_key;
  for (uint32_t i = 0; i < 60000; ++i) {
    ASSERT_EQ(table.Register(Plain(0x1000, 1), &key), 0);
    ASSERT_NE(key, 0u);
    if (last_index.contains(key >> 8)) {
      ASSERT_GE(i - last_index[key >> 8], 90u);
    }
    if (last_key.contains(key)) {
      ASSERT_GE(i - last_key[key], 90u * 255);
    }
    last_index[key >> 8] = i;
    last_key[key] = i;
    ASSERT_TRUE(table.Deregister(key));
  }
  EXPECT_EQ(last_index.size(), 90u);
}

TEST(RegionTableTest, IndexRangeMayWrapAndNoKeyIsZero) {
  constexpr uint32_t kCapacity = 65536;
  std::unique_ptr<RegionTable> table;
  uint32_t key = 0;
  for (uint64_t seed = 0; key >> 8 <= 0x1000000 - kCapacity; ++seed) {
    ASSERT_LT(seed, 10000u);
    table = std::make_unique<RegionTable>(kCapacity, seed);
    ASSERT_EQ(table->Register(Plain(0x1000, 1), &key), 0);
  }
  std::set<uint32_t> keys{key};
  uint32_t key_of_index_0 = 0;
  for (uint32_t i = 1; i < kCapacity; ++i) {
    ASSERT_EQ(table->Register(Plain(0x1000 + i, 1), &key), 0);
    ASSERT_EQ(table->Find(key)->address, 0x1000 + i);
    keys.insert(key);
    if (key >> 8 == 0) key_of_index_0 = key;
  }
  EXPECT_EQ(keys.size(), kCapacity);
  ASSERT_NE(key_of_index_0, 0u);
  // It is the only free one, so it comes back with each tag in turn.
  std::set<uint32_t> tags;
  for (int i = 0; i < 600; ++i) {
    ASSERT_TRUE(table->Deregister(key_of_index_0));
    ASSERT_EQ(table->Register(Plain(0x1000, 1), &key_of_index_0), 0);
    ASSERT_EQ(key_of_index_0 >> 8, 0u);
    ASSERT_NE(key_of_index_0, 0u);
    tags.insert(key_of_index_0);
  }
  EXPECT_EQ(tags.size(), 255u);
}

TEST(RegionTableTest, ForEachVisitsEachOnceAndMayDeregister) {
  RegionTable table(1000, 4);
  std::set<uint32_t> keys;
  std::vector<uint32_t> gone;
  for (uint32_t i = 0; i < 600; ++i) {
    uint32_t key;
    Region region = Plain(0x1000, 1);
    region.owner = i % 3;
    ASSERT_EQ(table.Register(region, &key), 0);
    if (i % 2 == 0) {
      gone.push_back(key);
    } else {
      keys.insert(key);
    }
  }
  for (uint32_t key : gone) ASSERT_TRUE(table.Deregister(key));
  std::multiset<uint32_t> visited;
  table.ForEach([&](const Region& region) { visited.insert(region.key); });
  EXPECT_EQ(visited, std::multiset<uint32_t>(keys.begin(), keys.end()));
  visited.clear();
  table.ForEach([&](const Region& region) {
    visited.insert(region.key);
    if (region.owner == 1) table.Deregister(region.key);
  });
  EXPECT_EQ(visited.size(), keys.size());
  EXPECT_EQ(table.size(), 200u);
  table.ForEach([&](const Region& region) { EXPECT_NE(region.owner, 1u); });
}

TEST(RegionTableTest, LargestTableIsFilledAndEmptiedQuickly) {
  constexpr uint32_t kCapacity = 131072;
  RegionTable table(kCapacity, 8);
  std::vector<uint32_t> keys(kCapacity);
  const auto start = std::chrono::steady_clock::now();
  for (uint32_t& key : keys) ASSERT_EQ(table.Register(Plain(0x1000, 1), &key), 0);
  EXPECT_EQ(std::set<uint32_t>(keys.begin(), keys.end()).size(), kCapacity);
  for (uint32_t key : keys) ASSERT_TRUE(table.Deregister(key));
  EXPECT_EQ(table.size(), 0u);
  // A linear search for each would take minutes.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace verbena::nic
