// SPDX-License-Identifier: Apache-2.0
//
// What a device says about itself, and what it refuses because it is not built.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

std::vector<std::string> DeviceNames() {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  Require(list != nullptr, "ibv_get_device_list");
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(ibv_get_device_name(list[i]));
  ibv_free_device_list(list);
  return names;
}

TEST(Discovery, ShowsTheDevicesOfThisHostAndNoOthers) {
  EXPECT_EQ(DeviceNames(), (std::vector<std::string>{"verbena0", "verbena1"}));
}

TEST(Discovery, GivesEachDeviceAnIdentityOfItsOwn) {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  ASSERT_EQ(count, 2);
  EXPECT_NE(ibv_get_device_guid(list[0]), 0u);
  EXPECT_NE(ibv_get_device_guid(list[0]), ibv_get_device_guid(list[1]));
  for (int i = 0; i < count; ++i) {
    EXPECT_EQ(list[i]->node_type, IBV_NODE_CA);
    EXPECT_EQ(list[i]->transport_type, IBV_TRANSPORT_IB);
  }
  ibv_free_device_list(list);
}

TEST(Discovery, CanBeRepeatedWhileADeviceIsOpen) {
  const Owned<ibv_context> context = OpenDevice();
  for (int i = 0; i < 20; ++i) ASSERT_EQ(DeviceNames().size(), 2u);
  for (int i = 0; i < 20; ++i) {
    const Owned<ibv_context> again = OpenDevice("verbena1");
    ASSERT_NE(again, nullptr);
  }
}

class Device : public ::testing::TestWithParam<const char*> {
 protected:
  Owned<ibv_context> context_ = OpenDevice(GetParam());
};

TEST_P(Device, HasTheDocumentedAttributes) {
  ibv_device_attr attr = {};
  ASSERT_EQ(ibv_query_device(context_.get(), &attr), 0);
  EXPECT_EQ(attr.max_qp, 16384);
  EXPECT_EQ(attr.max_cq, 16384);
  EXPECT_EQ(attr.max_mr, 131072);
  EXPECT_EQ(attr.max_pd, 16384);
  EXPECT_EQ(attr.max_ah, 131072);
  EXPECT_EQ(attr.max_qp_wr, 16384);
  EXPECT_EQ(attr.max_cqe, 1 << 20);
  EXPECT_EQ(attr.max_sge, 32);
  EXPECT_EQ(attr.max_sge_rd, 32);
  EXPECT_EQ(attr.max_qp_rd_atom, 16);
  EXPECT_EQ(attr.max_qp_init_rd_atom, 16);
  EXPECT_EQ(attr.max_pkeys, 1);
  EXPECT_EQ(attr.local_ca_ack_delay, 15);
  EXPECT_EQ(attr.atomic_cap, IBV_ATOMIC_HCA);
  EXPECT_EQ(attr.phys_port_cnt, 1);
  EXPECT_EQ(attr.node_guid, ibv_get_device_guid(context_->device));
  EXPECT_NE(attr.vendor_id, 0x02c9u);
  EXPECT_NE(attr.vendor_id, 0x1d0fu);
  EXPECT_NE(attr.fw_ver[0], '\0');
  EXPECT_NE(attr.page_size_cap & 4096, 0u);
}

TEST_P(Device, GivesTheSameAttributesByTheExtendedQuery) {
  ibv_device_attr attr = {};
  ibv_device_attr_ex extended;
  memset(&extended, 0x5a, sizeof(extended));
  ASSERT_EQ(ibv_query_device(context_.get(), &attr), 0);
  ASSERT_EQ(ibv_query_device_ex(context_.get(), nullptr, &extended), 0);
  EXPECT_EQ(memcmp(&attr, &extended.orig_attr, sizeof(attr)), 0);
  EXPECT_EQ(extended.odp_caps.general_caps,
            uint64_t{IBV_ODP_SUPPORT} | uint64_t{IBV_ODP_SUPPORT_IMPLICIT});
  EXPECT_EQ(extended.raw_packet_caps, 0u);
}

TEST_P(Device, HasAnActiveEthernetPort) {
  ibv_port_attr attr = {};
  ASSERT_EQ(ibv_query_port(context_.get(), 1, &attr), 0);
  EXPECT_EQ(attr.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(attr.max_mtu, IBV_MTU_4096);
  EXPECT_EQ(attr.active_mtu, IBV_MTU_4096);
  EXPECT_EQ(attr.link_layer, IBV_LINK_LAYER_ETHERNET);
  EXPECT_EQ(attr.gid_tbl_len, 16);
  EXPECT_EQ(attr.pkey_tbl_len, 1);
  EXPECT_EQ(attr.max_msg_sz, 1u << 31);
  EXPECT_EQ(attr.active_width, 2);
  EXPECT_EQ(attr.active_speed, 32);
  EXPECT_EQ(attr.phys_state, 5);
  EXPECT_EQ(attr.lid, 0);
}

TEST_P(Device, HasNoOtherPort) {
  ibv_port_attr attr = {};
  EXPECT_NE(ibv_query_port(context_.get(), 0, &attr), 0);
  EXPECT_NE(ibv_query_port(context_.get(), 2, &attr), 0);
}

TEST_P(Device, HasALinkLocalAndAnIpv4Gid) {
  ibv_gid gid = {};
  ASSERT_EQ(ibv_query_gid(context_.get(), 1, 0, &gid), 0);
  EXPECT_EQ(gid.raw[0], 0xfe);
  EXPECT_EQ(gid.raw[1], 0x80);
  EXPECT_EQ(gid.raw[11], 0xff);  // EUI-64 of a MAC address.
  EXPECT_EQ(gid.raw[12], 0xfe);
  ASSERT_EQ(ibv_query_gid(context_.get(), 1, 1, &gid), 0);
  const uint8_t number = GetParam()[strlen("verbena")] == '0' ? 1 : 2;
  const uint8_t expected[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 88, 0, number};
  EXPECT_EQ(memcmp(gid.raw, expected, 16), 0);
}

TEST_P(Device, HasReadableGidsOfTypeRoceV2Only) {
  ibv_port_attr port = {};
  ASSERT_EQ(ibv_query_port(context_.get(), 1, &port), 0);
  for (int i = 0; i < port.gid_tbl_len; ++i) {
    ibv_gid gid = {};
    EXPECT_EQ(ibv_query_gid(context_.get(), 1, i, &gid), 0) << i;
  }
  ibv_gid_entry entry = {};
  ASSERT_EQ(ibv_query_gid_ex(context_.get(), 1, 1, &entry, 0), 0);
  EXPECT_EQ(entry.gid_type, static_cast<uint32_t>(IBV_GID_TYPE_ROCE_V2));
  EXPECT_EQ(entry.gid_index, 1u);
  EXPECT_NE(entry.ndev_ifindex, 0u);
  ibv_gid_entry entries[64] = {};
  const ssize_t count = ibv_query_gid_table(context_.get(), entries, 64, 0);
  EXPECT_EQ(count, 2);
  for (ssize_t i = 0; i < count; ++i) {
    EXPECT_EQ(entries[i].gid_type, static_cast<uint32_t>(IBV_GID_TYPE_ROCE_V2));
  }
}

TEST_P(Device, HasTheDefaultPkeyOnly) {
  uint16_t pkey = 0;
  ASSERT_EQ(ibv_query_pkey(context_.get(), 1, 0, &pkey), 0);
  EXPECT_EQ(ntohs(pkey), 0xffff);
  EXPECT_NE(ibv_query_pkey(context_.get(), 1, 1, &pkey), 0);
}

TEST_P(Device, SaysThatAbsentFeaturesAreNotSupported) {
  ibv_device_attr_ex attr = {};
  ASSERT_EQ(ibv_query_device_ex(context_.get(), nullptr, &attr), 0);
  const Owned<ibv_pd> pd(ibv_alloc_pd(context_.get()));
  ASSERT_NE(pd, nullptr);
  if (attr.orig_attr.max_mw == 0) {
    errno = 0;
    EXPECT_EQ(ibv_alloc_mw(pd.get(), IBV_MW_TYPE_1), nullptr);
    EXPECT_EQ(errno, EOPNOTSUPP);
  }
  if (attr.orig_attr.max_srq == 0) {
    ibv_srq_init_attr init = {nullptr, {16, 1, 0}};
    errno = 0;
    EXPECT_EQ(ibv_create_srq(pd.get(), &init), nullptr);
    EXPECT_EQ(errno, EOPNOTSUPP);
  }
  if ((attr.orig_attr.device_cap_flags & IBV_DEVICE_XRC) == 0) {
    ibv_xrcd_init_attr init = {};
    init.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    init.fd = -1;
    init.oflags = O_CREAT;
    errno = 0;
    EXPECT_EQ(ibv_open_xrcd(context_.get(), &init), nullptr);
    EXPECT_EQ(errno, EOPNOTSUPP);
  }
  if (attr.max_dm_size == 0) {
    ibv_alloc_dm_attr init = {4096, 0, 0};
    errno = 0;
    EXPECT_EQ(ibv_alloc_dm(context_.get(), &init), nullptr);
    EXPECT_EQ(errno, EOPNOTSUPP);
  }
}

TEST_P(Device, MakesAddressHandlesForUsableGidsOnly) {
  const Owned<ibv_pd> pd(ibv_alloc_pd(context_.get()));
  for (const uint8_t index : {uint8_t{0}, uint8_t{1}}) {
    ibv_ah_attr attr = {};
    attr.is_global = 1;
    attr.port_num = 1;
    attr.grh.sgid_index = index;
    attr.grh.hop_limit = 1;
    ASSERT_EQ(ibv_query_gid(context_.get(), 1, index, &attr.grh.dgid), 0);
    const Owned<ibv_ah> ah(ibv_create_ah(pd.get(), &attr));
    EXPECT_NE(ah, nullptr) << "GID index " << int{index} << ": " << strerror(errno);
  }
  ibv_ah_attr attr = {};
  attr.is_global = 1;
  attr.port_num = 1;
  attr.grh.sgid_index = 9;  // An empty entry.
  attr.grh.dgid.raw[15] = 1;
  errno = 0;
  EXPECT_EQ(ibv_create_ah(pd.get(), &attr), nullptr);
  EXPECT_EQ(errno, EINVAL);
  attr.grh.sgid_index = 1;
  attr.port_num = 2;
  errno = 0;
  EXPECT_EQ(ibv_create_ah(pd.get(), &attr), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

INSTANTIATE_TEST_SUITE_P(Nics, Device, ::testing::Values("verbena0", "verbena1"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace verbena::testing
