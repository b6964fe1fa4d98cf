// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "provider/provider.h"

namespace verbena::provider {
namespace {

void FillAttributes(const abi::DeviceAttributes& from, ibv_device_attr* to) {
  static_assert(sizeof(from.fw_version) <= sizeof(to->fw_ver));
  memcpy(to->fw_ver, from.fw_version, sizeof(from.fw_version));
  to->fw_ver[sizeof(from.fw_version) - 1] = '\0';
  to->node_guid = from.node_guid;
  to->sys_image_guid = from.sys_image_guid;
  to->max_mr_size = from.max_mr_size;
  to->page_size_cap = from.page_size_cap;
  to->vendor_id = from.vendor_id;
  to->vendor_part_id = from.vendor_part_id;
  to->hw_ver = from.hw_ver;
  to->max_qp = static_cast<int>(from.max_qp);
  to->max_qp_wr = static_cast<int>(from.max_qp_wr);
  to->device_cap_flags = static_cast<unsigned>(from.device_cap_flags);
  to->max_sge = static_cast<int>(from.max_sge);
  to->max_sge_rd = static_cast<int>(from.max_sge_rd);
  to->max_cq = static_cast<int>(from.max_cq);
  to->max_cqe = static_cast<int>(from.max_cqe);
  to->max_mr = static_cast<int>(from.max_mr);
  to->max_pd = static_cast<int>(from.max_pd);
  to->max_qp_rd_atom = static_cast<int>(from.max_qp_rd_atom);
  to->max_res_rd_atom = static_cast<int>(from.max_res_rd_atom);
  to->max_qp_init_rd_atom = static_cast<int>(from.max_qp_init_rd_atom);
  to->atomic_cap = static_cast<ibv_atomic_cap>(from.atomic_cap);
  to->max_mw = static_cast<int>(from.max_mw);
  to->max_mcast_grp = static_cast<int>(from.max_mcast_grp);
  to->max_mcast_qp_attach = static_cast<int>(from.max_mcast_qp_attach);
  to->max_total_mcast_qp_attach = static_cast<int>(from.max_total_mcast_qp_attach);
  to->max_ah = static_cast<int>(from.max_ah);
  to->max_srq = static_cast<int>(from.max_srq);
  to->max_srq_wr = static_cast<int>(from.max_srq_wr);
  to->max_srq_sge = static_cast<int>(from.max_srq_sge);
  to->max_pkeys = static_cast<uint16_t>(from.max_pkeys);
  to->local_ca_ack_delay = static_cast<uint8_t>(from.local_ca_ack_delay);
  to->phys_port_cnt = static_cast<uint8_t>(from.phys_port_count);
}

constexpr uint64_t kClockKhz = 1'000'000;  // nanoseconds

// Pages are never pinned, so all can do without.
// Of RC, and of XRC, for which there is a field at another place.
constexpr uint32_t kReliableOdp = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
                                  IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ |
                                  IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_SRQ_RECV;

void FillOdp(ibv_odp_caps* caps) {
  caps->general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT;
  caps->per_transport_caps.rc_odp_caps = kReliableOdp;
  caps->per_transport_caps.uc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
                                         IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_SRQ_RECV;
  caps->per_transport_caps.ud_odp_caps =
      IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
}

// True if a caller's structure of `size` bytes has the field.
#define VERBENA_HAS(size, field) \
  ((size) >= offsetof(ibv_device_attr_ex, field) + sizeof(ibv_device_attr_ex::field))

// A RoCE port has LID 0. Programs that know only LIDs, and would address peers
// by 0, are shown those that the daemon has for them: with VERBENA_LIDS=1; qperf,
// which without -cm1 is such a program; udpong, since rsockets of datagrams
// address their own port so.
bool ShowsLids() {
  const char* chosen = secure_getenv("VERBENA_LIDS");
  if (chosen != nullptr && *chosen != '\0') return strcmp(chosen, "0") != 0;
  return strcmp(program_invocation_short_name, "qperf") == 0 ||
         strcmp(program_invocation_short_name, "udpong") == 0;
}

}  // namespace

// ibv_query_device(3) comes here with a structure of 232 bytes only.
int QueryDevice(ibv_context* ibv, const ibv_query_device_ex_input* input, ibv_device_attr_ex* attr,
                size_t attr_size) {
  const Context* context = ToContext(ibv);
  if (input != nullptr && input->comp_mask != 0) return EINVAL;
  if (attr_size < sizeof(attr->orig_attr)) return EINVAL;
  // Also in a forked child: they are constant.
  if (context->DeviceDead()) return EIO;
  memset(static_cast<void*>(attr), 0, attr_size);
  FillAttributes(context->attributes, &attr->orig_attr);
  if (VERBENA_HAS(attr_size, device_cap_flags_ex)) {
    attr->device_cap_flags_ex = context->attributes.device_cap_flags;
  }
  if (VERBENA_HAS(attr_size, odp_caps)) FillOdp(&attr->odp_caps);
  if (VERBENA_HAS(attr_size, xrc_odp_caps)) attr->xrc_odp_caps = kReliableOdp;
  if (VERBENA_HAS(attr_size, completion_timestamp_mask)) {
    attr->completion_timestamp_mask = UINT64_MAX;
  }
  if (VERBENA_HAS(attr_size, hca_core_clock)) attr->hca_core_clock = kClockKhz;
  if (VERBENA_HAS(attr_size, cq_mod_caps)) {
    attr->cq_mod_caps.max_cq_count = UINT16_MAX;
    attr->cq_mod_caps.max_cq_period = UINT16_MAX;
  }
  if (VERBENA_HAS(attr_size, rss_caps)) {
    attr->rss_caps.supported_qpts = 1u << IBV_QPT_RAW_PACKET;
    attr->rss_caps.max_rwq_indirection_tables = context->attributes.max_qp;
    attr->rss_caps.max_rwq_indirection_table_size = 1u << abi::kMaxLogRssSize;
    attr->rss_caps.rx_hash_fields_mask = abi::kRssFields;
    attr->rss_caps.rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ;
  }
  if (VERBENA_HAS(attr_size, max_wq_type_rq)) attr->max_wq_type_rq = context->attributes.max_qp;
  if (VERBENA_HAS(attr_size, packet_pacing_caps)) {
    attr->packet_pacing_caps.qp_rate_limit_min = 1;
    attr->packet_pacing_caps.qp_rate_limit_max = abi::kMaxRateKbps;
    attr->packet_pacing_caps.supported_qpts = 1u << IBV_QPT_RAW_PACKET;
  }
  if (VERBENA_HAS(attr_size, max_dm_size)) attr->max_dm_size = context->attributes.max_dm_size;
  if (VERBENA_HAS(attr_size, phys_port_cnt_ex)) {
    attr->phys_port_cnt_ex = context->attributes.phys_port_count;
  }
  return 0;
}

// libibverbs has zeroed the structure. It ends at byte 52 up to release 48, so
// nothing behind that may be written.
int QueryPort(ibv_context* ibv, uint8_t port, ibv_port_attr* attr) {
  abi::HandleRequest request = {};
  abi::QueryPortReply reply = {};
  request.header.op = abi::kCmdQueryPort;
  request.handle = port;
  const int error = ToContext(ibv)->channel.Execute(&request, &reply);
  if (error != 0) return error;
  attr->state = static_cast<ibv_port_state>(reply.state);
  attr->max_mtu = static_cast<ibv_mtu>(reply.max_mtu);
  attr->active_mtu = static_cast<ibv_mtu>(reply.active_mtu);
  attr->gid_tbl_len = reply.gid_table_len;
  attr->port_cap_flags = reply.port_cap_flags;
  attr->max_msg_sz = static_cast<uint32_t>(reply.max_msg_size);
  attr->bad_pkey_cntr = reply.bad_pkey_count;
  attr->qkey_viol_cntr = reply.qkey_violation_count;
  attr->pkey_tbl_len = reply.pkey_table_len;
  attr->lid = ShowsLids() ? reply.lid : 0;
  attr->max_vl_num = reply.max_vl_num;
  attr->active_width = reply.active_width;
  attr->active_speed = reply.active_speed;
  attr->phys_state = reply.phys_state;
  attr->link_layer = reply.link_layer;
  return 0;
}

}  // namespace verbena::provider
