// SPDX-License-Identifier: Apache-2.0
//
// State changes and queries of queue pairs. The device has the table of legal
// transitions and attributes; here only what the mask names is looked at,
// because the rest may be uninitialised.
#include <cerrno>

#include "provider/provider.h"

namespace verbena::provider {
namespace {

// Bits from 21 on (rate limit and later) are not of this device.
constexpr unsigned kKnownMask = (1u << 21) - 1;

void PutPath(const ibv_qp_attr& from, unsigned mask, abi::QpAttr* to) {
  if ((mask & IBV_QP_AV) != 0) to->ah = ToAbi(from.ah_attr);
  if ((mask & IBV_QP_PATH_MTU) != 0) to->path_mtu = from.path_mtu;
  if ((mask & IBV_QP_PKEY_INDEX) != 0) to->pkey_index = from.pkey_index;
  if ((mask & IBV_QP_PORT) != 0) to->port_num = from.port_num;
  if ((mask & IBV_QP_PATH_MIG_STATE) != 0) to->path_mig_state = from.path_mig_state;
  if ((mask & IBV_QP_ALT_PATH) != 0) {
    to->alt_ah = ToAbi(from.alt_ah_attr);
    to->alt_pkey_index = from.alt_pkey_index;
    to->alt_port_num = from.alt_port_num;
    to->alt_timeout = from.alt_timeout;
  }
}

abi::QpAttr ToAbi(const ibv_qp_attr& from, unsigned mask) {
  abi::QpAttr to = {};
  PutPath(from, mask, &to);
  if ((mask & IBV_QP_STATE) != 0) to.state = from.qp_state;
  if ((mask & IBV_QP_CUR_STATE) != 0) to.cur_state = from.cur_qp_state;
  if ((mask & IBV_QP_EN_SQD_ASYNC_NOTIFY) != 0) to.en_sqd_async_notify = from.en_sqd_async_notify;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0) to.access_flags = from.qp_access_flags;
  if ((mask & IBV_QP_QKEY) != 0) to.qkey = from.qkey;
  if ((mask & IBV_QP_TIMEOUT) != 0) to.timeout = from.timeout;
  if ((mask & IBV_QP_RETRY_CNT) != 0) to.retry_cnt = from.retry_cnt;
  if ((mask & IBV_QP_RNR_RETRY) != 0) to.rnr_retry = from.rnr_retry;
  if ((mask & IBV_QP_RQ_PSN) != 0) to.rq_psn = from.rq_psn;
  if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0) to.max_rd_atomic = from.max_rd_atomic;
  if ((mask & IBV_QP_MIN_RNR_TIMER) != 0) to.min_rnr_timer = from.min_rnr_timer;
  if ((mask & IBV_QP_SQ_PSN) != 0) to.sq_psn = from.sq_psn;
  if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0) to.max_dest_rd_atomic = from.max_dest_rd_atomic;
  if ((mask & IBV_QP_DEST_QPN) != 0) to.dest_qpn = from.dest_qp_num;
  return to;
}

void FromAbi(const abi::QpAttr& from, ibv_qp_attr* to) {
  to->qp_state = static_cast<ibv_qp_state>(from.state);
  to->cur_qp_state = static_cast<ibv_qp_state>(from.cur_state);
  to->path_mtu = static_cast<ibv_mtu>(from.path_mtu);
  to->path_mig_state = static_cast<ibv_mig_state>(from.path_mig_state);
  to->qkey = from.qkey;
  to->rq_psn = from.rq_psn;
  to->sq_psn = from.sq_psn;
  to->dest_qp_num = from.dest_qpn;
  to->qp_access_flags = from.access_flags;
  to->ah_attr = provider::FromAbi(from.ah);
  to->alt_ah_attr = provider::FromAbi(from.alt_ah);
  to->pkey_index = from.pkey_index;
  to->alt_pkey_index = from.alt_pkey_index;
  to->en_sqd_async_notify = from.en_sqd_async_notify;
  to->sq_draining = from.sq_draining;
  to->max_rd_atomic = from.max_rd_atomic;
  to->max_dest_rd_atomic = from.max_dest_rd_atomic;
  to->min_rnr_timer = from.min_rnr_timer;
  to->port_num = from.port_num;
  to->timeout = from.timeout;
  to->retry_cnt = from.retry_cnt;
  to->rnr_retry = from.rnr_retry;
  to->alt_port_num = from.alt_port_num;
  to->alt_timeout = from.alt_timeout;
  to->rate_limit = from.rate_limit;
}

void Empty(WorkQueue* queue) {
  const SpinGuard guard(queue->lock);
  queue->head.store(0, std::memory_order_relaxed);
  queue->tail.store(0, std::memory_order_release);
}

// The queues are empty again, and completions from before mean nothing.
void Reset(Context* context, Qp* qp, uint32_t generation) {
  if (qp->send_cq == nullptr) return;  // it has no queues
  const QpCqsGuard guard(qp);
  Empty(&qp->sq);
  Empty(&qp->rq);
  qp->record->sq_producer.store(0, std::memory_order_release);
  qp->record->rq_producer.store(0, std::memory_order_release);
  qp->generation = generation;
  context->qp_table[qp->slot].generation.store(generation, std::memory_order_release);
}

}  // namespace

int ModifyQp(ibv_qp* ibv, ibv_qp_attr* attr, int mask) {
  Qp* qp = ToQp(ibv);
  if (qp->rss_table != nullptr) return EOPNOTSUPP;  // it has no state
  Context* context = ToContext(ibv->context);
  abi::ModifyQpRequest request = {};
  abi::ModifyQpReply reply = {};
  request.header.op = abi::kCmdModifyQp;
  request.handle = ibv->handle;
  request.mask = static_cast<unsigned>(mask) & kKnownMask;
  request.attr = ToAbi(*attr, request.mask);
  const int error = context->channel.Execute(&request, &reply);
  if (error != 0) return error;
  // With the state, in the same call; only raw packet QPs are paced.
  if ((static_cast<unsigned>(mask) & IBV_QP_RATE_LIMIT) != 0 && reply.state == IBV_QPS_RTS &&
      ibv->qp_type == IBV_QPT_RAW_PACKET) {
    ibv_qp_rate_limit_attr limit = {};
    limit.rate_limit = attr->rate_limit;
    const int limit_error = ModifyQpRateLimit(ibv, &limit);
    if (limit_error != 0) return limit_error;
  }
  if ((request.mask & IBV_QP_STATE) != 0 && reply.state == IBV_QPS_RESET) {
    qp->state.store(reply.state, std::memory_order_relaxed);  // nobody posts any more
    Reset(context, qp, reply.generation);
  }
  qp->state.store(reply.state, std::memory_order_release);
  return 0;
}

int ModifyQpRateLimit(ibv_qp* ibv, ibv_qp_rate_limit_attr* attr) {
  if (attr->comp_mask != 0 || ToQp(ibv)->rss_table != nullptr) return EOPNOTSUPP;
  abi::LimitQpRateRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdLimitQpRate;
  request.qp = ibv->handle;
  request.kbps = attr->rate_limit;
  request.max_burst_bytes = attr->max_burst_sz;
  request.typical_bytes = attr->typical_pkt_sz;
  return ToContext(ibv->context)->channel.Execute(&request, &reply);
}

int QueryQp(ibv_qp* ibv, ibv_qp_attr* attr, int, ibv_qp_init_attr* init_attr) {
  Qp* qp = ToQp(ibv);
  if (qp->rss_table != nullptr) return EOPNOTSUPP;
  abi::HandleRequest request = {};
  abi::QueryQpReply reply = {};
  request.header.op = abi::kCmdQueryQp;
  request.handle = ibv->handle;
  const int error = ToContext(ibv->context)->channel.Execute(&request, &reply);
  if (error != 0) return error;
  *attr = {};
  FromAbi(reply.attr, attr);
  attr->cap = qp->cap;
  *init_attr = {};
  init_attr->qp_context = ibv->qp_context;
  init_attr->send_cq = ibv->send_cq;
  init_attr->recv_cq = ibv->recv_cq;
  init_attr->srq = ibv->srq;
  init_attr->cap = qp->cap;
  init_attr->qp_type = ibv->qp_type;
  init_attr->sq_sig_all = qp->signal_all;
  return 0;
}

}  // namespace verbena::provider
