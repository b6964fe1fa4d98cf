// SPDX-License-Identifier: Apache-2.0
//
// FI_EP_DGRAM over UD: messages up to the MTU, their order on a lossless fabric,
// what has no receive. libfabric 1.17 has no counters for these endpoints.
#include <cstring>

#include "tests/libfabric/fabric_support.h"

namespace verbena::testing {
namespace {

class Dgram : public ::testing::Test {
 protected:
  struct End {
    std::unique_ptr<Side> side;
    Fid<fid_av> av;
    Fid<fid_ep> ep;
    fi_addr_t peer = FI_ADDR_UNSPEC;
  };

  static void Open(End* end, const char* domain_name) {
    const Info hints(fi_allocinfo());
    hints->fabric_attr->prov_name = strdup("verbs");
    hints->domain_attr->name = strdup(domain_name);
    hints->ep_attr->type = FI_EP_DGRAM;
    hints->caps = FI_MSG;
    hints->mode = FI_CONTEXT | FI_MSG_PREFIX;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    fi_info* info = nullptr;
    FI_OK(fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, hints.get(), &info));
    end->side = std::make_unique<Side>(Info(info));
    fid_domain* domain = end->side->domain();
    fi_av_attr av_attr{};
    av_attr.type = FI_AV_TABLE;
    fid_av* av = nullptr;
    FI_OK(fi_av_open(domain, &av_attr, &av, nullptr));
    end->av.reset(av);
    fid_ep* ep = nullptr;
    FI_OK(fi_endpoint(domain, info, &ep, nullptr));
    end->ep.reset(ep);
    FI_OK(fi_ep_bind(ep, &av->fid, 0));
    FI_OK(fi_ep_bind(ep, &end->side->cq()->fid, FI_TRANSMIT | FI_RECV));
    FI_OK(fi_enable(ep));
  }

  static void Introduce(End* to, End* who) {
    uint8_t name[256];
    size_t size = sizeof(name);
    FI_OK(fi_getname(&who->ep->fid, name, &size));
    ASSERT_EQ(fi_av_insert(to->av.get(), name, 1, &to->peer, 0, nullptr), 1);
  }

  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Open(&a_, "verbena0-dgram"));
    ASSERT_NO_FATAL_FAILURE(Open(&b_, "verbena1-dgram"));
    ASSERT_NO_FATAL_FAILURE(Introduce(&a_, &b_));
    ASSERT_NO_FATAL_FAILURE(Introduce(&b_, &a_));
    ASSERT_EQ(a_.side->info()->tx_attr->mode & FI_MSG_PREFIX, 0u);
    // Room for the GRH in front of what is received.
    prefix_ = a_.side->info()->ep_attr->msg_prefix_size;
    ASSERT_GE(prefix_, 40u);
  }

  void TearDown() override {
    a_.ep.reset();
    b_.ep.reset();
  }

  static Outcome Complete(End& end) {
    std::optional<Outcome> outcome;
    EXPECT_TRUE(WaitUntil([&] { return (outcome = end.side->Poll()).has_value(); }));
    if (!outcome) return {};
    EXPECT_EQ(outcome->error, 0) << fi_strerror(outcome->error);
    return *outcome;
  }

  End a_, b_;
  size_t prefix_ = 0;
};

TEST_F(Dgram, MessagesUpToTheMtuArriveUnchanged) {
  for (const size_t bytes : {1u, 64u, 1000u, 4096u}) {
    const auto in = b_.side->Allocate(prefix_ + bytes), out = a_.side->Allocate(bytes);
    const auto pattern = Pattern(bytes, static_cast<uint32_t>(bytes));
    std::memcpy(out->bytes.data(), pattern.data(), bytes);
    FI_OK(fi_recv(b_.ep.get(), in->bytes.data(), prefix_ + bytes, in->descriptor(), FI_ADDR_UNSPEC,
                  in.get()));
    FI_OK(fi_send(a_.ep.get(), out->bytes.data(), bytes, out->descriptor(), a_.peer, out.get()));
    EXPECT_EQ(Complete(b_).entry.op_context, in.get());
    EXPECT_EQ(Complete(a_).entry.op_context, out.get());
    EXPECT_EQ(std::memcmp(&in->bytes[prefix_], pattern.data(), bytes), 0);
  }
}

TEST_F(Dgram, ManyMessagesKeepTheirOrder) {
  constexpr uint32_t kMessages = 100;
  const size_t slot = prefix_ + sizeof(uint32_t);
  const auto in = b_.side->Allocate(kMessages * slot);
  const auto out = a_.side->Allocate(sizeof(uint32_t));
  for (uint32_t i = 0; i < kMessages; ++i) {
    FI_OK(fi_recv(b_.ep.get(), &in->bytes[i * slot], slot, in->descriptor(), FI_ADDR_UNSPEC,
                  nullptr));
  }
  for (uint32_t i = 0; i < kMessages; ++i) {
    std::memcpy(out->bytes.data(), &i, sizeof(i));
    FI_OK(fi_send(a_.ep.get(), out->bytes.data(), sizeof(i), out->descriptor(), a_.peer, nullptr));
    Complete(a_);
  }
  for (uint32_t i = 0; i < kMessages; ++i) {
    Complete(b_);
    uint32_t number = 0;
    std::memcpy(&number, &in->bytes[i * slot + prefix_], sizeof(number));
    EXPECT_EQ(number, i);
  }
}

TEST_F(Dgram, MessageWithoutAReceiveIsLostAndTheNextArrives) {
  const auto in = b_.side->Allocate(prefix_ + 8), back = a_.side->Allocate(prefix_ + 8);
  const auto out = a_.side->Allocate(8, 1), answer = b_.side->Allocate(8);
  FI_OK(fi_send(a_.ep.get(), out->bytes.data(), 8, out->descriptor(), a_.peer, nullptr));
  Complete(a_);
  // A message the other way comes behind it: when that is there it has arrived.
  FI_OK(fi_recv(a_.ep.get(), back->bytes.data(), prefix_ + 8, back->descriptor(), FI_ADDR_UNSPEC,
                back.get()));
  FI_OK(fi_send(b_.ep.get(), answer->bytes.data(), 8, answer->descriptor(), b_.peer, nullptr));
  Complete(b_);
  EXPECT_EQ(Complete(a_).entry.op_context, back.get());
  FI_OK(fi_recv(b_.ep.get(), in->bytes.data(), prefix_ + 8, in->descriptor(), FI_ADDR_UNSPEC,
                in.get()));
  out->bytes[0] = 2;
  FI_OK(fi_send(a_.ep.get(), out->bytes.data(), 8, out->descriptor(), a_.peer, nullptr));
  EXPECT_EQ(Complete(b_).entry.op_context, in.get());
  EXPECT_EQ(in->bytes[prefix_], 2);
  Complete(a_);
}

}  // namespace
}  // namespace verbena::testing
