// SPDX-License-Identifier: Apache-2.0
//
// Stock libibverbs with our provider and preload in this process, over the
// fake device: nothing below verbs is called directly.
#pragma once

#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <cerrno>

#include "tests/unit/provider/fake_device.h"

namespace verbena::provider {

class OpenedDevice : public ::testing::Test {
 protected:
  OpenedDevice() : device_(FakeDevice::Get()) {}

  void SetUp() override {
    int count = 0;
    list_ = ibv_get_device_list(&count);
    ASSERT_NE(list_, nullptr) << errno;
    ASSERT_EQ(count, 1);
    context_ = ibv_open_device(list_[0]);
    ASSERT_NE(context_, nullptr) << errno;
    device_.status()->mode = abi::kEngineThreadPerCpu;
  }

  void TearDown() override {
    device_.status()->device_dead = 0;
    if (context_ != nullptr) {
      EXPECT_EQ(ibv_close_device(context_), 0);
    }
    if (list_ != nullptr) ibv_free_device_list(list_);
    EXPECT_TRUE(device_.WaitForNoClients());
  }

  FakeDevice& device_;
  ibv_device** list_ = nullptr;
  ibv_context* context_ = nullptr;
};

// A QP with a send queue and a receive queue of 4, in RTS; two CQs of 4 and 8.
class QpInRts : public OpenedDevice {
 protected:
  static constexpr uint32_t kDepth = 4;
  static constexpr uint32_t kMaxInline = 100;

  void SetUp() override {
    OpenedDevice::SetUp();
    ASSERT_NE(context_, nullptr);
    pd_ = ibv_alloc_pd(context_);
    send_cq_ = ibv_create_cq(context_, 4, nullptr, nullptr, 0);
    recv_cq_ = ibv_create_cq(context_, 8, nullptr, nullptr, 0);
    ASSERT_TRUE(pd_ != nullptr && send_cq_ != nullptr && recv_cq_ != nullptr);
    qp_ = MakeQp();
    ASSERT_NE(qp_, nullptr) << errno;
    MoveTo(IBV_QPS_RTS);
  }

  void TearDown() override {
    device_.status()->device_dead = 0;
    if (qp_ != nullptr) {
      EXPECT_EQ(ibv_destroy_qp(qp_), 0);
    }
    EXPECT_EQ(ibv_destroy_cq(send_cq_), 0);
    EXPECT_EQ(ibv_destroy_cq(recv_cq_), 0);
    EXPECT_EQ(ibv_dealloc_pd(pd_), 0);
    OpenedDevice::TearDown();
  }

  ibv_qp* MakeQp() {
    ibv_qp_init_attr attr = {};
    attr.qp_context = this;
    attr.send_cq = send_cq_;
    attr.recv_cq = recv_cq_;
    attr.cap = {kDepth, kDepth, 3, 2, kMaxInline};
    attr.qp_type = IBV_QPT_RC;
    return ibv_create_qp(pd_, &attr);
  }

  void MoveTo(ibv_qp_state state) {
    ibv_qp_attr attr = {};
    attr.qp_state = state;
    ASSERT_EQ(ibv_modify_qp(qp_, &attr, IBV_QP_STATE), 0);
  }

  FakeDevice::QpView View() { return device_.Qp(qp_->handle); }
  abi::QpRecord& Record() { return device_.page()->qp[qp_->handle]; }
  bool DoorbellBit() {
    const uint32_t slot = qp_->handle;
    const bool bit = (device_.page()->doorbell_bits[slot / 64] >> (slot % 64) & 1) != 0;
    const bool summary =
        (device_.page()->doorbell_summary[slot / 64 / 64] >> (slot / 64 % 64) & 1) != 0;
    EXPECT_EQ(bit, summary);
    return bit;
  }
  void ClearDoorbell() {
    device_.page()->doorbell_summary[qp_->handle / 64 / 64] = 0;
    device_.page()->doorbell_bits[qp_->handle / 64] = 0;
  }

  // One SEND without data.
  int PostSend(uint64_t wr_id) {
    ibv_send_wr wr = {};
    wr.wr_id = wr_id;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp_, &wr, &bad);
  }
  int PostRecv(uint64_t wr_id) {
    ibv_recv_wr wr = {};
    wr.wr_id = wr_id;
    ibv_recv_wr* bad = nullptr;
    return ibv_post_recv(qp_, &wr, &bad);
  }
  void CompleteSend(uint32_t index, uint64_t wr_id = 0) {
    device_.Complete(send_cq_->handle,
                     {.qp = qp_->handle, .send = true, .wqe_index = index, .wr_id = wr_id});
  }

  ibv_pd* pd_ = nullptr;
  ibv_cq* send_cq_ = nullptr;
  ibv_cq* recv_cq_ = nullptr;
  ibv_qp* qp_ = nullptr;
};

}  // namespace verbena::provider
