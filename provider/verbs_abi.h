// SPDX-License-Identifier: Apache-2.0
//
// The private interface between libibverbs and its providers (private ABI 34),
// of which no header is packaged. Only what this provider uses; every number is
// one that was measured on x86-64 and is the same from rdma-core 36 to 56.
// Public structures come from <infiniband/verbs.h>; their sizes are checked too
// because libibverbs and this provider must agree on them.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

namespace verbena::provider {

// First rdma-core release with the operations table below.
inline constexpr int kFirstRelease = 36;

// What libibverbs found in sysfs about a device.
struct VerbsSysfsDev {
  void* entry[2];
  void* provider_data;
  const void* match;
  uint32_t flags;
  char sysfs_name[IBV_SYSFS_NAME_MAX];
  uint8_t padding[4];
  uint64_t sysfs_cdev;
  char ibdev_name[IBV_SYSFS_NAME_MAX];
  char ibdev_path[IBV_SYSFS_PATH_MAX];
  char modalias[512];
  uint64_t node_guid;
  uint32_t driver_id;
  uint32_t node_type;
  int ibdev_idx;
  uint32_t num_ports;
  uint32_t abi_ver;
  int64_t time_created[2];
};
static_assert(offsetof(VerbsSysfsDev, sysfs_name) == 36);
static_assert(offsetof(VerbsSysfsDev, sysfs_cdev) == 104);
static_assert(offsetof(VerbsSysfsDev, ibdev_name) == 112);
static_assert(offsetof(VerbsSysfsDev, ibdev_path) == 176);
static_assert(offsetof(VerbsSysfsDev, modalias) == 432);
static_assert(offsetof(VerbsSysfsDev, abi_ver) == 968);
static_assert(sizeof(VerbsSysfsDev) == 992);

struct VerbsDevice;

struct VerbsDeviceOps {
  const char* name;
  uint32_t match_min_abi_version;
  uint32_t match_max_abi_version;
  const void* match_table;
  const void* static_providers;
  bool (*match_device)(VerbsSysfsDev* sysfs_dev);
  verbs_context* (*alloc_context)(ibv_device* device, int cmd_fd, void* priv);
  verbs_context* (*import_context)(ibv_device* device, int cmd_fd);
  VerbsDevice* (*alloc_device)(VerbsSysfsDev* sysfs_dev);
  void (*uninit_device)(VerbsDevice* device);
};
static_assert(sizeof(VerbsDeviceOps) == 72);
static_assert(offsetof(VerbsDeviceOps, match_device) == 32);
static_assert(offsetof(VerbsDeviceOps, alloc_device) == 56);

struct VerbsDevice {
  ibv_device device;
  const VerbsDeviceOps* ops;
  int refcount;
  void* entry[2];
  VerbsSysfsDev* sysfs;
  uint32_t core_support;
};
static_assert(offsetof(VerbsDevice, ops) == 664);
static_assert(offsetof(VerbsDevice, sysfs) == 696);
static_assert(offsetof(VerbsDevice, core_support) == 704);
static_assert(sizeof(VerbsDevice) == 712);

// Bit of core_support: the provider takes optional access bits as they are.
inline constexpr uint32_t kCoreSupportOptionalMrAccess = 1;

struct VerbsMr {
  ibv_mr mr;
  int mr_type;
  int access;
};
static_assert(offsetof(VerbsMr, access) == 52);
static_assert(sizeof(VerbsMr) == 56);

// VerbsMr::mr_type, ours: libibverbs only wants plain regions to be 0.
inline constexpr int kMrTypePlain = 0;
inline constexpr int kMrTypeNull = 1;
inline constexpr int kMrTypeImported = 2;
inline constexpr int kMrTypeDmabuf = 3;
inline constexpr int kMrTypeDm = 4;

struct VerbsDm {
  ibv_dm dm;
  uint32_t handle;
};
static_assert(offsetof(VerbsDm, handle) == 32);
static_assert(sizeof(VerbsDm) == 40);

struct VerbsXrcd {
  ibv_xrcd xrcd;
  uint32_t comp_mask;
  uint32_t handle;
};
static_assert(offsetof(VerbsXrcd, handle) == 12);
static_assert(sizeof(VerbsXrcd) == 16);

struct VerbsSrq {
  ibv_srq srq;
  ibv_srq_type srq_type;
  ibv_xrcd* xrcd;
  ibv_cq* cq;
  uint32_t srq_num;
};
static_assert(offsetof(VerbsSrq, srq_type) == 128);
static_assert(offsetof(VerbsSrq, srq_num) == 152);
static_assert(sizeof(VerbsSrq) == 160);

// Every libibverbs of 36 … 56 finds zero in the field that says "this is an
// ibv_qp_ex"; it lies at byte 344, 352 or 360, depending on the release.
struct VerbsQp {
  ibv_qp qp;
  uint8_t extended[376 - sizeof(ibv_qp)];
};
static_assert(sizeof(VerbsQp) == 376);

struct VerbsCq {
  ibv_cq cq;
  uint8_t extended[288 - sizeof(ibv_cq)];
};
static_assert(sizeof(VerbsCq) == 288);

// Operations of a context. Entries that stay NULL are answered by libibverbs with
// EOPNOTSUPP. A wrong signature is caught by nothing: beside the public calls
// they differ in what provider.h says.
struct VerbsContextOps {
  int (*advise_mr)(ibv_pd* pd, ibv_advise_mr_advice advice, uint32_t flags, ibv_sge* sges,
                   uint32_t count);
  ibv_dm* (*alloc_dm)(ibv_context* context, ibv_alloc_dm_attr* attr);
  ibv_mw* (*alloc_mw)(ibv_pd* pd, ibv_mw_type type);
  ibv_mr* (*alloc_null_mr)(ibv_pd* pd);
  ibv_pd* (*alloc_parent_domain)(ibv_context* context, ibv_parent_domain_init_attr* attr);
  ibv_pd* (*alloc_pd)(ibv_context* context);
  ibv_td* (*alloc_td)(ibv_context* context, ibv_td_init_attr* attr);
  void (*async_event)(ibv_context* context, ibv_async_event* event);
  int (*attach_counters_point_flow)(ibv_counters* counters, ibv_counter_attach_attr* attr,
                                    ibv_flow* flow);
  int (*attach_mcast)(ibv_qp* qp, const ibv_gid* gid, uint16_t lid);
  int (*bind_mw)(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* bind);
  int (*close_xrcd)(ibv_xrcd* xrcd);
  void (*cq_event)(ibv_cq* cq);
  ibv_ah* (*create_ah)(ibv_pd* pd, ibv_ah_attr* attr);
  ibv_counters* (*create_counters)(ibv_context* context, ibv_counters_init_attr* attr);
  ibv_cq* (*create_cq)(ibv_context* context, int cqe, ibv_comp_channel* channel, int comp_vector);
  ibv_cq_ex* (*create_cq_ex)(ibv_context* context, ibv_cq_init_attr_ex* attr);
  ibv_flow* (*create_flow)(ibv_qp* qp, ibv_flow_attr* attr);
  ibv_flow_action* (*create_flow_action_esp)(ibv_context* context, ibv_flow_action_esp_attr* attr);
  ibv_qp* (*create_qp)(ibv_pd* pd, ibv_qp_init_attr* attr);
  ibv_qp* (*create_qp_ex)(ibv_context* context, ibv_qp_init_attr_ex* attr);
  ibv_rwq_ind_table* (*create_rwq_ind_table)(ibv_context* context,
                                             ibv_rwq_ind_table_init_attr* attr);
  ibv_srq* (*create_srq)(ibv_pd* pd, ibv_srq_init_attr* attr);
  ibv_srq* (*create_srq_ex)(ibv_context* context, ibv_srq_init_attr_ex* attr);
  ibv_wq* (*create_wq)(ibv_context* context, ibv_wq_init_attr* attr);
  int (*dealloc_mw)(ibv_mw* mw);
  int (*dealloc_pd)(ibv_pd* pd);
  int (*dealloc_td)(ibv_td* td);
  int (*dereg_mr)(VerbsMr* mr);
  int (*destroy_ah)(ibv_ah* ah);
  int (*destroy_counters)(ibv_counters* counters);
  int (*destroy_cq)(ibv_cq* cq);
  int (*destroy_flow)(ibv_flow* flow);
  int (*destroy_flow_action)(ibv_flow_action* action);
  int (*destroy_qp)(ibv_qp* qp);
  int (*destroy_rwq_ind_table)(ibv_rwq_ind_table* table);
  int (*destroy_srq)(ibv_srq* srq);
  int (*destroy_wq)(ibv_wq* wq);
  int (*detach_mcast)(ibv_qp* qp, const ibv_gid* gid, uint16_t lid);
  void (*free_context)(ibv_context* context);
  int (*free_dm)(ibv_dm* dm);
  int (*get_srq_num)(ibv_srq* srq, uint32_t* number);
  ibv_dm* (*import_dm)(ibv_context* context, uint32_t handle);
  ibv_mr* (*import_mr)(ibv_pd* pd, uint32_t handle);
  ibv_pd* (*import_pd)(ibv_context* context, uint32_t handle);
  int (*modify_cq)(ibv_cq* cq, ibv_modify_cq_attr* attr);
  int (*modify_flow_action_esp)(ibv_flow_action* action, ibv_flow_action_esp_attr* attr);
  int (*modify_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask);
  int (*modify_qp_rate_limit)(ibv_qp* qp, ibv_qp_rate_limit_attr* attr);
  int (*modify_srq)(ibv_srq* srq, ibv_srq_attr* attr, int mask);
  int (*modify_wq)(ibv_wq* wq, ibv_wq_attr* attr);
  ibv_qp* (*open_qp)(ibv_context* context, ibv_qp_open_attr* attr);
  ibv_xrcd* (*open_xrcd)(ibv_context* context, ibv_xrcd_init_attr* attr);
  int (*poll_cq)(ibv_cq* cq, int num_entries, ibv_wc* wc);
  int (*post_recv)(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);
  int (*post_send)(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr);
  int (*post_srq_ops)(ibv_srq* srq, ibv_ops_wr* wr, ibv_ops_wr** bad_wr);
  int (*post_srq_recv)(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);
  int (*query_device_ex)(ibv_context* context, const ibv_query_device_ex_input* input,
                         ibv_device_attr_ex* attr, size_t attr_size);
  int (*query_ece)(ibv_qp* qp, ibv_ece* ece);
  int (*query_port)(ibv_context* context, uint8_t port, ibv_port_attr* attr);
  int (*query_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init_attr);
  int (*query_qp_data_in_order)(ibv_qp* qp, ibv_wr_opcode opcode, uint32_t flags);
  int (*query_rt_values)(ibv_context* context, ibv_values_ex* values);
  int (*query_srq)(ibv_srq* srq, ibv_srq_attr* attr);
  int (*read_counters)(ibv_counters* counters, uint64_t* values, uint32_t count, uint32_t flags);
  ibv_mr* (*reg_dm_mr)(ibv_pd* pd, ibv_dm* dm, uint64_t offset, size_t length, unsigned int access);
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                           int access);
  ibv_mr* (*reg_mr)(ibv_pd* pd, void* address, size_t length, uint64_t iova, int access);
  int (*req_notify_cq)(ibv_cq* cq, int solicited_only);
  int (*rereg_mr)(VerbsMr* mr, int flags, ibv_pd* pd, void* address, size_t length, int access);
  int (*resize_cq)(ibv_cq* cq, int cqe);
  int (*set_ece)(ibv_qp* qp, ibv_ece* ece);
  void (*unimport_dm)(ibv_dm* dm);
  void (*unimport_mr)(ibv_mr* mr);
  void (*unimport_pd)(ibv_pd* pd);
};
#define VERBENA_CHECK_OP(name, index) static_assert(offsetof(VerbsContextOps, name) == 8 * (index))
VERBENA_CHECK_OP(advise_mr, 0);
VERBENA_CHECK_OP(alloc_dm, 1);
VERBENA_CHECK_OP(alloc_mw, 2);
VERBENA_CHECK_OP(alloc_null_mr, 3);
VERBENA_CHECK_OP(alloc_parent_domain, 4);
VERBENA_CHECK_OP(alloc_pd, 5);
VERBENA_CHECK_OP(alloc_td, 6);
VERBENA_CHECK_OP(async_event, 7);
VERBENA_CHECK_OP(attach_counters_point_flow, 8);
VERBENA_CHECK_OP(attach_mcast, 9);
VERBENA_CHECK_OP(bind_mw, 10);
VERBENA_CHECK_OP(close_xrcd, 11);
VERBENA_CHECK_OP(cq_event, 12);
VERBENA_CHECK_OP(create_ah, 13);
VERBENA_CHECK_OP(create_counters, 14);
VERBENA_CHECK_OP(create_cq, 15);
VERBENA_CHECK_OP(create_cq_ex, 16);
VERBENA_CHECK_OP(create_flow, 17);
VERBENA_CHECK_OP(create_flow_action_esp, 18);
VERBENA_CHECK_OP(create_qp, 19);
VERBENA_CHECK_OP(create_qp_ex, 20);
VERBENA_CHECK_OP(create_rwq_ind_table, 21);
VERBENA_CHECK_OP(create_srq, 22);
VERBENA_CHECK_OP(create_srq_ex, 23);
VERBENA_CHECK_OP(create_wq, 24);
VERBENA_CHECK_OP(dealloc_mw, 25);
VERBENA_CHECK_OP(dealloc_pd, 26);
VERBENA_CHECK_OP(dealloc_td, 27);
VERBENA_CHECK_OP(dereg_mr, 28);
VERBENA_CHECK_OP(destroy_ah, 29);
VERBENA_CHECK_OP(destroy_counters, 30);
VERBENA_CHECK_OP(destroy_cq, 31);
VERBENA_CHECK_OP(destroy_flow, 32);
VERBENA_CHECK_OP(destroy_flow_action, 33);
VERBENA_CHECK_OP(destroy_qp, 34);
VERBENA_CHECK_OP(destroy_rwq_ind_table, 35);
VERBENA_CHECK_OP(destroy_srq, 36);
VERBENA_CHECK_OP(destroy_wq, 37);
VERBENA_CHECK_OP(detach_mcast, 38);
VERBENA_CHECK_OP(free_context, 39);
VERBENA_CHECK_OP(free_dm, 40);
VERBENA_CHECK_OP(get_srq_num, 41);
VERBENA_CHECK_OP(import_dm, 42);
VERBENA_CHECK_OP(import_mr, 43);
VERBENA_CHECK_OP(import_pd, 44);
VERBENA_CHECK_OP(modify_cq, 45);
VERBENA_CHECK_OP(modify_flow_action_esp, 46);
VERBENA_CHECK_OP(modify_qp, 47);
VERBENA_CHECK_OP(modify_qp_rate_limit, 48);
VERBENA_CHECK_OP(modify_srq, 49);
VERBENA_CHECK_OP(modify_wq, 50);
VERBENA_CHECK_OP(open_qp, 51);
VERBENA_CHECK_OP(open_xrcd, 52);
VERBENA_CHECK_OP(poll_cq, 53);
VERBENA_CHECK_OP(post_recv, 54);
VERBENA_CHECK_OP(post_send, 55);
VERBENA_CHECK_OP(post_srq_ops, 56);
VERBENA_CHECK_OP(post_srq_recv, 57);
VERBENA_CHECK_OP(query_device_ex, 58);
VERBENA_CHECK_OP(query_ece, 59);
VERBENA_CHECK_OP(query_port, 60);
VERBENA_CHECK_OP(query_qp, 61);
VERBENA_CHECK_OP(query_qp_data_in_order, 62);
VERBENA_CHECK_OP(query_rt_values, 63);
VERBENA_CHECK_OP(query_srq, 64);
VERBENA_CHECK_OP(read_counters, 65);
VERBENA_CHECK_OP(reg_dm_mr, 66);
VERBENA_CHECK_OP(reg_dmabuf_mr, 67);
VERBENA_CHECK_OP(reg_mr, 68);
VERBENA_CHECK_OP(req_notify_cq, 69);
VERBENA_CHECK_OP(rereg_mr, 70);
VERBENA_CHECK_OP(resize_cq, 71);
VERBENA_CHECK_OP(set_ece, 72);
VERBENA_CHECK_OP(unimport_dm, 73);
VERBENA_CHECK_OP(unimport_mr, 74);
VERBENA_CHECK_OP(unimport_pd, 75);
#undef VERBENA_CHECK_OP
static_assert(sizeof(VerbsContextOps) == 608);

// Public structures, as applications have them compiled in.
static_assert(sizeof(ibv_device) == 664);
static_assert(sizeof(ibv_context) == 328);
static_assert(offsetof(ibv_context, cmd_fd) == 264);
static_assert(offsetof(ibv_context, async_fd) == 268);
static_assert(offsetof(ibv_context, num_comp_vectors) == 272);
static_assert(sizeof(verbs_context) == 648);
static_assert(offsetof(verbs_context, context) == 320);
static_assert(sizeof(ibv_pd) == 16);
static_assert(sizeof(ibv_mr) == 48);
static_assert(sizeof(ibv_ah) == 24);
static_assert(sizeof(ibv_cq) == 128);
static_assert(sizeof(ibv_qp) == 160);
static_assert(sizeof(ibv_device_attr) == 232);
static_assert(offsetof(ibv_device_attr_ex, device_cap_flags_ex) == 280);
static_assert(offsetof(ibv_device_attr_ex, phys_port_cnt_ex) == 396);
static_assert(sizeof(ibv_device_attr_ex) == 400);
static_assert(offsetof(ibv_port_attr, port_cap_flags2) == 48);
static_assert(sizeof(ibv_qp_attr) == 144);
static_assert(sizeof(ibv_qp_init_attr) == 64);
static_assert(sizeof(ibv_ah_attr) == 32);
static_assert(sizeof(ibv_wc) == 48);
static_assert(sizeof(ibv_send_wr) == 128);
static_assert(sizeof(ibv_recv_wr) == 32);
static_assert(sizeof(ibv_sge) == 16);

extern "C" {
// Exported by libibverbs.so.1 with the version IBVERBS_PRIVATE_34.
void verbs_register_driver_34(const VerbsDeviceOps* ops);
// Allocates `size` zeroed bytes with a verbs_context at `offset` (an offset in
// spite of its type). If it fails, it has closed cmd_fd.
void* _verbs_init_and_alloc_context(ibv_device* device, int cmd_fd, size_t size,
                                    verbs_context* offset, uint32_t driver_id);
void verbs_set_ops(verbs_context* context, const VerbsContextOps* ops);
// Closes cmd_fd and async_fd; the memory stays ours.
void verbs_uninit_context(verbs_context* context);
}

}  // namespace verbena::provider
