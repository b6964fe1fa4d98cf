// SPDX-License-Identifier: Apache-2.0
//
// Receive side scaling: work queues, tables of them, and raw packet QPs that spread
// what their flow rules take over a table. A work queue is a raw packet QP of the
// device that only receives.
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "provider/provider.h"

namespace verbena::provider {
namespace {

struct Wq {
  ibv_wq base;
  ibv_qp* qp;
  uint32_t tables;  // places in them
};

struct Table {
  ibv_rwq_ind_table base;
  uint32_t log_size;
  uint32_t qps;  // that spread over it
  Wq* wqs[1 << abi::kMaxLogRssSize];
};

void Add(uint32_t* count, int by) { __atomic_add_fetch(count, by, __ATOMIC_RELAXED); }
// Counts one more object, if there may be so many.
bool AddUpTo(uint32_t* count, uint32_t limit) {
  if (__atomic_add_fetch(count, 1, __ATOMIC_RELAXED) <= limit) return true;
  Add(count, -1);
  return false;
}
uint32_t Read(const uint32_t* count) { return __atomic_load_n(count, __ATOMIC_RELAXED); }

int PostToWq(ibv_wq* wq, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
  return PostRecv(Downcast<Wq>(wq)->qp, wr, bad_wr);
}

int Move(ibv_qp* qp, ibv_qp_state state, int mask = IBV_QP_STATE) {
  ibv_qp_attr attr = {};
  attr.qp_state = state;
  attr.port_num = 1;
  return ModifyQp(qp, &attr, mask);
}

// 0 or EINVAL: a WQ goes from RESET to RDY, from RDY to ERR, and from any to RESET.
int MoveWq(Wq* wq, ibv_wq_state to) {
  const ibv_wq_state from = wq->base.state;
  int error = EINVAL;
  if (to == IBV_WQS_RESET) {
    error = Move(wq->qp, IBV_QPS_RESET);
  } else if (to == IBV_WQS_RDY && from == IBV_WQS_RDY) {
    error = 0;
  } else if (to == IBV_WQS_RDY && from == IBV_WQS_RESET) {
    error = Move(wq->qp, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PORT);
    if (error == 0) error = Move(wq->qp, IBV_QPS_RTR);
  } else if (to == IBV_WQS_ERR && from != IBV_WQS_RESET) {
    error = Move(wq->qp, IBV_QPS_ERR);
  }
  if (error == 0) wq->base.state = to;
  return error;
}

}  // namespace

ibv_wq* CreateWq(ibv_context* context, ibv_wq_init_attr* attr) {
  int error = 0;
  if (attr->wq_type != IBV_WQT_RQ || attr->pd == nullptr || attr->cq == nullptr ||
      attr->pd->context != context || attr->cq->context != context) {
    error = EINVAL;
  } else if (attr->comp_mask != 0 && attr->create_flags != 0) {
    error = EOPNOTSUPP;
  }
  Wq* wq = error == 0 ? static_cast<Wq*>(calloc(1, sizeof(Wq))) : nullptr;
  if (wq == nullptr) {
    errno = error != 0 ? error : ENOMEM;
    return nullptr;
  }
  ibv_qp_init_attr init = {};
  init.send_cq = init.recv_cq = attr->cq;
  init.qp_type = IBV_QPT_RAW_PACKET;
  init.cap.max_recv_wr = attr->max_wr;
  init.cap.max_recv_sge = attr->max_sge;
  wq->qp = CreateQp(attr->pd, &init);
  if (wq->qp == nullptr) {
    free(wq);
    return nullptr;
  }
  attr->max_wr = init.cap.max_recv_wr;
  attr->max_sge = init.cap.max_recv_sge;
  wq->base.context = context;
  wq->base.pd = attr->pd;
  wq->base.cq = attr->cq;
  wq->base.wq_num = wq->qp->qp_num;
  wq->base.handle = wq->qp->handle;
  wq->base.state = IBV_WQS_RESET;
  wq->base.wq_type = IBV_WQT_RQ;
  wq->base.post_recv = PostToWq;
  return &wq->base;
}

int ModifyWq(ibv_wq* ibv, ibv_wq_attr* attr) {
  Wq* wq = Downcast<Wq>(ibv);
  constexpr uint32_t kKnown = IBV_WQ_ATTR_STATE | IBV_WQ_ATTR_CURR_STATE | IBV_WQ_ATTR_FLAGS;
  if ((attr->attr_mask & ~kKnown) != 0) return EINVAL;
  if ((attr->attr_mask & IBV_WQ_ATTR_FLAGS) != 0 && attr->flags_mask != 0) return EOPNOTSUPP;
  if ((attr->attr_mask & IBV_WQ_ATTR_CURR_STATE) != 0 && attr->curr_wq_state != ibv->state) {
    return EINVAL;
  }
  return (attr->attr_mask & IBV_WQ_ATTR_STATE) != 0 ? MoveWq(wq, attr->wq_state) : 0;
}

int DestroyWq(ibv_wq* ibv) {
  Wq* wq = Downcast<Wq>(ibv);
  if (Read(&wq->tables) != 0) return EBUSY;
  const int error = DestroyQp(wq->qp);
  if (error == 0) free(wq);
  return error;
}

ibv_rwq_ind_table* CreateRwqIndTable(ibv_context* context, ibv_rwq_ind_table_init_attr* attr) {
  int error = attr->comp_mask != 0 ? EOPNOTSUPP : 0;
  if (attr->log_ind_tbl_size > abi::kMaxLogRssSize) error = EINVAL;
  const uint32_t size = error == 0 ? 1u << attr->log_ind_tbl_size : 0;
  for (uint32_t i = 0; i < size; ++i) {
    if (attr->ind_tbl[i] == nullptr || attr->ind_tbl[i]->context != context) error = EINVAL;
  }
  uint32_t* const tables = &ToContext(context)->rwq_tables;
  if (error == 0 && !AddUpTo(tables, ToContext(context)->attributes.max_qp)) error = ENOMEM;
  Table* table = error == 0 ? static_cast<Table*>(calloc(1, sizeof(Table))) : nullptr;
  if (table == nullptr) {
    if (error == 0) Add(tables, -1);
    errno = error != 0 ? error : ENOMEM;
    return nullptr;
  }
  table->base.context = context;
  table->log_size = attr->log_ind_tbl_size;
  for (uint32_t i = 0; i < size; ++i) {
    table->wqs[i] = Downcast<Wq>(attr->ind_tbl[i]);
    Add(&table->wqs[i]->tables, 1);
  }
  table->base.ind_tbl_num = static_cast<int>(table->wqs[0]->base.wq_num);
  table->base.ind_tbl_handle = table->base.ind_tbl_num;
  return &table->base;
}

int DestroyRwqIndTable(ibv_rwq_ind_table* ibv) {
  Table* table = Downcast<Table>(ibv);
  if (Read(&table->qps) != 0) return EBUSY;
  for (uint32_t i = 0; i < 1u << table->log_size; ++i) Add(&table->wqs[i]->tables, -1);
  Add(&ToContext(ibv->context)->rwq_tables, -1);
  free(table);
  return 0;
}

int CreateRss(Context* context, Qp* qp, ibv_rwq_ind_table* ibv, const ibv_rx_hash_conf& hash) {
  Table* table = Downcast<Table>(ibv);
  abi::CreateRssRequest request = {};
  abi::HandleReply reply = {};
  if (hash.rx_hash_function != IBV_RX_HASH_FUNC_TOEPLITZ) return EOPNOTSUPP;
  if (hash.rx_hash_key_len != sizeof(request.key) || hash.rx_hash_key == nullptr) return EINVAL;
  if ((hash.rx_hash_fields_mask & ~uint64_t{abi::kRssFields}) != 0) return EOPNOTSUPP;
  request.header.op = abi::kCmdCreateRss;
  request.fields = static_cast<uint32_t>(hash.rx_hash_fields_mask);
  request.log_size = static_cast<uint8_t>(table->log_size);
  memcpy(request.key, hash.rx_hash_key, sizeof(request.key));
  for (uint32_t i = 0; i < 1u << table->log_size; ++i) {
    request.qps[i] = table->wqs[i]->qp->handle;
  }
  const int error = context->channel.Execute(&request, &reply);
  if (error != 0) return error;
  qp->rss_table = ibv;
  qp->base.qp.handle = reply.handle;
  qp->base.qp.qp_num = static_cast<uint32_t>(ibv->ind_tbl_num);
  Add(&table->qps, 1);
  return 0;
}

int DestroyRss(Qp* qp) {
  Context* context = ToContext(qp->base.qp.context);
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdDestroyRss;
  request.handle = qp->base.qp.handle;
  const int error = DestroyResult(context, context->channel.Execute(&request, &reply));
  if (error == 0) Add(&Downcast<Table>(qp->rss_table)->qps, -1);
  return error;
}

}  // namespace verbena::provider
