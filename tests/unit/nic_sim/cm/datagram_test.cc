// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: datagram services when their answer is lost, and addresses of
// InfiniBand fabrics, as Linux treats them.
#include <gtest/gtest.h>

#include <cerrno>

#include "nic_sim/cm/cm_agent.h"
#include "tests/unit/nic_sim/cm/cm_network.h"

namespace verbena::nic {
namespace {

using transport::CmAttribute;
using transport::Duration;

constexpr uint16_t kPortNumber = 7174;

class LostAnswer : public ::testing::Test {
 protected:
  // The server has accepted, and its answer is lost.
  void AskInVain() {
    server_.Listening(At("0.0.0.0", kPortNumber), RDMA_PS_UDP);
    id_ = client_.Resolved(At("10.0.0.2", kPortNumber), RDMA_PS_UDP);
    network_.loses = [this](size_t, CmAttribute attribute) {
      return attribute == CmAttribute::kSidrRep && lost_++ == 0;
    };
    EXPECT_EQ(client_.Connect(id_, 0x111), 0);
    network_.Run();
    first_ = server_.Expect(kConnectRequest).id;
    EXPECT_EQ(server_.Accept(first_, 0x222, 0xbeef), 0);
    network_.Run();
    client_.ExpectNoEvent();
  }

  CmNetwork network_;
  CmHost& a_ = network_.AddHost({{"10.0.0.1/24"}});
  CmHost& b_ = network_.AddHost({{"10.0.0.2/24"}});
  CmApp client_{a_, network_, {.pid = 1, .uid = 100}};
  CmApp server_{b_, network_, {.pid = 2, .uid = 100}};
  uint32_t id_ = 0;
  uint32_t first_ = 0;
  int lost_ = 0;
};

// ib_cm forgets a request that it has answered. The active side repeats its
// request, and the service's program sees another one.
TEST_F(LostAnswer, TheRepeatedRequestIsANewOneForTheServer) {
  AskInVain();
  network_.Run(Duration::Milliseconds(4200));
  EXPECT_EQ(network_.CountSent(CmAttribute::kSidrReq), 2u);
  const uint32_t second = server_.Expect(kConnectRequest).id;
  EXPECT_NE(second, first_);
  EXPECT_EQ(server_.Accept(second, 0x223, 0xcafe), 0);
  network_.Run();
  const auto event = client_.Expect(kEstablished);
  EXPECT_EQ(event.param.ud.qp_num, 0x223u);
  server_.ExpectNoEvent();
}

TEST_F(LostAnswer, AServerThatAnswersNoMoreLetsTheClientGiveUp) {
  AskInVain();
  network_.Run(Duration::Seconds(60));
  server_.Expect(kConnectRequest);  // The repetitions of that one are known.
  server_.ExpectNoEvent();
  client_.ExpectNoEvent();
  network_.Run(Duration::Seconds(7));
  EXPECT_EQ(client_.Expect(kUnreachable, -ETIMEDOUT).id, id_);
  EXPECT_EQ(network_.CountSent(CmAttribute::kSidrReq), 16u);
}

class FabricAddresses : public LostAnswer {
 protected:
  static SocketAddress FabricAddress(const char* gid) {
    SocketAddress address;
    address.family = kFamilyIb;
    address.ip = At(gid).ip;
    address.service_id = (uint64_t{RDMA_PS_TCP} << 16) | 1800;
    address.service_mask = ~uint64_t{0};
    return address;
  }
};

// Ports of RoCE have no capability for AF_IB, whatever their GIDs are.
TEST_F(FabricAddresses, LeadToNoPortOfRoce) {
  const uint32_t id = client_.Create(RDMA_PS_IB, 2);
  EXPECT_EQ(client_.Bind(id, FabricAddress("10.0.0.1")), ENODEV);
  EXPECT_EQ(client_.Bind(id, FabricAddress("fe80::1234")), ENODEV);
  EXPECT_EQ(client_.ResolveAddr(id, FabricAddress("10.0.0.2")), ENODEV);
  client_.ExpectNoEvent();
  EXPECT_EQ(client_.Destroy(id), 0);
}

}  // namespace
}  // namespace verbena::nic
