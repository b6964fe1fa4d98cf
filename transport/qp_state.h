// SPDX-License-Identifier: Apache-2.0
//
// modify_qp: which transitions exist and which attributes each requires or
// allows (IBTA Vol 1 §10.3.1 and the Modify QP table).
#pragma once

#include <cstdint>

#include "transport/verbs_types.h"

namespace verbena::transport {

// Bits of enum ibv_qp_attr_mask.
enum QpAttrMask : uint32_t {
  kQpAttrState = 1 << 0,
  kQpAttrCurState = 1 << 1,
  kQpAttrEnSqdAsyncNotify = 1 << 2,
  kQpAttrAccessFlags = 1 << 3,
  kQpAttrPkeyIndex = 1 << 4,
  kQpAttrPort = 1 << 5,
  kQpAttrQkey = 1 << 6,
  kQpAttrAv = 1 << 7,
  kQpAttrPathMtu = 1 << 8,
  kQpAttrTimeout = 1 << 9,
  kQpAttrRetryCnt = 1 << 10,
  kQpAttrRnrRetry = 1 << 11,
  kQpAttrRqPsn = 1 << 12,
  kQpAttrMaxQpRdAtomic = 1 << 13,
  kQpAttrAltPath = 1 << 14,
  kQpAttrMinRnrTimer = 1 << 15,
  kQpAttrSqPsn = 1 << 16,
  kQpAttrMaxDestRdAtomic = 1 << 17,
  kQpAttrPathMigState = 1 << 18,
  kQpAttrCap = 1 << 19,
  kQpAttrDestQpn = 1 << 20,
};

// True if modify_qp may go from `from` to `to` with exactly these attributes
// (`mask` includes kQpAttrState when the caller gave it). Without kQpAttrState,
// `to` equals `from`. Bits of `mask` above kQpAttrDestQpn are not looked at.
bool IsModifyAllowed(QpType type, QpState from, QpState to, uint32_t mask);

const char* QpTypeName(QpType type);     // "RC"
const char* QpStateName(QpState state);  // "RTS"

}  // namespace verbena::transport
