// SPDX-License-Identifier: Apache-2.0
//
// Pieces of send WQEs that ibv_post_send and ibv_wr_* have in common.
#pragma once

#include "provider/provider.h"

namespace verbena::provider {

inline uint8_t WqeFlags(const Qp* qp, unsigned send_flags) {
  unsigned flags = 0;
  if (qp->signal_all || (send_flags & IBV_SEND_SIGNALED) != 0) flags |= abi::kWqeSignaled;
  if ((send_flags & IBV_SEND_FENCE) != 0) flags |= abi::kWqeFence;
  if ((send_flags & IBV_SEND_SOLICITED) != 0) flags |= abi::kWqeSolicited;
  return static_cast<uint8_t>(flags);
}

// True where a send may be posted: it waits in SQD and is flushed in SQE and
// ERR. Like Linux drivers for hardware, not before RTS.
inline bool MayPost(const Qp* qp) {
  const uint32_t state = qp->state.load(std::memory_order_relaxed);
  return state != IBV_QPS_RESET && state != IBV_QPS_INIT && state != IBV_QPS_RTR;
}

// A window may be bound to nothing (length 0) without naming a region.
inline bool IsBindable(const ibv_mw* mw, const ibv_mw_bind_info& bind) {
  return mw != nullptr && (bind.mr != nullptr || bind.length == 0);
}

inline void PutBind(const ibv_mw& mw, uint32_t new_key, const ibv_mw_bind_info& bind,
                    abi::SendWqe* wqe) {
  wqe->remote_address = bind.addr;
  wqe->rkey = new_key;
  wqe->imm_or_inv = mw.handle;
  wqe->bind.length = bind.length;
  wqe->bind.lkey = bind.mr != nullptr ? bind.mr->lkey : 0;
  wqe->bind.access = bind.mw_access_flags;
}

}  // namespace verbena::provider
