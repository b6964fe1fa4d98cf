// SPDX-License-Identifier: Apache-2.0
//
// Device: all simulated hardware of one daemon: NICs with their ports, QP and
// key tables, the fabric, and the engine threads that run them. Context: one
// opened device of one application, with its objects.
//
// Users: the contexts of one user are in one shard of the engine. Root's and the
// daemon's own user's are in the first; a system-wide daemon has one for each
// other user, so that nobody waits for memory of somebody else.
//
// Thread: any; opening and closing contexts of one user, one at a time. No lock
// of a context is held. Errors are positive errno values, 0 is success; what
// each means is in the man page of the verb.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/device/context.h"
#include "nic_sim/fabric/fabric.h"
#include "nic_sim/port/port_options.h"
#include "nic_sim/trace/trace_ring.h"
#include "transport/base/time.h"

namespace verbena::nic {

struct DeviceOptions {
  std::string instance = "default";
  std::string run_folder;
  uint32_t nics = 1;
  uint32_t host = 0;
  bool system = false;  // other users may come
  bool strict = false;
  bool hugepages = false;
  bool pci = false;
  bool telemetry = false;
  // 0: choose by the CPUs that this process may use.
  uint32_t engine_threads = 0;
  // Of NIC n. Its addresses are its GIDs from index 1 on (index 0 is
  // link-local), at most 15. None: those of the netdev that it is joined to, or
  // 127.88.HOST.(n+1).
  std::vector<NicOptions> nic_options;
  // kManual: no threads and no clock; passes are made by RunPass (tests).
  // Not 0: QPNs and keys are the same in each run (tests).
  uint64_t seed = 0;
  enum class Mode { kAuto, kThreadPerCpu, kSpinning, kManual } mode = Mode::kAuto;
};

struct DeviceRule;   // nic_sim/faults/device_rule.h
class DeviceFaults;  // nic_sim/faults/device_faults.h

class Device {
 public:
  // Starts EAL and the engine threads. nullptr with a sentence in *error.
  static std::unique_ptr<Device> Start(const DeviceOptions& options, std::string* error);
  ~Device();  // stops the threads; contexts must be closed

  size_t nic_count() const;
  NicInfo nic_info(size_t index) const;
  const abi::DeviceAttributes& attributes(size_t nic) const;
  abi::EngineMode mode() const;
  uint32_t thread_count() const;

  // memfds that every client gets, owned by the device; a context has the others.
  int status_page_fd() const;           // read-write, for the supervisor
  int status_page_readonly_fd() const;  // for clients

  // Whether two users' contexts are kept apart: the same number, the same shard.
  static uid_t UserOf(uid_t uid);

  // Opens device `hello.device_index` for a client whose Hello is already
  // checked for magic, version and sizes. Fills cookie and attributes of
  // *reply and gives the context memfd (owned by the caller). On error nothing
  // is kept but *why has a sentence.
  int OpenContext(const abi::Hello& hello, ClientIdentity client, abi::HelloReply* reply,
                  int* context_fd, Context** context, std::string* why);
  // Frees the context with all its objects. QPs vanish without a word, as with
  // a host that lost power.
  void CloseContext(Context* context);
  size_t context_count() const;

  Fabric& fabric();
  // From the first shard's pool, for the caller to send; nullptr: none is free. Any
  // thread.
  rte_mbuf* NewPacket();

  // Listings leave out, and name in "held_up" (uids), users whose shard does not
  // give its lock for a while: their memory does not answer.
  // {"items": […]} of `what`: context, pd, mr, cq, qp; of one user or of all.
  // Unknown: null.
  nlohmann::json List(std::string_view what, std::optional<uid_t> user = {}) const;
  // {"devices": {…}}; `device` empty: all. Unknown device: null.
  nlohmann::json Counters(std::string_view device) const;
  nlohmann::json Dump() const;
  // {"events": [...]}, oldest first: the last `limit` of QP `qpn` (of all without) that are later
  // than `after_ns`, and hits of fault rules on its packets.
  nlohmann::json Trace(std::optional<uint32_t> qpn, int64_t after_ns, size_t limit) const;
  // All of them as they are, in no order; the locks are held for no longer than a copy takes.
  std::vector<TraceEvent> TraceEvents() const;

  // With Mode::kManual: one pass of each shard at the time `now`, which does not
  // go back. Takes their locks. True: there is more to do at the same time.
  bool RunPass(transport::Time now);

  // Fault rules of packets and of the device, one list (docs/FAULTS.md). Add gives the id
  // (> 0), or 0 with a sentence and, if one is wrong, the key in *field.
  uint32_t AddRule(std::string_view text, std::string* error, std::string* field = nullptr);
  nlohmann::json ListRules() const;
  // Removes rule `id`, or all with 0, and what it does; gives the number removed.
  uint32_t ClearRules(uint32_t id);
  DeviceFaults& faults();
  // A rule has taken the NIC out. No context of it can be opened then.
  bool present(size_t nic) const;
  // Is told of what rules do to NICs, from any thread. Contexts of a NIC that is gone
  // say so (Context::removed) and have to be closed.
  void WatchNics(std::function<void(uint32_t nic, NicChange change)> watcher);
  // Does what rules want at a time; kManual: RunPass does it.
  void RunTimedFaults(std::optional<transport::Time> at = {});

  // Wakes the engine, as a doorbell does: after changes of the fabric's rules
  // that may have released packets.
  void Kick();

 private:
  Device();
  void UpdateCheckedVerbs();
  void SetPresent(uint32_t nic, bool present);
  // Of a rule gid_change that begins or ends. For programs the table has changed already
  // when the event arrives.
  void ChangeGid(const DeviceRule& rule, uint32_t nic, bool ends);
  void Announce(uint32_t nic, NicChange change);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace verbena::nic
