// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/faults/device_rule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

namespace verbena::nic {
namespace {

using ::testing::HasSubstr;
using transport::Duration;

DeviceRule Good(std::string_view text) {
  DeviceRule rule;
  std::string error;
  EXPECT_TRUE(ParseDeviceRule(text, &rule, &error)) << text << ": " << error;
  return rule;
}

struct Bad {
  std::string error, field;
};
Bad Wrong(std::string_view text) {
  DeviceRule rule;
  Bad bad;
  EXPECT_FALSE(ParseDeviceRule(text, &rule, &bad.error, &bad.field)) << text;
  return bad;
}

TEST(DeviceRule, ReadsWhatACompletionGets) {
  const DeviceRule rule = Good(
      "complete  status=rem_op_err vendor_err=0x81 app=ib_write_bw nth_qp=2 "
      "queue=send opcode=write nth=3");
  EXPECT_EQ(rule.action, DeviceAction::kComplete);
  EXPECT_EQ(rule.status, 11);  // IBV_WC_REM_OP_ERR
  EXPECT_EQ(rule.vendor_err, 0x81u);
  EXPECT_EQ(rule.app, "ib_write_bw");
  EXPECT_EQ(rule.nth_qp, 2u);
  EXPECT_EQ(rule.send_queue, true);
  EXPECT_EQ(rule.opcodes, OpcodeBit(transport::WcOpcode::kRdmaWrite));
  EXPECT_EQ(rule.nth, 3u);
  EXPECT_FALSE(rule.keeps_qp);
  EXPECT_EQ(rule.text,
            "complete status=rem_op_err vendor_err=0x81 app=ib_write_bw nth_qp=2 "
            "queue=send opcode=write nth=3");
  EXPECT_TRUE(Good("complete status=SUCCESS qp=keep").keeps_qp);
}

TEST(DeviceRule, KnowsErrorsAndVerbsByName) {
  const DeviceRule rule = Good("fail verb=reg_mr errno=ENOMEM count=1");
  EXPECT_EQ(rule.error, ENOMEM);
  EXPECT_EQ(VerbName(*rule.verb), "reg_mr");
  EXPECT_EQ(Good("fail verb=create_qp errno=22").error, EINVAL);
  EXPECT_EQ(*Good("fail verb=post_send errno=EIO qpn=5").verb, kVerbPostSend);
  EXPECT_EQ(*Good("fail verb=rdma_resolve_addr errno=ENODEV").verb, kVerbRdmaCm + 21);
}

TEST(DeviceRule, EveryEventHasItsNumber) {
  EXPECT_EQ(Good("event type=CQ_ERR").event, 0);
  EXPECT_EQ(Good("event type=PORT_ERR dev=verbena0").event, 10);
  EXPECT_EQ(Good("event type=gid_change").event, 18);
  EXPECT_EQ(Good("event type=WQ_FATAL").event, 19);
  EXPECT_EQ(Good("cm_error type=UNREACHABLE").event,
            7);  // RDMA_CM_EVENT_UNREACHABLE
  EXPECT_EQ(Good("cm_error type=REJECTED reason=24").reason, 24u);
}

TEST(DeviceRule, ActsAtATimeUnlessACompletionIsNamed) {
  EXPECT_FALSE(Good("qp_error app=a").at_completion());
  EXPECT_TRUE(Good("qp_error app=a nth=5").at_completion());
  EXPECT_TRUE(Good("event type=QP_FATAL on=completion").at_completion());
  const DeviceRule removal = Good("remove dev=verbena0 after=5 us=7");
  EXPECT_FALSE(removal.at_completion());
  EXPECT_EQ(removal.after, Duration::Microseconds(5));
  EXPECT_EQ(removal.duration, Duration::Microseconds(7));
}

TEST(DeviceRule, AGidOfATableChanges) {
  const DeviceRule rule = Good("gid_change dev=verbena0 index=1 gid=10.1.2.3 us=5");
  EXPECT_EQ(rule.gid_index, 1);
  EXPECT_EQ(rule.gid, transport::Gid::FromIpv4(0x0a010203));
  EXPECT_TRUE(rule.is_undone());
  EXPECT_FALSE(rule.at_completion());
  EXPECT_FALSE(Good("gid_change dev=verbena0 index=15").gid.has_value());
  EXPECT_EQ(Wrong("gid_change dev=verbena0 index=0").field, "index");
  EXPECT_EQ(Wrong("gid_change dev=verbena0 index=16").field, "index");
  EXPECT_EQ(Wrong("gid_change dev=verbena0 index=1 gid=ff02::1").field, "gid");
  EXPECT_EQ(Wrong("gid_change dev=verbena0 index=1 gid=::").field, "gid");
  EXPECT_FALSE(Wrong("gid_change dev=verbena0").error.empty());
  EXPECT_FALSE(Wrong("gid_change index=1").error.empty());
}

TEST(DeviceRule, NamesADeviceForStepsOfTheConnectionManager) {
  EXPECT_EQ(Good("cm_error type=ADDR_ERROR dev=verbena1").device, "verbena1");
  EXPECT_EQ(Good("fail verb=rdma_connect errno=EIO dev=verbena1").device, "verbena1");
}

TEST(DeviceRule, NamesTheWordAndTheField) {
  Bad bad = Wrong("fail verb=reg_mister errno=EIO");
  EXPECT_THAT(bad.error, HasSubstr("'verb=reg_mister'"));
  EXPECT_EQ(bad.field, "verb");
  EXPECT_EQ(Wrong("fail verb=reg_mr errno=EWHAT").field, "errno");
  EXPECT_EQ(Wrong("complete status=REM_OP_ERR psn=5").field, "psn");
  bad = Wrong("event type=PORT_ERR status=SUCCESS");
  EXPECT_EQ(bad.field, "status");
  EXPECT_THAT(bad.error, HasSubstr("is not for 'event'"));
  EXPECT_EQ(Wrong("complete status=SUCCESS status=SUCCESS").field, "status");
  EXPECT_EQ(Wrong("explode").field, "action");
  for (const char *incomplete :
       {"complete", "delay_completion", "fail verb=reg_mr", "fail errno=EIO", "event", "remove",
        "addr_change", "cm_error", "cq_overrun nth=1 every=2", "fail verb=reg_mr errno=EIO qpn=3",
        "remove dev=verbena0 nth=3", "cm_error type=ADDR_ERROR reason=5"}) {
    EXPECT_FALSE(Wrong(incomplete).error.empty()) << incomplete;
  }
}

}  // namespace
}  // namespace verbena::nic
