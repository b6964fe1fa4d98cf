// SPDX-License-Identifier: Apache-2.0
//
// Canaries: processes on the same daemon whose memory has a known pattern, beside
// a hostile application. It scribbles over its own rings, indices and doorbells,
// and as a peer it writes, reads and does atomics with every wrong address, key
// and length that it can make out of the right ones. What it was granted may
// change; nothing else may, and the daemon serves the others as before.
//
// VERBENA_CANARY_SEED and VERBENA_CANARY_ROUNDS choose others than the defaults.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/testing/daemon_fixture.h"
#include "tests/unit/nic_sim/ctrl/test_client.h"
#include "transport/qp_state.h"
#include "transport/types.h"
#include "transport/verbs_types.h"

namespace verbena {
namespace {

using nic::UniqueFd;

constexpr int kPairs = 24;  // QPs that each canary has towards the hostile peer
constexpr size_t kGranted = 8192;
constexpr size_t kKept = 16384;  // on each side of it

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 0);
}

// A device client as its own process would be, on the device interface by hand.
class RawProcess {
 public:
  struct Queue {
    uint32_t handle = 0;
    uint32_t qpn = 0;
    std::byte* sq = nullptr;
    std::byte* rq = nullptr;
    abi::RingLocation sq_location{}, rq_location{};
    uint32_t posted = 0;
  };

  RawProcess(const std::string& socket, uint32_t device) : client_(socket) {
    guard_ = Map(-1, 4096);
    const uint64_t magic = std::random_device{}() | uint64_t{1} << 40;
    std::memcpy(guard_, &magic, sizeof magic);
    abi::Hello hello = nic::GoodHello(device);
    hello.guard_address = reinterpret_cast<uint64_t>(guard_);
    hello.guard_magic = magic;
    std::vector<UniqueFd> fds;
    const abi::HelloReply reply = client_.Open(hello, &fds);
    if (reply.error != 0 || fds.size() != 4) Give("Hello");
    page_ = reinterpret_cast<abi::ContextPage*>(Map(fds[0].get(), sizeof(abi::ContextPage)));
    wake_ = reinterpret_cast<abi::WakePage*>(Map(fds[1].get(), sizeof(abi::WakePage)));
    pd_ = NewPd();
    abi::CreateCqRequest cq{};
    cq.cqe = 256;
    std::vector<UniqueFd> segments;
    const auto made = client_.Command<abi::CreateCqReply>(cq, abi::kCmdCreateCq, {}, &segments);
    if (made.header.error != 0) Give("CreateCq");
    cq_ = made.handle;
    cq_ring_ = MapRing(made.ring, &segments);
    cq_slots_ = made.ring.slots;
  }

  [[noreturn]] static void Give(const char* what) {
    std::fprintf(stderr, "%s failed in a child\n", what);
    _exit(3);
  }
  static std::byte* Map(int fd, size_t bytes) {
    void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) Give("mmap");
    return static_cast<std::byte*>(map);
  }
  std::byte* MapRing(const abi::RingLocation& location, std::vector<UniqueFd>* fds) {
    if (location.new_segment != 0) {
      segments_[location.segment] = Map(fds->front().get(), location.segment_bytes);
      fds->erase(fds->begin());
    }
    return segments_.at(location.segment) + location.offset;
  }

  uint32_t NewPd() { return client_.Command(abi::HandleRequest{}, abi::kCmdAllocPd).handle; }
  uint32_t Register(void* address, size_t bytes, uint32_t access, uint32_t pd) {
    abi::RegMrRequest request{};
    request.pd = pd;
    request.access = access;
    request.address = request.iova = reinterpret_cast<uint64_t>(address);
    request.length = bytes;
    const auto reply = client_.Command<abi::RegMrReply>(request, abi::kCmdRegMr);
    if (reply.header.error != 0) Give("RegMr");
    return reply.lkey;
  }
  Queue CreateQp() {
    abi::CreateQpRequest request{};
    request.srq = request.xrcd = abi::kNoHandle;
    request.pd = pd_;
    request.send_cq = request.recv_cq = cq_;
    request.type = 2;
    request.caps = {16, 16, 2, 2, 32};
    std::vector<UniqueFd> fds;
    const auto reply = client_.Command<abi::CreateQpReply>(request, abi::kCmdCreateQp, {}, &fds);
    if (reply.header.error != 0) Give("CreateQp");
    Queue queue;
    queue.handle = reply.handle;
    queue.qpn = reply.qpn;
    queue.sq_location = reply.sq;
    queue.rq_location = reply.rq;
    queue.sq = MapRing(reply.sq, &fds);
    queue.rq = MapRing(reply.rq, &fds);
    return queue;
  }
  void Connect(const Queue& queue, uint32_t peer, uint32_t peer_device) {
    using namespace transport;
    abi::ModifyQpRequest request{};
    request.handle = queue.handle;
    abi::QpAttr& attr = request.attr;
    attr.port_num = 1;
    attr.access_flags = 15;
    attr.path_mtu = 3;
    attr.dest_qpn = peer;
    attr.max_dest_rd_atomic = attr.max_rd_atomic = 4;
    attr.min_rnr_timer = 1;
    attr.timeout = 8;
    attr.retry_cnt = 2;
    attr.rnr_retry = 1;
    attr.ah.is_global = attr.ah.port_num = attr.ah.sgid_index = 1;
    Gid::FromIpv4(0x7f580001 + peer_device).Store(reinterpret_cast<std::byte*>(attr.ah.dgid));
    const uint32_t masks[] = {kQpAttrState | kQpAttrPkeyIndex | kQpAttrPort | kQpAttrAccessFlags,
                              kQpAttrState | kQpAttrAv | kQpAttrPathMtu | kQpAttrDestQpn |
                                  kQpAttrRqPsn | kQpAttrMaxDestRdAtomic | kQpAttrMinRnrTimer,
                              kQpAttrState | kQpAttrTimeout | kQpAttrRetryCnt | kQpAttrRnrRetry |
                                  kQpAttrSqPsn | kQpAttrMaxQpRdAtomic};
    for (uint32_t state = 1; state <= 3; ++state) {
      attr.state = state;
      request.mask = masks[state - 1];
      const auto reply = client_.Command<abi::ModifyQpReply>(request, abi::kCmdModifyQp);
      if (reply.header.error != 0) Give("ModifyQp");
    }
  }

  void Post(Queue& queue, const abi::SendWqe& wqe, std::vector<abi::Sge> sges) {
    std::byte* slot = queue.sq + uint64_t{queue.posted++ & (queue.sq_location.slots - 1)} *
                                     queue.sq_location.stride;
    std::memcpy(slot, &wqe, sizeof wqe);
    if (!sges.empty()) {
      std::memcpy(slot + sizeof wqe, sges.data(), sges.size() * sizeof(abi::Sge));
    }
    page_->qp[queue.handle].sq_producer.store(queue.posted);
  }
  void Ring(const Queue& queue) {
    abi::FullFence();
    page_->doorbell_bits[queue.handle / 64].fetch_or(uint64_t{1} << (queue.handle % 64));
    page_->doorbell_summary[queue.handle / 64 / 64].fetch_or(uint64_t{1}
                                                             << (queue.handle / 64 % 64));
    for (abi::WakeWord& word : wake_->threads) {
      if (word.armed.exchange(0) == 1) {
        syscall(SYS_futex, &word.armed, FUTEX_WAKE, 1, nullptr, nullptr, 0);
      }
    }
  }

  abi::ContextPage& page() { return *page_; }
  std::byte* cq_ring() { return cq_ring_; }
  size_t cq_bytes() const { return cq_slots_ * sizeof(abi::Cqe); }
  uint32_t cq() const { return cq_; }
  uint32_t pd() const { return pd_; }

 private:
  nic::Client client_;
  std::byte* guard_;
  abi::ContextPage* page_;
  abi::WakePage* wake_;
  uint32_t pd_ = 0;
  uint32_t cq_ = 0;
  std::byte* cq_ring_ = nullptr;
  uint32_t cq_slots_ = 0;
  std::map<uint32_t, std::byte*> segments_;
};

// What a canary tells the hostile peer, in memory that all share.
struct Invitation {
  uint32_t qpn[kPairs];
  uint64_t granted;
  uint32_t granted_key;
  uint32_t kept_key;  // right, but of another protection domain
};
struct Board {
  std::atomic<int> canaries_ready;
  std::atomic<int> hostile_ready;
  std::atomic<int> canaries_connected;
  std::atomic<int> hostile_done;
  std::atomic<uint64_t> operations;
  Invitation invitation[2];
  uint32_t hostile_qpn[2][kPairs];
};

void WaitFor(const std::atomic<int>& value, int wanted) {
  for (int i = 0; i < 60000; ++i) {
    if (value.load() >= wanted) return;
    usleep(1000);
  }
  RawProcess::Give("waiting for the others");
}

// Status 0: all that was not granted is as it was.
[[noreturn]] void RunCanary(const std::string& socket, Board* board, int index) {
  RawProcess self(socket, 1);
  // Kept, granted, kept; and memory that nobody has registered.
  std::byte* memory = RawProcess::Map(-1, 2 * kKept + kGranted);
  const std::vector<std::byte> plain(1 << 20, std::byte{0x5c});
  std::fill_n(memory, 2 * kKept + kGranted, std::byte{0xc5});
  std::byte* granted = memory + kKept;
  std::fill_n(granted, kGranted, std::byte{0x11});
  Invitation& invitation = board->invitation[index];
  invitation.granted = reinterpret_cast<uint64_t>(granted);
  invitation.granted_key = self.Register(granted, kGranted, 15, self.pd());
  invitation.kept_key = self.Register(memory, kKept, 15, self.NewPd());
  self.Register(granted + kGranted, kKept, transport::kAccessLocalWrite, self.pd());
  std::vector<RawProcess::Queue> queues;
  for (uint32_t& qpn : invitation.qpn) {
    queues.push_back(self.CreateQp());
    qpn = queues.back().qpn;
  }
  ++board->canaries_ready;
  WaitFor(board->hostile_ready, 1);
  for (int i = 0; i < kPairs; ++i) {
    self.Connect(queues[static_cast<size_t>(i)], board->hostile_qpn[index][i], 0);
  }
  ++board->canaries_connected;
  WaitFor(board->hostile_done, 1);
  usleep(300000);  // what is on its way
  const auto kept = [](std::byte byte) { return byte == std::byte{0xc5}; };
  if (!std::all_of(memory, granted, kept)) _exit(10);
  if (!std::all_of(granted + kGranted, granted + kGranted + kKept, kept)) _exit(11);
  if (plain != std::vector<std::byte>(1 << 20, std::byte{0x5c})) _exit(12);
  // The grant was used: what has failed is the rest.
  _exit(granted[0] == std::byte{0x11} ? 13 : 0);
}

class Hostile {
 public:
  Hostile(const std::string& socket, Board* board, uint64_t seed)
      : self_(socket, 0), board_(*board), random_(seed) {
    own_ = RawProcess::Map(-1, kGranted);
    std::fill_n(own_, kGranted, std::byte{0x66});
    key_ = self_.Register(own_, kGranted, 15, self_.pd());
    for (int canary = 0; canary < 2; ++canary) {
      for (int i = 0; i < kPairs; ++i) {
        queues_.push_back(self_.CreateQp());
        board_.hostile_qpn[canary][i] = queues_.back().qpn;
      }
    }
  }

  void Run(uint64_t rounds) {
    WaitFor(board_.canaries_ready, 2);
    ++board_.hostile_ready;
    for (size_t q = 0; q < queues_.size(); ++q) {
      self_.Connect(queues_[q], board_.invitation[q / kPairs].qpn[q % kPairs], 1);
    }
    WaitFor(board_.canaries_connected, 2);
    for (uint64_t round = 0; round < rounds; ++round) {
      const size_t q = round % queues_.size();
      const Invitation& target = board_.invitation[q / kPairs];
      RawProcess::Queue& queue = queues_[q];
      // First what is allowed, so that the connection is shown to work.
      if (round < queues_.size())
        Post(queue, target.granted + q % kPairs * 256, 64, target.granted_key, 0);
      for (uint64_t i = 0, n = random_() % 4; i < n; ++i) PostWrong(queue, target);
      if (random_() % 3 == 0) Scribble(queue);
      self_.Ring(queue);
      board_.operations += 1;
      if (round % 64 == 0) usleep(200);
    }
    usleep(200000);
    // Nothing that was kept can have been read.
    const std::byte secret[8] = {std::byte{0xc5}, std::byte{0xc5}, std::byte{0xc5},
                                 std::byte{0xc5}, std::byte{0xc5}, std::byte{0xc5},
                                 std::byte{0xc5}, std::byte{0xc5}};
    if (std::search(own_, own_ + kGranted, secret, secret + 8) != own_ + kGranted) _exit(14);
  }

 private:
  void Post(RawProcess::Queue& queue, uint64_t address, uint32_t bytes, uint32_t key,
            uint8_t opcode) {
    abi::SendWqe wqe{};
    wqe.opcode = opcode;
    wqe.flags = abi::kWqeSignaled;
    wqe.num_sge = 1;
    wqe.remote_address = address;
    wqe.rkey = key;
    self_.Post(queue, wqe, {{reinterpret_cast<uint64_t>(own_), bytes, key_}});
  }
  void PostWrong(RawProcess::Queue& queue, const Invitation& target) {
    const uint64_t addresses[] = {target.granted - 1 - random_() % kKept,
                                  target.granted + kGranted - random_() % 64,
                                  target.granted + kGranted + random_() % kKept,
                                  target.granted + random_() % kGranted,
                                  random_(),
                                  0};
    const uint32_t keys[] = {target.granted_key,
                             target.kept_key,
                             target.granted_key + 256,
                             target.granted_key ^ 1,
                             key_,
                             static_cast<uint32_t>(random_())};
    const uint32_t lengths[] = {1, 8, 64, 4096, 8192, static_cast<uint32_t>(random_())};
    static constexpr uint8_t kOpcodes[] = {0, 1, 4, 5, 6, 2, 255};
    Post(queue, addresses[random_() % 6], lengths[random_() % 6], keys[random_() % 6],
         kOpcodes[random_() % 7]);
  }
  void Scribble(RawProcess::Queue& queue) {
    const auto random_bytes = [this](std::byte* at, size_t bytes) {
      for (size_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>(random_());
    };
    const size_t ring = size_t{queue.sq_location.slots} * queue.sq_location.stride;
    abi::ContextPage& page = self_.page();
    switch (random_() % 6) {
      case 0:
        random_bytes(queue.sq + random_() % (ring - 64), 64);
        return;
      case 1:
        page.qp[queue.handle].sq_producer.store(static_cast<uint32_t>(random_()));
        return;
      case 2:
        page.qp[queue.handle].rq_producer.store(static_cast<uint32_t>(random_()));
        return;
      case 3:
        page.cq[self_.cq()].consumer.store(static_cast<uint32_t>(random_()));
        return;
      case 4: {
        const size_t word = random_() % 256;
        page.doorbell_bits[word].store(random_());
        page.doorbell_summary[word / 64].store(random_());
        return;
      }
      default:
        random_bytes(self_.cq_ring() + random_() % (self_.cq_bytes() - 64), 64);
        return;
    }
  }

  RawProcess self_;
  Board& board_;
  std::mt19937_64 random_;
  std::byte* own_;
  uint32_t key_;
  std::vector<RawProcess::Queue> queues_;
};

std::string DescribeStatus(int status) {
  static const std::map<int, const char*> kMeaning = {
      {10, "memory before the granted region has changed"},
      {11, "memory behind the granted region has changed"},
      {12, "memory that was never registered has changed"},
      {14, "it has read memory that was not granted"},
      {13, "the hostile peer never got through: the test shows nothing"}};
  if (!WIFEXITED(status)) return "ended by signal " + std::to_string(WTERMSIG(status));
  const auto found = kMeaning.find(WEXITSTATUS(status));
  return found != kMeaning.end() ? found->second
                                 : "exit status " + std::to_string(WEXITSTATUS(status));
}

TEST(Canaries, SurviveAHostileApplicationAndPeer) {
  testing::PrivateDaemon daemon(2);
  const auto status = nlohmann::json::parse(daemon.Verbena({"status", "--json"}).output, nullptr,
                                            /*allow_exceptions=*/false);
  ASSERT_TRUE(status.is_object() && status["socket"].is_string());
  const std::string socket = status["socket"];
  auto* board = new (RawProcess::Map(open("/dev/zero", O_RDWR | O_CLOEXEC), sizeof(Board))) Board{};
  const auto start = [](auto run) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(120);
      run();
      _exit(0);
    }
    return child;
  };
  std::vector<pid_t> canaries;
  for (int i = 0; i < 2; ++i) {
    canaries.push_back(start([&] { RunCanary(socket, board, i); }));
  }
  const uint64_t rounds = FromEnvironment("VERBENA_CANARY_ROUNDS", 20000);
  const pid_t hostile =
      start([&] { Hostile(socket, board, FromEnvironment("VERBENA_CANARY_SEED", 1)).Run(rounds); });
  int result = 0;
  ASSERT_EQ(waitpid(hostile, &result, 0), hostile);
  EXPECT_EQ(result, 0) << "hostile application: " << DescribeStatus(result);
  board->hostile_done = 1;
  for (const pid_t canary : canaries) {
    ASSERT_EQ(waitpid(canary, &result, 0), canary);
    EXPECT_EQ(result, 0) << "canary: " << DescribeStatus(result);
  }
  EXPECT_EQ(board->operations, rounds);
  // The hardware is the same process as before, and serves.
  const auto after = daemon.Verbena({"counters"});
  EXPECT_EQ(after.status, 0) << after.output << daemon.Dump();
}

}  // namespace
}  // namespace verbena
