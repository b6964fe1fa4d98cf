// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: NICs that go, come back and change, as ucma and cma of Linux tell it.
#include <gtest/gtest.h>

#include <cerrno>
#include <set>

#include "nic_sim/cm/cm_agent.h"
#include "tests/unit/nic_sim/cm/cm_network.h"

namespace verbena::nic {
namespace {

using transport::CmAttribute;
using transport::Duration;

constexpr uint16_t kPortNumber = 7174;

// Host A has two NICs, host B one.
class DeviceEvents : public ::testing::Test {
 protected:
  void Remove(CmHost& host, uint32_t nic) {
    host.agent().RemoveNic(nic, network_.now());
    network_.Drain();
  }
  // A connection from A's first NIC to B; events taken. The ids of both ends.
  std::pair<uint32_t, uint32_t> Connect() {
    const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
    EXPECT_EQ(client_.Connect(id, 0x111), 0);
    network_.Run();
    const uint32_t child = server_.Expect(kConnectRequest).id;
    EXPECT_EQ(server_.Accept(child, 0x222, 0xbeef), 0);
    network_.Run();
    client_.Expect(kConnectResponse);
    EXPECT_EQ(client_.Establish(id), 0);
    network_.Run();
    server_.Expect(kEstablished);
    return {id, child};
  }

  CmNetwork network_;
  CmHost& a_ = network_.AddHost({{"10.0.0.1/24"}, {"10.0.1.1/24"}});
  CmHost& b_ = network_.AddHost({{"10.0.0.2/24"}});
  CmApp client_{a_, network_, {.pid = 1, .uid = 100}};
  CmApp server_{b_, network_, {.pid = 2, .uid = 200}};
};

TEST_F(DeviceEvents, RemovalIsToldToEachIdOfTheNicAndNoOther) {
  const uint32_t first = client_.Resolved(At("10.0.0.2", kPortNumber));
  const uint32_t listener = client_.Listening(At("10.0.0.1", 1700));
  client_.Listening(At("10.0.1.1", 1700));
  client_.Listening(At("0.0.0.0", 1800));
  client_.Create();
  Remove(a_, 0);
  std::set<uint32_t> told = {client_.Expect(kDeviceRemoval).id, client_.Expect(kDeviceRemoval).id};
  EXPECT_EQ(told, (std::set<uint32_t>{first, listener}));
  client_.ExpectNoEvent();
  Remove(a_, 0);  // Once is enough.
  client_.ExpectNoEvent();
}

TEST_F(DeviceEvents, AnIdWhoseNicIsGoneCanOnlyBeDestroyed) {
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  const uint32_t listener = client_.Listening(At("10.0.0.1", 1700));
  Remove(a_, 0);
  EXPECT_EQ(client_.Connect(id, 1), ENXIO);
  EXPECT_EQ(client_.Disconnect(id), ENXIO);
  EXPECT_EQ(client_.Bind(id, At("10.0.1.1")), ENXIO);
  EXPECT_EQ(client_.SetIntOption(id, RDMA_OPTION_ID_REUSEADDR, 1), ENXIO);
  ib_uverbs_qp_attr attr;
  EXPECT_EQ(client_.QpAttr(id, 1, &attr), ENXIO);
  EXPECT_EQ(client_.Listen(listener), ENXIO);
  EXPECT_EQ(client_.Listen(0x7777), ENOENT);
  // Event or not, the number of those that were fetched is right.
  client_.Expect(kDeviceRemoval);
  uint32_t reported = 0;
  EXPECT_EQ(client_.Destroy(id, &reported), 0);
  EXPECT_EQ(reported, 3u);  // address, route, removal
  EXPECT_EQ(client_.Destroy(listener, &reported), 0);
  EXPECT_EQ(reported, 0u);
  client_.ExpectNoEvent();
  EXPECT_EQ(a_.agent().id_count(), 0u);
  EXPECT_EQ(a_.readable[client_.file()], 0);
}

TEST_F(DeviceEvents, ThePeerOfAConnectionIsDisconnected) {
  server_.Listening(At("0.0.0.0", kPortNumber));
  const auto [id, child] = Connect();
  Remove(a_, 0);
  client_.Expect(kDeviceRemoval);
  network_.Run();
  EXPECT_EQ(network_.CountSent(CmAttribute::kDreq), 1u);
  EXPECT_EQ(server_.Expect(kDisconnected).id, child);
  network_.Run(Duration::Seconds(200));
  client_.ExpectNoEvent();  // neither DISCONNECTED nor TIMEWAIT_EXIT
  EXPECT_EQ(client_.Destroy(id), 0);
}

TEST_F(DeviceEvents, ARequestThatNobodyHasTakenIsRejectedAndItsIdStays) {
  const uint32_t listener = server_.Listening(At("10.0.0.2", kPortNumber));
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run();
  Remove(b_, 0);
  network_.Run();
  EXPECT_EQ(client_.GetEvent()->event, uint32_t{kRejected});
  const uint32_t child = server_.Expect(kConnectRequest).id;
  EXPECT_EQ(server_.Expect(kDeviceRemoval).id, listener);  // A child without an owner has no event.
  server_.ExpectNoEvent();
  EXPECT_EQ(server_.Accept(child, 0x222, 0xbeef), ENXIO);
  EXPECT_EQ(server_.Reject(child), ENXIO);
  EXPECT_EQ(server_.Destroy(child), 0);
  EXPECT_EQ(server_.Destroy(listener), 0);
  EXPECT_EQ(b_.agent().id_count(), 0u);
}

TEST_F(DeviceEvents, WithoutTheNicItsAddressesLeadNowhere) {
  Remove(a_, 0);
  const uint32_t bound = client_.Create();
  EXPECT_EQ(client_.Bind(bound, At("10.0.0.1", 1700)), ENODEV);
  EXPECT_EQ(client_.Bind(bound, At("10.0.1.1", 1700)), 0);
  const uint32_t id = client_.Create();
  EXPECT_EQ(client_.ResolveAddr(id, At("10.0.0.2", kPortNumber)), 0);
  EXPECT_EQ(client_.Expect(kAddrError, -ENODEV).id, id);
  a_.agent().RestoreNic(0);
  EXPECT_EQ(client_.ResolveAddr(id, At("10.0.0.2", kPortNumber)), 0);
  EXPECT_EQ(client_.Expect(kAddrResolved).id, id);
  // The port of an id that was closed is free again.
  const uint32_t again = client_.Create();
  EXPECT_EQ(client_.Bind(again, At("10.0.0.1", 1701)), 0);
  Remove(a_, 0);
  a_.agent().RestoreNic(0);
  const uint32_t next = client_.Create();
  EXPECT_EQ(client_.Bind(next, At("10.0.0.1", 1701)), 0);
}

TEST_F(DeviceEvents, AWildcardListenerServesTheNicAgainAfterItsReturn) {
  server_.Listening(At("0.0.0.0", kPortNumber));
  Remove(b_, 0);
  server_.ExpectNoEvent();
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run();
  server_.ExpectNoEvent();
  b_.agent().RestoreNic(0);
  network_.Run(Duration::Seconds(10));  // The request is repeated.
  server_.Expect(kConnectRequest);
}

TEST_F(DeviceEvents, GroupsAreLeftWithTheNic) {
  const uint32_t id = client_.Create(RDMA_PS_UDP);
  EXPECT_EQ(client_.Bind(id, At("10.0.0.1")), 0);
  rdma_ucm_join_mcast join{};
  join.uid = 5;
  join.id = id;
  const SocketAddress group = At("239.1.2.3");
  join.addr_size = group.size();
  group.Store(reinterpret_cast<std::byte*>(&join.addr));
  rdma_ucm_create_id_resp joined{};
  ASSERT_EQ(client_.Call(RDMA_USER_CM_CMD_JOIN_MCAST, join, &joined, sizeof(joined)), 0);
  EXPECT_EQ(a_.groups.size(), 1u);
  Remove(a_, 0);
  for (const auto& [key, count] : a_.groups) EXPECT_EQ(count, 0);
  client_.Expect(kMulticastJoin);
  client_.Expect(kDeviceRemoval);
  uint32_t reported = 0;
  EXPECT_EQ(client_.Destroy(id, &reported), 0);
  EXPECT_EQ(reported, 2u);
}

TEST_F(DeviceEvents, AChangedAddressIsToldAndNothingElseHappens) {
  server_.Listening(At("0.0.0.0", kPortNumber));
  const auto [id, child] = Connect();
  const uint32_t other = client_.Create();
  EXPECT_EQ(client_.Bind(other, At("10.0.1.1")), 0);
  a_.agent().AnnounceAddressChange(0, network_.now());
  network_.Drain();
  EXPECT_EQ(client_.Expect(kAddrChange).id, id);
  client_.ExpectNoEvent();
  EXPECT_EQ(client_.Disconnect(id), 0);
  network_.Run();
  EXPECT_EQ(server_.Expect(kDisconnected).id, child);
}

TEST_F(DeviceEvents, AListingTellsWhoseAnIdIs) {
  client_.Listening(At("10.0.0.1", 1700));
  a_.agent().ForEachId([](const CmIdInfo& info) { EXPECT_EQ(info.uid, 100u); });
  Remove(a_, 0);
  int seen = 0;
  a_.agent().ForEachId([&](const CmIdInfo&) { ++seen; });
  EXPECT_EQ(seen, 0);
}

}  // namespace
}  // namespace verbena::nic
