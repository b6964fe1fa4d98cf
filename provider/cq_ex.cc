// SPDX-License-Identifier: Apache-2.0
//
// Extended CQs: creation, and polling one completion at a time
// (ibv_create_cq_ex(3)).
#include <sched.h>
#include <time.h>

#include <cerrno>

#include "provider/fault_check.h"
#include "provider/provider.h"

namespace verbena::provider {
namespace {

void Unlock(Cq* cq) {
  if (!cq->single_threaded) cq->lock.Unlock();
}

// Also of ibv_next_poll, which belongs to this call, fault rules of polling take effect here.
int StartPoll(ibv_cq_ex* ibv, ibv_poll_cq_attr* attr) {
  Cq* cq = ToCq(ibv);
  if (attr->comp_mask != 0) return EINVAL;
  const int injected = InjectedError(ToContext(ibv->context), abi::kCheckPollCq, 0);
  if (injected != 0) [[unlikely]]
    return injected;
  if (!cq->single_threaded) cq->lock.Lock();
  const int error = NextCompletion(cq);
  if (error == 0) return 0;
  const bool idle = IsIdle(cq);
  Unlock(cq);
  if (idle) sched_yield();
  return error;
}

int NextPoll(ibv_cq_ex* ibv) { return NextCompletion(ToCq(ibv)); }

void EndPoll(ibv_cq_ex* ibv) { Unlock(ToCq(ibv)); }

ibv_wc_opcode ReadOpcode(ibv_cq_ex* cq) { return ToCq(cq)->current.opcode; }
uint32_t ReadVendorErr(ibv_cq_ex* cq) { return ToCq(cq)->current.vendor_err; }
uint32_t ReadByteLen(ibv_cq_ex* cq) { return ToCq(cq)->current.byte_len; }
__be32 ReadImmData(ibv_cq_ex* cq) { return ToCq(cq)->current.imm_data; }
uint32_t ReadQpNum(ibv_cq_ex* cq) { return ToCq(cq)->current.qp_num; }
uint32_t ReadSrcQp(ibv_cq_ex* cq) { return ToCq(cq)->current.src_qp; }
unsigned int ReadWcFlags(ibv_cq_ex* cq) { return ToCq(cq)->current.wc_flags; }
uint32_t ReadSlid(ibv_cq_ex* cq) { return ToCq(cq)->current.slid; }
uint8_t ReadSl(ibv_cq_ex* cq) { return ToCq(cq)->current.sl; }
uint8_t ReadDlidPathBits(ibv_cq_ex* cq) { return ToCq(cq)->current.dlid_path_bits; }
uint64_t ReadCompletionTs(ibv_cq_ex* cq) { return ToCq(cq)->current_ns; }

uint32_t ReadFlowTag(ibv_cq_ex* cq) { return ToCq(cq)->current_flow_tag; }

int64_t Nanoseconds(clockid_t clock) {
  timespec now = {};
  clock_gettime(clock, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

uint64_t ReadWallclock(ibv_cq_ex* cq) {
  const int64_t offset = Nanoseconds(CLOCK_REALTIME) - Nanoseconds(CLOCK_MONOTONIC);
  return ToCq(cq)->current_ns + static_cast<uint64_t>(offset);
}

void FillReaders(ibv_cq_ex* ibv, uint64_t wc_flags) {
  ibv->start_poll = StartPoll;
  ibv->next_poll = NextPoll;
  ibv->end_poll = EndPoll;
  ibv->read_opcode = ReadOpcode;
  ibv->read_vendor_err = ReadVendorErr;
  ibv->read_wc_flags = ReadWcFlags;
  // The others only if they were asked for, as other providers do.
  if ((wc_flags & IBV_WC_EX_WITH_BYTE_LEN) != 0) ibv->read_byte_len = ReadByteLen;
  // Also what reads invalidated keys, for which there is no flag.
  ibv->read_imm_data = ReadImmData;
  if ((wc_flags & IBV_WC_EX_WITH_QP_NUM) != 0) ibv->read_qp_num = ReadQpNum;
  if ((wc_flags & IBV_WC_EX_WITH_SRC_QP) != 0) ibv->read_src_qp = ReadSrcQp;
  if ((wc_flags & IBV_WC_EX_WITH_SLID) != 0) ibv->read_slid = ReadSlid;
  if ((wc_flags & IBV_WC_EX_WITH_SL) != 0) ibv->read_sl = ReadSl;
  if ((wc_flags & IBV_WC_EX_WITH_DLID_PATH_BITS) != 0) {
    ibv->read_dlid_path_bits = ReadDlidPathBits;
  }
  if ((wc_flags & IBV_WC_EX_WITH_FLOW_TAG) != 0) ibv->read_flow_tag = ReadFlowTag;
  if ((wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) != 0) {
    ibv->read_completion_ts = ReadCompletionTs;
  }
  if ((wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) != 0) {
    ibv->read_completion_wallclock_ns = ReadWallclock;
  }
}

// 0 or an errno.
int CheckAttributes(const ibv_cq_init_attr_ex& attr) {
  constexpr uint32_t kMask = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
  constexpr uint64_t kWcFlags = static_cast<uint64_t>(IBV_WC_STANDARD_FLAGS) |
                                IBV_WC_EX_WITH_FLOW_TAG | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
                                IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
  constexpr uint32_t kFlags =
      IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
  if ((attr.comp_mask & ~kMask) != 0) return EINVAL;
  if ((attr.wc_flags & ~kWcFlags) != 0) return EOPNOTSUPP;
  if ((attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) != 0 && (attr.flags & ~kFlags) != 0) {
    return EOPNOTSUPP;
  }
  if ((attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) != 0 &&
      (attr.parent_domain == nullptr || ToPd(attr.parent_domain)->protection == nullptr)) {
    return EINVAL;
  }
  return 0;
}

}  // namespace

ibv_cq_ex* CreateCqEx(ibv_context* context, ibv_cq_init_attr_ex* attr) {
  const int error = CheckAttributes(*attr);
  if (error != 0) {
    errno = error;
    return nullptr;
  }
  const uint32_t flags = (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) != 0 ? attr->flags : 0;
  if (attr->cqe > INT32_MAX || attr->comp_vector > INT32_MAX) {
    errno = EINVAL;
    return nullptr;
  }
  Cq* cq = CreateCqWith(context, static_cast<int>(attr->cqe), attr->channel,
                        static_cast<int>(attr->comp_vector),
                        (flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN) != 0
                            ? static_cast<uint32_t>(abi::kCqIgnoreOverrun)
                            : 0);
  if (cq == nullptr) return nullptr;
  const Td* td =
      (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) != 0 ? ToPd(attr->parent_domain)->td : nullptr;
  cq->single_threaded = (flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED) != 0 || td != nullptr;
  ibv_cq_ex* ex = ToCqEx(cq);
  FillReaders(ex, attr->wc_flags);
  return ex;
}

// As providers of hardware do it: the device's clock, in its cycles, which are
// nanoseconds here, stands in tv_nsec alone.
int QueryRtValues(ibv_context* ibv, ibv_values_ex* values) {
  if (Unusable(ToContext(ibv))) return EIO;
  const uint32_t wanted = values->comp_mask;
  values->comp_mask = 0;
  if ((wanted & IBV_VALUES_MASK_RAW_CLOCK) != 0) {
    values->raw_clock.tv_sec = 0;
    values->raw_clock.tv_nsec = Nanoseconds(CLOCK_MONOTONIC);
    values->comp_mask |= IBV_VALUES_MASK_RAW_CLOCK;
  }
  return 0;
}

}  // namespace verbena::provider
