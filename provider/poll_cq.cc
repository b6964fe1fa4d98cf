// SPDX-License-Identifier: Apache-2.0
//
// The hot path of completion: no system call and no allocation, except that an
// application which polls in vain gives up its CPU, which on few CPUs is the
// one that the engine needs.
#include <sched.h>

#include <cerrno>
#include <cstring>

#include "provider/fault_check.h"
#include "provider/provider.h"
#include "provider/valgrind.h"

namespace verbena::provider {
namespace {

constexpr uint32_t kEmptyPollsBeforeYield = 16;
constexpr uint32_t kEmptyPollsBeforeHangUpCheck = 4096;

// Bytes that the device wrote for a WQE count as defined from now on.
void MarkSges(const abi::Sge* sges, uint32_t count, uint64_t bytes) {
  for (uint32_t i = 0; i < count && bytes != 0; ++i) {
    abi::Sge sge = sges[i];
    MakeDefined(&sge, sizeof(sge));
    const uint64_t part = sge.length < bytes ? sge.length : bytes;
    MakeDefined(reinterpret_cast<const void*>(sge.address), part);
    bytes -= part;
  }
}

uint32_t AtMost(uint32_t value, uint32_t limit) { return value < limit ? value : limit; }

void MarkSendWqe(const Qp* qp, uint32_t index) {
  const uint8_t* slot = qp->sq.ring.Slot(index);
  const abi::SendWqe* wqe = reinterpret_cast<const abi::SendWqe*>(slot);
  const uint8_t opcode = wqe->opcode;
  const bool atomic = opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
  if (opcode != IBV_WR_RDMA_READ && !atomic) return;
  MarkSges(reinterpret_cast<const abi::Sge*>(slot + sizeof(*wqe)),
           AtMost(wqe->num_sge, qp->sq.max_sge), atomic ? sizeof(uint64_t) : UINT64_MAX);
}

void MarkRecvWqe(const Qp* qp, uint32_t index, const abi::Cqe& cqe) {
  const uint8_t* slot = qp->rq.ring.Slot(index);
  const abi::RecvWqe* wqe = reinterpret_cast<const abi::RecvWqe*>(slot);
  MarkSges(reinterpret_cast<const abi::Sge*>(slot + sizeof(*wqe)),
           AtMost(wqe->num_sge, qp->rq.max_sge), cqe.byte_len);
}

// Frees the slots of all WQEs up to the completed one. The device's index is
// believed only within what was posted.
void Retire(WorkQueue* queue, uint32_t wqe_index) {
  const uint32_t tail = queue->tail.load(std::memory_order_relaxed);
  const uint32_t outstanding = queue->head.load(std::memory_order_relaxed) - tail;
  const uint32_t done = wqe_index + 1 - tail;
  if (done <= outstanding) queue->tail.store(wqe_index + 1, std::memory_order_release);
}

void MarkDefined(Qp* qp, const abi::Cqe& cqe, bool send) {
  const WorkQueue& queue = send ? qp->sq : qp->rq;
  uint32_t index = queue.tail.load(std::memory_order_relaxed);
  const uint32_t outstanding = queue.head.load(std::memory_order_relaxed) - index;
  const uint32_t count = cqe.wqe_index + 1 - index;
  if (count > outstanding) return;
  for (uint32_t i = 0; i < count; ++i, ++index) {
    if (send) {
      MarkSendWqe(qp, index);
    } else {
      MarkRecvWqe(qp, index, cqe);
    }
  }
}

// The QP that a CQE belongs to, NULL if that QP is gone or was reset.
Qp* FindQp(const Context* context, const Cq* cq, const abi::Cqe& cqe) {
  if (cqe.qp_slot >= abi::kMaxQpSlots) return nullptr;
  const QpTableEntry& entry = context->qp_table[cqe.qp_slot];
  Qp* qp = entry.qp.load(std::memory_order_acquire);
  if (qp == nullptr || entry.generation.load(std::memory_order_relaxed) != cqe.qp_generation) {
    return nullptr;
  }
  const Cq* expected = (cqe.flags & abi::kCqeSend) != 0 ? qp->send_cq : qp->recv_cq;
  return expected == cq ? qp : nullptr;
}

// Of an XRC SRQ; false if it is gone.
bool IsOfLiveSrq(const Context* context, const Cq* cq, const abi::Cqe& cqe) {
  if (cqe.qp_slot >= abi::kMaxSrqSlots) return false;
  const SrqTableEntry& entry = context->srq_table[cqe.qp_slot];
  const Srq* srq = entry.srq.load(std::memory_order_acquire);
  return srq != nullptr && srq->cq == cq &&
         entry.generation.load(std::memory_order_relaxed) == cqe.qp_generation;
}

unsigned WcFlags(uint8_t cqe_flags) {
  unsigned flags = 0;
  if ((cqe_flags & abi::kCqeGrh) != 0) flags |= IBV_WC_GRH;
  if ((cqe_flags & abi::kCqeWithImm) != 0) flags |= IBV_WC_WITH_IMM;
  if ((cqe_flags & abi::kCqeWithInv) != 0) flags |= IBV_WC_WITH_INV;
  return flags;
}

void Translate(const abi::Cqe& cqe, ibv_wc* wc) {
  wc->wr_id = cqe.wr_id;
  wc->status = static_cast<ibv_wc_status>(cqe.status);
  wc->opcode = static_cast<ibv_wc_opcode>(cqe.opcode);
  wc->vendor_err = cqe.vendor_err;
  wc->byte_len = cqe.byte_len;
  wc->imm_data = cqe.imm_or_inv;  // shares its place with invalidated_rkey
  wc->qp_num = cqe.qpn;
  wc->src_qp = cqe.src_qpn;
  wc->wc_flags = WcFlags(cqe.flags);
  wc->pkey_index = cqe.pkey_index;
  wc->slid = 0;
  wc->sl = cqe.sl;
  wc->dlid_path_bits = 0;
}

// Everything but the phase, which has been read already.
void CopyCqe(const uint8_t* slot, abi::Cqe* cqe) {
  memcpy(static_cast<void*>(cqe), slot, offsetof(abi::Cqe, phase));
}

// Hands the CQE to the application; false if it is stale.
bool Accept(const Context* context, Cq* cq, const abi::Cqe& cqe, ibv_wc* wc) {
  if ((cqe.flags & abi::kCqeXrcSrq) != 0) {
    if (!IsOfLiveSrq(context, cq, cqe)) return false;
    Translate(cqe, wc);
    return true;
  }
  Qp* qp = FindQp(context, cq, cqe);
  if (qp == nullptr) return false;
  const bool send = (cqe.flags & abi::kCqeSend) != 0;
  if (context->on_valgrind && cqe.status == IBV_WC_SUCCESS) MarkDefined(qp, cqe, send);
  Retire(send ? &qp->sq : &qp->rq, cqe.wqe_index);
  Translate(cqe, wc);
  return true;
}

void FillFlushed(uint64_t wr_id, ibv_wc_opcode opcode, uint32_t qpn, ibv_wc* wc) {
  memset(static_cast<void*>(wc), 0, sizeof(*wc));
  wc->wr_id = wr_id;
  wc->status = IBV_WC_WR_FLUSH_ERR;
  wc->opcode = opcode;
  wc->qp_num = qpn;
}

int FlushQueue(Qp* qp, WorkQueue* queue, ibv_wc_opcode opcode, int room, ibv_wc* wc) {
  const SpinGuard guard(queue->lock);
  uint32_t tail = queue->tail.load(std::memory_order_relaxed);
  const uint32_t head = queue->head.load(std::memory_order_relaxed);
  int count = 0;
  for (; count < room && tail != head; ++count, ++tail) {
    FillFlushed(queue->wr_ids[tail & (queue->ring.slots - 1)], opcode, qp->base.qp.qp_num,
                &wc[count]);
  }
  queue->tail.store(tail, std::memory_order_release);
  return count;
}

// What nobody has taken yet. On hardware an SRQ keeps its receives, and who waits for one must
// watch the async events; most programs do not, and would wait for ever.
int FlushSrq(Srq* srq, uint32_t qpn, int room, ibv_wc* wc) {
  const SpinGuard guard(srq->lock);
  if (!srq->flushing) {
    srq->flushing = true;
    const uint32_t taken = srq->record->taken.load(std::memory_order_acquire);
    srq->flushed = srq->head - taken <= srq->ring.slots ? taken : srq->head;
  }
  int count = 0;
  for (; count < room && srq->flushed != srq->head; ++count, ++srq->flushed) {
    const auto* wqe = reinterpret_cast<const abi::RecvWqe*>(srq->ring.Slot(srq->flushed));
    FillFlushed(wqe->wr_id, IBV_WC_RECV, qpn, &wc[count]);
  }
  return count;
}

// After the death of the device: completes what it left undone. Posting takes
// the same locks and looks for the death under them, so nothing is missed.
int Flush(Cq* cq, int room, ibv_wc* wc) {
  int count = 0;
  for (Qp* qp = cq->senders; qp != nullptr && count < room; qp = qp->sq.next) {
    count += FlushQueue(qp, &qp->sq, IBV_WC_SEND, room - count, wc + count);
  }
  for (Qp* qp = cq->receivers; qp != nullptr && count < room; qp = qp->rq.next) {
    count += FlushQueue(qp, &qp->rq, IBV_WC_RECV, room - count, wc + count);
    if (qp->base.qp.srq != nullptr) {
      count += FlushSrq(ToSrq(qp->base.qp.srq), qp->base.qp.qp_num, room - count, wc + count);
    }
  }
  for (Srq* srq = cq->srqs; srq != nullptr && count < room; srq = srq->next) {
    count += FlushSrq(srq, 0, room - count, wc + count);
  }
  return count;
}

// What an ibv_wc has no room for.
struct Extra {
  uint64_t timestamp_ns = 0;
  uint32_t flow_tag = 0;
};

// `extra`: of the last completion.
int PollLocked(const Context* context, Cq* cq, int room, ibv_wc* wc, Extra* extra) {
  const uint32_t start = cq->consumer;
  uint32_t consumer = start;
  int count = 0;
  while (count < room) {
    const uint8_t* slot = cq->ring.Slot(consumer);
    const uint32_t phase =
        reinterpret_cast<const abi::Cqe*>(slot)->phase.load(std::memory_order_acquire);
    const uint32_t expected = ((consumer >> cq->slots_log2) & 1) ^ 1;
    if ((phase & 1) != expected) break;
    abi::Cqe cqe;
    CopyCqe(slot, &cqe);
    ++consumer;
    if (Accept(context, cq, cqe, &wc[count])) {
      ++count;
      *extra = {cqe.timestamp_ns, cqe.flow_tag};
    }
  }
  if (consumer != start) {
    cq->consumer = consumer;
    cq->record->consumer.store(consumer, std::memory_order_release);
  }
  return count;
}

}  // namespace

int PollCq(ibv_cq* ibv, int num_entries, ibv_wc* wc) {
  Cq* cq = ToCq(ibv);
  const Context* context = ToContext(ibv->context);
  if (num_entries < 0) return -EINVAL;
  if (context->fork_generation != g_fork_generation.load(std::memory_order_relaxed)) return -EIO;
  const int injected = InjectedError(const_cast<Context*>(context), abi::kCheckPollCq, 0);
  if (injected != 0) [[unlikely]]
    return -injected;
  bool yield = false;
  int count;
  {
    const SpinGuard guard(cq->lock);
    Extra extra;
    count = PollLocked(context, cq, num_entries, wc, &extra);
    if (count == 0 && num_entries > 0) {
      if (context->DeviceDead()) count = Flush(cq, num_entries, wc);
      ++cq->empty_polls;
      if (cq->empty_polls % kEmptyPollsBeforeHangUpCheck == 0) context->channel.LookForHangUp();
      // Not each time from there on: on a busy machine a yield costs milliseconds, and a program
      // may have more to look at than this CQ (Open MPI progresses its second worker each hundred
      // rounds).
      yield = cq->empty_polls % kEmptyPollsBeforeYield == 0 &&
              context->status->mode == abi::kEngineThreadPerCpu;
    } else {
      cq->empty_polls = 0;
    }
  }
  if (yield) sched_yield();
  return count;
}

int NextCompletion(Cq* cq) {
  const Context* context = ToContext(cq->base.cq.context);
  if (context->fork_generation != g_fork_generation.load(std::memory_order_relaxed)) return EIO;
  Extra extra;
  int count = PollLocked(context, cq, 1, &cq->current, &extra);
  if (count == 0 && context->DeviceDead()) count = Flush(cq, 1, &cq->current);
  if (count == 0) {
    if (cq->empty_polls < kEmptyPollsBeforeYield) ++cq->empty_polls;
    return ENOENT;
  }
  cq->empty_polls = 0;
  cq->current_ns = extra.timestamp_ns;
  cq->current_flow_tag = extra.flow_tag;
  ibv_cq_ex* ex = ToCqEx(cq);
  ex->wr_id = cq->current.wr_id;
  ex->status = cq->current.status;
  return 0;
}

bool IsIdle(const Cq* cq) {
  return cq->empty_polls >= kEmptyPollsBeforeYield &&
         ToContext(cq->base.cq.context)->status->mode == abi::kEngineThreadPerCpu;
}

}  // namespace verbena::provider
