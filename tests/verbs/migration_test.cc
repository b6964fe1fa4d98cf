// SPDX-License-Identifier: Apache-2.0
//
// Path migration (IBTA Vol 1 §17.2.8): two ends with a primary path over IPv4
// and an alternate one over IPv6 of the same ports.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

constexpr int kAlternateGid = 0;

ibv_gid Gid(const RcEnd& end, int index) {
  ibv_gid gid = {};
  Require(ibv_query_gid(end.context(), 1, index, &gid) == 0, "ibv_query_gid");
  return gid;
}

ibv_qp_attr Query(const RcEnd& end) {
  ibv_qp_attr attr = {};
  ibv_qp_init_attr init = {};
  Require(ibv_query_qp(end.qp(), &attr, 0xfffff, &init) == 0, "ibv_query_qp");
  return attr;
}

bool Same(const ibv_gid& a, const ibv_gid& b) { return memcmp(&a, &b, sizeof(a)) == 0; }

class Migration : public ::testing::TestWithParam<ibv_qp_type> {
 protected:
  Migration() : a_(Options("verbena0")), b_(Options("verbena1")) {
    ConnectPair(a_, b_, {.timeout = 10, .retry_cnt = 2});
  }
  ~Migration() override { VerbenaHere({"fault", "clear"}); }

  static EndOptions Options(const std::string& device) {
    EndOptions options;
    options.device = device;
    options.type = GetParam();
    return options;
  }
  // Loads the path over the other GIDs and asks for migration to be armed.
  int Rearm(RcEnd& end, const RcEnd& peer) {
    ibv_qp_attr attr = {};
    attr.alt_ah_attr.is_global = 1;
    attr.alt_ah_attr.port_num = 1;
    attr.alt_ah_attr.grh.sgid_index = kAlternateGid;
    attr.alt_ah_attr.grh.hop_limit = 9;
    attr.alt_ah_attr.grh.dgid = Gid(peer, kAlternateGid);
    attr.alt_port_num = 1;
    attr.alt_timeout = 11;
    attr.path_mig_state = IBV_MIG_REARM;
    return ibv_modify_qp(end.qp(), &attr, IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE);
  }
  int MigrateNow(RcEnd& end) {
    ibv_qp_attr attr = {};
    attr.path_mig_state = IBV_MIG_MIGRATED;
    return ibv_modify_qp(end.qp(), &attr, IBV_QP_PATH_MIG_STATE);
  }
  void Exchange() {
    for (RcEnd* from : {&a_, &b_}) {
      RcEnd& to = from == &a_ ? b_ : a_;
      ASSERT_EQ(to.PostRecv(1), 0);
      ASSERT_EQ(from->PostSend(SendWr(2)), 0);
      ASSERT_EQ(PollOne(from->send_cq()).status, IBV_WC_SUCCESS);
      ASSERT_EQ(PollOne(to.recv_cq()).status, IBV_WC_SUCCESS);
    }
  }
  void ArmBoth() {
    ASSERT_EQ(Rearm(a_, b_), 0);
    ASSERT_EQ(Rearm(b_, a_), 0);
    Exchange();
    Exchange();
    EXPECT_EQ(Query(a_).path_mig_state, IBV_MIG_ARMED);
    EXPECT_EQ(Query(b_).path_mig_state, IBV_MIG_ARMED);
  }
  void ExpectMigrated(const RcEnd& end, const RcEnd& peer) {
    const auto event = NextAsyncEvent(end.context(), Milliseconds(5000));
    ASSERT_TRUE(event.has_value());
    EXPECT_EQ(event->event_type, IBV_EVENT_PATH_MIG);
    EXPECT_EQ(event->element.qp, end.qp());
    const ibv_qp_attr attr = Query(end);
    EXPECT_EQ(attr.path_mig_state, IBV_MIG_MIGRATED);
    EXPECT_EQ(attr.ah_attr.grh.sgid_index, kAlternateGid);
    EXPECT_TRUE(Same(attr.ah_attr.grh.dgid, Gid(peer, kAlternateGid)));
    EXPECT_EQ(attr.ah_attr.grh.hop_limit, 9);
  }

  RcEnd a_;
  RcEnd b_;
};
INSTANTIATE_TEST_SUITE_P(Types, Migration, ::testing::Values(IBV_QPT_RC, IBV_QPT_UC),
                         [](const auto& info) { return info.param == IBV_QPT_RC ? "Rc" : "Uc"; });

TEST_P(Migration, BothEndsAreArmedWhenBothHaveAskedForIt) {
  Exchange();
  EXPECT_EQ(Query(a_).path_mig_state, IBV_MIG_MIGRATED);
  ASSERT_EQ(Rearm(a_, b_), 0);
  Exchange();
  EXPECT_EQ(Query(a_).path_mig_state, IBV_MIG_REARM);  // the peer did not ask
  EXPECT_EQ(Query(b_).path_mig_state, IBV_MIG_MIGRATED);
  const ibv_qp_attr attr = Query(a_);
  EXPECT_EQ(attr.alt_port_num, 1);
  EXPECT_EQ(attr.alt_timeout, 11);
  EXPECT_TRUE(Same(attr.alt_ah_attr.grh.dgid, Gid(b_, kAlternateGid)));
  ArmBoth();
}

TEST_P(Migration, OneEndMigratesByCommandAndTakesTheOtherAlong) {
  ArmBoth();
  ASSERT_EQ(MigrateNow(a_), 0);
  ExpectMigrated(a_, b_);
  ASSERT_EQ(b_.PostRecv(1), 0);
  ASSERT_EQ(a_.PostSend(SendWr(2)), 0);
  ASSERT_EQ(PollOne(b_.recv_cq()).status, IBV_WC_SUCCESS);
  ASSERT_EQ(PollOne(a_.send_cq()).status, IBV_WC_SUCCESS);
  ExpectMigrated(b_, a_);
  Exchange();
  EXPECT_EQ(NextAsyncEvent(a_.context(), Milliseconds(10)), std::nullopt);
}

TEST_P(Migration, WithoutAnAlternatePathThereIsNothingToArm) {
  ibv_qp_attr attr = {};
  attr.path_mig_state = IBV_MIG_REARM;
  EXPECT_EQ(ibv_modify_qp(a_.qp(), &attr, IBV_QP_PATH_MIG_STATE), EINVAL);
  attr.path_mig_state = IBV_MIG_ARMED;
  EXPECT_EQ(ibv_modify_qp(a_.qp(), &attr, IBV_QP_PATH_MIG_STATE), EINVAL);
  // Used up by a migration.
  ArmBoth();
  ASSERT_EQ(MigrateNow(a_), 0);
  attr.path_mig_state = IBV_MIG_REARM;
  EXPECT_EQ(ibv_modify_qp(a_.qp(), &attr, IBV_QP_PATH_MIG_STATE), EINVAL);
  // A path that makes no sense.
  attr.alt_ah_attr.is_global = 1;
  attr.alt_ah_attr.port_num = 1;
  attr.alt_ah_attr.grh.sgid_index = 200;
  attr.alt_port_num = 1;
  EXPECT_EQ(ibv_modify_qp(a_.qp(), &attr, IBV_QP_ALT_PATH), EINVAL);
  attr.alt_ah_attr.grh.sgid_index = kAlternateGid;
  attr.alt_ah_attr.grh.dgid = Gid(b_, kAlternateGid);
  attr.alt_port_num = 2;
  EXPECT_EQ(ibv_modify_qp(a_.qp(), &attr, IBV_QP_ALT_PATH), EINVAL);
}

// The primary path swallows as many packets as there are attempts.
TEST(MigrationOnLoss, ARequesterThatIsOutOfRetriesMigratesInsteadOfFailing) {
  RcEnd a(EndOptions{.device = "verbena0"});
  RcEnd b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b, {.timeout = 10, .retry_cnt = 2});
  const auto rearm = [](RcEnd& end, const RcEnd& peer) {
    ibv_qp_attr attr = {};
    attr.alt_ah_attr.is_global = 1;
    attr.alt_ah_attr.port_num = 1;
    attr.alt_ah_attr.grh.sgid_index = kAlternateGid;
    attr.alt_ah_attr.grh.dgid = Gid(peer, kAlternateGid);
    attr.alt_port_num = 1;
    attr.alt_timeout = 12;
    attr.path_mig_state = IBV_MIG_REARM;
    ASSERT_EQ(ibv_modify_qp(end.qp(), &attr, IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE), 0);
  };
  rearm(a, b);
  rearm(b, a);
  const auto send = [&] {
    ASSERT_EQ(b.PostRecv(1), 0);
    ASSERT_EQ(a.PostSend(SendWr(2)), 0);
    ASSERT_EQ(PollOne(a.send_cq()).status, IBV_WC_SUCCESS);
    ASSERT_EQ(PollOne(b.recv_cq()).status, IBV_WC_SUCCESS);
  };
  send();
  send();
  ASSERT_EQ(Query(a).path_mig_state, IBV_MIG_ARMED);
  // The first attempt and both retries.
  ASSERT_EQ(VerbenaHere({"fault", "add",
                         "drop dev=verbena0 dir=tx count=3 qpn=" + std::to_string(a.qp()->qp_num)})
                .status,
            0);
  send();
  for (const RcEnd* end : {&a, &b}) {
    const auto event = NextAsyncEvent(end->context(), Milliseconds(5000));
    ASSERT_TRUE(event.has_value());
    EXPECT_EQ(event->event_type, IBV_EVENT_PATH_MIG);
    EXPECT_EQ(Query(*end).path_mig_state, IBV_MIG_MIGRATED);
    EXPECT_EQ(Query(*end).ah_attr.grh.sgid_index, kAlternateGid);
    EXPECT_EQ(Query(*end).timeout, 12);
  }
  VerbenaHere({"fault", "clear"});
  send();
}

}  // namespace
}  // namespace verbena::testing
