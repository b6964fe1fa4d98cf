// SPDX-License-Identifier: Apache-2.0
//
// What leaves a QP state machine: packets, completions, async events.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/memory_port.h"
#include "transport/psn.h"
#include "transport/types.h"
#include "transport/verbs_types.h"
#include "transport/wire/opcode.h"

namespace verbena::transport {

inline constexpr uint32_t kMaxSge = 32;

// A packet to send: header fields and where its payload comes from. The caller
// builds the headers (destination QPN, P_Key, addresses are the QP's), fetches
// the payload and computes pad and ICRC.
struct TxPacket {
  Opcode opcode;
  Psn psn;
  bool ack_request = false;
  bool solicited = false;
  // Extended headers; which are meant follows from OpcodeTraits of `opcode`.
  uint64_t remote_address = 0;  // RETH, AtomicETH
  uint32_t rkey = 0;            // RETH, AtomicETH
  uint32_t dma_length = 0;      // RETH
  uint64_t swap_or_add = 0;     // AtomicETH
  uint64_t compare = 0;         // AtomicETH
  uint64_t original = 0;        // AtomicAckETH
  uint32_t imm_or_inv = 0;      // ImmDt: the 4 wire bytes; IETH: rkey value
  Qpn dest_qpn;                 // UD; elsewhere the QP has it
  Qkey qkey;                    // DETH
  SrqNumber srq;                // XRCETH; XRC response: of the request that it answers
  uint8_t syndrome = 0;         // AETH
  Msn msn;                      // AETH

  // This packet was sent before (go-back-N); for counters and traces.
  bool retransmission = false;
  uint64_t wr_id = 0;  // of a request; for traces and captures

  // Payload: `payload_bytes` in all, either inline_payload or segments.
  uint32_t payload_bytes = 0;
  uint32_t segment_count = 0;
  MemoryAccess payload_access = MemoryAccess::kLocalRead;
  const std::byte* inline_payload = nullptr;  // valid until the next event
  MemorySegment segments[kMaxSge];            // not initialised beyond the count

  TxPacket() {}  // NOLINT: leaves `segments` as it is, on purpose
};

// Of a received datagram; numbers as a RoCE wc's `sl` has them in its low bits
// (RoCEv2 over IPv6: 1, over IPv4: 2).
enum class NetworkHeader : uint8_t { kNone = 0, kIpv6 = 1, kIpv4 = 2 };

// Becomes one CQE.
struct Completion {
  uint64_t wr_id = 0;
  uint32_t wqe_index = 0;  // as given with the WQE
  WcStatus status = WcStatus::kSuccess;
  WcOpcode opcode = WcOpcode::kSend;
  bool is_send = false;
  bool has_imm = false;
  bool has_inv = false;
  bool solicited = false;
  uint32_t imm_or_inv = 0;  // immediate: wire bytes; invalidate: rkey value
  uint32_t byte_len = 0;
  uint32_t vendor_err = 0;
  // UD receives: who sent it and what the first 40 bytes of the buffer hold.
  NetworkHeader network_header = NetworkHeader::kNone;
  Qpn src_qpn;
  SrqNumber srq;          // XRC receives: whose WQE it was
  uint32_t flow_tag = 0;  // raw packet receives
};

// Counted events of one QP's state machines (cumulative). The names are those
// of Linux hw_counters where one exists. X(name, meaning)
#define VERBENA_TRANSPORT_COUNTERS(X)                            \
  X(duplicate_request, "requests received again")                \
  X(out_of_seq_request, "requests ahead of the expected PSN")    \
  X(rcvd_rnr_err, "RNR NAKs received")                           \
  X(send_rnr_err, "RNR NAKs sent")                               \
  X(rcvd_seq_err, "sequence NAKs received")                      \
  X(ack_deferred, "ACKs held for a DMA ticket")                  \
  X(retry_exceeded_err, "WRs failed with RETRY_EXC_ERR")         \
  X(retry_rnr_exceeded_err, "WRs failed with RNR_RETRY_EXC_ERR") \
  X(completer_retry_err, "go-back-N rounds")                     \
  X(local_ack_timeout_err, "retransmission timeouts")            \
  X(send_err, "fatal NAKs received")                             \
  X(rdma_sends, "send WRs completed with success")               \
  X(rdma_recvs, "receives completed with success")               \
  X(dropped, "packets that the state machine ignored")

struct TransportCounters {
#define X(name, meaning) uint64_t name = 0;
  VERBENA_TRANSPORT_COUNTERS(X)
#undef X

  void Add(const TransportCounters& other) {
#define X(name, meaning) name += other.name;
    VERBENA_TRANSPORT_COUNTERS(X)
#undef X
  }
};

}  // namespace verbena::transport
