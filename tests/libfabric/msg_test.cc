// SPDX-License-Identifier: Apache-2.0
//
// FI_EP_MSG: connections, messages, RMA, atomics, and how connections end.
#include <netinet/in.h>

#include <cstring>

#include "tests/libfabric/fabric_support.h"

namespace verbena::testing {
namespace {

constexpr uint64_t kCaps = FI_MSG | FI_RMA | FI_ATOMIC;

// A pair of endpoints; the server on the first NIC, the client on the second.
class Msg : public ::testing::Test {
 protected:
  struct End {
    std::unique_ptr<Side> side;
    Fid<fid_eq> eq;
    Fid<fid_ep> ep;
  };

  static Fid<fid_eq> OpenEq(fid_fabric* fabric) {
    fi_eq_attr attr{};
    attr.wait_obj = FI_WAIT_UNSPEC;
    fid_eq* eq = nullptr;
    EXPECT_EQ(fi_eq_open(fabric, &attr, &eq, nullptr), 0);
    return Fid<fid_eq>(eq);
  }

  static void OpenEp(End* end) {
    fid_ep* ep = nullptr;
    FI_OK(fi_endpoint(end->side->domain(), end->side->info(), &ep, nullptr));
    end->ep.reset(ep);
    FI_OK(fi_ep_bind(ep, &end->eq->fid, 0));
    FI_OK(fi_ep_bind(ep, &end->side->cq()->fid, FI_TRANSMIT | FI_RECV));
    FI_OK(fi_enable(ep));
  }

  struct Event {
    uint32_t type = 0;  // 0: none came; UINT32_MAX: an error
    int error = 0;
    Info info;
    std::string data;
  };
  // Steps of a connection are taken when its event queue is looked at; so all are.
  Event NextEvent(fid_eq* eq) {
    alignas(fi_eq_cm_entry) uint8_t bytes[sizeof(fi_eq_cm_entry) + 256];
    Event event;
    ssize_t got = 0;
    WaitUntil([&] {
      for (fid_eq* other : {listen_eq_.get(), client_.eq.get(), server_.eq.get()}) {
        uint32_t type;
        uint8_t peeked[sizeof(bytes)];
        if (other == nullptr || other == eq) continue;
        (void)fi_eq_read(other, &type, peeked, sizeof(peeked), FI_PEEK);
      }
      return (got = fi_eq_read(eq, &event.type, bytes, sizeof(bytes), 0)) != -FI_EAGAIN;
    });
    const auto* entry = reinterpret_cast<const fi_eq_cm_entry*>(bytes);
    if (got == -FI_EAVAIL) {
      fi_eq_err_entry error{};
      char data[256] = {};
      error.err_data = data;
      error.err_data_size = sizeof(data);
      EXPECT_GT(fi_eq_readerr(eq, &error, 0), 0);
      event.type = UINT32_MAX;
      event.error = error.err;
      event.data.assign(static_cast<const char*>(error.err_data), error.err_data_size);
    } else if (got >= static_cast<ssize_t>(sizeof(fi_eq_cm_entry))) {
      event.info.reset(entry->info);
      event.data.assign(reinterpret_cast<const char*>(entry->data),
                        static_cast<size_t>(got) - sizeof(fi_eq_cm_entry));
    } else {
      event.type = 0;
      event.error = static_cast<int>(-got);
    }
    return event;
  }

  void SetUp() override {
    Info info = GetInfo("verbs", FI_EP_MSG, kCaps, kFirstNic, "0", FI_SOURCE);
    ASSERT_NE(info, nullptr);
    fid_fabric* fabric = nullptr;
    FI_OK(fi_fabric(info->fabric_attr, &fabric, nullptr));
    fabric_.reset(fabric);
    listen_eq_ = OpenEq(fabric);
    fid_pep* pep = nullptr;
    FI_OK(fi_passive_ep(fabric, info.get(), &pep, nullptr));
    pep_.reset(pep);
    FI_OK(fi_pep_bind(pep, &listen_eq_->fid, 0));
    FI_OK(fi_listen(pep));
    sockaddr_in at{};
    size_t size = sizeof(at);
    FI_OK(fi_getname(&pep->fid, &at, &size));
    ASSERT_NE(at.sin_port, 0);
    port_ = std::to_string(__builtin_bswap16(at.sin_port));
  }

  // The client asks, the server has the request.
  void Request(Event* request) {
    client_.side =
        std::make_unique<Side>(GetInfo("verbs", FI_EP_MSG, kCaps, kFirstNic, port_.c_str(), 0));
    client_.eq = OpenEq(client_.side->fabric());
    OpenEp(&client_);
    const char hello[] = "a client";
    FI_OK(fi_connect(client_.ep.get(), client_.side->info()->dest_addr, hello, sizeof(hello)));
    *request = NextEvent(listen_eq_.get());
    ASSERT_EQ(request->type, uint32_t{FI_CONNREQ}) << fi_strerror(request->error);
    EXPECT_STREQ(request->data.c_str(), hello);
  }

  void Connect() {
    Event request;
    ASSERT_NO_FATAL_FAILURE(Request(&request));
    server_.side = std::make_unique<Side>(std::move(request.info));
    server_.eq = OpenEq(server_.side->fabric());
    OpenEp(&server_);
    const char welcome[] = "a server";
    FI_OK(fi_accept(server_.ep.get(), welcome, sizeof(welcome)));
    const Event connected = NextEvent(client_.eq.get());
    ASSERT_EQ(connected.type, uint32_t{FI_CONNECTED}) << connected.error;
    EXPECT_STREQ(connected.data.c_str(), welcome);
    ASSERT_EQ(NextEvent(server_.eq.get()).type, uint32_t{FI_CONNECTED});
  }

  // The next completion of `end`, which must be a good one.
  static Outcome Complete(End& end) {
    std::optional<Outcome> outcome;
    EXPECT_TRUE(WaitUntil([&] { return (outcome = end.side->Poll()).has_value(); }));
    if (!outcome) return {};
    EXPECT_EQ(outcome->error, 0) << fi_strerror(outcome->error);
    return *outcome;
  }

  Fid<fid_fabric> fabric_;
  Fid<fid_eq> listen_eq_;
  Fid<fid_pep> pep_;
  std::string port_;
  End server_, client_;
};

TEST_F(Msg, MessagesOfEverySizeArriveUnchanged) {
  ASSERT_NO_FATAL_FAILURE(Connect());
  for (const size_t bytes : {1u, 63u, 64u, 4096u, 4097u, 65536u, 1048577u}) {
    const auto in = server_.side->Allocate(bytes + 8, 0xee);
    const auto sent = client_.side->Allocate(bytes);
    const auto pattern = Pattern(bytes, static_cast<uint32_t>(bytes));
    std::memcpy(sent->bytes.data(), pattern.data(), bytes);
    FI_OK(fi_recv(server_.ep.get(), in->bytes.data(), bytes + 8, in->descriptor(), 0, in.get()));
    FI_OK(fi_send(client_.ep.get(), sent->bytes.data(), bytes, sent->descriptor(), 0, sent.get()));
    const Outcome received = Complete(server_);
    EXPECT_EQ(received.entry.op_context, in.get());
    EXPECT_EQ(received.entry.len, bytes);
    EXPECT_NE(received.entry.flags & FI_RECV, 0u);
    EXPECT_EQ(Complete(client_).entry.op_context, sent.get());
    EXPECT_EQ(std::memcmp(in->bytes.data(), pattern.data(), bytes), 0);
    EXPECT_EQ(in->bytes[bytes], 0xee);
  }
}

TEST_F(Msg, InjectedMessagesAndRemoteDataArrive) {
  ASSERT_NO_FATAL_FAILURE(Connect());
  const auto in = server_.side->Allocate(64);
  const size_t limit = client_.side->info()->tx_attr->inject_size;
  ASSERT_GT(limit, 0u);
  std::vector<uint8_t> out = Pattern(std::min<size_t>(limit, 64), 9);
  FI_OK(fi_recv(server_.ep.get(), in->bytes.data(), 64, in->descriptor(), 0, nullptr));
  FI_OK(fi_inject(client_.ep.get(), out.data(), out.size(), 0));
  const std::vector<uint8_t> sent = out;
  std::fill(out.begin(), out.end(), uint8_t{0});  // it is ours again
  EXPECT_EQ(Complete(server_).entry.len, sent.size());
  EXPECT_EQ(std::memcmp(in->bytes.data(), sent.data(), sent.size()), 0);

  const auto message = client_.side->Allocate(32, 7);
  FI_OK(fi_recv(server_.ep.get(), in->bytes.data(), 64, in->descriptor(), 0, nullptr));
  FI_OK(fi_senddata(client_.ep.get(), message->bytes.data(), 32, message->descriptor(), 0x1234567,
                    0, nullptr));
  const Outcome received = Complete(server_);
  EXPECT_NE(received.entry.flags & FI_REMOTE_CQ_DATA, 0u);
  EXPECT_EQ(received.entry.data, 0x1234567u);
  Complete(client_);
}

TEST_F(Msg, RemoteMemoryIsWrittenAndRead) {
  ASSERT_NO_FATAL_FAILURE(Connect());
  constexpr size_t kBytes = 200001;
  const auto remote = server_.side->Allocate(kBytes);
  const auto local = client_.side->Allocate(kBytes);
  const auto pattern = Pattern(kBytes, 3);
  std::memcpy(local->bytes.data(), pattern.data(), kBytes);
  const uint64_t address = remote->address(server_.side->info());
  FI_OK(fi_write(client_.ep.get(), local->bytes.data(), kBytes, local->descriptor(), 0, address,
                 remote->key(), nullptr));
  EXPECT_NE(Complete(client_).entry.flags & FI_WRITE, 0u);
  EXPECT_EQ(remote->bytes, pattern);
  std::fill(local->bytes.begin(), local->bytes.end(), uint8_t{0});
  FI_OK(fi_read(client_.ep.get(), local->bytes.data() + 1, 5000, local->descriptor(), 0,
                address + 77, remote->key(), nullptr));
  EXPECT_NE(Complete(client_).entry.flags & FI_READ, 0u);
  EXPECT_EQ(std::memcmp(local->bytes.data() + 1, pattern.data() + 77, 5000), 0);
  EXPECT_EQ(local->bytes[0], 0);
  EXPECT_EQ(local->bytes[5001], 0);
  // A write that tells the target.
  const auto unused = server_.side->Allocate(8);
  FI_OK(fi_recv(server_.ep.get(), unused->bytes.data(), 8, unused->descriptor(), 0, nullptr));
  FI_OK(fi_writedata(client_.ep.get(), local->bytes.data(), 16, local->descriptor(), 0xabc, 0,
                     address, remote->key(), nullptr));
  const Outcome told = Complete(server_);
  EXPECT_NE(told.entry.flags & FI_REMOTE_CQ_DATA, 0u);
  EXPECT_EQ(told.entry.data, 0xabcu);
  Complete(client_);
}

// libfabric 1.17 gives the device the pointer to the operand for the operand.
void* Operand(uint64_t value) { return reinterpret_cast<void*>(value); }

TEST_F(Msg, AtomicsFetchAddAndCompareSwap) {
  ASSERT_NO_FATAL_FAILURE(Connect());
  const auto remote = server_.side->Allocate(16);
  const auto local = client_.side->Allocate(32);
  auto* target = reinterpret_cast<uint64_t*>(remote->bytes.data());
  auto* words = reinterpret_cast<uint64_t*>(local->bytes.data());
  const uint64_t address = remote->address(server_.side->info());
  *target = 100;
  for (uint64_t i = 0; i < 20; ++i) {
    FI_OK(fi_fetch_atomic(client_.ep.get(), Operand(3), 1, local->descriptor(), &words[1],
                          local->descriptor(), 0, address, remote->key(), FI_UINT64, FI_SUM,
                          nullptr));
    Complete(client_);
    EXPECT_EQ(words[1], 100 + 3 * i);
  }
  EXPECT_EQ(*target, 160u);
  for (const auto& [compare, after] : {std::pair<uint64_t, uint64_t>{1, 160}, {160, 7}}) {
    FI_OK(fi_compare_atomic(client_.ep.get(), Operand(7), 1, local->descriptor(), Operand(compare),
                            local->descriptor(), &words[1], local->descriptor(), 0, address,
                            remote->key(), FI_UINT64, FI_CSWAP, nullptr));
    Complete(client_);
    EXPECT_EQ(words[1], 160u);
    EXPECT_EQ(*target, after);
  }
}

TEST_F(Msg, WrongKeyIsAnErrorAtTheInitiator) {
  ASSERT_NO_FATAL_FAILURE(Connect());
  const auto remote = server_.side->Allocate(64);
  const auto local = client_.side->Allocate(64);
  FI_OK(fi_write(client_.ep.get(), local->bytes.data(), 64, local->descriptor(), 0,
                 remote->address(server_.side->info()), remote->key() ^ 0x100, nullptr));
  std::optional<Outcome> outcome;
  ASSERT_TRUE(WaitUntil([&] { return (outcome = client_.side->Poll()).has_value(); }));
  EXPECT_NE(outcome->error, 0);
  EXPECT_EQ(remote->bytes, std::vector<uint8_t>(64, 0));
}

TEST_F(Msg, RejectionTellsTheClient) {
  Event request;
  ASSERT_NO_FATAL_FAILURE(Request(&request));
  const char no[] = "no";
  FI_OK(fi_reject(pep_.get(), request.info->handle, no, sizeof(no)));
  const Event refused = NextEvent(client_.eq.get());
  EXPECT_EQ(refused.type, UINT32_MAX);
  EXPECT_EQ(refused.error, FI_ECONNREFUSED);
}

TEST_F(Msg, NobodyListens) {
  pep_.reset();
  client_.side =
      std::make_unique<Side>(GetInfo("verbs", FI_EP_MSG, kCaps, kFirstNic, port_.c_str(), 0));
  client_.eq = OpenEq(client_.side->fabric());
  ASSERT_NO_FATAL_FAILURE(OpenEp(&client_));
  FI_OK(fi_connect(client_.ep.get(), client_.side->info()->dest_addr, nullptr, 0));
  const Event refused = NextEvent(client_.eq.get());
  EXPECT_EQ(refused.type, UINT32_MAX);
  EXPECT_EQ(refused.error, FI_ECONNREFUSED);
}

TEST_F(Msg, ShutdownIsSeenAndReceivesAreFlushedOnBothSides) {
  ASSERT_NO_FATAL_FAILURE(Connect());
  const auto server_in = server_.side->Allocate(64), client_in = client_.side->Allocate(64);
  FI_OK(fi_recv(server_.ep.get(), server_in->bytes.data(), 64, server_in->descriptor(), 0,
                server_in.get()));
  FI_OK(fi_recv(client_.ep.get(), client_in->bytes.data(), 64, client_in->descriptor(), 0,
                client_in.get()));
  FI_OK(fi_shutdown(client_.ep.get(), 0));
  EXPECT_EQ(NextEvent(server_.eq.get()).type, uint32_t{FI_SHUTDOWN});
  FI_OK(fi_shutdown(server_.ep.get(), 0));
  for (const auto& [end, context] :
       {std::pair(&server_, server_in.get()), {&client_, client_in.get()}}) {
    std::optional<Outcome> outcome;
    ASSERT_TRUE(WaitUntil([&] { return (outcome = end->side->Poll()).has_value(); }));
    EXPECT_EQ(outcome->error, FI_ECANCELED);
    EXPECT_EQ(outcome->entry.op_context, context);
  }
}

TEST_F(Msg, OneConnectionAfterTheOther) {
  for (int i = 0; i < 10; ++i) {
    ASSERT_NO_FATAL_FAILURE(Connect());
    const auto in = server_.side->Allocate(64);
    const auto out = client_.side->Allocate(64, static_cast<uint8_t>(i + 1));
    FI_OK(fi_recv(server_.ep.get(), in->bytes.data(), 64, in->descriptor(), 0, nullptr));
    FI_OK(fi_send(client_.ep.get(), out->bytes.data(), 64, out->descriptor(), 0, nullptr));
    Complete(server_);
    Complete(client_);
    EXPECT_EQ(in->bytes, out->bytes);
    for (End* end : {&client_, &server_}) end->ep.reset();
  }
}

}  // namespace
}  // namespace verbena::testing
