// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/mem/address_space.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "tests/unit/nic_sim/mem/target_process.h"

namespace verbena::nic {
namespace {

using ::testing::HasSubstr;
using testing::TargetProcess;
using Backend = AddressSpace::Backend;
using Bytes = std::vector<std::byte>;

constexpr size_t kPage = 4096;

Bytes RandomBytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

iovec Remote(uint64_t address, size_t bytes) {
  return {reinterpret_cast<void*>(static_cast<uintptr_t>(address)), bytes};
}

// Cuts [base, base + total) into pieces of 0 to `largest` bytes.
std::vector<iovec> Split(uint64_t base, size_t total, size_t largest, std::mt19937& random) {
  std::vector<iovec> pieces;
  for (size_t done = 0; done < total;) {
    const size_t step = std::min(total - done, random() % (largest + 1));
    pieces.push_back(Remote(base + done, step));
    done += step;
  }
  return pieces;
}

class AddressSpaceTest : public ::testing::TestWithParam<Backend> {};

INSTANTIATE_TEST_SUITE_P(Backends, AddressSpaceTest,
                         ::testing::Values(Backend::kProcessVm, Backend::kProcMem),
                         [](const auto& info) {
                           return info.param == Backend::kProcessVm ? "ProcessVm" : "ProcMem";
                         });

TEST_P(AddressSpaceTest, CopiesBetweenListsThatAreCutDifferently) {
  TargetProcess target(1 << 20);
  auto space = target.Open(GetParam());
  ASSERT_NE(space, nullptr);
  EXPECT_EQ(space->backend(), GetParam());
  std::mt19937 random(7);
  for (size_t largest : {3u, 64u, 700u, 9000u, 300000u}) {
    const size_t total = largest < 100 ? 20000 : 400000;
    const uint64_t start = target.address() + random() % 5000;
    Bytes data = RandomBytes(total, static_cast<uint32_t>(largest));
    const auto local_base = reinterpret_cast<uintptr_t>(data.data());
    // Small pieces: far more of them than one system call takes.
    auto remote = Split(start, total, largest, random);
    auto local = Split(local_base, total, largest, random);
    if (largest == 3) {
      ASSERT_GT(remote.size(), size_t{3 * IOV_MAX});
    }
    ASSERT_EQ(space->Write(local, remote), remote.size()) << largest;
    EXPECT_EQ(target.Get(start, total), data) << largest;

    const Bytes fresh = RandomBytes(total, 99);
    target.Set(start, fresh);
    remote = Split(start, total, largest, random);
    local = Split(local_base, total, largest, random);
    ASSERT_EQ(space->Read(local, remote), remote.size()) << largest;
    EXPECT_EQ(data, fresh) << largest;
  }
}

TEST_P(AddressSpaceTest, OneLocalPieceServesManyRemoteOnesAndTheOtherWayRound) {
  TargetProcess target(64 * kPage);
  auto space = target.Open(GetParam());
  Bytes data = RandomBytes(6000, 3);
  std::vector<iovec> bytewise;
  for (size_t i = 0; i < data.size(); ++i) {
    bytewise.push_back(Remote(target.address() + 2 * i, 1));  // every second byte
  }
  const iovec whole{data.data(), data.size()};
  ASSERT_EQ(space->Write({&whole, 1}, bytewise), bytewise.size());
  const Bytes seen = target.Get(target.address(), 2 * data.size());
  for (size_t i = 0; i < data.size(); ++i) {
    ASSERT_EQ(seen[2 * i], data[i]) << i;
    ASSERT_EQ(seen[2 * i + 1], std::byte{0}) << i;
  }
  std::vector<iovec> local;
  for (std::byte& b : data) local.push_back({&b, 1});
  const iovec remote = Remote(target.address() + 20 * kPage + 5, data.size());
  ASSERT_EQ(space->Write(local, {&remote, 1}), 1u);
  EXPECT_EQ(target.Get(target.address() + 20 * kPage + 5, data.size()), data);
}

TEST_P(AddressSpaceTest, EmptyListsAndPiecesAreCopiedWhole) {
  TargetProcess target(kPage);
  auto space = target.Open(GetParam());
  EXPECT_EQ(space->Write({}, {}), 0u);
  const iovec none = Remote(target.address(), 0);
  EXPECT_EQ(space->Write({}, {&none, 1}), 1u);
  EXPECT_EQ(space->Read({}, {&none, 1}), 1u);
}

TEST_P(AddressSpaceTest, UnmappedPageFailsThePieceThatHoldsIt) {
  TargetProcess target(64 * kPage);
  auto space = target.Open(GetParam());
  const uint64_t hole = target.address() + 20 * kPage;
  target.Unmap(hole, kPage);
  Bytes data = RandomBytes(64 * kPage, 1);
  // Pieces of 1000 bytes: byte 20480 * 4 lies in piece 81, which begins before.
  std::vector<iovec> remote;
  for (size_t i = 0; i < 250; ++i) remote.push_back(Remote(target.address() + 1000 * i, 1000));
  const iovec local{data.data(), 250 * 1000};
  EXPECT_EQ(space->Write({&local, 1}, remote), 20 * kPage / 1000);
  EXPECT_FALSE(space->gone());
  const size_t before = 20 * kPage / 1000 * 1000;
  EXPECT_EQ(target.Get(target.address(), before), Bytes(data.begin(), data.begin() + before));
  // Nothing behind it is touched.
  EXPECT_EQ(target.Get(hole + kPage, kPage), Bytes(kPage));

  EXPECT_EQ(space->Read({&local, 1}, remote), 20 * kPage / 1000);
  // The first piece fails.
  const iovec bad = Remote(hole + 8, 8);
  const iovec word{data.data(), 8};
  EXPECT_EQ(space->Write({&word, 1}, {&bad, 1}), 0u);
  EXPECT_EQ(space->Read({&word, 1}, {&bad, 1}), 0u);
  // It is a matter of the piece, not of the process.
  const iovec good = Remote(target.address(), 8);
  EXPECT_EQ(space->Write({&word, 1}, {&good, 1}), 1u);
}

TEST_P(AddressSpaceTest, HoleBehindTheFirstSystemCallIsCountedFromTheWholeList) {
  TargetProcess target(64 * kPage);
  auto space = target.Open(GetParam());
  target.Unmap(target.address() + 40 * kPage, kPage);
  Bytes data = RandomBytes(60 * kPage, 1);
  std::vector<iovec> remote;
  for (size_t i = 0; i < 60 * kPage / 32; ++i) {
    remote.push_back(Remote(target.address() + 32 * i, 32));
  }
  ASSERT_GT(40 * kPage / 32, size_t{IOV_MAX});
  const iovec local{data.data(), data.size()};
  EXPECT_EQ(space->Write({&local, 1}, remote), 40 * kPage / 32);
}

TEST_P(AddressSpaceTest, AddressesThatNoProcessHasFail) {
  TargetProcess target(kPage);
  auto space = target.Open(GetParam());
  uint64_t word = 0;
  const iovec local{&word, 8};
  for (uint64_t address : {uint64_t{0}, uint64_t{8}, uint64_t{1} << 47, uint64_t{1} << 63,
                           UINT64_MAX - 7, UINT64_MAX - 3}) {
    const iovec remote = Remote(address, 8);
    EXPECT_EQ(space->Read({&local, 1}, {&remote, 1}), 0u) << address;
    EXPECT_EQ(space->Write({&local, 1}, {&remote, 1}), 0u) << address;
  }
  EXPECT_FALSE(space->gone());
}

TEST_P(AddressSpaceTest, ProgramAfterExecIsNotTouched) {
  TargetProcess target(4 * kPage);
  auto space = target.Open(GetParam());
  target.Exec(0x5a);  // has the same memory mapped, but not the guard
  Bytes data = RandomBytes(4 * kPage, 5);
  const Bytes before = data;
  const iovec local{data.data(), data.size()};
  const iovec remote = Remote(target.address(), data.size());
  EXPECT_EQ(space->Write({&local, 1}, {&remote, 1}), 0u);
  EXPECT_TRUE(space->gone());
  EXPECT_EQ(space->Read({&local, 1}, {&remote, 1}), 0u);
  EXPECT_EQ(data, before);
  EXPECT_EQ(target.Get(target.address(), target.bytes()), Bytes(4 * kPage, std::byte{0x5a}));
}

TEST_P(AddressSpaceTest, KilledProcessGivesNothing) {
  TargetProcess target(kPage);
  auto space = target.Open(GetParam());
  target.Kill();
  uint64_t word = 0;
  const iovec local{&word, 8};
  const iovec remote = Remote(target.address(), 8);
  EXPECT_EQ(space->Write({&local, 1}, {&remote, 1}), 0u);
  EXPECT_EQ(space->Read({&local, 1}, {&remote, 1}), 0u);
  EXPECT_TRUE(space->gone());
  // From then on without a system call.
  const uint64_t calls = space->system_calls();
  EXPECT_EQ(space->Read({&local, 1}, {&remote, 1}), 0u);
  EXPECT_EQ(space->system_calls(), calls);
}

// A process with the same pid that has a page where the guard was.
TEST_P(AddressSpaceTest, WrongMagicMeansAnotherProcess) {
  TargetProcess target(kPage);
  auto identity = target.identity();
  identity.guard_magic ^= 1;
  std::string why;
  const Backend backend = GetParam();
  EXPECT_EQ(AddressSpace::Open(identity, &why, &backend), nullptr);
  EXPECT_THAT(why, HasSubstr("guard page"));

  auto space = target.Open(GetParam());
  const uint64_t other = 42;
  target.Set(identity.guard_address, std::as_bytes(std::span(&other, 1)));
  uint64_t word = 0;
  const iovec local{&word, 8};
  const iovec remote = Remote(target.address(), 8);
  EXPECT_EQ(space->Read({&local, 1}, {&remote, 1}), 0u);
  EXPECT_TRUE(space->gone());
  EXPECT_EQ(space->Write({&local, 1}, {&remote, 1}), 0u);
}

TEST_P(AddressSpaceTest, MissingGuardPageStopsTheCopy) {
  TargetProcess target(kPage);
  auto space = target.Open(GetParam());
  const auto identity = target.identity();
  close(identity.mem_fd);
  target.Unmap(identity.guard_address, kPage);
  const Bytes data = RandomBytes(8, 1);
  const iovec local{const_cast<std::byte*>(data.data()), 8};
  const iovec remote = Remote(target.address(), 8);
  EXPECT_EQ(space->Write({&local, 1}, {&remote, 1}), 0u);
  EXPECT_TRUE(space->gone());
  EXPECT_EQ(target.Get(target.address(), 8), Bytes(8));
}

TEST(AddressSpaceOpenTest, PrefersProcessVmAndClosesTheDescriptor) {
  TargetProcess target(kPage);
  const auto identity = target.identity();
  std::string why;
  auto space = AddressSpace::Open(identity, &why);
  ASSERT_NE(space, nullptr) << why;
  EXPECT_EQ(space->backend(), Backend::kProcessVm);
  EXPECT_EQ(fcntl(identity.mem_fd, F_GETFD), -1);
}

TEST(AddressSpaceOpenTest, OtherPidNamespaceFallsBackToTheDescriptor) {
  TargetProcess target(kPage);
  auto identity = target.identity();
  identity.pid = 0;
  std::string why;
  auto space = AddressSpace::Open(identity, &why);
  ASSERT_NE(space, nullptr) << why;
  EXPECT_EQ(space->backend(), Backend::kProcMem);
  space = nullptr;
  EXPECT_EQ(fcntl(identity.mem_fd, F_GETFD), -1);
}

TEST(AddressSpaceOpenTest, SaysWhyNothingWorks) {
  TargetProcess target(kPage);
  auto identity = target.identity();
  close(identity.mem_fd);
  identity.mem_fd = -1;
  identity.pid = 0;
  std::string why;
  EXPECT_EQ(AddressSpace::Open(identity, &why), nullptr);
  EXPECT_THAT(why, HasSubstr("another pid namespace"));
  EXPECT_THAT(why, HasSubstr("did not pass /proc/self/mem"));

  identity.pid = target.pid();
  target.Kill();
  EXPECT_EQ(AddressSpace::Open(identity, &why), nullptr);
  EXPECT_THAT(why, HasSubstr("does not exist"));
}

TEST(AddressSpaceOpenTest, DescriptorThatIsNoProcessMemoryIsRefused) {
  TargetProcess target(kPage);
  const Backend backend = Backend::kProcMem;
  for (const char* path : {"/dev/zero", "/proc/self/maps"}) {
    auto identity = target.identity();
    close(identity.mem_fd);
    identity.mem_fd = open(path, O_RDONLY | O_CLOEXEC);
    ASSERT_GE(identity.mem_fd, 0);
    std::string why;
    EXPECT_EQ(AddressSpace::Open(identity, &why, &backend), nullptr) << path;
    EXPECT_THAT(why, HasSubstr("is not /proc/self/mem")) << path;
    EXPECT_EQ(fcntl(identity.mem_fd, F_GETFD), -1) << path;
  }
  auto identity = target.identity();
  close(identity.mem_fd);
  const std::string path = "/proc/" + std::to_string(target.pid()) + "/mem";
  identity.mem_fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(identity.mem_fd, 0);
  std::string why;
  EXPECT_EQ(AddressSpace::Open(identity, &why, &backend), nullptr);
  EXPECT_THAT(why, HasSubstr("without write access"));
}

TEST(AddressSpaceOpenTest, NonDumpableProcessIsNamedAsSuch) {
  if (geteuid() == 0) GTEST_SKIP() << "root may copy from it all the same";
  TargetProcess target(kPage);
  target.MakeNonDumpable();
  auto identity = target.identity();
  close(identity.mem_fd);
  identity.mem_fd = -1;
  std::string why;
  EXPECT_EQ(AddressSpace::Open(identity, &why), nullptr);
  EXPECT_THAT(why, HasSubstr("not dumpable"));
}

}  // namespace
}  // namespace verbena::nic

int main(int argc, char** argv) {
  verbena::nic::testing::TargetProcess::MaybeServeAfterExec(argc, argv);
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
