// SPDX-License-Identifier: Apache-2.0
//
// Numbers that verbs report, compared with those of the stock header.
#include "nic_sim/ctrl/resource_limits.h"

#include <gtest/gtest.h>
#include <infiniband/verbs.h>

namespace verbena::nic {
namespace {

// IB_UVERBS_DEVICE_*, which the headers of libibverbs 44 and Linux 6.1 lack.
constexpr uint64_t kFlushGlobal = uint64_t{1} << 38;
constexpr uint64_t kAtomicWrite = uint64_t{1} << 40;

TEST(ResourceLimits, FlagsAndEnumeratorsAreThoseOfVerbs) {
  const abi::DeviceAttributes device = MakeDeviceAttributes(0);
  EXPECT_EQ(device.device_cap_flags,
            uint64_t{IBV_DEVICE_CURR_QP_STATE_MOD} | uint64_t{IBV_DEVICE_SYS_IMAGE_GUID} |
                uint64_t{IBV_DEVICE_RC_RNR_NAK_GEN} | uint64_t{IBV_DEVICE_SRQ_RESIZE} |
                uint64_t{IBV_DEVICE_XRC} | uint64_t{IBV_DEVICE_AUTO_PATH_MIG} |
                uint64_t{IBV_DEVICE_PORT_ACTIVE_EVENT} | uint64_t{IBV_DEVICE_MEM_WINDOW} |
                uint64_t{IBV_DEVICE_MEM_MGT_EXTENSIONS} | uint64_t{IBV_DEVICE_MEM_WINDOW_TYPE_2B} |
                uint64_t{IBV_DEVICE_MANAGED_FLOW_STEERING} | kFlushGlobal | kAtomicWrite);
  EXPECT_EQ(device.atomic_cap, uint32_t{IBV_ATOMIC_HCA});
  const abi::QueryPortReply port = MakePortAttributes();
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(port.max_mtu, IBV_MTU_4096);
  EXPECT_EQ(port.active_mtu, IBV_MTU_4096);
  EXPECT_EQ(port.link_layer, IBV_LINK_LAYER_ETHERNET);
  EXPECT_EQ(port.port_cap_flags, uint32_t{IBV_PORT_CM_SUP} | uint32_t{IBV_PORT_IP_BASED_GIDS});
}

TEST(ResourceLimits, NoRegisteredVendorIsClaimed) {
  const abi::DeviceAttributes device = MakeDeviceAttributes(0);
  EXPECT_NE(device.vendor_id, 0x02c9u);
  EXPECT_NE(device.vendor_id, 0x1d0fu);
}

}  // namespace
}  // namespace verbena::nic
