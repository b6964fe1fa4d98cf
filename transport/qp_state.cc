// SPDX-License-Identifier: Apache-2.0
#include "transport/qp_state.h"

#include <array>
#include <optional>

namespace verbena::transport {

namespace {

// Attributes besides kQpAttrState.
struct Attributes {
  uint32_t required = 0;
  uint32_t optional = 0;
};

// A row of the table: one transition and what each service does with it.
struct Transition {
  QpState from;
  QpState to;
  std::optional<Attributes> rc;
  std::optional<Attributes> uc;
  std::optional<Attributes> ud;
  std::optional<Attributes> raw;
};

constexpr uint32_t kPath = kQpAttrAltPath | kQpAttrAccessFlags | kQpAttrPkeyIndex;
constexpr uint32_t kInitConnected = kQpAttrPkeyIndex | kQpAttrPort | kQpAttrAccessFlags;
constexpr uint32_t kInitDatagram = kQpAttrPkeyIndex | kQpAttrPort | kQpAttrQkey;
constexpr uint32_t kRtrConnected = kQpAttrAv | kQpAttrPathMtu | kQpAttrDestQpn | kQpAttrRqPsn;
constexpr uint32_t kRtrReliable = kRtrConnected | kQpAttrMaxDestRdAtomic | kQpAttrMinRnrTimer;
constexpr uint32_t kRtsReliable =
    kQpAttrTimeout | kQpAttrRetryCnt | kQpAttrRnrRetry | kQpAttrSqPsn | kQpAttrMaxQpRdAtomic;
constexpr uint32_t kRtsUc =
    kQpAttrCurState | kQpAttrAltPath | kQpAttrAccessFlags | kQpAttrPathMigState;
constexpr uint32_t kRtsRc = kRtsUc | kQpAttrMinRnrTimer;
constexpr uint32_t kRtsUd = kQpAttrCurState | kQpAttrQkey;
constexpr uint32_t kSqdUc = kQpAttrAv | kPath | kQpAttrPathMigState;
constexpr uint32_t kSqdRc = kSqdUc | kQpAttrPort | kQpAttrTimeout | kQpAttrRetryCnt |
                            kQpAttrRnrRetry | kQpAttrMaxQpRdAtomic | kQpAttrMaxDestRdAtomic |
                            kQpAttrMinRnrTimer;
constexpr uint32_t kSqdNotify = kQpAttrEnSqdAsyncNotify;

constexpr Attributes kNothing{};
constexpr Attributes Needs(uint32_t required, uint32_t optional = 0) {
  return Attributes{required, optional};
}
constexpr Attributes May(uint32_t optional) { return Attributes{0, optional}; }

// To RESET and ERR every state may go, with the state alone.
constexpr Transition kTransitions[] = {
    {QpState::kReset, QpState::kInit, Needs(kInitConnected), Needs(kInitConnected),
     Needs(kInitDatagram), Needs(kQpAttrPort)},
    {QpState::kInit, QpState::kInit, May(kInitConnected), May(kInitConnected), May(kInitDatagram),
     kNothing},
    {QpState::kInit, QpState::kRtr, Needs(kRtrReliable, kPath), Needs(kRtrConnected, kPath),
     May(kQpAttrPkeyIndex | kQpAttrQkey), kNothing},
    {QpState::kRtr, QpState::kRts, Needs(kRtsReliable, kRtsRc), Needs(kQpAttrSqPsn, kRtsUc),
     Needs(kQpAttrSqPsn, kRtsUd), kNothing},
    {QpState::kRts, QpState::kRts, May(kRtsRc), May(kRtsUc), May(kRtsUd), kNothing},
    {QpState::kRts, QpState::kSqd, May(kSqdNotify), May(kSqdNotify), May(kSqdNotify), kNothing},
    {QpState::kSqd, QpState::kSqd, May(kSqdRc), May(kSqdUc), May(kQpAttrPkeyIndex | kQpAttrQkey),
     kNothing},
    {QpState::kSqd, QpState::kRts, May(kRtsRc), May(kRtsUc), May(kRtsUd), kNothing},
    {QpState::kSqe, QpState::kRts, std::nullopt, May(kQpAttrCurState | kQpAttrAccessFlags),
     May(kRtsUd), kNothing},
};

// XRC is RC split in two: each half lacks what only the other needs. perftest
// gives a sending QP the attributes of a whole one: taken, not needed.
Attributes XrcSend(Attributes rc) {
  constexpr uint32_t kResponder = kQpAttrMaxDestRdAtomic | kQpAttrMinRnrTimer;
  return {rc.required & ~kResponder, (rc.optional & ~kResponder) | (rc.required & kResponder)};
}

// The target half sends nothing but responses. Applications pass attributes of
// sending all the same (the kernel asks for TIMEOUT and SQ_PSN, perftest gives
// all): taken, not needed.
Attributes XrcRecv(Attributes rc) {
  constexpr uint32_t kTolerated = kQpAttrTimeout | kQpAttrSqPsn;
  return {rc.required & ~kRtsReliable,
          (rc.optional & ~(kRtsReliable & ~kTolerated)) | (rc.required & kRtsReliable)};
}

std::optional<Attributes> AttributesOf(QpType type, const Transition& transition) {
  switch (type) {
    case QpType::kRc:
      return transition.rc;
    case QpType::kUc:
      return transition.uc;
    case QpType::kUd:
      return transition.ud;
    case QpType::kRawPacket:
      return transition.raw;
    case QpType::kXrcSend:
      if (transition.rc) return XrcSend(*transition.rc);
      break;
    case QpType::kXrcRecv:
      if (transition.rc) return XrcRecv(*transition.rc);
      break;
  }
  return std::nullopt;
}

std::optional<Attributes> Find(QpType type, QpState from, QpState to) {
  if (to == QpState::kReset || to == QpState::kErr) return kNothing;
  for (const Transition& transition : kTransitions) {
    if (transition.from == from && transition.to == to) return AttributesOf(type, transition);
  }
  return std::nullopt;
}

}  // namespace

bool IsModifyAllowed(QpType type, QpState from, QpState to, uint32_t mask) {
  const std::optional<Attributes> attributes = Find(type, from, to);
  if (!attributes.has_value()) return false;
  // Bits of later extensions (RATE_LIMIT and what old libraries pass for
  // Ethernet) mean nothing here.
  constexpr uint32_t kKnown = (uint32_t{kQpAttrDestQpn} << 1) - 1;
  const uint32_t given = mask & kKnown & ~uint32_t{kQpAttrState};
  return (attributes->required & ~given) == 0 &&
         (given & ~(attributes->required | attributes->optional)) == 0;
}

const char* QpTypeName(QpType type) {
  switch (type) {
    case QpType::kRc:
      return "RC";
    case QpType::kUc:
      return "UC";
    case QpType::kUd:
      return "UD";
    case QpType::kRawPacket:
      return "RAW_PACKET";
    case QpType::kXrcSend:
      return "XRC_SEND";
    case QpType::kXrcRecv:
      return "XRC_RECV";
  }
  return "UNKNOWN";
}

const char* QpStateName(QpState state) {
  constexpr std::array<const char*, 7> kNames = {"RESET", "INIT", "RTR", "RTS",
                                                 "SQD",   "SQE",  "ERR"};
  const size_t index = static_cast<size_t>(state);
  return index < kNames.size() ? kNames[index] : "UNKNOWN";
}

}  // namespace verbena::transport
