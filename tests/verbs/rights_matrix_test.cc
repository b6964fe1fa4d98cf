// SPDX-License-Identifier: Apache-2.0
//
// Each opcode on each transport with each set of rights of the QP, of the region or of
// the memory window of either type, and of the local buffer: the status at both ends,
// the state of both QPs, the event, the bytes (IBTA Vol 1 §9.7.4.1.5, §9.9.3, table of
// transport functions).
#include <fcntl.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

constexpr ibv_wr_opcode kAtomicWrite = static_cast<ibv_wr_opcode>(15);

struct Operation {
  const char* name;
  ibv_wr_opcode opcode;
  unsigned needs;         // right of QP and region; 0: none
  bool fetches = false;   // the local buffer is written to
  bool receives = false;  // takes a receive
  bool reliable = false;  // not of UC
  bool of_xrc = true;
};

constexpr Operation kOperations[] = {
    {.name = "Send", .opcode = IBV_WR_SEND, .needs = 0, .receives = true},
    {.name = "SendImm", .opcode = IBV_WR_SEND_WITH_IMM, .needs = 0, .receives = true},
    {.name = "Write", .opcode = IBV_WR_RDMA_WRITE, .needs = IBV_ACCESS_REMOTE_WRITE},
    {.name = "WriteImm",
     .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
     .needs = IBV_ACCESS_REMOTE_WRITE,
     .receives = true},
    {.name = "Read",
     .opcode = IBV_WR_RDMA_READ,
     .needs = IBV_ACCESS_REMOTE_READ,
     .fetches = true,
     .reliable = true},
    {.name = "CompareSwap",
     .opcode = IBV_WR_ATOMIC_CMP_AND_SWP,
     .needs = IBV_ACCESS_REMOTE_ATOMIC,
     .fetches = true,
     .reliable = true},
    {.name = "FetchAdd",
     .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
     .needs = IBV_ACCESS_REMOTE_ATOMIC,
     .fetches = true,
     .reliable = true},
    {.name = "AtomicWrite",
     .opcode = kAtomicWrite,
     .needs = IBV_ACCESS_REMOTE_WRITE,
     .reliable = true,
     .of_xrc = false},
};

// What the remote key is of.
enum class Through { kRegion, kWindow1, kWindow2 };

struct Case {
  ibv_qp_type transport;  // XRC_SEND stands for XRC
  Operation operation;
  Through through = Through::kRegion;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const ibv_qp_type transport : {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_XRC_SEND}) {
    for (const Operation& operation : kOperations) {
      if (transport == IBV_QPT_UC && operation.reliable) continue;
      if (transport == IBV_QPT_XRC_SEND && !operation.of_xrc) continue;
      cases.push_back({transport, operation});
      if (operation.needs == 0) continue;
      cases.push_back({transport, operation, Through::kWindow1});
      // Its QP binds it, and an XRC_RECV QP sends nothing.
      if (transport != IBV_QPT_XRC_SEND) cases.push_back({transport, operation, Through::kWindow2});
    }
  }
  return cases;
}

std::string NameOf(ibv_qp_type transport) {
  return transport == IBV_QPT_RC ? "Rc" : transport == IBV_QPT_UC ? "Uc" : "Xrc";
}
std::string NameOf(Through through) {
  return through == Through::kRegion    ? ""
         : through == Through::kWindow1 ? "ByWindow1"
                                        : "ByWindow2";
}

struct XrcdDeleter {
  void operator()(ibv_xrcd* xrcd) const { ibv_close_xrcd(xrcd); }
};

// One end: a device, and its QP of a connection.
struct End {
  explicit End(const std::string& device)
      : context(OpenDevice(device)),
        pd(ibv_alloc_pd(context.get())),
        cq(ibv_create_cq(context.get(), 64, nullptr, nullptr, 0)),
        memory(pd.get(), 4096) {}

  int Modify(ibv_qp_state state, const End& peer, unsigned rights) {
    ibv_qp_attr attr = {};
    attr.qp_state = state;
    attr.port_num = 1;
    attr.qp_access_flags = rights;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer.qp->qp_num;
    attr.rq_psn = attr.sq_psn = 77;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.sgid_index = 1;
    EXPECT_EQ(ibv_query_gid(peer.context.get(), 1, 1, &attr.ah_attr.grh.dgid), 0);
    attr.max_dest_rd_atomic = attr.max_rd_atomic = 4;
    attr.min_rnr_timer = 8;
    attr.timeout = 14;
    attr.retry_cnt = attr.rnr_retry = 7;
    const ibv_qp_type type = qp->qp_type;
    const bool responds = type == IBV_QPT_RC || type == IBV_QPT_XRC_RECV;
    const bool requests = type == IBV_QPT_RC || type == IBV_QPT_XRC_SEND;
    int mask = IBV_QP_STATE;
    if (state == IBV_QPS_INIT) mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    if (state == IBV_QPS_RTR) {
      mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
      if (responds) mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    }
    if (state == IBV_QPS_RTS) {
      mask |= IBV_QP_SQ_PSN;
      if (type != IBV_QPT_UC) mask |= IBV_QP_TIMEOUT;
      if (requests) mask |= IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    }
    return ibv_modify_qp(qp.get(), &attr, mask);
  }
  ibv_qp_state State() const {
    ibv_qp_attr attr = {};
    ibv_qp_init_attr init = {};
    Require(ibv_query_qp(qp.get(), &attr, IBV_QP_STATE, &init) == 0, "query_qp");
    return attr.qp_state;
  }
  // What is in the CQ.
  std::vector<ibv_wc> Drain() {
    std::vector<ibv_wc> all(16);
    all.resize(static_cast<size_t>(ibv_poll_cq(cq.get(), 16, all.data())));
    return all;
  }

  Owned<ibv_context> context;
  Owned<ibv_pd> pd;
  Owned<ibv_cq> cq;
  Memory memory;
  std::unique_ptr<ibv_xrcd, XrcdDeleter> xrcd;
  Owned<ibv_srq> srq;
  uint32_t srqn = 0;
  Owned<ibv_qp> qp;
};

class RightsMatrix : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (is_xrc()) {
      MakeXrc();
    } else {
      for (End* end : {&a_, &b_}) {
        ibv_qp_init_attr init = {};
        init.send_cq = init.recv_cq = end->cq.get();
        init.qp_type = GetParam().transport;
        init.cap = {4, 4, 1, 1, 0};
        end->qp.reset(ibv_create_qp(end->pd.get(), &init));
        ASSERT_NE(end->qp, nullptr);
      }
    }
    for (unsigned set = 0; set < 8; ++set) {
      // The same memory with each set of rights.
      regions_[set].reset(ibv_reg_mr(b_.pd.get(), b_.memory.data(), 4096,
                                     static_cast<int>(IBV_ACCESS_LOCAL_WRITE | RightsOf(set))));
      ASSERT_NE(regions_[set], nullptr);
    }
    if (GetParam().through != Through::kRegion) {
      bindable_.reset(ibv_reg_mr(b_.pd.get(), b_.memory.data(), 4096,
                                 IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND));
      ASSERT_NE(bindable_, nullptr);
      ConnectPair(binder_, binder_peer_);
    }
  }
  void TearDown() override {
    window_.reset();
    b_.qp.reset();
    b_.srq.reset();
  }

  void MakeXrc() {
    ibv_qp_init_attr_ex init = {};
    init.qp_type = IBV_QPT_XRC_SEND;
    init.send_cq = a_.cq.get();
    init.cap = {4, 0, 1, 0, 0};
    init.comp_mask = IBV_QP_INIT_ATTR_PD;
    init.pd = a_.pd.get();
    a_.qp.reset(ibv_create_qp_ex(a_.context.get(), &init));
    ASSERT_NE(a_.qp, nullptr);
    ibv_xrcd_init_attr domain = {};
    domain.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    domain.fd = -1;
    domain.oflags = O_CREAT;
    b_.xrcd.reset(ibv_open_xrcd(b_.context.get(), &domain));
    ASSERT_NE(b_.xrcd, nullptr);
    ibv_srq_init_attr_ex srq = {};
    srq.attr = {16, 1, 0};
    srq.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ |
                    IBV_SRQ_INIT_ATTR_PD;
    srq.srq_type = IBV_SRQT_XRC;
    srq.pd = b_.pd.get();
    srq.xrcd = b_.xrcd.get();
    srq.cq = b_.cq.get();
    b_.srq.reset(ibv_create_srq_ex(b_.context.get(), &srq));
    ASSERT_NE(b_.srq, nullptr);
    ASSERT_EQ(ibv_get_srq_num(b_.srq.get(), &b_.srqn), 0);
    init = {};
    init.qp_type = IBV_QPT_XRC_RECV;
    init.comp_mask = IBV_QP_INIT_ATTR_XRCD;
    init.xrcd = b_.xrcd.get();
    b_.qp.reset(ibv_create_qp_ex(b_.context.get(), &init));
    ASSERT_NE(b_.qp, nullptr);
  }

  static unsigned RightsOf(unsigned set) {
    return ((set & 1) != 0 ? unsigned{IBV_ACCESS_REMOTE_WRITE} : 0) |
           ((set & 2) != 0 ? unsigned{IBV_ACCESS_REMOTE_READ} : 0) |
           ((set & 4) != 0 ? unsigned{IBV_ACCESS_REMOTE_ATOMIC} : 0);
  }
  bool is_xrc() const { return GetParam().transport == IBV_QPT_XRC_SEND; }
  bool is_reliable() const { return GetParam().transport != IBV_QPT_UC; }

  // Both QPs begin anew; b has one receive, as far as it needs one.
  void Connect(unsigned rights) {
    for (End* end : {&a_, &b_}) {
      const End& peer = end == &a_ ? b_ : a_;
      for (const auto state : {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS}) {
        ASSERT_EQ(end->Modify(state, peer, rights), 0) << "state " << state;
      }
      end->Drain();
    }
    if (!GetParam().operation.receives || posted_in_srq_) return;
    ibv_sge sge = b_.memory.sge(2048, 64);
    ibv_recv_wr wr = {900, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    if (is_xrc()) {
      ASSERT_EQ(ibv_post_srq_recv(b_.srq.get(), &wr, &bad), 0);
      posted_in_srq_ = true;
    } else {
      ASSERT_EQ(ibv_post_recv(b_.qp.get(), &wr, &bad), 0);
    }
  }

  // A key with these rights on `b`'s memory; one at a time.
  uint32_t KeyWith(unsigned set) {
    if (GetParam().through == Through::kRegion) return regions_[set]->rkey;
    window_.reset();  // before the region below it
    const bool by_qp = GetParam().through == Through::kWindow2;
    window_.reset(ibv_alloc_mw(b_.pd.get(), by_qp ? IBV_MW_TYPE_2 : IBV_MW_TYPE_1));
    Require(window_ != nullptr, "ibv_alloc_mw");
    const ibv_mw_bind_info info = {.mr = bindable_.get(),
                                   .addr = b_.memory.address(),
                                   .length = 4096,
                                   .mw_access_flags = RightsOf(set)};
    if (!by_qp) {
      ibv_mw_bind bind = {.wr_id = 70, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
      EXPECT_EQ(ibv_bind_mw(binder_.qp(), window_.get(), &bind), 0);
      EXPECT_EQ(PollOne(binder_.send_cq()).status, IBV_WC_SUCCESS);
      return window_->rkey;
    }
    ibv_send_wr wr = SendWr(71, IBV_WR_BIND_MW);
    wr.bind_mw = {.mw = window_.get(), .rkey = ibv_inc_rkey(window_->rkey), .bind_info = info};
    ibv_send_wr* bad = nullptr;
    EXPECT_EQ(ibv_post_send(b_.qp.get(), &wr, &bad), 0);
    const ibv_wc wc = PollOne(b_.cq.get());
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    EXPECT_EQ(wc.opcode, IBV_WC_BIND_MW);
    return wr.bind_mw.rkey;
  }

  ibv_wc Perform(uint32_t lkey, uint32_t rkey) {
    const Operation& operation = GetParam().operation;
    ++round_;
    FillPattern(a_.memory.bytes().first(64), round_);
    FillPattern(b_.memory.bytes().first(64), round_ + 1000);
    ibv_sge sge = {a_.memory.address(), 8, lkey};
    ibv_send_wr wr = {};
    wr.wr_id = round_;
    wr.opcode = operation.opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.imm_data = 5;
    if (operation.needs == IBV_ACCESS_REMOTE_ATOMIC) {
      std::memcpy(&compare_, b_.memory.data(), 8);
      wr.wr.atomic.remote_addr = b_.memory.address();
      wr.wr.atomic.rkey = rkey;
      wr.wr.atomic.compare_add = compare_;
      wr.wr.atomic.swap = 0x1234;
    } else {
      wr.wr.rdma.remote_addr = b_.memory.address();
      wr.wr.rdma.rkey = rkey;
    }
    wr.qp_type.xrc.remote_srqn = b_.srqn;
    ibv_send_wr* bad = nullptr;
    EXPECT_EQ(ibv_post_send(a_.qp.get(), &wr, &bad), 0);
    return PollOne(a_.cq.get());
  }

  // Did the operation do what it is for?
  bool IsDone() {
    const std::span<const uint8_t> local = a_.memory.bytes().first(8);
    const std::span<const uint8_t> remote = b_.memory.bytes().first(8);
    uint64_t word;
    switch (GetParam().operation.opcode) {
      case IBV_WR_RDMA_READ:
        return PatternMismatch(local, round_ + 1000) == std::nullopt;
      case IBV_WR_ATOMIC_CMP_AND_SWP:
        std::memcpy(&word, remote.data(), 8);
        return word == 0x1234 && std::memcmp(local.data(), &compare_, 8) == 0;
      case IBV_WR_ATOMIC_FETCH_AND_ADD:
        std::memcpy(&word, remote.data(), 8);
        return word == 2 * compare_ && std::memcmp(local.data(), &compare_, 8) == 0;
      case IBV_WR_SEND:
      case IBV_WR_SEND_WITH_IMM:
        return PatternMismatch(b_.memory.bytes().subspan(2048, 8), round_) == std::nullopt;
      default:
        return PatternMismatch(remote, round_) == std::nullopt;
    }
  }
  // Neither end's memory was touched.
  bool IsUntouched() {
    return PatternMismatch(a_.memory.bytes().first(64), round_) == std::nullopt &&
           PatternMismatch(b_.memory.bytes().first(64), round_ + 1000) == std::nullopt;
  }

  void ExpectSuccess(const ibv_wc& wc) {
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    EXPECT_EQ(wc.wr_id, round_);
    if (GetParam().operation.receives) {
      const ibv_wc got = PollOne(b_.cq.get());
      posted_in_srq_ = false;
      EXPECT_EQ(got.status, IBV_WC_SUCCESS);
      EXPECT_EQ(got.wr_id, 900u);
    } else if (!is_reliable()) {
      // The completion tells only that it was sent.
      const auto end = std::chrono::steady_clock::now() + Milliseconds(5000);
      while (!IsDone() && std::chrono::steady_clock::now() < end) {
      }
    }
    EXPECT_TRUE(IsDone());
    EXPECT_EQ(a_.State(), IBV_QPS_RTS);
    EXPECT_EQ(b_.State(), IBV_QPS_RTS);
  }

  void ExpectRefusal(const ibv_wc& wc, ibv_wc_status status, ibv_event_type event) {
    if (!is_reliable()) {
      // UC: the sender learns nothing, the responder drops it.
      EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
      EXPECT_TRUE(StaysEmpty(b_.cq.get(), Milliseconds(1)));
      EXPECT_TRUE(IsUntouched());
      EXPECT_EQ(b_.State(), IBV_QPS_RTS);
      return;
    }
    EXPECT_EQ(wc.status, status) << Describe(wc);
    EXPECT_EQ(a_.State(), IBV_QPS_ERR);
    const auto got = NextAsyncEvent(b_.context.get(), Milliseconds(5000));
    ASSERT_TRUE(got.has_value());
    EXPECT_EQ(got->event_type, event);
    EXPECT_EQ(got->element.qp, b_.qp.get());
    EXPECT_EQ(b_.State(), IBV_QPS_ERR);
    EXPECT_TRUE(IsUntouched());
    if (!GetParam().operation.receives) return;
    if (is_xrc()) {
      EXPECT_TRUE(StaysEmpty(b_.cq.get(), Milliseconds(1)));  // it is for others
    } else {
      EXPECT_EQ(PollOne(b_.cq.get()).status, IBV_WC_WR_FLUSH_ERR);
    }
  }

  End a_{"verbena0"};
  End b_{"verbena1"};
  std::array<Owned<ibv_mr>, 8> regions_;
  Owned<ibv_mr> bindable_;
  // Of b's PD: binds windows of type 1.
  RcEnd binder_{b_.context.get(), b_.pd.get()}, binder_peer_{b_.context.get(), b_.pd.get()};
  Owned<ibv_mw> window_;
  uint64_t round_ = 0;
  uint64_t compare_ = 0;
  bool posted_in_srq_ = false;
};

INSTANTIATE_TEST_SUITE_P(All, RightsMatrix, ::testing::ValuesIn(Cases()), [](const auto& info) {
  return NameOf(info.param.transport) + info.param.operation.name + NameOf(info.param.through);
});

TEST_P(RightsMatrix, RightsOfQpAndRegionDecide) {
  const unsigned needs = GetParam().operation.needs;
  for (unsigned qp_set = 0; qp_set < 8; ++qp_set) {
    for (unsigned region_set = 0; region_set < 8; ++region_set) {
      SCOPED_TRACE("QP rights " + std::to_string(qp_set) + ", region rights " +
                   std::to_string(region_set));
      ASSERT_NO_FATAL_FAILURE(Connect(RightsOf(qp_set)));
      const ibv_wc wc = Perform(a_.memory.lkey(), KeyWith(region_set));
      if ((RightsOf(qp_set) & needs) != needs) {
        ExpectRefusal(wc, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
      } else if ((RightsOf(region_set) & needs) != needs) {
        ExpectRefusal(wc, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
      } else {
        ExpectSuccess(wc);
      }
      if (HasFailure()) return;
    }
  }
  EXPECT_EQ(NextAsyncEvent(a_.context.get(), Milliseconds(0)), std::nullopt);
  EXPECT_EQ(NextAsyncEvent(b_.context.get(), Milliseconds(0)), std::nullopt);
}

// What is fetched is written into the local buffer, which must allow it.
TEST_P(RightsMatrix, TheLocalBufferNeedsTheRightToBeWrittenTo) {
  const Operation& operation = GetParam().operation;
  const Owned<ibv_mr> read_only(ibv_reg_mr(a_.pd.get(), a_.memory.data(), 4096, 0));
  const Owned<ibv_pd> other_pd(ibv_alloc_pd(a_.context.get()));
  const Owned<ibv_mr> foreign(
      ibv_reg_mr(other_pd.get(), a_.memory.data(), 4096, IBV_ACCESS_LOCAL_WRITE));
  struct {
    uint32_t lkey;
    bool fails;
  } const rows[] = {{read_only->lkey, operation.fetches},
                    {foreign->lkey, true},
                    {a_.memory.lkey() ^ 1, true},
                    {a_.memory.lkey(), false}};
  for (const auto& row : rows) {
    ASSERT_NO_FATAL_FAILURE(Connect(RightsOf(7)));
    const ibv_wc wc = Perform(row.lkey, KeyWith(7));
    if (!row.fails) {
      ExpectSuccess(wc);
      continue;
    }
    EXPECT_EQ(wc.status, IBV_WC_LOC_PROT_ERR) << Describe(wc);
    // Of UC only sending ends.
    EXPECT_EQ(a_.State(), is_reliable() ? IBV_QPS_ERR : IBV_QPS_SQE);
    EXPECT_EQ(b_.State(), IBV_QPS_RTS);
    EXPECT_TRUE(StaysEmpty(b_.cq.get(), Milliseconds(1)));
  }
  EXPECT_EQ(NextAsyncEvent(b_.context.get(), Milliseconds(0)), std::nullopt);
}

// --- SEND with invalidate by what its key is of ---

// Only a window of type 2 that the receiving QP has bound may be invalidated (IBTA Vol 1
// §9.4.1.1.3); an XRC_RECV QP binds none. The sender is told nothing of a refusal (class J): it
// runs out of retries.
class InvalidateMatrix : public RightsMatrix {};

INSTANTIATE_TEST_SUITE_P(
    All, InvalidateMatrix,
    ::testing::Values(
        Case{IBV_QPT_RC, {.name = "SendInv", .opcode = IBV_WR_SEND_WITH_INV, .needs = 0}},
        Case{IBV_QPT_XRC_SEND, {.name = "SendInv", .opcode = IBV_WR_SEND_WITH_INV, .needs = 0}}),
    [](const auto& info) { return NameOf(info.param.transport); });

TEST_P(InvalidateMatrix, OnlyAnOwnWindowOfTypeTwoMayBeInvalidated) {
  const Owned<ibv_mr> region(
      ibv_reg_mr(b_.pd.get(), b_.memory.data(), 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND));
  ASSERT_NE(region, nullptr);
  ConnectPair(binder_, binder_peer_);
  const ibv_mw_bind_info info = {.mr = region.get(),
                                 .addr = b_.memory.address(),
                                 .length = 64,
                                 .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
  const auto bind = [&](ibv_qp* qp, ibv_cq* cq, ibv_mw* mw) {
    ibv_send_wr wr = SendWr(1, IBV_WR_BIND_MW);
    wr.bind_mw = {.mw = mw, .rkey = ibv_inc_rkey(mw->rkey), .bind_info = info};
    ibv_send_wr* bad = nullptr;
    EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
    EXPECT_EQ(PollOne(cq).status, IBV_WC_SUCCESS);
    return wr.bind_mw.rkey;
  };
  enum { kOwn, kOthers, kUnbound, kTypeOne, kRegionKey, kUnknown };
  for (const int what : {kOwn, kOthers, kUnbound, kTypeOne, kRegionKey, kUnknown}) {
    if (what == kOwn && is_xrc()) continue;
    SCOPED_TRACE("key " + std::to_string(what));
    ASSERT_NO_FATAL_FAILURE(Connect(RightsOf(7)));
    const Owned<ibv_mw> mw(
        ibv_alloc_mw(b_.pd.get(), what == kTypeOne ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2));
    uint32_t key = mw->rkey;
    if (what == kOwn) key = bind(b_.qp.get(), b_.cq.get(), mw.get());
    if (what == kOthers) key = bind(binder_.qp(), binder_.send_cq(), mw.get());
    if (what == kTypeOne) {
      ibv_mw_bind request = {.wr_id = 70, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
      ASSERT_EQ(ibv_bind_mw(binder_.qp(), mw.get(), &request), 0);
      ASSERT_EQ(PollOne(binder_.send_cq()).status, IBV_WC_SUCCESS);
      key = mw->rkey;
    }
    if (what == kRegionKey) key = region->rkey;
    if (what == kUnknown) key = 0x00abcd01;
    ibv_sge buffer = b_.memory.sge(2048, 64);
    ibv_recv_wr receive = {900, nullptr, &buffer, 1};
    ibv_recv_wr* bad_receive = nullptr;
    ASSERT_EQ(is_xrc() ? ibv_post_srq_recv(b_.srq.get(), &receive, &bad_receive)
                       : ibv_post_recv(b_.qp.get(), &receive, &bad_receive),
              0);
    ibv_sge sge = a_.memory.sge(0, 8);
    ibv_send_wr wr = SendWr(5, IBV_WR_SEND_WITH_INV);
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.invalidate_rkey = key;
    wr.qp_type.xrc.remote_srqn = b_.srqn;
    ibv_send_wr* bad = nullptr;
    ASSERT_EQ(ibv_post_send(a_.qp.get(), &wr, &bad), 0);
    const ibv_wc sent = PollOne(a_.cq.get());
    const ibv_wc got = PollOne(b_.cq.get());
    EXPECT_EQ(got.wr_id, 900u);
    if (what == kOwn) {
      EXPECT_EQ(sent.status, IBV_WC_SUCCESS) << Describe(sent);
      EXPECT_EQ(got.status, IBV_WC_SUCCESS) << Describe(got);
      EXPECT_TRUE((got.wc_flags & IBV_WC_WITH_INV) != 0);
      EXPECT_EQ(got.invalidated_rkey, key);
      EXPECT_EQ(b_.State(), IBV_QPS_RTS);
    } else {
      EXPECT_EQ(sent.status, IBV_WC_RETRY_EXC_ERR) << Describe(sent);
      EXPECT_EQ(got.status, IBV_WC_LOC_ACCESS_ERR) << Describe(got);
      EXPECT_EQ(a_.State(), IBV_QPS_ERR);
      EXPECT_EQ(b_.State(), IBV_QPS_ERR);
    }
    while (NextAsyncEvent(b_.context.get(), Milliseconds(0)).has_value()) {
    }
  }
}

// --- Which transport has which opcode ---

TEST(OpcodeMatrix, EachTransportTakesItsOpcodesOnly) {
  constexpr unsigned kSends = 1u << IBV_WR_SEND | 1u << IBV_WR_SEND_WITH_IMM;
  constexpr unsigned kWrites = 1u << IBV_WR_RDMA_WRITE | 1u << IBV_WR_RDMA_WRITE_WITH_IMM;
  constexpr unsigned kLocal = 1u << IBV_WR_LOCAL_INV | 1u << IBV_WR_BIND_MW;
  constexpr unsigned kReliable = kLocal | 1u << IBV_WR_SEND_WITH_INV | 1u << IBV_WR_RDMA_READ |
                                 1u << IBV_WR_ATOMIC_CMP_AND_SWP |
                                 1u << IBV_WR_ATOMIC_FETCH_AND_ADD;
  struct {
    ibv_qp_type type;
    unsigned opcodes;
  } const rows[] = {{IBV_QPT_RC, kSends | kWrites | kReliable | 1u << kAtomicWrite},
                    {IBV_QPT_XRC_SEND, kSends | kWrites | kReliable},
                    {IBV_QPT_UC, kSends | kWrites | kLocal},
                    {IBV_QPT_UD, kSends},
                    {IBV_QPT_RAW_PACKET, 1u << IBV_WR_SEND}};
  End end("verbena0");
  for (const auto& row : rows) {
    ibv_qp_init_attr_ex init = {};
    init.qp_type = row.type;
    init.send_cq = end.cq.get();
    if (row.type != IBV_QPT_XRC_SEND) init.recv_cq = end.cq.get();
    init.cap = {4, row.type != IBV_QPT_XRC_SEND ? 4u : 0u, 1, 1, 0};
    init.comp_mask = IBV_QP_INIT_ATTR_PD;
    init.pd = end.pd.get();
    const Owned<ibv_qp> qp(ibv_create_qp_ex(end.context.get(), &init));
    ASSERT_NE(qp, nullptr);
    // In ERR everything that may be posted is taken and flushed.
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_ERR;
    ASSERT_EQ(ibv_modify_qp(qp.get(), &attr, IBV_QP_STATE), 0);
    for (unsigned opcode = 0; opcode < 40; ++opcode) {
      if (opcode == IBV_WR_BIND_MW) continue;  // has objects of its own: windows_test
      SCOPED_TRACE("QP type " + std::to_string(row.type) + ", opcode " + std::to_string(opcode));
      ibv_sge sge = end.memory.sge(0, 8);
      ibv_send_wr wr = {};
      std::memcpy(&wr.opcode, &opcode, sizeof opcode);
      wr.sg_list = &sge;
      wr.num_sge = 1;
      ibv_send_wr* bad = nullptr;
      const bool taken = opcode < 32 && (row.opcodes >> opcode & 1) != 0;
      EXPECT_EQ(ibv_post_send(qp.get(), &wr, &bad), taken ? 0 : EINVAL);
      if (taken) {
        EXPECT_EQ(PollOne(end.cq.get()).status, IBV_WC_WR_FLUSH_ERR);
      } else {
        EXPECT_EQ(bad, &wr);
      }
    }
  }
}

}  // namespace
}  // namespace verbena::testing
