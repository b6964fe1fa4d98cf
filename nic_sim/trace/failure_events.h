// SPDX-License-Identifier: Apache-2.0
//
// Finds in the trace the QPs that have failed and what an explanation of each needs: events of
// the QP and its peer, hits of fault rules. Bounded, so that a program that fails QPs in a loop
// costs no more than one that fails one. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "nic_sim/trace/trace_ring.h"

namespace verbena::nic {

struct FailedQp {
  uint32_t qpn = 0;
  uint16_t port = 0;
  int64_t time_ns = 0;             // of the failure
  std::vector<TraceEvent> events;  // by time, kMostFailureEvents at most
};

inline constexpr size_t kMostFailedQps = 8;
// Of one QP: up to its failure the last ones, and a few that follow.
inline constexpr size_t kMostEventsBefore = 448;
inline constexpr size_t kMostEventsAfter = 64;
inline constexpr size_t kMostFailureEvents = kMostEventsBefore + kMostEventsAfter;

// `all`: oldest first within each QP. Of each QP the first failure after *seen_ns: what came later
// followed from it; the QPs that failed first. *seen_ns becomes the time of the last failure.
std::vector<FailedQp> CollectFailures(std::span<const TraceEvent> all, int64_t* seen_ns);

}  // namespace verbena::nic
