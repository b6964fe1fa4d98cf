// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/resource_limits.h"

#include <cstring>

#include "nic_sim/runtime/version.h"

namespace verbena::nic {
namespace {

// enum ibv_device_cap_flags.
constexpr uint64_t kAutoPathMig = 1 << 4;
constexpr uint64_t kCurrentQpStateMod = 1 << 7;
constexpr uint64_t kPortActiveEvent = 1 << 10;
constexpr uint64_t kSysImageGuid = 1 << 11;
constexpr uint64_t kRcRnrNakGen = 1 << 12;
constexpr uint64_t kSrqResize = 1 << 13;
constexpr uint64_t kMemWindow = 1 << 17;
constexpr uint64_t kXrc = 1 << 20;
constexpr uint64_t kMemMgtExtensions = 1 << 21;  // LOCAL_INV, SEND_INV
constexpr uint64_t kMemWindowType2B = 1 << 24;
constexpr uint64_t kManagedFlowSteering = 1 << 29;
constexpr uint64_t kFlushGlobal = uint64_t{1} << 38;
constexpr uint64_t kAtomicWrite = uint64_t{1} << 40;
constexpr uint32_t kAtomicHca = 1;  // enum ibv_atomic_cap

// Not registered to anyone, so that no software takes the device for another.
constexpr uint32_t kVendorId = 0xffffff;
constexpr uint32_t kVendorPartId = 0x5642;

}  // namespace

abi::DeviceAttributes MakeDeviceAttributes(uint64_t node_guid) {
  abi::DeviceAttributes a{};
  a.node_guid = node_guid;
  a.sys_image_guid = node_guid;
  a.max_mr_size = ~uint64_t{0};
  a.page_size_cap = 0xfffff000;
  a.max_msg_size = kMaxMessageBytes;
  a.device_cap_flags = kAutoPathMig | kCurrentQpStateMod | kPortActiveEvent | kSysImageGuid |
                       kRcRnrNakGen | kSrqResize | kMemWindow | kXrc | kMemMgtExtensions |
                       kMemWindowType2B | kManagedFlowSteering | kFlushGlobal | kAtomicWrite;
  a.vendor_id = kVendorId;
  a.vendor_part_id = kVendorPartId;
  a.hw_ver = 1;
  a.max_qp = kMaxQp;
  a.max_qp_wr = kMaxQpWr;
  a.max_sge = kMaxSge;
  a.max_sge_rd = kMaxSge;
  a.max_inline = kMaxInline;
  a.max_cq = kMaxCq;
  a.max_cqe = kMaxCqe;
  a.max_mr = kMaxMr;
  a.max_mw = kMaxMw;
  a.max_dm_size = kMaxDmBytes;
  a.max_pd = kMaxPd;
  a.max_ah = kMaxAh;
  a.max_srq = kMaxSrq;
  a.max_srq_wr = kMaxSrqWr;
  a.max_srq_sge = kMaxSge;
  a.max_mcast_grp = kMaxMcastGroups;
  a.max_mcast_qp_attach = kMaxMcastQpAttach;
  a.max_total_mcast_qp_attach = kMaxTotalMcastQpAttach;
  a.max_qp_rd_atom = kMaxRdAtomic;
  a.max_res_rd_atom = kMaxRdAtomic * kMaxQp;
  a.max_qp_init_rd_atom = kMaxRdAtomic;
  a.atomic_cap = kAtomicHca;
  a.max_pkeys = kPkeyTableLen;
  a.local_ca_ack_delay = 15;
  a.phys_port_count = kPortCount;
  a.num_comp_vectors = 1;
  std::strncpy(a.fw_version, kVersion, sizeof a.fw_version - 1);
  return a;
}

abi::QueryPortReply MakePortAttributes() {
  abi::QueryPortReply p{};
  p.max_msg_size = kMaxMessageBytes;
  p.port_cap_flags = 0x04010000;  // CM_SUP | IP_BASED_GIDS
  p.gid_table_len = kGidTableLen;
  p.pkey_table_len = kPkeyTableLen;
  p.lid = 0;
  p.state = 4;  // ACTIVE
  p.max_mtu = 5;
  p.active_mtu = 5;
  p.max_vl_num = 1;
  p.active_width = 2;   // 4X
  p.active_speed = 32;  // 25 Gb/s lanes
  p.phys_state = 5;     // LinkUp
  p.link_layer = 2;     // Ethernet
  return p;
}

}  // namespace verbena::nic
