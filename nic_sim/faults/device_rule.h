// SPDX-License-Identifier: Apache-2.0
//
// The text form of a fault rule that hits the device instead of a packet:
// 'ACTION [key=value ...]', one form with the rules of nic_sim/fabric/fault_rule.h.
//
// At completions (of WRs that give one):
//   complete              it gets status= and vendor_err=. With an error status the QP
//                         goes to ERR, and what it still completes is flushed, unless
//                         qp=keep
//   lose_completion       no CQE is written
//   duplicate_completion  a second one follows
//   delay_completion      it, and what follows in its queue, waits us= microseconds
//   cq_overrun            its CQ is full
// At calls of verbs:
//   fail                  verb=NAME fails with errno=NAME (or a number)
// At completions if one is named (opcode=, queue=, nth=, every=, prob= or on=completion),
// else once, at after=:
//   qp_error              QPs go to ERR, with QP_FATAL
//   event                 type=NAME is reported, nothing else happens
// Once, at after=:
//   remove                dev= is pulled out: DEVICE_FATAL, and from then on nothing but
//                         errors; it comes back after us=, or when the rule is removed
//   gid_change            entry index= of the GID table of dev= becomes gid=, or empty, with
//                         GID_CHANGE; the old one returns, with another, after us= or when the
//                         rule is removed
//   addr_change           RDMA_CM_EVENT_ADDR_CHANGE for the ids of dev=
// At steps of the connection manager:
//   cm_error              type=ADDR_ERROR: rdma_resolve_addr ends with that event;
//                         ROUTE_ERROR: rdma_resolve_route; CONNECT_ERROR, UNREACHABLE,
//                         REJECTED: rdma_connect. errno= (default ETIMEDOUT) or, of
//                         REJECTED, reason= (default 28, by the consumer) is its status
//
// Keys, all optional but those above:
//   dev=D, qpn=N, app=NAME (process name), nth_qp=N (of the application, from 1),
//   queue=send|recv, opcode=NAME (as in ibv_wc_opcode, or send, write, read, atomic,
//   recv), wr_id=N, nth=, every=, count=, prob=, seed=, after=, until=: as of packets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/base/time.h"
#include "transport/types.h"
#include "transport/verbs_types.h"

namespace verbena::nic {

enum class DeviceAction : uint8_t {
  kComplete,
  kLoseCompletion,
  kDuplicateCompletion,
  kDelayCompletion,
  kCqOverrun,
  kFail,
  kQpError,
  kEvent,
  kRemove,
  kAddrChange,
  kCmError,
  kGidChange,
};

// Verbs by number: commands as in abi::CommandOp, and those that are none.
inline constexpr uint16_t kVerbOpenDevice = 0x4000;
inline constexpr uint16_t kVerbPostSend = 0x4001;
inline constexpr uint16_t kVerbPostRecv = 0x4002;
inline constexpr uint16_t kVerbPostSrqRecv = 0x4003;
inline constexpr uint16_t kVerbPollCq = 0x4004;
inline constexpr uint16_t kVerbReqNotifyCq = 0x4005;
// 0x5000 + RDMA_USER_CM_CMD_*.
inline constexpr uint16_t kVerbRdmaCm = 0x5000;

struct DeviceRule {
  DeviceAction action = DeviceAction::kComplete;
  std::optional<std::string> device;
  std::optional<uint32_t> qpn;
  std::optional<std::string> app;
  std::optional<uint32_t> nth_qp;
  std::optional<bool> send_queue;  // queue=
  // Bits by WcOpcode: 0 to 8, and 16 for both of receives.
  std::optional<uint32_t> opcodes;
  std::optional<uint64_t> wr_id;
  std::optional<uint64_t> nth;
  std::optional<uint64_t> every;
  std::optional<uint64_t> count;
  std::optional<double> probability;
  std::optional<uint64_t> seed;
  transport::Duration after;
  std::optional<transport::Duration> until;
  std::optional<transport::Duration> duration;  // us=
  std::optional<uint8_t> status;                // enum ibv_wc_status
  std::optional<uint32_t> vendor_err;
  bool keeps_qp = false;
  bool on_completion = false;
  std::optional<uint16_t> verb;
  int error = 0;                 // errno=
  std::optional<uint8_t> event;  // enum ibv_event_type; kCmError: rdma_cm_event_type
  std::optional<uint32_t> reason;
  std::optional<uint8_t> gid_index;   // index=
  std::optional<transport::Gid> gid;  // gid=
  std::string text;                   // as given, with single spaces

  // What it does is undone after `duration`, or with the end of the rule.
  bool is_undone() const {
    return action == DeviceAction::kRemove || action == DeviceAction::kGidChange;
  }

  // It looks at completions; false: it acts at a time, or at verbs.
  bool at_completion() const {
    if (action <= DeviceAction::kCqOverrun) return true;
    if (action != DeviceAction::kQpError && action != DeviceAction::kEvent) return false;
    return on_completion || send_queue || opcodes || wr_id || nth || every || probability;
  }
};

// Whether `action`, the first word of a rule, is of this kind.
bool IsDeviceAction(std::string_view action);
// "complete, lose_completion, ...".
std::string DeviceActionNames();
std::string_view NameOf(DeviceAction action);

// False with a sentence in *error, and in *field the key that is wrong (empty: the rule).
bool ParseDeviceRule(std::string_view text, DeviceRule* rule, std::string* error,
                     std::string* field = nullptr);

// Bit of DeviceRule::opcodes.
constexpr uint32_t OpcodeBit(transport::WcOpcode opcode) {
  const auto number = static_cast<uint32_t>(opcode);
  return number < 16 ? 1u << number : 1u << 16;
}

// "reg_mr"; empty if there is none.
std::string_view VerbName(uint16_t verb);

}  // namespace verbena::nic
