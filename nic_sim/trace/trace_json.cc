// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/trace/trace_json.h"

#include <string_view>

#include "nic_sim/abi/commands.h"
#include "nic_sim/faults/device_rule.h"
#include "nic_sim/stats/counters.h"
#include "transport/qp_state.h"
#include "transport/verbs_types.h"
#include "transport/wire/aeth.h"
#include "transport/wire/opcode.h"

namespace verbena::nic {
namespace {

using nlohmann::json;
using namespace transport;  // NOLINT: names of the protocol

// As in ibv_wc_status, without IBV_WC_.
std::string_view NameOf(WcStatus status) {
  switch (status) {
    case WcStatus::kSuccess:
      return "SUCCESS";
    case WcStatus::kLocLenErr:
      return "LOC_LEN_ERR";
    case WcStatus::kLocQpOpErr:
      return "LOC_QP_OP_ERR";
    case WcStatus::kLocProtErr:
      return "LOC_PROT_ERR";
    case WcStatus::kWrFlushErr:
      return "WR_FLUSH_ERR";
    case WcStatus::kMwBindErr:
      return "MW_BIND_ERR";
    case WcStatus::kBadRespErr:
      return "BAD_RESP_ERR";
    case WcStatus::kLocAccessErr:
      return "LOC_ACCESS_ERR";
    case WcStatus::kRemInvReqErr:
      return "REM_INV_REQ_ERR";
    case WcStatus::kRemAccessErr:
      return "REM_ACCESS_ERR";
    case WcStatus::kRemOpErr:
      return "REM_OP_ERR";
    case WcStatus::kRetryExcErr:
      return "RETRY_EXC_ERR";
    case WcStatus::kRnrRetryExcErr:
      return "RNR_RETRY_EXC_ERR";
    case WcStatus::kFatalErr:
      return "FATAL_ERR";
    case WcStatus::kGeneralErr:
      return "GENERAL_ERR";
  }
  return "?";
}

// As in ibv_wr_opcode and ibv_wc_opcode.
std::string_view NameOf(WrOpcode opcode) {
  constexpr std::string_view kNames[] = {
      "RDMA_WRITE",         "RDMA_WRITE_WITH_IMM",  "SEND",      "SEND_WITH_IMM", "RDMA_READ",
      "ATOMIC_CMP_AND_SWP", "ATOMIC_FETCH_AND_ADD", "LOCAL_INV", "BIND_MW",       "SEND_WITH_INV"};
  if (opcode == WrOpcode::kFlush) return "FLUSH";
  if (opcode == WrOpcode::kAtomicWrite) return "ATOMIC_WRITE";
  const auto number = static_cast<size_t>(opcode);
  return number < std::size(kNames) ? kNames[number] : "?";
}
std::string_view NameOf(WcOpcode opcode) {
  switch (opcode) {
    case WcOpcode::kSend:
      return "SEND";
    case WcOpcode::kRdmaWrite:
      return "RDMA_WRITE";
    case WcOpcode::kRdmaRead:
      return "RDMA_READ";
    case WcOpcode::kCompSwap:
      return "COMP_SWAP";
    case WcOpcode::kFetchAdd:
      return "FETCH_ADD";
    case WcOpcode::kBindMw:
      return "BIND_MW";
    case WcOpcode::kLocalInv:
      return "LOCAL_INV";
    case WcOpcode::kFlush:
      return "FLUSH";
    case WcOpcode::kAtomicWrite:
      return "ATOMIC_WRITE";
    case WcOpcode::kRecv:
      return "RECV";
    case WcOpcode::kRecvRdmaWithImm:
      return "RECV_RDMA_WITH_IMM";
  }
  return "?";
}

// As in ibv_event_type, without IBV_EVENT_.
std::string_view NameOf(AsyncEventType type) {
  switch (type) {
    case AsyncEventType::kCqErr:
      return "CQ_ERR";
    case AsyncEventType::kQpFatal:
      return "QP_FATAL";
    case AsyncEventType::kQpReqErr:
      return "QP_REQ_ERR";
    case AsyncEventType::kQpAccessErr:
      return "QP_ACCESS_ERR";
    case AsyncEventType::kCommEst:
      return "COMM_EST";
    case AsyncEventType::kSqDrained:
      return "SQ_DRAINED";
    case AsyncEventType::kPathMig:
      return "PATH_MIG";
    case AsyncEventType::kPathMigErr:
      return "PATH_MIG_ERR";
    case AsyncEventType::kDeviceFatal:
      return "DEVICE_FATAL";
    case AsyncEventType::kPortActive:
      return "PORT_ACTIVE";
    case AsyncEventType::kPortErr:
      return "PORT_ERR";
    case AsyncEventType::kLidChange:
      return "LID_CHANGE";
    case AsyncEventType::kPkeyChange:
      return "PKEY_CHANGE";
    case AsyncEventType::kSmChange:
      return "SM_CHANGE";
    case AsyncEventType::kClientReregister:
      return "CLIENT_REREGISTER";
    case AsyncEventType::kGidChange:
      return "GID_CHANGE";
    case AsyncEventType::kWqFatal:
      return "WQ_FATAL";
    case AsyncEventType::kSrqErr:
      return "SRQ_ERR";
    case AsyncEventType::kSrqLimitReached:
      return "SRQ_LIMIT_REACHED";
    case AsyncEventType::kQpLastWqeReached:
      return "QP_LAST_WQE_REACHED";
    default:
      return "?";
  }
}

// As the verb that makes it.
std::string_view CommandName(uint32_t op) {
  switch (op) {
    case abi::kCmdAllocPd:
      return "alloc_pd";
    case abi::kCmdDeallocPd:
      return "dealloc_pd";
    case abi::kCmdRegMr:
      return "reg_mr";
    case abi::kCmdDeregMr:
      return "dereg_mr";
    case abi::kCmdCreateCq:
      return "create_cq";
    case abi::kCmdDestroyCq:
      return "destroy_cq";
    case abi::kCmdCreateQp:
      return "create_qp";
    case abi::kCmdModifyQp:
      return "modify_qp";
    case abi::kCmdQueryQp:
      return "query_qp";
    case abi::kCmdDestroyQp:
      return "destroy_qp";
    case abi::kCmdCreateAh:
      return "create_ah";
    case abi::kCmdDestroyAh:
      return "destroy_ah";
    case abi::kCmdQueryPort:
      return "query_port";
    case abi::kCmdGetSegment:
      return "get_segment";
    case abi::kCmdCreateSrq:
      return "create_srq";
    case abi::kCmdModifySrq:
      return "modify_srq";
    case abi::kCmdFinishSrqResize:
      return "finish_srq_resize";
    case abi::kCmdQuerySrq:
      return "query_srq";
    case abi::kCmdDestroySrq:
      return "destroy_srq";
    case abi::kCmdOpenXrcd:
      return "open_xrcd";
    case abi::kCmdCloseXrcd:
      return "close_xrcd";
    case abi::kCmdOpenQp:
      return "open_qp";
    case abi::kCmdReregMr:
      return "rereg_mr";
    case abi::kCmdAllocNullMr:
      return "alloc_null_mr";
    case abi::kCmdQueryMr:
      return "query_mr";
    case abi::kCmdAllocMw:
      return "alloc_mw";
    case abi::kCmdDeallocMw:
      return "dealloc_mw";
    case abi::kCmdAllocDm:
      return "alloc_dm";
    case abi::kCmdFreeDm:
      return "free_dm";
    case abi::kCmdImportPd:
      return "import_pd";
    case abi::kCmdImportMr:
      return "import_mr";
    case abi::kCmdImportDm:
      return "import_dm";
    case abi::kCmdResizeCq:
      return "resize_cq";
    case abi::kCmdFinishCqResize:
      return "finish_cq_resize";
    case abi::kCmdModifyCq:
      return "modify_cq";
    case abi::kCmdAttachMcast:
      return "attach_mcast";
    case abi::kCmdDetachMcast:
      return "detach_mcast";
    case abi::kCmdCheckFault:
      return "check_fault";
    default:
      return "?";
  }
}

void AddPacket(const TraceEvent& event, json* out) {
  json& packet = *out;
  const auto opcode = static_cast<Opcode>(event.opcode);
  packet["peer_qpn"] = event.peer_qpn;
  packet["psn"] = event.psn;
  packet["opcode"] = OpcodeName(opcode);
  packet["bytes"] = event.bytes;
  if ((event.flags & TraceEvent::kRetransmission) != 0) packet["retransmission"] = true;
  if ((event.flags & TraceEvent::kAckRequest) != 0) packet["ack_req"] = true;
  if (TraitsOf(opcode).has_aeth()) {
    packet["syndrome"] = event.detail >> 24;
    packet["msn"] = event.detail & 0xffffff;
  }
  if (event.kind != TraceKind::kFault &&
      (TraitsOf(opcode).has_reth() || TraitsOf(opcode).has_atomic_eth())) {
    packet["address"] = event.wr_id;
    packet["rkey"] = event.detail;
  }
}

}  // namespace

json ToJson(const TraceEvent& event, const std::string& device) {
  json out = {{"time_ns", event.time_ns}, {"device", device}, {"qpn", event.qpn}};
  switch (event.kind) {
    case TraceKind::kPosted:
      out["event"] = "posted";
      out["wr_id"] = event.wr_id;
      out["opcode"] = NameOf(static_cast<WrOpcode>(event.code));
      out["bytes"] = event.bytes;
      break;
    case TraceKind::kSent:
    case TraceKind::kReceived:
      out["event"] = event.kind == TraceKind::kSent ? "sent" : "received";
      AddPacket(event, &out);
      break;
    case TraceKind::kRefused:
      out["event"] = "refused";
      out["reason"] = DropReasonName(static_cast<DropReason>(event.code));
      AddPacket(event, &out);
      break;
    case TraceKind::kTimer:
      out["event"] = "timer";
      break;
    case TraceKind::kCompletion:
      out["event"] = "completion";
      out["wr_id"] = event.wr_id;
      out["status"] = NameOf(static_cast<WcStatus>(event.code));
      out["opcode"] = NameOf(static_cast<WcOpcode>(event.opcode));
      out["queue"] = (event.flags & TraceEvent::kSendQueue) != 0 ? "send" : "receive";
      out["bytes"] = event.bytes;
      out["vendor_err"] = event.detail;
      break;
    case TraceKind::kState:
      out["event"] = "state";
      out["from"] = QpStateName(static_cast<QpState>(event.opcode));
      out["to"] = QpStateName(static_cast<QpState>(event.code));
      break;
    case TraceKind::kEvent:
      out["event"] = "async_event";
      out["type"] = NameOf(static_cast<AsyncEventType>(event.code));
      break;
    case TraceKind::kDoorbell:
      out["event"] = "doorbell";
      break;
    case TraceKind::kDma:
      out["event"] = "dma";
      out["bytes"] = event.bytes;
      out["to"] = (event.flags & TraceEvent::kReceivingSide) != 0 ? "memory" : "packets";
      break;
    case TraceKind::kCommand:
      out["event"] = "command";
      out["command"] = CommandName(event.bytes);
      out["errno"] = event.detail;
      break;
    case TraceKind::kFault:
      out["event"] = "fault";
      out["rule"] = event.detail;
      out["side"] = (event.flags & TraceEvent::kReceivingSide) != 0 ? "rx" : "tx";
      AddPacket(event, &out);
      out.erase("syndrome");
      out.erase("msn");
      break;
    case TraceKind::kDeviceFault:
      out["event"] = "device_fault";
      out["rule"] = event.detail;
      out["action"] = NameOf(static_cast<DeviceAction>(event.code));
      break;
  }
  return out;
}

}  // namespace verbena::nic
