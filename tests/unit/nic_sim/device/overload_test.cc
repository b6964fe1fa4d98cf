// SPDX-License-Identifier: Apache-2.0
//
// An engine that has more to do than it can: packets wait in its queues for longer than the ACK
// timeout. Virtual clock, one pass at a time.
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "nic_sim/device/device.h"
#include "tests/unit/nic_sim/device/raw_client.h"
#include "transport/base/time.h"
#include "transport/verbs_types.h"

namespace verbena::testing {
namespace {

using transport::Duration;
using transport::Time;
using transport::WcStatus;
using transport::WrOpcode;

constexpr uint32_t kMessageBytes = 8192;  // eight packets
constexpr uint32_t kMessages = 60;        // of each QP
constexpr int kPairs = 4;
constexpr uint8_t kTimeout = 8;  // 1.05 ms

class Overload : public ::testing::Test {
 protected:
  Overload() {
    nic::DeviceOptions options;
    options.instance = "overload-" + std::to_string(getpid());
    options.run_folder = "/tmp";
    options.nics = 2;
    options.mode = nic::DeviceOptions::Mode::kManual;
    std::string error;
    device_ = nic::Device::Start(options, &error);
    EXPECT_NE(device_, nullptr) << error;
  }
  int64_t Timeouts() const {
    return device_
        ->Counters("verbena0")["devices"]["verbena0"]["hw_counters"]["local_ack_timeout_err"]
        .get<int64_t>();
  }

  std::unique_ptr<nic::Device> device_;
};

TEST_F(Overload, WhatWaitsInTheEnginesQueuesIsNotSentAgainAndWhatIsLostIs) {
  ASSERT_NE(device_, nullptr);
  RawClient a(*device_, 0);
  RawClient b(*device_, 1);
  RawClient::Cq a_cq = a.CreateCq(1024);
  RawClient::Cq b_cq = b.CreateCq(1024);
  std::vector<std::byte> from(kMessageBytes, std::byte{7}), to(kMessageBytes);
  abi::SendWqe wqe{};
  wqe.opcode = static_cast<uint8_t>(WrOpcode::kRdmaWrite);
  wqe.flags = abi::kWqeSignaled;
  wqe.remote_address = reinterpret_cast<uint64_t>(to.data());
  wqe.rkey = b.RegMr(to.data(), kMessageBytes, 15);
  const uint32_t from_key = a.RegMr(from.data(), kMessageBytes, 1);
  const std::vector<abi::Sge> sges = {
      {reinterpret_cast<uint64_t>(from.data()), kMessageBytes, from_key}};
  std::vector<RawClient::Qp> qps;
  for (int i = 0; i < kPairs; ++i) {
    qps.push_back(a.CreateQp(a_cq, a_cq));
    RawClient::Qp peer = b.CreateQp(b_cq, b_cq);
    ASSERT_EQ(a.Connect(qps.back(), peer.qpn, b.gid(), 7, kTimeout), 0);
    ASSERT_EQ(b.Connect(peer, qps.back().qpn, a.gid(), 7, kTimeout), 0);
    for (uint32_t n = 0; n < kMessages; ++n) a.WriteSend(qps.back(), wqe, sges);
  }
  for (RawClient::Qp& qp : qps) a.Ring(qp);

  Time now = Time::FromNanoseconds(1'000'000'000);
  uint32_t done = 0;
  const auto run = [&](Duration pass, uint32_t until) {
    for (int i = 0; i < 100'000 && done < until; ++i) {
      device_->RunPass(now);
      now += pass;
      while (const auto cqe = a.Poll(a_cq, 0)) {
        ASSERT_EQ((*cqe)->status, static_cast<uint32_t>(WcStatus::kSuccess));
        ++done;
      }
    }
  };
  run(Duration::Milliseconds(2), kPairs * kMessages);
  ASSERT_EQ(done, kPairs * kMessages);
  EXPECT_EQ(Timeouts(), 0);

  // With empty queues a lost packet is sent again when its time has come.
  std::string error;
  ASSERT_NE(device_->AddRule("drop opcode=write nth=1", &error), 0u) << error;
  const Time start = now;
  wqe.wr_id = 1;
  a.WriteSend(qps[0], wqe, {{sges[0].address, 8, from_key}});
  a.Ring(qps[0]);
  run(Duration::Microseconds(50), kPairs * kMessages + 1);
  ASSERT_EQ(done, kPairs * kMessages + 1);
  EXPECT_EQ(Timeouts(), 1);
  EXPECT_GE(now - start, Duration::Microseconds(1048));
  EXPECT_LT(now - start, Duration::Milliseconds(5));
}

}  // namespace
}  // namespace verbena::testing
