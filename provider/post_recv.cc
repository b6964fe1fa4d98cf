// SPDX-License-Identifier: Apache-2.0
//
// The hot path of receiving. The device looks for receive WQEs when a message
// arrives, so there is no doorbell, except where they are to be flushed.
#include <cerrno>
#include <cstring>

#include "provider/doorbell.h"
#include "provider/fault_check.h"
#include "provider/provider.h"
#include "provider/valgrind.h"

namespace verbena::provider {
namespace {

int BuildWqe(uint32_t max_sge, const ibv_recv_wr& wr, uint8_t* slot) {
  if (wr.num_sge < 0 || static_cast<uint32_t>(wr.num_sge) > max_sge) return EINVAL;
  abi::RecvWqe wqe = {};
  wqe.wr_id = wr.wr_id;
  wqe.num_sge = static_cast<uint32_t>(wr.num_sge);
  memcpy(slot, &wqe, sizeof(wqe));
  for (int i = 0; i < wr.num_sge; ++i) {
    memcpy(slot + sizeof(wqe) + static_cast<size_t>(i) * sizeof(abi::Sge), &wr.sg_list[i],
           sizeof(abi::Sge));
  }
  return 0;
}

// Valgrind: which buffer a message went to is not known any more when it is
// polled, so those of an SRQ count as defined at once.
void MarkBuffers(const ibv_recv_wr& wr) {
  for (int i = 0; i < wr.num_sge; ++i) {
    MakeDefined(reinterpret_cast<const void*>(wr.sg_list[i].addr), wr.sg_list[i].length);
  }
}

}  // namespace

int PostRecv(ibv_qp* ibv, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
  Qp* qp = ToQp(ibv);
  Context* context = ToContext(ibv->context);
  if (context->fork_generation != g_fork_generation.load(std::memory_order_relaxed)) {
    *bad_wr = wr;
    return EIO;
  }
  int error = InjectedError(context, abi::kCheckPostRecv, qp->slot);
  if (error != 0) [[unlikely]] {
    *bad_wr = wr;
    return error;
  }
  uint32_t posted;
  {
    const SpinGuard guard(qp->rq.lock);
    const uint32_t start = qp->rq.head.load(std::memory_order_relaxed);
    uint32_t head = start;
    const uint32_t tail = qp->rq.tail.load(std::memory_order_acquire);
    if (context->DeviceDead()) {
      error = EIO;
    } else if (qp->state.load(std::memory_order_relaxed) == IBV_QPS_RESET || qp->rq.capacity == 0) {
      error = EINVAL;
    }
    for (; error == 0 && wr != nullptr; wr = wr->next) {
      if (head - tail >= qp->rq.capacity) error = ENOMEM;
      if (error == 0) error = BuildWqe(qp->rq.max_sge, *wr, qp->rq.ring.Slot(head));
      if (error != 0) break;
      qp->rq.wr_ids[head & (qp->rq.ring.slots - 1)] = wr->wr_id;
      ++head;
    }
    posted = head - start;
    if (posted != 0) {
      qp->rq.head.store(head, std::memory_order_relaxed);
      qp->record->rq_producer.store(head, std::memory_order_release);
    }
  }
  if (error != 0) *bad_wr = wr;
  if (posted != 0) {
    // Pairs with the device's fence between storing ERR and reading the
    // producer: one of the two sees the other.
    abi::FullFence();
    if (qp->record->state.load(std::memory_order_relaxed) == IBV_QPS_ERR) {
      SetDoorbellBit(context->page, qp->slot);
      WakeAnyEngine(context);
    }
  }
  return error;
}

int PostSrqRecv(ibv_srq* ibv, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
  Srq* srq = ToSrq(ibv);
  Context* context = ToContext(ibv->context);
  int error =
      context->fork_generation != g_fork_generation.load(std::memory_order_relaxed) ? EIO : 0;
  if (error == 0) error = InjectedError(context, abi::kCheckPostSrqRecv, 0);
  if (error == 0) {
    const SpinGuard guard(srq->lock);
    uint32_t head = srq->head;
    // Pairs with the device's store when it has copied WQEs out: their slots may
    // be written again.
    const uint32_t taken = srq->record->taken.load(std::memory_order_acquire);
    if (context->DeviceDead()) error = EIO;
    for (; error == 0 && wr != nullptr; wr = wr->next) {
      if (head - taken >= srq->capacity) error = ENOMEM;
      if (error == 0) error = BuildWqe(srq->max_sge, *wr, srq->ring.Slot(head));
      if (error != 0) break;
      if (context->on_valgrind) MarkBuffers(*wr);
      ++head;
    }
    if (head != srq->head) {
      srq->head = head;
      srq->record->producer.store(head, std::memory_order_release);
    }
  }
  if (error != 0) *bad_wr = wr;
  return error;
}

}  // namespace verbena::provider
