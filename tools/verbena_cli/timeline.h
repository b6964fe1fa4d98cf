// SPDX-License-Identifier: Apache-2.0
//
// The life of a work request, put together from the daemon's trace: posted,
// packets, answers, completion. Pure; whatever the JSON holds, nothing throws.
//
// The trace has packets by PSN and work requests by wr_id; a QP sends its work
// requests in order, so the n-th message that a QP begins belongs to the n-th
// work request that was fetched. Where the ring no longer has a QP's beginning,
// the first work requests are left out until both meet.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/verbena_cli/control_client.h"

namespace verbena::tools {

struct WorkRequestLife {
  uint32_t qpn = 0;
  uint32_t peer_qpn = 0;  // as connected; of a datagram, where it went
  std::string device;     // of the QP
  std::string wr_id;
  std::string opcode;
  uint32_t bytes = 0;
  int64_t posted_ns = 0;     // the WQE was fetched
  int64_t completed_ns = 0;  // 0: not, or it was not signaled
  std::string status;        // of the completion
  bool has_psn = false;      // something of it was sent
  uint32_t first_psn = 0, last_psn = 0;
  uint32_t sent = 0, again = 0;                 // packets of the request
  bool ack_sent = false, ack_received = false;  // an ACK with its PSN or of a later message
  std::vector<size_t> events;                   // of it, indices into the trace, by time
};

// All that the QP (all QPs) posted, in order.
std::vector<WorkRequestLife> WorkRequests(const Json& events, std::optional<uint32_t> qpn);

// A ladder: the requester on the left, the responder on the right.
std::string Ladder(const Json& events, const WorkRequestLife& life);
Json LadderJson(const Json& events, const WorkRequestLife& life);

// perfetto.cc: the trace in the trace-event format of Chrome, which Perfetto
// reads: a process for each device, a thread (track) for each QP and one for
// the port; work requests are async slices, packets slices with flows from the
// sender to the receiver, the rest instants.
Json PerfettoTrace(const Json& events);

}  // namespace verbena::tools
