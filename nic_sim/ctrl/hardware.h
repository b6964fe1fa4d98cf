// SPDX-License-Identifier: Apache-2.0
//
// The device as the control server sees it. One implementation stands over nic_sim/device; tests
// bring their own, so that the server is tested without DPDK.
//
// Thread: any, as at Device; no lock of a context is held.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/device/context.h"
#include "nic_sim/trace/trace_ring.h"

namespace verbena::nic {

struct CaptureCounts {
  uint64_t packets = 0;
  uint64_t missed = 0;
  int error = 0;  // errno of the write that ended it
};

class CmService;

class Hardware {
 public:
  virtual ~Hardware() = default;

  // Constant since the start.
  virtual size_t nic_count() const = 0;
  virtual abi::EngineMode mode() const = 0;
  virtual uint32_t thread_count() const = 0;
  virtual int status_page_fd() const = 0;  // read-write
  virtual int status_page_readonly_fd() const = 0;

  virtual NicInfo nic_info(size_t nic) const = 0;

  // Device::WatchNics.
  virtual void WatchNics(std::function<void(uint32_t nic, NicChange change)>) {}

  // See Device.
  virtual int OpenContext(const abi::Hello& hello, ClientIdentity client, abi::HelloReply* reply,
                          int* context_fd, Context** context, std::string* why) = 0;
  virtual void CloseContext(Context* context) = 0;

  // The connection manager; null: there is none, and no rdma_cm device. Constant.
  virtual CmService* cm() { return nullptr; }

  // {"items": […]} of one user or of all; null: unknown `what`.
  virtual nlohmann::json List(std::string_view what, std::optional<uid_t> user) const = 0;
  // {"devices": {…}}; `device` empty: all; null: unknown.
  virtual nlohmann::json Counters(std::string_view device) const = 0;
  virtual nlohmann::json Dump() const = 0;
  // Device::Trace.
  virtual nlohmann::json Trace(std::optional<uint32_t> qpn, int64_t after_ns,
                               size_t limit) const = 0;
  // Device::TraceEvents.
  virtual std::vector<TraceEvent> TraceEvents() const { return {}; }

  // Fault rules: id > 0, or 0 with a sentence and the key that is wrong (empty: none).
  virtual uint32_t AddRule(std::string_view text, std::string* error, std::string* field) = 0;
  virtual nlohmann::json ListRules() const = 0;  // array
  virtual uint32_t ClearRules(uint32_t id) = 0;  // 0: all

  // Packets that rules `hold` (rule `id`, or all with 0) have: lets the `count` oldest go and gives
  // their number; array of what waits.
  virtual size_t ReleaseHeld(uint32_t /*id*/, size_t /*count*/) { return 0; }
  virtual nlohmann::json ListHeld() const { return nlohmann::json::array(); }

  // Captures into `fd` (taken over); `device` empty: all; `qpn` 0: all. id > 0, or 0 with a
  // sentence.
  virtual uint32_t StartCapture(int fd, std::string_view device, bool before_faults, uint64_t count,
                                uint32_t qpn, std::string* error) = 0;
  // Its count is reached, or its file takes nothing more.
  virtual bool CaptureDone(uint32_t id) const = 0;
  // Ends it. What is returned waits until all is written; call it once.
  virtual std::function<CaptureCounts()> DetachCapture(uint32_t id) = 0;
};

}  // namespace verbena::nic
