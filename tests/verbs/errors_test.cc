// SPDX-License-Identifier: Apache-2.0
//
// Errors of RC, from the specification's tables: completion status at both ends, QP states, flush
// order, async events.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

// What a case works with. The requester is `a`, the responder `b`.
struct Scene {
  Scene(const std::string& to, const PathOptions& path_a, const PathOptions& path_b)
      : a(EndOptions{}), b(EndOptions{.device = to}) {
    a.Connect(b.address(), path_a);
    b.Connect(a.address(), path_b);
  }
  RcEnd a, b;
  Memory local{a.pd(), 16384};
  Memory remote{b.pd(), 16384};
  ~Scene() {
    while (!extra.empty()) extra.pop_back();
  }

  // Further objects of single cases, released before the ends, the last one first.
  std::vector<std::shared_ptr<void>> extra;

  template <typename T, typename... A>
  std::shared_ptr<T> Make(A&&... arguments) {
    auto object = std::make_shared<T>(std::forward<A>(arguments)...);
    extra.push_back(object);
    return object;
  }
};

struct Wr {
  ibv_send_wr wr;
  std::vector<ibv_sge> sges;
};

struct Case {
  const char* name;
  // Builds the failing request.
  Wr (*request)(Scene&);
  // Receives 100 and 101 of the responder; null: 4096 bytes each.
  std::vector<ibv_sge> (*receive)(Scene&);
  std::vector<ibv_wc_status> requester;  // one of these
  // Status of receive 100; later receives flush. nullopt: the responder stays in RTS and its
  // receives stay posted.
  std::optional<ibv_wc_status> receive_status;
  std::optional<ibv_event_type> event;  // at the responder
  unsigned responder_rights = kAllAccess;
  // No requests behind the failing one: those may be executed before a READ fails, because READs
  // are not ordered before later requests.
  bool alone = false;
};

Wr Send(Scene& s, uint32_t length) { return {SendWr(2, IBV_WR_SEND, 0), {s.local.sge(0, length)}}; }
Wr Rdma(Scene& s, ibv_wr_opcode opcode, uint64_t address, uint32_t rkey, uint32_t length = 64) {
  return {RdmaWr(2, opcode, address, rkey, 0), {s.local.sge(0, length)}};
}
Wr Atomic(Scene& s, uint64_t address, uint32_t rkey) {
  Wr result = {AtomicWr(2, IBV_WR_ATOMIC_FETCH_AND_ADD, address, rkey, 1), {s.local.sge(0, 8)}};
  result.wr.send_flags = 0;
  return result;
}

constexpr auto kFlush = IBV_WC_WR_FLUSH_ERR;
constexpr unsigned kNoRemote = IBV_ACCESS_LOCAL_WRITE;

const std::vector<Case>& Cases() {
  static const auto* cases = new std::vector<Case>{
      // Remote access: key, protection domain, bounds, rights of the region.
      {"WriteWithUnknownKey",
       [](Scene& s) {
         return Rdma(s, IBV_WR_RDMA_WRITE, s.remote.address(), s.remote.rkey() ^ 0x5a5a5a00);
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"WriteWithWrongKeyTag",
       [](Scene& s) { return Rdma(s, IBV_WR_RDMA_WRITE, s.remote.address(), s.remote.rkey() ^ 1); },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"ReadWithUnknownKey",
       [](Scene& s) {
         return Rdma(s, IBV_WR_RDMA_READ, s.remote.address(), s.remote.rkey() ^ 0x5a5a5a00);
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"AtomicWithUnknownKey",
       [](Scene& s) { return Atomic(s, s.remote.address(), s.remote.rkey() ^ 0x5a5a5a00); },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"WriteWithKeyOfADeregisteredRegion",
       [](Scene& s) {
         uint32_t rkey = 0;
         {
           Memory gone(s.b.pd(), 4096);
           rkey = gone.rkey();
         }
         return Rdma(s, IBV_WR_RDMA_WRITE, s.remote.address(), rkey);
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"WriteWithKeyOfAnotherPd",
       [](Scene& s) {
         auto pd = std::shared_ptr<ibv_pd>(ibv_alloc_pd(s.b.context()), VerbsDeleter());
         s.extra.push_back(pd);
         auto memory = s.Make<Memory>(pd.get(), size_t{4096});
         return Rdma(s, IBV_WR_RDMA_WRITE, memory->address(), memory->rkey());
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"WriteBeyondTheEnd",
       [](Scene& s) {
         return Rdma(s, IBV_WR_RDMA_WRITE, s.remote.address(16384 - 63), s.remote.rkey());
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"WriteBeforeTheStart",
       [](Scene& s) { return Rdma(s, IBV_WR_RDMA_WRITE, s.remote.address() - 1, s.remote.rkey()); },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"LongWriteBeyondTheEnd",
       [](Scene& s) {
         return Rdma(s, IBV_WR_RDMA_WRITE, s.remote.address(8192), s.remote.rkey(), 8193);
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"ReadBeyondTheEnd",
       [](Scene& s) {
         return Rdma(s, IBV_WR_RDMA_READ, s.remote.address(8192), s.remote.rkey(), 8193);
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"WriteToARegionWithoutTheRight",
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.b.pd(), size_t{4096}, kNoRemote | IBV_ACCESS_REMOTE_READ);
         return Rdma(s, IBV_WR_RDMA_WRITE, memory->address(), memory->rkey());
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"ReadFromARegionWithoutTheRight",
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.b.pd(), size_t{4096}, kNoRemote | IBV_ACCESS_REMOTE_WRITE);
         return Rdma(s, IBV_WR_RDMA_READ, memory->address(), memory->rkey());
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"AtomicOnARegionWithoutTheRight",
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.b.pd(), size_t{4096}, kNoRemote | IBV_ACCESS_REMOTE_WRITE);
         return Atomic(s, memory->address(), memory->rkey());
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},
      {"WriteImmWithUnknownKeyConsumesNoReceive",
       [](Scene& s) {
         return Rdma(s, IBV_WR_RDMA_WRITE_WITH_IMM, s.remote.address(), s.remote.rkey() ^ 1);
       },
       nullptr,
       {IBV_WC_REM_ACCESS_ERR},
       kFlush,
       IBV_EVENT_QP_ACCESS_ERR},

      // Operations that the responder's QP does not allow; a misaligned atomic.
      {"WriteNotAllowedByTheQp",
       [](Scene& s) { return Rdma(s, IBV_WR_RDMA_WRITE, s.remote.address(), s.remote.rkey()); },
       nullptr,
       {IBV_WC_REM_INV_REQ_ERR},
       kFlush,
       IBV_EVENT_QP_REQ_ERR,
       IBV_ACCESS_REMOTE_READ},
      {"ReadNotAllowedByTheQp",
       [](Scene& s) { return Rdma(s, IBV_WR_RDMA_READ, s.remote.address(), s.remote.rkey()); },
       nullptr,
       {IBV_WC_REM_INV_REQ_ERR},
       kFlush,
       IBV_EVENT_QP_REQ_ERR,
       IBV_ACCESS_REMOTE_WRITE},
      {"AtomicNotAllowedByTheQp",
       [](Scene& s) { return Atomic(s, s.remote.address(), s.remote.rkey()); },
       nullptr,
       {IBV_WC_REM_INV_REQ_ERR},
       kFlush,
       IBV_EVENT_QP_REQ_ERR,
       IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ},
      {"AtomicAtAMisalignedAddress",
       [](Scene& s) { return Atomic(s, s.remote.address(4), s.remote.rkey()); },
       nullptr,
       {IBV_WC_REM_INV_REQ_ERR},
       kFlush,
       IBV_EVENT_QP_REQ_ERR},

      // Receives.
      {"SendLongerThanTheReceive",
       [](Scene& s) { return Send(s, 4097); },
       nullptr,
       {IBV_WC_REM_INV_REQ_ERR},
       IBV_WC_LOC_LEN_ERR,
       std::nullopt},
      {"SendOfManyPacketsLongerThanTheReceive",
       [](Scene& s) { return Send(s, 16384); },
       nullptr,
       {IBV_WC_REM_INV_REQ_ERR},
       IBV_WC_LOC_LEN_ERR,
       std::nullopt},
      {"SendIntoAReceiveWithoutRoom",
       [](Scene& s) { return Send(s, 1); },
       [](Scene&) { return std::vector<ibv_sge>(); },
       {IBV_WC_REM_INV_REQ_ERR},
       IBV_WC_LOC_LEN_ERR,
       std::nullopt},
      {"SendIntoAReceiveWithAnUnknownKey",
       [](Scene& s) { return Send(s, 64); },
       [](Scene& s) {
         ibv_sge sge = s.remote.sge(0, 4096);
         sge.lkey ^= 0x77777700;
         return std::vector<ibv_sge>{sge};
       },
       {IBV_WC_REM_OP_ERR},
       IBV_WC_LOC_PROT_ERR,
       std::nullopt},
      {"SendIntoAReceiveBeyondItsRegion",
       [](Scene& s) { return Send(s, 64); },
       [](Scene& s) { return std::vector<ibv_sge>{s.remote.sge(16384 - 32, 64)}; },
       {IBV_WC_REM_OP_ERR},
       IBV_WC_LOC_PROT_ERR,
       std::nullopt},
      {"SendIntoAReceiveWithoutLocalWrite",
       [](Scene& s) { return Send(s, 64); },
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.b.pd(), size_t{4096}, 0u);
         return std::vector<ibv_sge>{memory->sge(0, 4096)};
       },
       {IBV_WC_REM_OP_ERR},
       IBV_WC_LOC_PROT_ERR,
       std::nullopt},
      {"SendIntoAnUnmappedPage",
       [](Scene& s) { return Send(s, 3000); },
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.b.pd(), size_t{8192});
         memory->Unmap(4096, 4096);
         return std::vector<ibv_sge>{memory->sge(2000, 4096)};
       },
       {IBV_WC_REM_OP_ERR},
       IBV_WC_LOC_PROT_ERR,
       std::nullopt},

      // Pages that went away below a registration: found while copying. Real devices pin them;
      // ours reports the responder's local fault.
      {"WriteToAnUnmappedPage",
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.b.pd(), size_t{8192});
         memory->Unmap(4096, 4096);
         return Rdma(s, IBV_WR_RDMA_WRITE, memory->address(4000), memory->rkey(), 3000);
       },
       nullptr,
       {IBV_WC_REM_OP_ERR, IBV_WC_REM_ACCESS_ERR},
       kFlush,
       std::nullopt},
      {"ReadFromAnUnmappedPage",
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.b.pd(), size_t{8192});
         memory->Unmap(4096, 4096);
         return Rdma(s, IBV_WR_RDMA_READ, memory->address(4000), memory->rkey(), 3000);
       },
       nullptr,
       {IBV_WC_REM_OP_ERR, IBV_WC_REM_ACCESS_ERR},
       kFlush,
       std::nullopt,
       kAllAccess,
       true},
      {"AtomicOnAnUnmappedPage",
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.b.pd(), size_t{8192});
         memory->Unmap(4096, 4096);
         return Atomic(s, memory->address(4096), memory->rkey());
       },
       nullptr,
       {IBV_WC_REM_OP_ERR, IBV_WC_REM_ACCESS_ERR},
       kFlush,
       std::nullopt},

      // The requester's own memory: no packet, the responder does not notice.
      {"GatherWithUnknownKey",
       [](Scene& s) {
         Wr wr = Send(s, 64);
         wr.sges[0].lkey ^= 0x77777700;
         return wr;
       },
       nullptr,
       {IBV_WC_LOC_PROT_ERR},
       std::nullopt,
       std::nullopt},
      {"GatherBeyondTheRegion",
       [](Scene& s) {
         Wr wr = Send(s, 64);
         wr.sges[0] = s.local.sge(16384 - 63, 64);
         return wr;
       },
       nullptr,
       {IBV_WC_LOC_PROT_ERR},
       std::nullopt,
       std::nullopt},
      {"GatherWithKeyOfAnotherPd",
       [](Scene& s) {
         auto pd = std::shared_ptr<ibv_pd>(ibv_alloc_pd(s.a.context()), VerbsDeleter());
         s.extra.push_back(pd);
         auto memory = s.Make<Memory>(pd.get(), size_t{4096});
         return Wr{SendWr(2, IBV_WR_SEND, 0), {memory->sge(0, 64)}};
       },
       nullptr,
       {IBV_WC_LOC_PROT_ERR},
       std::nullopt,
       std::nullopt},
      {"GatherFromAnUnmappedPage",
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.a.pd(), size_t{8192});
         memory->Unmap(4096, 4096);
         return Wr{SendWr(2, IBV_WR_SEND, 0), {memory->sge(4096, 64)}};
       },
       nullptr,
       {IBV_WC_LOC_PROT_ERR},
       std::nullopt,
       std::nullopt},
      {"ReadIntoARegionWithoutLocalWrite",
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.a.pd(), size_t{4096}, 0u);
         return Wr{RdmaWr(2, IBV_WR_RDMA_READ, s.remote.address(), s.remote.rkey(), 0),
                   {memory->sge(0, 64)}};
       },
       nullptr,
       {IBV_WC_LOC_PROT_ERR},
       std::nullopt,
       std::nullopt},
      {"ReadIntoAnUnmappedPage",
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.a.pd(), size_t{8192});
         memory->Unmap(4096, 4096);
         return Wr{RdmaWr(2, IBV_WR_RDMA_READ, s.remote.address(), s.remote.rkey(), 0),
                   {memory->sge(4000, 1000)}};
       },
       nullptr,
       {IBV_WC_LOC_PROT_ERR},
       std::nullopt,
       std::nullopt,
       kAllAccess,
       true},
      {"AtomicResultIntoARegionWithoutLocalWrite",
       [](Scene& s) {
         auto memory = s.Make<Memory>(s.a.pd(), size_t{4096}, 0u);
         Wr wr = Atomic(s, s.remote.address(), s.remote.rkey());
         wr.sges = {memory->sge(0, 8)};
         return wr;
       },
       nullptr,
       {IBV_WC_LOC_PROT_ERR},
       std::nullopt,
       std::nullopt},
  };
  return *cases;
}

class RcError : public ::testing::TestWithParam<std::tuple<size_t, const char*>> {};

TEST_P(RcError, EndsTheConnectionAsTheTableSays) {
  const auto& [index, to] = GetParam();
  const Case& c = Cases()[index];
  PathOptions path_b;
  path_b.access = c.responder_rights;
  Scene s(to, {}, path_b);
  memset(s.remote.data(), 0x11, s.remote.size());

  ASSERT_EQ(s.b.PostRecv(99), 0);
  for (uint64_t id : {100u, 101u}) {
    const std::vector<ibv_sge> sges =
        c.receive ? c.receive(s) : std::vector<ibv_sge>{s.remote.sge(id == 100 ? 0 : 4096, 4096)};
    ASSERT_EQ(s.b.PostRecv(id, sges), 0);
  }
  ASSERT_EQ(s.a.PostRecv(200, {s.local.sge(0, 64)}), 0);
  ASSERT_EQ(s.a.PostRecv(201, {s.local.sge(0, 64)}), 0);

  // A good request before, the unsignalled bad one, two behind it.
  const Wr wr = c.request(s);
  ASSERT_EQ(s.a.PostSend(SendWr(1)), 0);
  const ibv_wc sent = PollOne(s.a.send_cq());
  EXPECT_EQ(sent.wr_id, 1u);
  EXPECT_EQ(sent.status, IBV_WC_SUCCESS) << Describe(sent);
  const ibv_wc received = PollOne(s.b.recv_cq());
  EXPECT_EQ(received.wr_id, 99u);
  EXPECT_EQ(received.status, IBV_WC_SUCCESS) << Describe(received);
  ASSERT_EQ(s.a.PostSend(wr.wr, wr.sges), 0);
  if (!c.alone) {
    s.a.PostSend(SendWr(3), {s.local.sge(0, 8)});
    s.a.PostSend(SendWr(4, IBV_WR_SEND, 0), {s.local.sge(0, 8)});
  }

  const ibv_wc failed = PollOne(s.a.send_cq());
  EXPECT_EQ(failed.wr_id, 2u);
  EXPECT_NE(std::find(c.requester.begin(), c.requester.end(), failed.status), c.requester.end())
      << Describe(failed);
  for (uint64_t id = 3; id <= 4 && !c.alone; ++id) {
    const ibv_wc wc = PollOne(s.a.send_cq());
    EXPECT_EQ(wc.wr_id, id);
    EXPECT_EQ(wc.status, kFlush) << Describe(wc);
  }
  for (const uint64_t id : {200u, 201u}) {
    const ibv_wc wc = PollOne(s.a.recv_cq());
    EXPECT_EQ(wc.wr_id, id);
    EXPECT_EQ(wc.status, kFlush) << Describe(wc);
  }
  EXPECT_EQ(s.a.State(), IBV_QPS_ERR);

  if (c.receive_status) {
    const ibv_wc first = PollOne(s.b.recv_cq());
    EXPECT_EQ(first.wr_id, 100u);
    EXPECT_EQ(first.status, *c.receive_status) << Describe(first);
    const ibv_wc second = PollOne(s.b.recv_cq());
    EXPECT_EQ(second.wr_id, 101u);
    EXPECT_EQ(second.status, kFlush) << Describe(second);
    EXPECT_EQ(s.b.State(), IBV_QPS_ERR);
  } else {
    EXPECT_TRUE(StaysEmpty(s.b.recv_cq(), Milliseconds(20)));
    EXPECT_EQ(s.b.State(), IBV_QPS_RTS);
  }
  if (c.event) {
    // The connection may have reported its first packet before.
    std::optional<ibv_async_event> event;
    do {
      event = NextAsyncEvent(s.b.context(), Milliseconds(5000));
    } while (event && event->event_type == IBV_EVENT_COMM_EST);
    ASSERT_TRUE(event) << "no async event";
    EXPECT_EQ(event->event_type, *c.event) << ibv_event_type_str(event->event_type);
    EXPECT_EQ(event->element.qp, s.b.qp());
  }
  EXPECT_TRUE(StaysEmpty(s.a.send_cq(), Milliseconds(5)));
}

INSTANTIATE_TEST_SUITE_P(Table, RcError,
                         ::testing::Combine(::testing::Range(size_t{0}, Cases().size()),
                                            ::testing::Values("verbena1", "verbena0")),
                         [](const auto& info) {
                           return std::string(Cases()[std::get<0>(info.param)].name) +
                                  (std::get<1>(info.param)[7] == '1' ? "BetweenTwoNics"
                                                                     : "OnOneNic");
                         });

class RetryError : public ::testing::Test {
 protected:
  void TearDown() override { VerbenaHere({"fault", "clear"}); }
};

void ExpectDead(RcEnd& end, ibv_wc_status status) {
  const ibv_wc failed = PollOne(end.send_cq());
  EXPECT_EQ(failed.wr_id, 1u);
  EXPECT_EQ(failed.status, status) << Describe(failed);
  const ibv_wc flushed = PollOne(end.send_cq());
  EXPECT_EQ(flushed.wr_id, 2u);
  EXPECT_EQ(flushed.status, kFlush) << Describe(flushed);
  EXPECT_EQ(end.State(), IBV_QPS_ERR);
}

TEST_F(RetryError, NoReceiveExhaustsTheRnrRetries) {
  PathOptions path;
  path.rnr_retry = 2;
  path.min_rnr_timer = 10;  // 0.32 ms
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b, path);
  Memory source(a.pd(), 64), target(b.pd(), 64);
  ASSERT_EQ(a.PostSend(SendWr(1, IBV_WR_SEND, 0), {source.sge(0, 64)}), 0);
  ASSERT_EQ(a.PostSend(SendWr(2), {source.sge(0, 64)}), 0);
  ExpectDead(a, IBV_WC_RNR_RETRY_EXC_ERR);
  EXPECT_EQ(b.State(), IBV_QPS_RTS);
  ASSERT_EQ(b.PostRecv(5, {target.sge(0, 64)}), 0);
  EXPECT_TRUE(StaysEmpty(b.recv_cq(), Milliseconds(20)));
}

TEST_F(RetryError, RnrRetryZeroFailsAtTheFirstNak) {
  PathOptions path;
  path.rnr_retry = 0;
  RcEnd a, b;
  ConnectPair(a, b, path);
  ASSERT_EQ(a.PostSend(SendWr(1)), 0);
  ASSERT_EQ(a.PostSend(SendWr(2)), 0);
  ExpectDead(a, IBV_WC_RNR_RETRY_EXC_ERR);
}

TEST_F(RetryError, ADestroyedPeerExhaustsTheRetries) {
  PathOptions path;
  path.timeout = 8;  // 1 ms
  path.retry_cnt = 3;
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b, path);
  b.DestroyQp();
  Memory source(a.pd(), 64);
  ASSERT_EQ(a.PostSend(SendWr(1, IBV_WR_SEND, 0), {source.sge(0, 64)}), 0);
  ASSERT_EQ(a.PostSend(SendWr(2), {source.sge(0, 64)}), 0);
  ExpectDead(a, IBV_WC_RETRY_EXC_ERR);
}

TEST_F(RetryError, APeerThatIsNotReadyYetIsSilent) {
  PathOptions path;
  path.timeout = 8;
  path.retry_cnt = 1;
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ASSERT_EQ(b.ToInit(), 0);
  a.Connect(b.address(), path);
  ASSERT_EQ(a.PostSend(SendWr(1)), 0);
  ASSERT_EQ(a.PostSend(SendWr(2)), 0);
  ExpectDead(a, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(b.State(), IBV_QPS_INIT);
}

TEST_F(RetryError, AnAddressThatNobodyHasCannotBeResolved) {
  // RoCE resolves the destination's MAC address in modify_qp, like Linux.
  RcEnd a;
  PeerAddress nobody = a.address();
  nobody.gid.raw[15] = 200;
  ASSERT_EQ(a.ToInit(), 0);
  EXPECT_NE(a.ToRtr(nobody), 0);
  EXPECT_EQ(a.State(), IBV_QPS_INIT);
  EXPECT_EQ(a.ToRtr(a.address()), 0);
}

TEST_F(RetryError, RetryCountSevenMeansSevenRetries) {
  for (const int retries : {0, 1, 7}) {
    ASSERT_EQ(VerbenaHere({"fault", "add", "drop opcode=send"}).status, 0);
    PathOptions path;
    path.timeout = 8;
    path.retry_cnt = static_cast<uint8_t>(retries);
    RcEnd a, b(EndOptions{.device = "verbena1"});
    ConnectPair(a, b, path);
    ASSERT_EQ(b.PostRecv(1), 0);
    ASSERT_EQ(a.PostSend(SendWr(1)), 0);
    const ibv_wc wc = PollOne(a.send_cq());
    EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR) << Describe(wc);
    EXPECT_EQ(FaultHits(), std::vector<int64_t>{1 + retries});
    ASSERT_EQ(VerbenaHere({"fault", "clear"}).status, 0);
  }
}

TEST_F(RetryError, RetriesThatHelpBeforeTheLastDoNotShow) {
  ASSERT_EQ(VerbenaHere({"fault", "add", "drop opcode=send count=7"}).status, 0);
  PathOptions path;
  path.timeout = 10;
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b, path);
  ASSERT_EQ(b.PostRecv(1), 0);
  ASSERT_EQ(a.PostSend(SendWr(1)), 0);
  const ibv_wc wc = PollOne(a.send_cq());
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
}

TEST(Invalidate, ASendWithInvalidateOfAKeyThatMayNotBeInvalidatedIsAnErrorAtTheReceiver) {
  PathOptions path;
  path.timeout = 8;
  path.retry_cnt = 1;
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b, path);
  Memory source(a.pd(), 64), target(b.pd(), 64);
  ASSERT_EQ(b.PostRecv(10, {target.sge(0, 64)}), 0);
  ASSERT_EQ(b.PostRecv(11, {target.sge(0, 64)}), 0);
  ibv_send_wr wr = SendWr(1, IBV_WR_SEND_WITH_INV);
  wr.invalidate_rkey = target.rkey();  // An ordinary region.
  ASSERT_EQ(a.PostSend(wr, {source.sge(0, 64)}), 0);
  ASSERT_EQ(a.PostSend(SendWr(2), {source.sge(0, 64)}), 0);
  const ibv_wc received = PollOne(b.recv_cq());
  EXPECT_EQ(received.wr_id, 10u);
  EXPECT_NE(received.status, IBV_WC_SUCCESS);
  EXPECT_EQ(PollOne(b.recv_cq()).status, kFlush);
  EXPECT_EQ(b.State(), IBV_QPS_ERR);
  ExpectDead(a, IBV_WC_RETRY_EXC_ERR);
}

TEST(OutstandingReads, MoreThanTheResponderTakesIsAnInvalidRequest) {
  // The requester believes in 16, the responder has room for 1 and NAKs the second request.
  PathOptions path_a, path_b;
  path_b.rd_atomic = 1;
  RcEnd a(EndOptions{.send_wr = 64}), b(EndOptions{.device = "verbena1"});
  a.Connect(b.address(), path_a);
  b.Connect(a.address(), path_b);
  Memory local(a.pd(), 1 << 20), remote(b.pd(), 1 << 20);
  bool failed = false;
  for (int round = 0; round < 20 && !failed; ++round) {
    for (uint64_t i = 0; i < 16; ++i) {
      a.PostSend(RdmaWr(i, IBV_WR_RDMA_READ, remote.address(), remote.rkey()),
                 {local.sge(0, 1 << 20)});
    }
    for (uint64_t i = 0; i < 16; ++i) {
      const ibv_wc wc = PollOne(a.send_cq());
      EXPECT_EQ(wc.wr_id, i);
      if (wc.status == IBV_WC_SUCCESS) continue;
      if (!failed) {
        EXPECT_EQ(wc.status, IBV_WC_REM_INV_REQ_ERR) << Describe(wc);
      }
      failed = true;
    }
  }
  EXPECT_TRUE(failed);
}

}  // namespace
}  // namespace verbena::testing
