// SPDX-License-Identifier: Apache-2.0
//
// The RC responder as the receiving half of an XRC connection: each request
// names an SRQ, which stands for receives and protection domain.
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "tests/testing/fake_memory.h"
#include "tests/testing/frames.h"
#include "tests/testing/rc_pair.h"
#include "transport/rc/responder.h"
#include "transport/wire/aeth.h"

namespace verbena::transport {
namespace {

constexpr uint32_t kKey = 7;
constexpr uint64_t kAddress = 0x10000;

// SRQs 5 and 6.
class Domain : public ReceiveQueuePort {
 public:
  bool Select(SrqNumber number) override {
    selected.push_back(number.value());
    current_ = number.value();
    return queues.contains(current_);
  }
  bool Take(RecvRequest* request) override {
    if (!queues.contains(current_) || !queues[current_].Take(request)) return false;
    request->srq = SrqNumber(current_);
    return true;
  }
  void PutBack() override {}

  std::map<uint32_t, testing::FakeReceiveQueue> queues{{5, {}}, {6, {}}};
  std::vector<uint32_t> selected;

 private:
  uint32_t current_ = 0;
};

class XrcResponder : public ::testing::Test {
 protected:
  XrcResponder() : responder_(memory_, domain_) {
    memory_.AddRegion(kKey, kAddress, 4096);
    responder_.Start({.pmtu = Pmtu::k256,
                      .expected_psn = Psn(100),
                      .max_dest_rd_atomic = 4,
                      .min_rnr_timer = 12,
                      .access_flags = kAccessRemoteWrite | kAccessRemoteRead | kAccessRemoteAtomic,
                      .service = Service::kXrc});
  }

  void Request(Opcode opcode, uint32_t psn, uint32_t srq, size_t bytes, uint32_t dma_length = 0) {
    TransportHeaders headers;
    headers.bth.opcode = opcode;
    headers.bth.psn = Psn(psn);
    headers.bth.ack_req = true;
    headers.xrceth.srq = SrqNumber(srq);
    headers.reth = {.va = kAddress, .rkey = Rkey(kKey), .dma_length = dma_length};
    frames_.push_back(
        testing::BuildFrame(testing::Ipv4Address(), headers, testing::CountingBytes(bytes)));
    responder_.HandleRequest(testing::ViewOf(frames_.back()), Time());
    while (memory_.HasPending()) responder_.HandleCommitted(memory_.CommitNext().ticket, Time());
  }
  void Post(uint32_t srq, uint64_t wr_id) {
    domain_.queues[srq].Post(wr_id, {{.address = kAddress, .length = 1024, .key = kKey}});
  }
  std::optional<TxPacket> Response() {
    TxPacket packet;
    if (!responder_.PollTransmit(Time(), &packet)) return std::nullopt;
    return packet;
  }
  void ExpectInvalidRequest() {
    const auto packet = Response();
    ASSERT_TRUE(packet.has_value());
    EXPECT_EQ(packet->syndrome, Aeth::Nak(Msn(), NakCode::kInvalidRequest).syndrome);
    AsyncEventType event = AsyncEventType::kCommEst;
    while (event == AsyncEventType::kCommEst && responder_.PollEvent(&event)) {
    }
    EXPECT_EQ(event, AsyncEventType::kQpReqErr);
    EXPECT_TRUE(responder_.failed());
  }

  testing::FakeMemory memory_;
  Domain domain_;
  RcResponder responder_;
  std::vector<testing::ByteVector> frames_;
};

TEST_F(XrcResponder, TakesTheReceiveOfTheSrqThatTheMessageNames) {
  Post(5, 50);
  Post(6, 60);
  Request(Opcode::kXrcSendOnly, 100, 6, 10);
  Request(Opcode::kXrcSendFirst, 101, 5, 256);
  Request(Opcode::kXrcSendLast, 102, 5, 4);
  Completion completion;
  ASSERT_TRUE(responder_.PollCompletion(&completion));
  EXPECT_EQ(completion.wr_id, 60u);
  EXPECT_EQ(completion.srq, SrqNumber(6));
  ASSERT_TRUE(responder_.PollCompletion(&completion));
  EXPECT_EQ(completion.wr_id, 50u);
  EXPECT_EQ(completion.srq, SrqNumber(5));
  EXPECT_EQ(completion.byte_len, 260u);
  EXPECT_EQ(domain_.selected, (std::vector<uint32_t>{6, 5, 5}));
}

TEST_F(XrcResponder, AnSrqThatIsNotThereIsAnInvalidRequest) {
  Request(Opcode::kXrcSendOnly, 100, 9, 10);
  ExpectInvalidRequest();
}

TEST_F(XrcResponder, AMessageMayNotChangeItsSrq) {
  Post(5, 50);
  Post(6, 60);
  Request(Opcode::kXrcSendFirst, 100, 5, 256);
  Request(Opcode::kXrcSendLast, 101, 6, 4);
  ExpectInvalidRequest();
}

TEST_F(XrcResponder, AnEmptySrqDrawsAnRnrNakAndOthersHaveTheirs) {
  Post(5, 50);
  Request(Opcode::kXrcSendOnly, 100, 6, 10);
  const auto packet = Response();
  ASSERT_TRUE(packet.has_value());
  EXPECT_EQ(packet->syndrome, Aeth::RnrNak(Msn(), 12).syndrome);
  EXPECT_FALSE(responder_.failed());
}

TEST_F(XrcResponder, AReadIsAnsweredForItsSrqAlsoWhenItIsRepeated) {
  Request(Opcode::kXrcReadRequest, 100, 6, 0, 100);
  const auto first = Response();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->srq, SrqNumber(6));
  Request(Opcode::kXrcSendOnly, 101, 5, 0);  // RNR: another SRQ is selected
  Request(Opcode::kXrcReadRequest, 100, 6, 0, 100);
  auto packet = Response();
  while (packet.has_value() && packet->payload_bytes == 0) packet = Response();
  ASSERT_TRUE(packet.has_value());
  EXPECT_EQ(packet->srq, SrqNumber(6));
  EXPECT_EQ(domain_.selected.back(), 6u);
  // One that has lost its SRQ is not answered.
  domain_.queues.erase(6);
  Request(Opcode::kXrcReadRequest, 100, 6, 0, 100);
  while ((packet = Response()).has_value()) EXPECT_EQ(packet->payload_bytes, 0u);
}

TEST_F(XrcResponder, RcPacketsAreNotItsBusiness) {
  Request(Opcode::kRcSendOnly, 100, 5, 10);
  EXPECT_FALSE(Response().has_value());
  EXPECT_EQ(responder_.counters().dropped, 1u);
}

}  // namespace
}  // namespace verbena::transport
