// SPDX-License-Identifier: Apache-2.0
//
// Counters of a port: one list each, with the names that `verbena counters`
// prints. Names and units are those of Linux where Linux has the counter.
// Thread: written under the shard's lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace verbena::nic {

// /sys/class/infiniband/DEV/ports/1/counters.
// X(name, meaning)
#define VERBENA_PORT_COUNTERS(X)                                             \
  X(port_xmit_packets, "packets sent on the port")                           \
  X(port_rcv_packets, "packets received on the port, good or bad")           \
  X(port_xmit_data, "4-byte units sent, IP header to ICRC")                  \
  X(port_rcv_data, "4-byte units received, IP header to ICRC")               \
  X(unicast_xmit_packets, "of port_xmit_packets, to one destination")        \
  X(unicast_rcv_packets, "of port_rcv_packets, to one destination")          \
  X(multicast_xmit_packets, "of port_xmit_packets, to a multicast group")    \
  X(multicast_rcv_packets, "of port_rcv_packets, to a multicast group")      \
  X(port_xmit_discards, "packets not sent: no route, or dropped by a fault") \
  X(port_rcv_errors, "packets dropped on reception, see drops")

// Why a received or sent packet was dropped; each is counted.
#define VERBENA_DROP_REASONS(X)                                    \
  X(malformed, "the frame is not a well-formed RoCEv2 packet")     \
  X(bad_icrc, "the invariant CRC does not match")                  \
  X(unknown_qp, "no QP has the destination QPN")                   \
  X(qp_not_ready, "the QP is not in a state that receives")        \
  X(wrong_transport, "the opcode is not of the QP's transport")    \
  X(wrong_source, "the packet is not from the connected peer")     \
  X(pkey_mismatch, "P_Key differs")                                \
  X(qkey_mismatch, "the datagram's Q_Key is not the QP's")         \
  X(no_receive, "no receive is posted for the datagram")           \
  X(receive_too_small, "the datagram does not fit the receive")    \
  X(no_route, "no port has the destination address")               \
  X(port_down, "the port or link is down")                         \
  X(fault, "dropped by a fault rule")                              \
  X(queue_full, "a queue of the fabric or of the netdev was full") \
  X(unresolved, "the next hop outside did not tell its address")   \
  X(over_mtu, "longer than the MTU of the netdev")                 \
  X(spoofed, "from outside, with a source address of this daemon") \
  X(no_flow, "no flow rule takes the raw frame")

enum class DropReason : uint8_t {
#define X(name, meaning) name,
  VERBENA_DROP_REASONS(X)
#undef X
      count
};

struct PortCounters {
#define X(name, meaning) uint64_t name = 0;
  VERBENA_PORT_COUNTERS(X)
#undef X
  std::array<uint64_t, static_cast<size_t>(DropReason::count)> drops{};

  void Drop(DropReason reason) { ++drops[static_cast<size_t>(reason)]; }
};

const char* DropReasonName(DropReason reason);

}  // namespace verbena::nic
