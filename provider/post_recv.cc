// SPDX-License-Identifier: Apache-2.0
//
// The hot path of receiving. The device looks for receive WQEs when a message
// arrives, so there is no doorbell, except where they are to be flushed.
#include <cerrno>
#include <cstring>

#include "provider/doorbell.h"
#include "provider/provider.h"

namespace verbena::provider {
namespace {

int BuildWqe(const Qp* qp, const ibv_recv_wr& wr, uint8_t* slot) {
  if (wr.num_sge < 0 || static_cast<uint32_t>(wr.num_sge) > qp->rq.max_sge) return EINVAL;
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

}  // namespace

int PostRecv(ibv_qp* ibv, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
  Qp* qp = ToQp(ibv);
  Context* context = ToContext(ibv->context);
  if (context->fork_generation != g_fork_generation.load(std::memory_order_relaxed)) {
    *bad_wr = wr;
    return EIO;
  }
  int error = 0;
  uint32_t posted;
  {
    const SpinGuard guard(qp->rq.lock);
    const uint32_t start = qp->rq.head.load(std::memory_order_relaxed);
    uint32_t head = start;
    const uint32_t tail = qp->rq.tail.load(std::memory_order_acquire);
    if (context->DeviceDead()) {
      error = EIO;
    } else if (qp->state.load(std::memory_order_relaxed) == IBV_QPS_RESET) {
      error = EINVAL;
    }
    for (; error == 0 && wr != nullptr; wr = wr->next) {
      if (head - tail >= qp->rq.capacity) error = ENOMEM;
      if (error == 0) error = BuildWqe(qp, *wr, qp->rq.ring.Slot(head));
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

}  // namespace verbena::provider
