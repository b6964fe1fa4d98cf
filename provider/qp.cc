// SPDX-License-Identifier: Apache-2.0
//
// Creation and destruction of queue pairs.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "provider/provider.h"

namespace verbena::provider {
namespace {

abi::QpCaps ToAbi(const ibv_qp_cap& cap) {
  return {cap.max_send_wr, cap.max_recv_wr, cap.max_send_sge, cap.max_recv_sge,
          cap.max_inline_data};
}

ibv_qp_cap FromAbi(const abi::QpCaps& caps) {
  return {caps.max_send_wr, caps.max_recv_wr, caps.max_send_sge, caps.max_recv_sge,
          caps.max_inline};
}

int DestroyOnDevice(Context* context, uint32_t handle, abi::DestroyReply* reply) {
  abi::HandleRequest request = {};
  request.header.op = abi::kCmdDestroyQp;
  request.handle = handle;
  return context->channel.Execute(&request, reply);
}

// `queue` is zeroed; the ring is mapped. A ring that is too small for what the
// device promised would let a WQE reach into the next slot.
int InitQueue(WorkQueue* queue, uint32_t capacity, uint32_t max_sge, uint32_t needed_stride) {
  if (queue->ring.slots == 0) return capacity == 0 ? 0 : EIO;
  if (queue->ring.stride < needed_stride) return EIO;
  queue->capacity = capacity < queue->ring.slots ? capacity : queue->ring.slots;
  queue->max_sge = max_sge;
  return 0;
}

// The arrays of both queues in one piece.
int AllocateWrIds(ibv_pd* pd, Qp* qp) {
  const size_t count = size_t{qp->sq.ring.slots} + qp->rq.ring.slots;
  if (count == 0) return 0;
  uint64_t* ids = static_cast<uint64_t*>(AllocFrom(pd, count * sizeof(uint64_t), &qp->domain));
  if (ids == nullptr) return ENOMEM;
  qp->wr_ids = ids;
  qp->sq.wr_ids = ids;
  qp->rq.wr_ids = ids + qp->sq.ring.slots;
  return 0;
}

int Adopt(Context* context, ibv_pd* pd, Qp* qp, const abi::CreateQpReply& reply, ReplyFds* fds) {
  int fd_index = 0;
  int error = MapRing(context, reply.sq, fds, &fd_index, 64, &qp->sq.ring);
  if (error != 0) return error;
  error = MapRing(context, reply.rq, fds, &fd_index, 32, &qp->rq.ring);
  if (error != 0) return error;
  // Sanity before arithmetic: real limits are 32 SGEs and 512 bytes.
  constexpr uint32_t kMost = 1 << 16;
  if (reply.handle >= abi::kMaxQpSlots || reply.caps.max_send_sge > kMost ||
      reply.caps.max_recv_sge > kMost || reply.caps.max_inline > kMost) {
    return EIO;
  }
  error = InitQueue(&qp->sq, reply.caps.max_send_wr, reply.caps.max_send_sge,
                    abi::SendStride(reply.caps.max_send_sge, reply.caps.max_inline));
  if (error != 0) return error;
  error = InitQueue(&qp->rq, reply.caps.max_recv_wr, reply.caps.max_recv_sge,
                    abi::RecvStride(reply.caps.max_recv_sge));
  if (error == 0) error = AllocateWrIds(pd, qp);
  if (error != 0) return error;
  qp->slot = reply.handle;
  qp->generation = reply.generation;
  qp->max_inline = reply.caps.max_inline;
  qp->cap = FromAbi(reply.caps);
  qp->record = &context->page->qp[reply.handle];
  qp->record->sq_producer.store(0, std::memory_order_release);
  qp->record->rq_producer.store(0, std::memory_order_release);
  return 0;
}

void Push(Qp* qp, WorkQueue Qp::*queue, Qp** list) {
  WorkQueue& own = qp->*queue;
  own.next = *list;
  own.link = list;
  if (own.next != nullptr) (own.next->*queue).link = &own.next;
  *list = qp;
}

void Remove(Qp* qp, WorkQueue Qp::*queue) {
  WorkQueue& own = qp->*queue;
  *own.link = own.next;
  if (own.next != nullptr) (own.next->*queue).link = own.link;
}

void Publish(Context* context, Qp* qp) {
  if (qp->send_cq == nullptr) return;
  const QpCqsGuard guard(qp);
  Push(qp, &Qp::sq, &qp->send_cq->senders);
  Push(qp, &Qp::rq, &qp->recv_cq->receivers);
  QpTableEntry& entry = context->qp_table[qp->slot];
  entry.generation.store(qp->generation, std::memory_order_relaxed);
  entry.qp.store(qp, std::memory_order_release);
}

void Withdraw(Context* context, Qp* qp) {
  if (qp->send_cq == nullptr) return;
  const QpCqsGuard guard(qp);
  Remove(qp, &Qp::sq);
  Remove(qp, &Qp::rq);
  // The device may have given the slot to another thread's new QP already.
  Qp* expected = qp;
  context->qp_table[qp->slot].qp.compare_exchange_strong(expected, nullptr);
}

void Free(Qp* qp) {
  FreeTo(qp->domain, qp->wr_ids);
  free(qp);
}

uint32_t HandleOf(const ibv_cq* cq) { return cq != nullptr ? cq->handle : abi::kNoHandle; }

int Create(Context* context, Qp* qp, ibv_pd* pd, ibv_xrcd* xrcd, const ibv_qp_init_attr& attr,
           uint32_t create_flags) {
  abi::CreateQpRequest request = {};
  abi::CreateQpReply reply = {};
  request.header.op = abi::kCmdCreateQp;
  const bool is_target = attr.qp_type == IBV_QPT_XRC_RECV;
  const bool receives = !is_target && attr.qp_type != IBV_QPT_XRC_SEND;
  request.pd = is_target ? abi::kNoHandle : pd->handle;
  request.send_cq = is_target ? abi::kNoHandle : HandleOf(attr.send_cq);
  request.recv_cq = receives ? HandleOf(attr.recv_cq) : abi::kNoHandle;
  request.type = attr.qp_type;
  request.create_flags = create_flags;
  request.sq_sig_all = attr.sq_sig_all != 0;
  request.caps = ToAbi(attr.cap);
  request.user_handle = reinterpret_cast<uint64_t>(&qp->base.qp);
  request.srq = receives && attr.srq != nullptr ? attr.srq->handle : abi::kNoHandle;
  request.xrcd = is_target ? ToXrcd(xrcd)->base.handle : abi::kNoHandle;
  const CreateGuard guard(context);
  ReplyFds fds;
  int error = context->channel.Execute(&request, &reply, -1, &fds);
  if (error != 0) return error;
  // What receives for the SRQs of a domain has no queues.
  error = is_target ? 0 : Adopt(context, pd, qp, reply, &fds);
  if (error != 0) {
    abi::DestroyReply ignored = {};
    DestroyOnDevice(context, reply.handle, &ignored);
    return error;
  }
  qp->base.qp.handle = reply.handle;
  qp->base.qp.qp_num = reply.qpn;
  return 0;
}

// libibverbs fills in nothing of a QP.
void FillHandle(Qp* qp, ibv_context* context, ibv_pd* pd, const ibv_qp_init_attr& attr) {
  ibv_qp* ibv = &qp->base.qp;
  ibv->context = context;
  ibv->qp_context = attr.qp_context;
  ibv->pd = pd;
  ibv->send_cq = attr.send_cq;
  ibv->recv_cq = attr.recv_cq;
  ibv->srq = attr.srq;
  ibv->state = IBV_QPS_RESET;
  ibv->qp_type = attr.qp_type;
  pthread_mutex_init(&ibv->mutex, nullptr);
  pthread_cond_init(&ibv->cond, nullptr);
}

// Are the objects there that a QP of this type needs?
bool IsComplete(ibv_pd* pd, ibv_xrcd* xrcd, const ibv_qp_init_attr& attr) {
  if (attr.qp_type == IBV_QPT_XRC_RECV) return xrcd != nullptr;
  if (pd == nullptr || attr.send_cq == nullptr) return false;
  return attr.recv_cq != nullptr || attr.qp_type == IBV_QPT_XRC_SEND;
}

// `ops`: of an ibv_qp_ex, or NULL.
ibv_qp* New(ibv_context* ibv, ibv_pd* pd, ibv_xrcd* xrcd, ibv_qp_init_attr* attr,
            const uint64_t* ops, uint32_t create_flags) {
  Context* context = ToContext(ibv);
  if (!IsComplete(pd, xrcd, *attr)) {
    errno = EINVAL;
    return nullptr;
  }
  Qp* qp = static_cast<Qp*>(calloc(1, sizeof(Qp)));
  if (qp == nullptr) return nullptr;
  if (attr->qp_type != IBV_QPT_XRC_RECV) {
    qp->send_cq = ToCq(attr->send_cq);
    qp->recv_cq = attr->qp_type == IBV_QPT_XRC_SEND ? qp->send_cq : ToCq(attr->recv_cq);
  }
  qp->signal_all = attr->sq_sig_all != 0;
  const int error = Create(context, qp, pd, xrcd, *attr, create_flags);
  if (error != 0) {
    Free(qp);
    errno = error;
    return nullptr;
  }
  FillHandle(qp, ibv, pd, *attr);
  attr->cap = qp->cap;
  if (ops != nullptr) MakeExtended(qp, *ops);
  Publish(context, qp);
  return &qp->base.qp;
}

}  // namespace

ibv_qp* CreateQp(ibv_pd* pd, ibv_qp_init_attr* attr) {
  return New(pd->context, pd, nullptr, attr, nullptr, 0);
}

namespace {

// A raw packet QP that only receives, and spreads that over a table of WQs.
ibv_qp* NewRss(ibv_context* ibv, ibv_pd* pd, const ibv_qp_init_attr_ex& attr) {
  constexpr uint32_t kBoth = IBV_QP_INIT_ATTR_RX_HASH | IBV_QP_INIT_ATTR_IND_TABLE;
  int error = 0;
  if ((attr.comp_mask & kBoth) != kBoth || attr.rwq_ind_tbl == nullptr || pd == nullptr ||
      attr.qp_type != IBV_QPT_RAW_PACKET || attr.rwq_ind_tbl->context != ibv ||
      attr.srq != nullptr || attr.send_cq != nullptr || attr.recv_cq != nullptr) {
    error = EINVAL;
  }
  Qp* qp = error == 0 ? static_cast<Qp*>(calloc(1, sizeof(Qp))) : nullptr;
  if (error == 0) {
    error =
        qp == nullptr ? ENOMEM : CreateRss(ToContext(ibv), qp, attr.rwq_ind_tbl, attr.rx_hash_conf);
  }
  if (error != 0) {
    free(qp);
    errno = error;
    return nullptr;
  }
  ibv_qp_init_attr plain = {};
  plain.qp_context = attr.qp_context;
  plain.qp_type = attr.qp_type;
  FillHandle(qp, ibv, pd, plain);
  return &qp->base.qp;
}

}  // namespace

ibv_qp* CreateQpEx(ibv_context* context, ibv_qp_init_attr_ex* attr) {
  constexpr uint32_t kSupported = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD |
                                  IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS |
                                  IBV_QP_INIT_ATTR_RX_HASH | IBV_QP_INIT_ATTR_IND_TABLE;
  constexpr uint32_t kKnown = (IBV_QP_INIT_ATTR_SEND_OPS_FLAGS << 1) - 1;
  const bool extended = (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0;
  ibv_pd* pd = (attr->comp_mask & IBV_QP_INIT_ATTR_PD) != 0 ? attr->pd : nullptr;
  ibv_xrcd* xrcd = (attr->comp_mask & IBV_QP_INIT_ATTR_XRCD) != 0 ? attr->xrcd : nullptr;
  const uint32_t create_flags =
      (attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS) != 0 ? attr->create_flags : 0;
  int error = 0;
  if ((attr->comp_mask & ~kSupported) != 0) {
    error = (attr->comp_mask & ~kKnown) != 0 ? EINVAL : EOPNOTSUPP;
  } else if (pd != nullptr && pd->context != context) {
    error = EINVAL;
  } else if ((create_flags & ~uint32_t{IBV_QP_CREATE_BLOCK_SELF_MCAST_LB}) != 0) {
    error = EOPNOTSUPP;
  } else if (extended) {
    error = CheckSendOps(attr->qp_type, attr->send_ops_flags);
  }
  if (error != 0) {
    errno = error;
    return nullptr;
  }
  if ((attr->comp_mask & (IBV_QP_INIT_ATTR_RX_HASH | IBV_QP_INIT_ATTR_IND_TABLE)) != 0) {
    return NewRss(context, pd, *attr);
  }
  // The extended attributes begin with the plain ones.
  static_assert(offsetof(ibv_qp_init_attr_ex, sq_sig_all) ==
                offsetof(ibv_qp_init_attr, sq_sig_all));
  ibv_qp_init_attr plain = {};
  memcpy(&plain, attr, offsetof(ibv_qp_init_attr, sq_sig_all) + sizeof(plain.sq_sig_all));
  ibv_qp* qp =
      New(context, pd, xrcd, &plain, extended ? &attr->send_ops_flags : nullptr, create_flags);
  if (qp != nullptr) attr->cap = plain.cap;
  return qp;
}

int DestroyQp(ibv_qp* ibv) {
  Qp* qp = ToQp(ibv);
  if (qp->rss_table != nullptr) {
    const int rss_error = DestroyRss(qp);
    if (rss_error == 0) Free(qp);
    return rss_error;
  }
  Context* context = ToContext(ibv->context);
  EventDrain events(&context->drain_mutex, &context->reserve, ibv->context->cmd_fd);
  int error = context->DeviceDead() ? 0 : events.Open(ibv->context->async_fd);
  if (error != 0) return error;
  abi::DestroyReply reply = {};
  error = DestroyOnDevice(context, ibv->handle, &reply);
  if (error != 0 && DestroyResult(context, error) != 0) return error;
  Withdraw(context, qp);
  if (error == 0 && reply.async_events != 0) {
    reply.async_events -=
        events.Take(sizeof(abi::AsyncEventRecord), reinterpret_cast<uint64_t>(ibv));
    pthread_mutex_lock(&ibv->mutex);
    while (static_cast<int32_t>(reply.async_events - ibv->events_completed) > 0) {
      pthread_cond_wait(&ibv->cond, &ibv->mutex);
    }
    pthread_mutex_unlock(&ibv->mutex);
  }
  pthread_cond_destroy(&ibv->cond);
  pthread_mutex_destroy(&ibv->mutex);
  Free(qp);
  return 0;
}

}  // namespace verbena::provider
