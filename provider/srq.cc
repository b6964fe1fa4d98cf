// SPDX-License-Identifier: Apache-2.0
//
// Shared receive queues: creation, resize, limit, destruction. Posting is in
// post_recv.cc.
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "provider/provider.h"

namespace verbena::provider {
namespace {

int DestroyOnDevice(Context* context, uint32_t handle, abi::DestroyReply* reply) {
  abi::HandleRequest request = {};
  request.header.op = abi::kCmdDestroySrq;
  request.handle = handle;
  return context->channel.Execute(&request, reply);
}

int Adopt(Context* context, Srq* srq, const abi::CreateSrqReply& reply, ReplyFds* fds) {
  // Sanity before arithmetic.
  constexpr uint32_t kMost = 1 << 16;
  if (reply.handle >= abi::kMaxSrqSlots || reply.max_sge > kMost) return EIO;
  int fd_index = 0;
  const int error =
      MapRing(context, reply.ring, fds, &fd_index, abi::RecvStride(reply.max_sge), &srq->ring);
  if (error != 0) return error;
  if (srq->ring.slots == 0) return EIO;
  srq->capacity = reply.max_wr < srq->ring.slots ? reply.max_wr : srq->ring.slots;
  srq->max_sge = reply.max_sge;
  srq->slot = reply.handle;
  srq->generation = reply.generation;
  srq->record = &context->page->srq[reply.handle];
  srq->record->producer.store(0, std::memory_order_release);
  return 0;
}

int Create(Context* context, Srq* srq, abi::CreateSrqRequest* request) {
  abi::CreateSrqReply reply = {};
  request->header.op = abi::kCmdCreateSrq;
  request->user_handle = reinterpret_cast<uint64_t>(&srq->base.srq);
  const CreateGuard guard(context);
  ReplyFds fds;
  int error = context->channel.Execute(request, &reply, -1, &fds);
  if (error != 0) return error;
  error = Adopt(context, srq, reply, &fds);
  if (error != 0) {
    abi::DestroyReply ignored = {};
    DestroyOnDevice(context, reply.handle, &ignored);
    return error;
  }
  srq->base.srq.handle = reply.handle;
  srq->base.srq_num = reply.srqn;
  return 0;
}

Srq* New(Context* context, abi::CreateSrqRequest* request, ibv_srq_attr* attr) {
  if (Unusable(context)) {
    errno = EIO;
    return nullptr;
  }
  Srq* srq = static_cast<Srq*>(calloc(1, sizeof(Srq)));
  if (srq == nullptr) return nullptr;
  request->max_wr = attr->max_wr;
  request->max_sge = attr->max_sge;
  const int error = Create(context, srq, request);
  if (error != 0) {
    free(srq);
    errno = error;
    return nullptr;
  }
  attr->max_wr = srq->capacity;
  attr->max_sge = srq->max_sge;
  return srq;
}

// The request of ibv_create_srq_ex(3); 0 or an errno.
int PutExtended(const ibv_srq_init_attr_ex& attr, abi::CreateSrqRequest* request) {
  constexpr uint32_t kKnown = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
                              IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM;
  if ((attr.comp_mask & ~kKnown) != 0) return EINVAL;
  const auto has = [&attr](uint32_t bit) { return (attr.comp_mask & bit) != 0; };
  if (!has(IBV_SRQ_INIT_ATTR_PD) || attr.pd == nullptr) return EINVAL;
  request->pd = attr.pd->handle;
  request->type = has(IBV_SRQ_INIT_ATTR_TYPE) ? attr.srq_type : IBV_SRQT_BASIC;
  request->xrcd = request->cq = abi::kNoHandle;
  if (request->type == IBV_SRQT_BASIC) return 0;
  if (request->type == IBV_SRQT_TM) return EOPNOTSUPP;
  if (request->type != IBV_SRQT_XRC) return EINVAL;
  if (!has(IBV_SRQ_INIT_ATTR_XRCD) || !has(IBV_SRQ_INIT_ATTR_CQ)) return EINVAL;
  if (attr.xrcd == nullptr || attr.cq == nullptr) return EINVAL;
  request->xrcd = ToXrcd(attr.xrcd)->base.handle;
  request->cq = attr.cq->handle;
  return 0;
}

// WQEs that are outstanding move to `ring`; false if they are more than
// `capacity`. The device finds each in either ring until FinishSrqResize.
bool MoveTo(Srq* srq, const Ring& ring, uint32_t ring_number, uint32_t capacity) {
  const SpinGuard guard(srq->lock);
  uint32_t index = srq->record->taken.load(std::memory_order_acquire);
  const uint32_t count = srq->head - index;
  if (count > srq->ring.slots || count > capacity) return false;
  for (; index != srq->head; ++index) {
    memcpy(ring.Slot(index), srq->ring.Slot(index),
           ring.stride < srq->ring.stride ? ring.stride : srq->ring.stride);
  }
  srq->ring = ring;
  srq->capacity = capacity < ring.slots ? capacity : ring.slots;
  srq->record->ring.store(ring_number, std::memory_order_release);
  return true;
}

int FinishResize(Context* context, Srq* srq, bool commit) {
  abi::FinishSrqResizeRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdFinishSrqResize;
  request.handle = srq->slot;
  request.commit = commit;
  return context->channel.Execute(&request, &reply);
}

}  // namespace

ibv_srq* CreateSrq(ibv_pd* pd, ibv_srq_init_attr* attr) {
  abi::CreateSrqRequest request = {};
  request.pd = pd->handle;
  request.type = IBV_SRQT_BASIC;
  request.xrcd = request.cq = abi::kNoHandle;
  Srq* srq = New(ToContext(pd->context), &request, &attr->attr);
  return srq == nullptr ? nullptr : &srq->base.srq;  // libibverbs fills in the rest
}

// libibverbs fills in nothing.
ibv_srq* CreateSrqEx(ibv_context* context, ibv_srq_init_attr_ex* attr) {
  abi::CreateSrqRequest request = {};
  const int error = PutExtended(*attr, &request);
  if (error != 0) {
    errno = error;
    return nullptr;
  }
  Srq* srq = New(ToContext(context), &request, &attr->attr);
  if (srq == nullptr) return nullptr;
  ibv_srq* ibv = &srq->base.srq;
  ibv->context = context;
  ibv->srq_context = attr->srq_context;
  ibv->pd = attr->pd;
  pthread_mutex_init(&ibv->mutex, nullptr);
  pthread_cond_init(&ibv->cond, nullptr);
  srq->base.srq_type = static_cast<ibv_srq_type>(request.type);
  if (request.type != IBV_SRQT_XRC) return ibv;
  srq->base.xrcd = attr->xrcd;
  srq->base.cq = attr->cq;
  srq->cq = ToCq(attr->cq);
  const SpinGuard guard(srq->cq->lock);
  srq->next = srq->cq->srqs;
  srq->link = &srq->cq->srqs;
  if (srq->next != nullptr) srq->next->link = &srq->next;
  srq->cq->srqs = srq;
  SrqTableEntry& entry = ToContext(context)->srq_table[srq->slot];
  entry.generation.store(srq->generation, std::memory_order_relaxed);
  entry.srq.store(srq, std::memory_order_release);
  return ibv;
}

int GetSrqNum(ibv_srq* srq, uint32_t* number) {
  // Only XRC SRQs are known to others by a number.
  if (ToSrq(srq)->base.srq_type != IBV_SRQT_XRC) return EINVAL;
  *number = ToSrq(srq)->base.srq_num;
  return 0;
}

int ModifySrq(ibv_srq* ibv, ibv_srq_attr* attr, int mask) {
  Srq* srq = ToSrq(ibv);
  Context* context = ToContext(ibv->context);
  abi::ModifySrqRequest request = {};
  abi::ModifySrqReply reply = {};
  request.header.op = abi::kCmdModifySrq;
  request.handle = ibv->handle;
  request.mask = static_cast<uint32_t>(mask);
  if ((mask & IBV_SRQ_MAX_WR) != 0) request.max_wr = attr->max_wr;
  if ((mask & IBV_SRQ_LIMIT) != 0) request.srq_limit = attr->srq_limit;
  const CreateGuard guard(context);
  ReplyFds fds;
  int error = context->channel.Execute(&request, &reply, -1, &fds);
  if (error != 0 || (mask & IBV_SRQ_MAX_WR) == 0) return error;
  Ring ring;
  int fd_index = 0;
  error = MapRing(context, reply.ring, &fds, &fd_index, abi::RecvStride(srq->max_sge), &ring);
  if (error == 0 && ring.slots == 0) error = EIO;
  // Others may have posted meanwhile.
  if (error == 0 && !MoveTo(srq, ring, reply.ring_number, reply.max_wr)) error = EINVAL;
  const int finish_error = FinishResize(context, srq, error == 0);
  return error != 0 ? error : finish_error;
}

int QuerySrq(ibv_srq* ibv, ibv_srq_attr* attr) {
  abi::HandleRequest request = {};
  abi::QuerySrqReply reply = {};
  request.header.op = abi::kCmdQuerySrq;
  request.handle = ibv->handle;
  const int error = ToContext(ibv->context)->channel.Execute(&request, &reply);
  if (error != 0) return error;
  *attr = {reply.max_wr, reply.max_sge, reply.srq_limit};
  return 0;
}

int DestroySrq(ibv_srq* ibv) {
  Srq* srq = ToSrq(ibv);
  Context* context = ToContext(ibv->context);
  EventDrain events(&context->drain_mutex, &context->reserve, ibv->context->cmd_fd);
  int error = context->DeviceDead() ? 0 : events.Open(ibv->context->async_fd);
  if (error != 0) return error;
  abi::DestroyReply reply = {};
  error = DestroyOnDevice(context, ibv->handle, &reply);
  if (error != 0 && DestroyResult(context, error) != 0) return error;
  if (srq->cq != nullptr) {
    const SpinGuard guard(srq->cq->lock);
    *srq->link = srq->next;
    if (srq->next != nullptr) srq->next->link = srq->link;
    // The device may have given the slot to another thread's new SRQ already.
    Srq* expected = srq;
    context->srq_table[srq->slot].srq.compare_exchange_strong(expected, nullptr);
  }
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
  free(srq);
  return 0;
}

}  // namespace verbena::provider
