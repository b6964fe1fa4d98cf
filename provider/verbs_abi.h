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
  void* import_context;
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

// Operations of a context. Entries that this provider does not have stay NULL;
// libibverbs then answers EOPNOTSUPP. NULL entries have no type here.
struct VerbsContextOps {
  void* unused0[5];
  ibv_pd* (*alloc_pd)(ibv_context* context);
  void* unused6[7];
  ibv_ah* (*create_ah)(ibv_pd* pd, ibv_ah_attr* attr);
  void* unused14[1];
  ibv_cq* (*create_cq)(ibv_context* context, int cqe, ibv_comp_channel* channel, int comp_vector);
  void* unused16[3];
  ibv_qp* (*create_qp)(ibv_pd* pd, ibv_qp_init_attr* attr);
  void* unused20[6];
  int (*dealloc_pd)(ibv_pd* pd);
  void* unused27[1];
  int (*dereg_mr)(VerbsMr* mr);
  int (*destroy_ah)(ibv_ah* ah);
  void* unused30[1];
  int (*destroy_cq)(ibv_cq* cq);
  void* unused32[2];
  int (*destroy_qp)(ibv_qp* qp);
  void* unused35[4];
  void (*free_context)(ibv_context* context);
  void* unused40[7];
  int (*modify_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask);
  void* unused48[5];
  int (*poll_cq)(ibv_cq* cq, int num_entries, ibv_wc* wc);
  int (*post_recv)(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);
  int (*post_send)(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr);
  void* unused56[2];
  int (*query_device_ex)(ibv_context* context, const ibv_query_device_ex_input* input,
                         ibv_device_attr_ex* attr, size_t attr_size);
  void* unused59[1];
  int (*query_port)(ibv_context* context, uint8_t port, ibv_port_attr* attr);
  int (*query_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init_attr);
  void* unused62[6];
  ibv_mr* (*reg_mr)(ibv_pd* pd, void* address, size_t length, uint64_t iova, int access);
  int (*req_notify_cq)(ibv_cq* cq, int solicited_only);
  void* unused70[6];
};
#define VERBENA_CHECK_OP(name, index) static_assert(offsetof(VerbsContextOps, name) == 8 * (index))
VERBENA_CHECK_OP(alloc_pd, 5);
VERBENA_CHECK_OP(create_ah, 13);
VERBENA_CHECK_OP(create_cq, 15);
VERBENA_CHECK_OP(create_qp, 19);
VERBENA_CHECK_OP(dealloc_pd, 26);
VERBENA_CHECK_OP(dereg_mr, 28);
VERBENA_CHECK_OP(destroy_ah, 29);
VERBENA_CHECK_OP(destroy_cq, 31);
VERBENA_CHECK_OP(destroy_qp, 34);
VERBENA_CHECK_OP(free_context, 39);
VERBENA_CHECK_OP(modify_qp, 47);
VERBENA_CHECK_OP(poll_cq, 53);
VERBENA_CHECK_OP(post_recv, 54);
VERBENA_CHECK_OP(post_send, 55);
VERBENA_CHECK_OP(query_device_ex, 58);
VERBENA_CHECK_OP(query_port, 60);
VERBENA_CHECK_OP(query_qp, 61);
VERBENA_CHECK_OP(reg_mr, 68);
VERBENA_CHECK_OP(req_notify_cq, 69);
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
