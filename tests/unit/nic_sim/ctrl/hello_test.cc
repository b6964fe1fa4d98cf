// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/hello.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {
namespace {

abi::Hello Good() {
  abi::Hello hello{};
  hello.magic = abi::kMagic;
  hello.kind = abi::kClientDevice;
  hello.version_min = abi::kVersionMin;
  hello.version_max = abi::kVersionMax;
  hello.sizes = abi::kAbiSizes;
  std::strncpy(hello.comm, "ib_write_bw", sizeof(hello.comm));
  return hello;
}

HelloKind KindOf(const abi::Hello& hello, size_t bytes = sizeof(abi::Hello)) {
  return CheckHello(std::as_bytes(std::span(&hello, 1)).first(bytes), false).kind;
}

TEST(Hello, AGoodOneIsTakenAsItIs) {
  const abi::Hello hello = Good();
  const CheckedHello checked = CheckHello(std::as_bytes(std::span(&hello, 1)), false);
  EXPECT_EQ(checked.kind, HelloKind::kDevice);
  EXPECT_EQ(std::memcmp(&checked.hello, &hello, sizeof(hello)), 0);
}

TEST(Hello, ControlClientsSendEightBytes) {
  abi::Hello hello{};
  hello.magic = abi::kMagic;
  hello.kind = abi::kClientControl;
  EXPECT_EQ(KindOf(hello, 8), HelloKind::kControl);
}

TEST(Hello, OtherVersionsAndSizesAreIncompatible) {
  abi::Hello hello = Good();
  hello.version_min = abi::kVersionMax + 1;
  hello.version_max = abi::kVersionMax + 1;
  EXPECT_EQ(KindOf(hello), HelloKind::kIncompatible);
  hello = Good();
  hello.version_min = hello.version_max = abi::kVersionMin - 1;
  EXPECT_EQ(KindOf(hello), HelloKind::kIncompatible);
  hello = Good();
  hello.version_max = abi::kVersionMax + 5;  // a newer client that still speaks ours
  EXPECT_EQ(KindOf(hello), HelloKind::kDevice);
  hello.sizes.send_wqe += 16;
  EXPECT_EQ(KindOf(hello), HelloKind::kIncompatible);
}

TEST(Hello, AnyOtherLengthOfADeviceHelloIsIncompatibleOrGarbage) {
  const abi::Hello hello = Good();
  for (size_t bytes = 0; bytes < sizeof(hello); ++bytes) {
    EXPECT_EQ(KindOf(hello, bytes), bytes < 8 ? HelloKind::kGarbage : HelloKind::kIncompatible);
  }
}

TEST(Hello, WrongMagicAndKindAreGarbage) {
  abi::Hello hello = Good();
  hello.magic ^= 1;
  EXPECT_EQ(KindOf(hello), HelloKind::kGarbage);
  hello = Good();
  for (const uint32_t kind : {0u, 6u, 0xffffffffu}) {
    hello.kind = kind;
    EXPECT_EQ(KindOf(hello), HelloKind::kGarbage) << kind;
  }
}

TEST(Hello, OtherKindsOfClientsAreTold) {
  abi::Hello hello = Good();
  hello.kind = abi::kClientRdmaCm;
  EXPECT_EQ(KindOf(hello), HelloKind::kRdmaCm);
  hello.kind = abi::kClientNetlink;
  EXPECT_EQ(KindOf(hello), HelloKind::kNetlink);
  hello.kind = abi::kClientRefresh;
  EXPECT_EQ(KindOf(hello), HelloKind::kGarbage);  // has a message of its own
  abi::RefreshHello refresh{};
  refresh.magic = abi::kMagic;
  refresh.kind = abi::kClientRefresh;
  std::memset(refresh.device, 'x', sizeof(refresh.device));  // not terminated
  const CheckedHello checked = CheckHello(std::as_bytes(std::span(&refresh, 1)), false);
  EXPECT_EQ(checked.kind, HelloKind::kRefresh);
  EXPECT_EQ(checked.device, std::string(sizeof(refresh.device), 'x'));
}

TEST(Hello, TheReplyToAnIncompatibleClientHasOurNumbers) {
  const abi::HelloReply reply = MakeHelloReply(EPROTO);
  EXPECT_EQ(reply.magic, 0x4e425256u);
  EXPECT_EQ(reply.error, EPROTO);
  EXPECT_EQ(reply.version_min, abi::kVersionMin);
  EXPECT_EQ(reply.version_max, abi::kVersionMax);
  EXPECT_EQ(reply.sizes, abi::kAbiSizes);
}

TEST(Hello, ProcessNamesArePrintableAndBounded) {
  abi::Hello hello = Good();
  std::memcpy(hello.comm, "a\nb\x80\xff\x1b[31mcdefgh", sizeof(hello.comm));
  EXPECT_EQ(CommOf(hello), "a?b???[31mcdefgh");
}

TEST(Hello, OnlyAWritableProcMemIsOne) {
  const UniqueFd good(open("/proc/self/mem", O_RDWR));
  EXPECT_TRUE(IsProcMem(good.get()));
  const UniqueFd read_only(open("/proc/self/mem", O_RDONLY));
  EXPECT_FALSE(IsProcMem(read_only.get()));
  const UniqueFd path_only(open("/proc/self/mem", O_PATH));
  EXPECT_FALSE(IsProcMem(path_only.get()));
  const UniqueFd other(open("/dev/zero", O_RDWR));
  EXPECT_FALSE(IsProcMem(other.get()));
  EXPECT_FALSE(IsProcMem(-1));
}

}  // namespace
}  // namespace verbena::nic
