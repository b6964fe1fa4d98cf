// SPDX-License-Identifier: Apache-2.0
//
// DeviceFaults: the fault rules that hit the device (device_rule.h): completions,
// verbs, and what happens at a time. Who meets a fault asks here; without rules
// that is one look at a word, wants().
//
// Deterministic as FaultStage is: each rule has its own generator and counts what it
// selects.
//
// Thread: any; a lock of its own, the last to be taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nic_sim/faults/device_rule.h"
#include "nic_sim/trace/measured_parts.h"
#include "nic_sim/trace/trace_ring.h"
#include "transport/base/time.h"
#include "transport/transport_event.h"

namespace verbena::nic {

inline constexpr size_t kMaxDeviceRules = 1024;
// Completions that `delay_completion` keeps in one shard; beyond it none waits.
inline constexpr size_t kMaxDelayedCompletions = 4096;

// Whom a fault may hit.
struct FaultSubject {
  static constexpr uint32_t kNoNic = 0xffff;  // an id of rdma_cm that is not bound to one

  uint32_t nic = 0;
  std::string_view app;
  uint32_t qpn = 0;
  uint32_t nth_qp = 0;  // of its application, from 1; 0: no QP
};

// What becomes of one completion.
struct CompletionFault {
  std::optional<uint8_t> status;
  std::optional<uint32_t> vendor_err;
  bool lost = false;
  bool overrun = false;
  bool fails_qp = false;      // to ERR, because of the status
  bool qp_fatal = false;      // to ERR, with QP_FATAL
  uint32_t copies = 0;        // more CQEs
  transport::Duration delay;  // 0: none
  std::vector<uint8_t> events;

  bool any() const {
    return status || vendor_err || lost || overrun || qp_fatal || copies != 0 ||
           delay > transport::Duration() || !events.empty();
  }
};

class DeviceFaults {
 public:
  enum Kind : uint32_t {
    kAtCompletion = 1,
    kAtVerb = 2,
    kAtDataPath = 4,  // verbs that the application's side does alone
    kAtCm = 8,
    kTimed = 16,
  };
  // Rules of one of these kinds are there.
  bool wants(uint32_t kinds) const {
    return kHasFaults && (kinds_.load(std::memory_order_relaxed) & kinds) != 0;
  }

  // Bits by abi::FaultCheckVerb: those with rules.
  uint32_t checked_verbs() const { return checked_verbs_.load(std::memory_order_relaxed); }

  DeviceFaults() = default;
  DeviceFaults(const DeviceFaults&) = delete;
  DeviceFaults& operator=(const DeviceFaults&) = delete;

  // `nic`: of rule.device. False: there are too many.
  bool Add(const DeviceRule& rule, uint32_t id, std::optional<uint32_t> nic);
  // Rows as FaultStage::List.
  void List(nlohmann::json* rows) const;
  // Removes rule `id`, or all with 0. What `ended` gets has to be undone (a device
  // comes back).
  uint32_t Clear(uint32_t id, std::vector<DeviceRule>* ended);

  CompletionFault OnCompletion(const FaultSubject& subject, const transport::Completion& completion,
                               transport::Time now);
  // The errno with which a call fails; 0: it goes on.
  int OnVerb(uint16_t verb, const FaultSubject& subject, transport::Time now);
  // A step of the connection manager ends with an event: its status, or nothing.
  std::optional<int32_t> OnCm(uint8_t event, const FaultSubject& subject, transport::Time now);

  // Rules whose time has come, in order of the times. Each comes once when it begins
  // and, if DeviceRule::is_undone() and with us=, once when it ends.
  struct Due {
    DeviceRule rule;
    uint32_t id = 0;
    std::optional<uint32_t> nic;
    bool ends = false;
  };
  std::vector<Due> TakeDue(transport::Time now);
  transport::Time next_due() const;

  // Whether a rule (of qp_error, event) means this one; without counting.
  static bool Means(const Due& due, const FaultSubject& subject);
  void CountHit(uint32_t id, const FaultSubject& subject, transport::Time now);

  // Calls visit(event) for the last hits, oldest first, with the lock.
  void ForEachHit(const std::function<void(const TraceEvent&)>& visit) const;

 private:
  static constexpr size_t kTraceEvents = 4096;

  struct ActiveRule {
    DeviceRule rule;
    uint32_t id = 0;
    std::optional<uint32_t> nic;
    uint64_t generator = 0;
    uint64_t selected = 0;
    uint64_t hits = 0;
    std::optional<transport::Time> added;  // of the first look with a time
    bool begun = false;                    // of a timed rule
    bool ended = false;

    bool is_timed() const;
  };

  bool Matches(ActiveRule* active, const FaultSubject& subject, transport::Time now) const;
  bool Selects(ActiveRule* active);
  void Hit(ActiveRule* active, const FaultSubject& subject, transport::Time now);
  void UpdateKinds();

  std::atomic<uint32_t> kinds_{0};
  std::atomic<uint32_t> checked_verbs_{0};
  mutable std::mutex mutex_;  // what follows
  std::list<ActiveRule> rules_;
  TraceRing trace_{kTraceEvents};
};

}  // namespace verbena::nic
