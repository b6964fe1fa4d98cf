// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/trace/failure_events.h"

#include <algorithm>

#include "transport/transport_event.h"
#include "transport/verbs_types.h"

namespace verbena::nic {
namespace {

using transport::AsyncEventType;
using transport::WcStatus;

bool IsFailure(const TraceEvent& event) {
  if (event.kind == TraceKind::kCompletion) {
    const auto status = static_cast<WcStatus>(event.code);
    return status != WcStatus::kSuccess && status != WcStatus::kWrFlushErr;
  }
  const auto type = static_cast<AsyncEventType>(event.code);
  return event.kind == TraceKind::kEvent &&
         (type == AsyncEventType::kQpFatal || type == AsyncEventType::kQpReqErr ||
          type == AsyncEventType::kQpAccessErr);
}

// Of one QP, while its events are looked for.
struct Story {
  FailedQp failed;
  uint32_t peer = 0;

  bool Concerns(const TraceEvent& event) const {
    if (event.qpn == failed.qpn || (peer != 0 && event.qpn == peer)) return true;
    // Of rules also what hit others: it may have to do with it.
    return event.kind == TraceKind::kFault || event.kind == TraceKind::kDeviceFault;
  }

  void Bound() {
    std::vector<TraceEvent>& events = failed.events;
    std::ranges::stable_sort(events, {}, &TraceEvent::time_ns);
    const auto after = std::ranges::upper_bound(events, failed.time_ns, {}, &TraceEvent::time_ns);
    const auto following = static_cast<size_t>(events.end() - after);
    if (following > kMostEventsAfter) {
      events.resize(events.size() - (following - kMostEventsAfter));
    }
    const size_t before = events.size() - std::min(following, kMostEventsAfter);
    if (before > kMostEventsBefore) {
      events.erase(events.begin(), events.begin() + static_cast<long>(before - kMostEventsBefore));
    }
    events.shrink_to_fit();
  }
};

}  // namespace

std::vector<FailedQp> CollectFailures(std::span<const TraceEvent> all, int64_t* seen_ns) {
  std::vector<Story> stories;
  int64_t last_ns = *seen_ns;
  for (const TraceEvent& event : all) {
    if (event.time_ns <= *seen_ns || !IsFailure(event)) continue;
    last_ns = std::max(last_ns, event.time_ns);
    const auto known = std::ranges::find_if(
        stories, [&](const Story& story) { return story.failed.qpn == event.qpn; });
    if (known != stories.end()) {
      known->failed.time_ns = std::min(known->failed.time_ns, event.time_ns);
      continue;
    }
    Story story;
    story.failed = {.qpn = event.qpn, .port = event.port, .time_ns = event.time_ns, .events = {}};
    if (stories.size() < kMostFailedQps) {
      stories.push_back(std::move(story));
      continue;
    }
    const auto latest =
        std::ranges::max_element(stories, {}, [](const Story& one) { return one.failed.time_ns; });
    if (event.time_ns < latest->failed.time_ns) *latest = std::move(story);
  }
  *seen_ns = last_ns;
  for (Story& story : stories) {
    for (const TraceEvent& event : all) {
      if (event.kind != TraceKind::kSent || event.qpn != story.failed.qpn) continue;
      if (event.peer_qpn != 0) story.peer = event.peer_qpn;
    }
    for (const TraceEvent& event : all) {
      if (story.Concerns(event)) story.failed.events.push_back(event);
    }
  }
  std::vector<FailedQp> result;
  for (Story& story : stories) {
    story.Bound();
    result.push_back(std::move(story.failed));
  }
  std::ranges::stable_sort(result, {}, &FailedQp::time_ns);
  return result;
}

}  // namespace verbena::nic
