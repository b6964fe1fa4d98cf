// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: commands as bytes, addresses, ports, routes, options, events,
// migration, multicast.
#include <gtest/gtest.h>

#include <cerrno>

#include "nic_sim/cm/cm_agent.h"
#include "nic_sim/cm/port_table.h"
#include "tests/unit/nic_sim/cm/cm_network.h"
#include "transport/base/byteorder.h"

namespace verbena::nic {
namespace {

using transport::CmAttribute;
using transport::Duration;
using transport::Gid;

Gid GidAt(const void* bytes) { return Gid::Load(static_cast<const std::byte*>(bytes)); }

class OneHost : public ::testing::Test {
 protected:
  CmNetwork network_;
  // As without configuration: two NICs of host 0.
  CmHost& host_ = network_.AddHost({{"127.88.0.1/16"}, {"127.88.0.2/16"}});
  CmApp app_{host_, network_, {.pid = 1, .uid = 100}};
};

// --- The command path

TEST_F(OneHost, CommandsAreCheckedAsByTheKernel) {
  CmAgent& agent = host_.agent();
  const auto write = [&](const std::vector<uint8_t>& bytes) {
    return agent.Write(app_.file(), std::as_bytes(std::span(bytes)), network_.now()).error;
  };
  EXPECT_EQ(write({}), EINVAL);
  EXPECT_EQ(write({0, 0, 0, 0, 24, 0, 4}), EINVAL);
  EXPECT_EQ(write({0, 0, 0, 0, 24, 0, 4, 0}), EINVAL);   // `in` behind the end
  EXPECT_EQ(write({200, 0, 0, 0, 0, 0, 0, 0}), EINVAL);  // unknown
  EXPECT_EQ(write({13, 0, 0, 0, 0, 0, 0, 0}), ENOSYS);   // GET_OPTION
  std::vector<uint8_t> create(8 + 24);
  create[4] = 24;
  EXPECT_EQ(write(create), ENOSPC);  // no room for the id
  create[6] = 4;
  EXPECT_EQ(write(create), EINVAL);  // no port space
  create[8 + 16] = 0x06;
  create[8 + 17] = 0x01;
  EXPECT_EQ(write(create), 0);
  EXPECT_EQ(agent.Write(12345, std::as_bytes(std::span(create)), network_.now()).error, EBADF);
  EXPECT_EQ(app_.Bind(4711, At("0.0.0.0")), ENOENT);
  EXPECT_EQ(app_.Destroy(4711), ENOENT);
}

TEST_F(OneHost, EveryShortCommandIsRefused) {
  // All commands, every length up to the largest structure: nothing is read
  // behind the end, nothing is done but what the length allows.
  for (uint32_t command = 0; command <= RDMA_USER_CM_CMD_JOIN_MCAST; ++command) {
    for (size_t size = 0; size < sizeof(rdma_ucm_accept); ++size) {
      const rdma_ucm_cmd_hdr header{.cmd = command, .in = static_cast<uint16_t>(size), .out = 1024};
      std::vector<std::byte> bytes(sizeof(header) + size);
      std::memcpy(bytes.data(), &header, sizeof(header));
      EXPECT_NE(host_.agent().Write(app_.file(), bytes, network_.now()).error, 0)
          << command << " with " << size << " bytes";
    }
  }
  EXPECT_EQ(host_.agent().id_count(), 0u);
}

TEST_F(OneHost, IdsOfOtherFilesDoNotExist) {
  CmApp other(host_, network_);
  const uint32_t id = app_.Create();
  EXPECT_EQ(other.Bind(id, At("0.0.0.0")), ENOENT);
  EXPECT_EQ(other.Destroy(id), ENOENT);
  EXPECT_EQ(app_.Destroy(id), 0);
}

TEST_F(OneHost, PortSpaceDecidesTheQpType) {
  EXPECT_NE(app_.Create(RDMA_PS_TCP), 0u);
  EXPECT_NE(app_.Create(RDMA_PS_UDP), 0u);
  EXPECT_NE(app_.Create(RDMA_PS_IPOIB), 0u);
  EXPECT_NE(app_.Create(RDMA_PS_IB, 3), 0u);
  rdma_ucm_create_id command{};
  command.ps = RDMA_PS_IB;
  command.qp_type = 8;
  rdma_ucm_create_id_resp response;
  EXPECT_EQ(app_.Call(RDMA_USER_CM_CMD_CREATE_ID, command, &response, 4), EINVAL);
  std::map<uint32_t, int> types;
  host_.agent().ForEachId([&](const CmIdInfo& info) { ++types[info.qp_type]; });
  EXPECT_EQ(types, (std::map<uint32_t, int>{{2, 1}, {3, 1}, {4, 2}}));
}

// A library without ECE sends shorter structures, one of the first AF_IB days
// asks for a shorter event.
TEST_F(OneHost, OlderLibrariesAreUnderstood) {
  app_.Listening(At("0.0.0.0", 7174));
  const uint32_t id = app_.Resolved(At("127.88.0.1", 7174));
  rdma_ucm_connect connect{};
  connect.id = id;
  connect.conn_param.valid = 1;
  connect.conn_param.qp_num = 0x111;
  const auto bytes = std::as_bytes(std::span(&connect, 1));
  EXPECT_EQ(app_.CallBytes(RDMA_USER_CM_CMD_CONNECT, bytes.first(offsetof(rdma_ucm_connect, ece)),
                           nullptr, 0, {}),
            0);
  network_.Run();
  rdma_ucm_event_resp event{};
  EXPECT_EQ(app_.Call(RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{}, &event, 323), ENOSPC);
  EXPECT_EQ(app_.Call(RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{}, &event, 324), 0);
  EXPECT_EQ(event.event, kConnectRequest);
  rdma_ucm_accept accept{};
  accept.id = event.id;
  accept.uid = 5;
  accept.conn_param.valid = 1;
  EXPECT_EQ(
      app_.CallBytes(RDMA_USER_CM_CMD_ACCEPT,
                     std::as_bytes(std::span(&accept, 1)).first(offsetof(rdma_ucm_accept, ece)),
                     nullptr, 0, {}),
      0);
}

TEST_F(OneHost, LegacyCommandsBindResolveAndQuery) {
  const uint32_t id = app_.Create();
  rdma_ucm_bind_ip bind{};
  bind.id = id;
  EXPECT_EQ(app_.Call(RDMA_USER_CM_CMD_BIND_IP, bind), EINVAL);  // no family
  At("127.88.0.2", 0).Store(reinterpret_cast<std::byte*>(&bind.addr));
  EXPECT_EQ(app_.Call(RDMA_USER_CM_CMD_BIND_IP, bind), 0);
  rdma_ucm_resolve_ip resolve{};
  resolve.id = id;
  resolve.timeout_ms = 1000;
  At("127.88.0.1", 99).Store(reinterpret_cast<std::byte*>(&resolve.dst_addr));
  EXPECT_EQ(app_.Call(RDMA_USER_CM_CMD_RESOLVE_IP, resolve), 0);
  app_.Expect(kAddrResolved);

  const auto query = [&] {
    rdma_ucm_query command{};
    command.id = id;
    rdma_ucm_query_route_resp response{};
    EXPECT_EQ(app_.Call(RDMA_USER_CM_CMD_QUERY_ROUTE, command, &response, sizeof(response)), 0);
    return response;
  };
  auto route = query();
  EXPECT_EQ(route.num_paths, 0u);
  EXPECT_EQ(GidAt(route.ib_route[0].sgid), Gid::FromIpv4(0x7f580002));
  EXPECT_EQ(GidAt(route.ib_route[0].dgid), Gid::FromIpv4(0x7f580001));
  EXPECT_EQ(app_.ResolveRoute(id), 0);
  app_.Expect(kRouteResolved);
  route = query();
  EXPECT_EQ(route.num_paths, 1u);
  EXPECT_EQ(route.port_num, 1);
  EXPECT_EQ(route.ib_route[0].mtu, 5u);
  EXPECT_EQ(route.ib_route[0].hop_limit, 64);
  EXPECT_EQ(route.ib_route[0].packet_life_time, 18);
  EXPECT_EQ(SocketAddress::Load(std::as_bytes(std::span(&route.dst_addr, 1)))->ToString(),
            "127.88.0.1:99");
}

// --- Addresses

TEST_F(OneHost, LibraryFindsAfIbSupportByBindingAWildcard) {
  const uint32_t id = app_.Create(RDMA_PS_IB, 2);
  SocketAddress any;
  any.family = kFamilyIb;
  any.service_id = 0x01060000;
  any.service_mask = ~uint64_t{0xffff};
  EXPECT_EQ(app_.Bind(id, any), 0);
  EXPECT_EQ(app_.Source(id).family, kFamilyIb);
  EXPECT_GE(app_.Source(id).port, 32768);
  SocketAddress specific = any;
  specific.ip = Gid::FromIpv4(0x7f580001);
  EXPECT_EQ(app_.Bind(app_.Create(RDMA_PS_IB, 2), specific), ENODEV);
  SocketAddress foreign = any;
  foreign.service_id = 0x99990000;
  EXPECT_EQ(app_.Bind(app_.Create(RDMA_PS_IB, 2), foreign), EPROTONOSUPPORT);
}

TEST_F(OneHost, BindTellsDeviceAndPort) {
  uint32_t id = app_.Create();
  EXPECT_EQ(app_.Bind(id, At("0.0.0.0")), 0);
  EXPECT_EQ(app_.QueryAddr(id).port_num, 0);  // a wildcard has no device
  EXPECT_EQ(app_.QueryAddr(id).ibdev_index, 0xffffffffu);
  EXPECT_GE(app_.Source(id).port, 32768);
  EXPECT_LE(app_.Source(id).port, 60999);
  EXPECT_EQ(app_.Bind(id, At("0.0.0.0")), EINVAL);  // bound already

  id = app_.Create();
  EXPECT_EQ(app_.Bind(id, At("127.88.0.2", 5000)), 0);
  const auto address = app_.QueryAddr(id);
  EXPECT_EQ(transport::LoadBe64(reinterpret_cast<const std::byte*>(&address.node_guid)),
            0x0200000000000001u);
  EXPECT_EQ(address.port_num, 1);
  EXPECT_EQ(address.pkey, 0xffff);
  EXPECT_EQ(address.dst_size, 0);
  EXPECT_EQ(app_.Source(id).ToString(), "127.88.0.2:5000");
  EXPECT_EQ(app_.Bind(app_.Create(), At("10.9.9.9")), EADDRNOTAVAIL);
  EXPECT_EQ(app_.Bind(app_.Create(), At("127.88.0.2", 80)), EACCES);
  CmApp root(host_, network_, {.may_bind_low_ports = true});
  EXPECT_EQ(root.Bind(root.Create(), At("127.88.0.2", 80)), 0);
}

// The commands that people type: localhost and the machine's own name.
TEST_F(OneHost, MachinesOwnAddressesLeadToTheFirstNic) {
  host_.own = {Gid::FromIpv4(0xc0a80105), *Gid::Parse("2001:db8::5")};
  for (const char* address : {"127.0.0.1", "127.1.2.3", "192.168.1.5", "::1", "2001:db8::5"}) {
    SCOPED_TRACE(address);
    CmApp server(host_, network_);
    CmApp client(host_, network_);
    server.Listening(At(address, 7174));
    const uint32_t id = client.Resolved(At(address, 7174));
    // The application sees the address that it named, packets have the NIC's.
    EXPECT_EQ(client.Source(id).ip, At(address).ip);
    EXPECT_EQ(client.Destination(id).ip, At(address).ip);
    const auto gids = client.QueryGid(id);
    const auto source = SocketAddress::Load(std::as_bytes(std::span(&gids.src_addr, 1)));
    const auto destination = SocketAddress::Load(std::as_bytes(std::span(&gids.dst_addr, 1)));
    EXPECT_EQ(source->ip, Gid::FromIpv4(0x7f580001));
    EXPECT_EQ(destination->ip, Gid::FromIpv4(0x7f580001));
    EXPECT_EQ(client.Connect(id, 0x111), 0);
    network_.Run();
    const uint32_t child = server.Expect(kConnectRequest).id;
    EXPECT_EQ(server.Source(child).ToString(), At(address, 7174).ToString());
    EXPECT_EQ(server.Destination(child).ip, At(address).ip);
    EXPECT_EQ(server.Accept(child, 0x222, 1), 0);
    network_.Run();
    client.Expect(kConnectResponse);
    EXPECT_EQ(client.Establish(id), 0);
    network_.Run();
    server.Expect(kEstablished);
    client.Close();
    network_.Run();
    server.Close();
    network_.Run(Duration::Seconds(5));
  }
}

TEST_F(OneHost, AddressesOfNicsLeadToTheirNic) {
  const uint32_t second = app_.Resolved(At("127.88.0.2", 1));
  EXPECT_EQ(app_.Source(second).ip, Gid::FromIpv4(0x7f580002));
  const SocketAddress first = At("127.88.0.1");
  const uint32_t across = app_.Resolved(At("127.88.0.2", 1), RDMA_PS_TCP, &first);
  EXPECT_EQ(app_.Source(across).ip, Gid::FromIpv4(0x7f580001));
  EXPECT_EQ(app_.QueryAddr(across).node_guid, app_.QueryAddr(app_.Resolved(first)).node_guid);
  // Another simulated host.
  const uint32_t other = app_.Resolved(At("127.88.1.1", 1));
  EXPECT_EQ(app_.Source(other).ip, Gid::FromIpv4(0x7f580001));
  // 0.0.0.0 as destination is this host.
  const uint32_t any = app_.Resolved(At("0.0.0.0", 1));
  EXPECT_EQ(app_.Destination(any).ToString(), "127.0.0.1:1");
  // A stand-in's name means nothing outside.
  const SocketAddress loopback = At("127.0.0.1");
  const uint32_t out = app_.Resolved(At("127.88.1.1", 1), RDMA_PS_TCP, &loopback);
  EXPECT_EQ(app_.Source(out).ip, Gid::FromIpv4(0x7f580001));
}

TEST_F(OneHost, UnreachableAddressesAreErrors) {
  const Gid far = Gid::FromIpv4(0x08080808);
  host_.reach[far] = CmPlatform::Reach::kUnreachable;
  EXPECT_EQ(app_.ResolveAddr(app_.Create(), At("8.8.8.8", 1)), ENETUNREACH);
  // Families may not be mixed.
  const SocketAddress v6 = At("fe80::1");
  EXPECT_EQ(app_.ResolveAddr(app_.Create(), At("127.88.0.1", 1), &v6), EINVAL);
}

TEST_F(OneHost, ResolutionWaitsForTheNeighbourUntilItsTimeIsOver) {
  const Gid slow = Gid::FromIpv4(0x7f580101);
  host_.reach[slow] = CmPlatform::Reach::kPending;
  const uint32_t id = app_.Create();
  EXPECT_EQ(app_.ResolveAddr(id, At("127.88.1.1", 1), nullptr, 500), 0);
  EXPECT_EQ(app_.ResolveRoute(id), EINVAL);
  network_.Run(Duration::Milliseconds(400));
  app_.ExpectNoEvent();
  network_.Run(Duration::Milliseconds(200));
  app_.Expect(kAddrError, -ETIMEDOUT);
  // The same id may try again.
  EXPECT_EQ(app_.ResolveAddr(id, At("127.88.1.1", 1), nullptr, 500), 0);
  network_.Run(Duration::Milliseconds(100));
  host_.reach.clear();
  network_.Run(Duration::Milliseconds(100));
  app_.Expect(kAddrResolved);
  EXPECT_EQ(app_.ResolveRoute(id), 0);
  // Destroyed while it waits.
  host_.reach[slow] = CmPlatform::Reach::kPending;
  const uint32_t gone = app_.Create();
  EXPECT_EQ(app_.ResolveAddr(gone, At("127.88.1.1", 1), nullptr, 500), 0);
  EXPECT_EQ(app_.Destroy(gone), 0);
  network_.Run(Duration::Seconds(1));
  app_.Expect(kRouteResolved);
  app_.ExpectNoEvent();
  EXPECT_TRUE(host_.agent().next_timeout().IsNever());
}

TEST_F(OneHost, StepsOutOfOrderAreInvalid) {
  const uint32_t id = app_.Create();
  EXPECT_EQ(app_.ResolveRoute(id), EINVAL);
  EXPECT_EQ(app_.Connect(id, 1), EINVAL);
  EXPECT_EQ(app_.Accept(id, 1, 1), EINVAL);
  EXPECT_EQ(app_.Establish(id), EINVAL);
  EXPECT_EQ(app_.Reject(id), EINVAL);
  EXPECT_EQ(app_.Disconnect(id), EINVAL);
  const uint32_t resolved = app_.Resolved(At("127.88.0.1", 1));
  EXPECT_EQ(app_.Listen(resolved), EINVAL);
  EXPECT_EQ(app_.ResolveAddr(resolved, At("127.88.0.1", 1)), EINVAL);
  // An id that nobody bound listens at any port.
  EXPECT_EQ(app_.Listen(id), 0);
  EXPECT_GE(app_.Source(id).port, 32768);
  EXPECT_EQ(app_.Listen(id), EINVAL);
}

TEST_F(OneHost, PathRecordIsThatOfTheRoute) {
  const uint32_t id = app_.Resolved(At("127.88.0.1", 1));
  rdma_ucm_query command{};
  command.id = id;
  command.option = RDMA_USER_CM_QUERY_PATH;
  std::array<std::byte, 440> response{};
  ASSERT_EQ(app_.Call(RDMA_USER_CM_CMD_QUERY, command, response.data(), response.size()), 0);
  uint32_t words[3];
  std::memcpy(words, response.data(), sizeof(words));
  EXPECT_EQ(words[0], 1u);     // num_paths
  EXPECT_EQ(words[2], 0x0bu);  // flags
  const std::byte* record = response.data() + 16;
  EXPECT_EQ(GidAt(record + 8), Gid::FromIpv4(0x7f580001));
  EXPECT_EQ(GidAt(record + 24), Gid::FromIpv4(0x7f580001));
  EXPECT_EQ(transport::LoadBe32(record + 44) & 0xff, 64u);
  EXPECT_EQ(transport::LoadBe16(record + 50), 0xffff);
  EXPECT_EQ(transport::LoadBe8(record + 54), 0x80 | 5);
  EXPECT_EQ(transport::LoadBe8(record + 56), 0x80 | 18);
  command.option = 9;
  EXPECT_EQ(app_.Call(RDMA_USER_CM_CMD_QUERY, command, response.data(), response.size()), ENOSYS);
}

// --- Ports

TEST(PortTable, SharesPortsByTheRulesOfRdmaCm) {
  PortTable table;
  const auto owner = [](const std::string& address, uint16_t port) {
    PortOwner o;
    o.source = At(address, port);
    o.family_only = o.source.family == kFamilyInet;
    return o;
  };
  PortOwner a = owner("10.0.0.1", 5000);
  PortOwner same = owner("10.0.0.1", 5000);
  PortOwner b = owner("10.0.0.2", 5000);
  PortOwner any = owner("0.0.0.0", 5000);
  PortOwner v6 = owner("::", 5000);
  EXPECT_EQ(table.Bind(1, a), 0);
  EXPECT_EQ(table.Bind(1, same), EADDRINUSE);
  EXPECT_EQ(table.Bind(1, b), 0);
  EXPECT_EQ(table.Bind(1, any), EADDRNOTAVAIL);
  EXPECT_EQ(table.Bind(1, v6), EADDRNOTAVAIL);
  v6.family_only = true;
  EXPECT_EQ(table.Bind(1, v6), 0);
  EXPECT_EQ(table.Bind(2, any), 0);
  table.Release(1, a);
  EXPECT_EQ(table.Bind(1, same), 0);
  // Shared with consent; one of them listens.
  PortOwner x = owner("10.0.0.1", 6000);
  PortOwner y = owner("10.0.0.1", 6000);
  x.reuse_address = true;
  EXPECT_EQ(table.Bind(1, x), 0);
  EXPECT_EQ(table.Bind(1, y), EADDRINUSE);
  y.reuse_address = true;
  EXPECT_EQ(table.Bind(1, y), 0);
  EXPECT_EQ(table.CheckListen(1, x), EADDRINUSE);
  table.Release(1, y);
  EXPECT_EQ(table.CheckListen(1, x), 0);
}

TEST(PortTable, EphemeralPortsRunOut) {
  PortTable table;
  std::vector<std::unique_ptr<PortOwner>> owners;
  std::set<uint16_t> ports;
  for (int i = 0; i < 60999 - 32768 + 1; ++i) {
    owners.push_back(std::make_unique<PortOwner>());
    owners.back()->source = At("0.0.0.0");
    ASSERT_EQ(table.BindEphemeral(1, *owners.back(), static_cast<uint32_t>(i) * 77), 0);
    ports.insert(owners.back()->source.port);
  }
  EXPECT_EQ(ports.size(), owners.size());
  EXPECT_EQ(*ports.begin(), 32768);
  EXPECT_EQ(*ports.rbegin(), 60999);
  PortOwner last;
  last.source = At("0.0.0.0");
  EXPECT_EQ(table.BindEphemeral(1, last, 1), EADDRNOTAVAIL);
}

TEST_F(OneHost, PortIsFreeAfterDestroy) {
  const uint32_t id = app_.Listening(At("127.88.0.1", 7174));
  EXPECT_EQ(app_.Bind(app_.Create(), At("127.88.0.1", 7174)), EADDRINUSE);
  EXPECT_EQ(app_.Destroy(id), 0);
  app_.Listening(At("127.88.0.1", 7174));
}

// --- Options

TEST_F(OneHost, OptionsAreChecked) {
  const uint32_t id = app_.Create();
  EXPECT_EQ(app_.SetIntOption(id, RDMA_OPTION_ID_TOS, 1), EINVAL);  // a byte
  EXPECT_EQ(app_.SetByteOption(id, RDMA_OPTION_ID_REUSEADDR, 1), EINVAL);
  EXPECT_EQ(app_.SetByteOption(id, 77, 1), ENOSYS);
  const std::byte one{1};
  EXPECT_EQ(app_.SetOption(id, 5, 0, {&one, 1}), ENOSYS);
  EXPECT_EQ(app_.SetByteOption(4711, RDMA_OPTION_ID_TOS, 1), ENOENT);
  EXPECT_EQ(app_.SetIntOption(id, RDMA_OPTION_ID_REUSEADDR, 1), 0);
  EXPECT_EQ(app_.SetIntOption(id, RDMA_OPTION_ID_AFONLY, 1), 0);
  EXPECT_EQ(app_.SetByteOption(id, RDMA_OPTION_ID_ACK_TIMEOUT, 14), 0);
  EXPECT_EQ(app_.SetByteOption(app_.Create(RDMA_PS_UDP), RDMA_OPTION_ID_ACK_TIMEOUT, 14), EINVAL);
  EXPECT_EQ(app_.Listen(id), 0);
  EXPECT_EQ(app_.SetIntOption(id, RDMA_OPTION_ID_REUSEADDR, 1), EINVAL);
  EXPECT_EQ(app_.SetIntOption(id, RDMA_OPTION_ID_AFONLY, 0), EINVAL);
  // A value that was not sent along.
  rdma_ucm_set_option command{};
  command.id = id;
  command.optlen = 1;
  EXPECT_EQ(app_.Call(RDMA_USER_CM_CMD_SET_OPTION, command), EINVAL);
}

TEST_F(OneHost, TosAndAckTimeoutReachTheWireAndTheQp) {
  app_.Listening(At("0.0.0.0", 7174));
  const uint32_t id = app_.Create();
  EXPECT_EQ(app_.SetByteOption(id, RDMA_OPTION_ID_TOS, 104), 0);
  EXPECT_EQ(app_.SetByteOption(id, RDMA_OPTION_ID_ACK_TIMEOUT, 14), 0);
  EXPECT_EQ(app_.ResolveAddr(id, At("127.88.0.1", 7174)), 0);
  app_.Expect(kAddrResolved);
  EXPECT_EQ(app_.ResolveRoute(id), 0);
  app_.Expect(kRouteResolved);
  EXPECT_EQ(app_.Connect(id, 0x111), 0);
  ASSERT_FALSE(network_.sent.empty());
  EXPECT_EQ(network_.sent[0].mad.traffic_class, 104);
  const auto req = transport::CmReq::Load(network_.sent[0].mad.bytes.data() + 24);
  EXPECT_EQ(req.primary_traffic_class, 104);
  network_.Run();
  const uint32_t child = app_.Expect(kConnectRequest).id;
  ib_uverbs_qp_attr attr{};
  ASSERT_EQ(app_.QpAttr(child, 2, &attr), 0);
  EXPECT_EQ(attr.ah_attr.grh.traffic_class, 104);
  EXPECT_EQ(app_.Accept(child, 0x222, 1), 0);
  network_.Run();
  app_.Expect(kConnectResponse);
  ASSERT_EQ(app_.QpAttr(id, 3, &attr), 0);
  EXPECT_EQ(attr.timeout, 14);
}

TEST_F(OneHost, SettingThePathResolvesTheRoute) {
  const uint32_t id = app_.Create();
  EXPECT_EQ(app_.ResolveAddr(id, At("127.88.0.1", 7174)), 0);
  app_.Expect(kAddrResolved);
  std::array<std::byte, 72> path{};
  EXPECT_EQ(app_.SetOption(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, path), EINVAL);  // flags
  path[0] = std::byte{0x0b};
  path[8 + 54] = std::byte{0x80 | 3};
  EXPECT_EQ(app_.SetOption(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, std::span(path).first(71)),
            EINVAL);
  EXPECT_EQ(app_.SetOption(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, path), 0);
  app_.Expect(kRouteResolved);
  EXPECT_EQ(app_.Connect(id, 0x111), 0);
  const auto req = transport::CmReq::Load(network_.sent[0].mad.bytes.data() + 24);
  EXPECT_EQ(req.path_mtu, 3);
}

// --- Events

TEST_F(OneHost, DestroyDropsUnreadEventsAndCountsTheReadOnes) {
  const uint32_t id = app_.Create();
  const uint32_t other = app_.Create();
  EXPECT_EQ(app_.ResolveAddr(id, At("127.88.0.1", 1)), 0);
  EXPECT_EQ(app_.ResolveAddr(other, At("127.88.0.1", 1)), 0);
  EXPECT_EQ(app_.Expect(kAddrResolved).id, id);
  EXPECT_EQ(app_.ResolveRoute(id), 0);
  EXPECT_EQ(host_.readable[app_.file()], 2);
  uint32_t reported = 99;
  EXPECT_EQ(app_.Destroy(id, &reported), 0);
  EXPECT_EQ(reported, 1u);
  EXPECT_EQ(host_.readable[app_.file()], 1);
  EXPECT_EQ(app_.Expect(kAddrResolved).id, other);
  app_.ExpectNoEvent();
}

TEST_F(OneHost, DestroyedListenerRejectsWhatWaitsForIt) {
  CmApp client(host_, network_);
  const uint32_t listener = app_.Listening(At("0.0.0.0", 7174));
  const uint32_t id = client.Resolved(At("127.88.0.1", 7174));
  EXPECT_EQ(client.Connect(id, 0x111), 0);
  network_.Run();
  EXPECT_EQ(host_.readable[app_.file()], 1);
  uint32_t reported = 99;
  EXPECT_EQ(app_.Destroy(listener, &reported), 0);
  EXPECT_EQ(reported, 0u);
  EXPECT_EQ(host_.readable[app_.file()], 0);
  network_.Run();
  client.Expect(kRejected, 28);
}

TEST_F(OneHost, MigrationTakesUnreadEventsAlong) {
  CmApp other(host_, network_, {.pid = 1, .uid = 100});
  CmApp stranger(host_, network_, {.pid = 2, .uid = 200});
  const auto migrate = [&](CmApp& to, uint32_t id, CmFileId from, uint32_t* reported) {
    rdma_ucm_migrate_id command{};
    command.id = id;
    command.fd = from;
    rdma_ucm_migrate_resp response{.events_reported = 99};
    const int error = to.Call(RDMA_USER_CM_CMD_MIGRATE_ID, command, &response, sizeof(response));
    *reported = response.events_reported;
    return error;
  };
  const uint32_t id = app_.Create();
  EXPECT_EQ(app_.ResolveAddr(id, At("127.88.0.1", 1)), 0);
  app_.Expect(kAddrResolved);
  EXPECT_EQ(app_.ResolveRoute(id), 0);
  uint32_t reported;
  EXPECT_EQ(migrate(other, id, 0, &reported), EINVAL);
  EXPECT_EQ(migrate(other, 4711, app_.file(), &reported), ENOENT);
  EXPECT_EQ(migrate(stranger, id, app_.file(), &reported), EINVAL);
  EXPECT_EQ(migrate(other, id, app_.file(), &reported), 0);
  EXPECT_EQ(reported, 1u);
  EXPECT_EQ(host_.readable[app_.file()], 0);
  EXPECT_EQ(host_.readable[other.file()], 1);
  app_.ExpectNoEvent();
  EXPECT_EQ(other.Expect(kRouteResolved).id, id);
  EXPECT_EQ(app_.Destroy(id), ENOENT);
  app_.Close();  // the id belongs to the other file now
  EXPECT_EQ(migrate(other, id, other.file(), &reported), 0);
  EXPECT_EQ(reported, 2u);
  EXPECT_EQ(other.Destroy(id, &reported), 0);
  EXPECT_EQ(reported, 2u);
}

// What a synchronous listener does with each connection that comes.
TEST_F(OneHost, ChildrenMayMoveBeforeTheyAreAccepted) {
  CmApp client(host_, network_);
  CmApp channel(host_, network_, {.pid = 1, .uid = 100});
  app_.Listening(At("0.0.0.0", 7174));
  const uint32_t id = client.Resolved(At("127.88.0.1", 7174));
  EXPECT_EQ(client.Connect(id, 0x111), 0);
  network_.Run();
  const uint32_t child = app_.Expect(kConnectRequest).id;
  rdma_ucm_migrate_id command{};
  command.id = child;
  command.fd = app_.file();
  rdma_ucm_migrate_resp response{};
  EXPECT_EQ(channel.Call(RDMA_USER_CM_CMD_MIGRATE_ID, command, &response, sizeof(response)), 0);
  EXPECT_EQ(response.events_reported, 0u);
  EXPECT_EQ(channel.Accept(child, 0x222, 7), 0);
  network_.Run();
  client.Expect(kConnectResponse);
  EXPECT_EQ(client.Establish(id), 0);
  network_.Run();
  EXPECT_EQ(channel.Expect(kEstablished).uid, 7u);
  app_.ExpectNoEvent();
}

// --- Multicast

class Multicast : public OneHost {
 protected:
  int Join(uint32_t id, const std::string& group, uint16_t flags, uint32_t* joined) {
    rdma_ucm_join_mcast command{};
    command.id = id;
    command.uid = 0x6c;
    const SocketAddress address = At(group);
    command.addr_size = address.size();
    command.join_flags = flags;
    address.Store(reinterpret_cast<std::byte*>(&command.addr));
    rdma_ucm_create_id_resp response{};
    const int error = app_.Call(RDMA_USER_CM_CMD_JOIN_MCAST, command, &response, sizeof(response));
    *joined = response.id;
    return error;
  }
  int Leave(uint32_t joined, uint32_t* reported) {
    rdma_ucm_destroy_id command{};
    command.id = joined;
    rdma_ucm_destroy_id_resp response{};
    const int error = app_.Call(RDMA_USER_CM_CMD_LEAVE_MCAST, command, &response, sizeof(response));
    *reported = response.events_reported;
    return error;
  }
  const Gid group_ = Gid::FromIpv4(0xef010203);
};

// As mckey: bind, resolve the group's address, join.
TEST_F(Multicast, JoinTellsTheGroupAndLeaveEndsIt) {
  const uint32_t id = app_.Create(RDMA_PS_UDP);
  uint32_t joined = 0;
  EXPECT_EQ(Join(id, "239.1.2.3", 0, &joined), EINVAL);  // no device
  EXPECT_EQ(app_.Bind(id, At("127.88.0.2")), 0);
  EXPECT_EQ(app_.ResolveAddr(id, At("239.1.2.3", 7174)), 0);
  app_.Expect(kAddrResolved);
  EXPECT_EQ(Join(id, "10.1.2.3", 0, &joined), EINVAL);  // no group
  EXPECT_EQ(Join(id, "239.1.2.3", 2, &joined), EINVAL);
  ASSERT_EQ(Join(id, "239.1.2.3", 0, &joined), 0);
  EXPECT_EQ((host_.groups[{1, group_}]), 1);
  const auto event = app_.Expect(kMulticastJoin);
  EXPECT_EQ(event.uid, 0x6cu);
  EXPECT_EQ(event.id, joined);
  EXPECT_EQ(event.param.ud.qp_num, 0xffffffu);
  EXPECT_EQ(event.param.ud.qkey, 0x01234567u);
  EXPECT_EQ(GidAt(event.param.ud.ah_attr.grh.dgid), group_);
  EXPECT_EQ(event.param.ud.ah_attr.grh.sgid_index, 1);
  EXPECT_EQ(event.param.ud.ah_attr.is_global, 1);
  uint32_t reported = 0;
  EXPECT_EQ(Leave(4711, &reported), ENOENT);
  EXPECT_EQ(Leave(joined, &reported), 0);
  EXPECT_EQ(reported, 1u);
  EXPECT_EQ((host_.groups[{1, group_}]), 0);
  EXPECT_EQ(Leave(joined, &reported), ENOENT);
  EXPECT_EQ(app_.Destroy(id, &reported), 0);
  EXPECT_EQ(reported, 2u);  // the join counts for the id too
}

TEST_F(Multicast, DestroyLeavesAllGroups) {
  const uint32_t id = app_.Create(RDMA_PS_UDP);
  EXPECT_EQ(app_.Bind(id, At("127.88.0.1")), 0);
  uint32_t joined;
  EXPECT_EQ(Join(id, "239.1.2.3", 0, &joined), 0);
  EXPECT_EQ(Join(id, "239.1.2.4", 1, &joined), 0);  // only to send
  EXPECT_EQ((host_.groups[{0, group_}]), 1);
  EXPECT_EQ((host_.groups[{0, Gid::FromIpv4(0xef010204)}]), 0);
  EXPECT_EQ(app_.Destroy(id), 0);
  EXPECT_EQ((host_.groups[{0, group_}]), 0);
  app_.ExpectNoEvent();
  EXPECT_EQ(host_.readable[app_.file()], 0);
}

TEST_F(Multicast, LegacyJoinAndIpv6Groups) {
  const uint32_t id = app_.Create(RDMA_PS_UDP);
  EXPECT_EQ(app_.Bind(id, At("127.88.0.1")), 0);
  rdma_ucm_join_ip_mcast command{};
  command.id = id;
  command.uid = 0x6d;
  At("239.1.2.3").Store(reinterpret_cast<std::byte*>(&command.addr));
  rdma_ucm_create_id_resp response{};
  EXPECT_EQ(app_.Call(RDMA_USER_CM_CMD_JOIN_IP_MCAST, command, &response, sizeof(response)), 0);
  EXPECT_EQ(app_.Expect(kMulticastJoin).uid, 0x6du);
  uint32_t joined;
  EXPECT_EQ(Join(id, "ff0e::1234", 0, &joined), 0);
  EXPECT_EQ(GidAt(app_.Expect(kMulticastJoin).param.ud.ah_attr.grh.dgid),
            *Gid::Parse("ff0e::1234"));
}

// --- Listing

TEST_F(OneHost, ListingShowsWhatIdsAre) {
  const uint32_t listener = app_.Listening(At("127.88.0.1", 7174));
  const uint32_t id = app_.Resolved(At("127.88.0.1", 7174));
  EXPECT_EQ(app_.Connect(id, 0x111), 0);
  std::map<uint32_t, CmIdInfo> seen;
  host_.agent().ForEachId([&](const CmIdInfo& info) { seen[info.id] = info; });
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_STREQ(seen[listener].state, "listen");
  EXPECT_EQ(seen[listener].source, "127.88.0.1:7174");
  EXPECT_EQ(seen[listener].destination, "");
  EXPECT_EQ(seen[listener].nic, 0);
  EXPECT_EQ(seen[listener].pid, 1);
  EXPECT_STREQ(seen[id].state, "connect");
  EXPECT_EQ(seen[id].destination, "127.88.0.1:7174");
  EXPECT_EQ(seen[id].local_qpn, 0x111u);
}

}  // namespace
}  // namespace verbena::nic
