// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: connections of two hosts, as librdmacm sees them.
#include "nic_sim/cm/cm_agent.h"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <memory>
#include <random>

#include "tests/unit/nic_sim/cm/cm_network.h"
#include "transport/base/byteorder.h"

namespace verbena::nic {
namespace {

using transport::CmAttribute;
using transport::Duration;
using transport::Gid;

constexpr uint16_t kPortNumber = 7174;

class TwoHosts : public ::testing::Test {
 protected:
  // A child of `listener` whose request has come.
  uint32_t Request(const std::string& data = "") {
    const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
    EXPECT_EQ(client_.Connect(id, 0x111, data), 0);
    network_.Run();
    const auto event = server_.Expect(kConnectRequest);
    child_ = event.id;
    request_ = event;
    return id;
  }
  // Connected on both sides; events taken.
  uint32_t Connected() {
    const uint32_t id = Request();
    EXPECT_EQ(server_.Accept(child_, 0x222, 0xbeef), 0);
    network_.Run();
    client_.Expect(kConnectResponse);
    EXPECT_EQ(client_.Establish(id), 0);
    network_.Run();
    EXPECT_EQ(server_.Expect(kEstablished).uid, 0xbeefu);
    return id;
  }

  CmNetwork network_;
  CmHost& a_ = network_.AddHost({{"10.0.0.1/24", "fd00::1/64"}});
  CmHost& b_ = network_.AddHost({{"10.0.0.2/24", "fd00::2/64"}});
  CmApp client_{a_, network_, {.pid = 1, .uid = 100}};
  CmApp server_{b_, network_, {.pid = 2, .uid = 100}};
  uint32_t child_ = 0;
  rdma_ucm_event_resp request_{};
};

TEST_F(TwoHosts, ConnectAcceptDisconnect) {
  const uint32_t listener = server_.Listening(At("0.0.0.0", kPortNumber));
  const uint32_t id = Request("hello");
  EXPECT_EQ(request_.uid, 0xabc0u);  // the listener's
  EXPECT_NE(request_.id, listener);
  const rdma_ucm_conn_param& param = request_.param.conn;
  EXPECT_EQ(TextOf(param), "hello");
  EXPECT_EQ(param.private_data_len, 56);
  EXPECT_EQ(param.qp_num, 0x111u);
  EXPECT_EQ(param.responder_resources, 6);  // seen from this side
  EXPECT_EQ(param.initiator_depth, 4);
  EXPECT_EQ(param.retry_count, 7);
  EXPECT_EQ(param.rnr_retry_count, 5);

  EXPECT_EQ(server_.Accept(child_, 0x222, 0xbeef, "welcome"), 0);
  network_.Run();
  const auto response = client_.Expect(kConnectResponse);
  EXPECT_EQ(response.id, id);
  EXPECT_EQ(TextOf(response.param.conn), "welcome");
  EXPECT_EQ(response.param.conn.private_data_len, 196);
  EXPECT_EQ(response.param.conn.qp_num, 0x222u);
  EXPECT_EQ(client_.Establish(id), 0);
  network_.Run();
  const auto established = server_.Expect(kEstablished);
  EXPECT_EQ(established.uid, 0xbeefu);
  EXPECT_EQ(established.id, child_);

  EXPECT_EQ(client_.Disconnect(id), 0);
  network_.Run();
  server_.Expect(kDisconnected);
  client_.ExpectNoEvent();  // until the server agrees
  EXPECT_EQ(server_.Disconnect(child_), 0);
  network_.Run();
  client_.Expect(kDisconnected);
  network_.Run(Duration::Seconds(3));
  client_.Expect(kTimewaitExit);
  server_.Expect(kTimewaitExit);
  client_.ExpectNoEvent();
  server_.ExpectNoEvent();

  uint32_t reported = 0;
  EXPECT_EQ(client_.Destroy(id, &reported), 0);
  EXPECT_EQ(reported, 5u);  // address, route, response, disconnected, timewait
  EXPECT_EQ(server_.Destroy(child_, &reported), 0);
  EXPECT_EQ(reported, 3u);
  EXPECT_EQ(server_.Destroy(listener, &reported), 0);
  EXPECT_EQ(reported, 1u);  // the connect request counts for the listener
  EXPECT_EQ(a_.agent().id_count(), 0u);
  EXPECT_EQ(b_.agent().id_count(), 0u);
  EXPECT_TRUE(a_.agent().next_timeout().IsNever());
  EXPECT_TRUE(b_.agent().next_timeout().IsNever());
}

TEST_F(TwoHosts, BothDisconnectAtOnce) {
  server_.Listening(At("0.0.0.0", kPortNumber));
  const uint32_t id = Connected();
  EXPECT_EQ(client_.Disconnect(id), 0);
  EXPECT_EQ(server_.Disconnect(child_), 0);
  network_.Run();
  client_.Expect(kDisconnected);
  server_.Expect(kDisconnected);
  EXPECT_EQ(client_.Destroy(id), 0);
  EXPECT_EQ(server_.Destroy(child_), 0);
  network_.Run(Duration::Seconds(10));
  client_.ExpectNoEvent();
  server_.ExpectNoEvent();
}

// An application that ends without a word: close() of its file.
TEST_F(TwoHosts, ClosedFileDisconnects) {
  const uint32_t listener = server_.Listening(At("0.0.0.0", kPortNumber));
  Connected();
  client_.Close();
  EXPECT_EQ(a_.agent().id_count(), 0u);
  network_.Run();
  EXPECT_EQ(server_.Expect(kDisconnected).id, child_);
  // And a request that nobody has looked at is rejected when the server ends.
  CmApp other(a_, network_);
  const uint32_t id = other.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(other.Connect(id, 0x333), 0);
  network_.Run();
  EXPECT_EQ(b_.agent().pending_events(server_.file()), 1u);
  server_.Close();
  network_.Run();
  other.Expect(kRejected, 28);
  EXPECT_EQ(b_.agent().id_count(), 0u);
  (void)listener;
}

TEST_F(TwoHosts, RejectTellsReasonAndData) {
  server_.Listening(At("0.0.0.0", kPortNumber));
  const uint32_t id = Request();
  EXPECT_EQ(server_.Reject(child_, "full", 7), EINVAL);  // only two reasons may be given
  EXPECT_EQ(server_.Reject(child_, "full"), 0);
  network_.Run();
  const auto rejected = client_.Expect(kRejected, 28);
  EXPECT_EQ(rejected.id, id);
  EXPECT_EQ(TextOf(rejected.param.conn), "full");
  EXPECT_EQ(rejected.param.conn.private_data_len, 148);
}

TEST_F(TwoHosts, ActiveSideMayRejectTheAnswer) {
  server_.Listening(At("0.0.0.0", kPortNumber));
  const uint32_t id = Request();
  EXPECT_EQ(server_.Accept(child_, 0x222, 0xbeef), 0);
  network_.Run();
  client_.Expect(kConnectResponse);
  EXPECT_EQ(client_.Reject(id, "no", 35), 0);
  network_.Run();
  EXPECT_EQ(TextOf(server_.Expect(kRejected, 35).param.conn), "no");
}

TEST_F(TwoHosts, DestroyOfARequestRejectsIt) {
  server_.Listening(At("0.0.0.0", kPortNumber));
  Request();
  EXPECT_EQ(server_.Destroy(child_), 0);
  network_.Run();
  client_.Expect(kRejected, 28);
}

TEST_F(TwoHosts, ClosedPortRejectsWithReason8) {
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run();
  client_.Expect(kRejected, 8);
}

// qperf tells its client the port before it listens.
TEST_F(TwoHosts, RequestForABoundPortWaitsAMomentForTheListener) {
  const uint32_t listener = server_.Create();
  ASSERT_EQ(server_.Bind(listener, At("0.0.0.0", kPortNumber)), 0);
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run(Duration::Milliseconds(50));
  client_.ExpectNoEvent();
  ASSERT_EQ(server_.Listen(listener), 0);
  server_.Expect(kConnectRequest);
  network_.Run(Duration::Milliseconds(1000));
  client_.ExpectNoEvent();
  EXPECT_EQ(network_.CountSent(CmAttribute::kReq), 1u);
}

TEST_F(TwoHosts, RequestForABoundPortIsRejectedIfNobodyListensSoon) {
  const uint32_t bound = server_.Create();
  ASSERT_EQ(server_.Bind(bound, At("0.0.0.0", kPortNumber)), 0);
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run(Duration::Milliseconds(550));
  client_.Expect(kRejected, 8);
  EXPECT_EQ(network_.CountSent(CmAttribute::kReq), 1u);
}

// perftest's servers end their listener after the first connection and listen
// anew for the second.
TEST_F(TwoHosts, RequestBehindTheEndOfAListenerWaitsAMomentForTheNext) {
  const uint32_t first = server_.Listening(At("0.0.0.0", kPortNumber));
  ASSERT_EQ(server_.Destroy(first), 0);
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run(Duration::Milliseconds(50));
  client_.ExpectNoEvent();
  server_.Listening(At("0.0.0.0", kPortNumber));
  server_.Expect(kConnectRequest);
}

// The first connection of perftest's datagram programs is a reliable one, on a port of the same
// number.
TEST_F(TwoHosts, DatagramRequestWaitsAMomentWhereAListenerOfTheOtherPortSpaceIsOrWas) {
  for (const bool ends : {false, true}) {
    SCOPED_TRACE(ends);
    const auto port = static_cast<uint16_t>(kPortNumber + ends);
    const uint32_t first = server_.Listening(At("0.0.0.0", port));
    if (ends) {
      ASSERT_EQ(server_.Destroy(first), 0);
    }
    const uint32_t id = client_.Resolved(At("10.0.0.2", port), RDMA_PS_UDP);
    EXPECT_EQ(client_.Connect(id, 0x111), 0);
    network_.Run(Duration::Milliseconds(50));
    client_.ExpectNoEvent();
    server_.Listening(At("0.0.0.0", port), RDMA_PS_UDP);
    server_.Expect(kConnectRequest);
  }
}

TEST_F(TwoHosts, RequestLongAfterTheEndOfAListenerIsRejectedAtOnce) {
  const uint32_t listener = server_.Listening(At("0.0.0.0", kPortNumber));
  ASSERT_EQ(server_.Destroy(listener), 0);
  network_.Run(Duration::Milliseconds(1100));
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run(Duration::Milliseconds(50));
  client_.Expect(kRejected, 8);
}

TEST_F(TwoHosts, UnreachablePeerIsReportedAfterSixteenRequests) {
  network_.loses = [](size_t, CmAttribute) { return true; };
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run(Duration::Milliseconds(6144 * 16 - 1));
  client_.ExpectNoEvent();
  network_.Run(Duration::Milliseconds(1));
  client_.Expect(kUnreachable, -ETIMEDOUT);
  EXPECT_EQ(network_.CountSent(CmAttribute::kReq), 16u);
}

// Which events come when one message is lost, and after how long.
TEST_F(TwoHosts, EveryLossOfOneMessageEndsWithTheSameEvents) {
  for (size_t lost = 0; lost < 5; ++lost) {
    SCOPED_TRACE("message " + std::to_string(lost));
    CmNetwork network;
    CmHost& a = network.AddHost({{"10.0.0.1/24"}});
    CmHost& b = network.AddHost({{"10.0.0.2/24"}});
    network.loses = [&](size_t number, CmAttribute) { return number == lost; };
    CmApp client(a, network);
    CmApp server(b, network);
    server.Listening(At("0.0.0.0", kPortNumber));
    const uint32_t id = client.Resolved(At("10.0.0.2", kPortNumber));
    EXPECT_EQ(client.Connect(id, 0x111), 0);
    network.Run(Duration::Seconds(7));
    const uint32_t child = server.Expect(kConnectRequest).id;
    EXPECT_EQ(server.Accept(child, 0x222, 0xbeef), 0);
    network.Run(Duration::Seconds(7));
    client.Expect(kConnectResponse);
    EXPECT_EQ(client.Establish(id), 0);
    network.Run(Duration::Seconds(7));
    server.Expect(kEstablished);
    EXPECT_EQ(client.Disconnect(id), 0);
    network.Run(Duration::Seconds(7));
    server.Expect(kDisconnected);
    EXPECT_EQ(server.Disconnect(child), 0);
    network.Run(Duration::Seconds(20));
    client.Expect(kDisconnected);
    client.Expect(kTimewaitExit);
    server.Expect(kTimewaitExit);
    client.ExpectNoEvent();
    server.ExpectNoEvent();
  }
}

TEST_F(TwoHosts, QpAttributesFollowTheConnection) {
  server_.Listening(At("0.0.0.0", kPortNumber));
  const uint32_t fresh = client_.Create();
  ib_uverbs_qp_attr attr{};
  EXPECT_EQ(client_.QpAttr(fresh, 1, &attr), EINVAL);  // no device yet
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client_.QpAttr(id, 7, &attr), EINVAL);
  ASSERT_EQ(client_.QpAttr(id, 1, &attr), 0);
  EXPECT_EQ(attr.qp_attr_mask, 0x39u);
  EXPECT_EQ(attr.port_num, 1);
  EXPECT_EQ(attr.qp_state, 1);

  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run();
  EXPECT_EQ(client_.QpAttr(id, 2, &attr), EINVAL);  // no answer yet
  child_ = server_.Expect(kConnectRequest).id;
  ib_uverbs_qp_attr server_rtr{};
  ASSERT_EQ(server_.QpAttr(child_, 2, &server_rtr), 0);
  ib_uverbs_qp_attr server_rts{};
  ASSERT_EQ(server_.QpAttr(child_, 3, &server_rts), 0);
  EXPECT_EQ(server_.Accept(child_, 0x222, 0xbeef), 0);
  network_.Run();
  client_.Expect(kConnectResponse);
  ib_uverbs_qp_attr client_rtr{};
  ASSERT_EQ(client_.QpAttr(id, 2, &client_rtr), 0);
  ib_uverbs_qp_attr client_rts{};
  ASSERT_EQ(client_.QpAttr(id, 3, &client_rts), 0);

  EXPECT_EQ(client_rtr.qp_attr_mask, 0x129181u);
  EXPECT_EQ(client_rtr.dest_qp_num, 0x222u);
  EXPECT_EQ(server_rtr.dest_qp_num, 0x111u);
  EXPECT_EQ(client_rtr.path_mtu, 5u);
  EXPECT_EQ(server_rtr.path_mtu, 5u);
  EXPECT_EQ(client_rtr.ah_attr.is_global, 1);
  EXPECT_EQ(client_rtr.ah_attr.grh.hop_limit, 64);
  EXPECT_EQ(client_rtr.ah_attr.grh.sgid_index, 1);
  EXPECT_EQ(Gid::Load(reinterpret_cast<const std::byte*>(client_rtr.ah_attr.grh.dgid)),
            Gid::FromIpv4(0x0a000002));
  EXPECT_EQ(Gid::Load(reinterpret_cast<const std::byte*>(server_rtr.ah_attr.grh.dgid)),
            Gid::FromIpv4(0x0a000001));
  EXPECT_NE(client_rtr.ah_attr.grh.flow_label, 0u);
  EXPECT_EQ(client_rtr.ah_attr.grh.flow_label, server_rtr.ah_attr.grh.flow_label);
  EXPECT_EQ(client_rtr.rq_psn, server_rts.sq_psn);
  EXPECT_EQ(server_rtr.rq_psn, client_rts.sq_psn);
  EXPECT_EQ(client_rts.qp_attr_mask, 0x12e01u);
  EXPECT_EQ(client_rts.retry_cnt, 7);
  EXPECT_EQ(client_rts.rnr_retry, 3);  // the answer's
  EXPECT_EQ(server_rts.rnr_retry, 5);  // the request's
  EXPECT_EQ(client_rts.timeout, 19);
  EXPECT_EQ(client_rts.max_rd_atomic, 6);
  EXPECT_EQ(client_rtr.max_dest_rd_atomic, 4);
}

TEST_F(TwoHosts, BacklogBoundsRequestsNobodyHasSeen) {
  server_.Listening(At("0.0.0.0", kPortNumber), RDMA_PS_TCP, 2);
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(client_.Connect(client_.Resolved(At("10.0.0.2", kPortNumber)), 0x100 + i), 0);
  }
  network_.Run();
  EXPECT_EQ(b_.agent().pending_events(server_.file()), 2u);
  // The third is not rejected; it comes again, and by then there is room.
  server_.Expect(kConnectRequest);
  server_.Expect(kConnectRequest);
  network_.Run(Duration::Seconds(7));
  server_.Expect(kConnectRequest);
  client_.ExpectNoEvent();
}

TEST_F(TwoHosts, SpecificListenerGoesBeforeTheWildcard) {
  CmApp other(b_, network_);
  const uint32_t first = other.Create();
  EXPECT_EQ(other.Bind(first, At("10.0.0.2", kPortNumber)), 0);
  EXPECT_EQ(other.Listen(first), 0);
  // Another address of the same port is free, but a wildcard would not be.
  const uint32_t second = server_.Create();
  EXPECT_EQ(server_.Bind(second, At("0.0.0.0", kPortNumber)), EADDRNOTAVAIL);
  EXPECT_EQ(server_.Bind(second, At("10.0.0.2", kPortNumber)), EADDRINUSE);
  EXPECT_EQ(server_.Bind(second, At("fd00::2", kPortNumber)), 0);
  EXPECT_EQ(server_.Listen(second), 0);
  const uint32_t v6 = client_.Resolved(At("fd00::2", kPortNumber));
  EXPECT_EQ(client_.Connect(v6, 0x111), 0);
  network_.Run();
  const uint32_t child = server_.Expect(kConnectRequest).id;
  EXPECT_EQ(server_.Source(child).ToString(), "[fd00::2]:7174");
  EXPECT_EQ(server_.Destination(child).ip, Gid::Parse("fd00::1"));
  other.ExpectNoEvent();
}

TEST_F(TwoHosts, ListenerOfAnotherAddressRejects) {
  CmNetwork network;
  CmHost& a = network.AddHost({{"10.0.0.1/24"}});
  CmHost& b = network.AddHost({{"10.0.0.2/24", "10.0.0.3/24"}});
  CmApp client(a, network);
  CmApp server(b, network);
  server.Listening(At("10.0.0.3", kPortNumber));
  const uint32_t id = client.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client.Connect(id, 0x111), 0);
  network.Run();
  client.Expect(kRejected, 28);
}

TEST_F(TwoHosts, Ipv6WildcardTakesIpv4UnlessAskedNotTo) {
  const uint32_t listener = server_.Create();
  EXPECT_EQ(server_.Bind(listener, At("::", kPortNumber)), 0);
  EXPECT_EQ(server_.Listen(listener), 0);
  Request();
  EXPECT_EQ(server_.Source(child_).ToString(), "10.0.0.2:7174");

  CmNetwork network;
  CmHost& a = network.AddHost({{"10.0.0.1/24"}});
  CmHost& b = network.AddHost({{"10.0.0.2/24"}});
  CmApp client(a, network);
  CmApp server(b, network);
  const uint32_t only = server.Create();
  EXPECT_EQ(server.SetIntOption(only, RDMA_OPTION_ID_AFONLY, 1), 0);
  EXPECT_EQ(server.Bind(only, At("::", kPortNumber)), 0);
  EXPECT_EQ(server.Listen(only), 0);
  EXPECT_EQ(client.Connect(client.Resolved(At("10.0.0.2", kPortNumber)), 0x111), 0);
  network.Run();
  client.Expect(kRejected, 28);
  const uint32_t v4 = server.Create();
  EXPECT_EQ(server.Bind(v4, At("0.0.0.0", kPortNumber)), 0);  // beside it
}

TEST_F(TwoHosts, PrivateDataHasTheLimitsOfTheMessages) {
  server_.Listening(At("0.0.0.0", kPortNumber));
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber));
  EXPECT_EQ(client_.Connect(id, 0x111, std::string(57, 'x')), EINVAL);
  EXPECT_EQ(client_.Connect(id, 0x111, std::string(56, 'x')), 0);
  network_.Run();
  const auto request = server_.Expect(kConnectRequest);
  EXPECT_EQ(TextOf(request.param.conn), std::string(56, 'x'));
  EXPECT_EQ(server_.Reject(request.id, std::string(149, 'x')), EINVAL);
  EXPECT_EQ(server_.Accept(request.id, 0x222, 1, std::string(196, 'y')), 0);
  network_.Run();
  EXPECT_EQ(TextOf(client_.Expect(kConnectResponse).param.conn), std::string(196, 'y'));
  const uint32_t udp = client_.Resolved(At("10.0.0.2", kPortNumber), RDMA_PS_UDP);
  EXPECT_EQ(client_.Connect(udp, 0x111, std::string(181, 'x')), EINVAL);
}

TEST_F(TwoHosts, NotifyBeforeTheRtuEstablishes) {
  network_.loses = [](size_t, CmAttribute attribute) { return attribute == CmAttribute::kRtu; };
  server_.Listening(At("0.0.0.0", kPortNumber));
  const uint32_t id = Request();
  const auto notify = [&](uint32_t event) {
    return server_.Call(RDMA_USER_CM_CMD_NOTIFY, rdma_ucm_notify{.id = child_, .event = event});
  };
  EXPECT_EQ(notify(4), EINVAL);
  EXPECT_EQ(server_.Accept(child_, 0x222, 0xbeef), 0);
  network_.Run();
  client_.Expect(kConnectResponse);
  EXPECT_EQ(client_.Establish(id), 0);
  network_.Run();
  server_.ExpectNoEvent();
  EXPECT_EQ(notify(99), EINVAL);
  EXPECT_EQ(notify(4), 0);
  server_.Expect(kEstablished);
  EXPECT_EQ(notify(4), EISCONN);
}

// Before it is accepted a connection has no name for events.
TEST_F(TwoHosts, EventsOfAChildNobodyAcceptedAreDropped) {
  server_.Listening(At("0.0.0.0", kPortNumber));
  const uint32_t id = Request();
  EXPECT_EQ(client_.Destroy(id), 0);  // takes the request back
  network_.Run();
  server_.ExpectNoEvent();
  EXPECT_EQ(server_.Accept(child_, 0x222, 0xbeef), EINVAL);
  EXPECT_EQ(server_.Destroy(child_), 0);
}

TEST_F(TwoHosts, ManyConnectionsLeaveNothingBehind) {
  const uint32_t listener = server_.Listening(At("0.0.0.0", kPortNumber));
  std::vector<uint32_t> ids;
  std::vector<uint32_t> children;
  constexpr uint32_t kCount = 300;
  for (uint32_t i = 0; i < kCount; ++i) {
    ids.push_back(client_.Resolved(At("10.0.0.2", kPortNumber)));
    EXPECT_EQ(client_.Connect(ids.back(), 0x1000 + i), 0);
  }
  network_.Run();
  for (uint32_t i = 0; i < kCount; ++i) {
    children.push_back(server_.Expect(kConnectRequest).id);
    EXPECT_EQ(server_.Accept(children.back(), 0x2000 + i, i + 1), 0);
  }
  network_.Run();
  for (uint32_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(client_.Establish(client_.Expect(kConnectResponse).id), 0);
  }
  network_.Run();
  for (uint32_t i = 0; i < kCount; ++i) server_.Expect(kEstablished);
  for (const uint32_t id : ids) EXPECT_EQ(client_.Destroy(id), 0);
  network_.Run();
  for (uint32_t i = 0; i < kCount; ++i) server_.Expect(kDisconnected);
  for (const uint32_t id : children) EXPECT_EQ(server_.Destroy(id), 0);
  EXPECT_EQ(server_.Destroy(listener), 0);
  network_.Run(Duration::Seconds(10));
  EXPECT_EQ(a_.agent().id_count() + b_.agent().id_count(), 0u);
  EXPECT_TRUE(a_.agent().next_timeout().IsNever());
  EXPECT_TRUE(b_.agent().next_timeout().IsNever());
}

// --- UD

TEST_F(TwoHosts, DatagramPeersExchangeQpNumbers) {
  server_.Listening(At("0.0.0.0", kPortNumber), RDMA_PS_UDP);
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber), RDMA_PS_UDP);
  ib_uverbs_qp_attr attr{};
  ASSERT_EQ(client_.QpAttr(id, 1, &attr), 0);
  EXPECT_EQ(attr.qp_attr_mask, 0x71u);
  EXPECT_EQ(attr.qkey, 0x01234567u);
  EXPECT_EQ(client_.Connect(id, 0x111, "who"), 0);
  network_.Run();
  const auto request = server_.Expect(kConnectRequest);
  EXPECT_EQ(TextOf(request.param.ud), "who");
  EXPECT_EQ(request.param.ud.private_data_len, 180);
  EXPECT_EQ(server_.Accept(request.id, 0x222, 0xbeef, "me"), 0);
  network_.Run();
  const auto established = client_.Expect(kEstablished);
  const rdma_ucm_ud_param& param = established.param.ud;
  EXPECT_EQ(TextOf(param), "me");
  EXPECT_EQ(param.private_data_len, 136);
  EXPECT_EQ(param.qp_num, 0x222u);
  EXPECT_EQ(param.qkey, 0x01234567u);
  EXPECT_EQ(param.ah_attr.is_global, 1);
  EXPECT_EQ(Gid::Load(reinterpret_cast<const std::byte*>(param.ah_attr.grh.dgid)),
            Gid::FromIpv4(0x0a000002));
  EXPECT_EQ(client_.Disconnect(id), 0);  // means nothing, harms nothing
  EXPECT_EQ(client_.Destroy(id), 0);
  EXPECT_EQ(server_.Destroy(request.id), 0);
  network_.Run();
  server_.ExpectNoEvent();
}

TEST_F(TwoHosts, DatagramRefusals) {
  uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber), RDMA_PS_UDP);
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run();
  client_.Expect(kUnreachable, 1);  // nobody listens

  server_.Listening(At("0.0.0.0", kPortNumber), RDMA_PS_UDP);
  id = client_.Resolved(At("10.0.0.2", kPortNumber), RDMA_PS_UDP);
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run();
  EXPECT_EQ(server_.Reject(server_.Expect(kConnectRequest).id, "no"), 0);
  network_.Run();
  EXPECT_EQ(TextOf(client_.Expect(kUnreachable, 2).param.ud), "no");

  network_.loses = [](size_t, CmAttribute) { return true; };
  id = client_.Resolved(At("10.0.0.2", kPortNumber), RDMA_PS_UDP);
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run(Duration::Milliseconds(4096 * 16));
  client_.Expect(kUnreachable, -ETIMEDOUT);
}

// The port spaces do not know each other.
TEST_F(TwoHosts, PortSpacesAreApart) {
  server_.Listening(At("0.0.0.0", kPortNumber), RDMA_PS_TCP);
  server_.Listening(At("0.0.0.0", kPortNumber), RDMA_PS_UDP);
  const uint32_t uc = server_.Listening(At("0.0.0.0", kPortNumber), RDMA_PS_IB, 0, 3);
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber), RDMA_PS_IB, nullptr, 3);
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run();
  const uint32_t child = server_.Expect(kConnectRequest).id;
  EXPECT_EQ(server_.Accept(child, 0x222, 0xbeef), 0);
  network_.Run();
  client_.Expect(kConnectResponse);
  // UC has neither READs nor retries.
  ib_uverbs_qp_attr attr{};
  ASSERT_EQ(client_.QpAttr(id, 2, &attr), 0);
  EXPECT_EQ(attr.qp_attr_mask, 0x101181u);
  ASSERT_EQ(client_.QpAttr(id, 3, &attr), 0);
  EXPECT_EQ(attr.qp_attr_mask, 0x10001u);
  (void)uc;
}

TEST_F(TwoHosts, XrcConnects) {
  server_.Listening(At("0.0.0.0", kPortNumber), RDMA_PS_IB, 0, 10);
  const uint32_t id = client_.Resolved(At("10.0.0.2", kPortNumber), RDMA_PS_IB, nullptr, 9);
  EXPECT_EQ(client_.Connect(id, 0x111), 0);
  network_.Run();
  const uint32_t child = server_.Expect(kConnectRequest).id;
  ib_uverbs_qp_attr attr{};
  ASSERT_EQ(server_.QpAttr(child, 2, &attr), 0);
  EXPECT_EQ(attr.qp_attr_mask, 0x129181u);
  EXPECT_EQ(server_.Accept(child, 0x222, 0xbeef), 0);
  network_.Run();
  EXPECT_EQ(client_.Expect(kConnectResponse).param.conn.qp_num, 0x222u);
  ASSERT_EQ(client_.QpAttr(id, 3, &attr), 0);
  EXPECT_EQ(attr.qp_attr_mask, 0x12e01u);
}

// --- Hostile applications

// Who guesses the ids of connections that were not reported yet.
TEST_F(TwoHosts, GuessedChildrenMayBeDestroyedAndMoved) {
  const uint32_t listener = server_.Listening(At("0.0.0.0", kPortNumber));
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(client_.Connect(client_.Resolved(At("10.0.0.2", kPortNumber)), 0x100 + i), 0);
  }
  network_.Run();
  const uint32_t first = listener + 1;
  EXPECT_EQ(server_.Destroy(first), 0);
  CmApp other(b_, network_, {.pid = 2, .uid = 100});
  CmApp third(b_, network_, {.pid = 2, .uid = 100});
  const auto move = [&](CmApp& to, uint32_t id, CmApp& from) {
    rdma_ucm_migrate_id command{};
    command.id = id;
    command.fd = from.file();
    rdma_ucm_migrate_resp response{};
    return to.Call(RDMA_USER_CM_CMD_MIGRATE_ID, command, &response, sizeof(response));
  };
  EXPECT_EQ(move(other, first + 1, server_), 0);
  EXPECT_EQ(move(third, listener, server_), 0);
  server_.Close();
  EXPECT_EQ(third.Expect(kConnectRequest).id, first);
  EXPECT_EQ(third.Expect(kConnectRequest).id, first + 1);
  EXPECT_EQ(third.Accept(first, 1, 1), ENOENT);
  EXPECT_EQ(other.Accept(first + 1, 0x222, 1), 0);
  third.Close();
  other.Close();
  EXPECT_EQ(b_.agent().id_count(), 0u);
}

// Random commands with ids that exist: nothing breaks, the count of readable
// events stays right, and everything goes with the files.
TEST_F(TwoHosts, RandomCommandsDoNoHarm) {
  std::mt19937 random(11);
  std::vector<std::unique_ptr<CmApp>> apps;
  for (int i = 0; i < 6; ++i) {
    apps.push_back(std::make_unique<CmApp>(i % 2 == 0 ? a_ : b_, network_));
  }
  const auto pick = [&](auto... values) {
    const uint64_t list[] = {static_cast<uint64_t>(values)...};
    return list[random() % std::size(list)];
  };
  for (int round = 0; round < 20000; ++round) {
    auto& app = apps[random() % apps.size()];
    const auto command = static_cast<uint32_t>(random() % 24);
    std::array<std::byte, sizeof(rdma_ucm_accept) + 64> body{};
    if (random() % 4 == 0) {
      for (std::byte& byte : body) byte = static_cast<std::byte>(random());
    }
    // Mostly an id of this very file.
    std::vector<uint32_t> ids = {static_cast<uint32_t>(random() % 1000)};
    app->host().agent().ForEachId([&](const CmIdInfo& info) {
      if (info.file == app->file()) ids.push_back(info.id);
    });
    const uint32_t id = ids[random() % ids.size()];
    if (command == RDMA_USER_CM_CMD_CREATE_ID && ids.size() > 8) continue;
    const auto put = [&](size_t at, auto value) {
      std::memcpy(body.data() + at, &value, sizeof(value));
    };
    const SocketAddress address =
        At(random() % 2 == 0 ? "10.0.0.2" : "0.0.0.0", static_cast<uint16_t>(7000 + random() % 3));
    const size_t size = body.size();
    switch (command) {
      case RDMA_USER_CM_CMD_CREATE_ID:
        put(0, uint64_t{1});
        put(16, static_cast<uint16_t>(pick(RDMA_PS_TCP, RDMA_PS_TCP, RDMA_PS_UDP)));
        break;
      case RDMA_USER_CM_CMD_BIND:
        put(0, id);
        put(4, uint32_t{address.size()});
        address.Store(body.data() + 8);
        break;
      case RDMA_USER_CM_CMD_RESOLVE_ADDR:
        put(0, id);
        put(8, uint16_t{0});
        put(10, uint16_t{address.size()});
        put(12, uint32_t{0});
        address.Store(body.data() + 144);
        break;
      case RDMA_USER_CM_CMD_CONNECT:
        put(272, id);
        put(271, uint8_t{1});
        put(264, static_cast<uint8_t>(random() % 60));
        break;
      case RDMA_USER_CM_CMD_ACCEPT:
        put(0, uint64_t{1});
        put(280, id);
        put(279, static_cast<uint8_t>(random() % 2));
        break;
      case RDMA_USER_CM_CMD_MIGRATE_ID:
        put(8, id);
        put(12, apps[random() % apps.size()]->file());
        break;
      case RDMA_USER_CM_CMD_DESTROY_ID:
        if (random() % 4 != 0) continue;
        [[fallthrough]];
      case RDMA_USER_CM_CMD_INIT_QP_ATTR:
      case RDMA_USER_CM_CMD_QUERY:
      case RDMA_USER_CM_CMD_QUERY_ROUTE:
      case RDMA_USER_CM_CMD_SET_OPTION:
        put(8, id);
        put(12, static_cast<uint32_t>(random() % 4));
        break;
      case RDMA_USER_CM_CMD_JOIN_MCAST:
        put(16, id);
        put(20, uint32_t{16});
        At("239.1.1.1").Store(body.data() + 24);
        break;
      default:
        put(0, id);
        break;
    }
    std::array<std::byte, 512> response;
    const size_t length = random() % 50 == 0 ? random() % size : size;
    const int error = app->CallBytes(command, std::span(body).first(length), response.data(),
                                     random() % 50 == 0 ? random() % 512 : response.size(), {});
    if (command == RDMA_USER_CM_CMD_GET_EVENT && error == 0) {
      --app->host().readable[app->file()];
    }
    if (random() % 20 == 0) {
      network_.Run(Duration::Milliseconds(static_cast<int64_t>(random() % 3000)));
    }
    if (random() % 500 == 0) {
      CmHost& host = app->host();
      app = std::make_unique<CmApp>(host, network_);
    }
    ASSERT_EQ(app->host().readable[app->file()],
              static_cast<int64_t>(app->host().agent().pending_events(app->file())));
  }
  apps.clear();
  network_.Run(Duration::Seconds(200));
  EXPECT_EQ(a_.agent().id_count() + b_.agent().id_count(), 0u);
  EXPECT_GT(network_.CountSent(CmAttribute::kReq), 20u);
  EXPECT_GT(network_.CountSent(CmAttribute::kRep), 0u);
}

}  // namespace
}  // namespace verbena::nic
