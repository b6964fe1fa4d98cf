// SPDX-License-Identifier: Apache-2.0
//
// Receive side scaling over the public verbs interface: work queues, tables of them,
// QPs that spread frames over a table.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/verbs/raw_end.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

struct RssDeleter {
  void operator()(ibv_wq* wq) const { ibv_destroy_wq(wq); }
  void operator()(ibv_rwq_ind_table* table) const { ibv_destroy_rwq_ind_table(table); }
};
using Wq = std::unique_ptr<ibv_wq, RssDeleter>;
using Table = std::unique_ptr<ibv_rwq_ind_table, RssDeleter>;

// The key of the verification suite for RSS hashes that is published for Windows.
std::array<uint8_t, 40> Key() {
  return {0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3,
          0x8f, 0xb0, 0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3,
          0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa};
}

class Rss : public ::testing::Test {
 protected:
  Rss() {
    for (size_t i = 0; i < 8; ++i) {
      cqs_.emplace_back(ibv_create_cq(sender_.context(), 64, nullptr, nullptr, 0));
      ibv_wq_init_attr init = Init(i);
      wqs_.emplace_back(ibv_create_wq(sender_.context(), &init));
      Require(wqs_.back() != nullptr, "ibv_create_wq");
      EXPECT_GE(init.max_wr, 16u);
    }
  }
  ibv_wq_init_attr Init(size_t i) {
    ibv_wq_init_attr init = {};
    init.wq_type = IBV_WQT_RQ;
    init.max_wr = 16;
    init.max_sge = 1;
    init.pd = sender_.pd();
    init.cq = cqs_[i].get();
    return init;
  }
  Table MakeTable(uint32_t log_size) {
    std::vector<ibv_wq*> wqs;
    for (size_t i = 0; i < size_t{1} << log_size; ++i) wqs.push_back(wqs_[i % 8].get());
    ibv_rwq_ind_table_init_attr init = {log_size, wqs.data(), 0};
    errno = 0;
    return Table(ibv_create_rwq_ind_table(sender_.context(), &init));
  }
  int Move(size_t wq, ibv_wq_state state) {
    ibv_wq_attr attr = {};
    attr.attr_mask = IBV_WQ_ATTR_STATE;
    attr.wq_state = state;
    return ibv_modify_wq(wqs_[wq].get(), &attr);
  }
  ibv_qp_init_attr_ex QpInit(ibv_rwq_ind_table* table, uint64_t fields) {
    ibv_qp_init_attr_ex init = {};
    init.qp_type = IBV_QPT_RAW_PACKET;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_RX_HASH | IBV_QP_INIT_ATTR_IND_TABLE;
    init.pd = sender_.pd();
    init.rwq_ind_tbl = table;
    init.rx_hash_conf = {.rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ,
                         .rx_hash_key_len = static_cast<uint8_t>(key_.size()),
                         .rx_hash_key = key_.data(),
                         .rx_hash_fields_mask = fields};
    return init;
  }
  ibv_qp* MakeQp(ibv_rwq_ind_table* table, uint64_t fields) {
    ibv_qp_init_attr_ex init = QpInit(table, fields);
    errno = 0;
    return ibv_create_qp_ex(sender_.context(), &init);
  }
  void PostTo(size_t i) {
    ASSERT_EQ(Move(i, IBV_WQS_RDY), 0);
    for (int n = 0; n < 16; ++n) {
      ibv_sge sge = sender_.memory().sge(i * kSlot, kSlot);
      ibv_recv_wr wr = {};
      wr.wr_id = i;
      wr.sg_list = &sge;
      wr.num_sge = 1;
      ibv_recv_wr* bad = nullptr;
      ASSERT_EQ(ibv_post_wq_recv(wqs_[i].get(), &wr, &bad), 0);
    }
  }
  void PostAll() {
    for (size_t i = 0; i < 8; ++i) PostTo(i);
  }
  // The WQ that gets the next frame.
  size_t Receiver() {
    const auto end = std::chrono::steady_clock::now() + Milliseconds(5000);
    while (std::chrono::steady_clock::now() < end) {
      for (size_t i = 0; i < 8; ++i) {
        ibv_wc wc = {};
        if (ibv_poll_cq(cqs_[i].get(), 1, &wc) != 1) continue;
        EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
        EXPECT_EQ(wc.wr_id, i);
        return i;
      }
    }
    ADD_FAILURE() << "no WQ gets the frame";
    return 99;
  }

  std::array<uint8_t, 40> key_ = Key();
  RawEnd sender_{"verbena0", 0};
  std::vector<Owned<ibv_cq>> cqs_;
  std::vector<Wq> wqs_;
};

// Flows of that suite, and their hashes.
struct HashCase {
  std::array<uint8_t, 4> source;
  uint16_t source_port;
  std::array<uint8_t, 4> destination;
  uint16_t destination_port;
  uint32_t addresses;
  uint32_t with_ports;
};
constexpr HashCase kHashes[] = {
    {{66, 9, 149, 187}, 2794, {161, 142, 100, 80}, 1766, 0x323e8fc2, 0x51ccc178},
    {{199, 92, 111, 2}, 14230, {65, 69, 140, 83}, 4739, 0xd718262a, 0xc626b0ea},
    {{24, 19, 198, 95}, 12898, {12, 22, 207, 184}, 38024, 0xd2d0a5de, 0x5c2b394a},
    {{38, 27, 205, 30}, 48228, {209, 142, 163, 6}, 2217, 0x82989176, 0xafc7327f},
    {{153, 39, 163, 191}, 44251, {202, 188, 127, 2}, 1303, 0x5d1809c5, 0x10e828a2},
};

Bytes FrameOf(const HashCase& c) {
  FrameOptions options;
  options.protocol = 6;
  options.source_port = c.source_port;
  options.destination_port = c.destination_port;
  Bytes frame = MakeFrame(options);
  std::memcpy(&frame[14 + 12], c.source.data(), 4);
  std::memcpy(&frame[14 + 16], c.destination.data(), 4);
  return frame;
}

TEST_F(Rss, FramesGoToTheWorkQueueThatTheirHashNames) {
  PostAll();
  const Table table = MakeTable(3);
  ASSERT_NE(table, nullptr);
  const uint64_t addresses = IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4;
  const uint64_t ports = IBV_RX_HASH_SRC_PORT_TCP | IBV_RX_HASH_DST_PORT_TCP;
  for (const bool with_ports : {false, true}) {
    const Owned<ibv_qp> qp(MakeQp(table.get(), addresses | (with_ports ? ports : 0)));
    ASSERT_NE(qp, nullptr) << strerror(errno);
    const Flow flow(Rule().Eth(kTo).Create(qp.get()));
    ASSERT_NE(flow, nullptr) << strerror(errno);
    for (const HashCase& c : kHashes) {
      sender_.Send(FrameOf(c));
      EXPECT_EQ(Receiver(), (with_ports ? c.with_ports : c.addresses) % 8);
    }
    FrameOptions other;  // nothing that is asked for: the first
    other.ipv6 = true;
    sender_.Send(MakeFrame(other));
    EXPECT_EQ(Receiver(), 0u);
    EXPECT_EQ(ibv_destroy_rwq_ind_table(table.get()), EBUSY);
    EXPECT_EQ(ibv_destroy_qp(qp.get()), EBUSY);  // a rule leads there
  }
}

TEST_F(Rss, AWorkQueueThatIsNotReadyReceivesNothing) {
  PostAll();
  const Table table = MakeTable(0);
  const Owned<ibv_qp> qp(MakeQp(table.get(), 0));
  ASSERT_NE(qp, nullptr);
  const Flow flow(Rule().Eth(kTo).Create(qp.get()));
  sender_.Send(MakeFrame({}));
  EXPECT_EQ(Receiver(), 0u);
  ASSERT_EQ(Move(0, IBV_WQS_ERR), 0);
  for (int i = 0; i < 15; ++i) EXPECT_EQ(PollOne(cqs_[0].get()).status, IBV_WC_WR_FLUSH_ERR);
  sender_.Send(MakeFrame({}));
  EXPECT_TRUE(StaysEmpty(cqs_[0].get(), Milliseconds(20)));
  ASSERT_EQ(Move(0, IBV_WQS_RESET), 0);
  PostTo(0);  // it is used again
  sender_.Send(MakeFrame({}));
  EXPECT_EQ(Receiver(), 0u);
}

TEST_F(Rss, WrongRequestsAreRefused) {
  ibv_wq_init_attr init = Init(0);
  init.comp_mask = IBV_WQ_INIT_ATTR_FLAGS;
  init.create_flags = IBV_WQ_FLAGS_CVLAN_STRIPPING;
  EXPECT_EQ(ibv_create_wq(sender_.context(), &init), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  init = Init(0);
  init.max_wr = 1 << 20;
  EXPECT_EQ(ibv_create_wq(sender_.context(), &init), nullptr);
  EXPECT_EQ(errno, EINVAL);
  init = Init(0);
  init.pd = nullptr;
  EXPECT_EQ(ibv_create_wq(sender_.context(), &init), nullptr);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(Move(0, IBV_WQS_ERR), EINVAL);  // from RESET
  ibv_wq_attr attr = {};
  attr.attr_mask = IBV_WQ_ATTR_STATE | IBV_WQ_ATTR_CURR_STATE;
  attr.wq_state = IBV_WQS_RDY;
  attr.curr_wq_state = IBV_WQS_ERR;
  EXPECT_EQ(ibv_modify_wq(wqs_[0].get(), &attr), EINVAL);
  EXPECT_EQ(MakeTable(8), nullptr);
  EXPECT_EQ(errno, EINVAL);

  const Table table = MakeTable(3);
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(ibv_destroy_wq(wqs_[0].get()), EBUSY);
  EXPECT_EQ(MakeQp(table.get(), IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_SRC_IPV6), nullptr);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(MakeQp(table.get(), IBV_RX_HASH_IPSEC_SPI), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  ibv_qp_init_attr_ex qp = QpInit(table.get(), 0);
  qp.rx_hash_conf.rx_hash_key_len = 39;
  EXPECT_EQ(ibv_create_qp_ex(sender_.context(), &qp), nullptr);
  EXPECT_EQ(errno, EINVAL);
  qp = QpInit(table.get(), 0);
  qp.rx_hash_conf.rx_hash_function = 2;
  EXPECT_EQ(ibv_create_qp_ex(sender_.context(), &qp), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  qp = QpInit(table.get(), 0);
  qp.qp_type = IBV_QPT_UD;
  EXPECT_EQ(ibv_create_qp_ex(sender_.context(), &qp), nullptr);
  EXPECT_EQ(errno, EINVAL);
  qp = QpInit(table.get(), 0);
  qp.comp_mask &= ~static_cast<uint32_t>(IBV_QP_INIT_ATTR_IND_TABLE);
  EXPECT_EQ(ibv_create_qp_ex(sender_.context(), &qp), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

}  // namespace
}  // namespace verbena::testing
