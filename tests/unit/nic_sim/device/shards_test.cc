// SPDX-License-Identifier: Apache-2.0
//
// Users of a system-wide daemon on the device interface: their QPs talk, and nothing else of one
// reaches the other. A context's lock that the test holds stands for a copy that does not end.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "nic_sim/ctrl/resource_limits.h"
#include "tests/unit/nic_sim/device/raw_client.h"
#include "transport/qp_state.h"
#include "transport/verbs_types.h"

namespace verbena::testing {
namespace {

using transport::WcStatus;
using transport::WrOpcode;

// EAL can be initialised once per process: one device for all tests.
std::unique_ptr<nic::Device>& TheDevice() {
  static std::unique_ptr<nic::Device> device;
  return device;
}

class DeviceEnvironment : public ::testing::Environment {
 public:
  void SetUp() override { TheDevice() = StartDevice(2, /*strict=*/false, /*system=*/true); }
  void TearDown() override { TheDevice().reset(); }
};
const auto* const kEnvironment = ::testing::AddGlobalTestEnvironment(new DeviceEnvironment);

uid_t User(uint32_t n) { return geteuid() + 1 + n; }

// A client with a QP and registered memory.
struct End {
  End(uint32_t nic, uid_t uid) : client(*TheDevice(), nic, uid) {
    cq = client.CreateCq(256);
    qp = client.CreateQp(cq, cq);
    memory.resize(kBytes);
    key = client.RegMr(memory.data(), memory.size(), 15);
  }
  abi::Sge All() const { return {reinterpret_cast<uint64_t>(memory.data()), kBytes, key}; }
  void Write(uint64_t wr_id, const abi::Sge& from, const abi::Sge& to) {
    abi::SendWqe wqe{};
    wqe.wr_id = wr_id;
    wqe.opcode = static_cast<uint8_t>(WrOpcode::kRdmaWrite);
    wqe.flags = abi::kWqeSignaled;
    wqe.remote_address = to.address;
    wqe.rkey = to.lkey;
    client.WriteSend(qp, wqe, {from});
    client.Ring(qp);
  }
  void Expect(uint64_t wr_id, WcStatus status) {
    const auto cqe = client.Poll(cq, 10000);
    ASSERT_TRUE(cqe.has_value()) << TheDevice()->Dump().dump(1);
    EXPECT_EQ((*cqe)->wr_id, wr_id);
    EXPECT_EQ((*cqe)->status, static_cast<uint8_t>(status));
  }

  static constexpr uint32_t kBytes = 200000;
  RawClient client;
  RawClient::Cq cq;
  RawClient::Qp qp;
  std::vector<uint8_t> memory;
  uint32_t key = 0;
};

void Connect(End& a, End& b, uint8_t timeout = 14) {
  ASSERT_EQ(a.client.Connect(a.qp, b.qp.qpn, b.client.gid(), 7, timeout), 0);
  ASSERT_EQ(b.client.Connect(b.qp, a.qp.qpn, a.client.gid(), 7, timeout), 0);
}

uint64_t Dropped(const char* device, const char* reason) {
  return TheDevice()->Counters(device)["devices"][device]["drops"][reason];
}

TEST(TwoUsers, ExchangeDataThroughTheSwitch) {
  for (const uint32_t nic : {0u, 1u}) {
    End a(0, User(0));
    End b(nic, User(1));
    Connect(a, b);
    std::iota(a.memory.begin(), a.memory.end(), uint8_t{3});
    a.Write(1, a.All(), b.All());
    a.Expect(1, WcStatus::kSuccess);
    EXPECT_EQ(a.memory, b.memory);
    // And with the daemon's own user.
    End owner(0, geteuid());
    End other(nic, User(0));
    Connect(owner, other);
    other.Write(2, other.All(), owner.All());
    other.Expect(2, WcStatus::kSuccess);
    EXPECT_EQ(owner.memory, other.memory);
  }
}

TEST(TwoUsers, CannotTakeTheQkeyOfQp1) {
  const auto init = [](uid_t uid, uint32_t qkey) {
    RawClient client(*TheDevice(), 0, uid);
    const RawClient::Cq cq = client.CreateCq(16);
    abi::CreateQpRequest create{};
    create.pd = client.pd();
    create.send_cq = create.recv_cq = cq.handle;
    create.type = static_cast<uint32_t>(transport::QpType::kUd);
    create.caps = {4, 4, 1, 1, 0};
    create.srq = create.xrcd = abi::kNoHandle;
    abi::CreateQpReply created{};
    abi::ModifyQpRequest modify{};
    abi::ModifyQpReply modified{};
    nic::SegmentFds fds;
    const std::lock_guard guard(client.context().lock());
    EXPECT_EQ(client.context().CreateQp(create, &created, &fds), 0);
    for (const int fd : fds) close(fd);
    modify.handle = created.handle;
    modify.mask = transport::kQpAttrState | transport::kQpAttrPkeyIndex | transport::kQpAttrPort |
                  transport::kQpAttrQkey;
    modify.attr.state = static_cast<uint32_t>(transport::QpState::kInit);
    modify.attr.port_num = 1;
    modify.attr.qkey = qkey;
    return client.context().ModifyQp(modify, &modified);
  };
  EXPECT_EQ(init(User(0), 0x80010000), EPERM);
  EXPECT_EQ(init(User(0), 0x11111111), 0);
  EXPECT_EQ(init(geteuid(), 0x80010000), 0);
}

TEST(TwoUsers, CannotNameEachOthersMemory) {
  End victim(0, User(0));
  victim.memory.assign(End::kBytes, 7);
  End mine(0, User(1));
  End peer(0, User(1));
  Connect(mine, peer);
  mine.Write(1, mine.All(), victim.All());  // as a remote key
  mine.Expect(1, WcStatus::kRemAccessErr);
  End again(0, User(1));
  End peer_again(0, User(1));
  Connect(again, peer_again);
  again.Write(2, victim.All(), peer_again.All());  // as a local key
  again.Expect(2, WcStatus::kLocProtErr);
  EXPECT_EQ(victim.memory, std::vector<uint8_t>(End::kBytes, 7));
  EXPECT_EQ(peer_again.memory, std::vector<uint8_t>(End::kBytes, 0));
}

TEST(TwoUsers, HaveWakePagesOfTheirOwn) {
  RawClient a(*TheDevice(), 0, User(0));
  RawClient a_again(*TheDevice(), 1, User(0));
  RawClient b(*TheDevice(), 0, User(1));
  EXPECT_EQ(a.context().wake_page_fd(), a_again.context().wake_page_fd());
  EXPECT_NE(a.context().wake_page_fd(), b.context().wake_page_fd());
  EXPECT_NE(&a.context().lock(), &b.context().lock());
}

TEST(AUserWhoseShardStands, HoldsUpNobodyElse) {
  End held(0, User(0));
  End held_peer(0, User(0));
  Connect(held, held_peer);
  End a(0, User(1));
  End b(1, User(1));
  Connect(a, b);
  const std::lock_guard standing(held.client.context().lock());
  held.Write(1, held.All(), held_peer.All());
  for (uint64_t i = 0; i < 20; ++i) {
    a.Write(i, a.All(), b.All());
    a.Expect(i, WcStatus::kSuccess);
  }
  // New users come, new devices are opened, and a look says who stands.
  End c(0, User(2));
  EXPECT_EQ(TheDevice()->List("qp", User(1))["items"].size(), 2u);
  EXPECT_EQ(TheDevice()->List("context")["held_up"], nlohmann::json::array({User(0)}));
}

TEST(AUserWhoseShardStands, KeepsABoundedNumberOfTheOthersPackets) {
  End held(0, User(0));
  std::vector<std::unique_ptr<End>> more;  // QPs of the same shard
  std::vector<std::unique_ptr<End>> senders;
  for (int i = 0; i < 40; ++i) {
    senders.push_back(std::make_unique<End>(0, User(1)));
    more.push_back(std::make_unique<End>(0, User(0)));
    Connect(*senders.back(), *more.back(), /*timeout=*/10);  // 4 ms: they send again and again
  }
  End a(0, User(1));
  End b(1, User(1));
  Connect(a, b);
  {
    const std::lock_guard standing(held.client.context().lock());
    for (size_t i = 0; i < senders.size(); ++i)
      senders[i]->Write(1, senders[i]->All(), more[i]->All());
    a.Write(1, a.All(), b.All());
    a.Expect(1, WcStatus::kSuccess);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (Dropped("verbena0", "queue_full") == 0 && std::chrono::steady_clock::now() < end) {
      usleep(1000);
    }
    EXPECT_GT(Dropped("verbena0", "queue_full"), 0u);
    a.Write(2, a.All(), b.All());
    a.Expect(2, WcStatus::kSuccess);
  }
}

TEST(AnotherUser, GetsAQuarterOfTheQps) {
  RawClient user(*TheDevice(), 0, User(0));
  RawClient::Cq cq = user.CreateCq(16);
  abi::CreateQpRequest request{};
  request.srq = request.xrcd = abi::kNoHandle;
  request.pd = user.pd();
  request.send_cq = request.recv_cq = cq.handle;
  request.type = 2;
  request.caps = {1, 1, 1, 1, 0};
  abi::CreateQpReply reply{};
  std::vector<int> fds;
  uint32_t created = 0;
  int error = 0;
  {
    const std::lock_guard guard(user.context().lock());
    while ((error = user.context().CreateQp(request, &reply, &fds)) == 0) ++created;
  }
  EXPECT_EQ(error, ENOMEM);
  EXPECT_EQ(created, nic::kMaxQp / 4);
  for (const int fd : fds) close(fd);
  // Everybody else still gets theirs.
  End other(0, User(1));
  End owner(0, geteuid());
  Connect(other, owner);
}

TEST(Users, ComeAndGo) {
  for (uint32_t i = 0; i < 40; ++i) {
    End a(0, User(i));
    End b(0, User(i));
    Connect(a, b);
    a.Write(1, a.All(), b.All());
    a.Expect(1, WcStatus::kSuccess);
  }
  // At the same time there is a limit, and who comes after it is told.
  std::vector<std::unique_ptr<RawClient>> users;
  for (uint32_t i = 0; i + 1 < nic::kMaxShards; ++i) {
    users.push_back(std::make_unique<RawClient>(*TheDevice(), 0, User(i)));
  }
  abi::HelloReply reply{};
  nic::Context* context = nullptr;
  int fd = -1;
  std::string why;
  abi::Hello hello{};
  alignas(4096) static uint64_t guard[512] = {42};
  hello.guard_address = reinterpret_cast<uint64_t>(guard);
  hello.guard_magic = 42;
  const auto open_one_more = [&] {
    return TheDevice()->OpenContext(hello,
                                    {.pid = getpid(),
                                     .uid = User(100),
                                     .comm = "one more",
                                     .mem_fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC)},
                                    &reply, &fd, &context, &why);
  };
  EXPECT_EQ(open_one_more(), ENOMEM);
  EXPECT_EQ(why, "too many users have devices open");
  users.pop_back();
  ASSERT_EQ(open_one_more(), 0) << why;
  TheDevice()->CloseContext(context);
  close(fd);
}

}  // namespace
}  // namespace verbena::testing
