// SPDX-License-Identifier: Apache-2.0
//
// FI_EP_RDM (verbs;ofi_rxm): messages, tags, RMA, atomics, counters, cancel.
#include <cstring>

#include "tests/libfabric/fabric_support.h"

namespace verbena::testing {
namespace {

constexpr uint64_t kCaps = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC;

// Two endpoints that know each other.
class Rdm : public ::testing::Test {
 protected:
  struct End {
    std::unique_ptr<Side> side;
    Fid<fid_av> av;
    Fid<fid_cntr> sends, receives;
    Fid<fid_ep> ep;
    fi_addr_t peer = FI_ADDR_UNSPEC;
  };

  static void Open(End* end, const char* address) {
    Info info = GetInfo("verbs;ofi_rxm", FI_EP_RDM, kCaps, address, "0", FI_SOURCE);
    ASSERT_NE(info, nullptr);
    end->side = std::make_unique<Side>(std::move(info));
    fid_domain* domain = end->side->domain();
    fi_av_attr av_attr{};
    av_attr.type = FI_AV_TABLE;
    fid_av* av = nullptr;
    FI_OK(fi_av_open(domain, &av_attr, &av, nullptr));
    end->av.reset(av);
    fi_cntr_attr counter_attr{};
    counter_attr.events = FI_CNTR_EVENTS_COMP;
    for (Fid<fid_cntr>* counter : {&end->sends, &end->receives}) {
      fid_cntr* opened = nullptr;
      FI_OK(fi_cntr_open(domain, &counter_attr, &opened, nullptr));
      counter->reset(opened);
    }
    fid_ep* ep = nullptr;
    FI_OK(fi_endpoint(domain, end->side->info(), &ep, nullptr));
    end->ep.reset(ep);
    FI_OK(fi_ep_bind(ep, &av->fid, 0));
    FI_OK(fi_ep_bind(ep, &end->side->cq()->fid, FI_TRANSMIT | FI_RECV));
    FI_OK(fi_ep_bind(ep, &end->sends->fid, FI_SEND));
    FI_OK(fi_ep_bind(ep, &end->receives->fid, FI_RECV));
    FI_OK(fi_enable(ep));
  }

  static void Introduce(End* to, End* who) {
    uint8_t name[256];
    size_t size = sizeof(name);
    FI_OK(fi_getname(&who->ep->fid, name, &size));
    ASSERT_EQ(fi_av_insert(to->av.get(), name, 1, &to->peer, 0, nullptr), 1);
  }

  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Open(&a_, kFirstNic));
    ASSERT_NO_FATAL_FAILURE(Open(&b_, kSecondNic));
    ASSERT_NO_FATAL_FAILURE(Introduce(&a_, &b_));
    ASSERT_NO_FATAL_FAILURE(Introduce(&b_, &a_));
  }

  void TearDown() override {
    a_.ep.reset();
    b_.ep.reset();
  }

  // Calls again what says EAGAIN while a connection is made.
  void Post(const std::function<ssize_t()>& call) {
    ssize_t result = 0;
    WaitUntil([&] {
      result = call();
      if (result != -FI_EAGAIN) return true;
      Collect();
      return false;
    });
    ASSERT_EQ(result, 0) << fi_strerror(static_cast<int>(-result));
  }

  void Collect() {
    if (const auto outcome = a_.side->Poll()) of_a_.push_back(*outcome);
    if (const auto outcome = b_.side->Poll()) of_b_.push_back(*outcome);
  }

  // The oldest completion of one end; the test fails if none comes.
  Outcome Next(std::vector<Outcome>* of) {
    EXPECT_TRUE(WaitUntil([&] {
      Collect();
      return !of->empty();
    }));
    if (of->empty()) return {};
    const Outcome first = of->front();
    of->erase(of->begin());
    return first;
  }
  Outcome Good(std::vector<Outcome>* of) {
    const Outcome outcome = Next(of);
    EXPECT_EQ(outcome.error, 0) << fi_strerror(outcome.error);
    return outcome;
  }

  End a_, b_;
  std::vector<Outcome> of_a_, of_b_;
};

TEST_F(Rdm, MessagesOfEverySizeArriveUnchangedInBothDirections) {
  for (const size_t bytes : {0u, 1u, 64u, 4000u, 16384u, 16385u, 100000u, 2000001u}) {
    const auto there = a_.side->Allocate(bytes + 1), back = a_.side->Allocate(bytes + 1);
    const auto middle = b_.side->Allocate(bytes + 1);
    const auto pattern = Pattern(bytes, static_cast<uint32_t>(bytes) + 1);
    std::copy(pattern.begin(), pattern.end(), there->bytes.begin());
    Post([&] {
      return fi_recv(b_.ep.get(), middle->bytes.data(), bytes, middle->descriptor(), FI_ADDR_UNSPEC,
                     nullptr);
    });
    Post([&] {
      return fi_send(a_.ep.get(), there->bytes.data(), bytes, there->descriptor(), a_.peer,
                     nullptr);
    });
    EXPECT_EQ(Good(&of_b_).entry.len, bytes);
    Good(&of_a_);
    Post([&] {
      return fi_recv(a_.ep.get(), back->bytes.data(), bytes, back->descriptor(), FI_ADDR_UNSPEC,
                     nullptr);
    });
    Post([&] {
      return fi_send(b_.ep.get(), middle->bytes.data(), bytes, middle->descriptor(), b_.peer,
                     nullptr);
    });
    EXPECT_EQ(Good(&of_a_).entry.len, bytes);
    Good(&of_b_);
    EXPECT_TRUE(std::equal(pattern.begin(), pattern.end(), back->bytes.begin()));
  }
}

TEST_F(Rdm, ManyMessagesKeepTheirOrder) {
  constexpr uint32_t kMessages = 300;
  const auto in = b_.side->Allocate(kMessages * 8), out = a_.side->Allocate(kMessages * 8);
  uint32_t received = 0, sent = 0;
  for (uint32_t i = 0; i < kMessages; ++i) {
    std::memcpy(&out->bytes[i * 8], &i, sizeof(i));
    Post([&] {
      return fi_recv(b_.ep.get(), &in->bytes[i * 8], 8, in->descriptor(), FI_ADDR_UNSPEC, nullptr);
    });
    Post([&] {
      return fi_send(a_.ep.get(), &out->bytes[i * 8], 8, out->descriptor(), a_.peer, nullptr);
    });
    Collect();
  }
  ASSERT_TRUE(WaitUntil([&] {
    Collect();
    received = static_cast<uint32_t>(of_b_.size());
    sent = static_cast<uint32_t>(of_a_.size());
    return received == kMessages && sent == kMessages;
  })) << received
      << " " << sent;
  EXPECT_EQ(in->bytes, out->bytes);
  EXPECT_EQ(fi_cntr_read(a_.sends.get()), kMessages);
  EXPECT_EQ(fi_cntr_read(b_.receives.get()), kMessages);
  EXPECT_EQ(fi_cntr_readerr(a_.sends.get()), 0u);
}

TEST_F(Rdm, TagsChooseTheReceive) {
  const auto in = b_.side->Allocate(300), out = a_.side->Allocate(300);
  out->bytes[0] = 1;
  out->bytes[100] = 2;
  out->bytes[200] = 3;
  // Posted for tag 7, for any tag 0x10 to 0x1f, for tag 9; sent in another order.
  int context[3];
  const struct { uint64_t tag, ignore; } kReceives[] = {{7, 0}, {0x10, 0xf}, {9, 0}};
  for (size_t i = 0; i < 3; ++i) {
    Post([&] {
      return fi_trecv(b_.ep.get(), &in->bytes[i * 100], 100, in->descriptor(), FI_ADDR_UNSPEC,
                      kReceives[i].tag, kReceives[i].ignore, &context[i]);
    });
  }
  const uint64_t tags[] = {9, 0x1a, 7};
  const size_t receiver[] = {2, 1, 0};
  for (size_t i = 0; i < 3; ++i) {
    Post([&] {
      return fi_tsend(a_.ep.get(), &out->bytes[i * 100], 100, out->descriptor(), a_.peer, tags[i],
                      nullptr);
    });
    const Outcome outcome = Good(&of_b_);
    EXPECT_EQ(outcome.entry.op_context, &context[receiver[i]]);
    EXPECT_EQ(outcome.entry.tag, tags[i]);
    EXPECT_EQ(in->bytes[receiver[i] * 100], i + 1);
    Good(&of_a_);
  }
}

TEST_F(Rdm, TaggedMessageWaitsForItsReceive) {
  const auto in = b_.side->Allocate(5000), out = a_.side->Allocate(5000, 0x33);
  Post([&] {
    return fi_tsend(a_.ep.get(), out->bytes.data(), 5000, out->descriptor(), a_.peer, 42, nullptr);
  });
  Good(&of_a_);
  EXPECT_TRUE(of_b_.empty());
  Post([&] {
    return fi_trecv(b_.ep.get(), in->bytes.data(), 5000, in->descriptor(), FI_ADDR_UNSPEC, 42, 0,
                    nullptr);
  });
  EXPECT_EQ(Good(&of_b_).entry.len, 5000u);
  EXPECT_EQ(in->bytes, out->bytes);
}

TEST_F(Rdm, CancelledReceiveCompletesAsSuch) {
  const auto in = b_.side->Allocate(64), out = a_.side->Allocate(64, 1);
  int first = 0, second = 0;
  Post([&] {
    return fi_trecv(b_.ep.get(), in->bytes.data(), 64, in->descriptor(), FI_ADDR_UNSPEC, 5, 0,
                    &first);
  });
  FI_OK(fi_cancel(&b_.ep->fid, &first));
  const Outcome cancelled = Next(&of_b_);
  EXPECT_EQ(cancelled.error, FI_ECANCELED);
  EXPECT_EQ(cancelled.entry.op_context, &first);
  // It takes no message any more.
  Post([&] {
    return fi_trecv(b_.ep.get(), in->bytes.data(), 64, in->descriptor(), FI_ADDR_UNSPEC, 5, 0,
                    &second);
  });
  Post([&] {
    return fi_tsend(a_.ep.get(), out->bytes.data(), 64, out->descriptor(), a_.peer, 5, nullptr);
  });
  EXPECT_EQ(Good(&of_b_).entry.op_context, &second);
  Good(&of_a_);
}

TEST_F(Rdm, RemoteMemoryIsWrittenAndRead) {
  constexpr size_t kBytes = 300001;
  const auto remote = b_.side->Allocate(kBytes), local = a_.side->Allocate(kBytes);
  const auto pattern = Pattern(kBytes, 5);
  std::copy(pattern.begin(), pattern.end(), local->bytes.begin());
  const uint64_t address = remote->address(b_.side->info());
  Post([&] {
    return fi_write(a_.ep.get(), local->bytes.data(), kBytes, local->descriptor(), a_.peer, address,
                    remote->key(), nullptr);
  });
  Good(&of_a_);
  EXPECT_EQ(remote->bytes, pattern);
  std::fill(local->bytes.begin(), local->bytes.end(), uint8_t{0});
  Post([&] {
    return fi_read(a_.ep.get(), local->bytes.data(), 70000, local->descriptor(), a_.peer,
                   address + 1000, remote->key(), nullptr);
  });
  Good(&of_a_);
  EXPECT_EQ(std::memcmp(local->bytes.data(), &pattern[1000], 70000), 0);
  EXPECT_EQ(local->bytes[70000], 0);
}

TEST_F(Rdm, AtomicsOfSeveralKinds) {
  const auto remote = b_.side->Allocate(64), local = a_.side->Allocate(64);
  auto* target = reinterpret_cast<uint64_t*>(remote->bytes.data());
  auto* words = reinterpret_cast<uint64_t*>(local->bytes.data());
  const uint64_t address = remote->address(b_.side->info());
  *target = 10;
  words[0] = 5;
  Post([&] {
    return fi_atomic(a_.ep.get(), &words[0], 1, local->descriptor(), a_.peer, address,
                     remote->key(), FI_UINT64, FI_SUM, nullptr);
  });
  Good(&of_a_);
  Post([&] {
    return fi_fetch_atomic(a_.ep.get(), &words[0], 1, local->descriptor(), &words[1],
                           local->descriptor(), a_.peer, address, remote->key(), FI_UINT64, FI_SUM,
                           nullptr);
  });
  Good(&of_a_);
  EXPECT_EQ(words[1], 15u);
  EXPECT_EQ(*target, 20u);
  words[0] = 99;
  words[2] = 20;
  Post([&] {
    return fi_compare_atomic(a_.ep.get(), &words[0], 1, local->descriptor(), &words[2],
                             local->descriptor(), &words[1], local->descriptor(), a_.peer, address,
                             remote->key(), FI_UINT64, FI_CSWAP, nullptr);
  });
  Good(&of_a_);
  EXPECT_EQ(words[1], 20u);
  EXPECT_EQ(*target, 99u);
}

}  // namespace
}  // namespace verbena::testing
