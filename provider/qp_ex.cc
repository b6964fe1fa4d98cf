// SPDX-License-Identifier: Apache-2.0
//
// The posting interface of ibv_qp_ex: ibv_wr_start, one ibv_wr_* and its setters
// for each WQE, ibv_wr_complete. A hot path like post_send.cc.
#include <cerrno>
#include <cstring>

#include "provider/doorbell.h"
#include "provider/fault_check.h"
#include "provider/provider.h"
#include "provider/send_wqe.h"

namespace verbena::provider {
namespace {

// Of release 44 and 45 on; the headers may be older.
constexpr ibv_wr_opcode kWrFlush = static_cast<ibv_wr_opcode>(14);
constexpr ibv_wr_opcode kWrAtomicWrite = static_cast<ibv_wr_opcode>(15);
constexpr uint32_t kWithAtomicWrite = 1u << 12;
constexpr uint32_t kWithFlush = 1u << 13;

Qp* ToQp(ibv_qp_ex* ibv) { return Downcast<Qp>(ibv); }

void SetError(WrBuilder* builder, int error) {
  if (builder->error == 0) builder->error = error;
}

uint8_t* TailOf(abi::SendWqe* wqe) { return reinterpret_cast<uint8_t*>(wqe) + sizeof(*wqe); }

// Begins the next WQE; NULL (and an error to remember) if there is no place for
// it. Every field of the head is written.
abi::SendWqe* Begin(ibv_qp_ex* ibv, ibv_wr_opcode opcode, uint32_t permission) {
  Qp* qp = ToQp(ibv);
  WrBuilder* builder = &qp->builder;
  builder->wqe = nullptr;
  if (builder->error != 0) return nullptr;
  if ((builder->allowed & permission) == 0) {
    SetError(builder, EOPNOTSUPP);
    return nullptr;
  }
  constexpr unsigned kKnownFlags =
      IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;
  if ((ibv->wr_flags & ~kKnownFlags) != 0) {
    SetError(builder, EINVAL);
    return nullptr;
  }
  if (builder->head - builder->tail >= qp->sq.capacity) {
    // Pairs with Retire(): a slot is written after its completion was polled.
    builder->tail = qp->sq.tail.load(std::memory_order_acquire);
    if (builder->head - builder->tail >= qp->sq.capacity) {
      SetError(builder, ENOMEM);
      return nullptr;
    }
  }
  uint8_t* slot = qp->sq.ring.Slot(builder->head);
  qp->sq.wr_ids[builder->head & (qp->sq.ring.slots - 1)] = ibv->wr_id;
  ++builder->head;
  abi::SendWqe wqe = {};
  wqe.wr_id = ibv->wr_id;
  wqe.opcode = static_cast<uint8_t>(opcode);
  wqe.flags = WqeFlags(qp, ibv->wr_flags);
  memcpy(slot, &wqe, sizeof(wqe));
  builder->wqe = reinterpret_cast<abi::SendWqe*>(slot);
  return builder->wqe;
}

abi::SendWqe* BeginRemote(ibv_qp_ex* ibv, ibv_wr_opcode opcode, uint32_t permission, uint32_t rkey,
                          uint64_t address) {
  abi::SendWqe* wqe = Begin(ibv, opcode, permission);
  if (wqe == nullptr) return nullptr;
  wqe->rkey = rkey;
  wqe->remote_address = address;
  return wqe;
}

void WrAtomicCmpSwp(ibv_qp_ex* qp, uint32_t rkey, uint64_t address, uint64_t compare,
                    uint64_t swap) {
  abi::SendWqe* wqe =
      BeginRemote(qp, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, rkey, address);
  if (wqe == nullptr) return;
  wqe->atomic.compare_add = compare;
  wqe->atomic.swap = swap;
}

void WrAtomicFetchAdd(ibv_qp_ex* qp, uint32_t rkey, uint64_t address, uint64_t add) {
  abi::SendWqe* wqe = BeginRemote(qp, IBV_WR_ATOMIC_FETCH_AND_ADD,
                                  IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, rkey, address);
  if (wqe != nullptr) wqe->atomic.compare_add = add;
}

void WrBindMw(ibv_qp_ex* qp, ibv_mw* mw, uint32_t rkey, const ibv_mw_bind_info* bind) {
  abi::SendWqe* wqe = Begin(qp, IBV_WR_BIND_MW, IBV_QP_EX_WITH_BIND_MW);
  if (wqe == nullptr) return;
  if (IsBindable(mw, *bind)) {
    PutBind(*mw, rkey, *bind, wqe);
  } else {
    SetError(&ToQp(qp)->builder, EINVAL);
  }
}

void WrLocalInv(ibv_qp_ex* qp, uint32_t rkey) {
  abi::SendWqe* wqe = Begin(qp, IBV_WR_LOCAL_INV, IBV_QP_EX_WITH_LOCAL_INV);
  if (wqe != nullptr) wqe->imm_or_inv = rkey;
}

void WrRdmaRead(ibv_qp_ex* qp, uint32_t rkey, uint64_t address) {
  BeginRemote(qp, IBV_WR_RDMA_READ, IBV_QP_EX_WITH_RDMA_READ, rkey, address);
}

void WrRdmaWrite(ibv_qp_ex* qp, uint32_t rkey, uint64_t address) {
  BeginRemote(qp, IBV_WR_RDMA_WRITE, IBV_QP_EX_WITH_RDMA_WRITE, rkey, address);
}

void WrRdmaWriteImm(ibv_qp_ex* qp, uint32_t rkey, uint64_t address, __be32 imm) {
  abi::SendWqe* wqe = BeginRemote(qp, IBV_WR_RDMA_WRITE_WITH_IMM,
                                  IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, rkey, address);
  if (wqe != nullptr) wqe->imm_or_inv = imm;
}

void WrSend(ibv_qp_ex* qp) { Begin(qp, IBV_WR_SEND, IBV_QP_EX_WITH_SEND); }

void WrSendImm(ibv_qp_ex* qp, __be32 imm) {
  abi::SendWqe* wqe = Begin(qp, IBV_WR_SEND_WITH_IMM, IBV_QP_EX_WITH_SEND_WITH_IMM);
  if (wqe != nullptr) wqe->imm_or_inv = imm;
}

void WrSendInv(ibv_qp_ex* qp, uint32_t rkey) {
  abi::SendWqe* wqe = Begin(qp, IBV_WR_SEND_WITH_INV, IBV_QP_EX_WITH_SEND_WITH_INV);
  if (wqe != nullptr) wqe->imm_or_inv = rkey;
}

void WrAtomicWrite(ibv_qp_ex* ibv, uint32_t rkey, uint64_t address, const void* value) {
  abi::SendWqe* wqe = BeginRemote(ibv, kWrAtomicWrite, kWithAtomicWrite, rkey, address);
  if (wqe == nullptr) return;
  memcpy(&wqe->atomic.compare_add, value, sizeof(uint64_t));
}

void WrFlush(ibv_qp_ex* ibv, uint32_t rkey, uint64_t address, size_t length, uint8_t type,
             uint8_t level) {
  abi::SendWqe* wqe = BeginRemote(ibv, kWrFlush, kWithFlush, rkey, address);
  if (wqe == nullptr) return;
  if (type > 0xf || level > 3) {
    SetError(&ToQp(ibv)->builder, EINVAL);
    return;
  }
  wqe->imm_or_inv = static_cast<uint32_t>(type | level << 4);
  wqe->atomic.compare_add = length;
}

void WrSendTso(ibv_qp_ex* qp, void*, uint16_t, uint16_t) {
  SetError(&ToQp(qp)->builder, EOPNOTSUPP);
}

void WrSetUdAddr(ibv_qp_ex* ibv, ibv_ah* ah, uint32_t remote_qpn, uint32_t remote_qkey) {
  WrBuilder* builder = &ToQp(ibv)->builder;
  if (builder->wqe == nullptr) return;
  if (ah == nullptr || ibv->qp_base.qp_type != IBV_QPT_UD) {
    SetError(builder, EINVAL);
    return;
  }
  builder->wqe->ud.ah = ah->handle;
  builder->wqe->ud.remote_qpn = remote_qpn;
  builder->wqe->ud.remote_qkey = remote_qkey;
}

void WrSetXrcSrqn(ibv_qp_ex* ibv, uint32_t remote_srqn) {
  WrBuilder* builder = &ToQp(ibv)->builder;
  abi::SendWqe* wqe = builder->wqe;
  if (wqe == nullptr) return;
  if (ibv->qp_base.qp_type != IBV_QPT_XRC_SEND) {
    SetError(builder, EINVAL);
    return;
  }
  const bool is_atomic =
      wqe->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wqe->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
  (is_atomic ? wqe->imm_or_inv : wqe->xrc.remote_srqn) = remote_srqn;
}

void WrSetSgeList(ibv_qp_ex* ibv, size_t count, const ibv_sge* sges) {
  Qp* qp = ToQp(ibv);
  abi::SendWqe* wqe = qp->builder.wqe;
  if (wqe == nullptr) return;
  if (count > qp->sq.max_sge) {
    SetError(&qp->builder, EINVAL);
    return;
  }
  static_assert(sizeof(abi::Sge) == sizeof(ibv_sge));
  if (count != 0) memcpy(TailOf(wqe), sges, count * sizeof(abi::Sge));
  wqe->num_sge = static_cast<uint8_t>(count);
}

void WrSetSge(ibv_qp_ex* qp, uint32_t lkey, uint64_t address, uint32_t length) {
  const ibv_sge sge = {.addr = address, .length = length, .lkey = lkey};
  WrSetSgeList(qp, 1, &sge);
}

bool TakesData(uint8_t opcode) {
  return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM ||
         opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_SEND_WITH_INV;
}

void WrSetInlineDataList(ibv_qp_ex* ibv, size_t count, const ibv_data_buf* buffers) {
  Qp* qp = ToQp(ibv);
  abi::SendWqe* wqe = qp->builder.wqe;
  if (wqe == nullptr) return;
  if (!TakesData(wqe->opcode)) {
    SetError(&qp->builder, EINVAL);
    return;
  }
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    if (buffers[i].length > qp->max_inline - bytes) {
      SetError(&qp->builder, ENOMEM);
      return;
    }
    if (buffers[i].length != 0) {
      memcpy(TailOf(wqe) + bytes, buffers[i].addr, buffers[i].length);
    }
    bytes += buffers[i].length;
  }
  wqe->flags = static_cast<uint8_t>(wqe->flags | abi::kWqeInline);
  wqe->num_sge = 0;
  wqe->inline_bytes = static_cast<uint32_t>(bytes);
}

void WrSetInlineData(ibv_qp_ex* qp, void* address, size_t length) {
  const ibv_data_buf buffer = {.addr = address, .length = length};
  WrSetInlineDataList(qp, 1, &buffer);
}

void WrStart(ibv_qp_ex* ibv) {
  Qp* qp = ToQp(ibv);
  Context* const context = ToContext(ibv->qp_base.context);
  const int injected =
      Unusable(context) ? 0 : InjectedError(context, abi::kCheckPostSend, qp->slot);
  qp->sq.lock.Lock();
  WrBuilder* builder = &qp->builder;
  builder->head = qp->sq.head.load(std::memory_order_relaxed);
  builder->tail = qp->sq.tail.load(std::memory_order_acquire);
  builder->wqe = nullptr;
  builder->error = injected;
  if (Unusable(context)) {
    builder->error = EIO;
  } else if (!MayPost(qp)) {
    builder->error = EINVAL;
  }
}

void WrAbort(ibv_qp_ex* ibv) { ToQp(ibv)->sq.lock.Unlock(); }

int WrComplete(ibv_qp_ex* ibv) {
  Qp* qp = ToQp(ibv);
  Context* context = ToContext(ibv->qp_base.context);
  const int error = qp->builder.error;
  const uint32_t head = qp->builder.head;
  const uint32_t tail = qp->builder.tail;
  const bool posted = error == 0 && head != qp->sq.head.load(std::memory_order_relaxed);
  if (posted) {
    qp->sq.head.store(head, std::memory_order_relaxed);
    qp->record->sq_producer.store(head, std::memory_order_release);
  }
  qp->sq.lock.Unlock();
  if (posted) {
    SetDoorbellBit(context->page, qp->slot);
    WakeForSend(context, qp, head, head - tail);
  }
  return error;
}

constexpr uint32_t kSendOps = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
constexpr uint32_t kWriteOps = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
constexpr uint32_t kLocalOps = IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW;
constexpr uint32_t kReliableOps =
    kLocalOps | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
    IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_SEND_WITH_INV;

// Earlier ones look for something else where its function stands.
constexpr int kFirstWithAtomicWrite = 44;
constexpr int kFirstWithFlush = 45;

uint32_t OpsOf(ibv_qp_type type) {
  switch (type) {
    case IBV_QPT_UD:
      return kSendOps;
    case IBV_QPT_RAW_PACKET:
      return IBV_QP_EX_WITH_SEND;
    case IBV_QPT_UC:
      return kSendOps | kWriteOps | kLocalOps;
    case IBV_QPT_RC:
      return kSendOps | kWriteOps | kReliableOps |
             (LibraryRelease() >= kFirstWithAtomicWrite ? kWithAtomicWrite : 0) |
             (LibraryRelease() >= kFirstWithFlush ? kWithFlush : 0);
    case IBV_QPT_XRC_SEND:
      return kSendOps | kWriteOps | kReliableOps;
    default:
      return 0;
  }
}

}  // namespace

int CheckSendOps(ibv_qp_type type, uint64_t ops) {
  return (ops & ~uint64_t{OpsOf(type)}) == 0 ? 0 : EOPNOTSUPP;
}

void MakeExtended(Qp* qp, uint64_t ops) {
  // Where libibverbs looks depends on its release, see VerbsQp.
  constexpr uint32_t kIsQpEx = 2;
  uint8_t* bytes = reinterpret_cast<uint8_t*>(&qp->base);
  for (const size_t offset : {344, 352, 360}) memcpy(bytes + offset, &kIsQpEx, sizeof(kIsQpEx));
  if (LibraryRelease() >= kFirstWithAtomicWrite) {
    const auto function = &WrAtomicWrite;
    memcpy(bytes + 344, &function, sizeof(function));
  }
  if (LibraryRelease() >= kFirstWithFlush) {
    const auto function = &WrFlush;
    memcpy(bytes + 352, &function, sizeof(function));
  }
  qp->builder.allowed = static_cast<uint32_t>(ops);
  ibv_qp_ex* ex = reinterpret_cast<ibv_qp_ex*>(qp);
  static_assert(offsetof(ibv_qp_ex, wr_abort) == 336);
  ex->comp_mask = 0;
  ex->wr_atomic_cmp_swp = WrAtomicCmpSwp;
  ex->wr_atomic_fetch_add = WrAtomicFetchAdd;
  ex->wr_bind_mw = WrBindMw;
  ex->wr_local_inv = WrLocalInv;
  ex->wr_rdma_read = WrRdmaRead;
  ex->wr_rdma_write = WrRdmaWrite;
  ex->wr_rdma_write_imm = WrRdmaWriteImm;
  ex->wr_send = WrSend;
  ex->wr_send_imm = WrSendImm;
  ex->wr_send_inv = WrSendInv;
  ex->wr_send_tso = WrSendTso;
  ex->wr_set_ud_addr = WrSetUdAddr;
  ex->wr_set_xrc_srqn = WrSetXrcSrqn;
  ex->wr_set_inline_data = WrSetInlineData;
  ex->wr_set_inline_data_list = WrSetInlineDataList;
  ex->wr_set_sge = WrSetSge;
  ex->wr_set_sge_list = WrSetSgeList;
  ex->wr_start = WrStart;
  ex->wr_complete = WrComplete;
  ex->wr_abort = WrAbort;
}

// The end of a message is visible last, but the kernel's copy of a packet may
// show later bytes of it before earlier ones.
int QueryQpDataInOrder(ibv_qp*, ibv_wr_opcode, uint32_t) { return 0; }

}  // namespace verbena::provider
