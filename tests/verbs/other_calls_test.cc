// SPDX-License-Identifier: Apache-2.0
//
// Calls of libibverbs that no other test needs.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/udmabuf.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "tests/verbs/ud_end.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

// -1: not known; the devices are found by /sys.
TEST(OtherCalls, EachDeviceHasAnIndexOfItsOwnOrNone) {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  ASSERT_EQ(count, 2);
  const int first = ibv_get_device_index(list[0]), second = ibv_get_device_index(list[1]);
  EXPECT_GE(first, -1);
  EXPECT_GE(second, -1);
  EXPECT_TRUE(first != second || first == -1);
  EXPECT_STREQ(ibv_node_type_str(list[0]->node_type), "InfiniBand channel adapter");
  ibv_free_device_list(list);
}

TEST(OtherCalls, ThePortHasAStateThatHasAName) {
  const auto context = OpenDevice();
  ibv_port_attr port = {};
  ASSERT_EQ(ibv_query_port(context.get(), 1, &port), 0);
  EXPECT_STREQ(ibv_port_state_str(port.state), "active");
}

TEST(OtherCalls, AForkNeedsNoPreparation) {
  const auto context = OpenDevice();
  const int error = ibv_fork_init();
  EXPECT_TRUE(error == 0 || error == EINVAL) << error;  // EINVAL: regions were registered before
  EXPECT_EQ(ibv_is_fork_initialized(), IBV_FORK_UNNEEDED);
}

TEST(OtherCalls, ThePkeyIsFoundByItsValue) {
  const auto context = OpenDevice();
  EXPECT_EQ(ibv_get_pkey_index(context.get(), 1, 0xffff), 0);
  EXPECT_EQ(ibv_get_pkey_index(context.get(), 1, htobe16(0x1234)), -1);
}

TEST(OtherCalls, AnAddressIsMadeOfACompletion) {
  UdEnd a, b("verbena1");
  const auto ah = a.AhTo(b);
  b.Receive(1, 0, 256);
  ASSERT_EQ(a.Send(2, ah.get(), b, 64), 0);
  ibv_wc wc = PollOne(b.cq());
  ibv_ah_attr attr = {};
  ASSERT_EQ(ibv_init_ah_from_wc(b.context(), 1, &wc, reinterpret_cast<ibv_grh*>(b.memory().data()),
                                &attr),
            0);
  const ibv_gid expected = a.gid();
  EXPECT_EQ(attr.is_global, 1);
  EXPECT_EQ(attr.port_num, 1);
  EXPECT_EQ(attr.grh.sgid_index, 1);
  EXPECT_EQ(attr.grh.traffic_class, 0x68);
  EXPECT_EQ(memcmp(attr.grh.dgid.raw, expected.raw, 16), 0);
}

TEST(OtherCalls, ARegionIsAddressedByTheIovaThatItWasGiven) {
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b);
  Memory local(a.pd(), 64);
  uint8_t bytes[64] = {};
  constexpr uint64_t kIova = 0x7000'0000'0000;
  // The optional flag makes ibv_reg_mr itself call it.
  for (const unsigned access : {kAllAccess, kAllAccess | IBV_ACCESS_RELAXED_ORDERING}) {
    const Owned<ibv_mr> mr(ibv_reg_mr_iova2(b.pd(), bytes, sizeof bytes, kIova, access));
    ASSERT_NE(mr, nullptr);
    FillPattern(local.bytes(), access);
    ASSERT_EQ(a.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, kIova + 8, mr->rkey), {local.sge(0, 16)}), 0);
    EXPECT_EQ(PollOne(a.send_cq()).status, IBV_WC_SUCCESS);
    EXPECT_EQ(PatternMismatch(std::span(bytes).subspan(8, 16), access), std::nullopt);
  }
}

// A buffer of udmabuf; the page cache of a memfd is behind it.
TEST(OtherCalls, ADmaBufIsReadAndWritten) {
  const int device = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
  if (device < 0) GTEST_SKIP() << "no exporter of dma-bufs: /dev/udmabuf: " << strerror(errno);
  const size_t bytes = static_cast<size_t>(getpagesize()) * 4;
  const int file = memfd_create("dmabuf", MFD_ALLOW_SEALING | MFD_CLOEXEC);
  ASSERT_GE(file, 0);
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(bytes)), 0);
  ASSERT_EQ(fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  udmabuf_create create = {};
  create.memfd = static_cast<uint32_t>(file);
  create.size = bytes;
  const int buffer = ioctl(device, UDMABUF_CREATE, &create);
  close(device);
  ASSERT_GE(buffer, 0) << strerror(errno);
  uint8_t* const view =
      static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  ASSERT_NE(view, MAP_FAILED);
  {
    RcEnd a, b(EndOptions{.device = "verbena1"});
    ConnectPair(a, b);
    Memory local(a.pd(), 4096);
    constexpr uint64_t kIova = 0x10000;
    const Owned<ibv_mr> mr(ibv_reg_dmabuf_mr(b.pd(), 4096, 8192, kIova, buffer, kAllAccess));
    ASSERT_NE(mr, nullptr) << strerror(errno);
    FillPattern(local.bytes(), 1);
    ASSERT_EQ(a.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, kIova, mr->rkey), {local.sge(0, 4096)}), 0);
    const ibv_wc wc = PollOne(a.send_cq());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    EXPECT_EQ(PatternMismatch({view + 4096, 4096}, 1), std::nullopt);
  }
  munmap(view, bytes);
  close(buffer);
  close(file);
}

TEST(OtherCalls, WhatIsNoDmaBufIsRefused) {
  const auto context = OpenDevice();
  const Owned<ibv_pd> pd(ibv_alloc_pd(context.get()));
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  for (const int fd : {-1, ends[0]}) {
    errno = 0;
    EXPECT_EQ(ibv_reg_dmabuf_mr(pd.get(), 0, 4096, 0, fd, IBV_ACCESS_LOCAL_WRITE), nullptr);
    EXPECT_TRUE(errno == EBADF || errno == EINVAL) << strerror(errno);
  }
  close(ends[0]);
  close(ends[1]);
}

TEST(OtherCalls, NoOrderWithinAMessageIsPromised) {
  RcEnd end;
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    EXPECT_EQ(ibv_query_qp_data_in_order(end.qp(), opcode, 0), 0);
  }
}

// docs/VERBS.md, the last table.
TEST(OtherCalls, OffloadsOfSingleVendorsAreNotSupported) {
  RcEnd end;
  ibv_ece ece = {.vendor_id = 0x15b3, .options = 1, .comp_mask = 0};
  EXPECT_EQ(ibv_set_ece(end.qp(), &ece), EOPNOTSUPP);
  EXPECT_EQ(ibv_query_ece(end.qp(), &ece), EOPNOTSUPP);
  ibv_srq_init_attr init = {nullptr, {16, 1, 0}};
  const Owned<ibv_srq> srq(ibv_create_srq(end.pd(), &init));
  ASSERT_NE(srq, nullptr);
  ibv_ops_wr wr = {};
  ibv_ops_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_srq_ops(srq.get(), &wr, &bad), EOPNOTSUPP);
  ibv_flow_action_esp_attr esp = {};
  errno = 0;
  EXPECT_EQ(ibv_create_flow_action_esp(end.context(), &esp), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  ibv_td_init_attr td = {.comp_mask = 1u << 9};
  errno = 0;
  EXPECT_EQ(ibv_alloc_td(end.context(), &td), nullptr);
  EXPECT_TRUE(errno == EINVAL || errno == EOPNOTSUPP) << strerror(errno);
}

TEST(OtherCalls, TypesOfQpsThatCanBeMadeAreToldBySupportedQpts) {
  const auto context = OpenDevice();
  ibv_device_attr_ex attr = {};
  ASSERT_EQ(ibv_query_device_ex(context.get(), nullptr, &attr), 0);
  // The WQs of RSS serve raw packet QPs alone.
  EXPECT_TRUE(ibv_is_qpt_supported(attr.rss_caps.supported_qpts, IBV_QPT_RAW_PACKET));
  EXPECT_FALSE(ibv_is_qpt_supported(attr.rss_caps.supported_qpts, IBV_QPT_RC));
}

TEST(OtherCalls, ADestroyedQpWaitsForItsEventsToBeAcknowledged) {
  auto a = std::make_unique<RcEnd>();
  RcEnd b(EndOptions{.device = "verbena1"});
  ConnectPair(*a, b);
  Memory source(b.pd(), 64);
  const auto context = a->context();
  ASSERT_EQ(b.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, 0, 1), {source.sge(0, 8)}), 0);
  EXPECT_EQ(PollOne(b.send_cq()).status, IBV_WC_REM_ACCESS_ERR);
  ibv_async_event event = {};
  do {
    if (event.event_type == IBV_EVENT_COMM_EST) ibv_ack_async_event(&event);
    ASSERT_EQ(ibv_get_async_event(context, &event), 0);
  } while (event.event_type == IBV_EVENT_COMM_EST);
  EXPECT_EQ(event.event_type, IBV_EVENT_QP_ACCESS_ERR);
  std::atomic<bool> destroyed{false};
  std::thread destroyer([&] {
    a->DestroyQp();
    destroyed = true;
  });
  std::this_thread::sleep_for(Milliseconds(50));
  EXPECT_FALSE(destroyed);
  ibv_ack_async_event(&event);
  destroyer.join();
}

}  // namespace
}  // namespace verbena::testing
