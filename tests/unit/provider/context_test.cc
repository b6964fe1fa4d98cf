// SPDX-License-Identifier: Apache-2.0
//
// Opening and closing a device, its queries, and what a broken channel does.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "tests/unit/provider/provider_fixture.h"

namespace verbena::provider {
namespace {

TEST_F(OpenedDevice, HasNameAndGuidOfTheTree) {
  EXPECT_STREQ(ibv_get_device_name(list_[0]), "verbena0");
  EXPECT_EQ(list_[0]->transport_type, IBV_TRANSPORT_IB);
  const uint8_t guid[8] = {2, 0, 0, 0xff, 0xfe, 0, 0, 1};
  const uint64_t found = ibv_get_device_guid(list_[0]);
  EXPECT_EQ(memcmp(&found, guid, sizeof(guid)), 0);
}

TEST_F(OpenedDevice, TellsTheDeviceOfAGuardPageWithTheMagic) {
  const abi::Hello hello = device_.hello();
  EXPECT_EQ(hello.magic, abi::kMagic);
  EXPECT_EQ(hello.device_index, 0u);
  EXPECT_EQ(hello.guard_address % 4096, 0u);
  ASSERT_NE(hello.guard_address, 0u);
  EXPECT_EQ(*reinterpret_cast<const uint64_t*>(hello.guard_address), hello.guard_magic);
}

TEST_F(OpenedDevice, CommandDescriptorIsASealedDeviceThatNamesTheContext) {
  struct stat status;
  ASSERT_EQ(fstat(context_->cmd_fd, &status), 0);
  EXPECT_TRUE(S_ISCHR(status.st_mode));
  EXPECT_EQ(status.st_rdev, makedev(231, 192));
  abi::CommandFdContent content;
  ASSERT_EQ(pread(context_->cmd_fd, &content, sizeof(content), 0), 64);
  EXPECT_EQ(content.magic, abi::kCommandFdMagic);
  EXPECT_EQ(content.cookie, 0x1122334455667788u);
  EXPECT_EQ(pwrite(context_->cmd_fd, &content, sizeof(content), 0), -1);
  EXPECT_EQ(ftruncate(context_->cmd_fd, 0), -1);
}

TEST_F(OpenedDevice, QueriesGiveTheDevicesAnswers) {
  ibv_device_attr attr;
  memset(&attr, 0xa5, sizeof(attr));
  ASSERT_EQ(ibv_query_device(context_, &attr), 0);
  EXPECT_STREQ(attr.fw_ver, "9.8.7");
  EXPECT_EQ(attr.max_qp, 16384);
  EXPECT_EQ(attr.vendor_id, 0xffffffu);
  EXPECT_EQ(attr.device_cap_flags, 1u << 14);
  EXPECT_EQ(attr.max_srq, 0);

  ibv_device_attr_ex extended;
  memset(&extended, 0xa5, sizeof(extended));
  ASSERT_EQ(ibv_query_device_ex(context_, nullptr, &extended), 0);
  EXPECT_EQ(extended.device_cap_flags_ex, 1ull << 40 | 1ull << 14);
  EXPECT_EQ(extended.phys_port_cnt_ex, 1u);
  EXPECT_EQ(extended.odp_caps.general_caps,
            uint64_t{IBV_ODP_SUPPORT} | uint64_t{IBV_ODP_SUPPORT_IMPLICIT});
  EXPECT_EQ(context_->num_comp_vectors, 4);

  ibv_port_attr port;
  ASSERT_EQ(ibv_query_port(context_, 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(port.gid_tbl_len, 16);
  EXPECT_EQ(port.link_layer, IBV_LINK_LAYER_ETHERNET);
  EXPECT_EQ(port.active_mtu, IBV_MTU_2048);
}

// libibverbs reads ports into 52 bytes up to release 48: its canary must live.
TEST_F(OpenedDevice, QueryPortWritesNothingBehindByte52) {
  struct {
    ibv_port_attr attr;
    uint8_t canary[8];
  } port;
  memset(&port, 0x5a, sizeof(port));
  ASSERT_EQ(ibv_query_port(context_, 1, &port.attr), 0);
  for (const uint8_t byte : port.canary) EXPECT_EQ(byte, 0x5a);
}

TEST_F(OpenedDevice, GidAndPkeyComeFromTheTree) {
  ibv_gid gid;
  ASSERT_EQ(ibv_query_gid(context_, 1, 0, &gid), 0);
  EXPECT_EQ(gid.raw[0], 0xfe);
  EXPECT_EQ(gid.raw[15], 1);
  ibv_gid_entry entry;
  ASSERT_EQ(ibv_query_gid_ex(context_, 1, 0, &entry, 0), 0);
  EXPECT_EQ(entry.gid_type, static_cast<uint32_t>(IBV_GID_TYPE_ROCE_V2));
  __be16 pkey = 0;
  ASSERT_EQ(ibv_query_pkey(context_, 1, 0, &pkey), 0);
  EXPECT_EQ(pkey, 0xffff);
}

TEST_F(OpenedDevice, WhatIsNotBuiltIsNotSupported) {
  ibv_pd* pd = ibv_alloc_pd(context_);
  ASSERT_NE(pd, nullptr);
  ibv_cq_init_attr_ex cq = {};
  cq.cqe = 1;
  cq.wc_flags = IBV_WC_EX_WITH_TM_INFO;
  errno = 0;
  EXPECT_EQ(ibv_create_cq_ex(context_, &cq), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  EXPECT_EQ(ibv_dealloc_pd(pd), 0);
}

TEST_F(OpenedDevice, DeviceErrorsReachTheCaller) {
  device_.FailNext(abi::kCmdAllocPd, ENOMEM);
  errno = 0;
  EXPECT_EQ(ibv_alloc_pd(context_), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  ibv_pd* pd = ibv_alloc_pd(context_);
  ASSERT_NE(pd, nullptr);
  device_.FailNext(abi::kCmdDeallocPd, EBUSY);
  EXPECT_EQ(ibv_dealloc_pd(pd), EBUSY);
  EXPECT_EQ(ibv_dealloc_pd(pd), 0);
}

class BrokenReply : public OpenedDevice, public ::testing::WithParamInterface<Spoil> {};

TEST_P(BrokenReply, GivesEioNowAndEverAfter) {
  device_.SpoilNext(GetParam());
  errno = 0;
  EXPECT_EQ(ibv_alloc_pd(context_), nullptr);
  EXPECT_EQ(errno, EIO);
  errno = 0;
  EXPECT_EQ(ibv_alloc_pd(context_), nullptr);
  EXPECT_EQ(errno, EIO);
}

INSTANTIATE_TEST_SUITE_P(All, BrokenReply,
                         ::testing::Values(Spoil::kTooShort, Spoil::kTooLong, Spoil::kWrongSequence,
                                           Spoil::kHeaderOnly, Spoil::kCloseConnection));

TEST_F(OpenedDevice, CommandsOfAForkedChildFailAndLeaveTheParentAlone) {
  ibv_pd* pd = ibv_alloc_pd(context_);
  ASSERT_NE(pd, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    errno = 0;
    const bool refused =
        ibv_alloc_pd(context_) == nullptr && errno == EIO && ibv_dealloc_pd(pd) == EIO;
    const bool closed = ibv_close_device(context_) == 0;
    _exit(refused && closed ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(ibv_dealloc_pd(pd), 0);
}

TEST_F(OpenedDevice, AForkedChildMayOpenTheDeviceForItself) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    ibv_context* own = ibv_open_device(list_[0]);
    ibv_pd* pd = own == nullptr ? nullptr : ibv_alloc_pd(own);
    _exit(pd != nullptr && ibv_dealloc_pd(pd) == 0 && ibv_close_device(own) == 0 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// Programs close all descriptors that they do not know and open files of their
// own; commands must not be written into those.
TEST_F(OpenedDevice, NeverWritesIntoAFileThatTookTheSocketsNumber) {
  char name[] = "/tmp/fake-device-file-XXXXXX";
  const int file = mkstemp(name);
  ASSERT_GE(file, 0);
  unlink(name);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    ibv_context* own = ibv_open_device(list_[0]);
    for (int fd = 3; fd < 200; ++fd) {
      if (fd != file) dup2(file, fd);
    }
    errno = 0;
    const bool refused = ibv_alloc_pd(own) == nullptr && errno == EIO;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(lseek(file, 0, SEEK_END), 0);
  close(file);
}

TEST_F(OpenedDevice, KeepsItsDescriptorsAwayFromAClosedStdin) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    close(STDIN_FILENO);
    ibv_context* own = ibv_open_device(list_[0]);
    // libibverbs itself opens the device, which then is descriptor 0.
    const bool fine =
        own != nullptr && own->cmd_fd == 0 && own->async_fd > 2 && ibv_alloc_pd(own) != nullptr;
    _exit(fine ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(OpenedDevice, ADeadDeviceFailsEveryCommand) {
  ibv_pd* pd = ibv_alloc_pd(context_);
  device_.status()->device_dead = 1;
  errno = 0;
  EXPECT_EQ(ibv_alloc_pd(context_), nullptr);
  EXPECT_EQ(errno, EIO);
  ibv_port_attr port;
  EXPECT_EQ(ibv_query_port(context_, 1, &port), EIO);
  EXPECT_EQ(ibv_dealloc_pd(pd), EIO);
  device_.status()->device_dead = 0;
  EXPECT_EQ(ibv_dealloc_pd(pd), 0);
}

// Only to those who ask for it (rdma-core's rule): a program that goes on after the death of its
// device must be able to take its objects down.
TEST_F(OpenedDevice, ObjectsOfADyingDeviceCanBeDestroyedByThoseWhoAskForIt) {
  setenv("RDMAV_ALLOW_DISASSOC_DESTROY", "1", 1);
  ibv_context* context = ibv_open_device(list_[0]);
  unsetenv("RDMAV_ALLOW_DISASSOC_DESTROY");
  ASSERT_NE(context, nullptr);
  ibv_pd* pd = ibv_alloc_pd(context);
  ASSERT_NE(pd, nullptr);
  // The connection breaks before the death is announced.
  device_.SpoilNext(Spoil::kCloseConnection);
  std::thread announcer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    device_.status()->device_dead = 1;
  });
  EXPECT_EQ(ibv_dealloc_pd(pd), 0);
  announcer.join();
  device_.status()->device_dead = 0;
  EXPECT_EQ(ibv_close_device(context), 0);
}

class RefusedHello : public ::testing::Test {
 protected:
  // Lines on stderr while opening fails.
  std::string Open() {
    FakeDevice::Get();
    ibv_device** list = ibv_get_device_list(nullptr);
    if (list == nullptr || list[0] == nullptr) return "no device";
    testing::internal::CaptureStderr();
    errno = 0;
    ibv_context* context = ibv_open_device(list[0]);
    error_ = errno;
    std::string text = testing::internal::GetCapturedStderr();
    if (context != nullptr) {
      ibv_close_device(context);
      text += "opened";
    }
    ibv_free_device_list(list);
    return text;
  }
  int error_ = 0;
};

TEST_F(RefusedHello, OtherVersionSaysBothInOneLine) {
  FakeDevice::Get().SetHelloVersion(7);
  const std::string text = Open();
  EXPECT_EQ(error_, EPROTO);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_NE(text.find("version 7-7"), std::string::npos) << text;
  EXPECT_NE(text.find("version 1-1"), std::string::npos) << text;
}

TEST_F(RefusedHello, NoAccessToMemorySaysWhyInOneLine) {
  FakeDevice::Get().SetHelloError(EPERM);
  const std::string text = Open();
  EXPECT_EQ(error_, EPERM);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_NE(text.find("dumpable"), std::string::npos) << text;
}

TEST_F(RefusedHello, OtherErrorsAreGivenToTheCaller) {
  FakeDevice::Get().SetHelloError(EBUSY);
  EXPECT_EQ(Open(), "");
  EXPECT_EQ(error_, EBUSY);
}

}  // namespace
}  // namespace verbena::provider
