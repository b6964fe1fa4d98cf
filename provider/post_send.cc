// SPDX-License-Identifier: Apache-2.0
//
// The hot path of sending: builds WQEs in the shared ring and rings the
// doorbell once per call. No allocation; a system call only to wake the engine.
#include <cerrno>
#include <cstring>

#include "provider/doorbell.h"
#include "provider/fault_check.h"
#include "provider/provider.h"
#include "provider/send_wqe.h"

namespace verbena::provider {
namespace {

constexpr unsigned kKnownFlags =
    IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;

// Of release 44 on; the headers may be older.
constexpr ibv_wr_opcode kWrAtomicWrite = static_cast<ibv_wr_opcode>(15);

constexpr uint32_t Bit(ibv_wr_opcode opcode) { return 1u << opcode; }

// Opcodes that a QP type has (IBTA Vol 1, table of transport functions).
uint32_t OpcodesOf(ibv_qp_type type) {
  constexpr uint32_t kSends = Bit(IBV_WR_SEND) | Bit(IBV_WR_SEND_WITH_IMM);
  constexpr uint32_t kWrites = Bit(IBV_WR_RDMA_WRITE) | Bit(IBV_WR_RDMA_WRITE_WITH_IMM);
  constexpr uint32_t kLocal = Bit(IBV_WR_LOCAL_INV) | Bit(IBV_WR_BIND_MW);
  constexpr uint32_t kReliable = kLocal | Bit(IBV_WR_SEND_WITH_INV) | Bit(IBV_WR_RDMA_READ) |
                                 Bit(IBV_WR_ATOMIC_CMP_AND_SWP) | Bit(IBV_WR_ATOMIC_FETCH_AND_ADD);
  switch (type) {
    case IBV_QPT_UD:
      return kSends;
    case IBV_QPT_RAW_PACKET:
      return Bit(IBV_WR_SEND);
    case IBV_QPT_UC:
      return kSends | kWrites | kLocal;
    case IBV_QPT_RC:
      return kSends | kWrites | kReliable | Bit(kWrAtomicWrite);
    case IBV_QPT_XRC_SEND:
      return kSends | kWrites | kReliable;
    default:
      return 0;
  }
}

bool MayBeInline(ibv_wr_opcode opcode) {
  return (Bit(opcode) &
          (Bit(IBV_WR_SEND) | Bit(IBV_WR_SEND_WITH_IMM) | Bit(IBV_WR_SEND_WITH_INV) |
           Bit(IBV_WR_RDMA_WRITE) | Bit(IBV_WR_RDMA_WRITE_WITH_IMM) | Bit(kWrAtomicWrite))) != 0;
}

// Any number may stand in the enum.
uint32_t OpcodeOf(const ibv_send_wr& wr) {
  static_assert(sizeof(wr.opcode) == sizeof(uint32_t));
  uint32_t opcode;
  memcpy(&opcode, &wr.opcode, sizeof(opcode));
  return opcode;
}

bool IsLocal(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_LOCAL_INV || opcode == IBV_WR_BIND_MW;
}

int CheckWr(const Qp* qp, const ibv_send_wr& wr) {
  const uint32_t opcode = OpcodeOf(wr);
  if (opcode >= 32 || (1u << opcode & OpcodesOf(qp->base.qp.qp_type)) == 0) return EINVAL;
  if ((wr.send_flags & ~kKnownFlags) != 0) return EINVAL;
  if (wr.num_sge < 0) return EINVAL;
  if (opcode == IBV_WR_BIND_MW && !IsBindable(wr.bind_mw.mw, wr.bind_mw.bind_info)) return EINVAL;
  if (IsLocal(wr.opcode)) return 0;  // neither data nor SGEs
  if ((wr.send_flags & IBV_SEND_INLINE) != 0) {
    if (!MayBeInline(wr.opcode)) return EINVAL;
  } else if (static_cast<uint32_t>(wr.num_sge) > qp->sq.max_sge ||
             (wr.opcode == kWrAtomicWrite && wr.num_sge == 0)) {
    return EINVAL;
  }
  return 0;
}

// The eight bytes of an ATOMIC_WRITE lie in the WQE itself.
int PutAtomicWrite(const ibv_send_wr& wr, abi::SendWqe* wqe) {
  uint8_t* to = reinterpret_cast<uint8_t*>(&wqe->atomic.compare_add);
  uint32_t bytes = 0;
  for (int i = 0; i < wr.num_sge; ++i) {
    const ibv_sge& sge = wr.sg_list[i];
    if (sge.length > sizeof(uint64_t) - bytes) return EINVAL;
    if (sge.length == 0) continue;
    memcpy(to + bytes, reinterpret_cast<const void*>(sge.addr), sge.length);
    bytes += sge.length;
  }
  wqe->num_sge = 0;
  return bytes == sizeof(uint64_t) ? 0 : EINVAL;
}

// Copies the payload behind the WQE. Nothing is visible to the device before
// the producer index says so; a slot may be left half written.
int CopyInline(const Qp* qp, const ibv_send_wr& wr, uint8_t* slot, abi::SendWqe* wqe) {
  uint64_t bytes = 0;
  for (int i = 0; i < wr.num_sge; ++i) {
    const ibv_sge& sge = wr.sg_list[i];
    if (bytes + sge.length > qp->max_inline) return EINVAL;
    if (sge.length == 0) continue;  // its address may be anything
    memcpy(slot + sizeof(*wqe) + bytes, reinterpret_cast<const void*>(sge.addr), sge.length);
    bytes += sge.length;
  }
  wqe->flags = static_cast<uint8_t>(wqe->flags | abi::kWqeInline);
  wqe->num_sge = 0;
  wqe->inline_bytes = static_cast<uint32_t>(bytes);
  return 0;
}

void PutRemote(const Qp* qp, const ibv_send_wr& wr, abi::SendWqe* wqe) {
  switch (wr.opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
    case IBV_WR_RDMA_READ:
    case kWrAtomicWrite:
      wqe->remote_address = wr.wr.rdma.remote_addr;
      wqe->rkey = wr.wr.rdma.rkey;
      break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      wqe->remote_address = wr.wr.atomic.remote_addr;
      wqe->rkey = wr.wr.atomic.rkey;
      wqe->atomic.compare_add = wr.wr.atomic.compare_add;
      // FETCH_ADD has no second operand; applications leave it undefined.
      if (wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP) wqe->atomic.swap = wr.wr.atomic.swap;
      break;
    case IBV_WR_LOCAL_INV:
      wqe->imm_or_inv = wr.invalidate_rkey;
      break;
    case IBV_WR_BIND_MW:
      PutBind(*wr.bind_mw.mw, wr.bind_mw.rkey, wr.bind_mw.bind_info, wqe);
      break;
    default:
      break;
  }
  if (qp->base.qp.qp_type == IBV_QPT_XRC_SEND) {
    const bool is_atomic =
        wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
    (is_atomic ? wqe->imm_or_inv : wqe->xrc.remote_srqn) = wr.qp_type.xrc.remote_srqn;
  }
  if (qp->base.qp.qp_type == IBV_QPT_UD) {
    wqe->ud.ah = wr.wr.ud.ah != nullptr ? wr.wr.ud.ah->handle : UINT32_MAX;
    wqe->ud.remote_qpn = wr.wr.ud.remote_qpn;
    wqe->ud.remote_qkey = wr.wr.ud.remote_qkey;
  }
}

// Builds one WQE in `slot`. Each field is written, also those of a former WQE
// that this one does not use.
int BuildWqe(const Qp* qp, const ibv_send_wr& wr, uint8_t* slot) {
  const int error = CheckWr(qp, wr);
  if (error != 0) return error;
  abi::SendWqe wqe = {};
  wqe.wr_id = wr.wr_id;
  wqe.opcode = static_cast<uint8_t>(wr.opcode);
  wqe.flags = WqeFlags(qp, wr.send_flags);
  wqe.num_sge = static_cast<uint8_t>(wr.num_sge);
  if (wr.opcode == IBV_WR_SEND_WITH_IMM || wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM ||
      wr.opcode == IBV_WR_SEND_WITH_INV) {
    wqe.imm_or_inv = wr.imm_data;  // shares its place with invalidate_rkey
  }
  PutRemote(qp, wr, &wqe);
  if (IsLocal(wr.opcode)) {
    wqe.num_sge = 0;
  } else if ((wr.send_flags & IBV_SEND_INLINE) != 0) {
    const int inline_error =
        wr.opcode == kWrAtomicWrite ? PutAtomicWrite(wr, &wqe) : CopyInline(qp, wr, slot, &wqe);
    if (inline_error != 0) return inline_error;
  } else {
    static_assert(sizeof(abi::Sge) == sizeof(ibv_sge));
    for (int i = 0; i < wr.num_sge; ++i) {
      memcpy(slot + sizeof(wqe) + static_cast<size_t>(i) * sizeof(abi::Sge), &wr.sg_list[i],
             sizeof(abi::Sge));
    }
  }
  memcpy(slot, &wqe, sizeof(wqe));
  return 0;
}

}  // namespace

int PostSend(ibv_qp* ibv, ibv_send_wr* wr, ibv_send_wr** bad_wr) {
  Qp* qp = ToQp(ibv);
  Context* context = ToContext(ibv->context);
  if (context->fork_generation != g_fork_generation.load(std::memory_order_relaxed)) {
    *bad_wr = wr;
    return EIO;
  }
  int error = InjectedError(context, abi::kCheckPostSend, qp->slot);
  if (error != 0) [[unlikely]] {
    *bad_wr = wr;
    return error;
  }
  uint32_t posted;
  uint32_t head;
  uint32_t tail;
  {
    const SpinGuard guard(qp->sq.lock);
    const uint32_t start = qp->sq.head.load(std::memory_order_relaxed);
    head = start;
    // Pairs with Retire(): a slot is written after its completion was polled.
    tail = qp->sq.tail.load(std::memory_order_acquire);
    if (context->DeviceDead()) {
      error = EIO;
    } else if (!MayPost(qp)) {
      error = EINVAL;
    }
    for (; error == 0 && wr != nullptr; wr = wr->next) {
      if (head - tail >= qp->sq.capacity) {
        tail = qp->sq.tail.load(std::memory_order_acquire);
        if (head - tail >= qp->sq.capacity) error = ENOMEM;
      }
      if (error == 0) error = BuildWqe(qp, *wr, qp->sq.ring.Slot(head));
      if (error != 0) break;
      qp->sq.wr_ids[head & (qp->sq.ring.slots - 1)] = wr->wr_id;
      ++head;
    }
    posted = head - start;
    if (posted != 0) {
      qp->sq.head.store(head, std::memory_order_relaxed);
      qp->record->sq_producer.store(head, std::memory_order_release);
    }
  }
  if (error != 0) *bad_wr = wr;
  if (posted != 0) {
    SetDoorbellBit(context->page, qp->slot);
    WakeForSend(context, qp, head, head - tail);
  }
  return error;
}

}  // namespace verbena::provider
